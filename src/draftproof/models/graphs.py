"""Passes of few rows, recorded once per shape on a CUDA device and replayed: the device no longer waits for Python between operations.

    host     the plan (passes.Pass) → one list of integers → one copy into the recording's own tensors
    device   the replay: attention items out of these integers, all layers, logits and taps of all rows
    host     copies of the rows that were asked for; the next replay overwrites the others

A recording is made for a *bucket* of shapes, and a pass is filled up to its bucket by repeating what is there: rows repeat the first
row, writes the first write, paths the first path, and so the same numbers go to the same places twice. Pages beyond a path's end are
page 0, which nobody owns and nobody writes, at a rank behind every text: dead items, whose weight in the merge is exactly 0. So no bit of
a row depends on its bucket (tests/models/test_graphs.py, with a recorder that hands back what it was given). Where blocks run through our
own kernels (rows.py), nobody sits on paths that fill a bucket up, which cost next to nothing, so buckets are coarser; rows that fill it up
attend to nothing, and what they hold is nobody's: where every row writes its own key, they write none.

Making one takes several passes' time, so a round in which any was made teaches nobody what rounds take (`recordings`).

If a recording fails, the load's facts say so, and passes run one by one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self, TypeVar
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.upload import pinned
from ..errors import first_line
from .cache import PagePool
from .fused_pass import FusedPass
from .passes import Call, Items, Pass, pages_seen, sight
from .rows import Plan, RowsLayer, tiles_of

log = logging.getLogger("draftproof.models")

T = TypeVar("T")
Whole = NDArray[np.int64]
Run = Callable[[], tuple[Tensor, dict[int, Tensor]]]  # logits and taps of all rows
Spans = Sequence[Sequence[range]]  # [windows][paths]: which pages of its own each path reads
MOST_ROWS, MOST_ITEMS = 64, 1024  # of a pass that is recorded; an item's pages are copied, and a recording keeps room for them
WIDE_ROWS, WIDE_ITEMS = 1024, 1 << 16  # the same where our kernels read pages where they lie
MOST_HELD = 256  # recordings; the one that was idle longest goes
BEYOND = 1 << 40  # rank of a page behind every text


class Record(Protocol):
    """Makes of what runs over tensors alone what does the same again, over the same tensors. A replay overwrites what the last one gave."""

    def __call__(self, run: Callable[[], T], /) -> Callable[[], T]: ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shapes of a recording: rows, writes of keys, paths, query places of a path, and its pages under each window. once: for our own
    kernels, whether every row writes its own key, in order."""

    rows: int
    writes: int
    paths: int
    width: int
    pages: tuple[int, ...]
    taps: frozenset[int]
    once: bool = False


