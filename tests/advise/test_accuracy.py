"""benchmarks/advice.py: the arithmetic behind its table, and a small run of all of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_module import benchmark

from draftproof.advise.predict import Forecast
from draftproof.bench.cells import Spread
from draftproof.bench.workload import Item

ITEMS = [Item(str(i), "ab"[i % 2], ("x",)) for i in range(8)]
ARMS, DEPTHS = [("ngram", 2), ("ngram", 4)], [2, 4]


@pytest.fixture(scope="module")
def advice() -> Any:
    return benchmark("advice")


def times(**arms: float) -> dict[tuple[int, str, int], list[float]]:
    """Three repeats; items take 1, 2, … seconds, times what the arm's name says."""
    wobbles = {"off": (1.0, 1.01, 0.99)}
    return {(1, name.replace("at", "@"), i): [(1 + i) * factor * wobble for wobble in wobbles.get(name, (1.02, 1.0, 0.99))]
            for name, factor in {"off": 1.0, **arms}.items() for i in range(len(ITEMS))}


def test_halves_hold_every_class_in_turn(advice: Any) -> None:
    assert [advice.half_of(i, ITEMS) for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_the_ratio_is_one_of_sums_and_its_interval_is_that_of_the_repeats(advice: Any) -> None:
    found = times(ngramat2=0.5)
    found[1, "ngram@2", 7] = [8.0, 80.0, 8.0]               # as slow as off, and a pause in one repeat
    sides = tuple(dict.fromkeys(range(8), arm) for arm in ("off", "ngram@2"))
    mid, low, high = advice.resampled(found, 1, sides)
    assert mid == pytest.approx(36 / (28 * 0.5 + 8)) and low < mid < high
    steady = advice.resampled(times(ngramat2=0.5), 1, sides)
    assert steady[0] == pytest.approx(2.0) and 0 < steady[2] - steady[1] < 0.1


def test_an_arm_has_a_clock_of_its_own(advice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((1.0, 3.0, 10.0, 10.5, 11.0))
    monkeypatch.setattr(advice.time, "perf_counter", lambda: next(now))
    clock = advice.OwnTime()
    with clock:
        pass
    assert clock() == 2.0, "it stands still while others run"
    with clock:
        assert clock() == 2.5
    assert clock() == 3.0


def test_cells_are_those_of_a_benchmark(advice: Any) -> None:
    cells = list(advice.cells(times(ngramat2=0.5, ngramat4=0.4), ITEMS, ARMS, DEPTHS))
    assert [(c["class"], c["depth"]) for c in cells] == [(name, depth) for name in ("a", "b", "all") for depth in ("2", "4")]
    assert all(c["speedup"]["median"] == pytest.approx(2.0 if c["depth"] == "2" else 2.5, rel=0.02) for c in cells)


def chosen(depth: int) -> Forecast:
    return Forecast("a", 1, "ngram" if depth else "none", depth, Spread(1, 1, 1), "", recommended=True)


@pytest.mark.parametrize(("depth", "loss", "shown"), [(4, 0.0, False), (2, 0.2, True), (0, 0.6, True)])
def test_what_a_recommendation_loses(depth: int, loss: float, shown: bool, advice: Any) -> None:
    (one,) = advice.regrets(([chosen(depth)], [chosen(depth)]), times(ngramat2=0.5, ngramat4=0.4), ITEMS, ARMS, DEPTHS)
    assert one["best"] == ["ngram@4"] and one["slower_by"] == pytest.approx(loss, abs=0.02) and one["shown"] is shown


def test_a_loss_within_the_noise_is_not_shown(advice: Any) -> None:
    noisy = times(ngramat2=0.5, ngramat4=0.47)
    for i in range(8):
        noisy[1, "ngram@4", i] = [(1 + i) * f for f in (0.3, 0.47, 0.7)]
    (one,) = advice.regrets(([chosen(2)], [chosen(2)]), noisy, ITEMS, ARMS, DEPTHS)
    assert one["slower_by"] > 0.03 and one["low"] < 0.03 and not one["shown"]


def test_neither_side_is_judged_on_the_half_that_chose_it(advice: Any) -> None:
    """Depth 2 is best on one half, depth 4 on the other, by as much: each half recommends its own best, and loses nothing to it."""
    found = times(ngramat2=0.5, ngramat4=0.5)
    for i in range(8):
        found[1, f"ngram@{(2, 4)[advice.half_of(i, ITEMS)]}", i] = [(1 + i) * 0.3] * 3
    (one,) = advice.regrets(([chosen(2)], [chosen(4)]), found, ITEMS, ARMS, DEPTHS)
    assert one["slower_by"] == 0 and sorted(one["recommended"]) == sorted(one["best"]) == ["ngram@2", "ngram@4"]
    (swapped,) = advice.regrets(([chosen(4)], [chosen(2)]), found, ITEMS, ARMS, DEPTHS)
    assert swapped["slower_by"] < -0.5, "on the other half the other one is faster"


def test_every_class_is_forecast_at_its_own_costs(advice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "predict", lambda counts, costs, apart: [replace(chosen(depth), prompt_class=name)
                                                                         for name in counts for depth in costs])
    found = advice.forecast(["a", "b", "all"], {"a": [2], "b": [4], "all": [2, 4]})
    assert [(one.prompt_class, one.depth) for one in found] == [("a", 2), ("b", 4), ("all", 2), ("all", 4)]


def test_all_of_it_on_a_tiny_pair(advice: Any, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    records = [{"class": "ab"[i % 2], "prompt": f"def f{i}(x): return x + {i}\n" * 2} for i in range(8)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = argparse.Namespace(threads=1, prompts_file=prompts, each=2, tokens=12, depth=[2], concurrency="1,2", seed=0, rounds=4,
                               repeats=3, budget=60.0)
    setting = advice.Setting("tiny", str(tiny_pair[0]), ("ngram", f"model:{tiny_pair[1]}"))
    found = advice.examine(setting, asked, tmp_path)
    assert len(found["cells"]) == 3 * 2 * 2 and len(found["regret"]) == 3 * 2 and found["repeats"] == 3
    assert all(row["predicted"] > 0 and row["measured"] > 0 and row["tokens_per_round"] >= 1 for row in found["cells"])
    facts = {"command": "python x", "date": "2026-01-01", "machine": {"cpu": "c", "cores": 2, "load_average": [0.1], "read_gb_per_s": 9.0},
             "versions": {"revision": "abc"}}
    text = advice.section(found, facts)
    assert text.count("| a | 1 | ngram | 2 |") == 1 and str(tiny_pair[1]) not in text and "cells judged" in text
    assert len((tmp_path / "tiny.jsonl").read_text().splitlines()) == 4 and len((tmp_path / "half.jsonl").read_text().splitlines()) == 2
