"""`assistant`: Gemma 4's drafters, a few layers of queries over the keys that the target has left for the text (models/heads/assistant.py).

No prefill and no cache: a round looks up the keys of two of the target's layers where they lie, and then asks again and again from the last
place that the target has read, each time with the token guessed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..core.upload import index_of, uploaded
from ..models.cache import PagePool
from ..models.heads.assistant import Assistant, Keys, View
from ..models.key_levels import opened
from ..models.paged import PagedTarget, paged_of
from .base import NoOptions, Site, published
from .vector import Line, VectorDrafter, VectorState


@dataclass(frozen=True, slots=True)
class Carry:
    """hidden [B · F, H]: of F nodes of each of the B texts that the view is of."""

    hidden: Tensor
    view: View


class AssistantDrafter(NoOptions, VectorDrafter):
    """`assistant:PATH`. The sequences must be the engine's: their places in the target's cache are read."""

    name = "assistant"
    takes_path: ClassVar[bool] = True
    unseen: ClassVar[str] = "what the target keeps of a running text"           # in a replay

    def __init__(self, head: Assistant, target: PagedTarget) -> None:
        super().__init__(head, target.parts, target.vocab_size)
        self.pool = target.pool

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        target = paged_of(site.target, cls.name, "keys it reads")
        return cls(published(cls.name, Assistant.read, path, site), target)

    def missing(self, state: VectorState) -> str:
        if getattr(state.seq, "slot", None) is None:
            return "the sequence has no place in the target's cache"
        return super().missing(state)

    def begin(self, lines: Sequence[Line], depth: int) -> Carry:
        slots: list[Any] = [line.seq.slot for line in lines]  # type: ignore[attr-defined]
        ends = [len(line.seq.tokens) - 1 for line in lines]                 # keys that a text has: the root's are not there yet
        assert all(slot.length >= end for slot, end in zip(slots, ends, strict=True)), "the target has read all but the root"
        keys = {kind: gathered(self.pool, layer, [slot.pages for slot in slots], ends, window)
                for kind, (layer, window) in self.head.layers.items()}
        return Carry(self.hidden(lines), View(keys, self.head.turns(uploaded([end - 1 for end in ends], self.device))))

    def step(self, level: int, carry: Carry, tokens: Tensor) -> tuple[Tensor, Carry]:
        logits, hidden = self.head.step(carry.hidden, tokens, carry.view)
        return logits, replace(carry, hidden=hidden)

    def keep(self, carry: Carry, rows: Tensor) -> Carry:
        return Carry(carry.hidden[rows], carry.view.of(rows))

    def follow(self, carry: Carry, rows: Tensor) -> Carry:
        return replace(carry, hidden=carry.hidden[rows])


def gathered(pool: PagePool, layer: int, tables: Sequence[Sequence[int]], ends: Sequence[int], window: int | None) -> Keys:
    """The first ends[i] keys of the texts in the pages tables[i], of them the last `window` (None: all); where one text lies in
    consecutive pages, as they lie."""
    size, (keys, values) = pool.page_tokens, pool.pages(layer)
    found: list[tuple[Tensor, Tensor]] = []
    for table, end in zip(tables, ends, strict=True):
        start = max(0, end - window) if window else 0
        pages = table[start // size:-(-end // size)]
        where = index_of(pages, keys.device)
        inside = slice(start % size, start % size + end - start)
        found.append((opened(keys[where].flatten(0, 1)[inside]), opened(values[where].flatten(0, 1)[inside])))
    if len(found) == 1:
        key, value = found[0]
        return Keys(key.transpose(0, 1)[None], value.transpose(0, 1)[None], None)
    lengths = [key.shape[0] for key, _ in found]
    key, value = (pad_sequence(list(part), batch_first=True).transpose(1, 2) for part in zip(*found, strict=True))
    there = torch.arange(max(lengths), device=keys.device) < uploaded(lengths, keys.device)[:, None]
    return Keys(key, value, None if min(lengths) == max(lengths) else there[:, None, None])
