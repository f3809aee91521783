"""What a sample of independent values says about percentiles, ratios of percentiles and rates.

`bounds` and `rate_bounds` hold for every distribution and every n, for decisions: each end errs with probability at most alpha.
`estimate` is the percentile between two such bounds. `ratio` joins those of two samples on the scale of logarithms by their distances
from the percentiles, as independent errors add (MOVER: Zou and Donner, doi 10.1002/sim.3095).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .cells import percentile

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; an end is None where so few values cannot bound it."""

    value: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float], share: float) -> Estimate | None:
    """The percentile at `share` with its interval; None without a value."""
    if not values:
        return None
    ordered = sorted(values)
    value, (low, high) = percentile(ordered, share), bounds(ordered, share, (1 - LEVEL) / 2)
    return Estimate(value, min(low, value) if low > -math.inf else None, max(high, value) if high < math.inf else None)


def ratio(values: Sequence[float], base: Sequence[float], share: float) -> Estimate | None:
    """The percentile of `values` over that of `base`, of independent samples. None if one is empty, or the base's is 0."""
    over, under = estimate(values, share), estimate(base, share)
    if over is None or under is None or not under.value > 0:
        return None
    value = over.value / under.value
    below, above = _apart(over.low, over.value, under.value, under.high), _apart(over.value, over.high, under.low, under.value)
    return Estimate(value, None if below is None else value / below, None if above is None else value * above)


def _apart(less: float | None, more: float | None, low: float | None, high: float | None) -> float | None:
    """The factor between a ratio and its end: `more / less` and `high / low` of both sides, joined. None where one is not bounded."""
    if less is None or more is None or low is None or high is None or not min(less, low) > 0:
        return None
    return math.exp(math.hypot(math.log(more / less), math.log(high / low)))


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
