"""What a drafter has of the target's hidden states: those of one stretch of the text, of which the last ones wait until it reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Window:
    """Hidden states of the positions from `first` on, without a gap: `held` of them were read, into a cache or a state; the next
    `ahead` wait."""

    first: int = 0
    held: int = 0
    ahead: int = 0
    waiting: list[Tensor] = field(default_factory=list)     # [n, width] of each of some rounds

    @property
    def at(self) -> int:
        """The position of the next one to be read."""
        return self.first + self.held

    @property
    def end(self) -> int:
        """The first position behind them."""
        return self.at + self.ahead

    @property
    def empty(self) -> bool:
        return not self.held + self.ahead

    def take(self, rows: Tensor, start: int) -> bool:
        """rows [n, width] of the positions from `start` on: what is new waits. After a gap, or if there was nothing, the window begins
        with them; returns whether it did, for what was read is void then."""
        anew = self.empty or start > self.end
        if anew:
            self.first, self.held, self.ahead = start, 0, 0
            self.waiting.clear()
        elif start < self.end:
            rows = rows[self.end - start:]
        if rows.shape[0]:
            self.waiting.append(rows)
            self.ahead += rows.shape[0]
        return anew

    def due(self, count: int) -> Tensor:
        """[count, width] the next ones that wait. At least one does."""
        if len(self.waiting) > 1:
            self.waiting = [torch.cat(self.waiting)]
        rows, = self.waiting
        return rows[:count] if count < len(rows) else rows

    def pieces(self, count: int) -> list[Tensor]:
        """The same as they came, a round's behind another's."""
        found: list[Tensor] = []
        for rows in self.waiting:
            found.append(rows[:count] if count < rows.shape[0] else rows)
            count -= rows.shape[0]
            if count <= 0:
                break
        return found

    def read(self, count: int) -> None:
        """So many of those that wait are held now."""
        left = count
        while left and self.waiting[0].shape[0] <= left:
            left -= self.waiting.pop(0).shape[0]
        if left:
            self.waiting[0] = self.waiting[0][left:]
        self.held += count
        self.ahead -= count

    def close(self) -> None:
        self.held, self.ahead = 0, 0
        self.waiting.clear()
