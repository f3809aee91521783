"""One plan in seven dialects: compared with golden files, word for word. DRAFTPROOF_GOLDEN=write writes them anew."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftproof.cli import commands
from draftproof.config import SpeculationConfig
from draftproof.drafters import DRAFTERS
from draftproof.errors import OptionError
from draftproof.models.load import builtin
from draftproof.remote.dialects import DIALECTS, export_config
from draftproof.remote.plan import DEPTH, Plan, Schedule, short_names

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    "off": {"drafter": "none"},
    "ngram": {"drafter": "ngram:min=2,max=3", "depth": 5},
    "suffix": {"drafter": "suffix", "depth": 8},
    "model": {"drafter": "model:org/draft", "depth": 3},
    "model-by-batch": {"drafter": "model:org/draft", "schedule": "1:5,8:3,32:0"},
    "pard": {"drafter": "pard:org/pard", "depth": 6},
    "eagle": {"drafter": "eagle:org/eagle", "depth": 4, "rule": "ratio"},
    "eagle2-tree": {"drafter": "eagle2:org/eagle", "depth": 5, "tree": 24},
    "eagle3": {"drafter": "eagle3:org/eagle3", "depth": 4},
    "eagle3-block": {"drafter": "eagle3:org/eagle3", "depth": 4, "rule": "block"},
    "eagle3-tree": {"drafter": "eagle3:org/eagle3", "depth": 4, "tree": 15},
    "peagle": {"drafter": "peagle:org/peagle", "depth": 6},
    "mtp": {"drafter": "mtp:org/mtp", "depth": 2},
    "assistant": {"drafter": "assistant:org/assistant", "depth": 4},
    "medusa": {"drafter": "medusa:org/medusa", "depth": 3},
    "dflash": {"drafter": "dflash:org/dflash", "depth": 7},
    "dflash2": {"drafter": "dflash2:org/dflash2", "depth": 7},
    "dspark": {"drafter": "dspark:org/dspark", "depth": 7},
    "domino": {"drafter": "domino:org/domino", "depth": 7},
    "xpress": {"drafter": "xpress:org/xpress", "depth": 15},
    "layer-skip": {"drafter": "layer-skip:exit=4", "depth": 3},
    "chain": {"drafter": "ngram+eagle3:org/eagle3", "depth": 4},
}


def plan(drafter: str, schedule: str | None = None, target: str = "org/target", **settings: Any) -> Plan:
    return Plan.of(target, SpeculationConfig(drafter=drafter, **settings), None if schedule is None else Schedule.of(schedule))


@pytest.mark.parametrize("engine", DIALECTS)
def test_golden(engine: str) -> None:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = export_config(plan(**case), engine).as_dict()
        except OptionError as error:
            found[name] = {"refused": str(error)}
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    file = GOLDEN / f"{engine}.json"
    if os.environ.get("DRAFTPROOF_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("engine", DIALECTS)
def test_refusals_name_every_drafter_that_is_taken(engine: str) -> None:
    told = set(re.findall(r"[\w-]+", importlib.import_module(DIALECTS[engine].__module__).ABLE))
    for case in CASES.values():
        asked = plan(**case)
        try:
            export_config(asked, engine)
        except OptionError:
            continue
        assert {part.name for part in asked.parts} <= told


def flags(engine: str, **case: Any) -> dict[str, str]:
    words = list(export_config(plan(**case), engine).command)
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


@pytest.mark.parametrize("k", [1, 4, 7])
def test_who_counts_the_root(k: int) -> None:
    case: dict[str, Any] = {"drafter": "eagle3:org/head", "depth": k}
    assert json.loads(flags("vllm", **case)["--speculative-config"])["num_speculative_tokens"] == k
    sglang = flags("sglang", **case)
    assert (sglang["--speculative-num-steps"], sglang["--speculative-num-draft-tokens"]) == (str(k), str(k + 1))
    assert f"max_draft_len: {k}\n" in export_config(plan(**case), "trtllm").files["spec.yaml"]
    assert flags("max", **case)["--num-speculative-tokens"] == str(k)


def test_taps_are_counted_as_each_engine_counts(tmp_path: Path) -> None:
    ours, entered = tmp_path / "ours", tmp_path / "entered"
    for folder, config in ((ours, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}),
                           (entered, {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        yaml = export_config(plan(f"eagle3:{folder}", depth=3), "trtllm").files["spec.yaml"]
        assert "eagle3_layers_to_capture: [1, 4, 8]" in yaml
    assert any("layers entered" in note for note in export_config(plan(f"eagle3:{ours}"), "vllm").notes)
    assert not any("layers entered" in note for note in export_config(plan(f"eagle3:{entered}"), "vllm").notes)


@pytest.mark.parametrize(("config", "depth", "written"), [
    ({"num_nextn_predict_layers": 2}, 5, 4), ({"num_nextn_predict_layers": 2}, 4, 4), ({"num_nextn_predict_layers": 3}, 2, 2),
    ({"text_config": {"mtp_num_hidden_layers": 3}}, 7, 6), ({"num_nextn_predict_layers": 1}, 5, 5), ({}, 5, 5),
])
def test_vllm_takes_multiples_of_the_layers_of_an_mtp_head(config: dict[str, Any], depth: int, written: int, tmp_path: Path) -> None:
    """It refuses to start with another number above that of the layers."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for wish in (plan("mtp", target=str(tmp_path), depth=depth), plan(f"mtp:{tmp_path}", depth=depth)):
        found = export_config(wish, "vllm")
        assert json.loads(found.command[4])["num_speculative_tokens"] == written
        assert any(f"{written} is written" in note for note in found.notes) == (written != depth)


