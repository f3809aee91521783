"""`mlp`: IBM's MLP speculators (arXiv 2404.19124), a small recurrence from the target's last hidden state over the drafted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from torch import Tensor

from ..models.heads.mlp import MlpHead
from .base import NoOptions, Site, published
from .vector import Line, VectorDrafter


class MlpDrafter(NoOptions, VectorDrafter):
    """`mlp:PATH`. Carried from level to level: the state vector."""

    name = "mlp"
    takes_path: ClassVar[bool] = True

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published(cls.name, MlpHead.read, path, site), site.target.parts, site.target.vocab_size)

    def begin(self, lines: Sequence[Line], depth: int) -> Tensor:
        state: Tensor = self.head.start(self.hidden(lines))
        return state

    def step(self, level: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = self.head.step(level, carry, tokens)
        return logits, state
