"""Chances that are counted: how sure a draft model is of its best token, and where a chain ends because going on is not worth its time."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from ..types import Budget
from .grow import GAPS, affordable, middles

PRIOR = 10.0            # observations that a first belief is worth
MEMORY = 2000.0         # observations after which old ones fade


class Counts:
    """P(a guess stands), for sampled texts and greedy ones, by cells of what is known before: a first belief each, and what is counted."""

    def __init__(self, beliefs: Iterable[float], memory: float = MEMORY) -> None:
        start = [PRIOR * belief for belief in beliefs]
        self._memory, self._hits, self._seen = memory, [start.copy() for _ in range(2)], [[PRIOR] * len(start) for _ in range(2)]

    def of(self, greedy: bool, cell: int) -> float:
        return self._hits[greedy][cell] / self._seen[greedy][cell]

    def learn(self, greedy: bool, cell: int, stood: bool) -> None:
        hits, seen = self._hits[greedy], self._seen[greedy]
        if seen[cell] >= self._memory:
            hits[cell], seen[cell] = hits[cell] / 2, seen[cell] / 2
        hits[cell], seen[cell] = hits[cell] + stood, seen[cell] + 1


class Confidence:
    """P(the best token of a row stands | its gap: how far it lies above the second after the noise), for sampled and greedy texts. Begins
    with a guess, and counts."""

    def __init__(self) -> None:
        self._counts = Counts(1 / (1 + math.exp(1.0 - 1.2 * gap)) for gap in middles(0.0, GAPS, 2 * GAPS[-1]))
        self._usual = [0.6, 0.6]

    def of(self, greedy: bool, gap: float) -> float:
        return self._counts.of(greedy, bisect(GAPS, gap))

    def usual(self, greedy: bool) -> float:
        """Of a token that nobody has seen yet."""
        return self._usual[greedy]

    def learn(self, greedy: bool, gap: float, stood: bool) -> None:
        self._counts.learn(greedy, bisect(GAPS, gap), stood)
        self._usual[greedy] += 0.01 * (stood - self._usual[greedy])


@lru_cache(maxsize=256)
def floors_of(prices: tuple[float, ...]) -> tuple[float, ...]:
    """Behind so many nodes, the chance at which no further number of nodes could be worth its rows."""
    paid = (0.0, *prices)
    return tuple(min((paid[more] - paid[had]) / (more - had) for more in range(had + 1, len(paid))) for had in range(len(prices)))


@dataclass(slots=True)
class Run:
    """One chain as it is drafted: tokens with their gaps, and the chances that all up to each stand; also those that are left out."""

    budget: Budget
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def takes(self, token: int, gap: float, sure: Confidence) -> bool:
        """Whether the next token may be worth its row, with those that can follow it."""
        self.tokens.append(token)
        self.gaps.append(gap)
        self.chances.append(self._reach * sure.of(self.greedy, gap))
        return self._reach > self._floor(len(self.tokens))

    def goes_on(self, sure: Confidence) -> bool:
        """Whether another level may be worth drafting."""
        return self._reach * sure.usual(self.greedy) > self._floor(len(self.tokens) + 1) + self.budget.step

    def kept(self) -> int:
        """How many tokens, of those drafted, are worth their rows: with a first row that is dear, many may be where few are not."""
        return affordable(self.chances, self.budget.prices, 0)

    def teach(self, sure: Confidence, came: tuple[int, ...]) -> None:
        """The text went on with these tokens."""
        for token, gap, chosen in zip(self.tokens, self.gaps, came, strict=False):
            sure.learn(self.greedy, gap, token == chosen)
            if token != chosen:
                return

    @property
    def _reach(self) -> float:
        return self.chances[-1] if self.chances else 1.0

    def _floor(self, number: int) -> float:
        """The chance at which neither token `number`, 1 being the first, nor any that follow could be worth their rows."""
        floors = floors_of(self.budget.prices[:self.budget.nodes])
        return floors[number - 1] if number <= len(floors) else math.inf
