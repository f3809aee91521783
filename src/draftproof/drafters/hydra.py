"""`hydra`: heads that read the target's last hidden state and every token since (arXiv 2402.05109). Those of Hydra++ read it
through a decoder layer over the whole text, whose keys are kept per sequence and brought up to date when a guess is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from ..core.upload import uploaded
from ..models.heads.cache import HeadCache, HeadPass, entry_bytes
from ..models.heads.hydra import HydraHead
from ..models.target import TargetParts
from ..types import SequenceView, Signals
from .base import NoOptions, Ranking, Site, published
from .vector import Line, VectorDrafter, VectorState
from .window import Window

CHUNK = 1024        # hidden states of one sequence that wait for the prefix layer at most


@dataclass(slots=True)
class PrefixState(VectorState):
    """The cache has entries of what the window holds; `row` is what the prefix layer says of the last, None while some wait."""

    cache: HeadCache | None = None
    window: Window = field(default_factory=Window)


class HydraDrafter(NoOptions, VectorDrafter):
    """`hydra:PATH`. Carried from level to level: the hidden state and the embeddings of all tokens since [B, n·H]."""

    name = "hydra"
    takes_path: ClassVar[bool] = True

    def __init__(self, head: HydraHead, parts: TargetParts, vocab_size: int) -> None:
        self.dtype, prefix = next(head.parameters()).dtype, head.prefix_embeding_layer
        self.cache_bytes_per_token = 0 if prefix is None else entry_bytes(1, prefix.shape.kv_heads, prefix.shape.head_dim, self.dtype)
        super().__init__(head, parts, vocab_size)

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published(cls.name, HydraHead.read, path, site), site.target.parts, site.target.vocab_size)

    def begin(self, lines: Sequence[Line], depth: int) -> Tensor:
        state: Tensor = self.head.start(self.hidden(lines))
        return state

    def step(self, level: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, read = self.head.step(level, carry, tokens)
        return logits, read

    def hidden(self, lines: Sequence[Line]) -> Tensor:
        if self.head.prefix_embeding_layer is None:
            hidden: Tensor = self.head.read_target(torch.stack([line.state.row for line in lines]))
            return hidden
        self._catch_up([line.state for line in lines if line.state.row is None])
        return torch.stack([line.state.row for line in lines])

    # Hydra++: the prefix layer's own cache.

    def fresh_state(self, seq: SequenceView, ranking: Ranking) -> VectorState:
        prefix = self.head.prefix_embeding_layer
        if prefix is None:
            return VectorState(seq, ranking)
        return PrefixState(seq, ranking, cache=HeadCache(1, prefix.shape.kv_heads, prefix.shape.head_dim, self.dtype, self.device))

    def close(self, state: VectorState) -> None:
        super().close(state)
        if isinstance(state, PrefixState):
            state.cache = None
            state.window.close()

    def take(self, state: VectorState, signals: Signals) -> None:
        if not isinstance(state, PrefixState):
            super().take(state, signals)
            return
        if state.cache is None:
            return
        window = state.window
        if window.take(signals.taps[self.head.taps[0]], signals.start):
            state.cache.truncate(0)
        if window.ahead:
            state.at, state.row = window.end - 1, None
        if window.ahead > CHUNK:
            self._catch_up([state])

    @torch.inference_mode()
    def _catch_up(self, states: Sequence[PrefixState]) -> None:
        """Pass all waiting rows through the prefix layer, of all sequences at once."""
        if not states:
            return
        caches = [cast(HeadCache, state.cache) for state in states]
        counts = [state.window.ahead for state in states]
        taps = [state.window.due(count) for state, count in zip(states, counts, strict=True)]
        places = [at for state in states for at in range(state.window.at, state.window.end)]
        attend = HeadPass(caches, counts)
        out = self.head.prefix_embeding_layer(self.head.read_target(torch.cat(taps)), uploaded(places, self.device), attend)
        attend.done()
        end = 0
        for state, count in zip(states, counts, strict=True):
            end += count
            state.row = out[end - 1].clone()
            state.window.read(count)
