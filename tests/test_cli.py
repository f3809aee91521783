"""The command line: what it refuses and how, and that what it prints keeps the contract that scripts rely on."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from draftproof.cli import COMMANDS, run
from draftproof.config import LoadConfig
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.load import load_target

ROOT = Path(__file__).parent.parent
Pair = tuple[Path, Path]

GENERATE_KEYS = ["text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "seed", "metrics", "speculation"]
METRIC_KEYS = {
    "rounds", "target_passes", "drafted", "accepted", "acceptance_length", "acceptance_length_drafted", "draft_utilisation", "hazard",
    "passes_saved", "draft_bytes", "kv_tokens_lost", "tokens_per_s", "ttft_s", "tpot_s", "draft_s", "score_s", "verify_s", "other_s",
}
SPECULATION_KEYS = {"state", "drafter", "depth", "rule", "reason"}
SAMPLED = ["--max-tokens", "24", "--seed", "7", "--temperature", "0.8"]
PAIR_CHECKS = {"vocabulary", "merges", "special tokens", "BOS handling", "chat template", "longest context", "self-test"}


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, the one line) of a command that must fail; it may not print a result or a traceback."""
    code = run(list(arguments))
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("draftproof: ")]
    assert captured.out == "" and len(lines) == 1 and "Traceback" not in captured.err, captured
    return code, lines[0]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.parametrize(("arguments", "words"), [
    (["generate"], "one prompt"),
    (["generate", ""], "empty"),
    (["generate", "x\udcff"], "UTF-8"),
    (["generate", "x", "--prompt-ids", "1 2"], "exactly one prompt"),
    (["generate", "--prompt-ids", "1 two"], "token ids"),
    (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
    (["generate", "x", "--temperature", "warm"], "'warm'"),
    (["generate", "x", "--top-p", "0"], "top_p=0.0"),
    (["generate", "x", "--max-tokens", "0"], "max_tokens=0"),
    (["generate", "x", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens=9"),
    (["generate", "x", "--logit-bias", "7"], "token id and a number"),
    (["generate", "x", "--logprobs", "2"], "--json"),
    (["generate", "x", "--stop", ""], "stop"),
    (["generate", "x", "--seed", "-4"], "seed=-4"),
    (["generate", "x", "--depth", "deep"], "auto or an integer"),
    (["generate", "x", "--depth", "4"], "name a drafter"),
    (["generate", "x", "--drafter", "none", "--depth", "4"], "name a drafter"),
    (["generate", "x", "--drafter", "ngram", "--tree", "8", "--rule", "block"], "chains only"),
    (["generate", "x", "--rule", "lucky"], "'lucky'"),
    (["generate", "x", "--dtype", "int3"], "int3"),
    (["generate", "x", "--threads", "0"], "threads=0"),
    (["generate", "x", "--target", "./no/such/folder"], "no such folder"),
    (["generate", "x", "--drafter", "model:./no/such/folder"], "no such folder"),
    (["generate", "x", "--drafter", "model:./no/such/folder+ngram"], "no such folder"),
    (["generate", "x", "--trace", "no/such/folder/trace.jsonl"], "folder does not exist"),
    (["generate", "x", "--trace-level", "full"], "--trace"),
    (["generate", "x", "--beams", "4"], "--beams"),
    (["demo", "--repeats", "0"], "repeats=0"),
    (["paint"], "paint"),
])
def test_wrong_usage_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, line = refused(capsys, *arguments)
    assert code == 2 and words in line, line


def test_refused_before_torch_is_loaded() -> None:
    program = ("import sys; from draftproof.cli import run; code = run(['generate', '', '--drafter', 'ngram']); "
               "sys.exit(code if 'torch' not in sys.modules else 99)")
    assert subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True).returncode == 2


def test_pickle_weights_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    code, line = refused(capsys, "generate", "x", "--target", str(tmp_path))
    assert code == 2 and "pytorch_model.bin" in line and "safetensors" in line


def test_a_file_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    code, line = refused(capsys, "generate", "x", "--target", str(tmp_path / "model.safetensors"))
    assert code == 2 and "found a file" in line


def test_broken_weights_fail_with_exit_1(capsys: pytest.CaptureFixture[str], tiny_pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_pair[0] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    code, line = refused(capsys, "generate", "x", "--target", str(tmp_path))
    assert code == 1 and "weights" in line


@pytest.mark.parametrize("data", [b"", b"caf\xe9 and \xff"])
def test_bad_standard_input(capsys: pytest.CaptureFixture[str], stdin, data: bytes) -> None:
    stdin(data)
    code, line = refused(capsys, "generate", "-")
    assert code == 2 and ("offset 3" in line if data else "empty" in line)


def test_unknown_drafter(capsys: pytest.CaptureFixture[str], tiny_pair: Pair) -> None:
    code, line = refused(capsys, "generate", "x", "--target", str(tiny_pair[0]), "--drafter", "oracle9")
    assert code == 2 and "oracle9" in line


def test_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str], tiny_pair: Pair) -> None:
    code, line = refused(capsys, "generate", "--prompt-ids", "5 " * 9000, "--target", str(tiny_pair[0]))
    assert code == 2 and "8192" in line


def test_token_id_outside_the_vocabulary(capsys: pytest.CaptureFixture[str], tiny_pair: Pair) -> None:
    code, line = refused(capsys, "generate", "--prompt-ids", "5 99999", "--target", str(tiny_pair[0]))
    assert code == 2 and "99999" in line


def test_wrong_pair(capsys: pytest.CaptureFixture[str], tiny_pair: Pair, wordless_draft: Path) -> None:
    code, line = refused(capsys, "generate", "x", "--target", str(tiny_pair[0]), "--drafter", f"model:{wordless_draft}")
    assert code == 1 and "vocabulary" in line


@pytest.fixture(scope="session")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of the same vocabulary size whose special tokens are exchanged."""
    from conftest import make_model, make_tokenizer

    tokenizer = make_tokenizer(special=("<|end|>", "<|assistant|>", "<|user|>"))
    return make_model(tmp_path_factory.mktemp("other") / "draft", tokenizer, 32, 1, seed=3)


@pytest.fixture(scope="session")
def wordless_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of another size without a tokenizer, so that nobody knows what its ids mean."""
    from conftest import make_model, make_tokenizer

    folder = make_model(tmp_path_factory.mktemp("wordless") / "draft", make_tokenizer(vocab_size=310), 32, 1, seed=3)
    for file in folder.glob("*token*"):
        file.unlink()
    return folder


def generate_json(capsys: pytest.CaptureFixture[str], pair: Pair, *more: str) -> dict:
    code = run(["generate", "def add(left", "--target", str(pair[0]), *SAMPLED, "--json", *more])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out.splitlines()[-1])


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "model+ngram"])
def test_json_contract(capsys: pytest.CaptureFixture[str], tiny_pair: Pair, drafter: str) -> None:
    spec = f"model:{tiny_pair[1]}{drafter.removeprefix('model')}" if drafter.startswith("model") else drafter
    out = generate_json(capsys, tiny_pair, "--drafter", spec)
    assert list(out) == GENERATE_KEYS
    assert set(out["metrics"]) == METRIC_KEYS and set(out["speculation"]) == SPECULATION_KEYS
    assert out["completion_tokens"] == len(out["token_ids"]) <= 24 and out["seed"] == 7
    assert out["token_ids"] == generate_json(capsys, tiny_pair)["token_ids"]          # whatever the drafter, the text is the target's


