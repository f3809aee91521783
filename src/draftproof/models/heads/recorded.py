"""Drafts of a recurrent head, recorded once per shape on a CUDA device and replayed: reading what the target left and all levels of the
draft, of all sequences, are one launch. Chains are here; trees, which grow by what drafters count, are in drafters/planted.py.

    host     each sequence's rows → one list of integers → one copy into the recording's own tensors; features and noise keys beside it
    device   the rows that are fed; then level after level logits, law and noise, the best candidates, and a step for the first of them

The plain twin is drafters/recurrent.py's loop over `HeadPass`; its drafts are the same. As in ../graphs.py a recording is made for a
*bucket* of shapes and filled up by repeating what is there: rows repeat the first row and lines the first line, so that the same entries
are written twice. Attention reads the pool as it lies, every slot up to the bucket's room: what a row may not see is masked, and what
slots without a line give is never looked at. Where a head's layers run through our own kernels (rows.py), each line reads its own slot, as
pages, and rows that fill a bucket up write nothing. Nothing in a run depends on the host, and the host waits for nothing.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ... import gpu
from ...core.choice import largest, narrowed
from ...core.host import Filters
from ...core.noise import gumbel
from ...core.upload import pinned
from ...errors import first_line
from ..graphs import MOST_HELD, Record, made, ragged, rounded
from ..rows import Plan
from .cache import POOLED, CachePool, HeadCache, SlotPass
from .layers import Attend, Runs
from .rows import PAGE, LinePass, angles_of, group

log = logging.getLogger("draftproof.models")

MOST_FED = 16       # rows of one sequence that a recording feeds; where more wait, the twin feeds all but the last
MOST_LINES = 64
LEAST_ROWS = 8      # products of so few rows take no longer than those of one, and recordings are fewer
AT_ONCE = 1 << 22   # numbers of noise that are drawn for all levels together


class RecurrentHead(Protocol):
    """A head as its files here write it: sizes, and three functions over flat rows of all sequences."""

    taps: tuple[int, ...]
    depth: int                  # decoder layers
    context: int | None

    @property
    def ids(self) -> Tensor | None: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    def fuse(self, features: Tensor) -> Tensor: ...
    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Fed(NamedTuple):
    """One sequence: the tokens of the entries that are fed, 1 … MOST_FED of them, and their features [n, width] in one or several pieces;
    the position of the first; and what makes laws of its logits, which stay as they are at temperature 0."""

    cache: HeadCache
    tokens: Sequence[int]
    features: Sequence[Tensor]
    position: int
    filters: Filters


class Chains(NamedTuple):
    """tokens, values [lines, depth, k], each level's best, as `drafters.base.Picks` · first, margins [lines, depth]: the chain itself, and
    how far each value lies above the next · last [lines, H]: outputs of the last entries that were fed. Of a recording: the next draft
    overwrites them."""

    tokens: Tensor
    values: Tensor
    first: Tensor
    margins: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shapes of a recording. slots, room: how much of the pool is looked at · width: rows of a slot · greedy: whether all lines are ·
    filtered: whether a line has filters · widest, ends: of trees, how many nodes of a line a level extends, and how many tokens end its
    text; 0 for chains."""

    lines: int
    rows: int
    width: int
    slots: int
    room: int
    depth: int
    candidates: int
    greedy: bool
    filtered: bool
    widest: int = 0
    ends: int = 0

    @classmethod
    def of(cls, lines: Sequence[Fed], depth: int, candidates: int, widest: int = 0, ends: int = 0) -> Bucket:
        counts = [len(line.tokens) for line in lines]
        slots = max(line.cache.slot or 0 for line in lines) + 1
        room = max(line.cache.length + count for line, count in zip(lines, counts, strict=True)) + (depth - 1) * (widest or 1)
        return cls(rounded(len(lines)), rounded(sum(counts), LEAST_ROWS), rounded(max(counts), LEAST_ROWS), rounded(slots),
                   rounded(room, POOLED), depth, candidates, not any(line.filters.temperature for line in lines),
                   any(line.filters.active for line in lines), widest, ends)


