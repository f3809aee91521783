"""Trees of a recurrent head by one launch of a recording: all levels' candidates, their chances, the next frontier, and its step.

The recording grows as `Growth` does, over tensors alone; the host reads the levels in one look and finishes the trees, as it does those
that grew level by level, which are the plain twin. A guess's entry lies behind the text's, level after level, a place for every node that a
level may extend: so a mask says which of them are on the way to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.choice import largest
from ..core.upload import pinned
from ..models.heads.cache import CachePool
from ..models.heads.recorded import Bucket, Fed, RecordedChains, Recording, RecurrentHead, SlotPass
from .grow import CANDIDATES, Company, Growth, Margins, endings, packed, sight, unpacked


class Planted(NamedTuple):
    """Of every line: levels [lines, n], `packed` · last [lines, H]."""

    levels: Tensor
    last: Tensor


class PlantedTrees(Recording):
    """The tensors of one bucket, and the trees that grow over them."""

    where = " where trees grow"

    def __init__(self, bucket: Bucket, head: RecurrentHead, pool: CachePool, like: Tensor, ours: bool = False) -> None:
        super().__init__(bucket, head, pool, like, ours)
        device = self.store.device
        self.about = torch.zeros(bucket.lines, 2 + bucket.ends, dtype=torch.int64, device=device)
        self.margins = Margins()
        self.table = self.margins.table(device)
        self.table = self.table._replace(chances=self.table.chances.clone())        # what the recording reads

    def fill(self, lines: Sequence[Fed], keys: Tensor | None, *more: Any) -> None:
        """more: the trees, none of which has grown."""
        super().fill(lines, keys)
        growth: Growth = more[0]
        rows = [(greedy * CANDIDATES, width, *ends) for greedy, width, ends
                in zip(growth.greedy, growth.widths, endings(growth.ends, self.bucket.ends), strict=True)]
        about = torch.tensor(rows + rows[:1] * (self.bucket.lines - len(rows)))
        self.about.copy_(pinned(about, self.about.device), non_blocking=True)
        chances = growth.margins.table(torch.device("cpu")).chances
        self.table.chances.copy_(pinned(chances, self.about.device), non_blocking=True)

    def run(self) -> tuple[Tensor, ...]:
        """The trees, out of tensors alone."""
        head, bucket = self.head, self.bucket
        last, positions, places, at, slots = self.fed()
        kinds, widths, ends = torch.split(self.about, [1, 1, bucket.ends], 1)
        ranks = torch.arange(bucket.candidates, device=at.device)
        company = Company(kinds[:, None] + ranks, self.table, widths, ends[:, None, None] if bucket.ends else None)
        growth = Growth([bucket.depth] * bucket.lines, [], [], [], self.margins, [bucket.widest] * bucket.lines, company=company,
                        recorded=True)
        text = self.until(at)[:, None]                                              # [lines, 1, room]
        seen = torch.zeros(bucket.lines, 1, 0, dtype=torch.bool, device=at.device)
        hidden, noise, width = last[:, None], None, 1
        for level in range(bucket.depth):
            logits = head.logits(hidden.flatten(0, 1)).float().view(bucket.lines, width, -1)
            if noise is None and not bucket.greedy:
                noise = self.noise(logits.shape[2])
            front = growth.grow(*self._offered(logits, None if noise is None else next(noise), bucket.candidates))
            if front is None:
                break
            hidden = hidden.gather(1, front.parents[..., None].expand(-1, -1, hidden.shape[2]))
            width, seen = front.tokens.shape[1], sight(seen, front.parents)
            own = torch.arange(width, device=at.device)
            behind = seen.shape[2] - width + 1 + own                                # of the frontier's entries, the text's last
            sees = text.expand(-1, width, -1).scatter(2, (at[:, None] + 1 + torch.arange(seen.shape[2], device=at.device))[:, None]
                                                      .expand(-1, width, -1), seen)
            attend = SlotPass(self.store, (places[:, None] + behind).flatten(), self.owner[:, None] * width + own, sees[self.owner],
                              (slots[:, None] * width + own).flatten())
            rows = (positions + 1 + level)[:, None].expand(-1, width).flatten()
            hidden = head.step(front.tokens.flatten(), hidden.flatten(0, 1), rows, attend).view(bucket.lines, width, -1)
        return Planted(packed(growth.levels), last)

    def _offered(self, logits: Tensor, noise: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """A level's candidates, as `drafters.base.pick` ranks them: tokens, values and shares [lines, slots, count]."""
        law, quiet = self.law(logits)
        scores = law if noise is None else torch.where(quiet, law, law + noise[:, None])
        values, columns = largest(scores.flatten(0, 1), count)
        columns = columns.view(*logits.shape[:2], count)
        tokens = columns if self.head.ids is None else self.head.ids[columns]
        return tokens, values.view(columns.shape), law.gather(2, columns)


def plant(recorded: RecordedChains, lines: Sequence[Fed], growth: Growth, keys: Tensor | None, size: int) -> Tensor | None:
    """Grow all levels of `growth`, and return the last outputs [lines, H] of what was fed; None, with nothing grown, if recordings fail.
    size: of the head's vocabulary. Here the host waits for the device."""
    count, depth = min(CANDIDATES, size), max(growth.depths)
    bucket = Bucket.of(lines, depth, count, max(growth.widths), max(map(len, growth.ends)))
    found = recorded.replayed(PlantedTrees, bucket, lines, keys, growth)
    if found is None:
        return None
    levels, last = found
    last = last.clone()
    slots = [1, *[min(bucket.widest, count)] * (depth > 1), *[bucket.widest] * (depth - 2)][:depth]
    growth.seen = unpacked(levels.cpu().numpy(), slots, count)
    return last
