"""How two arms compare: ratios of runs of the same prompt and repeat, their median, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from draftproof.bench.cells import bootstrap_median

Rates = Sequence[Sequence[float]]                      # prompt → repeats


def paired(over: Rates, under: Rates) -> dict[str, float]:
    """The median over prompts of each prompt's median ratio of pairs, its 95 % bootstrap interval over prompts, and the extremes."""
    each = [median(a / b for a, b in zip(x, y, strict=True)) for x, y in zip(over, under, strict=True)]
    spread = bootstrap_median(each)
    return {"median": spread.median, "low": spread.low, "high": spread.high, "min": min(each), "max": max(each)}


def shown(ratio: Mapping[str, float] | None) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}–{ratio['high']:.2f}]" if ratio else "–"
