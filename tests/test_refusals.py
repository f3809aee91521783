"""What a command is asked in vain, or would lose a file by, is refused before anything is loaded; and streams that the shell closed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.cli import run
from draftproof.config import BenchConfig

SRC = Path(__file__).parent.parent / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC)}


@pytest.mark.parametrize(("arguments", "words"), [
    (["generate", "x", "--tree", "8"], "--tree 8 without a drafter"),
    (["generate", "x", "--rule", "block"], "--rule block without a drafter"),
    (["chat", "--tree", "8"], "--tree 8 without a drafter"),
    (["generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias for token 5 twice"),
    (["generate", "x", "--threads", "100000"], "threads=100000: expected an integer from 1 to"),
    (["generate", "x", "--trace", __file__ + "/x"], "is a file; expected a folder"),
    (["bench", "--model", "m"], "--model or --api-key-file without --url"),
    (["bench", "--synthetic", "8,8,2", "--each", "1"], "--each with --synthetic"),
    (["bench", "--temperature", "nan"], "temperature=nan"),
    (["bench", "--seed", "-3"], "seed=-3"),
    (["prove", "--temperature", "-1"], "temperature=-1"),
    (["prove", "--seed", "-1"], "seed=-1"),
    (["prove", "--model", "m"], "--model or --api-key-file without --url"),
    (["prove", "--level", "rule", "--workload", "w.jsonl"], "--workload with --level rule: only level run"),
    (["prove", "--level", "run", "--tasks", "t.jsonl"], "--tasks with --level run: only level task"),
    (["demo", "--seed", "-1"], "seed=-1"),
])
def test_what_would_do_nothing_or_fail_later(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and words in said.err, said.err


@pytest.mark.parametrize("command", [
    ["bench", "--workload", "IN", "--csv", "IN"],
    ["bench", "--workload", "IN", "--html", "same", "--csv", "same"],
    ["prove", "--workload", "IN", "--html", "IN"],
    ["prove", "--tasks", "IN", "--html", "IN"],
    ["generate", "x", "--drafter", "prediction", "--prediction", "IN", "--trace", "IN"],
    ["generate", "x", "--grammar", "lark:IN", "--trace", "IN"],
    ["serve", "--api-key-file", "IN", "--trace", "IN"],
])
def test_nothing_is_written_over_what_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]) -> None:
    held = tmp_path / "held"
    held.write_text("dear to somebody\n")
    assert run([word.replace("IN", str(held)) if word != "same" else str(tmp_path / word) for word in command]) == 2
    assert "would be lost" in capsys.readouterr().err and held.read_text() == "dear to somebody\n"


def test_as_many_repeats_as_are_asked_for() -> None:
    assert [BenchConfig(**given).most for given in ({}, {"repeats": 6}, {"most_repeats": 3})] == [5, 6, 3]


@pytest.mark.parametrize(("closed", "code", "words"), [
    ("<&-", 2, "the prompt is empty"), (">&-", 1, "standard output is closed"), ("2>&-", 2, ""),
])
def test_streams_that_the_shell_closed(closed: str, code: int, words: str) -> None:
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "draftproof", "generate", "-"],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr and "unforeseen" not in done.stderr, done


def test_an_interruption_while_commands_are_read() -> None:
    """The first import of theirs is interrupted, as Ctrl-C right after the start does."""
    program = ("import sys; from draftproof import __main__ as program\n"
               "class Interrupted:\n    def find_spec(self, name, *more):\n        if name == 'draftproof.cli': raise KeyboardInterrupt\n"
               "sys.meta_path.insert(0, Interrupted()); program.main()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (130, "draftproof: interrupted\n")


def test_a_conversation_on_a_terminal_is_written_into_a_file_without_prompts(tmp_path: Path) -> None:
    program = ("import sys; from draftproof.commands.chat import read_line\n"
               "while (line := read_line()) is not None: print('answer to', line)")
    near, far = pty.openpty()
    with (tmp_path / "answers").open("w") as answers:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=far, stdout=answers, stderr=subprocess.PIPE, text=True,
                                   env=ENVIRONMENT)
        os.write(near, b"one\ntwo\n\x04")
        _, said = process.communicate(timeout=60)
    os.close(near)
    os.close(far)
    assert (tmp_path / "answers").read_text() == "answer to one\nanswer to two\n" and said.startswith("> > > ")


def test_a_demonstration_without_files(tmp_path: Path) -> None:
    from draftproof.commands.demo import page_of

    assert page_of(Path(os.devnull)) is None and page_of(tmp_path / "t.jsonl") == tmp_path / "t.html"


def test_a_draft_model_under_home(monkeypatch: pytest.MonkeyPatch, tiny_pair: tuple[Path, Path],
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """The shell leaves the ~ of `model:~/draft` as it is."""
    monkeypatch.setenv("HOME", str(tiny_pair[1].parent))
    draft, target = f"~/{tiny_pair[1].name}", os.path.relpath(tiny_pair[0], tiny_pair[1].parent)
    assert run(["generate", "--prompt-ids", "5 9 5", "--target", f"~/{target}", "--drafter", f"model:{draft}", "--max-tokens", "2"]) == 0
    assert "model" in capsys.readouterr().err
