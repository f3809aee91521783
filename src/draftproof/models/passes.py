"""The geometry of one pass over the target: which rows run, where their keys go, what each row may read.

Rows of all sequences stand side by side in one flat row of tokens. A row attends along a *path*: the pages that hold the
keys of its text in canonical order. A chain is one path, the sequence's own pages; a tree has a path per leaf, each with
its own copy of the last page, so that every key stands where plain decoding would put it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Path:
    """pages[j] holds positions j*P … j*P+P−1; rows are the rows of the pass that attend through it."""

    pages: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Items:
    """One attention call: every (path, page) pair is a batch item; shapes are padded so that kernels see whole tiles.

    take   [paths * width] row of the pass for each query place, or None if it is the identity
    back   [rows] query place of each row, or None if it is the identity
    pages  [items] page ids, or a slice when they are consecutive; owner [items] path of each item, None if path i owns item i
    grid   [paths, most pages] item of each path's j-th page, −1 beyond its end (or None: one item per path)
    bias   [items, 1, group * width, P] 0 where a query sees a key and −inf where not; all 0 where it sees none
    dead   [items, 1, group * width] queries that see no key of their item, or None
    """

    paths: int
    width: int
    take: Tensor | None
    back: Tensor | None
    pages: Tensor | slice
    owner: Tensor | None
    grid: Tensor | None
    bias: Tensor
    dead: Tensor | None


@dataclass(slots=True)
class Pass:
    """ids, positions [1, rows]; writes: storage rows of the keys, and which row of the pass each comes from (None: identity)."""

    ids: Tensor
    positions: Tensor
    position_list: list[int]
    write_to: Tensor
    write_from: Tensor | None
    paths: list[Path]
    page_tokens: int
    query_tile: int  # queries of a call are padded to a multiple of this
    cache: dict[tuple[int, int, torch.dtype], Items] = field(default_factory=dict)

    def items(self, window: int | None, group: int, dtype: torch.dtype) -> Items:
        """The attention call for layers with this sliding window (None: full) and queries per key head; made once."""
        key = (window or 0, group, dtype)
        if key not in self.cache:
            self.cache[key] = _items(self, window, group, dtype)
        return self.cache[key]


def _items(p: Pass, window: int | None, group: int, dtype: torch.dtype) -> Items:
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
        seen = [p.position_list[r] for r in path.rows]
        first = max(0, min(seen) - window + 1) // size if window else 0
        last = max(seen) // size
        pages += path.pages[first : last + 1]
        owner += [a] * (last + 1 - first)
        ranks += range(first, last + 1)
        counts.append(last + 1 - first)
    most = max(counts)
    grid = None
    if most > 1:
        grid = torch.full((len(p.paths), most), -1, dtype=torch.int64)
        start = 0
        for a, count in enumerate(counts):
            grid[a, :count] = torch.arange(start, start + count)
            start += count
    query_at = torch.tensor([p.position_list[r] for r in take]).view(len(p.paths), width)[owner]  # [items, width]
    key_at = torch.tensor(ranks)[:, None] * size + torch.arange(size)  # [items, P]
    visible = key_at[:, None, :] <= query_at[:, :, None]
    if window:
        visible &= key_at[:, None, :] > query_at[:, :, None] - window
    blind = ~visible.any(-1)  # [items, width]
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible & ~blind[..., None], float("-inf"))
    bias = bias[:, None, None].expand(-1, 1, group, -1, -1).reshape(len(pages), 1, group * width, size)
    dead = blind[:, None, None].expand(-1, 1, group, -1).reshape(len(pages), 1, group * width) if bool(blind.any()) else None
    consecutive = all(b == a + 1 for a, b in zip(pages, pages[1:], strict=False))
    identity = take == list(range(len(back)))
    return Items(
        paths=len(p.paths),
        width=width,
        take=None if identity else torch.tensor(take, device=device),
        back=None if identity else torch.tensor(back, device=device),
        pages=slice(pages[0], pages[-1] + 1) if consecutive else torch.tensor(pages, device=device),
        owner=None if most == 1 else torch.tensor(owner, device=device),
        grid=None if grid is None else grid.to(device),
        bias=bias.to(device),
        dead=None if dead is None else dead.to(device),
    )
