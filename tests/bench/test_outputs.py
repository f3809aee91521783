"""What is measured is told before files are written: one that cannot be written costs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import sweep
from draftproof.cli import run

FULL = Path("/dev/full")                # a file that can be opened and takes nothing
SHORT = ["--tokens", "4", "--repeats", "1", "--most-repeats", "1"]
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "w.jsonl"
    file.write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n")
    return file


@needs_full
def test_bench_tells_first_and_writes_what_it_can(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, folder = workload.with_name("page.html"), workload.with_name("answers")
    assert run(["bench", "--drafter", "ngram", "--workload", str(workload), *SHORT, "--csv", str(FULL), "--html", str(page),
                "--answers", str(folder), "--json"]) == 1
    said = capsys.readouterr()
    assert {cell["arm"] for cell in json.loads(said.out.splitlines()[-1])["cells"]} == {"off", "ngram"}
    complaint = said.err.splitlines()[-1]
    assert "/dev/full: No space left on device" in complaint and "unforeseen" not in complaint and str(page) not in complaint
    assert "</html>" in page.read_text() and {file.name for file in folder.iterdir()} == {"off.jsonl", "ngram.jsonl"}


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_bench_tells_what_it_has_measured(after: int, workload: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    plain, table = sweep.sweep, workload.with_name("cells.csv")

    def interrupted(*given: Any, **more: Any) -> Iterator[Any]:
        yield from islice(plain(*given, **more), after)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "sweep", interrupted)
    asked = ["--tokens", "4", "--repeats", "2", "--most-repeats", "2", "--csv", str(table), "--json"]
    assert run(["bench", "--drafter", "ngram", "--workload", str(workload), *asked]) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "draftproof: interrupted"
    if after == 0:
        assert not said.out and not table.exists()
        return
    document = json.loads(said.out.splitlines()[-1])
    assert document["note"].startswith(f"INTERRUPTED after {after} of 4 answers")
    cells = {cell["arm"]: cell for cell in document["cells"] if cell["class"] == "all"}
    assert sum(cell["requests"] for cell in cells.values()) == after and list(cells) == ["off", "ngram"][:after]
    assert len(table.read_text().splitlines()) == 1 + len(document["cells"])


@needs_full
def test_profile_tells_first(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert run(["profile", "--quick", "--rows", "1,2", "--batch", "1", "--repeats", "1", "--png", str(FULL), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["curve"] and "draftproof: /dev/full: No space left" in said.err.splitlines()[-1]


@needs_full
def test_prove_tells_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--level", "rule", "--draws", "200", "--html", str(FULL), "--json"]) == 1
    said = capsys.readouterr()
    assert "rule" in json.loads(said.out.splitlines()[-1])["levels"] and "draftproof: /dev/full: No space left" in said.err.splitlines()[-1]


def test_a_folder_for_answers_is_looked_at_before_anything_is_loaded(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--workload", str(workload), "--answers", str(workload / "sub" / "more")]) == 2
    assert f"{workload} is a file" in capsys.readouterr().err
