"""Medusa-1 (arXiv 2401.10774): the heads alone learn, the target stays as it is. Depth i weighs 0.8 ** i, as published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..models.heads.medusa import HEADS, MedusaHead
from ..models.target import TargetParts
from .depths import DepthTask


class MedusaTask(DepthTask):
    """output and ids as in `MedusaHead.fresh`; soft=False is the published loss, against the tokens of the text."""

    def __init__(self, parts: TargetParts, depth: int = HEADS, layers: int = 1, output: str = "target", ids: Tensor | None = None,
                 decay: float = 0.8, soft: bool = True, head: MedusaHead | None = None) -> None:
        """head: one that goes on learning, instead of a new one."""
        super().__init__(head or MedusaHead.fresh(parts, depth, layers, output, ids), parts, decay, soft)

    def guesses(self, taps: Mapping[int, Tensor], ids: Tensor) -> Iterator[Tensor]:
        logits = self.head(self.hidden(taps)[:-2])
        for i in range(self.head.depth):
            yield logits[:logits.shape[0] - i, i]
