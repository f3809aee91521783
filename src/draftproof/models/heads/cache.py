"""Keys and values of a draft head, one small cache per sequence, and attention over several of them in one pass.

    cache = HeadCache(layers, kv_heads, head_dim, dtype, device)      cache.length entries are held
    one = HeadPass(caches, counts, masks=None)                        counts[i] new rows for caches[i], flat one after the other
    out = one(layer, q [R, heads, D], k [R, kv, D], v [R, kv, D])     [R, heads · D]; call once per layer
    one.done()                                                        the new rows now count: lengths move
    cache.truncate(length)                                            forget what did not stand

Without a mask a new row sees everything held and the new rows up to itself (a chain, or catching up with the text). A mask
bool [counts[i], length + counts[i]] says what each new row of sequence i sees, so that a node of a tree sees its ancestors.

Caches that share a `CachePool` lie side by side in one tensor, so that a recorded pass (recorded.py) reads and writes them all at once;
one that the pool has no room for has its own storage, as on a processor all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...native import Course

ROOM = 64      # entries that a new cache has room for; it doubles when full
POOLED = 256   # the same in a pool
MOST_BYTES = 4 << 30       # of a pool
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]      # cuDNN's makes a plan on the host for each shape


def entry_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Of one entry's keys and values in all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


class CachePool:
    """Caches of one head in one tensor: store [layers, 2, slots, room, kv, D]. Both its slots and their room double when they are used up;
    then `store` is another tensor. All in it are finite numbers, for an attention that masks entries still multiplies them by 0."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.store = torch.zeros(layers, 2, 1, POOLED, kv_heads, head_dim, dtype=dtype, device=device)
        self._free = [0]

    @property
    def slots(self) -> int:
        return self.store.shape[2]

    @property
    def room(self) -> int:
        return self.store.shape[3]

    def take(self) -> int | None:
        """The first free slot; None if there is no memory for another."""
        if not self._free and not self._grow(2 * self.slots, self.room):
            return None
        return heappop(self._free)

    def give(self, slot: int) -> None:
        heappush(self._free, slot)

    def widen(self, needed: int) -> bool:
        """Room for so many entries of each slot, if there is memory for it."""
        room = self.room
        while room < needed:
            room *= 2
        return room == self.room or self._grow(self.slots, room)

    def _grow(self, slots: int, room: int) -> bool:
        layers, _, before, held, kv_heads, head_dim = self.store.shape
        if layers * 2 * slots * room * kv_heads * head_dim * self.store.element_size() > MOST_BYTES:
            return False
        wider = self.store.new_zeros(layers, 2, slots, room, kv_heads, head_dim)
        wider[:, :, :before, :held] = self.store
        self.store = wider
        for slot in range(before, slots):
            self.give(slot)
        return True


