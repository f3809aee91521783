"""Hydra and Hydra++ (arXiv 2402.05109): each head reads the text's own tokens, and learns the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..models.heads.hydra import DEPTH, HydraHead
from ..models.target import TargetParts
from .base import Features
from .depths import DepthTask


class HydraTask(DepthTask):
    """prefix: Hydra++, whose heads read the text through a decoder layer; soft=False learns from the text's tokens instead."""

    def __init__(self, parts: TargetParts, depth: int = DEPTH, layers: int = 1, prefix: bool = False, decay: float = 1.0, soft: bool = True,
                 head: HydraHead | None = None) -> None:
        """head: one that goes on learning, instead of a new one."""
        super().__init__(head or HydraHead.fresh(parts, depth, layers, prefix=prefix), parts, decay, soft)

    def _counted(self, features: Features) -> Features:
        return features if self.head.prefix_embeding_layer is not None else super()._counted(features)

    def guesses(self, taps: Mapping[int, Tensor], ids: Tensor) -> Iterator[Tensor]:
        with torch.no_grad():
            state = self.head.read_target(taps[self.head.taps[0]]).float()
        if self.head.prefix_embeding_layer is not None:
            state = self.head.prefix_embeding_layer(state, torch.arange(state.shape[0], device=state.device), _causal)
        rows = ids.shape[0] - 2
        for i in range(self.head.depth):
            logits, state = self.head.step(i, state[:max(0, rows - i)], ids[1 + i:-1])
            yield logits


def _causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, heads, D] over k, v [n, kv, D] of the same text: [n, heads · D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1)[None] for x in (k, v))
    out = scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, is_causal=True)
    return out[0].transpose(0, 1).flatten(1)
