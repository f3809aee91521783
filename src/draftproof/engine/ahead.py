"""Work that a device begins while the host is still busy with the round before (asynchronous scheduling): the next plain pass, or the
whole next round. On a CPU, whose cores do both, nothing is begun early.

    device   … pass n │ choice │ pass n + 1 (its input, the choice, is already here) │ choice │ …
    host              └ reads the choice, commits, plans ┘

Without drafts (`PendingPass`) the next pass needs nothing but the chosen tokens, so it begins before the host has read them. If the next
round turns out to be another one (a text ended, a request joined), the pass is dropped: the keys that it wrote stand behind the texts,
where the next pass writes anyway. No bit differs, because it is the very pass that `score` would run.

    device   … pass n │ choice │                  │ draft n + 1 │ pass n + 1                  │ choice │ …
    host              └ reads  ┘ commits, begins ──┘ records, events, admission ┘ waits ┘

With drafts (`PendingRound`) the next round needs the committed texts, but not their records: it begins between commit and trace. Its batch
is known by then: the texts that go on, and those whose prompts are read. Rows of texts that leave meanwhile are not looked at.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from ..core.upload import uploaded
from ..errors import CacheFull
from ..models.taps import rows_at
from ..models.target import Begins, Target
from ..trace.events import Times
from ..types import Budget, Draft, Scores
from .lanes import Lanes
from .marks import Marks
from .sequence import Sequence

OVERLAPS = {"cuda"}  # kinds of devices that work while the host does


@dataclass(slots=True)
class PendingPass:
    """A plain pass that runs over the last tokens of `seqs`. tokens: these, once they are read; lengths: of the slots, before it."""

    target: Begins
    seqs: abc.Sequence[Sequence]
    lengths: list[int]
    scores: Scores
    marks: Marks
    tokens: abc.Sequence[int] = ()

    def take(self, batch: abc.Sequence[Sequence], roots: Tensor, taps: abc.Collection[int]) -> Scores | None:
        """What the target's `score` of these roots without drafts would return; None, changing nothing, if this is not the batch's pass."""
        places = _places(self.seqs, batch)
        if -1 in places or set(self.scores.taps) != set(taps):
            return None
        for i, seq in zip(places, batch, strict=True):
            if seq.slot is None or seq.slot.length != self.lengths[i] or seq.tokens[-1] != self.tokens[i]:
                return None
        self.target.settle([seq.slot for seq in batch], roots)
        return self.scores if len(places) == len(self.seqs) else _of(self.scores, places)

    def seconds(self) -> float:
        """How long the pass took; to be called when its results have been read."""
        return self.marks.spans()[0]


def overlaps(target: Target) -> bool:
    """Whether passes over this target may begin early."""
    return target.device.type in OVERLAPS and isinstance(target, Begins)


def begin_pass(target: Target, batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], choices: Tensor) -> PendingPass | None:
    """Begin the pass over choices [B], which the host has not read; None where that is not possible, or where a text surely ends with
    them."""
    if not isinstance(target, Begins) or any(map(len, drafts)):
        return None
    if any(seq.limit - len(seq.tokens) < 2 for seq in batch):
        return None
    slots = [seq.slot for seq in batch]
    marks = Marks(target.device)
    try:
        scores = target.begin(slots, choices)
    except CacheFull:
        return None
    if scores is None:
        return None
    marks.mark()
    return PendingPass(target, batch, [slot.length for slot in slots if slot is not None], scores, marks)


@dataclass(slots=True)
class PendingRound:
    """A round of `seqs` that is planned, drafted and scored, though the device may still be at work on it. start: the host's time when it
    was begun; steered: who decided on its budgets (`Lanes.steered`); early: its pass, if that was begun before the round."""

    seqs: abc.Sequence[Sequence]
    budgets: list[Budget]
    drafts: list[Draft]
    scores: Scores
    marks: Marks
    start: float
    steered: tuple[object, ...]
    early: PendingPass | None = None

    def take(self, batch: abc.Sequence[Sequence], lanes: Lanes) -> PendingRound | None:
        """The part that belongs to this batch; None if some of the batch are not in it, or an operator or a failure changed who guesses."""
        places = _places(self.seqs, batch)
        if not places or -1 in places or self.steered != lanes.steered:
            return None
        if places == list(range(len(self.seqs))):
            return self
        lanes.go_on(batch)
        return replace(self, seqs=batch, budgets=[self.budgets[i] for i in places], drafts=[self.drafts[i] for i in places],
                       scores=_of(self.scores, places))

    def seconds(self, start: float, end: float) -> tuple[Times, float]:
        """Times of draft, score and verify, where the host came back to the round at `start` and had read its results by `end`: waiting for
        the device in between is time of draft or score, not of verify. And the seconds that the host spent on score and verify."""
        drafting, scoring, _ = self.marks.spans()
        left = max(0.0, drafting + scoring - (start - self.start))
        verifying = max(0.0, end - start - left)
        early = 0.0 if self.early is None else self.early.seconds()      # of a pass that the host waits for only when it reads the choices
        return Times(drafting, scoring + early, max(0.0, verifying - early), 0.0), scoring + verifying


def _places(seqs: abc.Sequence[Sequence], batch: abc.Sequence[Sequence]) -> list[int]:
    """The place of each of the batch among seqs, −1 if it is not there."""
    place = {id(seq): i for i, seq in enumerate(seqs)}
    return [place.get(id(seq), -1) for seq in batch]


def _of(scores: Scores, places: abc.Sequence[int]) -> Scores:
    """The scores of the sequences at these places of a pass."""
    starts = scores.starts
    index = uploaded([row for i in places for row in range(starts[i], starts[i + 1])], scores.logits.device)
    own = accumulate((starts[i + 1] - starts[i] for i in places), initial=0)
    return Scores(scores.logits[index], tuple(own), rows_at(scores.taps, index))
