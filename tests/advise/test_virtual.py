"""On a machine without noise the advice is right: targets and drafters whose passes take known times, on a clock that only they move.

What is left is the formula's own error: prefills and beginnings, rounds without a draft, drafts cut at the end of a text,
batches that fill and drain, requests of unlike lengths side by side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmark_module import benchmark
from torch import Tensor

from draftproof.advise.check import check
from draftproof.advise.measure import measure
from draftproof.advise.predict import predict
from draftproof.audition.logs import Skipped
from draftproof.audition.run import Arm as Heard
from draftproof.audition.run import Work
from draftproof.audition.stories import Reader
from draftproof.audition.workers import run as audition
from draftproof.bench.load import Load, Local
from draftproof.bench.sweep import Arm, Plan, sweep
from draftproof.bench.workload import Item
from draftproof.config import EngineConfig
from draftproof.drafters.base import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.engine import Engine
from draftproof.models.fake import TableTarget
from draftproof.trace.sinks import Jsonl
from draftproof.types import Budget, Draft, Sampling, Scores

V, TOKENS = 12, 60
DEPTHS, LOADS = [2, 4], [1, 4]
SPECS = ("ngram", "suffix", "model")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(TableTarget):
    """A pass takes `base`, and so much for every text and row; reading a prompt so much for every token."""

    def __init__(self, clock: Clock, base: float, text: float, row: float, token: float, **more: Any) -> None:
        super().__init__(V, order=2, seed=3, **more)
        self.clock, self.costs = clock, (base, text, row, token)

    def extend(self, slots: Sequence[Any], tokens: Sequence[Tensor]) -> Scores:
        base, text, _, token = self.costs
        self.clock.now += base + text * len(slots) + token * sum(len(ids) for ids in tokens)
        return super().extend(slots, tokens)

    def score(self, slots: Sequence[Any], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        base, text, row, _ = self.costs
        self.clock.now += base + text * len(slots) + row * sum(1 + len(draft) for draft in drafts)
        return super().score(slots, roots, drafts)


def drafter(spec: str, clock: Clock) -> Drafter:
    if spec == "model":
        return ModelDrafter(Timed(clock, 0.8, 0.05, 0.0, 0.03, sharpness=2.0), V)

    class Copying(NgramDrafter if spec == "ngram" else SuffixDrafter):      # type: ignore[misc]
        def guess(self, state: Any, budget: Budget) -> Draft:
            clock.now += 0.05
            found: Draft = super().guess(state, budget)
            return found

    return Copying()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr("draftproof.drafters.build", lambda spec, *_: drafter(spec, found))
    yield found


def items() -> list[Item]:
    """Short and long prompts, of which the long ones repeat themselves."""
    dice = random.Random(1)
    short = [tuple(dice.randrange(V) for _ in range(dice.randint(3, 30))) for _ in range(8)]
    long = [tuple(dice.choices(range(V), k=40)) * 3 for _ in range(8)]
    return [Item(str(i), "short" if i % 2 else "long", (prompt,), max_tokens=dice.randint(20, TOKENS))
            for i, prompt in enumerate(prompt for pair in zip(long, short, strict=True) for prompt in pair)]


def logged(target: Timed, asked: Sequence[Item], folder: Path) -> Path:
    """A trace, which has the noise: the audition is exact for every drafter."""
    sink = Jsonl(folder / "trace.jsonl")
    with Engine(target, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        for i, item in enumerate(asked):
            engine.generate(item.turns[0], Sampling(temperature=1.0, top_p=1.0, seed=i, max_tokens=item.max_tokens or TOKENS),
                            prompt_class=item.prompt_class)
    sink.close()
    return folder / "trace.jsonl"


def test_the_prediction_is_right_where_nothing_is_noisy(clock: Clock, tmp_path: Path) -> None:
    advice, asked = benchmark("advice"), items()
    target = Timed(clock, 5.0, 0.4, 0.3, 0.06, sharpness=2.5)
    arms = [(spec, depth) for spec in SPECS for depth in DEPTHS]
    log = logged(target, asked, tmp_path)
    work = Work(str(log), tuple(Heard(*arm) for arm in arms), Reader.of(target), target, lambda spec: drafter(spec, clock))
    heard = audition(work).cells()
    texts = [(read.story.prompt, read.story.answer) for read in Reader.of(target).stories(log, Skipped())]
    costs, _ = measure(target, arms, texts, LOADS, Sampling(temperature=1.0, top_p=1.0, max_tokens=TOKENS, seed=1), 48, clock=clock)
    with ExitStack() as stack:
        def local(spec: str, depth: int) -> Local:
            engine = stack.enter_context(Engine(target, spec, depth, config=EngineConfig(max_batch=max(LOADS), trace="summary")))
            return Local(engine, None, target.context, clock=clock)

        clients = [Arm("off", "none", "0", local("none", 0))]
        clients += [Arm(advice.arm_name(*arm, DEPTHS), arm[0], str(arm[1]), local(*arm)) for arm in arms]
        plan = Plan(tuple(Load(n) for n in LOADS), 1, 1, 1e-6, 1e9, TOKENS, 1.0, 0)
        times = advice.times_of(list(sweep(clients, asked, plan, clock)))
    found = check(predict(heard, costs), {"cells": list(advice.cells(times, asked, arms, DEPTHS))})
    words = "\n".join(f"{r['class']:6} {r['concurrency']} {r['drafter']:7} {r['depth']} {r['predicted']:.3f} {r['measured']:.3f} "
                      f"{r['error']:+.1%}" for r in found["cells"])
    assert len(found["cells"]) == 3 * 2 * 6
    for row in found["cells"]:
        assert abs(row["error"]) < (0.015 if row["concurrency"] == 1 else 0.04), words