def test_what_cannot_be_expressed_is_said() -> None:
    done = export_config(plan("model:org/draft", rule="match"), "vllm")
    assert any("depth auto" in note and str(DEPTH) in note for note in done.notes) and any("rule match" in note for note in done.notes)
    with pytest.raises(OptionError, match="one drafter at a time.*export one of ngram, model"):
        export_config(plan("ngram+model:org/draft"), "sglang")
    with pytest.raises(OptionError, match="medusa heads were removed in 0.33"):
        export_config(plan("medusa:org/head"), "vllm")
    with pytest.raises(OptionError, match="lossy-typical"):
        export_config(plan("ngram", rule="lossy-typical"), "vllm")
    for wrong in ("2:3", "1:3,1:2", "1", "1:x", "1:4,8:2,4:1"):
        with pytest.raises(OptionError, match="depth by batch"):
            Schedule.of(wrong)


def differs(engine: str, one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, str]:
    """Whether two settings are written differently, and the notes of the first; nothing to say where one is refused."""
    try:
        a, b = (export_config(plan(**case), engine) for case in (one, other))
    except OptionError:
        return True, ""
    return (a.command, dict(a.files)) != (b.command, dict(b.files)), "\n".join(a.notes)


@pytest.mark.parametrize("engine", DIALECTS)
def test_nothing_is_lost_without_a_word(engine: str) -> None:
    for name, kind in DRAFTERS.items():
        if name in ("none", "custom"):
            continue
        own = {key: 5 for key in kind.keys if key == "exit"}
        for key in kind.keys:
            spec, other = (f"{name}:" + ",".join(f"{k}={v}" for k, v in {**own, key: value}.items()) for value in (3, 4))
            heard, notes = differs(engine, {"drafter": spec, "depth": 4}, {"drafter": other, "depth": 4})
            assert heard or f"{name}:{key}=3" in notes, (spec, notes)
        spec = f"{name}:org/x" if kind.takes_path else f"{name}:exit=5" if own else name
        base = {"drafter": spec, "depth": 4}
        for changed, word in (({"depth": 2}, "depth 2"), ({"tree": 12}, "tree")):
            heard, notes = differs(engine, {**base, **changed}, base)
            assert heard or word in notes, (spec, changed, notes)
        heard, notes = differs(engine, {"drafter": spec, "schedule": "1:4,8:2"}, base)
        assert heard or "a depth by batch size" in notes or "per-batch-size" in notes, (spec, notes)
    assert not any("counterpart" in note and "rule" not in note for note in export_config(plan("suffix:max=9", depth=2), "vllm").notes)


def test_a_schedule_says_every_depth() -> None:
    with pytest.raises(OptionError, match="depth=7 with a depth by batch"):
        plan("ngram", "1:2", depth=7)
    with pytest.raises(OptionError, match="depth by batch with drafter none"):
        plan("none", "1:2")


def test_adaptive_steps_are_written_for_those_that_have_them() -> None:
    for drafter in ("eagle:org/x", "eagle3:org/x"):
        assert "adaptive.json" in export_config(plan(drafter, "1:4,8:2"), "sglang").files
    for drafter in ("ngram", "model:org/x", "mtp:org/x"):
        done = export_config(plan(drafter, "1:4,8:2"), "sglang")
        assert not done.files and "--speculative-adaptive" not in done.command and any("adaptive mode" in note for note in done.notes)