class Recording:
    """The tensors of one bucket, and the pass over them."""

    def __init__(self, bucket: Bucket, fused: GraphedPass, p: Pass, pool: PagePool) -> None:
        self.bucket, self.pool, self.tile = bucket, pool, p.query_tile
        self._fused = ref(fused)  # which holds this: a circle would outlive them, because an engine freezes what the collector looks at
        pages = [bucket.paths * count for count in bucket.pages]
        sizes = [*[bucket.rows] * 5, *[bucket.writes] * 2, bucket.paths * bucket.width, *pages, *pages]
        self.written, self.numbers = (torch.zeros(sum(sizes), dtype=torch.int64, device=place) for place in ("cpu", p.ids.device))
        self.host = [part.numpy() for part in torch.split(self.written, sizes)]
        parts = torch.split(self.numbers, sizes)
        self.source, self.positions, self.at, self.back, self.keep, self.write_to, self.write_from, self.take = parts[:8]
        self.pages, self.ranks = parts[8 : 8 + len(pages)], parts[8 + len(pages) :]
        self.ids = torch.zeros(1, bucket.rows, dtype=torch.int64, device=p.ids.device)
        self.replay: Run = self.run

    @property
    def fused(self) -> GraphedPass:
        fused = self._fused()
        assert fused is not None, "a pass replays its own recordings"
        return fused

    def fill(self, p: Pass, spans: Spans, keep: Sequence[int]) -> None:
        """Take another pass into the tensors."""
        bucket, count = self.bucket, len(p.position_list)
        owner, seat = ragged([len(path.rows) for path in p.paths])
        rows = np.fromiter(chain.from_iterable(path.rows for path in p.paths), np.int64, len(owner))
        take, back = np.empty((bucket.paths, bucket.width), np.int64), np.empty(count, np.int64)
        take[: len(p.paths)] = -1 if self.fused.seats else rows[seat == 0, None]
        take[owner, seat], back[rows] = rows, owner * bucket.width + seat
        take[len(p.paths) :] = -1 if self.fused.seats else take[0]
        tables = [self._pages(p, most, seen) for most, seen in zip(bucket.pages, spans, strict=True)]
        writes = p.writes()
        of_rows = (np.arange(count), p.positions[0].numpy(), p.position_list, back, keep, *writes)
        for to, values in zip(self.host, (*of_rows, take, *(pages for pages, _ in tables), *(ranks for _, ranks in tables)), strict=True):
            known = np.asarray(values).reshape(-1)
            to[: len(known)], to[len(known) :] = known, known[0]
        if bucket.once:
            self.host[5][len(writes[0]) :] = -1
        self.numbers.copy_(pinned(self.written, self.numbers.device), non_blocking=True)
        torch.index_select(p.ids[0], 0, self.source, out=self.ids[0])

    def _pages(self, p: Pass, most: int, seen: Sequence[range]) -> tuple[Whole, Whole]:
        """[paths of the bucket, most] the pages that each path reads under one window, and their ranks."""
        owner, place = ragged([len(span) for span in seen])
        pages, ranks = np.zeros((self.bucket.paths, most), np.int64), np.full((self.bucket.paths, most), BEYOND, np.int64)
        read = chain.from_iterable(path.pages[span.start : span.stop] for path, span in zip(p.paths, seen, strict=True))
        pages[owner, place] = np.fromiter(read, np.int64, len(owner))
        ranks[owner, place] = np.array([span.start for span in seen])[owner] + place
        pages[len(seen) :], ranks[len(seen) :] = pages[0], ranks[0]
        return pages, ranks

    def run(self) -> tuple[Tensor, dict[int, Tensor]]:
        """The pass, out of tensors alone."""
        fused, bucket = self.fused, self.bucket
        cache = {} if fused.seats else {(window, fused.group, fused.dtype): self._items(kind, window)
                                        for kind, window in enumerate(fused.windows)}
        p = Pass(self.ids, self.positions[None], [], self.write_to, self.write_from, [], self.pool.page_tokens, self.tile, cache)
        if fused.seats:
            table = self.pages[0].view(bucket.paths, -1)
            p.plan = Plan(self.write_to, self.write_from, tiles_of(self.at, self.take, table, fused.group), bucket.once)
        return fused.compute(p, self.pool, None), dict(fused.rows)

    def _items(self, kind: int, window: int) -> Items:
        """As `general_items`, every path with equally many pages."""
        paths, width, most = self.bucket.paths, self.bucket.width, self.bucket.pages[kind]
        items = torch.arange(paths * most, device=self.numbers.device)
        owner = items // most
        query_at = self.at[self.take].view(paths, width)[owner]
        bias, dead = sight(query_at, self.ranks[kind], window, self.pool.page_tokens, self.fused.group, self.fused.dtype)
        calls = [Call(self.pages[kind], owner if paths > 1 else None, bias)]
        return Items(paths, width, self.take, self.back, calls, items.view(paths, most) if most > 1 else None, dead)


