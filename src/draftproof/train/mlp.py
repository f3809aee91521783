"""IBM's MLP speculator (arXiv 2404.19124): each step reads the text's own tokens. All depths weigh the same, as published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..models.heads.mlp import DEPTH, MlpHead
from ..models.target import TargetParts
from .depths import DepthTask


class MlpTask(DepthTask):
    """inner, tied, tables as in `MlpHead.fresh`; soft=False is the published loss, against the tokens of the text."""

    def __init__(self, parts: TargetParts, depth: int = DEPTH, inner: int | None = None, tied: bool = True, tables: bool = False,
                 decay: float = 1.0, soft: bool = True, head: MlpHead | None = None) -> None:
        """head: one that goes on learning, instead of a new one."""
        super().__init__(head or MlpHead.fresh(parts, depth, inner, tied, tables=tables), parts, decay, soft)

    def guesses(self, taps: Mapping[int, Tensor], ids: Tensor) -> Iterator[Tensor]:
        state, rows = self.head.start(self.hidden(taps)), ids.shape[0] - 2
        for i in range(self.head.depth):
            logits, state = self.head.step(i, state[:max(0, rows - i)], ids[1 + i:-1])
            yield logits
