"""Tier 2: a model that keeps its own cache, as long as that cache can be cropped. Chains only, one sequence per pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from ..errors import LoadError, first_line
from ..types import Draft, Scores
from .own import ADVICE, CACHES, CHUNK, OwnCacheTarget, OwnSlot, cache_name, difference
from .passes import inferring
from .selftest import differ_far, invisible
from .taps import rows_at, stacked

LONGER = 160  # tokens that are decoded in two ways, where a dozen rows were equal
ROWS = 24  # tokens that the check at load reads in one pass and in two


@dataclass(slots=True, eq=False)
class CroppedSlot(OwnSlot):
    """floor: the least length that the cache can be cut to, as windows and convolutions keep their last keys only."""

    floor: int = 0


class CroppedTarget(OwnCacheTarget[CroppedSlot]):
    """Implements `Target` over `DynamicCache.crop`. Rows of a pass are padded to two, as in tier 1."""

    slot = CroppedSlot

    def __init__(self, model: nn.Module, **shared: Any) -> None:
        super().__init__(model, **shared)
        self._cache_name = cache_name(model) or CACHES[0]  # who takes none is found out by `check`

    @inferring
    def check(self) -> None:
        """Raises LoadError where decoding behind a cached prefix does not give the logits of one pass over the whole text."""
        text = torch.randint(0, self.vocab_size, (min(ROWS, self.context),), generator=torch.Generator().manual_seed(20))
        half, name = len(text) // 2, f"{self.facts.name} ({self.parts.config.get_text_config().model_type})"
        try:
            whole, parts = self._logits(text, len(text)), self._logits(text, half)
            held = _bytes(self.slots[-1].cache)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{name} cannot decode from a cached prefix ({type(error).__name__}: {first_line(error)}); {ADVICE}") from error
        finally:
            self.slots.clear()
        most = 1e-3 if next(self.model.parameters()).dtype == torch.float32 else 0.05
        off = difference(parts[:half], whole[:half])
        if not off <= most:
            raise LoadError(f"{name}: a token's logits change with the tokens behind it ({off:.0e} off, relative), as an encoder's do; "
                            "expected a decoder, whose tokens read only those before them")
        off = difference(parts[half:], whole[half:])
        if not off <= most:
            raise LoadError(f"{name}: decoding behind a cached prefix gives other logits than one pass ({off:.0e} off, relative); {ADVICE}")
        self.facts = replace(self.facts, cache_bytes_per_token=held)

    def _logits(self, text: Tensor, width: int) -> Tensor:
        """Logits after each token of a text, scored so many at a time."""
        slot, rows = self.open([]), []
        for part in torch.split(text, width):
            rows.append(self.score([slot], part[:1], [Draft.chain(part[1:])]).logits)
            if slot.cache.get_seq_length() < slot.length + len(slot.nodes):
                raise LoadError(f"{self.facts.name}: a pass leaves nothing in the cache that it is given; expected a model that keeps keys "
                                f"and values there; {ADVICE}")
            self.rewind(slot, range(len(part) - 1))
        return torch.cat(rows)

    @inferring
    def measure(self, page_tokens: int, chunk: int) -> tuple[bool, str]:
        """Law 2 as `selftest.invisible` measures it, and on longer texts: the attention is the model's own, and where products round
        what they multiply, that it adds in another order shows in few rows only, or far from the beginning."""
        passed, reason = invisible(self, page_tokens, chunk)
        if passed:
            text = torch.randint(0, self.vocab_size, (min(LONGER, self.context),), generator=torch.Generator().manual_seed(21))
            different = int((self._logits(text, 1) != self._logits(text, 5)).any(-1).sum())
            self.slots.clear()
            if different:
                passed, reason = False, f"no: {different} of {len(text)} rows differ from plain decoding when scored 5 wide"
            elif far := differ_far(self):
                passed, reason = False, far
        return passed, reason

    @inferring
    def extend(self, slots: Sequence[CroppedSlot], tokens: Sequence[Tensor]) -> Scores:
        last, taps = [], []
        for slot, ids in zip(slots, tokens, strict=True):
            last.append(self._run(slot, ids)[-1])
            taps.append(self._tapped(ids.shape[0]))
            slot.tokens += ids.tolist()
            self._settle(slot)
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

    def _settle(self, slot: CroppedSlot) -> None:
        """Even where nothing is to be dropped, this trims what sliding layers recorded."""
        if slot.length < slot.floor:
            slot.cache = None
        elif slot.cache is not None:
            self._cut(slot, slot.length)

    def _cut(self, slot: CroppedSlot, length: int) -> None:
        slot.cache.crop(length - slot.cache.get_seq_length())
        if not all(_complete(layer, length) for layer in slot.cache.layers):
            slot.floor = length

    def _tapped(self, rows: int) -> Mapping[int, Tensor]:
        return rows_at(self._taps.rows, slice(rows))

    def _run(self, slot: CroppedSlot, ids: Tensor) -> Tensor:
        """Logits [len(ids), V] after each of `ids`, appended to the slot's cache. On failure the cache is that of the slot's tokens."""
        try:
            if slot.cache is None:
                self._rebuild(slot)
            elif slot.cache.get_seq_length() > slot.length:  # left by a pass whose tokens nobody noted
                self._settle(slot)
            return self._forward(slot, slot.length, ids.to(self.device))
        except BaseException:
            self._mend(slot)
            raise

    def _forward(self, slot: CroppedSlot, at: int, ids: Tensor) -> Tensor:
        """Logits [len(ids), V] of a pass over `ids` behind `at` tokens (one junk row more in the cache, where one would be alone)."""
        rows = ids.shape[0]
        if self.whole_tiles and rows == 1 and at + 1 < self.context:
            ids = ids.repeat(2)
        positions = torch.arange(at, at + ids.shape[0], device=self.device)[None]
        out = self.model(input_ids=ids[None], position_ids=positions, use_cache=True, **{self._cache_name: slot.cache})
        logits: Tensor = out.logits[0, :rows]
        return logits

    def _rebuild(self, slot: CroppedSlot) -> None:
        """A cache of the slot's tokens."""
        slot.cache, slot.floor, at = DynamicCache(config=self.model.config), 0, 0
        if hasattr(slot.cache, "activate_past_recording"):  # sliding layers can be cropped only if they keep what slid out
            slot.cache.activate_past_recording()
        for part in torch.split(torch.tensor(slot.tokens, dtype=torch.int64, device=self.device), CHUNK):
            if len(part):
                self._forward(slot, at, part)
                at += len(part)
                self._cut(slot, at)

    def _mend(self, slot: CroppedSlot) -> None:
        """After a pass that ended between two layers, or between keys and values: cut each back to the slot's tokens. A cache of which
        any layer cannot be cut, because it keeps another form or too little, is forgotten."""
        layers = [] if slot.cache is None or not slot.length else slot.cache.layers
        if layers and all(_holds(layer, slot.length) for layer in layers):
            for layer in layers:
                layer.keys, layer.values = layer.keys[..., : slot.length, :], layer.values[..., : slot.length, :]
        else:
            slot.cache = None


def _bytes(cache: Any) -> int:
    """Of a token's keys and values, in layers that keep them."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    return sum(rows[..., :1, :].nbytes for layer in layers for rows in (layer.keys, layer.values))


def _holds(layer: Any, length: int) -> bool:
    """Whether a layer of a cache keeps one row after another, as many as `length` or more."""
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return False
    return all(rows.ndim > 1 and rows.shape[-2] >= length for rows in (layer.keys, layer.values))


def _complete(layer: Any, length: int) -> bool:
    """Whether a layer of a cache still has something of every token, so that it can be cut to any length."""
    if isinstance(layer, DynamicLayer):
        return not layer.is_initialized or layer.keys.shape[-2] >= length
    return not isinstance(layer, LinearAttentionLayer) or all(state.shape[-1] >= length for state in layer.conv_states.values())
