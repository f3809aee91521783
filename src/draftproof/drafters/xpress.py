"""`xpress`: a DFlash block whose slots are tied together by a refiner, which reads every token chosen before a slot.

The block is one pass; then each slot's logits get a bias, at the cost of a few small matrices per level. In a tree every node gets that of
its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..core.upload import uploaded
from ..models.heads.dflash import Blocks, DFlash
from ..models.heads.xpress import XPress
from .dflash import Block, BlockState, DFlashDrafter
from .slots import Slots


class RefinedBlock(Block):
    """`Slots` of an XPress head. rows [B, block, H]: of the whole block; before [B]: the tokens in front of the anchors."""

    tied = True

    def __init__(self, head: XPress, rows: Tensor, depth: int, anchors: Tensor, before: Tensor) -> None:
        self.first = head.block - head.reach                            # the row that guesses first
        super().__init__(head, rows[:, self.first:self.first + depth])
        self.refiner, self.anchors, self.features = head.xpress_head, anchors, head.xpress_head.features(rows)
        read = [self.refiner.read(self.features[:, 0], before)] if self.first else []
        self.past = torch.stack(read, 1) if read else self.features.new_empty(rows.shape[0], 0, head.xpress_head.w1.embedding_dim)

    def logits(self, level: int | Tensor, line: Tensor, came: Tensor, previous: Tensor | None) -> Tensor:
        before = self.anchors[line] if previous is None else previous
        x = self.refiner.read(self.features[line, self.first + level], before)
        self.past = torch.cat((self.past[came], x[:, None]), 1)
        tied: Tensor = self.base[line, level] + self.refiner(self.past)
        return tied


class XPressDrafter(DFlashDrafter):
    """`xpress:PATH`. score: perturbed margin, how far log q + g of a token lies above the best other of its slot; a sibling's is
    negative."""

    name = "xpress"
    kind: ClassVar[type[DFlash]] = XPress

    def _pass(self, states: Sequence[BlockState], depth: int) -> Slots:
        texts = [state.seq.tokens for state in states]
        anchors, before, positions = uploaded([[text[-1] for text in texts], [text[-2:][0] for text in texts],
                                               [len(text) - 1 for text in texts]], self.device).unbind()
        assert isinstance(self.head, XPress)
        rows = self.head.rows(anchors, positions, Blocks(self.head, [state.cache for state in states if state.cache is not None]))
        return RefinedBlock(self.head, rows, depth, anchors, before)
