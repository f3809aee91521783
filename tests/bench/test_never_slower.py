"""`benchmarks/never_slower.py`: nobody finds another's work done, and chance is called chance."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
from benchmark_module import benchmark
from engine.engine_support import table

from draftproof import Engine
from draftproof.bench.arms import local_arms
from draftproof.bench.workload import Item
from draftproof.config import LoadConfig

never_slower = benchmark("never_slower")


def test_no_arm_finds_the_prompts_of_another_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafter has arms of its own, each with an off over the same target; a target's prompts are shared among those of a tenant."""
    asked: list[tuple[str, Engine]] = []

    def noted(engine: Engine, *told: Any, submit: Any = Engine.submit, **options: Any) -> Any:
        asked.append((options["tenant"], engine))
        return submit(engine, *told, **options)

    monkeypatch.setattr(Engine, "submit", noted)
    target, drafters = table(context=80), ("ngram", "suffix")
    items = {"code": [Item("0", "code", ((1, 2),)), Item("1", "code", ((2, 1),))]}
    with ExitStack() as stack:
        arms = {drafter: local_arms(stack, target, [drafter], [None], LoadConfig(), batch=2) for drafter in drafters}
        cells = [never_slower.Cell(drafter, "code", load) for drafter in drafters for load in (1, 2)]
        done = list(never_slower.measure(cells, arms, items, 3, 60.0, 8, 0.0))
    assert len(done) == 12 and all(set(pair) == {"off", "auto"} for cell in cells for pair in cell.pairs)
    assert len(asked) == 2 * 3 * 2 * (1 + 2) and len({tenant for tenant, _ in asked}) == 2 * 2 * 2 * 3, "drafters, arms, loads and pairs"
    assert len({(tenant, id(engine)) for tenant, engine in asked}) == 2 * 2 * 2 * 3, "of one engine each"


def test_a_machine_that_is_slow_for_a_while_is_no_difference() -> None:
    """Two engines that are the same, on a machine whose speed changes from turn to turn by 5 %: 95 % of intervals hold 0. By chance fewer
    than 180 of 200 do once in 860 such tests, but the numbers are always the same; intervals over single rounds hold it 51 times."""
    held = 0
    for seed in range(200):
        chance = random.Random(seed)
        off, on = ([level * (1 + 0.01 * chance.random()) for level in (1 + 0.05 * chance.random() for _ in range(40))
                    for _ in range(never_slower.BLOCK)] for _ in range(2))
        found = never_slower.against(off, on)
        held += found.low <= 0 <= found.high
    assert held >= 180


@pytest.mark.parametrize("by", [-0.02, 0.02])
def test_a_difference_is_found(by: float) -> None:
    chance = random.Random(7)
    off = [1 + 0.05 * chance.random() for _ in range(40 * never_slower.BLOCK)]
    found = never_slower.against(off, [time * (1 + by) for time in off])
    assert found.low <= by <= found.high and abs(found.median - by) < 0.002 and found.low * found.high > 0