class Ends(NamedTuple):
    """Of the entries that were fed, each line's last: output [lines, H], position, place in the pool, index in its slot, and slot."""

    output: Tensor
    positions: Tensor
    places: Tensor
    at: Tensor
    slots: Tensor


class Recording:
    """The tensors of one bucket, and the draft over them: chains."""

    where = ""

    def __init__(self, bucket: Bucket, head: RecurrentHead, pool: CachePool, like: Tensor, ours: bool = False) -> None:
        """like [.., width]: features. ours: whether the head's layers run through our own kernels."""
        self.bucket, self.head, self.store, device = bucket, head, pool.store, pool.store.device
        self.seats = gpu.seats(group(head)) if ours else 0                  # rows of one line in a tile of our attention
        seated, pages = (-(-bucket.width // self.seats) * self.seats, bucket.room // PAGE) if ours else (0, 0)
        sizes = [6 * bucket.rows, bucket.slots * bucket.width, 7 * bucket.lines, bucket.slots, bucket.lines * seated, bucket.lines * pages]
        self.written, self.numbers = (torch.zeros(sum(sizes), dtype=torch.int64, device=place) for place in ("cpu", device))
        of_rows, take, of_lines, owner, seats, paged = torch.split(self.written, sizes)
        self.host = of_rows.view(6, -1).numpy(), take.numpy(), of_lines.view(7, -1).numpy(), owner.numpy()
        self.host_ours = seats.view(bucket.lines, seated).numpy(), paged.view(bucket.lines, pages).numpy()
        of_rows, self.take, of_lines, self.owner, self.seated, paged = torch.split(self.numbers, sizes)
        self.pages = paged.view(bucket.lines, pages)
        self.source, self.tokens, self.positions, self.at, self.places, self.back = of_rows.view(6, -1).unbind()
        self.lines, self.ends, self.slots, self.top_k, *heats = of_lines.view(7, -1).unbind()
        self.temperatures, self.top_p, self.fall = (each.view(torch.float64) for each in heats)
        numbers = bucket.rows + (bucket.lines + bucket.depth) * max(bucket.widest, bucket.candidates)
        self.order = torch.arange(1 + numbers, device=device)               # of whatever is counted
        self.alone = self.seating(1)
        self.features = torch.zeros(bucket.rows, like.shape[-1], dtype=like.dtype, device=device)
        self.keys = torch.zeros(bucket.depth, bucket.lines, 2, dtype=torch.int32, device=device)
        self.replay: Callable[[], tuple[Tensor, ...]] = self.run

    def fill(self, lines: Sequence[Fed], keys: Tensor | None, *more: Any) -> None:
        """Take another draft into the tensors. more: what another form of draft reads of its lines."""
        of_rows, take, of_lines, owner = self.host
        room, width, each = self.store.shape[3], self.bucket.width, []
        for one in lines:
            held, slot = one.cache.length, one.cache.slot or 0
            each.append((len(one.tokens), slot, one.position, held, slot * room + held, slot * width))
        (counts, slots), starts = np.split(np.array(each).T, [2])
        number, ends = np.arange(len(lines)), counts.cumsum()
        line, place = ragged(counts)
        rows = np.arange(len(line))
        of_rows[0, :len(rows)], of_rows[1, :len(rows)] = rows, [token for one in lines for token in one.tokens]
        of_rows[2:, :len(rows)] = starts[:, line] + place
        of_rows[:, len(rows):] = of_rows[:, :1]
        top_k = [one.filters.top_k for one in lines]
        heats = [(f.temperature, f.top_p, math.log(f.min_p) if f.min_p else -math.inf) for f in (one.filters for one in lines)]
        of_lines[:, :len(lines)] = number, ends - 1, slots, top_k, *np.array(heats).T.copy().view(np.int64)
        of_lines[:, len(lines):] = of_lines[:, :1]
        take[:] = owner[:] = 0
        take[of_rows[5, :len(rows)]], owner[slots] = rows, number
        if self.seats:
            seated, pages = self.host_ours
            seated[:], pages[:len(lines)] = -1, slots[:, None] * (room // PAGE) + np.arange(pages.shape[1])
            seated[line, place], pages[len(lines):], of_rows[4, len(rows):] = rows, pages[0], -1
        self.numbers.copy_(pinned(self.written, self.numbers.device), non_blocking=True)
        torch.cat([piece for one in lines for piece in one.features], out=self.features[:len(rows)])
        if keys is not None:
            self.keys[:, :len(lines)].copy_(keys.view(self.bucket.depth, len(lines), 2), non_blocking=True)

    def seating(self, width: int) -> Tensor:
        """[lines · tiles · seats] for so many rows of each line, one line's behind another's."""
        seats = torch.arange(-(-width // self.seats) * self.seats if self.seats else 0, device=self.order.device)
        return torch.where(seats < width, self.order[:self.bucket.lines, None] * width + seats, -1).flatten()

    def fed(self) -> Ends:
        """Read what waits."""
        head, bucket = self.head, self.bucket
        attend: Attend | Runs
        if self.seats:
            attend = self.along(self.places, self.at, self.angles(self.positions), self.seated)
        else:
            take = self.take.view(bucket.slots, bucket.width)
            attend = SlotPass(self.store, self.places, take, self.until(self.at[take]), self.back)
        out = head.step(self.tokens, head.fuse(self.features[self.source]), self.positions, attend)
        return Ends(out[self.ends], self.positions[self.ends], self.places[self.ends], self.at[self.ends], self.slots)

    def until(self, at: Tensor) -> Tensor:
        """Sight [.., room] of all entries up to this one."""
        return torch.arange(self.bucket.room, device=at.device) <= at[..., None]

    def run(self) -> tuple[Tensor, ...]:
        """The draft, out of tensors alone."""
        head, bucket = self.head, self.bucket
        ends = self.fed()
        hidden, steps = ends.output, self.steps(ends)
        noise: Iterator[Tensor] = iter(())
        ids = values = self.tokens
        found: list[tuple[Tensor, Tensor]] = []
        for level in range(bucket.depth):
            if level:
                hidden = head.step(ids[:, 0], hidden, *next(steps))
            logits = head.logits(hidden).float()
            if not bucket.greedy:
                noise = noise if level else self.noise(logits.shape[1])
                logits = self._scores(logits, next(noise))
            values, columns = largest(logits, min(bucket.candidates, logits.shape[1]))
            ids = columns if head.ids is None else head.ids[columns]
            found.append((ids, values))
        tokens, values = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return Chains(tokens, values, tokens[..., 0].contiguous(), values[..., 0] - values[..., 1], ends.output)

    def steps(self, ends: Ends) -> Iterator[tuple[Tensor, Attend | Runs]]:
        """Of a step of each line, level after level: positions, and how its row attends."""
        levels = self.order[1:self.bucket.depth, None]
        positions, places, at = ends.positions + levels, ends.places + levels, ends.at + levels
        angles = self.angles(positions) if self.seats else None
        for i, (place, own) in enumerate(zip(places, at, strict=True)):
            if angles is not None:
                yield positions[i], self.along(place, own, angles[i], self.alone)
            else:
                yield positions[i], SlotPass(self.store, place, self.owner[:, None], self.until(own[self.owner][:, None]), ends.slots)

    def angles(self, positions: Tensor) -> Tensor:
        """[.., 2, D] of positions [..], for our kernels."""
        return angles_of(self.head, positions.flatten(), self.store.dtype).view(*positions.shape, 2, -1)

    def along(self, places: Tensor, at: Tensor, angles: Tensor, take: Tensor, sight: Tensor | None = None) -> LinePass:
        """Rows whose entries go to these places, along their lines' slots; take [lines · tiles · seats]: as of `gpu.Tiles`."""
        tiles = gpu.Tiles(at, take, self.pages, take.shape[0] // self.bucket.lines // self.seats)
        return LinePass(self.store, angles, Plan(places, self.order[:len(places)], tiles, True), sight)

    def _scores(self, logits: Tensor, noise: Tensor) -> Tensor:
        """[lines, V] as `drafters.base.pick` ranks them."""
        law, quiet = self.law(logits)
        return torch.where(quiet, law, law + noise)

    def law(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log q of logits [lines, .., V], and which lines are at temperature 0, whose law is that of 1."""
        temperatures = self.temperatures.float().view(-1, *[1] * (logits.ndim - 1))
        quiet = temperatures == 0
        law = torch.log_softmax((logits - logits.amax(-1, keepdim=True)) / temperatures.masked_fill(quiet, 1.0), -1)
        return narrowed(law, self.top_k, self.top_p, self.fall) if self.bucket.filtered else law, quiet

    def noise(self, size: int) -> Iterator[Tensor]:
        """The noise [lines, V] of level after level, drawn for all of them together where that is not too much: its operations are many."""
        keys, ids = self.keys[:, self.lines], self.head.ids
        tokens = torch.arange(size, dtype=torch.int32, device=keys.device) if ids is None else ids
        together = self.bucket.lines * self.bucket.depth * size <= AT_ONCE
        for some in torch.split(keys, self.bucket.depth if together else 1):
            yield from gumbel(some.flatten(0, 1), tokens).view(some.shape[0], -1, size).unbind()


class RecordedChains:
    """A head's recordings, of chains and whatever else is recorded of it, and the pool that its caches share."""

    def __init__(self, head: RecurrentHead, record: Record, dtype: torch.dtype, device: torch.device, ours: bool = False) -> None:
        """ours: whether the head's layers run through our own kernels (rows.py)."""
        self.head, self.record, self.ours = head, record, ours
        self.pool = CachePool(head.depth, head.kv_heads, head.head_dim, dtype, device)
        self.held: OrderedDict[Bucket, Recording] = OrderedDict()
        self.failed = ""                            # why the last form that failed did
        self._given_up: set[type[Recording]] = set()

    def records(self, form: type[Recording]) -> bool:
        """Whether this form of draft is recorded: until one of it, or of what it is a form of, has failed."""
        return not issubclass(form, tuple(self._given_up))

    def draft(self, lines: Sequence[Fed], depth: int, candidates: int, keys: Tensor | None) -> Chains | None:
        """Chains of so many levels after each line's entries, which count in its cache then. keys int32 [depth · lines, 2]: of the noise,
        level by level; None if all lines are greedy. None if the recording failed; then no other of its form is tried."""
        found = self.replayed(Recording, Bucket.of(lines, depth, candidates), lines, keys)
        return None if found is None else Chains(*found)

    def replayed(self, form: type[Recording], bucket: Bucket, lines: Sequence[Fed], keys: Tensor | None,
                 *more: Any) -> list[Tensor] | None:
        """What a recording of this form gives of the lines; as in `draft`."""
        if not self.records(form):
            return None
        try:
            found = self._recording(form, bucket, lines, keys, more).replay()
        except Exception as error:  # whatever a driver finds wrong: the twin can always run
            self.failed = first_line(error)
            self._given_up.add(form)
            self.held = OrderedDict((b, r) for b, r in self.held.items() if not isinstance(r, form))
            log.warning("a draft head runs level by level from now on%s: a recording failed (%s)", form.where, self.failed)
            return None
        for line in lines:
            line.cache.advance(len(line.tokens))
        return [each[:len(lines)] for each in found]

    def _recording(self, form: type[Recording], bucket: Bucket, lines: Sequence[Fed], keys: Tensor | None,
                   more: Sequence[Any]) -> Recording:
        """The bucket's recording, filled with these lines and made if there is none."""
        assert self.pool.widen(bucket.room), "lines are those that fit"
        found = self.held.get(bucket)
        if found is None or found.store is not self.pool.store:
            self.held = OrderedDict((b, r) for b, r in self.held.items() if r.store is self.pool.store)
            found = form(bucket, self.head, self.pool, lines[0].features[0], self.ours)
            found.fill(lines, keys, *more)
            found.replay = made(self.record, found.run)
            self.held[bucket] = found
        else:
            found.fill(lines, keys, *more)
        self.held.move_to_end(bucket)
        if len(self.held) > MOST_HELD:
            self.held.popitem(last=False)
        return found
