"""The controller: what it may grant, what it learns, and that it never costs a token."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from engine.engine_support import OPTIONS, alone, check_counts, foresight, table

from draftproof import Draft, Engine, Sampling, Verdict
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.engine.control import AutoDepth, Costs, Hazards
from draftproof.trace.events import Times


class World:
    """Plays rounds for a controller: known costs and a known chance of each guess, no clock."""

    def __init__(self, control: AutoDepth, draft_s: float, base_s: float, row_s: float, batch: int = 1) -> None:
        self.control, self.draft_s, self.base_s, self.row_s = control, draft_s, base_s, row_s
        self.batch: Any = [SimpleNamespace(id=f"r{i}") for i in range(batch)]
        self.seconds, self.tokens, self.dice = 0.0, 0, random.Random(4)

    def play(self, rounds: int, chance: float) -> list[int]:
        """Every guess is right with `chance`; returns the depths of the first sequence."""
        chosen = []
        for _ in range(rounds):
            depths = [depth for depth, reason in self.control.depths(self.batch, [16] * len(self.batch)) if reason]
            drafts, verdicts = [], []
            for depth in depths:
                accepted = 0
                while accepted < depth and self.dice.random() < chance:
                    accepted += 1
                drafts.append(Draft.chain([1] * depth))
                verdicts.append(Verdict(tuple(range(accepted)), 1, "bonus", (accepted,) if accepted < depth else ()))
                self.tokens += accepted + 1
            rows = sum(depth + 1 for depth in depths)
            times = Times(max(depths) * self.draft_s, self.base_s + rows * self.row_s, 0.0, 0.0)
            self.seconds += times.draft_s + times.score_s
            self.control.learn(self.batch, drafts, verdicts, times)
            chosen.append(depths[0])
        return chosen

    def rate(self, rounds: int, chance: float) -> float:
        seconds, tokens = self.seconds, self.tokens
        self.play(rounds, chance)
        return (self.tokens - tokens) / (self.seconds - seconds)


def fixed_rate(depth: int, chance: float, draft_s: float, base_s: float, row_s: float) -> float:
    tokens = sum(chance**k for k in range(depth + 1))
    return tokens / (depth * draft_s + base_s + (depth + 1) * row_s)


@pytest.mark.parametrize("draft_s", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("chance", [0.05, 0.4, 0.7, 0.9])
def test_auto_comes_near_the_best_fixed_depth(chance: float, draft_s: float) -> None:
    world = World(AutoDepth(12), draft_s, 1.0, 0.03)
    world.play(100, chance)
    best = max(fixed_rate(depth, chance, draft_s, 1.0, 0.03) for depth in range(13))
    assert world.rate(1500, chance) > 0.94 * best


def test_auto_stops_drafting_when_it_does_not_pay_and_comes_back_when_it_does() -> None:
    world = World(AutoDepth(8), 0.4, 1.0, 0.02)
    world.play(60, 0.02)
    idle = world.play(200, 0.02)
    assert sum(depth > 0 for depth in idle) <= 12, "seldom probes"
    back = world.play(600, 0.95)
    assert sum(depth >= 3 for depth in back[-50:]) > 40


def test_auto_drafts_less_where_rows_are_dear() -> None:
    lonely, crowd = World(AutoDepth(8), 0.05, 1.0, 0.01), World(AutoDepth(8), 0.05, 0.05, 0.1, batch=8)
    lonely.play(60, 0.6)
    crowd.play(60, 0.6)
    assert sum(lonely.play(40, 0.6)) > 2 * sum(crowd.play(40, 0.6))


def test_hazards_and_costs() -> None:
    hazards = Hazards(3, 1.0)
    for _ in range(50):
        hazards.learn(1, True)
        hazards.learn(3, False)
    first, second, third = hazards.means()
    assert first > 0.98 and second == pytest.approx(0.5, abs=0.02) and third > 0.95
    costs = Costs(0.05)
    for _ in range(30):
        costs.learn(1, 1.0)
        costs.learn(5, 1.4)
    curve = costs.curve(range(1, 10))
    assert curve == sorted(curve) and curve[0] == pytest.approx(1.0, abs=0.05) and 1.15 < curve[2] < 1.3 and 1.6 < curve[8] < 2
    costs.learn(5, 90.0)
    assert costs.curve(range(5, 6))[0] < 1.8, "one pause is not a cost"


def test_a_fixed_depth_is_only_lowered_by_the_end_of_the_text() -> None:
    target = table()
    with Engine(target=target, drafter=AlwaysWrong(11), depth=5) as engine:
        out = engine.generate([1, 2], Sampling(seed=1, max_tokens=30, ignore_eos=True))
    emitted = 1
    for event in out.trace:
        if event.event == "round_done":
            assert event.depth == min(5, 30 - emitted - 1) == len(event.nodes)
            assert event.reason == ("fixed" if event.depth == 5 else "the end of the text is near")
            emitted += len(event.tokens)


def test_auto_says_why_and_keeps_the_text() -> None:
    target = table()
    want = alone(target, [1, 2], OPTIONS["ignore_eos"])
    for drafter in (AlwaysWrong(11), Oracle(foresight([[1, 2, *want.token_ids]]))):
        for tree in (None, 10):
            with Engine(target=target, drafter=drafter, tree=tree) as engine:
                out = engine.generate([1, 2], OPTIONS["ignore_eos"])
            assert out.token_ids == want.token_ids
            check_counts(out)
            reasons = [event.reason for event in out.trace if event.event == "round_done"]
            assert all(reasons) and any(reason.startswith("auto: ") for reason in reasons)