class HeadCache:
    """Entry i of every layer stands at index i; keys are already rotated, so positions are the head's affair. slot: its place in the
    pool, None outside of one."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str,
                 pool: CachePool | None = None) -> None:
        self.length = 0
        self.pool, self.slot = pool, None if pool is None else pool.take()
        self._own = torch.empty(layers, 2, 0 if self.slot is not None else ROOM, kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def _store(self) -> Tensor:
        return self._own if self.pool is None or self.slot is None else self.pool.store[:, :, self.slot]

    def close(self) -> None:
        """Give the slot back; nothing is held any more."""
        if self.pool is not None and self.slot is not None:
            self.pool.give(self.slot)
        self.length, self.slot = 0, None

    @property
    def device(self) -> torch.device:
        return self._store.device

    @property
    def bytes(self) -> int:
        return self._store.numel() * self._store.element_size()

    def pooled(self, new: int) -> bool:
        """Whether its slot has room for so many entries behind those held; it is outside of the pool if not."""
        if self.pool is not None and self.slot is not None and self.length + new > self.pool.room:
            self._grow(self.length + new)
        return self.slot is not None

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
        if self.pool is not None and self.slot is not None and self.pool.widen(needed):
            return
        before = self._store
        layers, _, held, kv_heads, head_dim = before.shape
        room = held
        while room < needed:
            room *= 2
        wider = before.new_empty(layers, 2, room, kv_heads, head_dim)
        # Layers before this one may already hold rows beyond `length` of the pass that is under way.
        wider[:, :, :held] = before
        self._own = wider
        if self.pool is not None and self.slot is not None:
            self.pool.give(self.slot)
            self.slot = None


class HeadPass:
    """The attention of one pass of a head over several sequences. See the head of this file."""

    def __init__(self, caches: Sequence[HeadCache], counts: Sequence[int], masks: Sequence[Tensor | None] | None = None,
                 window: int | None = None) -> None:
        """window: how many entries a row sees at most, of its own path, itself among them."""
        assert len(caches) == len(counts) and (masks is None or len(masks) == len(caches)), "one count, and one mask, per cache"
        self.caches, self.counts, self._given, self._windows = caches, counts, masks, {} if window is None else {window: self}
        if window is not None and any(cache.length + n > window for cache, n in zip(caches, counts, strict=True)):
            self._given = [_recent(mask, cache.length, n, window, cache.device) for cache, n, mask in zip(
                caches, counts, masks or [None] * len(caches), strict=True)]

    def within(self, window: int | None) -> HeadPass:
        """The same pass for a layer that slides."""
        if window is None:
            return self
        if window not in self._windows:
            self._windows[window] = HeadPass(self.caches, self.counts, self._given, window)
        return self._windows[window]

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


class SlotPass:
    """`HeadPass` over slots of a pool [layers, 2, slots, room, kv, D], of tensors alone. write_to [R]: where each row's key goes, counted
    over all slots · take [S, n]: the rows that stand as slot s's queries · sees [S, n, room]: the entries that each of them sees ·
    back [R]: the query that each row is, counted over all slots."""

    def __init__(self, store: Tensor, write_to: Tensor, take: Tensor, sees: Tensor, back: Tensor) -> None:
        self.places, self.seen = store.flatten(2, 3), store[:, :, :take.shape[0], :sees.shape[2]].transpose(3, 4)
        self.write_to, self.take, self.back = write_to, take, back
        self.mask = sees[:, None, None]                                                             # [S, 1, 1, n, room]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for places, new in zip(self.places[layer], (k, v), strict=True):
            places.index_copy_(0, self.write_to, new)
        (slots, n), (_, heads, dim) = self.take.shape, q.shape
        keys, values = self.seen[layer]                                                             # [S, kv, room, D]
        kv, room = keys.shape[1:3]
        # The query heads that share keys stand as further rows.
        queries = q[self.take].view(slots, n, kv, heads // kv, dim).permute(0, 2, 3, 1, 4).reshape(slots, kv, -1, dim)
        mask = self.mask.expand(slots, 1, heads // kv, n, room).reshape(slots, 1, -1, room)
        with sdpa_kernel(KERNELS):
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return out.view(slots, kv, heads // kv, n, dim).permute(0, 3, 1, 2, 4).reshape(slots * n, heads * dim)[self.back]


def _causal(held: int, new: int, device: torch.device) -> Tensor | None:
    if new == 1:
        return None
    return torch.ones(new, held + new, dtype=torch.bool, device=device).tril(held)


def _recent(mask: Tensor | None, held: int, new: int, window: int, device: torch.device) -> Tensor:
    """A pass's mask without what lies further back than the window. A row sees all entries of its path, so their number is its place;
    guesses, of which a path has fewer than a window, are never too far back."""
    seen = torch.ones(new, held + new, dtype=torch.bool, device=device).tril(held) if mask is None else mask
    return seen & (torch.arange(held + new, device=device) > seen.sum(1, keepdim=True) - 1 - window)


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