def test_two_models_are_two_files() -> None:
    case = {"drafter": "model:other/target", "depth": 3}
    words = export_config(plan(**case), "llamacpp").command
    assert words[words.index("-m") + 1] == "org-target.gguf" and words[words.index("--spec-draft-model") + 1] == "other-target.gguf"
    done = export_config(plan(**case), "openvino")
    assert '"org-target-openvino"' in done.files["run.py"] and '"other-target-openvino"' in done.files["run.py"]
    assert any("-m org/target org-target-openvino" in note for note in done.notes)
    assert short_names(["a/x", "b/y"]) == {"a/x": "x", "b/y": "y"} and short_names(["a/x/", "a/x"]) == {"a/x/": "x", "a/x": "x"}
    assert len(set(short_names(["a/b-c", "a-b/c"]).values())) == 2


def test_llamacpp_reads_a_flag_once() -> None:
    words = export_config(plan("ngram+model:org/x", depth=3), "llamacpp").command
    assert len([word for word in words if word.startswith("--")]) == len({word for word in words if word.startswith("--")})
    for chain, flag in (("model:a/x+eagle3:b/y", "--spec-draft-model"), ("ngram:max=3+ngram:max=5", "--spec-ngram-simple-size-n")):
        with pytest.raises(OptionError, match=f"reads {flag} once"):
            export_config(plan(chain, depth=3), "llamacpp")


def test_an_mtp_head_alone_is_said_to_belong_into_a_checkpoint(tmp_path: Path) -> None:
    """The built-in one is alone, a name of the hub and a checkpoint with a head are not known to be."""
    for engine in ("vllm", "sglang", "trtllm"):
        notes = [any("an mtp head alone" in note for note in export_config(plan(drafter, depth=1), engine).notes)
                 for drafter in (f"mtp:{builtin('mtp')}", "mtp:org/x", f"mtp:{builtin('target')}", "mtp")]
        assert notes == [True, False, False, False]


def test_two_vocabularies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    case = {"drafter": f"model:{tmp_path}", "target": str(builtin("target"))}
    assert json.loads(flags("vllm", **case)["--speculative-config"])["use_heterogeneous_vocab"] is True
    assert "assistant_tokenizer" in export_config(plan(**case), "transformers").files["run.py"]


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    arguments = ["export", "config", "--drafter", "ngram", "--depth", "3"]
    done = run(commands, [*arguments, "--to", "vllm", "--json", "--", "--tensor-parallel-size", "2"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"] == "vllm" and "0.33" in found["version"]
    wanted = Plan.of(str(builtin("target")), SpeculationConfig(drafter="ngram", depth=3))
    told = list(export_config(wanted, "vllm").command)
    assert found["command"] == [*told, "--tensor-parallel-size", "2"]
    for words in ([], ["--"]):                           # nothing of this command's own goes with it
        done = run(commands, [*arguments, "--to", "vllm", "--json", *words])
        assert json.loads(done.stdout.splitlines()[-1])["command"] == told
    done = run(commands, [*arguments, "--to", "trtllm", "--out", str(tmp_path / "new")])
    assert done.exit_code == 0 and "decoding_type" in (tmp_path / "new" / "spec.yaml").read_text()
    assert os.access(tmp_path / "new" / "run.sh", os.X_OK)
    with pytest.raises(OptionError, match="not empty"):
        run(commands, [*arguments, "--to", "trtllm", "--out", str(tmp_path / "new")], catch_exceptions=False)


def test_transformers_accepts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for i, drafter in enumerate(("none", "ngram:max=3", "model", "layer-skip:exit=4")):
        settings = {} if drafter == "none" else {"depth": 3}
        export_config(plan(drafter, target=str(builtin("target")), **settings), "transformers").write(tmp_path / str(i))
        monkeypatch.setattr(sys, "argv", ["run.py", "def add(a, b):\n    return", "12"])
        runpy.run_path(str(tmp_path / str(i) / "run.py"))
        said = capsys.readouterr()
        assert "not valid" not in said.err and "ignored" not in said.err
        texts.append(said.out)
    assert texts[0].strip() and len(set(texts)) == 1


def test_what_stands_before_the_dashes_is_ours() -> None:
    for words in (["--drafer", "ngram"], ["--drafter", "ngram", "--depht", "4"], ["--drafter", "ngram", "word"]):
        done = CliRunner().invoke(commands, ["export", "config", "--to", "vllm", "--target", "org/t", *words])
        assert done.exit_code == 2 and words[-2 if len(words) == 2 else -1 if words[-1] == "word" else 2] in done.output, done.output


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    words = ["export", "config", "--to", "vllm", "--drafter", "eagle3", "--depth", "2", "--out", str(tmp_path / "out")]
    with pytest.raises(OptionError, match="lossy-typical"):
        CliRunner().invoke(commands, [*words, "--rule", "lossy-typical"], catch_exceptions=False)
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(commands, words, catch_exceptions=False).exit_code == 0
