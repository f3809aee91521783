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

FLAG = "--per-request-spec-decode-metrics detailed"
MOST_TOKENS, MOST_GUESSES = 1 << 22, 1 << 12      # of an answer and of a step: more is damage, not to be laid out in memory


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the target: `emitted` tokens of the text, of `drafted` guesses.

    cut: a stop ended the text among accepted guesses. known: whether a report told how many were drafted in this very step.
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
    they fit, and what they do not cover were plain steps. Of a report without lists the sums are kept, see `_of_totals`. Without a
    report only what was accepted is known. Raises ValueError for a report that contradicts itself.
    """
    if not guessing:
        return [Step(at, 1, 0) for at, tokens in pieces for _ in range(tokens)]
    if report is None:
        return [Step(at, tokens, tokens - 1, known=False) for at, tokens in pieces if tokens]
    listed = lists_of(report)
    told = _of_totals(pieces, report) if listed is None else list(zip(*listed, strict=True))
    steps: list[Step] = []
    for number, (at, left) in enumerate(pieces):
        while left:
            accepted, drafted = told[0] if told else (-1, 0)
            last = number == len(pieces) - 1 and len(told) == 1
            if accepted < 0 or accepted >= left and not last:
                steps.append(Step(at, 1, 0, known=listed is not None))
                left -= 1
                continue
            told.pop(0)
            emitted = min(accepted + 1, left)
            steps.append(Step(at, emitted, drafted, cut=accepted >= left, known=listed is not None))
            left -= emitted
    return steps


def lists_of(report: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Guesses accepted and drafted, step by step; None where only totals are told. Raises ValueError for numbers that contradict."""
    accepted: Any = report.get("per_step_accepted")
    drafted: Any = report.get("per_step_drafted")
    if accepted is None and drafted is None:
        return ([], []) if report.get("num_spec_steps") == 0 else None
    if not _counts(accepted) or not _counts(drafted) or len(accepted) != len(drafted) \
            or any(a > d for a, d in zip(accepted, drafted, strict=True)):
        raise ValueError("per_step_accepted and per_step_drafted contradict each other; expected two lists of counts, one entry a step, "
                         "accepted no larger than drafted")
    for name, values in (("num_accepted_draft_tokens", accepted), ("num_draft_tokens", drafted)):
        if report.get(name, sum(values)) != sum(values):
            raise ValueError(f"{name} is {report[name]}, and the steps add up to {sum(values)}")
    return accepted, drafted


def _of_totals(pieces: Sequence[tuple[float, int]], report: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(accepted, drafted) of steps whose sums are the report's: what was accepted where the pieces show it, and the guesses that did
    not stand on the first steps that have room for them. Raises ValueError if the report has no totals, or such that cannot be."""
    histogram: Any = report.get("acceptance_histogram")
    drafted: Any = report.get("num_draft_tokens")
    k: Any = report.get("num_spec_tokens")
    if not _counts([k]) or not _counts(histogram, MOST_TOKENS) or not _counts([drafted], MOST_TOKENS * MOST_GUESSES):
        raise ValueError("acceptance_histogram, num_draft_tokens and num_spec_tokens are no counts")
    left, most = list(histogram), max((accepted for accepted, steps in enumerate(histogram) if steps), default=0)
    steps, accepted = sum(histogram), sum(n * steps for n, steps in enumerate(histogram))
    spare = drafted - accepted
    said = report.get("num_spec_steps", steps), report.get("num_accepted_draft_tokens", accepted)
    if said != (steps, accepted) or most > k or spare < 0 or drafted > k * steps:
        raise ValueError("the totals contradict acceptance_histogram")
    placed: list[int] = []
    for _, tokens in pieces:
        while tokens > 0:
            here = next((n for n in range(min(tokens, len(left)) - 1, -1, -1) if left[n]), None)
            if here is not None:
                left[here] -= 1
                placed.append(here)
            tokens -= 1 + (here or 0)
    if sum(left) == 1:                                       # cut by a stop
        placed.append(left.index(1))
    found = []
    for here in placed:
        more = min(k - here, spare)
        spare -= more
        found.append((here, here + more))
    return found


def _counts(values: Any, most: int = MOST_GUESSES) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n <= most for n in values)


def told_by(report: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, str]:
    """A server's last word on a text that it speculated in, if it can be used, and what is missing in it, in words."""
    if report is None:
        return None, f"the server does not tell what it drafted; start it with {FLAG}"
    try:
        if lists_of(report) is not None:
            return report, ""
        _of_totals((), report)
    except (AttributeError, ValueError) as error:
        return None, f"what the server tells of its drafts cannot be: {error}"
    return report, f"the server tells of its drafts in all, not of each; start it with {FLAG}"


def round_of(step: Step, number: int, request: str, tokens: Sequence[int], position: int, text: str, seconds: float, began: float,
             batch: int, drafter: str, depth: int, reason: str, unknown: int, untold: str = "") -> RoundDone:
    """The trace's record of a step. Guesses that did not stand have the id `unknown`: vLLM does not say which they were.

    untold: why the server's word of it is missing, if it is.
    began: the trace's zero, of the clock of `step.at`. seconds: since the step before, all of it counted as scoring.
    """
    nodes = [NodeRecord(token, i - 1, "accepted") for i, token in enumerate(tokens[:step.accepted])]
    for i in range(step.accepted, step.drafted):
        nodes.append(NodeRecord(unknown, i - 1, "rejected" if i == step.accepted and step.rejected else "discarded"))
    words = [*(TokenRecord(token, "accepted") for token in tokens[:-1]), TokenRecord(tokens[-1], step.role)]
    why = "" if step.known else untold
    return RoundDone(request, number, step.at - began, batch, position, depth if step.drafted else 0, drafter, reason, why, tuple(nodes),
                     tuple(words), text, Times(0.0, seconds, 0.0, 0.0))
