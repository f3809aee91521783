"""Tail probabilities and tests that a proof needs, from torch alone. Each returns a probability; small means: this was no accident."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def chi2_tail(statistic: float, freedom: int) -> float:
    """P(χ² with `freedom` degrees ≥ statistic), the regularised upper incomplete gamma function."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi2_fit(counts: Sequence[int], law: Sequence[float]) -> float:
    """Pearson's test of counts against a law; cells expecting fewer than 5 are pooled. 0 if something impossible was counted."""
    total = sum(counts)
    if any(count and not chance for count, chance in zip(counts, law, strict=True)):
        return 0.0
    cells = sorted((chance * total, count) for count, chance in zip(counts, law, strict=True) if chance)
    pooled: list[tuple[float, int]] = []
    expected, seen = 0.0, 0
    for mean, count in cells:
        expected, seen = expected + mean, seen + count
        if expected >= 5:
            pooled.append((expected, seen))
            expected, seen = 0.0, 0
    if expected and pooled:
        pooled[-1] = pooled[-1][0] + expected, pooled[-1][1] + seen
    if len(pooled) < 2:
        return 1.0
    return chi2_tail(sum((count - mean) ** 2 / mean for mean, count in pooled), len(pooled) - 1)


def normal_tail(z: float) -> float:
    """P(|N(0, 1)| ≥ |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


def skewed_tail(z: float, skew: float) -> float:
    """Twice P(as far as z, on its side) of a standard variable with this skew, by the gamma law that has it (Pearson's type III): what
    the normal law forgets of sums of rare surprises. As normal_tail where there is no skew."""
    if abs(skew) < 0.01:
        return normal_tail(z)
    shape = torch.tensor(4 / skew**2, dtype=torch.float64)
    place = (shape + math.copysign(z, z * skew) * shape.sqrt()).clamp_min(0)
    tail = torch.special.gammaincc(shape, place) if z * skew > 0 else torch.special.gammainc(shape, place)
    return min(1.0, 2 * float(tail))


def uniform_fit(values: Sequence[float]) -> float:
    """Kolmogorov–Smirnov test that values are uniform on (0, 1), by its limit law with Stephens' correction."""
    n, ordered = len(values), sorted(values)
    if not n:
        return 1.0
    distance = max(max((i + 1) / n - u, u - i / n) for i, u in enumerate(ordered))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.3:
        return 1.0
    tail = 2 * math.fsum(math.exp(-2 * k * k * x * x) * (1 if k % 2 else -1) for k in range(1, 101))
    return min(1.0, max(0.0, tail))


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided McNemar test: of the pairs that differ, is half gained and half lost? (Binomial.)"""
    n, tail, ways = gained + lost, 0, 1
    for k in range(min(gained, lost) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << n))                     # of integers, since 2ⁿ may be beyond a float


def paired_interval(gained: int, lost: int, pairs: int) -> tuple[float, float]:
    """90 % interval of the difference of two paired shares, (gained − lost)/pairs: the one whose two ends TOST compares with a margin
    at 5 % each. Tango's score interval (1998), one pair wider at each end: with that, both ends lie within a margin that the true
    difference has in fewer than 5 % of cases, summed over every outcome for 2 to 700 pairs and margins of 1 to 70 points."""
    return -_most(lost, gained, pairs), _most(gained, lost, pairs)


def _most(gained: int, lost: int, pairs: int) -> float:
    """The largest difference that these counts do not refuse at 5 %. By bisection."""
    low, high = (gained - lost) / pairs, 1.0
    while high - low > 1e-9:
        difference = (low + high) / 2
        room = difference * (1 - difference)
        slope = (2 * pairs - gained + lost) * difference - gained - lost
        loses = (math.sqrt(max(0.0, slope**2 + 8 * pairs * lost * room)) - slope) / (4 * pairs)    # the likeliest share at this difference
        if pairs * difference - (gained - lost) - 1 <= 1.6449 * math.sqrt(max(0.0, pairs * (2 * loses + room))):
            low = difference
        else:
            high = difference
    return high
