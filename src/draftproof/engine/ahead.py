"""What a device works on while the host is still busy with the round before: the next plain pass, or the next drafts.

    device   … pass n │ choice │ pass n + 1 (goes on from the choice, which lies here) │ choice │ …
    host              └ reads the choice, commits, plans ┘

Without a draft a round's pass needs nothing but the chosen tokens. Where nobody guesses for a batch, the host's share of a round thus costs
no time of the device. Should the next round be another (a text ended, a request joined), what was begun is let go: its keys lie behind the
texts, where whoever comes next writes. No bit differs: it is the pass that `score` would run.

    device   … pass n │ choice │             │ draft n + 1                                  │ pass n + 1 …
    host              └ reads  ┘ commits, asks └ books, events, who comes and goes, pass n + 1 ┘

Drafts need the text that was chosen, and nothing else of a round: they are asked for as soon as it stands, before the round's books are
kept. Texts that leave meanwhile leave theirs behind; those that come wait a round for their first.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ..errors import CacheFull
from ..models.taps import rows_at
from ..models.target import Begins, Target
from ..types import Budget, Draft, Scores
from .lanes import Lanes
from .marks import Marks
from .sequence import Sequence

OVERLAPS = {"cuda"}  # kinds of devices that work while the host does
LATE = "it came while the others' guesses were under way"


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
        place = {id(seq): i for i, seq in enumerate(self.seqs)}
        rows = [place.get(id(seq), -1) for seq in batch]
        if -1 in rows or set(self.scores.taps) != set(taps):
            return None
        for i, seq in zip(rows, batch, strict=True):
            if seq.slot is None or seq.slot.length != self.lengths[i] or seq.tokens[-1] != self.tokens[i]:
                return None
        self.target.settle([seq.slot for seq in batch], roots)
        if len(rows) == len(self.seqs):
            return self.scores
        index = torch.tensor(rows, device=self.scores.logits.device)
        return Scores(self.scores.logits[index], tuple(range(len(rows) + 1)), rows_at(self.scores.taps, index))

    def seconds(self) -> float:
        """That the pass took; only after its results were read."""
        return self.marks.spans()[0]


def overlaps(target: Target) -> bool:
    """Whether plain passes of this target may be begun early, and drafts for it be asked for."""
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
class Drafted:
    """Drafts under way for the next round of seqs. asked: when the host had asked for them; steered: by whom and what it was decided."""

    seqs: abc.Sequence[Sequence]
    budgets: list[Budget]
    drafts: list[Draft]
    marks: Marks
    asked: float
    steered: tuple[object, ...]

    def take(self, batch: abc.Sequence[Sequence], lanes: Lanes) -> tuple[list[Budget], list[Draft]] | None:
        """As `plan` and `propose` of this batch; None, and nothing taken, where none of these texts is left or somebody steered since."""
        place = {id(seq): i for i, seq in enumerate(self.seqs)}
        rows = [place.get(id(seq), -1) for seq in batch]
        if max(rows) < 0 or self.steered != lanes.steered:
            for seq in self.seqs:
                lanes.leave(seq)
            return None
        lanes.go_on(batch)
        names = [lanes.of(seq).name for seq in batch]
        return ([self.budgets[i] if i >= 0 else Budget(0, 0, name, LATE) for i, name in zip(rows, names, strict=True)],
                [self.drafts[i] if i >= 0 else Draft.empty(name) for i, name in zip(rows, names, strict=True)])

    def seconds(self, start: float) -> tuple[float, float]:
        """What the drafts took, and how much of that was left when the host started its round; only after their tokens were read."""
        spent = self.marks.spans()[0]
        return spent, max(0.0, spent - (start - self.asked))


def drafted(target: Target, lanes: Lanes, batch: abc.Sequence[Sequence]) -> Drafted | None:
    """Ask for the drafts of those whose texts go on; None if there are none."""
    going = [seq for seq in batch if seq.finish is None]
    if not going:
        return None
    marks = Marks(target.device)
    budgets = lanes.plan(going)
    drafts = lanes.propose(going, budgets)
    marks.mark()
    return Drafted(going, budgets, drafts, marks, perf_counter(), lanes.steered)
