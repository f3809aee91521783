"""advise: an option that a document leaves without effect is told, and documents may be written over many lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.cli import run as command
from draftproof.commands.console import print_rows

CELL = {"class": "all", "drafter": "ngram", "depth": 4, "rounds": 100, "drafted": 300, "requests": 10, "tokens": 250, "prompt_tokens": 100,
        "acceptance_length": 2.4, "acceptance_length_interval": {"low": 2.2, "high": 2.6}}


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    heard, curve = tmp_path / "audition.json", tmp_path / "profile.json"
    heard.write_text(json.dumps({"cells": [CELL]}, indent=0))
    curve.write_text(json.dumps({"curve": [{"rows": r, "context": 64, "batch": 1, "seconds": {"median": t, "low": t, "high": t}}
                                           for r, t in ((1, 0.01), (4, 0.011))]}, indent=2))
    return [str(heard), str(curve)]


def test_what_a_document_leaves_without_effect(documents: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    heard, curve = documents
    both = ["advise", "--audition", heard, "--profile", curve]
    assert command(both) == 0 and command([*both, "--draft-cost", "0.1"]) == 0
    capsys.readouterr()
    for more in (["--drafter", "suffix"], ["--depth", "3"], ["--concurrency", "1,4"], ["--rounds", "48"], ["--temperature", "1"],
                 ["--target", "org/x"], ["--threads", "2"], [heard]):
        assert command([*both, *more]) == 2
        assert f"{'LOG' if more == [heard] else more[0]} has no effect beside --" in capsys.readouterr().err
    for words in (["advise", heard, "--profile", curve, "--rounds", "9"], ["advise", heard, "--audition", heard, "--drafter", "ngram"],
                  ["advise", heard, "--draft-cost", "1"]):
        assert command(words) == 2 and "has no effect beside" in capsys.readouterr().err


def test_a_benchmark_of_something_else_costs_no_advice(documents: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "bench.json"
    measured.write_text(json.dumps({"cells": [{"class": "other", "drafter": "suffix", "depth": 9, "speedup": None}]}))
    assert command(["advise", "--audition", documents[0], "--profile", documents[1], "--bench", str(measured), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["cells"] and "the benchmark has no cell" in said.err


@pytest.mark.parametrize("option", ["--bench", "--profile"])
def test_documents_are_read_before_anything_is_replayed(option: str, documents: list[str], tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    broken, log = tmp_path / "broken.json", tmp_path / "log.jsonl"
    broken.write_text("{" * 200_000)
    log.write_text("this log has nothing\n")
    assert command(["advise", str(log), option, str(broken)]) == 1
    assert f"{broken}: no JSON document" in capsys.readouterr().err


def test_documents_may_begin_with_a_byte_order_mark(documents: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for place in map(Path, documents):
        place.write_bytes(b"\xef\xbb\xbf" + place.read_bytes())
    assert command(["advise", "--audition", documents[0], "--profile", documents[1]]) == 0
    capsys.readouterr()


def test_names_with_brackets_are_shown_as_they_are(documents: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(documents[0]).write_text(json.dumps({"cells": [CELL, CELL | {"class": "[/b]"}, CELL | {"class": "[math]"}]}))
    assert command(["advise", "--audition", documents[0], "--profile", documents[1]]) == 0
    shown = capsys.readouterr().out.partition("Verdict")[0]
    assert "[/b]" in shown and "[math]" in shown
    print_rows("[/i] of one arm", ["class", "arm"], [["[math]", "[/b]"]])
    assert all(name in shown for shown in [capsys.readouterr().out] for name in ("[/i]", "[math]", "[/b]"))
