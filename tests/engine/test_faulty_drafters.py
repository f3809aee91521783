"""A drafter may do anything: the text does not change, the request does not die, and the reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.engine_support import OPTIONS, alone, check_counts, table

from draftproof import Draft, Engine
from draftproof.drafters.base import Needs
from draftproof.types import DraftLaw


class Faulty:
    """Does well for two rounds, then what `fault` says. With `law` it reports one that excludes what it proposes."""

    name = "faulty"
    needs = Needs(tree=True, law=True)

    def __init__(self, fault: str) -> None:
        self.fault, self.calls, self.closed = fault, 0, 0

    def open(self, seq: Any, signals: Any) -> Any:
        if self.fault == "open":
            raise RuntimeError("no memory for a state")
        return [seq]

    def propose(self, states: Any, budgets: Any, noise: Any) -> Any:
        self.calls += 1
        fault = self.fault if self.calls > 2 else ""
        if fault == "raise":
            raise ValueError("weights are gone")
        if fault == "exit":
            raise AssertionError("an invariant of its own")
        if fault == "too few":
            return []
        return [self.draft(fault, budget.depth) for budget in budgets]

    def draft(self, fault: str, depth: int) -> Any:
        if fault == "no draft":
            return [1, 2]
        good = Draft.chain([1] * min(depth, 2), drafter=self.name)
        if fault == "parents":
            object.__setattr__(good, "parents", (1, 0))
        elif fault == "shape":
            object.__setattr__(good, "tokens", torch.ones(5, dtype=torch.int64))
        elif fault == "floats":
            return Draft(torch.ones(1), (-1,))
        elif fault in ("negative", "high"):
            return Draft.chain([-1 if fault == "negative" else 11], drafter=self.name)
        elif fault == "deep":
            return Draft.chain([1] * (depth + 1))
        elif fault == "wide":
            return Draft(torch.ones(9, dtype=torch.int64), (-1,) * 9)
        elif fault == "law rows":
            return Draft.chain([1, 1][:depth], law=DraftLaw(torch.zeros(1, 11), (0, 0, 0)))
        elif fault == "false law":
            logq = torch.zeros(1, 11)
            logq[0, 1] = float("-inf")
            return Draft.chain([1, 1][:depth], law=DraftLaw(logq, (0, 0)[:depth]))
        elif fault == "wide law":
            return Draft.chain([1], law=DraftLaw(torch.zeros(1, 40), (0,)))
        return good

    def observe(self, states: Any, commits: Any, signals: Any) -> None:
        if self.fault == "observe" and self.calls > 2:
            raise KeyError("lost")

    def close(self, state: Any) -> None:
        self.closed += 1
        if self.fault == "close":
            raise OSError("cannot close")


FAULTS = {
    "raise": "ValueError: weights are gone",
    "exit": "an invariant of its own",
    "too few": "0 drafts for 2",
    "no draft": "list",
    "parents": "parents",
    "shape": "shape",
    "floats": "float",
    "negative": "token id -1",
    "high": "token id 11",
    "deep": "4 nodes",
    "wide": "9 nodes",
    "law rows": "law",
    "open": "no memory",
    "observe": "KeyError",
    "close": "cannot close",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_text_survives_and_the_reason_is_told(fault: str) -> None:
    target, drafter = table(), Faulty(fault)
    with Engine(target=target, drafter=drafter, depth=3) as engine:
        outs = engine.generate_batch([[1, 2], [2, 3]], [OPTIONS["warm"], OPTIONS["logprobs"]])
        state = engine.set_speculation()
        again = engine.generate([1, 2], OPTIONS["warm"])
        back = engine.set_speculation(drafter="ngram:min=1,max=2")
        other = engine.generate([1, 2], OPTIONS["warm"])
    prompts, options = ([1, 2], [2, 3], [1, 2], [1, 2]), ("warm", "logprobs", "warm", "warm")
    for out, prompt, option in zip((*outs, again, other), prompts, options, strict=True):
        want = alone(target, prompt, OPTIONS[option])
        assert out.token_ids == want.token_ids and out.logprobs == want.logprobs
        check_counts(out)
    assert state["state"] == "out of service" and state["drafter"] == "faulty"
    assert any(word in state["reason"] for word in FAULTS[fault].split("|")), state["reason"]
    if fault not in ("close",):
        rounds = [e for out in outs for e in out.trace if e.event == "round_done"]
        told = [e for e in rounds if "out of service" in e.reason + e.draft_reason]
        assert told
    assert again.metrics["drafted"] == 0 and other.metrics["drafted"] > 0 and back["state"] == "on"
    assert not target.open_slots


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("fault", ["false law", "wide law"])
def test_a_false_law_retires_the_drafter(fault: str, rule: str) -> None:
    target = table()
    with Engine(target=target, drafter=Faulty(fault), depth=3, rule=rule) as engine:  # type: ignore[arg-type]
        outs = engine.generate_batch([[1, 2], [2, 3]], OPTIONS["warm"])
        assert engine.set_speculation()["state"] == "out of service"
        assert "law" in engine.set_speculation()["reason"]
    for out in outs:
        assert len(out.token_ids) == 40
        check_counts(out)
    assert not target.open_slots
