"""An EAGLE-3 head whose drafts of one sequence are made by one call of the compiled kernels (kernels/draft.c): it reads what the target
left of the text's last tokens, drafts level after level, and of a tree it finds the worthiest candidates.

    head = CompiledHead.of(eagle3 head)                         None if not all of it is our kernels'
    made = head.draft(wish, last [H], cache, features, keys)    None if a logit is no number: the twin says what is wrong

The lines of drafters/recurrent.py and grow.py are the twin: its drafts are the same.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ... import choices, llama, native
from ...core.host import Filters
from ..packed import StreamedLinear
from .cache import ROOM, HeadCache
from .eagle3 import Eagle3Head


class _Head(ctypes.Structure):
    _fields_ = [*native.fields(pointers="layers"), ("output", native.Product), ("fuse", native.Product), ("before", native.Scale),
                ("norm", native.Scale), *native.fields(pointers="embedding angles ids", numbers="count hidden size dim parts",
                                                       flags="normed halves")]


class _Growth(ctypes.Structure):
    _fields_ = [*native.fields(
        pointers="features text ends keys chances gap_edges share_edges own tokens spots slots number above named values shares gaps worth "
                 "most score",
        numbers="fed depth widest k nodes position held room page end_count gap_bins share_bins levels kept"),
        ("narrowed", choices.Filters), *native.fields(reals="temperature")]


class Wish(NamedTuple):
    """What is asked for after `position` + 1 tokens: so many levels and candidates per node; of a tree `nodes`, at most `widest` of them
    extended per level, and grow.py's odds (log chances [ranks, gaps, shares], edges of gaps, of shares), None for a chain. text: the
    tokens of the entries that are fed. ends: tokens behind which nothing grows."""

    position: int
    depth: int
    candidates: int
    filters: Filters
    ends: frozenset[int]
    text: Sequence[int] = ()
    nodes: int = 0
    widest: int = 1
    odds: tuple[Tensor, Tensor, Tensor] | None = None


Offered = tuple[list[list[int]], list[list[float]], list[list[float]], list[int]]
"""A level's candidates, best first: tokens, gaps, shares [slots][K], and spots [slots], which candidate of the level above a slot is."""


@dataclass(frozen=True, slots=True)
class Made:
    """What one call made, as its numbers lie (kernels/draft.c). last [H]: the stream of the text's last entry."""

    last: Tensor
    growth: _Growth
    integers: array[int]
    reals: array[float]
    starts: Sequence[int]       # of the parts of `integers`
    begins: Sequence[int]       # of the parts of `reals`

    @property
    def levels(self) -> int:
        return int(self.growth.levels)

    def line(self) -> tuple[list[list[int]], list[list[float]]]:
        """A chain's candidates: tokens and values [levels][K]."""
        every, k = range(0, self.levels * self.growth.k, self.growth.k), self.growth.k
        return [self.integers[i:i + k].tolist() for i in every], [self.reals[i:i + k].tolist() for i in every]

    def best(self) -> tuple[list[int], list[int], list[int], list[float], list[float]]:
        """A tree's worthiest candidates, worthiest first: their numbers, those of the candidates above them (-1: none), tokens, worth (log)
        and scores. A number is larger than that of the candidate above."""
        kept = self.growth.kept
        number, above, named = (self.integers[at:at + kept].tolist() for at in self.starts[3:6])
        worth, score = (self.reals[at:at + kept].tolist() for at in self.begins[4:6])
        return number, above, named, worth, score

    def level(self, at: int) -> Offered:
        """One level of a tree."""
        k, wide = self.growth.k, self.growth.widest
        slots, first = self.integers[self.starts[2] + at], at * wide * k
        every, spots = range(first, first + slots * k, k), self.starts[1] + at * wide
        gaps, shares = ([self.reals[begin + i:begin + i + k].tolist() for i in every] for begin in (self.begins[2], self.begins[1]))
        return [self.integers[i:i + k].tolist() for i in every], gaps, shares, self.integers[spots:spots + slots].tolist()


