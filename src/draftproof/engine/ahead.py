"""What a device works on while the host is still busy with the round before: the next plain pass, or the whole next round.

    device   … pass n │ choice │ pass n + 1 (goes on from the choice, which lies here) │ choice │ …
    host              └ reads the choice, commits, plans ┘

Without a draft a round's pass needs nothing but the chosen tokens. Where nobody guesses for a batch, the host's share of a round thus costs
no time of the device. Should the next round be another (a text ended, a request joined), what was begun is let go: its keys lie behind the
texts, where whoever comes next writes. No bit differs: it is the pass that `score` would run.

    device   … pass n │ choice │                │ draft n + 1 │ pass n + 1                  │ choice │ …
    host              └ reads  ┘ commits, asks ──┘ books, events, who comes and goes ┘ waits ┘

With drafts a round needs the texts, and nothing else of the round before: it is asked for as soon as they stand, before books are kept. Who
will be in it is known by then: those that go on, and those whose prompts are done. Of texts that leave meanwhile nothing is looked at.
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
class Begun:
    """A target's pass under way over the last tokens of seqs, which `tokens` holds once they are read. lengths: keys of their slots before
    it."""

    target: Begins
    seqs: abc.Sequence[Sequence]
    lengths: list[int]
    scores: Scores
    marks: Marks
    tokens: abc.Sequence[int] = ()

    def take(self, batch: abc.Sequence[Sequence], roots: Tensor, taps: abc.Collection[int]) -> Scores | None:
        """As the target's `score` of these roots without drafts; None, and nothing taken, if this is the pass of another round."""
        rows = _places(self.seqs, batch)
        if -1 in rows or set(self.scores.taps) != set(taps):
            return None
        for i, seq in zip(rows, batch, strict=True):
            if seq.slot is None or seq.slot.length != self.lengths[i] or seq.tokens[-1] != self.tokens[i]:
                return None
        self.target.settle([seq.slot for seq in batch], roots)
        if len(rows) == len(self.seqs):
            return self.scores
        return _of(self.scores, rows)

    def seconds(self) -> float:
        """That the pass took; only after its results were read."""
        return self.marks.spans()[0]


def overlaps(target: Target) -> bool:
    """Whether a round's pass over this target may be asked for before the books of the one before are kept."""
    return target.device.type in OVERLAPS and isinstance(target, Begins)


def begun(target: Target, batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], choices: Tensor) -> Begun | None:
    """Begin the pass behind choices [B], which nobody has read yet; None where that is not possible, or where a text ends with them."""
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
    return Begun(target, batch, [slot.length for slot in slots if slot is not None], scores, marks)


@dataclass(slots=True)
class Asked:
    """A round of seqs that the device was asked for. start: the host's time when it began to ask; steered: by whom and what it was decided;
    begun: its pass, if that was begun before."""

    seqs: abc.Sequence[Sequence]
    budgets: list[Budget]
    drafts: list[Draft]
    scores: Scores
    marks: Marks
    start: float
    steered: tuple[object, ...]
    begun: Begun | None = None

    def take(self, batch: abc.Sequence[Sequence], lanes: Lanes) -> Asked | None:
        """What of it is of this batch; None where it is another round: somebody is not in it, or somebody steered since."""
        rows = _places(self.seqs, batch)
        if not rows or min(rows) < 0 or self.steered != lanes.steered:
            return None
        if rows == list(range(len(self.seqs))):
            return self
        lanes.go_on(batch)
        return replace(self, seqs=batch, budgets=[self.budgets[i] for i in rows], drafts=[self.drafts[i] for i in rows],
                       scores=_of(self.scores, rows))

    def seconds(self, start: float, end: float) -> tuple[Times, float]:
        """Of drafts, pass and verdict, where the host took the round up at start and had read its results by end: what it waited for of
        drafts and pass is not the verdict's. Beside it how long the host waited for pass and verdict, however long the device took."""
        drafting, scoring, _ = self.marks.spans()
        left = max(0.0, drafting + scoring - (start - self.start))
        verifying = max(0.0, end - start - left)
        early = 0.0 if self.begun is None else self.begun.seconds()      # begun before this round, and waited for in the verdict
        return Times(drafting, scoring + early, max(0.0, verifying - early), 0.0), scoring + verifying


def _places(seqs: abc.Sequence[Sequence], batch: abc.Sequence[Sequence]) -> list[int]:
    """Where each of the batch stands among seqs, −1 where it does not."""
    place = {id(seq): i for i, seq in enumerate(seqs)}
    return [place.get(id(seq), -1) for seq in batch]


def _of(scores: Scores, rows: abc.Sequence[int]) -> Scores:
    """The scores of these sequences, of all in a pass."""
    starts = scores.starts
    index = uploaded([row for i in rows for row in range(starts[i], starts[i + 1])], scores.logits.device)
    ends = accumulate((starts[i + 1] - starts[i] for i in rows), initial=0)
    return Scores(scores.logits[index], tuple(ends), rows_at(scores.taps, index))
