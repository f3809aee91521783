"""The geometry of one pass over the target: which rows run, where their keys go, what each row may read.

Rows of all sequences stand side by side in one flat row of tokens. A row attends along a *path*: the pages that hold the
keys of its text in canonical order. A chain is one path, the sequence's own pages; a tree has a path per leaf, each with
pages of its own from the root's on, so that every key stands where plain decoding would put it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import native
from ..core.upload import index_of, sent, uploaded

LEAST_KEYS, MOST_KEYS = 64, 256  # of a page: an attention call reads no fewer, and of pages with more keys always all
LEAST_RUN = 4  # consecutive pages that are worth a call of their own on a CPU; shorter runs are copied together,
MOST_COPIED = 8  # so many pages at a time that the copies stay in the caches


P = ParamSpec("P")
R = TypeVar("R")
At = TypeVar("At", int, Tensor)


def inferring(function: Callable[P, R]) -> Callable[P, R]:
    """In torch's inference mode, which is entered unless it is on: an engine's rounds are in it, and entering takes longer than asking."""

    @wraps(function)
    def inside(*args: P.args, **more: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **more)
        with torch.inference_mode():
            return function(*args, **more)

    return inside


class Path(NamedTuple):
    """pages[j] holds positions j*P … j*P+P−1; rows are the rows of the pass that attend through it, in the order of their positions.
    common: how many leading keys are those of the path before it; the compiled kernels read them there, for all rows at once."""

    pages: Sequence[int]
    rows: Sequence[int]
    common: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """Items that one attention call computes.

    pages  [items] page of each: a slice if they are consecutive, which are read where they lie; others are copied
    owner  [items] path of each, a slice if they are consecutive, or None if there is one path
    bias   [items, 1, group * width, K] 0 where a query sees a key and −inf where not; all 0 where it sees none. K ≤ P: how many
           keys of each page are read
    """

    pages: slice | Tensor
    owner: slice | Tensor | None
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Items:
    """The attention of one layer: every (path, page) pair is an item; shapes are padded so that kernels see whole tiles.

    take   [paths * width] row of the pass for each query place, or None if it is the identity
    back   [rows] query place of each row, a slice if they are consecutive, or None if it is the identity
    calls  the items in order, call by call
    grid   [paths, most pages] item of each path's j-th page, −1 beyond its end (or None: one item per path)
    dead   [items, 1, group * width] queries that see no key of their item, or None
    """

    paths: int
    width: int
    take: Tensor | None
    back: Tensor | slice | None
    calls: list[Call]
    grid: Tensor | None
    dead: Tensor | None


@dataclass(slots=True)
class Pass:
    """ids [1, rows]; places: the rows' positions as the model reads them, [1, rows] or as numbers; writes: storage rows of the keys (a
    slice if consecutive), and which row of the pass each comes from (None: identity). Ids lie on the model's device; the other tensors may
    wait on the host until `placed`."""

    ids: Tensor
    places: Tensor | Sequence[int]
    position_list: list[int]
    write_to: Tensor | slice
    write_from: Tensor | None
    paths: list[Path]
    page_tokens: int
    query_tile: int  # queries of a call are padded to a multiple of this
    cache: dict[tuple[int, int, torch.dtype], Items] = field(default_factory=dict)
    flat: native.Course | None = None
    walks: Sequence[native.Walk] = ()  # of a model with recurrent states: one for each sequence
    sides: Tensor | None = None  # [rows, layers, n]: what stands beside each row, of models whose layers read that (Gemma 4)
    streams: Tensor | None = None  # [rows, n, hidden]: those beside the first, of models with several (Gemma 3n)
    plan: Any = None  # of our kernels on a GPU (rows.py)

    @property
    def positions(self) -> Tensor:
        """[1, rows]; a tensor once it is asked for, which the compiled pass never does."""
        if not isinstance(self.places, Tensor):
            self.places = torch.tensor([self.places])
        return self.places

    def placed(self) -> Pass:
        """With every tensor where the ids are."""
        device = self.ids.device
        if device.type != "cpu":
            self.places = sent(self.positions, device)
            self.write_to = self.write_to if isinstance(self.write_to, slice) else sent(self.write_to, device)
            self.write_from = None if self.write_from is None else sent(self.write_from, device)
        return self

    def writes(self) -> tuple[Sequence[int], Sequence[int]]:
        """The storage rows of the keys and the rows of the pass they come from, as numbers."""
        to = range(self.write_to.start, self.write_to.stop) if isinstance(self.write_to, slice) else self.write_to.tolist()
        return to, range(len(to)) if self.write_from is None else self.write_from.tolist()

    def course(self) -> native.Course:
        """The same for the compiled kernels; made once."""
        if self.flat is None:
            self.flat = native.Course(self.position_list, self.paths, *self.writes(), self.page_tokens, walks=self.walks)
        return self.flat

    def items(self, window: int | None, group: int, dtype: torch.dtype) -> Items:
        """The attention of layers with this sliding window (None: full) and queries per key head; made once."""
        key = (window or 0, group, dtype)
        if key not in self.cache:
            self.cache[key] = chain_items(self, group, dtype) if _one_chain(self, window) else general_items(self, window, group, dtype)
        return self.cache[key]


def _one_chain(p: Pass, window: int | None) -> bool:
    """Whether the rows are one chain within one page and no window hides a key from them: most passes are."""
    at = p.position_list
    return len(p.paths) == 1 and at[0] // p.page_tokens == at[-1] // p.page_tokens and (not window or at[-1] < abs(window))


def chain_items(p: Pass, group: int, dtype: torch.dtype) -> Items:
    """`general_items` for one chain whose rows all see every page and lie in the last one."""
    size, device, rows = p.page_tokens, p.ids.device, len(p.position_list)
    last = p.position_list[0] // size
    pages = p.paths[0].pages[: last + 1]
    width = rows
    while group * width % p.query_tile:
        width += 1
    places = [t - last * size for t in p.position_list]
    places += places[:1] * (width - rows)
    keys = _keys_read(places[rows - 1], size) if device.type == "cpu" else size
    bias = torch.zeros(group * width, keys, dtype=dtype, device=device)
    bias.masked_fill_(torch.arange(keys, device=device) > uploaded(places * group, device)[:, None], float("-inf"))
    before = bias.new_zeros(last, 1, group * width, size)
    if keys < size:
        calls = [*calls_of(pages[:last], None, before), *calls_of(pages[last:], None, bias[None, None])]
    else:
        calls = calls_of(pages, None, torch.cat([before, bias[None, None]]))
    return Items(
        paths=1,
        width=width,
        take=None if width == rows else uploaded([*range(rows), *[0] * (width - rows)], device),
        back=None if width == rows else slice(0, rows),
        calls=calls,
        grid=torch.arange(last + 1, device=device)[None] if last else None,
        dead=None,
    )


def calls_of(pages: Sequence[int], owner: Sequence[int] | None, bias: Tensor) -> list[Call]:
    """Items cut into calls. Items are independent, so no bit depends on the cuts (tests/models/test_attention.py)."""
    device = bias.device
    cuts = _cuts(pages) if device.type == "cpu" else [(0, len(pages))]
    return [
        Call(index_of(pages[a:b], device), None if owner is None else index_of(owner[a:b], device), bias[a:b])
        for a, b in cuts
    ]


def _cuts(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Where items are cut: a call for each long run of consecutive pages, shorter runs joined as far as `MOST_COPIED`."""
    edges = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    cuts: list[tuple[int, int]] = []
    joining = False
    for start, end in pairwise([0, *edges, len(pages)] if pages else []):
        short = end - start < LEAST_RUN
        if short and joining and end - cuts[-1][0] <= MOST_COPIED:
            start, _ = cuts.pop()
        cuts.append((start, end))
        joining = short
    return cuts


