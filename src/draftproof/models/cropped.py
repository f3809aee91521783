"""Tier 2: a model that keeps its own cache, as long as that cache can be cropped. Chains only, one sequence per pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..types import Draft, Scores
from .passes import inferring
from .taps import Taps, rows_at, stacked
from .target import LoadFacts, TargetParts
from .tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class CroppedSlot:
    cache: Any
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


class CroppedTarget:
    """Implements `Target` over `DynamicCache.crop`. Rows of a pass are padded to two, as in tier 1."""

    trees = False

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        context: int,
        cache_tokens: int,
        whole_tiles: bool,
        facts: LoadFacts,
        parts: TargetParts,
        tokenizer: Tokenizer | None,
        defaults: dict[str, float],
        eos_ids: tuple[int, ...],
    ) -> None:
        self.model, self.vocab_size, self.context, self.cache_tokens, self.whole_tiles = (
            model,
            vocab_size,
            context,
            cache_tokens,
            whole_tiles,
        )
        self.facts, self.parts, self.tokenizer, self.defaults, self.eos_ids = facts, parts, tokenizer, defaults, eos_ids
        self.device = next(model.parameters()).device
        self.slots: list[CroppedSlot] = []
        self._taps = Taps(parts.layers)

    def set_taps(self, layers: Sequence[int]) -> None:
        self._taps.set(layers)

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> CroppedSlot:
        cache = DynamicCache(config=self.model.config)
        if hasattr(cache, "activate_past_recording"):  # sliding layers can be cropped only if they keep what slid out
            cache.activate_past_recording()
        slot = CroppedSlot(cache)
        self.slots.append(slot)
        return slot

    def fits(self, tokens: int) -> bool:
        return sum(s.length for s in self.slots) + tokens <= self.cache_tokens

    def truncate(self, slot: CroppedSlot, length: int) -> None:
        assert not slot.nodes and length <= slot.length, "a slot only shrinks, between passes"
        if length < slot.length:
            slot.cache.crop(length - slot.length)
        del slot.tokens[length:]

    def close(self, slot: CroppedSlot) -> None:
        if slot in self.slots:
            self.slots.remove(slot)

    @inferring
    def extend(self, slots: Sequence[CroppedSlot], tokens: Sequence[Tensor]) -> Scores:
        last, taps = [], []
        for slot, ids in zip(slots, tokens, strict=True):
            last.append(self._run(slot, ids)[-1])
            taps.append(self._tapped(ids.shape[0]))
            slot.tokens += ids.tolist()
            self._crop(slot)
        return Scores(torch.stack(last), tuple(range(len(slots) + 1)), stacked(taps))

    @inferring
    def score(self, slots: Sequence[CroppedSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        rows: list[Tensor] = []
        taps = []
        starts = [0]
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            root = roots[i : i + 1]
            assert draft.is_chain, "a model's own cache scores chains; the engine asks for trees only where `trees` is true"
            rows.append(self._run(slot, torch.cat([root.to(self.device), draft.tokens.to(self.device)])))
            taps.append(self._tapped(len(draft) + 1))
            slot.tokens.append(int(root))
            slot.nodes = draft.tokens.tolist()
            starts.append(starts[-1] + len(draft) + 1)
        return Scores(torch.cat(rows), tuple(starts), stacked(taps))

    def rewind(self, slot: CroppedSlot, kept: Sequence[int]) -> None:
        assert list(kept) == list(range(len(kept))), "kept nodes of a chain are its head"
        slot.tokens += slot.nodes[: len(kept)]
        slot.nodes = []
        self._crop(slot)

    def _crop(self, slot: CroppedSlot) -> None:
        """Drop what the cache holds beyond the slot's tokens; even where that is nothing, it trims what sliding layers recorded."""
        slot.cache.crop(slot.length - slot.cache.get_seq_length())

    def _tapped(self, rows: int) -> Mapping[int, Tensor]:
        return rows_at(self._taps.rows, slice(rows))

    def _run(self, slot: CroppedSlot, ids: Tensor) -> Tensor:
        """Logits [len(ids), V] after each of `ids`, appended to the slot's cache (one junk row more, where one would be alone)."""
        rows = ids.shape[0]
        if self.whole_tiles and rows == 1 and slot.length + 1 < self.context:
            ids = ids.repeat(2)
        at = torch.arange(slot.length, slot.length + ids.shape[0], device=self.device)[None]
        out = self.model(input_ids=ids.to(self.device)[None], position_ids=at, past_key_values=slot.cache, use_cache=True)
        logits: Tensor = out.logits[0, :rows]
        return logits
