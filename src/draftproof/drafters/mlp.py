"""`mlp`: IBM's MLP speculators (arXiv 2404.19124), a small recurrence from the target's last hidden state over the drafted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from torch import Tensor

from ..models.heads.detect import require
from ..models.heads.files import read_files
from ..models.heads.mlp import MlpHead
from ..models.target import TargetParts
from .base import NoOptions, Site
from .vector import Line, VectorDrafter


class MlpDrafter(NoOptions, VectorDrafter):
    """`mlp:PATH`. Carried from level to level: the state vector."""

    takes_path: ClassVar[bool] = True

    def __init__(self, head: MlpHead, parts: TargetParts, vocab_size: int) -> None:
        super().__init__("mlp", head, parts, vocab_size)

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        from ..models.load import builtin

        files = read_files(path or builtin("mlp"))
        require(files, "mlp")
        return cls(MlpHead.read(files, site.target.parts, site.target.vocab_size), site.target.parts, site.target.vocab_size)

    def begin(self, lines: Sequence[Line], depth: int) -> Tensor:
        state: Tensor = self.head.start(self.hidden(lines))
        return state

    def step(self, level: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = self.head.step(level, carry, tokens)
        return logits, state
