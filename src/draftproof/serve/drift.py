"""Whether acceptance is still what it was: each value against its own trailing baseline, with a false-alarm rate for any distribution.

A value's rank among the last ones is as likely to be any as long as nothing changed, whatever its law is; as a normal score it goes
into a two-sided CUSUM (Page 1954; sequential ranks: Reynolds 1975). A class that is alike from request to request alarms falsely once
in `quiet_run(LIMIT)` of its requests; requests of one client that resemble each other do it sooner.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist, fmean

MEMORY, FIRST = 500, 50     # values of the baseline: at most, and before anything is judged
SLACK, LIMIT = 0.5, 10.0    # of the CUSUM, in standard deviations: tuned to shifts of one
NORMAL = NormalDist()


def quiet_run(limit: float) -> float:
    """Values between two false alarms of a two-sided CUSUM of normal scores with slack ½ (Siegmund 1985, section 10.2)."""
    b = limit + 1.166
    return (math.exp(b) - 1 - b) / (2 * SLACK**2) / 2


@dataclass(frozen=True, slots=True)
class Alarm:
    """What was noticed at the `at`-th value: means before and since the change, which began `length` values ago."""

    at: int
    direction: str          # "fell" or "rose"
    before: float
    since: float
    length: int


class Drift:
    """Values one by one; `add` tells when they have changed, and then begins anew: what made the alarm would be a biased baseline."""

    __slots__ = ("alarms", "last", "seen", "_memory", "_sorted", "_sums", "_lengths", "_limit", "_rng")

    def __init__(self, limit: float = LIMIT, seed: int = 0) -> None:
        self.alarms, self.seen = 0, 0
        self.last: Alarm | None = None
        self._memory: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums, self._lengths = [0.0, 0.0], [0, 0]       # fallen, risen
        self._limit, self._rng = limit, random.Random(seed)

    @property
    def baseline(self) -> float | None:
        """Mean of the trailing values."""
        return fmean(self._memory) if self._memory else None

    @property
    def sums(self) -> tuple[float, float]:
        """The CUSUMs (fallen, risen); one above the limit is an alarm."""
        return self._sums[0], self._sums[1]

    @property
    def settled(self) -> bool:
        """Whether the baseline is long enough to judge by; false again after an alarm until the new one is."""
        return len(self._memory) >= FIRST

    def add(self, value: float) -> Alarm | None:
        self.seen += 1
        alarm = self._judge(self._score(value)) if self.settled else None
        self._remember(value)
        if alarm is None:
            return None
        side, length = alarm
        recent = list(self._memory)[-length:]
        earlier = list(self._memory)[:-length] or recent
        self.last = Alarm(self.seen, ("fell", "rose")[side], fmean(earlier), fmean(recent), length)
        self.alarms += 1
        self._memory, self._sorted = deque(), []
        self._sums, self._lengths = [0.0, 0.0], [0, 0]
        return self.last

    def _score(self, value: float) -> float:
        """The normal score of its rank; equal values share their ranks by chance."""
        below, upto = bisect_left(self._sorted, value), bisect_right(self._sorted, value)
        rank = below + self._rng.random() * (upto - below + 1)
        return NORMAL.inv_cdf(min(max(rank / (len(self._sorted) + 1), 1e-9), 1 - 1e-9))

    def _judge(self, score: float) -> tuple[int, int] | None:
        for side, gain in enumerate((-score, score)):
            self._sums[side] = max(0.0, self._sums[side] + gain - SLACK)
            self._lengths[side] = self._lengths[side] + 1 if self._sums[side] else 0
        worst = 0 if self._sums[0] >= self._sums[1] else 1
        return (worst, self._lengths[worst]) if self._sums[worst] > self._limit else None

    def _remember(self, value: float) -> None:
        self._memory.append(value)
        insort(self._sorted, value)
        if len(self._memory) > MEMORY:
            old = self._memory.popleft()
            del self._sorted[bisect_left(self._sorted, old)]