def test_stream_and_facts(capsys: pytest.CaptureFixture[str], tiny_pair: Pair) -> None:
    arguments = ["generate", "def add(left", "--target", str(tiny_pair[0]), *SAMPLED]
    assert run([*arguments, "--drafter", "ngram", "--depth", "3"]) == 0
    streamed = capsys.readouterr()
    assert run([*arguments, "--no-stream"]) == 0
    assert streamed.out == capsys.readouterr().out
    for words in ("tier 1", "invisible to the bit:", "weights", "threads", "seed 7", "acceptance length"):
        assert words in streamed.err
    assert "\x1b" not in streamed.out + streamed.err


def test_samples_logprobs_and_ids(capsys: pytest.CaptureFixture[str], tiny_pair: Pair) -> None:
    out = generate_json(capsys, tiny_pair, "--n", "2", "--logprobs", "3")
    assert len(out["samples"]) == 2 and out["samples"][0]["token_ids"] == out["token_ids"] != out["samples"][1]["token_ids"]
    assert len(out["logprobs"]) == out["completion_tokens"] and all(len(t["top"]) == 3 for t in out["logprobs"])
    assert run(["generate", "--prompt-ids", "5 6 7", "--target", str(tiny_pair[0]), *SAMPLED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 3


def test_standard_input_is_the_prompt(capsys: pytest.CaptureFixture[str], stdin, tiny_pair: Pair) -> None:
    stdin(b"def add(left")
    assert run(["generate", "-", "--target", str(tiny_pair[0]), *SAMPLED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == generate_json(capsys, tiny_pair)["token_ids"]


def test_trace_file(capsys: pytest.CaptureFixture[str], tiny_pair: Pair, tmp_path: Path) -> None:
    from draftproof import read_trace

    file = tmp_path / "trace.jsonl"
    out = generate_json(capsys, tiny_pair, "--drafter", "ngram", "--trace", str(file), "--trace-level", "full")
    kinds = [event.event for event in read_trace(file)]
    assert kinds[0] == "trace_started" and kinds[-1] == "request_done"
    assert kinds.count("round_done") == out["metrics"]["rounds"]


def test_chat_through_a_pipe(capsys: pytest.CaptureFixture[str], stdin, tiny_pair: Pair) -> None:
    stdin(b"hello\n\n/reset\n/paint\nhello\n/exit\nnever read\n")
    options = ["--max-tokens", "6", "--temperature", "0", "--drafter", "ngram", "--ignore-eos"]
    assert run(["chat", "--target", str(tiny_pair[0]), *options]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("6 tokens (length)") == 2 and "forgotten" in captured.err and "/paint" in captured.err
    half = len(captured.out) // 2
    assert captured.out[:half] == captured.out[half:]         # after /reset the same question has the same answer


def test_chat_refuses_bytes_that_are_no_text(capsys: pytest.CaptureFixture[str], stdin, tiny_pair: Pair) -> None:
    stdin(b"\xff\n")
    code, line = refused(capsys, "chat", "--target", str(tiny_pair[0]))
    assert code == 2 and "UTF-8" in line


def test_doctor(capsys: pytest.CaptureFixture[str], tiny_pair: Pair, other_draft: Path, wordless_draft: Path) -> None:
    assert run(["doctor", "--target", str(tiny_pair[0]), "--drafter", f"model:{tiny_pair[1]}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] and {check["name"] for check in document["checks"]} >= PAIR_CHECKS
    assert run(["doctor", "--target", str(tiny_pair[0]), "--drafter", f"model:{other_draft}"]) == 0
    assert "ok    vocabulary: another one than the target's; 300 of its 300 tokens are the target's too" in capsys.readouterr().out
    assert run(["doctor", "--target", str(tiny_pair[0]), "--drafter", f"model:{wordless_draft}"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  vocabulary" in out and "drafter has no tokenizer" in out and "cannot be used" in out


def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_weights: Path, tmp_path: Path) -> None:
    monkeypatch.setattr("draftproof.models.load.WEIGHTS", tiny_weights)
    trace = tmp_path / "trace.jsonl"
    assert run(["demo", "--quick", "--tokens", "12", "--prompts", "1", "--trace", str(trace), "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["arm"] for cell in cells} == {"off", "ngram", "model", "eagle3"} and all(cell["identical"] for cell in cells)
    assert {cell["class"] for cell in cells} == {"code", "data", "all"}
    assert trace.read_text().count('"event":"request_started"') == 4 * 2 * 2, "arms, prompts, temperatures: no warm-up"
    assert run(["demo", "--quick", "--tokens", "8", "--prompts", "1", "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "identical to off" in out and out.rstrip().splitlines()[-1].startswith("Verdict: all")


def test_the_page_of_the_demo_is_not_its_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    page.write_text("a page")
    code, line = refused(capsys, "demo", "--quick", "--trace", str(page))
    assert code == 2 and "x.jsonl" in line and page.read_text() == "a page"


def test_demo_ends_with_3_when_a_token_differs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_weights: Path,
                                                tmp_path: Path) -> None:
    from dataclasses import replace

    from draftproof.bench import run as bench

    honest = bench.timed

    def cheat(arm: bench.Arm, *more):
        done = honest(arm, *more)
        return replace(done, token_ids=(1, 2)) if arm.name == "ngram" else done

    monkeypatch.setattr("draftproof.models.load.WEIGHTS", tiny_weights)
    monkeypatch.setattr(bench, "timed", cheat)
    assert run(["demo", "--quick", "--tokens", "8", "--prompts", "1", "--trace", str(tmp_path / "t.jsonl")]) == 3
    captured = capsys.readouterr()
    assert "not identical to speculation off: ngram" in captured.err and "some tokens differ" in captured.out


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Pair) -> Path:
    """A folder like the packaged one, with the tiny pair in it and a head that has learnt nothing."""
    folder = tmp_path_factory.mktemp("weights")
    Eagle3Head.fresh(load_target(str(tiny_pair[0]), LoadConfig(self_test=False, packed=False)).parts).save(folder / "eagle3")
    for name, place in zip(("target", "draft"), tiny_pair, strict=True):
        (folder / name).symlink_to(place)
    prompts = [{"class": "code", "prompt": "def add(left"}, {"class": "data", "prompt": '{"name": "fox"}, {"name":'}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def start(pair: Pair) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "draftproof", "generate", "def add(left", "--target", str(pair[0])]
    command += ["--max-tokens", "8000", "--ignore-eos"]                       # seconds of text, so that there is a middle
    # What a shell runs in the background ignores SIGINT, and so would this child.
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def test_interrupt_in_the_middle(tiny_pair: Pair) -> None:
    with start(tiny_pair) as process:
        assert process.stdout is not None
        process.stdout.read(1)                                # the text has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=150)
    assert process.returncode == 130 and b"interrupted" in err and b"Traceback" not in err


def test_a_reader_that_leaves(tiny_pair: Pair) -> None:
    with start(tiny_pair) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1 and b"Traceback" not in err and b"Error" not in err


def test_help_is_quick_and_shows_the_dataclass_defaults() -> None:
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "draftproof", "generate", "--help"], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "[default: 256]" in done.stdout and "[default: match]" in done.stdout
    assert time.monotonic() - before < 5


def test_a_terminal_of_another_encoding_costs_no_result() -> None:
    done = subprocess.run([sys.executable, "-m", "draftproof", "generate", "--help"],
                          env={**environment(), "PYTHONIOENCODING": "latin-1"}, capture_output=True, encoding="latin-1")
    assert done.returncode == 0 and "A+B \\u2026" in done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_names_one_default(name: str) -> None:
    command = COMMANDS[name]
    for parameter in [each for one in (command, *getattr(command, "commands", {}).values()) for each in one.params]:
        assert isinstance(parameter, click.Argument) or parameter.help, f"{name} --{parameter.name} has no help"  # type: ignore[attr-defined]
        help = getattr(parameter, "help", None) or ""
        assert help.count("[default:") <= 1 and "[default: ]" not in help, f"{name} --{parameter.name}: {help}"
        shown = getattr(parameter, "show_default", None)                # which click puts in brackets, as nobody would write it
        assert not isinstance(shown, str), f"{name} --{parameter.name}: [default: ({shown})]"


@pytest.mark.parametrize(("command", "words"), [
    ("generate", "json|schema:FILE|regex:TEXT|lark:FILE"), ("audition", "N|traced"), ("advise", "N,M,…"), ("serve", "SHARE|shadow")])
def test_help_has_words_as_they_are_taken(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert words in capsys.readouterr().out
