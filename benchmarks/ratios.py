"""How two arms compare: ratios of runs of the same prompt and repeat, their median, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from draftproof.bench.cells import middle

Rates = Sequence[Sequence[float]]                      # prompt → repeats


Ratio = Mapping[str, float | None]

BRACKETS = "[95 % interval over prompts; of fewer than six their range]"


def paired(over: Rates, under: Rates) -> dict[str, float | None]:
    """The median over prompts of each prompt's median ratio of pairs, its 95 % interval over prompts, and the extremes."""
    return asdict(middle(median(a / b for a, b in zip(x, y, strict=True)) for x, y in zip(over, under, strict=True)))


def shown(ratio: Ratio | None) -> str:
    """With what BRACKETS says."""
    if not ratio:
        return "–"
    low, high = (ratio["min"], ratio["max"]) if ratio["low"] is None else (ratio["low"], ratio["high"])
    return f"{ratio['median']:.2f} [{low:.2f}–{high:.2f}]"