class GraphedPass(FusedPass):
    """`FusedPass`, passes of few rows recorded."""

    def __init__(self, model: Any, record: Record, reasons: dict[str, str]) -> None:
        """reasons: of the load's facts."""
        super().__init__(model)
        self.record: Record | None = record
        self.reasons = reasons
        self.dtype, self.group = self.layers[0].dtype, self.layers[0].heads // self.layers[0].kv_heads
        self.least = self.layers[0].tile() or 1
        self.seats = self.layers[0].seats() if isinstance(self.layers[0], RowsLayer) else 0  # of a tile of our kernels' attention
        self.held: OrderedDict[Bucket, Recording] = OrderedDict()
        self._places: tuple[PagePool, int, int] | None = None  # what recordings point at

    @property
    def windows(self) -> list[int]:
        """Of its layers, 0 for none. Our kernels read all pages' numbers, and of those behind a window no more."""
        return [0] if self.seats else sorted({layer.window or 0 for layer in self.layers})

    def first(self, count: int) -> Self:
        cut = super().first(count)
        cut.held = OrderedDict()
        return cut

    def __call__(self, p: Pass, pool: PagePool, keep: Sequence[int] | None) -> Tensor:
        rows = len(p.position_list)
        kept = range(rows) if keep is None else keep
        most = WIDE_ROWS if self.seats and keep is None else MOST_ROWS  # a prompt's last row alone has logits
        bucket, spans = self._bucket(p) if self.record is not None and rows <= most else (None, [])
        recording = None if bucket is None else self._recording(bucket, p, pool, spans, kept)
        if recording is None:
            return super().__call__(p, pool, keep)
        logits, taps = recording.replay()
        self.rows = {layer: hidden[:rows].clone() for layer, hidden in taps.items()}
        return logits[:rows].clone() if keep is None else logits[recording.keep[: len(kept)]]

    def _bucket(self, p: Pass) -> tuple[Bucket | None, Spans]:
        """The pass's bucket, None if that would be too large, and the pages that each path reads."""
        ends = [(p.position_list[path.rows[0]], p.position_list[path.rows[-1]]) for path in p.paths]
        spans = [[pages_seen(at, window, p.page_tokens) for at in ends] for window in self.windows]
        longest = max(len(path.rows) for path in p.paths)
        rows, paths, width = self._rows(len(p.position_list)), rounded(len(p.paths)), rounded(longest)
        if self.seats:
            paths, width = rounded(len(p.paths), step=4), -(-width // self.seats) * self.seats
        while not self.seats and self.group * width % p.query_tile:
            width *= 2
        pages = tuple(rounded(max(map(len, each))) for each in spans)
        if paths * max(pages) > (WIDE_ITEMS if self.seats else MOST_ITEMS):
            return None, spans
        writes = rows if p.write_from is None else max(rows, self._rows(len(p.write_from)))
        return Bucket(rows, writes, paths, width, pages, self.taps, bool(self.seats) and p.write_from is None), spans

    def _rows(self, count: int) -> int:
        """Of a bucket that holds so many."""
        some = MOST_ROWS * (1 if count <= 8 * MOST_ROWS else 2)
        return rounded(count, self.least) if count <= MOST_ROWS else -(-count // some) * some

    def _recording(self, bucket: Bucket, p: Pass, pool: PagePool, spans: Spans, keep: Sequence[int]) -> Recording | None:
        """The bucket's recording, filled with this pass and made if there is none. None if that failed; then no other is tried."""
        assert self.record is not None and not self.moving
        try:
            self._reach(max(p.position_list) + 1)
            places = pool, pool.allocated, 0 if self.angles is None else self.angles.shape[0]
            if places != self._places:
                self.held.clear()
                self._places = places
            found = self.held.get(bucket)
            recording = found or Recording(bucket, self, p, pool)
            recording.fill(p, spans, keep)
            if found is None:
                recording.replay = made(self.record, recording.run)
                self.held[bucket] = recording
        except Exception as error:  # whatever a driver finds wrong: the pass can always run without
            self.record, self.reasons["passes"] = None, f"one by one: a recording failed ({first_line(error)})"
            self.held.clear()
            log.warning("passes run one by one from now on: a recording failed (%s)", first_line(error))
            return None
        self.held.move_to_end(bucket)
        if len(self.held) > MOST_HELD:
            self.held.popitem(last=False)
        return recording


class CudaRecorder:
    """`Record` as CUDA graphs. All share one pool of memory: one runs at a time, and its results are copied before the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._home: tuple[torch.cuda.Stream, Any, torch.cuda.CUDAGraph] | None = None

    def __call__(self, run: Callable[[], T], /) -> Callable[[], T]:
        stream, pool, _ = self._home = self._home or self._opened()
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()  # kernels are compiled, and libraries take the memory they work in
        current.wait_stream(stream)
        graph, found = self._capture(run, stream, pool)

        def replay() -> T:
            graph.replay()
            return found

        return replay

    def _opened(self) -> tuple[torch.cuda.Stream, Any, torch.cuda.CUDAGraph]:
        """The stream, the pool, and a graph that keeps the pool alive when all others are gone."""
        stream, pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        graph, _ = self._capture(lambda: torch.zeros(1, device=self.device), stream, pool)
        return stream, pool, graph

    def _capture(self, run: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        # the outer context leaves the stream again also where the capture fails, which torch's own does not
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            found = run()
        return graph, found


def recorder(device: torch.device) -> Record | None:
    """What records on this device, None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


_made = 0


def made(record: Record, run: Callable[[], T]) -> Callable[[], T]:
    """What `record` makes of it, and one more recording."""
    global _made
    _made += 1
    return record(run)


def recordings() -> int:
    """How many this process has made, or tried to."""
    return _made


def rounded(count: int, least: int = 1, step: int = 2) -> int:
    """The next power of `step`, 2 or 4, at least `least`."""
    bits = step.bit_length() - 1
    return max(least, 1 << -(-(count - 1).bit_length() // bits) * bits)


def ragged(counts: Sequence[int] | Whole) -> tuple[Whole, Whole]:
    """Of so many numbers in each of some lists, one list behind another: each number's list, and its place there."""
    each = np.array(counts, np.int64)
    owner = np.arange(len(each)).repeat(each)
    return owner, np.arange(len(owner)) - (each.cumsum() - each)[owner]


def passes(model: Any, record: Record | None, wanted: bool, reasons: dict[str, str]) -> FusedPass:
    """The slim pass of a model whose layers are fused; recorded, if the device has a `record` for it."""
    if record is None:
        return FusedPass(model)
    plain = FusedPass(model)
    if not wanted or plain.moving:
        reasons["passes"] = f"one by one: {'its rotary angles depend on the text' if wanted else 'recording is off'}"
        return plain
    most = WIDE_ROWS if isinstance(plain.layers[0], RowsLayer) else MOST_ROWS
    reasons["passes"] = f"recorded: those of at most {most} rows are CUDA graphs, one per shape"
    return GraphedPass(model, record, reasons)
