"""benchmarks/scale.py: texts that nobody read can be timed and leave nothing behind; what its columns mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_module import benchmark

from draftproof import LoadConfig, native
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget

scale = benchmark("scale")
Pair = tuple[Path, Path]


@pytest.fixture
def target(tiny_pair: Pair) -> PagedTarget:
    found = load_target(tiny_pair[0], LoadConfig(dtype="float32", cache_tokens=2048, self_test=False))
    assert isinstance(found, PagedTarget)
    return found


def test_each_mode_is_timed_as_it_was_loaded_and_nothing_stays(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {mode: scale.load(tiny_pair[0], "float32", 1024, mode) for mode in scale.MODES}
    kinds = {mode: (target.whole_tiles, target.query_tile) for mode, target in targets.items()}
    seen: list[tuple[str, bool, int, int]] = []
    monkeypatch.setattr(scale, "timed_pass", lambda target, slots, texts, context, rows: seen.append(
        (*(mode for mode in targets if targets[mode] is target), (target.whole_tiles, target.query_tile), slots[0].length)) or float(rows))
    found = scale.passes(targets, 300, 2, repeats=2)
    assert {mode: set(times) for mode, times in found.items()} == {"reproducible": set(scale.WIDTHS), "fast": set(scale.WIDTHS)}
    assert all(times[rows] == [float(rows)] * 2 for times in found.values() for rows in scale.WIDTHS)
    assert set(seen) == {(mode, kind, 300) for mode, kind in kinds.items()}
    for target in targets.values():
        target.check()
        assert not target.slots and not target.pool.index            # unread texts are offered to nobody


def test_a_mode_is_what_a_load_makes_of_it(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels of our own only reproducible passes take whole tiles; with them rows stand alone in either mode."""
    monkeypatch.setattr(native, "available", lambda: (False, "the test wants none"))
    assert [scale.load(tiny_pair[0], "float32", 1024, mode).whole_tiles for mode in ("reproducible", "fast")] == [True, False]


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
