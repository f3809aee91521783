"""Trees of a recurrent head by one launch of a recording: all levels' candidates, their chances, the next frontier, and its step.

The recording grows as `Growth` does, over tensors alone; the host reads the levels in one look and finishes the trees, as it does those
that grew level by level, which are the plain twin. A guess's entry lies behind the text's, level after level, a place for every node that a
level may extend: so a mask says which of them are on the way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.choice import largest
from ..core.upload import pinned
from ..models.heads.cache import CachePool, SlotPass
from ..models.heads.layers import Attend, Runs
from ..models.heads.recorded import Bucket, Ends, Fed, RecordedChains, Recording, RecurrentHead
from ..models.heads.rows import SIGHT
from .grow import CANDIDATES, Company, Growth, Margins, endings, packed, sight, unpacked

Steps = Callable[[Tensor], tuple[Tensor, Attend | Runs]]      # of a level's nodes, by their parents [lines, W]: positions, how they attend


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
        guesses = (bucket.depth - 1) * bucket.widest
        self.sighted = 0 < guesses <= SIGHT and bool(self.seats)                    # all levels through our kernels
        bit = torch.arange(guesses, device=device)
        self.bits = torch.stack([torch.where(bit // 64 == word, 1 << bit % 64, 0) for word in range(2)], 1)          # one of each guess
        self.seatings = {width: self.seating(width) for width in {min(bucket.widest, bucket.candidates), bucket.widest}}

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
        ends = self.fed()
        kinds, widths, stops = torch.split(self.about, [1, 1, bucket.ends], 1)
        ranks = self.order[:bucket.candidates]
        company = Company(kinds[:, None] + ranks, self.table, widths, stops[:, None, None] if bucket.ends else None)
        growth = Growth([bucket.depth] * bucket.lines, [], [], [], self.margins, [bucket.widest] * bucket.lines, company=company,
                        recorded=True)
        step = self._sighted(ends) if self.sighted else self._masked(ends)
        hidden, noise, width = ends.output[:, None], None, 1
        for _ in range(bucket.depth):
            logits = head.logits(hidden.flatten(0, 1)).float().view(bucket.lines, width, -1)
            if noise is None and not bucket.greedy:
                noise = self.noise(logits.shape[2])
            front = growth.grow(*self._offered(logits, None if noise is None else next(noise), bucket.candidates))
            if front is None:
                break
            hidden = hidden.gather(1, front.parents[..., None].expand(-1, -1, hidden.shape[2]))
            width = front.tokens.shape[1]
            hidden = head.step(front.tokens.flatten(), hidden.flatten(0, 1), *step(front.parents)).view(bucket.lines, width, -1)
        return Planted(packed(growth.levels), ends.output)

    def _masked(self, ends: Ends) -> Steps:
        """By masks of all that a node sees."""
        text, level = self.until(ends.at)[:, None], 0                               # [lines, 1, room]
        seen = torch.zeros(self.bucket.lines, 1, 0, dtype=torch.bool, device=text.device)

        def step(parents: Tensor) -> tuple[Tensor, Attend]:
            nonlocal seen, level
            width, seen, level = parents.shape[1], sight(seen, parents), level + 1
            own, guesses = self.order[:width], self.order[1:seen.shape[2] + 1]
            behind = guesses[-width:]                                               # of the frontier's entries, the text's last
            sees = text.expand(-1, width, -1).scatter(2, (ends.at[:, None] + guesses)[:, None].expand(-1, width, -1), seen)
            attend = SlotPass(self.store, (ends.places[:, None] + behind).flatten(), self.owner[:, None] * width + own, sees[self.owner],
                              (ends.slots[:, None] * width + own).flatten())
            return (ends.positions + level)[:, None].expand(-1, width).flatten(), attend

        return step

    def _sighted(self, ends: Ends) -> Steps:
        """By our kernels: every guess has a bit, and a node sees those that its parent sees, and its own."""
        levels = self.order[1:self.bucket.depth, None]
        positions, first, start = ends.positions + levels, ends.places[:, None] + 1, 0
        angles, bits = iter(self.angles(positions)), torch.zeros(self.bucket.lines, 1, 2, dtype=torch.int64, device=levels.device)
        rows = iter(positions)

        def step(parents: Tensor) -> tuple[Tensor, Runs]:
            nonlocal bits, start
            width, held, start = parents.shape[1], start, start + parents.shape[1]
            bits = bits.gather(1, parents[..., None].expand(-1, -1, 2)) | self.bits[held:start]
            places, at = first + self.order[held:start], ends.at.repeat_interleave(width, output_size=len(ends.at) * width)
            turns = next(angles).repeat_interleave(width, 0, output_size=len(ends.at) * width)
            attend = self.along(places.flatten(), at, turns, self.seatings[width], bits.flatten(0, 1))
            return next(rows)[:, None].expand(-1, width).flatten(), attend

        return step

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
