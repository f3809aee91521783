"""An EAGLE-3 head whose drafts of one sequence are made by one call of the compiled kernels (kernels/draft.c), level after level.

    head = CompiledHead.of(eagle3 head)                  None if not all of it is our kernels'
    levels = head.draft(wish, last [H], cache, keys)     None if a logit is no number: the twin says what is wrong

The lines of drafters/recurrent.py and grow.py are the twin: its drafts are the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from ... import native
from ..packed import StreamedLinear
from .cache import ROOM, HeadCache
from .eagle3 import Eagle3Head


class _Head(ctypes.Structure):
    _fields_ = [*native.fields(pointers="layers"), ("output", native.Product),
                *native.fields(pointers="norm embedding angles ids", numbers="count hidden size dim", reals="eps", flags="normed halves")]


class _Growth(ctypes.Structure):
    _fields_ = native.fields(pointers="keys ends chances gap_edges share_edges own tokens spots values shares gaps worth",
                             numbers="depth widest k nodes position held room page end_count gap_bins share_bins", reals="temperature")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for after `position` + 1 tokens, `held` of which have entries: so many levels and candidates per node; of a tree
    `nodes`, at most `widest` of them extended per level, and grow.py's odds (log chances [ranks, gaps, shares], edges of gaps, of shares),
    None for a chain. ends: tokens behind which nothing grows."""

    position: int
    held: int
    depth: int
    candidates: int
    temperature: float
    ends: frozenset[int]
    nodes: int = 0
    widest: int = 1
    odds: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Candidates of a level, best first: tokens, values [slots, K]; of a tree also shares, gaps, worth [slots, K] and spots [slots],
    which candidate of the level above each slot is."""

    tokens: Tensor
    values: Tensor
    shares: Tensor
    gaps: Tensor
    worth: Tensor
    spots: Tensor


class CompiledHead:
    """The head's parts in memory, as the kernels take them; they must outlive it."""

    def __init__(self, head: Eagle3Head, layers: ctypes.Array[native.Layer], embedding: Tensor, output: StreamedLinear) -> None:
        self.head, self.layers, self.embedding = head, layers, embedding
        self.dtype, self.size = embedding.dtype, output.out_features
        self.struct = _Head(
            ctypes.addressof(layers), output.product, head.norm.weight.data_ptr(), embedding.data_ptr(), None,
            native.address_of(head.ids), len(layers), head.shape.hidden, self.size, head.shape.head_dim,
            head.norm.eps, head.norm_output, self.dtype == torch.bfloat16)

    @classmethod
    def of(cls, head: nn.Module) -> Self | None:
        """Of a head whose products are packed; None if a part of it, or the target's embedding, is not what the kernels know."""
        if type(head) is not Eagle3Head or not isinstance(head.lm_head, StreamedLinear) or not head.rope.whole:
            return None
        layers, table = head.layers.table(), head.embedding()
        if layers is None or type(table) is not nn.Embedding or table.weight.dtype != head.norm.weight.dtype:
            return None
        return cls(head, layers, table.weight.detach(), head.lm_head)

    def draft(self, wish: Wish, last: Tensor, cache: HeadCache, keys: Tensor | None) -> list[Level] | None:
        """Levels after the stream `last` [H] of the last entry. keys int32 [depth, 2]: of the noise, None at temperature 0."""
        depth, wide, k = wish.depth, wish.widest, min(wish.candidates, self.size)
        self.struct.angles = self.head.rope.table(wish.position + depth, self.dtype).data_ptr()
        own, ends = cache.room(wide * depth), (ctypes.c_int64 * max(1, len(wish.ends)))(*wish.ends)
        tokens, spots = torch.empty(depth, wide, k, dtype=torch.int64), torch.empty(depth, wide, dtype=torch.int64)
        values, shares, gaps, worth = torch.empty(4, depth, wide, k)
        chances, gap_edges, share_edges = wish.odds or (None, None, None)
        bins = (0 if edges is None else len(edges) + 1 for edges in (gap_edges, share_edges))
        parts = chances, gap_edges, share_edges, own, tokens, spots, values, shares, gaps, worth
        keys, last = None if keys is None else keys.contiguous(), last.contiguous()
        growth = _Growth(
            native.address_of(keys), ctypes.addressof(ends), *map(native.address_of, parts),
            depth, wide, k, wish.nodes, wish.position, wish.held, own.shape[2], ROOM, len(wish.ends), *bins, wish.temperature)
        slots = (ctypes.c_long * depth)()
        made = native.draft(self.struct, growth, last, slots)
        if made < 0:
            return None
        return [Level(*(part[at, :n] for part in (tokens, values, shares, gaps, worth, spots))) for at, n in enumerate(slots[:made])]
