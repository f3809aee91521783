"""What a pass and a draft cost, learnt from every measurement: at the start from some passes on purpose, then while serving.

    log seconds = log Σ_j w_j x_j + bend(rows) + weather,   w_j > 0

An extended Kalman filter estimates log w, the bends and the weather (a draft has no bends). The weather is what all measurements of some
minutes have in common (other programs, a warm chip): it moves no decision, and costs are given without it, "in fair weather". What one
shape of pass has alone is its cost. The noise is that of timings on shared machines; a long pause is cut to a bounded surprise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..core.budget import distinct_experts

Vector = NDArray[np.float64]

NOISE = 0.1             # standard deviation of one timing's logarithm
SURPRISE = 0.5          # of a logarithm: more is not believed at once …
COLD = 3                # … after this many measurements; the first call of anything is slow
SCALE = 2.0             # standard deviation of the logarithm of the machine's speed, before a second measurement
WEATHER = 0.03          # drift of the weather between two rounds
AGEING = 1e-3           # drift of everything else
LINGER = 3              # plain passes of several sequences that are slower after one with drafts, by up to an eighth where they take
                        # 3 ms, because caches and clock rate are still as it left them; of one sequence none is
WAITING = 64            # measurements that may wait until an estimate is wanted
SETTLED, SELDOM = 8, 32  # after SETTLED measurements of a shape, only one in as many as there were is used, but at least one in SELDOM:
                        # using one takes time itself


class Filter:
    """log w and further terms with their covariance; positive by construction."""

    def __init__(self, weights: Sequence[float], spread: float, terms: Vector | None = None) -> None:
        """weights: relative to each other, for the first measurement sets the scale; spread: of their logarithms; terms [n, n]: the
        covariance of the further terms."""
        terms = np.zeros((0, 0)) if terms is None else terms
        known = len(weights)
        self.weights: Vector = np.array(weights, dtype=np.float64)
        self.terms: Vector = np.zeros(len(terms))
        self.seen = 0
        self._cov = np.zeros((known + len(terms),) * 2)
        self._cov[:known, :known], self._cov[known:, known:] = np.eye(known) * spread**2 + SCALE**2, terms
        self._variances = self._cov.ravel()[::len(self._cov) + 1]    # a view of the diagonal
        self._slope: Vector = np.zeros(len(self._cov))
        self.drift = np.full(len(self._cov), AGEING**2)              # added to the variances before each measurement

    def learn(self, parts: Vector, mix: Vector, log_seconds: float) -> None:
        """One measurement. parts [n]: the x_j; mix [terms]: how much of each further term stands in it."""
        self.seen += 1
        if self.seen == 1:                      # a scale to begin with; the first call of anything is slow, so nothing rests on it
            self.weights *= math.exp(log_seconds) / float(self.weights @ parts)
            return
        known, slope, level = len(parts), self._slope, float(self.weights.dot(parts))
        slope[:known] = self.weights * parts / level
        slope[known:] = mix
        error = log_seconds - math.log(level) - float(self.terms.dot(mix))
        bound, noise = (SURPRISE, NOISE) if self.seen > COLD else (10 * SURPRISE, 5 * NOISE)
        error = min(max(error, -bound), bound)
        self._variances += self.drift
        seen = self._cov.dot(slope)
        gain = seen / (float(slope.dot(seen)) + noise**2)
        step = gain * error
        self.weights *= np.exp(step[:known])
        self.terms += step[known:]
        self._cov -= gain[:, None] * seen


@dataclass(slots=True)
class Moment:
    """The time of a measurement that waits. weather: as `PassCosts` has it, of that time; right once the measurement is settled."""

    weather: float = 0.0


class PassCosts:
    """Seconds of a target's pass as a function of its rows, its sequences and the keys they read. One object per target.

    Measurements wait until an estimate is wanted: taken in together they need a fraction of the time that they need one by one between
    passes, each of which sweeps the caches.
    """

    # What a pass is made of: itself, sequences, rows, thousands of keys read, and thousands of row × key pairs; of a mixture of experts
    # also the experts that are read, as many as one row chooses being 1. Beliefs before anything was measured.
    BELIEFS = (1.0, 0.05, 0.03, 0.05, 0.02)
    CHOSEN = 1.0
    KNOTS, STEPS = 21, 2    # bends at 1, √2, 2, … 1024 rows: shapes of kernels, and the knee where arithmetic takes over
    BEND, REACH = 0.3, 3.0  # how large they may be, and over how many knots they are alike

    def __init__(self, overlaps: bool = False, experts: tuple[int, int] | None = None) -> None:
        """overlaps: a plain pass behind another is begun while the host is still busy with that one (ahead.py). experts: how many a layer
        of the target has, and how many of them a row chooses; None: it is no mixture of experts."""
        self.overlaps, self.experts = overlaps, experts
        knots = np.arange(self.KNOTS)
        terms = np.zeros((self.KNOTS + 1, self.KNOTS + 1))               # the bends, and the weather
        terms[:-1, :-1] = self.BEND**2 * np.exp(-np.abs(knots[:, None] - knots) / self.REACH)
        beliefs = self.BELIEFS if experts is None else (*self.BELIEFS, self.CHOSEN)
        self._filter = Filter(beliefs, 1.0, terms)
        self._weather = len(beliefs) + self.KNOTS
        self.moment = Moment()                      # of the last measurement
        self._waiting: list[tuple[Moment, int, int, int, float, int]] = []      # arguments of `learn`, and passes since the one before
        self._round = self._learnt = 0              # passes so far, and the last of them that was used
        self.since_plain = 0                        # passes since one without drafts
        self._plain = 0                             # passes in a row without drafts
        self._bent: Vector = np.zeros(0)            # exp(bend) of 1, 2, … rows, kept until the next measurement
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}       # (batch, rows) → how often it was used, and in which pass last

    @property
    def known(self) -> bool:
        return bool(self._waiting) or self._filter.seen > 0

    @property
    def weather(self) -> float:
        """Logarithm of how much slower everything is than it was at the start."""
        self.settle()
        return self.moment.weather

    def lingering(self, batch: int) -> int:
        """How many plain passes of this batch, after one with drafts, are not what plain decoding takes."""
        return LINGER if batch > 1 else int(self.overlaps)

    def follow(self, batch: int, rows: int, keys: int, seconds: float) -> None:
        """`learn` while serving, which leaves out passes that the one before has slowed down."""
        self._plain = self._plain + 1 if rows == batch else 0
        if not 0 < self._plain <= self.lingering(batch) or not self.known:
            self.learn(batch, rows, keys, seconds)

    def learn(self, batch: int, rows: int, keys: int, seconds: float) -> None:
        """A pass over `rows` rows of `batch` sequences, whose texts have `keys` tokens in all, took `seconds`; 0: it is counted alone."""
        self._round, self.since_plain = self._round + 1, self.since_plain + 1 if rows > batch else 0
        shape = batch, rows if rows <= 16 else int(8 * math.log2(rows))         # of many rows, those within a tenth are alike
        count, last = self._shapes.get(shape, (0, 0))
        if seconds <= 0 or (count >= SETTLED and self._round - last < min(count, SELDOM)):
            return
        self._shapes[shape] = count + 1, self._round
        self.moment = Moment()
        self._waiting.append((self.moment, batch, rows, keys, seconds, self._round - self._learnt))
        self._learnt = self._round
        if len(self._waiting) == WAITING:
            self.settle()

    def settle(self) -> None:
        """Take in the measurements that wait."""
        if not self._waiting:
            return
        for moment, batch, rows, keys, seconds, passes in self._waiting:
            self._filter.drift[self._weather] = WEATHER**2 * passes
            parts = np.array([1.0, batch, rows, keys / 1e3, rows * keys / batch / 1e3, *self._chosen(rows)])
            self._filter.learn(parts, self._mix(rows), math.log(seconds))
            moment.weather = float(self._filter.terms[-1])
        self._waiting.clear()
        self._bent = np.zeros(0)

    def curve(self, batch: int, keys: int, rows: int) -> list[float]:
        """Seconds [rows] in fair weather of passes over 1, 2, … `rows` rows, never falling."""
        self.settle()
        many = np.arange(1.0, rows + 1)
        if len(self._bent) < rows:
            self._bent = np.exp(np.interp(self.STEPS * np.log2(many), np.arange(self.KNOTS), self._filter.terms[:-1]))
        one, each, row, key, pair, *chosen = self._filter.weights.tolist()
        base, slope = one + each * batch + key * keys / 1e3, row + pair * keys / batch / 1e3
        seconds = base + slope * many
        for weight, experts in zip(chosen, self._chosen(many), strict=True):
            seconds += weight * experts
        found: list[float] = np.maximum.accumulate(seconds * self._bent[:rows]).tolist()
        return found

    def _chosen(self, rows: int | Vector) -> tuple[float | Vector, ...]:
        """Experts that so many rows are expected to read, one row's being 1; empty: there are none to choose from."""
        return () if self.experts is None else (distinct_experts(*self.experts, rows) / self.experts[1],)

    def _mix(self, rows: int) -> Vector:
        mix = np.zeros(self.KNOTS + 1)
        level = min(self.STEPS * math.log2(rows), self.KNOTS - 1.0)
        low = min(int(level), self.KNOTS - 2)
        mix[low], mix[low + 1] = low + 1 - level, level - low
        mix[-1] = 1.0
        return mix