def _keys_read(last: int, size: int) -> int:
    """How many keys of a page to read for a row at place `last`. Powers of two up to 256 give the bits of the whole page, other
    lengths do not (docs/log.md)."""
    keys = LEAST_KEYS
    while keys <= last:
        keys *= 2
    return keys if keys < size <= MOST_KEYS and size & (size - 1) == 0 else size


def general_items(p: Pass, window: int | None, group: int, dtype: torch.dtype) -> Items:
    """Any mixture of chains and trees, of pages and windows."""
    size, device = p.page_tokens, p.ids.device
    width = max(len(path.rows) for path in p.paths)
    while group * width % p.query_tile:
        width += 1
    take: list[int] = []
    back = [0] * len(p.position_list)
    pages: list[int] = []
    owner: list[int] = []
    ranks: list[int] = []
    counts: list[int] = []
    for a, path in enumerate(p.paths):
        for place, row in enumerate(path.rows):
            back[row] = a * width + place
        padded = [*path.rows, *[path.rows[0]] * (width - len(path.rows))]
        take += padded
        seen = pages_seen([p.position_list[r] for r in path.rows], window, size)
        pages += path.pages[seen.start : seen.stop]
        owner += [a] * len(seen)
        ranks += seen
        counts.append(len(seen))
    most = max(counts)
    grid = None
    if most > 1:
        grid = torch.full((len(p.paths), most), -1, dtype=torch.int64)
        start = 0
        for a, count in enumerate(counts):
            grid[a, :count] = torch.arange(start, start + count)
            start += count
    query_at = torch.tensor([p.position_list[r] for r in take]).view(len(p.paths), width)[owner]  # [items, width]
    bias, dead = sight(query_at, torch.tensor(ranks), window, size, group, dtype)
    identity = take == list(range(len(back)))
    return Items(
        paths=len(p.paths),
        width=width,
        take=None if identity else uploaded(take, device),
        back=None if identity else uploaded(back, device),
        calls=calls_of(pages, owner if len(p.paths) > 1 else None, sent(bias, device)),
        grid=None if grid is None else sent(grid, device),
        dead=sent(dead, device) if bool(dead.any()) else None,
    )


def pages_seen(positions: Sequence[int], window: int | None, size: int) -> range:
    """Which pages of a path, by their ranks in it, rows at these positions see together."""
    return range(max(0, seen_from(min(positions), window)) // size, max(positions) // size + 1)


def seen_from(at: At, window: int | None) -> At:
    """The first position that a row at this one sees, or one that no row has. window: how many it sees, itself included (None, 0: all); or,
    negative, rows see those of their own part of a text that is cut into parts of so many (Llama 4's)."""
    if not window:
        return at * 0
    return at - window + 1 if window > 0 else at // -window * -window


def sight(query_at: Tensor, ranks: Tensor, window: int | None, size: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(bias, dead) as `Call` and `Items` have them, of whole pages: query_at [items, width] positions of the queries, ranks [items] of
    the pages in their paths."""
    key_at = ranks[:, None] * size + torch.arange(size, device=ranks.device)  # [items, P]
    visible = key_at[:, None, :] <= query_at[:, :, None]
    if window:
        visible &= key_at[:, None, :] >= seen_from(query_at, window)[:, :, None]
    blind = ~visible.any(-1)  # [items, width]
    bias = torch.zeros(visible.shape, dtype=dtype, device=ranks.device).masked_fill_(~visible & ~blind[..., None], float("-inf"))
    items, width = query_at.shape
    return (bias[:, None, None].expand(-1, 1, group, -1, -1).reshape(items, 1, group * width, size),
            blind[:, None, None].expand(-1, 1, group, -1).reshape(items, 1, group * width))
