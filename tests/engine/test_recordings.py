"""Rounds in which a device recorded something teach nobody what rounds take."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof import Engine, Sampling
from draftproof.config import EngineConfig
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.engine import profile
from draftproof.engine.control import AutoDepth
from draftproof.engine.costs import PassCosts
from draftproof.engine.lanes import Lanes
from draftproof.models.fake import TableTarget
from draftproof.models.graphs import made

SAMPLING = Sampling(seed=1, max_tokens=40, ignore_eos=True)


def target_that_records(rounds: set[int]) -> tuple[TableTarget, list[int]]:
    """It does so in these of its passes, counted from 1."""
    target, passes = TableTarget(vocab_size=11, seed=2), [0]
    right = target.score

    def score(*about: Any) -> Any:
        passes[0] += 1
        return made(lambda run: run, lambda: right(*about))() if passes[0] in rounds else right(*about)

    target.score = score  # type: ignore[method-assign]
    return target, passes


@pytest.mark.parametrize("drafter", ["ngram", "wrong"])
def test_a_round_with_a_recording_and_the_one_that_it_asked_for_are_not_timed(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float | None] = []
    learn = Lanes.learn
    monkeypatch.setattr(Lanes, "learn", lambda self, *about: told.append(about[-1]) or learn(self, *about))
    target, passes = target_that_records({5, 6, 11})
    with Engine(target, AlwaysWrong(11) if drafter == "wrong" else drafter, config=EngineConfig(profile_s=0)) as engine:
        engine.generate([1, 2], SAMPLING)
    assert len(told) == passes[0] > 14
    assert [i for i, passing in enumerate(told, 1) if passing is None] == [5, 6, 7, 11, 12]
    assert all(passing > 0 for passing in told if passing is not None)


def test_drafters_are_judged_and_not_timed_where_every_round_records() -> None:
    target, _ = target_that_records(set(range(1000)))
    with Engine(target, AlwaysWrong(11), config=EngineConfig(profile_s=0)) as engine:
        done = engine.generate([1, 2], SAMPLING)
        assert not engine._passes.known
    passes = PassCosts()
    passes.learn(1, 1, 10, 0.01)
    control = AutoDepth(4, passes=passes)
    with Engine(target, AlwaysWrong(11), config=EngineConfig(profile_s=0)) as engine:
        engine.lanes.lanes[0].control, engine.lanes.passes = control, passes
        assert engine.generate([1, 2], SAMPLING).token_ids == done.token_ids
    arm = control.arms[0]
    assert arm.asked > 3 and not arm.costs.seen, "every trial was followed, and none was timed"
    assert control.hazards.reached[0] > 3, "what stood was counted"


def test_a_profile_records_every_pass_before_it_times_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: first every width once, whose time is no measurement and not the profile's."""
    target, asked = TableTarget(vocab_size=11), list[int]()
    right = target.score

    def score(slots: Any, roots: Any, drafts: Any) -> Any:
        asked.append(sum(map(len, drafts)) + len(slots))
        return right(slots, roots, drafts)

    def clock() -> float:
        return len(asked) / 100                                  # of a pass

    target.score = score  # type: ignore[method-assign]
    monkeypatch.setattr(profile, "CROWDS", {})
    passes = PassCosts()
    count = profile.profile(target, passes, 64, 100.0, clock)
    assert passes.known and count == 2 * (6 + 3 * 5 + 2), "one text, 4, 16 and 64, and a long one, each width twice"
    assert len(asked) == 3 * (6 + 3 * 5 + 2) and asked[:6] == asked[6:12] == asked[12:18] == list(profile.ROWS)
    assert not target.open_slots
    assert profile.profile(target, PassCosts(), 64, 0.085, clock) == 9, "passes that warm up take none of the seconds"
