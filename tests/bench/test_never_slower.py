"""`benchmarks/never_slower.py`: nobody finds another's work done."""

from __future__ import annotations

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
