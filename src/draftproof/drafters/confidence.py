"""Chances that are counted: how sure a draft model is of its best token, and where a chain ends because going on is not worth its time."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..types import Budget
from .grow import GAPS, middles

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


@dataclass(slots=True)
class Run:
    """One chain as it is drafted: tokens with their gaps, also the last one where it was left out, and the chance that all of it stands."""

    budget: Budget
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reach: float = 1.0

    def takes(self, token: int, gap: float, sure: Confidence) -> bool:
        """Whether the next token is worth its row."""
        self.tokens.append(token)
        self.gaps.append(gap)
        self.reach *= sure.of(self.greedy, gap)
        return self.reach > self._price(len(self.tokens))

    def goes_on(self, sure: Confidence) -> bool:
        """Whether another level is worth drafting."""
        more = len(self.tokens) + 1
        return self.reach * sure.usual(self.greedy) > self._price(more) + self.budget.step

    def teach(self, sure: Confidence, came: tuple[int, ...]) -> None:
        """The text went on with these tokens."""
        for token, gap, chosen in zip(self.tokens, self.gaps, came, strict=False):
            sure.learn(self.greedy, gap, token == chosen)
            if token != chosen:
                return

    def _price(self, number: int) -> float:
        """Of the row of token `number`, 1 being the first, beside those before it."""
        prices = self.budget.prices
        return prices[number - 1] - (prices[number - 2] if number > 1 else 0.0) if number <= len(prices) else math.inf
