"""benchmarks/scale.py: texts that nobody read can be timed and leave nothing behind; what its columns mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_module import benchmark

from draftproof import LoadConfig
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget

scale = benchmark("scale")
Pair = tuple[Path, Path]


@pytest.fixture
def target(tiny_pair: Pair) -> PagedTarget:
    found = load_target(tiny_pair[0], LoadConfig(dtype="float32", cache_tokens=2048, self_test=False))
    assert isinstance(found, PagedTarget)
    return found


def test_passes_are_timed_in_every_mode_and_nothing_stays(target: PagedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int, int]] = []
    monkeypatch.setattr(scale, "timed_pass", lambda target, slots, texts, context, rows: seen.append(
        (target.whole_tiles, slots[0].length, rows)) or float(rows))
    found = scale.passes(target, 300, 2, ["reproducible", "fast"], repeats=2)
    assert {mode: set(times) for mode, times in found.items()} == {"reproducible": set(scale.WIDTHS), "fast": set(scale.WIDTHS)}
    assert all(times[rows] == [float(rows)] * 2 for times in found.values() for rows in scale.WIDTHS)
    assert {length for _, length, _ in seen} == {300} and {tiles for tiles, _, _ in seen} == {True, False} and target.whole_tiles
    target.check()
    assert not target.slots and not target.pool.index                # unread texts are offered to nobody


def test_a_pass_after_an_unread_text_leaves_it_as_it_was(target: PagedTarget) -> None:
    with scale.standing(target, 300, 2) as slots:
        for rows in (1, 5):
            assert scale.timed_pass(target, slots, [[3] * 320] * 2, 300, rows) > 0
            assert [slot.length for slot in slots] == [300, 300]
    with torch.inference_mode():
        slot = target.open([0, 7, 14], "scale 300 2 0")
        assert slot.length == 0


def test_free_rows_and_ratios() -> None:
    times = {rows: [1.0 if rows < 9 else 1.3] for rows in scale.WIDTHS}
    assert scale.free(times) == 5
    assert scale.ratio([2.0, 4.0, 3.0], [1.0, 2.0, 3.0])["median"] == 2.0
    assert scale.table(["a", "b"], [[1.25, 4096]]) == "| a | b |\n| ---: | ---: |\n| 1.2 | 4,096 |"


def test_the_picture_says_in_plain_numbers_what_its_axes_count(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ms = {rows: 1.0 + rows for rows in scale.WIDTHS}
    scale.draw({"context": [{"context": n, "ms": ms, "fast_ms": ms, "limit_ms": 1.0} for n in (1024, 32768)],
                "batch": [{"batch": n, "ms": ms} for n in (1, 16)],
                "vocabulary": [{"vocabulary": n, "ms": ms, "outside_ms": {"top-p 0.95": 0.5}} for n in (4096, 262144)]}, tmp_path / "s.svg")
    drawn = (tmp_path / "s.svg").read_text()
    assert all(f">{label}<" in drawn for label in ("1k", "32k", "1", "256", "4k", "256k")) and "mathdefault" not in drawn
