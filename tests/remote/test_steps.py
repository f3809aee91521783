"""Tokens as they arrived and vLLM's own report become steps."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof.core.tally import Tally
from draftproof.remote.steps import Step, round_of, steps_of

Report = dict[str, list[int]]


def report(accepted: list[int], k: int = 3) -> Report:
    return {"per_step_accepted": accepted, "per_step_drafted": [k] * len(accepted)}


def shape(steps: list[Step]) -> list[tuple[int, int]]:
    return [(step.emitted, step.drafted) for step in steps]


@pytest.mark.parametrize(("pieces", "told", "expected"), [
    ([3, 1, 4], report([2, 0, 3]), [(3, 3), (1, 3), (4, 3)]),              # every piece a drafted step
    ([1, 3, 1], report([2]), [(1, 0), (3, 3), (1, 0)]),                    # plain steps around it
    ([1, 1], report([]), [(1, 0), (1, 0)]),
    ([5], report([2, 1]), [(3, 3), (2, 3)]),                               # two steps at once
    ([6, 1], report([3, 0, 0]), [(4, 3), (1, 3), (1, 3), (1, 0)]),
])
def test_placing(pieces: list[int], told: Report, expected: list[tuple[int, int]]) -> None:
    assert shape(steps_of([(float(i), n) for i, n in enumerate(pieces)], told, True)) == expected


def test_a_stop_cuts_the_last_step() -> None:
    steps = steps_of([(0.0, 3), (1.0, 2)], report([2, 3]), True)
    assert shape(steps) == [(3, 3), (2, 3)] and steps[1].cut and steps[1].accepted == 2 and steps[1].role == "accepted"


def test_without_a_report() -> None:
    assert shape(steps_of([(0.0, 3)], None, False)) == [(1, 0)] * 3
    (step,) = steps_of([(0.0, 3)], None, True)
    assert (step.emitted, step.drafted, step.known) == (3, 2, False)


@pytest.mark.parametrize("step", [Step(1.0, 1, 0), Step(1.0, 1, 3), Step(1.0, 3, 3), Step(1.0, 4, 3), Step(1.0, 2, 3, cut=True)])
def test_the_record_counts_as_the_step_does(step: Step) -> None:
    words: dict[str, Any] = dict(number=0, request="r0", tokens=list(range(step.emitted)), position=5, text="", seconds=0.1, began=0.5,
                                 batch=1, drafter="ngram", depth=3, reason="why", unknown=99)
    record = round_of(step, **words)
    fates = [node.fate for node in record.nodes]
    assert len(fates) == step.drafted and fates.count("accepted") == step.accepted and fates.count("rejected") == step.rejected
    assert all((node.token == 99) == (node.fate != "accepted") for node in record.nodes)
    assert record.tokens[-1].role == {(1, 0): "plain", (1, 3): "correction", (3, 3): "correction", (4, 3): "bonus",
                                      (2, 3): "accepted"}[step.emitted, step.drafted]
    Tally().round(step.drafted, step.accepted, step.rejected, step.emitted)
