"""`dspark`: a DFlash block whose slots are tied together by a Markov head (arXiv 2607.05147).

The block is one pass; then each slot's logits get the bias that the token chosen before it lends, which costs one small
matrix per level. In a tree every node gets the bias of its own parent, and joint rules are told the law under it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..models.heads.dflash import DFlash
from ..models.heads.domino import Domino
from ..models.heads.dspark import DSpark
from .dflash import Block, DFlashDrafter
from .slots import Slots


class TiedBlock(Block):
    """`Slots` of a DSpark or Domino head. Its belief in a token is the confidence head's log-odds that the target accepts it."""

    tied = True

    def __init__(self, head: DSpark | Domino, slots: Tensor, anchors: Tensor) -> None:
        super().__init__(head, slots)
        self.tying, self.anchors = head, anchors
        self.state: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []         # hidden states and the tokens before them, of every call

    def logits(self, level: int | Tensor, line: Tensor, came: Tensor, previous: Tensor | None) -> Tensor:
        before = self.anchors[line] if previous is None else previous
        hidden = self.slots[line, level]
        tied, self.state = self.tying.tie(self.base[line, level], before, hidden, None if self.state is None else self.state[came])
        self.seen.append((hidden, before))
        return tied

    def beliefs(self) -> list[Tensor]:
        belief = self.tying.confidence(*(torch.cat(part) for part in zip(*self.seen, strict=True)))
        return [] if belief is None else [belief]


class DSparkDrafter(DFlashDrafter):
    """`dspark:PATH`. score of a chain: the confidence head's log-odds where there is one, reported as they are and used for
    nothing, for published ones are not calibrated; otherwise, and in trees, the perturbed margin."""

    name = "dspark"
    kind: ClassVar[type[DFlash]] = DSpark

    def _slots(self, hidden: Tensor, anchors: Tensor) -> Slots:
        assert isinstance(self.head, (DSpark, Domino))
        return TiedBlock(self.head, hidden, anchors)
