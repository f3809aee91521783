"""The command from end to end on a tiny target: every kind of drafter is trained, published, loaded and served."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from train.processes import finish, start
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.cli import run
from draftproof.commands import console
from draftproof.config import LoadConfig
from draftproof.engine.engine import Engine
from draftproof.models.causal import CausalLM
from draftproof.models.load import builtin, load_target
from draftproof.train import card
from draftproof.train.corpus import Text
from draftproof.train.families import Wish
from draftproof.train.features import Tapper
from draftproof.train.place import identity
from draftproof.types import Sampling

V = 61
KINDS = ("eagle", "eagle3", "medusa", "hydra", "mlp", "mtp", "dflash", "dflash2", "dspark", "domino", "xpress", "pard", "model", "peagle")
MORE = {"eagle3": ["--draft-vocab", "40", "--depth", "3"], "medusa": ["--draft-vocab", "40"], "mlp": ["--shared"],
        "pard": ["--mask-token", "60", "--depth", "3"], "peagle": ["--mask-token", "60", "--depth", "3", "--layers", "2"]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
                                         num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
                                         tie_word_embeddings=False))
    model.lm_head.weight.data *= 10
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "traffic.jsonl"
    lines = [{"prompt_token_ids": [i % 7, 3, 5, i % 11], "token_ids": [1], "max_tokens": 24} for i in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def command(kind: str, target: Path, log: Path, out: Path, *more: str) -> list[str]:
    init = ["--init", str(target)] if kind in ("pard", "model") else []
    return ["train", kind, "--target", str(target), "--data", str(log), "--out", str(out), "--batch", "2", "--length", "32",
            "--held-out", "2", "--threads", "1", "--json", *init, *MORE.get(kind, []), *more]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_trained_published_and_served(kind: str, target: Path, log: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / kind
    monkeypatch.setattr(console, "TOLD_S", 0.0)
    assert run(command(kind, target, log, out, "--steps", "12", "--lr", "0.01")) in (0, 3)
    told = capsys.readouterr()
    result = json.loads(told.out.strip().splitlines()[-1])
    assert "12/12 answers" in told.err
    assert result["kind"] == kind and result["rounds"] > 0 and result["drafted"] > 0
    folder = out if result["published"] else out.with_name(f"{kind}.training") / "candidate"
    model = load_target(target, LoadConfig(threads=1, self_test=False))
    sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
    with Engine(model) as plain, Engine(model, f"{kind}:{folder}", 3) as engine:
        assert engine.generate([1, 3, 5, 2], sampling).token_ids == plain.generate([1, 3, 5, 2], sampling).token_ids
        assert engine.speculation.failure == ""


@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="several processes need accelerate")
def test_two_processes_train_one_head(target: Path, log: Path, tmp_path: Path) -> None:
    wish = command("medusa", target, log, tmp_path / "head", "--steps", "6")
    (code, out, said), (other, silent, quiet) = finish(start(2, "-m", "draftproof", *wish))
    assert code in (0, 3) and other == 0, said + quiet
    assert json.loads(out.strip().splitlines()[-1])["rounds"] > 0 and "processes: 2" in said
    assert not silent and "step" not in quiet
    assert (tmp_path / "head" / "config.json").exists() == (code == 0)


def test_a_head_that_is_served_worse_is_not_published(target: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head"
    assert run(command("eagle3", target, log, out, "--steps", "1", "--replaces", f"model:{target}")) == 3     # itself: guesses everything
    assert not out.exists()
    told, candidate = capsys.readouterr(), tmp_path / "head.training" / "candidate"
    assert "not published" in told.err and f"it stays in {candidate}" in told.err and "(95 % over 2 prompts)" in told.err
    assert "so few held-out texts (2)" in told.err
    result = json.loads(told.out)
    assert result["rival"]["drafter"] == f"model:{target}" and result["rival"]["acceptance_length"] > result["acceptance_length"]
    assert result["difference"]["low"] < result["difference"]["high"] and result["folder"] == str(candidate)
    assert (result["steps"], result["texts"], result["held_out"]) == (1, 10, 2)


def test_a_killed_command_ends_with_the_same_head(target: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.train import loop
    from draftproof.train.features import Tapper

    monkeypatch.setattr(loop.Plan, "__init__", _saving_often(loop.Plan.__init__))
    wish = ["--steps", "12", "--lr", "0.01"]
    assert run(command("eagle3", target, log, tmp_path / "whole", *wish)) == 0
    read, count = Tapper.read, iter(range(1000))

    def dies(self: Tapper, texts: object) -> object:
        if next(count) == 7:
            raise KeyboardInterrupt
        return read(self, texts)  # type: ignore[arg-type]

    monkeypatch.setattr(Tapper, "read", dies)
    assert run(command("eagle3", target, log, tmp_path / "torn", *wish)) == 130
    assert not (tmp_path / "torn").exists()
    monkeypatch.setattr(Tapper, "read", read)
    assert run(command("eagle3", target, log, tmp_path / "torn", *wish)) == 0
    whole, torn = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "torn"))
    assert whole == torn


def _saving_often(init: object) -> object:
    def made(self: object, *args: object, **kwargs: object) -> None:
        init(self, *args, **{**kwargs, "save_every": 5})  # type: ignore[operator]

    return made


def test_wrong_wishes_are_one_line(target: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["train", "pard", "--target", str(target), "--data", str(log), "--out", str(tmp_path / "x"), "--threads", "1"]
    assert run(wish) == 2
    assert "--init" in capsys.readouterr().err
    assert run(["train", "abacus", "--data", str(log), "--out", str(tmp_path / "x")]) == 2
    assert run(["train", "eagle3", "--target", str(target), "--data", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_what_would_do_nothing_or_cannot_be_is_told_before_the_target_is_loaded(log: Path, tmp_path: Path,
                                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    packed, init = tmp_path / "log.jsonl.gz", str(tmp_path)
    packed.write_bytes(gzip.compress(log.read_bytes()))
    for kind, wish, said in (
        ("eagle", ["--draft-vocab", "9"], "--draft-vocab does nothing for eagle; it is of eagle3, medusa, peagle"),
        ("mlp", ["--accept-at", "0.5"], "--accept-at does nothing for mlp"), ("mtp", ["--taps", "0"], "--taps does nothing for mtp"),
        ("dflash", ["--shared"], "--shared does nothing"), ("medusa", ["--mask-token", "0"], "--mask-token does nothing"),
        ("eagle3", ["--init", init, "--layers", "2"], "--layers with --init"), ("eagle3", ["--init", init], "no config.json"),
        ("mlp", ["--quantization", "int8"], "cannot teach"), ("mlp", ["--cache-bits", "8"], "cannot teach"),
        ("pard", ["--init", init], "needs --mask-token"),
        ("mlp", ["--lr", "-1"], "above 0"), ("mlp", ["--lr", "nan"], "above 0"), ("mlp", ["--lr", "inf"], "above 0"),
        ("mlp", ["--seed", "-5"], "--seed"), ("mlp", ["--replaces", "modle:x"], "unknown drafter 'modle'"),
        ("mlp", ["--answers", str(tmp_path / "no" / "a.jsonl")], "--answers"), ("mlp", ["--data", str(packed)], "gzip"),
        ("mlp", ["--init", str(builtin("eagle3"))], "eagle3; expected one for mlp: name another folder, or train eagle3"),
        ("eagle2", [], "train eagle, and serve it as eagle2:DIR"), ("mlp", ["--draft-device", "cpu"], "--draft-device does nothing here"),
        ("mlp", ["--mix", os.devnull], "no plain file"),
    ):
        assert run(["train", kind, "--target", "org/unknown", "--data", str(log), "--out", str(tmp_path / "x"), *wish]) in (1, 2)
        told = capsys.readouterr().err
        assert said in told and len(told.strip().splitlines()) == 1, (kind, wish, told)
    assert not (tmp_path / "x.training").exists()


@pytest.mark.parametrize("wish", [["train", "eagle3"], ["extract", "--layers", "1"]])
def test_a_log_that_is_not_there_is_told_before_torch_is_loaded(wish: list[str], tmp_path: Path) -> None:
    program = ("import sys; from draftproof.cli import run; code = run(sys.argv[1:]); "
               "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or '') or code)")
    more = ["--target", str(builtin("target")), "--data", str(tmp_path / "none"), "--out", str(tmp_path / "x")]
    done = subprocess.run([sys.executable, "-c", program, *wish, *more], capture_output=True, text=True)
    assert done.returncode == 1 and "does not exist" in done.stderr and "{" not in done.stderr


def test_an_option_that_is_always_refused_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--dtype" in told and "--quantization" not in told and "--cache-bits" not in told and "--draft-device" not in told
    assert run(["extract", "--help"]) == 0 and "--quantization" in capsys.readouterr().out


def test_a_second_run_from_what_the_first_one_published_trains(target: Path, log: Path, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head"
    wish = [word for word in command("eagle3", target, log, out, "--steps", "6", "--lr", "0.01") if word not in ("--draft-vocab", "40")]
    assert run(wish) == 0
    capsys.readouterr()
    page, made = (out / "README.md").read_text(), card.read(out)
    assert made is not None and made["target"] == identity(target) and made["target"] in page and "- steps: 6" in page
    assert run(wish) == 0
    told = capsys.readouterr()
    assert "nothing is left to learn" in told.err and "stands there already" in told.err and json.loads(told.out)["published"]
    assert run([*wish, "--init", str(out), "--accept-at", "0.8"]) in (0, 3)
    assert "step 6/6" in capsys.readouterr().err and (out / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["medusa", "model"])
def test_what_goes_on_from_another_drafter_is_measured_by_it(kind: str, target: Path, log: Path, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    start = target
    if kind == "medusa":
        start = tmp_path / "first"
        assert run(command("medusa", target, log, start, "--steps", "12", "--lr", "0.01")) == 0
    wish = [word for word in command(kind, target, log, tmp_path / "second", "--steps", "1", "--lr", "3") if word not in MORE.get(kind, [])]
    capsys.readouterr()
    assert run([*wish, *([] if kind == "model" else ["--init", str(start)])]) == 3, "a step so large makes it worse"
    result = json.loads(capsys.readouterr().out)
    assert result["rival"]["drafter"] == f"{kind}:{start}" and not (tmp_path / "second").exists()


def test_a_language_model_that_fills_no_masks_is_no_rival(target: Path, tmp_path: Path) -> None:
    assert Wish(init=target).begun("pard") is None and Wish().begun("model") is None
    CausalLM.read(target).save(tmp_path, pard_token=60)
    assert Wish(init=tmp_path).begun("pard") == f"pard:{tmp_path}"


def test_what_is_left_out_of_a_log_is_told_and_a_long_text_is_cut_to_the_context(target: Path, tmp_path: Path,
                                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    file, unread = tmp_path / "log.jsonl", tmp_path / "unread.jsonl"
    lines: list[object] = [{"prompt_token_ids": [i % 7, 3, i] * 60, "token_ids": [1] * 200} for i in range(6)]
    lines += [{"prompt_token_ids": [1, 900], "token_ids": [1]}, {"messages": [{"role": "user", "content": "hi"}]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unread.write_text('{"foo": 1}\n' * 3, encoding="utf-8")
    wish = [*command("medusa", target, file, tmp_path / "head", "--steps", "1", "--as-logged", "--batch", "1"), "--length", "999"]
    assert run(wish) in (0, 3)
    told = capsys.readouterr().err
    assert "--length 999: the target's context is 256" in told and "2 lines of" in told and "line 7: token id 900" in told
    assert run([*wish[:-2], "--seed", "1", "--mix", str(unread)]) == 1
    told = capsys.readouterr().err
    assert "3 lines of" in told and "--mix" in told and "no known form" in told
    wish = ["extract", "--target", str(target), "--data", str(unread), "--layers", "1", "--threads", "1", "--out", str(tmp_path / "e")]
    assert run(wish) == 1
    told = capsys.readouterr().err
    assert "no known form" in told and "no text that the target can read" in told


def test_a_language_model_with_fewer_tokens_than_the_target_is_refused(target: Path, log: Path, tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    LlamaForCausalLM(LlamaConfig(vocab_size=V - 1, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                 num_key_value_heads=1)).save_pretrained(small)
    for kind, more in (("pard", ["--mask-token", "3"]), ("model", [])):
        wish = ["train", kind, "--target", str(target), "--data", str(log), "--out", str(tmp_path / kind), "--threads", "1", "--as-logged",
                "--init", str(small), *more]
        assert run(wish) == 1 and f"has {V - 1} tokens, the target {V}" in capsys.readouterr().err


def test_a_head_reads_the_layers_that_were_asked_for(target: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command("eagle3", target, log, tmp_path / "head", "--steps", "1", "--taps", "0,2,3,5")) in (0, 3)
    made = [folder for folder in (tmp_path / "head", tmp_path / "head.training" / "candidate") if folder.exists()]
    config = json.loads((made[0] / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3, 5]
    assert run(command("eagle3", target, log, tmp_path / "other", "--steps", "1", "--taps", "1,6")) == 2
    assert "the target has 6 layers; expected numbers from 0 to 5" in capsys.readouterr().err


def test_extract_from_the_command_line(target: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["extract", "--target", str(target), "--data", str(log), "--threads", "1", "--out", str(tmp_path / "states"), "--layers"]
    assert run([*wish, "one"]) == 2
    monkeypatch.setattr(console, "TOLD_S", 0.0)
    assert run([*wish, "1,5", "--json"]) == 0
    told = capsys.readouterr()
    assert "12 texts\n" in told.err and "12 texts in 1 shard:" in told.err
    assert json.loads(told.out)["texts"] == 12 and json.loads(told.out)["shards"] == 1 and json.loads(told.out)["tokens"] > 12
    assert json.loads((tmp_path / "states" / "index.json").read_text())["layers"] == [1, 5]


def test_extracted_states_are_those_of_serving_to_the_bit(tmp_path: Path) -> None:
    served = load_target(builtin("target"), LoadConfig(threads=1, self_test=False))
    if "packed" not in served.facts.reasons["linear layers"].split(":")[0]:
        pytest.skip("this machine packs nothing")
    text = Text(tuple(range(5, 60)), 20)
    (states,) = Tapper(served, (1, 6)).read([text])
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt_token_ids": text.ids[:20], "token_ids": text.ids[20:]}), encoding="utf-8")
    assert run(["extract", "--data", str(log), "--layers", "1,6", "--out", str(tmp_path / "states"), "--threads", "1"]) == 0
    with safe_open(tmp_path / "states" / "shard-00000.safetensors", "pt") as shard:
        assert all(torch.equal(shard.get_tensor(f"0.layer_{layer}"), states.taps[layer]) for layer in (1, 6))