class DraftCosts:
    """Seconds that a drafter takes, as a function of levels, drafted tokens, and tokens of the texts that it has not read yet."""

    BELIEFS = (1.0, 1.0, 1.0, 0.1, 1.0)      # a call, one that finds anything, a level, a token, a hundred unread tokens
    NOTHING = np.zeros(0)

    def __init__(self) -> None:
        self._filter = Filter(self.BELIEFS, 1.0)
        self._calls = 0

    @property
    def seen(self) -> int:
        return self._filter.seen

    def learn(self, levels: int, tokens: int, unread: int, seconds: float) -> None:
        """A call took so long, in fair weather."""
        self._calls += 1
        if seconds > 0 and (self.seen < 4 * SETTLED or self._calls % 4 == 0):
            self._filter.learn(np.array([1.0, levels > 0, levels, tokens, unread / 100]), self.NOTHING, math.log(seconds))

    def seconds(self, reach: Sequence[float], tokens: float, unread: float) -> float:
        """In fair weather. reach[k−1]: how often there is a k-th level; tokens: how many are expected."""
        call, found, level, token, hundred = self._filter.weights.tolist()
        return float(call + found * (reach[0] if reach else 0.0) + level * sum(reach) + token * tokens + hundred * unread / 100)

    def levels(self, reach: Sequence[float]) -> list[float]:
        """Seconds of a call for at most 0 (none is made), 1, 2, … levels, apart from its tokens."""
        call, found, level, *_ = self._filter.weights.tolist()
        return [0.0, *[call + found * reach[0] + level * levels for levels in accumulate(reach)]]

    @property
    def per_level(self) -> float:
        """Seconds of one level; 0 until a call was timed."""
        return float(self._filter.weights[2]) if self.seen else 0.0

    @property
    def per_token(self) -> float:
        """Seconds of one drafted token, apart from its row in the pass; 0 until a call was timed."""
        return float(self._filter.weights[3]) if self.seen else 0.0

    @property
    def per_unread(self) -> float:
        return float(self._filter.weights[4]) / 100
