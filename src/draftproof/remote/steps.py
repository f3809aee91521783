"""Which drafts a stream of tokens came from: what arrived, piece by piece, beside what vLLM says of its steps afterwards.

vLLM reports, per request, how many guesses every *drafted* step had and how many of them stood. Steps without a draft are not in
the report, and neither are the tokens that were rejected: those are known by number only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..trace.events import NodeRecord, RoundDone, Times, TokenRecord
from ..types import Role


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the target: `emitted` tokens of the text, of `drafted` guesses.

    cut: a stop ended the text among accepted guesses. known: whether a report told how many were drafted.
    """

    at: float
    emitted: int
    drafted: int
    cut: bool = False
    known: bool = True

    @property
    def accepted(self) -> int:
        return self.emitted if self.cut else self.emitted - 1

    @property
    def rejected(self) -> int:
        return int(not self.cut and self.drafted > self.accepted)

    @property
    def role(self) -> Role:
        """Of the last token."""
        if self.cut:
            return "accepted"
        return "plain" if not self.drafted else "correction" if self.rejected else "bonus"


def steps_of(pieces: Sequence[tuple[float, int]], report: Mapping[str, Any] | None, guessing: bool) -> list[Step]:
    """Split pieces (moment, tokens), the prefill's token not among them, into steps; guessing: whether the server speculates.

    A piece of n tokens is one step that accepted n − 1, or several that arrived at once. Reported steps are placed as early as
    they fit, and what they do not cover were plain steps. Without a report only what was accepted is known.
    """
    if not guessing:
        return [Step(at, 1, 0) for at, tokens in pieces for _ in range(tokens)]
    if report is None:
        return [Step(at, tokens, tokens - 1, known=False) for at, tokens in pieces if tokens]
    told = list(zip(report.get("per_step_accepted") or (), report.get("per_step_drafted") or (), strict=True))
    steps: list[Step] = []
    for number, (at, left) in enumerate(pieces):
        while left:
            accepted, drafted = told[0] if told else (-1, 0)
            last = number == len(pieces) - 1 and len(told) == 1
            if accepted < 0 or accepted >= left and not last:
                steps.append(Step(at, 1, 0))
                left -= 1
                continue
            told.pop(0)
            emitted = min(accepted + 1, left)
            steps.append(Step(at, emitted, drafted, cut=accepted >= left))
            left -= emitted
    return steps


def round_of(step: Step, number: int, request: str, tokens: Sequence[int], position: int, text: str, seconds: float, began: float,
             batch: int, drafter: str, depth: int, reason: str, unknown: int) -> RoundDone:
    """The trace's record of a step. Guesses that did not stand have the id `unknown`: vLLM does not say which they were.

    began: the trace's zero, of the clock of `step.at`. seconds: since the step before, all of it counted as scoring.
    """
    nodes = [NodeRecord(token, i - 1, "accepted") for i, token in enumerate(tokens[:step.accepted])]
    for i in range(step.accepted, step.drafted):
        nodes.append(NodeRecord(unknown, i - 1, "rejected" if i == step.accepted and step.rejected else "discarded"))
    words = [*(TokenRecord(token, "accepted") for token in tokens[:-1]), TokenRecord(tokens[-1], step.role)]
    why = "" if step.known else "the replica was lost before it told what it drafted"
    return RoundDone(request, number, step.at - began, batch, position, depth if step.drafted else 0, drafter, reason, why, tuple(nodes),
                     tuple(words), text, Times(0.0, seconds, 0.0, 0.0))
