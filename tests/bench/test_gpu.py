"""benchmarks/gpu.py: its verdicts. The whole of it runs without a GPU by the command in its text."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_module import benchmark

from draftproof import Engine
from draftproof.models.fake import TableTarget

gpu, gpu_goals = benchmark("gpu"), benchmark("gpu_goals")
EVEN = {"median": 1.0, "low": 1.0, "high": 1.0}


def cell(shape: str, arm: str, over_off: float = 1.0, read: float | None = None, bits: dict[str, int] | None = None) -> dict[str, Any]:
    return {"shape": shape, "mode": "reproducible" if bits else "fast", "batch": 1, "arm": arm, "tokens_per_s": 10.0,
            "over_off": {**EVEN, "median": over_off}, "read_gb_per_s": read, "bits": bits}


def test_goals_are_those_of_the_cells_and_what_is_missing_is_not_met() -> None:
    cells = [cell("8B", "off", read=3600.0), cell("8B", "model@4", 2.5), cell("8B", "eagle3@4", 3.1),
             cell("8B", "transformers compiled", 9.0),
             cell("8B", "off", bits={"texts": 108, "different": 1})]
    found = gpu.goals(cells, 4000.0)
    assert [goal["found"] for goal in found] == [pytest.approx(0.9), 3.1, None, 3.1, pytest.approx(107 / 108)]
    assert [goal["met"] for goal in found] == [True, True, None, True, False], "one text that differs is one too many"
    wide = [{**cell("8B", arm, over), "batch": 64} for arm, over in (("off", 1.0), ("eagle3@2", 0.97), ("eagle3@4", 0.9))]
    goal = gpu.goals([*cells, *wide], 4000.0)[3]
    assert goal == {"goal": "8B, fast, batches 1, 64: guesses ÷ off, the least of them", "found": 0.97, "bound": 1.0, "met": False}
    joined = [{**c, "mode": "compiled", "tokens_per_s": 11.0} for c in (cell("8B", "off", read=3700.0), cell("8B", "model@4", 2.9))]
    assert [goal["found"] for goal in gpu.goals([*cells, *joined], 4000.0)][:2] == [pytest.approx(0.925), 2.9], "the faster off counts"
    slower = [{**c, "tokens_per_s": 9.0} for c in joined]
    assert gpu.goals([*cells, *slower], 4000.0) == found
    text = gpu.page({"copy_gb_per_s": 4000.0, "cells": cells, "goals": found, "left_out": ["32B fast: no time"]})
    assert "| 8B | fast | 1 | off | 10.0 | 1.00 [1.00–1.00] | 3600 |" in text and "not measured" in text
    assert "left out: 32B fast: no time" in text


def test_time_that_is_up_is_named() -> None:
    clock = gpu.Clock(-1.0)
    assert not clock.allows("32B") and clock.left_out == ["32B: no time"] and gpu.Clock(100.0).allows("8B")


def test_where_the_engine_chose_the_depth_its_choice_is_what_may_not_be_slower() -> None:
    cells = [{**cell("8B", arm, over), "batch": batch} for batch, arm, over in
             ((1, "eagle3@4", 3.0), (1, "eagle3@auto", 2.9), (64, "eagle3@4", 1.05), (64, "eagle3@auto", 0.98))]
    goal = gpu.goals(cells, 4000.0)[3]
    assert goal["found"] == 0.98 and goal["met"] is False and "batches 1, 64" in goal["goal"]


def test_an_arm_that_fails_is_named_and_the_others_are_measured() -> None:
    calls = {"off": 0, "never": 0, "late": 0}

    def arm(name: str, bad: int) -> Any:
        def decode(tokens: int) -> float:
            calls[name] += 1
            if calls[name] == bad:
                raise RuntimeError(f"{name} at call {bad}\nand more")
            return float(tokens)
        return decode

    clock = gpu.Clock(100.0)
    arms = {"off": arm("off", 0), "never": arm("never", 1), "late": arm("late", 3)}
    assert gpu.interleaved(arms, 4, 16, 3, "8B fast, batch 4", clock) == {"off": [16.0] * 3}
    assert clock.left_out == ["8B fast, batch 4, never: failed (never at call 1)", "8B fast, batch 4, late: failed (late at call 3)"]
    assert calls == {"off": 4, "never": 1, "late": 3}


@pytest.mark.parametrize("name, good", [("extend", 0), ("score", 2)])
def test_what_a_text_failed_of_is_raised_and_no_rate(name: str, good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its first pass, for which the benchmark would wait for ever, and in a later round, which would count as the end of the text."""
    with Engine(TableTarget(12, order=1, seed=1), "none") as engine:
        work, times = getattr(engine.target, name), iter(range(100))

        def failing(*given: Any) -> Any:
            if next(times) >= good:
                raise RuntimeError("out of memory")
            return work(*given)

        run, prompts = iter(range(10)), [[[5, 6, 7]], [[8, 9]]]
        assert gpu.decoding(engine, prompts, 8, {"drafter": "none"}, run) > 0
        monkeypatch.setattr(engine.target, name, failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            gpu.decoding(engine, prompts, 8, {"drafter": "none"}, run)


def test_a_drafter_that_stopped_is_told() -> None:
    with Engine(TableTarget(12, order=1, seed=1), "ngram", 3) as engine:
        assert gpu.out_of_service(engine) == ""
        engine.speculation.pressed = True
        assert gpu.out_of_service(engine) == "guesses are paused: memory is short"
        engine.speculation.failure = "it fell"
        assert gpu.out_of_service(engine) == "it fell"


def test_texts_of_a_shape_count_once_all_are_compared_or_one_differs() -> None:
    whole, found = gpu_goals.TEXTS, {}
    for texts, different in ((whole, 0), (whole - 24, 0), (24, 3), (0, 0)):
        cells = [{**cell("70B", "off", bits={"texts": texts, "different": different})}]
        found[texts, different] = gpu.goals(cells, 4000.0)[-1]["found"]
    assert found == {(whole, 0): 1.0, (whole - 24, 0): None, (24, 3): 0.875, (0, 0): None}


def test_no_drafter_hides_behind_a_better_one() -> None:
    cells = [cell("8B", "eagle3@auto", 4.7), cell("8B", "eagle3+tree@auto", 0.9), cell("8B", "eagle3@6", 5.0)]
    assert gpu.goals(cells, 4000.0)[3]["found"] == 0.9


def test_reproducible_mode_stands_beside_fast_mode() -> None:
    cells = [cell("8B", "off"), {**cell("8B", "off", bits={"texts": 0, "different": 0}), "tokens_per_s": 9.0}]
    assert gpu_goals.modes_beside(cells) == ["| 8B | 1 | off | 0.900 |"]
