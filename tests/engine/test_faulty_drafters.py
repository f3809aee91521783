"""A drafter may do anything: the text does not change, the request does not die, and the reason is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.engine_support import OPTIONS, alone, check_counts, table

from draftproof import Draft, Engine, EngineConfig
from draftproof.core import verify
from draftproof.drafters.base import Needs
from draftproof.trace.sinks import Jsonl
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
        elif fault in MALFORMED:
            return MALFORMED[fault][0](depth)
        return good

    def observe(self, states: Any, commits: Any, signals: Any) -> None:
        if self.fault == "observe" and self.calls > 2:
            raise KeyError("lost")

    def close(self, state: Any) -> None:
        self.closed += 1
        if self.fault == "close":
            raise OSError("cannot close")


def lawful(depth: int, logq: Any, row: Any = (0, 0), ids: Any = None) -> Draft:
    return Draft.chain([1, 1][:depth], law=DraftLaw(logq, row[:depth], ids))


ROW = torch.zeros(1, 11)
MALFORMED: dict[str, tuple[Callable[[int], Any], str]] = {
    "wide law": (lambda depth: lawful(depth, torch.zeros(1, 40)), "law"),
    "law without rows": (lambda depth: lawful(depth, torch.zeros(0, 11)), "law"),
    "law's row out of range": (lambda depth: lawful(depth, ROW, (7, 0)), "law"),
    "law's row negative": (lambda depth: lawful(depth, ROW, (-1, 0)), "law"),
    "flat law": (lambda depth: lawful(depth, ROW[0]), "law"),
    "law of integers": (lambda depth: lawful(depth, ROW.long()), "law"),
    "law in a list": (lambda depth: lawful(depth, ROW.tolist()), "law"),
    "too few ids": (lambda depth: lawful(depth, ROW, ids=torch.arange(5)), "id map"),
    "ids in a table": (lambda depth: lawful(depth, ROW, ids=torch.arange(11)[None]), "id map"),
    "ids of floats": (lambda depth: lawful(depth, ROW, ids=torch.arange(11.0)), "id map"),
    "ids too high": (lambda depth: lawful(depth, ROW, ids=torch.arange(11) + 1), "id 11"),
    "ids too low": (lambda depth: lawful(depth, ROW, ids=torch.arange(11) - 1), "id -1"),
    "bool tokens": (lambda depth: Draft(torch.ones(1, dtype=torch.bool), (-1,)), "bool"),
    "score too short": (lambda depth: Draft.chain([1], score=torch.ones(0)), "score"),
    "score too long": (lambda depth: Draft.chain([1], score=torch.ones(2)), "score"),
    "score in a table": (lambda depth: Draft.chain([1], score=torch.ones(1, 1)), "score"),
    "score in a list": (lambda depth: Draft.chain([1], score=[0.5]), "score"),
    "law's rows in a tensor": (lambda depth: lawful(depth, ROW, torch.zeros(2, dtype=torch.int64)), "law whose rows"),
    "law's rows of floats": (lambda depth: lawful(depth, ROW, (0.0, 0.0)), "law whose rows"),
    "parents in a tensor": (lambda depth: Draft(torch.ones(2, dtype=torch.int64)[:depth], torch.tensor([-1, 0])[:depth]), "parents"),
    "parents of floats": (lambda depth: Draft(torch.ones(2, dtype=torch.int64)[:depth], (-1.0, 0.0)[:depth]), "parents"),
    "no name": (lambda depth: Draft.chain([1], drafter=None), "drafter"),
    "an error for a reason": (lambda depth: Draft.empty("faulty", ValueError("none found")), "reason"),
}
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
    **{fault: word for fault, (_, word) in MALFORMED.items()},
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


@pytest.mark.parametrize("trace", ["none", "summary", "full"])
@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("fault", MALFORMED)
def test_what_is_malformed_retires_the_drafter_before_anybody_reads_it(fault: str, rule: Any, trace: Any) -> None:
    target = table()
    with Engine(target, Faulty(fault), depth=3, rule=rule, config=EngineConfig(trace=trace)) as engine:
        outs = engine.generate_batch([[1, 2], [2, 3]], OPTIONS["warm"])
        state = engine.set_speculation()
    assert state["state"] == "out of service" and MALFORMED[fault][1] in state["reason"]
    for out, prompt in zip(outs, ([1, 2], [2, 3]), strict=True):
        assert out.finish_reason == "length" and len(out.token_ids) == 40
        if rule == "match":
            assert out.token_ids == alone(target, prompt, OPTIONS["warm"]).token_ids
        if trace != "none":
            check_counts(out)
    assert not target.open_slots


@pytest.mark.parametrize("rule", ["match", "lossy-typical"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_does_not_have_are_left_out(number: float, rule: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A score, and a law that nobody judges by: whoever opens the trace reads JSON as it is defined."""
    drafter, sink = Faulty(""), Jsonl(tmp_path / "trace.jsonl")
    flawed = DraftLaw(torch.full((1, 11), number), (0,))
    monkeypatch.setattr(drafter, "draft", lambda fault, depth: Draft.chain([1], score=torch.tensor([number]), law=flawed))
    with Engine(table(), drafter, depth=3, rule=rule, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        engine.generate([1, 2], OPTIONS["warm"])
        assert engine.set_speculation()["state"] == "on"
    sink.close()
    lines = (tmp_path / "trace.jsonl").read_text("utf-8").splitlines()
    rounds = [e for e in (json.loads(line, parse_constant=pytest.fail) for line in lines) if e["event"] == "round_done" and e["nodes"]]
    assert rounds and all(len(e["nodes"]) == 1 for e in rounds)


def test_a_tree_for_a_target_that_scores_chains_retires_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = table(), Faulty("")
    want = alone(target, [1, 2], OPTIONS["warm"])
    monkeypatch.setattr(target, "trees", False)
    monkeypatch.setattr(drafter, "draft", lambda fault, depth: Draft(torch.tensor([1, 2]), (-1, -1)) if depth > 1 else Draft.empty())
    with Engine(target, drafter, depth=3) as engine:
        out = engine.generate([1, 2], OPTIONS["warm"])
        state = engine.set_speculation()
    assert state["state"] == "out of service" and "a tree" in state["reason"]
    assert out.token_ids == want.token_ids and out.metrics["drafted"] == 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_law_that_fails_where_it_is_used_retires_the_drafter(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no look at its form shows."""
    def failing(*about: Any) -> Any:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(verify, "dense_law", failing)
    target = table()
    with Engine(target, Faulty("flawed"), depth=3, rule=rule) as engine:
        monkeypatch.setattr(engine.speculation.drafter, "draft", lambda fault, depth: lawful(depth, ROW))
        outs = engine.generate_batch([[1, 2], [2, 3]], OPTIONS["warm"])
        assert "IndexError" in engine.set_speculation()["reason"]
    assert all(len(out.token_ids) == 40 for out in outs)


def test_an_id_map_is_looked_at_once() -> None:
    class Counted(torch.Tensor):
        looks = 0

        def max(self, *about: Any) -> Any:  # type: ignore[override]
            Counted.looks += 1
            return super().max(*about)

    class Mapped(Faulty):
        ids = torch.arange(11).as_subclass(Counted)

        def draft(self, fault: str, depth: int) -> Any:
            return lawful(depth, ROW, ids=self.ids)

    with Engine(table(), Mapped(""), depth=2) as engine:
        out = engine.generate([1, 2], OPTIONS["warm"])
        assert engine.set_speculation()["state"] == "on"
    assert out.metrics["rounds"] > 10 and Counted.looks == 1


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
        told = [event for event in out.trace if event.event == "round_done" and "out of service" in event.draft_reason]
        assert told and not any(event.nodes for event in told), "the draft that the rule could not judge is dropped"
        check_counts(out)
    assert not target.open_slots
