"""Keys and values of a draft head, one small cache per sequence, and attention over several of them in one pass.

    cache = HeadCache(layers, kv_heads, head_dim, dtype, device)      cache.length entries are held
    one = HeadPass(caches, counts, masks=None)                        counts[i] new rows for caches[i], flat one after the other
    out = one(layer, q [R, heads, D], k [R, kv, D], v [R, kv, D])     [R, heads · D]; call once per layer
    one.done()                                                        the new rows now count: lengths move
    cache.truncate(length)                                            forget what did not stand

Without a mask a new row sees everything held and the new rows up to itself (a chain, or catching up with the text). A mask
bool [counts[i], length + counts[i]] says what each new row of sequence i sees, so that a node of a tree sees its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...native import Course

ROOM = 64      # entries that a new cache has room for; it doubles when full


class HeadCache:
    """Entry i of every layer stands at index i; keys are already rotated, so positions are the head's affair."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.length = 0
        self._store = torch.empty(layers, 2, ROOM, kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._store.device

    @property
    def bytes(self) -> int:
        return self._store.numel() * self._store.element_size()

    def room(self, new: int) -> Tensor:
        """The storage [layers, 2, places, kv, D], keys before values, with places for so many entries behind those held."""
        if self.length + new > self._store.shape[2]:
            self._grow(self.length + new)
        return self._store

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Place k, v [n, kv, D] behind the held entries; keys and values [kv, length + n, D] with them."""
        end = self.length + k.shape[0]
        store = self.room(k.shape[0])[layer]
        keys, values = store[0], store[1]
        keys[self.length:end], values[self.length:end] = k, v
        return keys[:end].transpose(0, 1), values[:end].transpose(0, 1)

    def advance(self, rows: int) -> None:
        """Rows written to every layer now count."""
        self.length += rows

    def truncate(self, length: int) -> None:
        """Forget every entry from index `length` on."""
        assert 0 <= length <= self.length, f"{length} of {self.length} entries"
        self.length = length

    def _grow(self, needed: int) -> None:
        layers, _, room, kv_heads, head_dim = self._store.shape
        while room < needed:
            room *= 2
        wider = self._store.new_empty(layers, 2, room, kv_heads, head_dim)
        # Layers before this one may already hold rows beyond `length` of the pass that is under way.
        wider[:, :, :self._store.shape[2]] = self._store
        self._store = wider


class HeadPass:
    """The attention of one pass of a head over several sequences. See the head of this file."""

    def __init__(self, caches: Sequence[HeadCache], counts: Sequence[int], masks: Sequence[Tensor | None] | None = None) -> None:
        assert len(caches) == len(counts) and (masks is None or len(masks) == len(caches)), "one count, and one mask, per cache"
        self.caches, self.counts, self._given = caches, counts, masks

    @cached_property
    def masks(self) -> Sequence[Tensor | None]:
        if self._given is not None:
            return self._given
        return [_causal(cache.length, n, cache.device) for cache, n in zip(self.caches, self.counts, strict=True)]

    def courses(self) -> list[Course]:
        """The same for the compiled kernels: each sequence's own storage, in pages of ROOM entries."""
        found = []
        for cache, count, mask in zip(self.caches, self.counts, self._given or [None] * len(self.caches), strict=True):
            new, end = range(cache.length, cache.length + count), cache.length + count
            places = new if mask is None else [end - 1] * count
            found.append(Course(places, [(range(-(-end // ROOM)), range(count), 0)], new, range(count), ROOM, cache.room(count), mask))
        return found

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found, start = [], 0
        for cache, count, mask in zip(self.caches, self.counts, self.masks, strict=True):
            end = start + count
            keys, values = cache.write(layer, k[start:end], v[start:end])
            found.append(_attend(q[start:end], keys, values, mask))
            start = end
        return found[0] if len(found) == 1 else torch.cat(found)

    def done(self) -> None:
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.advance(count)


def _causal(held: int, new: int, device: torch.device) -> Tensor | None:
    if new == 1:
        return None
    return torch.ones(new, held + new, dtype=torch.bool, device=device).tril(held)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q [n, heads, D] over keys, values [kv, m, D]: [n, heads · D]. The query heads that share keys stand as further rows."""
    n, heads, dim = q.shape
    kv = keys.shape[0]
    group = heads // kv
    rows = q.view(n, kv, group, dim).permute(1, 2, 0, 3).reshape(1, kv, group * n, dim)
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    out = scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask)
    return out.view(kv, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)