class CompiledHead:
    """The head's parts in memory, as the kernels take them; they must outlive it."""

    def __init__(self, head: Eagle3Head, layers: ctypes.Array[llama.Layer], embedding: Tensor, output: StreamedLinear,
                 fuse: StreamedLinear) -> None:
        self.head, self.layers, self.embedding = head, layers, embedding
        self.dtype, self.size = embedding.dtype, output.out_features
        self.before = None if head.input_norm is None else head.input_norm.weight.detach()
        if head.fc_norm is not None:
            self.before = torch.cat(list(head.fc_norm.parameters())).detach()
        self.struct = _Head(
            ctypes.addressof(layers), output.product, fuse.product, native.Scale.of(self.before, head.norm.eps, self.dtype),
            native.Scale.of(head.norm.weight, head.norm.eps, self.dtype), embedding.data_ptr(), None, native.address_of(head.ids),
            len(layers), head.shape.hidden, self.size, head.shape.head_dim, 1 if head.fc_norm is None else len(head.taps),
            head.norm_output, self.dtype == torch.bfloat16)

    @classmethod
    def of(cls, head: nn.Module) -> Self | None:
        """Of a head whose products are packed; None if a part of it, or the target's embedding, is not what the kernels know."""
        if type(head) is not Eagle3Head or not head.rope.whole:
            return None
        layers, table, output, fuse = head.layers.table(), head.embedding(), head.lm_head, head.fc
        if layers is None or type(table) is not nn.Embedding or table.weight.dtype != head.norm.weight.dtype:
            return None
        if not isinstance(output, StreamedLinear) or not isinstance(fuse, StreamedLinear):
            return None
        return cls(head, layers, table.weight.detach(), output, fuse)

    def draft(self, wish: Wish, last: Tensor | None, cache: HeadCache, features: Tensor | None, keys: Tensor | None) -> Made | None:
        """Levels after the text. last [H]: stream of its last entry, or None; features [n, taps · H_target] of entries behind those in the
        cache, which count there when they are drafted after: at least one of the two. keys int32 [depth, 2]: of the noise, None at
        temperature 0."""
        depth, wide, k, fed = wish.depth, wish.widest, min(wish.candidates, self.size), len(wish.text)
        self.struct.angles = self.head.rope.table(wish.position + depth, self.dtype).data_ptr()
        own, candidates = cache.room(fed + wide * depth), depth * wide * k
        given = array("q", chain(wish.text, wish.ends))
        starts = list(accumulate((candidates, depth * wide, depth, *[wish.nodes] * 3), initial=0))
        begins = list(accumulate((*[candidates] * 4, *[wish.nodes] * 2), initial=0))
        integers, reals = array("q", bytes(8 * starts[-1])), array("f", bytes(4 * begins[-1]))
        if features is not None or last is None:
            assert features is not None and len(features) == fed and features.dtype == self.dtype, f"features of {fed} entries"
            features, last = features.contiguous(), self.embedding.new_empty(self.embedding.shape[1])
        keys = None if keys is None else keys.contiguous()
        bins = (0 if edges is None else len(edges) + 1 for edges in (wish.odds or (None,) * 3)[1:])
        text, whole, real = (part.buffer_info()[0] for part in (given, integers, reals))
        heat, top_k, *thresholds = wish.filters
        narrowed = choices.Filters.of(1.0, top_k if top_k < self.size else 0, *thresholds)
        growth = _Growth(
            native.address_of(features), text, text + 8 * fed, native.address_of(keys), *map(native.address_of, wish.odds or (None,) * 3),
            own.data_ptr(), *(whole + 8 * at for at in starts[:-1]), *(real + 4 * at for at in begins[:-1]), fed, depth, wide, k,
            wish.nodes, wish.position, cache.length + fed, own.shape[2], ROOM, len(wish.ends), *bins, 0, 0, narrowed, heat or 1.0)
        if not native.draft(self.struct, growth, last):
            return None
        cache.advance(fed)
        return Made(last, growth, integers, reals, starts, begins)
