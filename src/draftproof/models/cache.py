"""Keys and values in pages. The key of position t always stands at t mod P of its page, so a row reads the same
addresses in the same order whatever was drafted beside it (Law 2), and a rejected token costs nothing: the length moves back.

    positions   [0 ……… P)  [P ……… 2P)  [2P …        half-open, an absolute grid
    slot.pages     7           3           9          a page table per sequence
    storage     key of t at row pages[t // P] * P + t % P of every layer

Full pages are shared between sequences of one tenant by reference count; the page that is being written never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from .. import gpu, native
from ..core.upload import sent
from ..errors import CacheFull
from ..huge import zeros
from ..native import BEHIND
from .key_levels import rounded
from .states import Mark, State, States

Prefix = tuple[str, int, tuple[int, ...]]  # tenant, page before it (−1: none), the page's tokens


@dataclass(slots=True, eq=False)
class PagedSlot:
    """One sequence: its tokens (those whose keys are held), its page table, and the draft that awaits `rewind`.

    From the first one that was drafted on a device on, tokens are `unread` until somebody asks for them: a look waits for the device."""

    tenant: str
    held: list[int] = field(default_factory=list)  # its tokens but for those unread
    pages: list[int] = field(default_factory=list)
    shared: int = 0  # leading pages that other slots may read
    nodes: Tensor | None = None  # drafted tokens of the pass in flight
    tails: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)  # (path, its own pages) in a tree
    closed: bool = False
    unread: list[Tensor] = field(default_factory=list)
    waiting: int = 0  # how many tokens those are
    state: State | None = None  # of a model with recurrent states: what these know of the tokens

    @property
    def length(self) -> int:
        return len(self.held) + self.waiting

    @property
    def tokens(self) -> list[int]:
        """Waits for the device if tokens are unread."""
        for ids in self.unread:
            self.held += ids.tolist()
        self.unread.clear()
        self.waiting = 0
        return self.held

    def add(self, ids: Tensor) -> None:
        if ids.is_cpu and not self.unread:
            self.held += ids.tolist()
        else:
            self.unread.append(ids)
            self.waiting += len(ids)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        while self.unread and self.length - len(self.unread[-1]) >= length:
            self.waiting -= len(self.unread.pop())
        if self.length > length and self.unread:
            self.unread[-1] = self.unread[-1][: length - self.length]
            self.waiting = length - len(self.held)
        del self.held[length:]
        if self.state is not None:
            self.state.cut(length)


class PagePool:
    """Page ids, their reference counts and the storage of every layer. Page 0 is never handed out."""

    def __init__(self, page_tokens: int, capacity_tokens: int, device: torch.device, states: States | None = None,
                 token_bytes: int = 0, in_levels: bool = False) -> None:
        """states: of a model that has such: a text begins with pages of another only where a mark is kept, of which there may be as many
        bytes as of keys and values, of which a token has so many. in_levels: these are kept in eight bits (key_levels.py)."""
        self.page_tokens, self.device, self.states, self.most_marks = page_tokens, device, states, 0
        if states is not None:
            states.page, self.most_marks = page_tokens, max(1, capacity_tokens * token_bytes // states.mark_bytes)
        self.capacity = max(2, -(-capacity_tokens // page_tokens)) + 1
        self.allocated = min(8, self.capacity)  # pages that the storage has room for; it grows by doubling
        self.free = list(range(1, self.allocated))  # a heap: the lowest first, so that a text's pages are mostly consecutive
        self.references = [0] * self.capacity
        self.in_levels = in_levels
        self.keys: dict[int, Tensor] = {}  # layer → [allocated * P, kv_heads, head_dim], or as `rounded` makes heads
        self.values: dict[int, Tensor] = {}
        self.copies: tuple[Tensor, Tensor]  # where `read` copies keys and values to
        self._places: list[int] = []  # addresses of all layers' keys and values, and these on the device
        self._addresses: Tensor
        self.index: dict[Prefix, int] = {}  # published full pages
        self.prefix_of: dict[int, Prefix] = {}
        self.marks: OrderedDict[int, Mark] = OrderedDict()  # by published page, the last one used last
        self.behind: dict[int, set[int]] = {}  # published page → those that were published right behind it
        self.idle: OrderedDict[int, None] = OrderedDict()  # published, referenced by nobody; oldest first

    def available(self) -> int:
        """Pages that could be handed out now."""
        return len(self.free) + len(self.idle) + self.capacity - self.allocated

    def take(self) -> int:
        """A page of one's own. Raises CacheFull, changing nothing."""
        if not self.free and self.allocated < self.capacity:
            self.grow()
        if self.free:
            page = heappop(self.free)
        elif self.idle:
            page, _ = self.idle.popitem(last=False)
            self._unpublish(page)
        else:
            raise CacheFull(
                f"all {self.capacity - 1} cache pages of {self.page_tokens} tokens are in use; raise cache_tokens (--cache-tokens), "
                "or run fewer or shorter sequences"
            )
        self.references[page] = 1
        return page

    def release(self, page: int) -> None:
        self.references[page] -= 1
        assert self.references[page] >= 0, "a page is released as often as it was taken"
        if self.references[page] == 0:
            if page in self.prefix_of:
                self.idle[page] = None
            else:
                heappush(self.free, page)

    def storage(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value storage of a layer, made at its first use from the shapes [rows, kv_heads, dim] it is given."""
        if layer not in self.keys:
            for store, one in ((self.keys, key), (self.values, value)):
                store[layer] = self._zeros(self.allocated, self.kept(one))
            self.copies = self.keys[layer].new_empty(0), self.values[layer].new_empty(0)
        return self.keys[layer], self.values[layer]

    def _zeros(self, pages: int, like: Tensor) -> Tensor:
        shape = pages * self.page_tokens, *like.shape[1:]
        return zeros(shape, like.dtype) if like.device.type == "cpu" else torch.zeros(*shape, dtype=like.dtype, device=like.device)

    def kept(self, heads: Tensor) -> Tensor:
        """Keys or values [rows, kv_heads, dim] as they are stored."""
        return rounded(heads) if self.in_levels else heads

    def numbers(self, layer: int) -> int:
        """Of a head of values."""
        return self.values[layer].shape[-1] - (BEHIND if self.in_levels else 0)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, [pages, P, kv_heads, dim]."""
        key, value = self.keys[layer], self.values[layer]
        return key.view(-1, self.page_tokens, *key.shape[1:]), value.view(-1, self.page_tokens, *value.shape[1:])

    def read(self, layer: int, pages: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, P, kv_heads, dim] of a layer: those of a slice where they lie, others as a copy. On a CPU the next
        read overwrites it, because new memory for every copy would take longer than the copying; elsewhere memory is at hand, and a
        recorded pass may hold no memory that others resize."""
        key, value = self.pages(layer)
        if isinstance(pages, slice) or self.device.type != "cpu":
            return key[pages], value[pages]
        for store, copy in zip((key, value), self.copies, strict=True):
            torch.index_select(store, 0, pages, out=copy.resize_(len(pages), *store.shape[1:]))
        return self.copies

    def copy(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """For each (source, target, start, end): keys at places [start, end) of a page to the same places of another, in every layer."""
        size, stores = self.page_tokens, [*self.keys.values(), *self.values.values()]
        moves = [(source * size + start, target * size + start, end - start) for source, target, start, end in copies if end > start]
        if not (moves and stores):
            return
        if self.device.type == "cpu" and native.available()[0]:
            native.copy_rows(stores, moves)
            return
        places = np.concatenate([np.add.outer(move[:2], np.arange(move[2])) for move in moves], 1)
        source, target = sent(torch.from_numpy(places), self.device)
        if len({(store.shape, store.dtype) for store in stores}) == 1 and gpu.available(self.device, stores[0].dtype)[0]:
            self._moved(stores, source, target)  # in one launch, where every layer by itself took longer than the tree's pass
            return
        for rows in stores:
            rows.index_copy_(0, target, rows[source])

    def _moved(self, stores: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
        from ..gpu.calls import move

        places = [store.data_ptr() for store in stores]
        if places != self._places:
            self._places, self._addresses = places, sent(torch.tensor(places), self.device)
        move(self._addresses, stores[0], source, target)

    def grow(self) -> None:
        """Room for twice as many pages; what is held moves."""
        grown = min(self.capacity, self.allocated * 2)
        for store in (self.keys, self.values):
            for layer, rows in store.items():
                bigger = self._zeros(grown, rows)
                bigger[: rows.shape[0]] = rows
                store[layer] = bigger
        self.free += range(self.allocated, grown)
        self.allocated = grown

    # Sharing: a published page holds the keys of exactly these tokens after exactly that page, so equal keys mean equal bits.

    def publish(self, slot: PagedSlot) -> None:
        """Offer the slot's full pages to later prompts of the same tenant."""
        for number in range(slot.shared, slot.length // self.page_tokens):
            before = slot.pages[number - 1] if number else -1
            prefix = (slot.tenant, before, tuple(slot.tokens[number * self.page_tokens : (number + 1) * self.page_tokens]))
            known = self.index.get(prefix)
            page = slot.pages[number]
            if known is None:
                self.index[prefix], self.prefix_of[page] = page, prefix
                self.behind.setdefault(before, set()).add(page)
            elif known != page:  # somebody else filled the same page first: read theirs
                self.reference(known)
                self.release(page)
                slot.pages[number] = known
            slot.shared = number + 1
        if slot.state is not None:
            for length, mark in slot.state.marks.items():
                page = slot.pages[length // self.page_tokens - 1]
                self.marks[page] = mark
                self.marks.move_to_end(page)
            slot.state.marks.clear()
            while len(self.marks) > self.most_marks:
                self.marks.popitem(last=False)

    def reference(self, page: int) -> None:
        self.references[page] += 1
        self.idle.pop(page, None)

    def alike(self, tokens: Sequence[int], tenant: str) -> list[int]:
        """Published pages that hold the longest prefix of `tokens` (never all of it)."""
        pages: list[int] = []
        while (len(pages) + 1) * self.page_tokens < len(tokens):
            start = len(pages) * self.page_tokens
            page = self.index.get((tenant, pages[-1] if pages else -1, tuple(tokens[start : start + self.page_tokens])))
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, tokens: Sequence[int], tenant: str) -> list[int]:
        """Those, each referenced once for the caller; of texts with recurrent states as many as end with a mark."""
        pages = self.alike(tokens, tenant)
        while self.states is not None and pages and pages[-1] not in self.marks:
            pages.pop()
        for page in pages:
            self.reference(page)
        return pages

    def state(self, pages: Sequence[int]) -> State | None:
        """Of a text that begins with these pages, as `find` gave them."""
        if self.states is None:
            return None
        if not pages:
            return self.states.new()
        self.marks.move_to_end(pages[-1])
        return self.states.behind(self.marks[pages[-1]])

    def part(self, slot: PagedSlot, length: int) -> None:
        """Before a slot is cut to `length` inside of pages that others may read: it goes on in pages of its own. Raises CacheFull if it has
        none, none is left, and others read what would have to be its own; it is longer than was asked then."""
        held, places = divmod(length, self.page_tokens)
        kept = held + bool(places)
        for page in slot.pages[kept : slot.shared]:  # what these held may be needed now
            self.release(page)
        slot.pages[kept : slot.shared], slot.shared = [], kept
        if places and kept == len(slot.pages) and not self.available() and self.references[slot.pages[held]] == 1:
            self._unpublish(slot.pages[held])
        elif places:
            if kept == len(slot.pages):
                try:
                    slot.pages.append(self.take())
                except CacheFull:
                    slot.cut(kept * self.page_tokens)
                    raise
            with torch.inference_mode():
                self.copy([(slot.pages[held], slot.pages[kept], 0, places)])
            self.release(slot.pages.pop(held))
        slot.shared = held

    def _unpublish(self, page: int) -> None:
        """Forget a page's content, and that of every page published behind it: their keys name its id."""
        self.behind[self.prefix_of[page][1]].remove(page)
        void = [page]  # a list, for a long text has more pages behind each other than calls may be nested
        for page in void:
            del self.index[self.prefix_of.pop(page)]
            self.marks.pop(page, None)
            for other in self.behind.pop(page, ()):
                if other in self.idle:
                    del self.idle[other]
                    heappush(self.free, other)
                void.append(other)

    def check(self, slots: Sequence[PagedSlot]) -> None:
        """Audit: every page is free, idle, or referenced exactly by the open slots. For tests and idle moments."""
        counted = [0] * self.capacity
        for slot in slots:
            for page in slot.pages + [p for _, tail in slot.tails for p in tail]:
                counted[page] += 1
        assert counted == self.references, "reference counts match the page tables"
        known = sorted([*self.free, *self.idle, *(p for p in range(self.allocated) if self.references[p])])
        assert known == list(range(1, self.allocated)), "every page is somewhere, and only once"
        follows = {(before, page) for page, (_, before, _) in self.prefix_of.items()}
        assert {(before, page) for before, pages in self.behind.items() for page in pages} == follows, "what lies behind what is known"
