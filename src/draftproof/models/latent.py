"""A fused layer whose keys and values are made of a latent (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434).

    q = turn(b_q(norm(a_q(x))))    or turn(q(x))
    c, r = a_kv(x)                 k, v = b_kv(norm(c)); to each head's k belongs turn(r), which all heads share; Kimi Linear turns nothing

One product makes a_q(x), or q(x), and c and r. What is kept is what attention reads: whole keys and values. Of a head what is turned stands
in front here, and all keys stand before the values: scores are sums over a head, of whatever order. kernels/latent.c runs all of it.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .. import llama, native
from .cache import PagePool
from .families import OPENING, Family, norm_of, part_of
from .fused import FusedLayer, scale_of
from .packed import Linear, joined
from .ropes import halves_apart


class LatentLayer(FusedLayer):
    """queries: the product that makes them of their latent, or None; keys_values: that of the other latent."""

    def _join(self, attention: Any, linear: Linear, family: Family) -> None:
        kept, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        self.value_dim, self.rank, self.shared = attention.v_head_dim, attention.kv_lora_rank, rope
        self.heads = self.kv_heads = len(attention.kv_b_proj.weight) // (kept + self.value_dim)
        adjoining = family.adjoining and getattr(attention.config, "rope_interleave", True)
        turned = halves_apart(rope) if adjoining else torch.arange(rope)
        heads = torch.arange(self.heads)[:, None] * self.head_dim
        asked = (heads + torch.cat([kept + turned, torch.arange(kept)])).flatten()
        low = getattr(attention, "q_proj", None) is None
        opening = part_of(attention, OPENING)
        first = [attention.q_a_proj if low else attention.q_proj, attention.kv_a_proj_with_mqa]
        weight, bias = joined(first if opening is None else [*first, opening])
        self.openings, self.opened_by = 0 if opening is None else opening.out_features, family.opened_by
        self.first = len(weight) - self.rank - rope - self.openings
        at = self.first + self.rank
        order = torch.cat([torch.arange(self.first) if low else asked, torch.arange(self.first, at), at + turned,
                           torch.arange(at + rope, len(weight))])
        self.qkv = _ordered(weight, bias, order, linear)
        self.queries: nn.Module | None = None
        if low:
            self.of_queries = norm_of(attention.q_a_layernorm, family)
            self.queries = _ordered(attention.q_b_proj.weight, attention.q_b_proj.bias, asked, linear)
        self.of_latent = norm_of(attention.kv_a_layernorm, family)
        both, last = torch.arange(self.heads * (kept + self.value_dim)).view(self.heads, -1), attention.kv_b_proj
        self.keys_values = _ordered(last.weight, last.bias, torch.cat([both[:, :kept].flatten(), both[:, kept:].flatten()]), linear)

    def _parts(self) -> list[Any]:
        return [*super()._parts(), *([] if self.queries is None else [self.queries]), self.keys_values]

    def _heads(self, made: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, first, own = len(made), 2 * self.rope.number, self.head_dim - self.shared
        cos, sin = angles[:, first : first + 1], angles[:, first + 1 : first + 2]
        asked, latent, shared = torch.split(made, [self.first, self.rank, self.shared], 1)
        if self.queries is not None:
            asked = self.queries(self._norm(asked, *self.of_queries))
        queries, shared = asked.view(rows, self.heads, self.head_dim), shared[:, None]
        if self.turned:
            queries, shared = (self._turn(part, cos, sin) for part in (queries, shared))
        if self.stretch is not None:
            queries.mul_(angles[:, -1:, :1])
        shared = shared.expand(-1, self.heads, -1)
        both = self.keys_values(self._norm(latent, *self.of_latent))
        keys, values = torch.split(both, [self.heads * own, self.heads * self.value_dim], 1)
        return queries, torch.cat([shared, keys.view(rows, self.heads, own)], -1), values.view(rows, self.heads, self.value_dim)

    def kernel(self, pool: PagePool) -> llama.Layer:
        made = super().kernel(pool)
        made.latent = ctypes.addressof(self._latent)
        return made

    @cached_property
    def _latent(self) -> llama.Latent:
        """One for all pools: each pass over the layers reads it where it lies."""
        *_, queries, keys_values = (part.product for part in self.streamed())
        of_latent = scale_of(self.of_latent, self.dtype)
        if self.queries is None:
            return llama.Latent(native.Product(), keys_values, native.Scale(), of_latent, self.value_dim, self.shared)
        return llama.Latent(queries, keys_values, scale_of(self.of_queries, self.dtype), of_latent, self.value_dim, self.shared)


def _ordered(weight: Tensor, bias: Tensor | None, order: Tensor, linear: Linear) -> nn.Module:
    """The layer of these rows of a weight."""
    return linear(weight.detach()[order], None if bias is None else bias.detach()[order])

