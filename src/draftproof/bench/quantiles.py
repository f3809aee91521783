"""What a sample of independent values says about percentiles, ratios of percentiles and rates.

`estimate` and `ratio` give percentile-bootstrap intervals, for reading. Nothing has to be resampled for them: the k-th value of a
resample of n is the value at place ⌈n·U⌉ of the sample, U being the k-th of n sorted uniform numbers, which is Beta(k, n − k + 1).
`bounds` and `rate_bounds` hold for every distribution and every n, for decisions: each end errs with probability at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .cells import percentile

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; an end is None where so few values cannot bound it."""

    value: float
    low: float | None
    high: float | None


def resampled(ordered: Sequence[float], share: float, rng: np.random.Generator, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """`percentile(…, share)` of bootstrap resamples of sorted values, which are at least one."""
    values, n = np.asarray(ordered, dtype=np.float64), len(ordered)
    place = share * (n - 1)
    k = int(place) + 1
    lower = rng.beta(k, n - k + 1, resamples)
    found = values[_index(lower, n)]
    if k == n:
        return found
    upper = lower + (1 - lower) * rng.beta(1, n - k, resamples)     # the least of the n − k uniform numbers above it
    return found + (place - int(place)) * (values[_index(upper, n)] - found)


def estimate(values: Sequence[float], share: float, seed: int = 0) -> Estimate | None:
    """The percentile at `share` with its interval; None without a value."""
    if not values:
        return None
    ordered = sorted(values)
    low, high = _ends(resampled(ordered, share, np.random.default_rng(seed)))
    below, above = _known(len(ordered), share)
    return Estimate(percentile(ordered, share), low if below else None, high if above else None)


def ratio(values: Sequence[float], base: Sequence[float], share: float, seed: int = 0) -> Estimate | None:
    """The percentile of `values` over that of `base`, of independent samples. None if one is empty, or the base's is 0."""
    if not values or not base:
        return None
    ordered, under, rng = sorted(values), sorted(base), np.random.default_rng(seed)
    whole = percentile(under, share)
    if not whole > 0:
        return None
    parts = resampled(under, share, rng)
    if not parts.min() > 0:
        return Estimate(percentile(ordered, share) / whole, None, None)
    low, high = _ends(resampled(ordered, share, rng) / parts)
    (a_below, a_above), (b_below, b_above) = _known(len(ordered), share), _known(len(under), share)
    return Estimate(percentile(ordered, share) / whole, low if a_below and b_above else None, high if a_above and b_below else None)


def bounds(ordered: Sequence[float], share: float, alpha: float) -> tuple[float, float]:
    """Distribution-free bounds of the percentile at `share`, −inf or inf where there is none.

    The l-th of n values is above the true percentile only if fewer than l fall at or below it: P ≤ P(Bin(n, share) ≤ l − 1).
    """
    below, above = _places(len(ordered), share, alpha)
    return (ordered[below - 1] if below else -math.inf), (ordered[above - 1] if above <= len(ordered) else math.inf)


def rate_bounds(hits: int, n: int, alpha: float) -> tuple[float, float]:
    """Bounds of a probability of which `hits` in `n` were seen, by Chernoff: P(such a share, or further off) ≤ exp(−n·KL)."""
    if not n:
        return 0.0, 1.0
    seen, need = hits / n, -math.log(alpha) / n
    return _kl_solve(seen, need, 0.0), _kl_solve(seen, need, 1.0)


def _ends(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _known(n: int, share: float) -> tuple[bool, bool]:
    """Whether n values can bound a percentile from below and from above: else the true one may well lie beyond all of them."""
    tail = (1 - LEVEL) / 2
    return (1 - share) ** n <= tail, share ** n <= tail


def _index(uniform: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    return np.minimum((uniform * n).astype(np.int64), n - 1)


@lru_cache(maxsize=4096)
def _places(n: int, share: float, alpha: float) -> tuple[int, int]:
    """(l, u): the largest l with P(Bin(n, share) ≤ l − 1) ≤ alpha, 0 if none; the smallest u with P(Bin ≥ u) ≤ alpha, n + 1 if none."""
    chances = [math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
                        + k * math.log(share) + (n - k) * math.log1p(-share)) for k in range(n + 1)]
    below, mass = 0, 0.0
    while below < n and (mass := mass + chances[below]) <= alpha:
        below += 1
    above, mass = n + 1, 0.0
    while above > 1 and (mass := mass + chances[above - 1]) <= alpha:
        above -= 1
    return below, above


def _kl_solve(seen: float, need: float, end: float) -> float:
    """The p between `seen` and `end` whose KL(seen ‖ p) is `need`; `end` if there is none. By bisection, on the outer side."""
    inside, outside = seen, end
    if seen == end:
        return end
    for _ in range(60):
        middle = (inside + outside) / 2
        if _kl(seen, middle) < need:
            inside = middle
        else:
            outside = middle
    return outside


def _kl(a: float, b: float) -> float:
    """KL divergence of two coins, natural logarithm."""
    heads = a * math.log(a / b) if a else 0.0
    tails = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return heads + tails
