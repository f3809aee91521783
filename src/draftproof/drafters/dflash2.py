"""`dflash2`: a DFlash block whose slots are tied together by a choice among each one's likeliest tokens (inco.ai/blog/dflash2).

The block is one pass; then the token chosen at a slot adds to the logits of the next one's candidates, at the cost of a few small products
per level. Nothing but candidates is guessed, so a law has no more tokens than a slot has candidates.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from ..models.heads.dflash import DFlash
from ..models.heads.dflash2 import DFlash2
from .dflash import Block, DFlashDrafter
from .slots import Slots


class SelectedBlock(Block):
    """`Slots` of a DFlash 2 head."""

    tied = True

    def __init__(self, head: DFlash2, slots: Tensor, anchors: Tensor) -> None:
        super().__init__(head, slots)
        self.selector, self.anchors = head.candidate_selector, anchors
        self.candidates, self.unary = head.candidates(self.base)                # [B, reach, K]
        self.gate = self.selector.hidden_projection(slots)

    def logits(self, level: int | Tensor, line: Tensor, came: Tensor, previous: Tensor | None) -> Tensor:
        before, candidates = self.anchors[line] if previous is None else previous, self.candidates[line, level]
        scores = self.unary[line, level] + self.selector(self.gate[line, level], before, candidates)
        none = torch.full((line.shape[0], self.base.shape[-1]), -math.inf, device=scores.device)
        return none.scatter_(-1, candidates, scores)


class DFlash2Drafter(DFlashDrafter):
    """`dflash2:PATH`. score: perturbed margin, how far log q + g of a token lies above the best other of its slot; a sibling's is
    negative."""

    name = "dflash2"
    kind: ClassVar[type[DFlash]] = DFlash2

    def _slots(self, hidden: Tensor, anchors: Tensor) -> Slots:
        assert isinstance(self.head, DFlash2)
        return SelectedBlock(self.head, hidden, anchors)
