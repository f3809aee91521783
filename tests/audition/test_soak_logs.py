"""The soak's generator: it knows what it wrote, and the reader counts the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmark_module import benchmark

from draftproof.audition.logs import Skipped
from draftproof.audition.stories import Reader, tokenizer_at

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak() -> Any:
    return benchmark("soak_logs")


def test_what_was_written_is_what_is_read(soak: Any, tmp_path: Path) -> None:
    file, written, skipped = tmp_path / "log.jsonl", soak.Written(), Skipped()
    file.write_bytes(b"".join(soak.records(3, 3_000_000, 1 << 62, 0.3, 8, written)))
    reader = Reader(partial(tokenizer_at, str(ROOT / "src" / "draftproof" / "weights" / "target")))
    reads = list(reader.stories(file, skipped))
    assert len(reads) == written.good > 200 and skipped.count == written.bad > 50 and written.bytes == file.stat().st_size
    assert [int(line.split()[1][:-1]) for line in skipped.shown] == written.first_bad
    assert {read.retokenised for read in reads} == {True, False} and sum(len(r.story.answer) for r in reads) >= written.tokens


def test_it_is_the_same_for_the_same_seed_and_ends_where_it_was_told(soak: Any) -> None:
    one, other = (b"".join(soak.records(5, 1 << 60, 4000, 0.0, 0, soak.Written())) for _ in range(2))
    written = soak.Written()
    assert one == other and b"".join(soak.records(6, 1 << 60, 4000, 0.0, 0, written)) != one
    assert 4000 <= written.tokens < 4300 and not written.bad and written.good == written.lines


def test_the_verdict(soak: Any) -> None:
    written = soak.Written(good=3, bad=2, first_bad=[4, 9])
    whole = {"log": {"requests": 3, "skipped": 2, "complaints": ["line 4: x", "line 9: y: z"]}, "peak_mb": 130.0}
    assert soak.judged(written, {"peak_mb": 100.0}, whole, 50)["passed"]
    assert not soak.judged(written, {"peak_mb": 100.0}, whole, 20)["passed"]
    for change in ({"requests": 2}, {"skipped": 3}, {"complaints": ["line 5: x", "line 9: y"]}):
        assert not soak.judged(written, {"peak_mb": 100.0}, {**whole, "log": {**whole["log"], **change}}, 50)["passed"]
