"""A plan that may serve again is not made again, and nobody can tell: depths and reasons are those of plans made every round."""

from __future__ import annotations

from typing import Any

import pytest
from engine.engine_support import table

from draftproof import Engine, EngineConfig, Sampling
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.plans import FixedDepth
from draftproof.trace.events import RoundDone

STEPS: dict[int, dict[str, Any]] = {
    4: {"depth_cap": 2}, 7: {"depth_cap": 9}, 10: {"enabled": False}, 13: {"enabled": True}, 16: {"drafter": "ngram:min=2,max=2"},
}
JOINS = 20


def rounds(monkeypatch: pytest.MonkeyPatch, holds: bool) -> tuple[list[tuple[Any, ...]], int]:
    """What texts side by side were granted, and how many plans that took."""
    plans = [0]
    depths = FixedDepth.depths

    def counted(self: FixedDepth, *about: Any) -> Any:
        plans[0] += 1
        return depths(self, *about)

    with monkeypatch.context() as patch:
        patch.setattr(FixedDepth, "holds", holds)
        patch.setattr(FixedDepth, "depths", counted)
        with Engine(table(), NgramDrafter(1, 3), depth=4, config=EngineConfig(trace="summary")) as engine:
            handles = [engine.submit([1, 2, 3, 1, 2, 3], Sampling(temperature=0.0, seed=n, max_tokens=240 + 40 * n))[0] for n in range(2)]
            step = 0
            while not all(handle.done for handle in handles):
                if step in STEPS:
                    engine.set_speculation(**STEPS[step])
                if step == JOINS:
                    handles += engine.submit([2, 3, 1, 2], Sampling(temperature=0.0, seed=9, max_tokens=30))
                engine.step()
                step += 1
            events = [event for handle in handles for event in handle.completion().trace]
    return [(e.request, e.round, e.depth, e.drafter, e.reason, e.draft_reason, e.nodes, e.tokens)
            for e in events if isinstance(e, RoundDone)], plans[0]


def test_a_held_plan_is_the_one_that_would_have_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    anew, many = rounds(monkeypatch, False)
    held, few = rounds(monkeypatch, True)
    assert held == anew and len({(depth, reason) for _, _, depth, _, reason, *_ in held}) == 4, "caps, switches and ends among them"
    assert few < many / 2, (few, many)
