"""Runs in pairs → cells of a table.

Speed is compared inside a pair only: the same prompt, temperature and repeat, with speculation off and on, minutes of
machine weather apart at most. A prompt's speed-up is the median over its repeats; a cell's is the median over its
prompts, with a 95 % interval over the prompts, which are the independent units. Its ends are two of the values, so it holds for every
distribution; fewer than six values have none, and then stands the range of what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")

OFF = "off"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Run:
    """One request, timed from its start to its last token."""

    arm: str                        # "off" or the drafter's name
    drafter: str
    depth: str                      # "auto" or a number
    prompt: int
    prompt_class: str
    temperature: float
    repeat: int
    seconds: float
    token_ids: tuple[int, ...]
    metrics: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def decoding(self) -> float | None:
        """Tokens per second after the first; None if there was no other."""
        seconds: float | None = self.metrics["tpot_s"]
        return 1 / seconds if seconds else None


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Middle:
    """The median of independent values. low and high: its 95 % interval, None where they are too few to have one; min and max of them."""

    median: float
    low: float | None
    high: float | None
    min: float
    max: float

    @property
    def text(self) -> str:
        """As a ratio, in a table."""
        known = self.low is not None and self.high is not None
        return f"{self.median:.2f}× " + (f"({self.low:.2f}–{self.high:.2f})" if known else f"(range {self.min:.2f}–{self.max:.2f})")


@dataclass(frozen=True, slots=True)
class Cell:
    """One row: an arm in a class of prompts at a temperature (None: all of them together)."""

    arm: str
    drafter: str
    depth: str
    prompt_class: str
    temperature: float | None
    tokens_per_s: Spread            # low and high: the 10th and 90th percentile over runs
    speedup: Middle                 # of whole requests
    decoding: Middle | None         # the same of the tokens after the first, which no drafter can hasten; None if there were none
    acceptance_length: float
    ttft_s: float
    tpot_s: float
    identical: bool
    tokens: int                     # compared with off
    concurrency: int = 1

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["class"] = record.pop("prompt_class")
        return record


def cells(runs: Sequence[Run]) -> list[Cell]:
    """A cell per class, temperature and arm; then over all classes; then, of several temperatures, over all of them, too. Every run
    needs its pair among `runs`."""
    pairs = {(r.prompt, r.temperature, r.repeat): r for r in runs if r.arm == OFF}
    result = []
    temperatures: list[float | None] = list(_unique(r.temperature for r in runs))
    for name in [*_unique(r.prompt_class for r in runs), ALL]:
        for temperature in [*temperatures, None] if name == ALL and len(temperatures) > 1 else temperatures:
            for arm in _unique(r.arm for r in runs):
                chosen = [r for r in runs if r.arm == arm and name in (ALL, r.prompt_class) and temperature in (None, r.temperature)]
                if chosen:
                    result.append(_cell(name, temperature, chosen, [pairs[r.prompt, r.temperature, r.repeat] for r in chosen]))
    return result


def _cell(name: str, temperature: float | None, runs: Sequence[Run], offs: Sequence[Run]) -> Cell:
    whole = [(run, run.tokens_per_s / off.tokens_per_s) for run, off in zip(runs, offs, strict=True)]
    after = [(run, run.decoding / off.decoding) for run, off in zip(runs, offs, strict=True) if run.decoding and off.decoding]
    rates = sorted(r.tokens_per_s for r in runs)
    rounds = sum(r.metrics["rounds"] for r in runs)
    emitted = sum(r.metrics["rounds"] * (r.metrics["acceptance_length"] or 0) for r in runs)
    return Cell(
        arm=runs[0].arm, drafter=runs[0].drafter, depth=runs[0].depth, prompt_class=name, temperature=temperature,
        tokens_per_s=Spread(median(rates), percentile(rates, 0.1), percentile(rates, 0.9)),
        speedup=_over_prompts(whole), decoding=_over_prompts(after) if after else None,
        acceptance_length=emitted / rounds if rounds else 0.0,
        ttft_s=_median_of(runs, "ttft_s"), tpot_s=_median_of(runs, "tpot_s"),
        identical=all(run.token_ids == off.token_ids for run, off in zip(runs, offs, strict=True)),
        tokens=sum(len(off.token_ids) for off in offs))


def _over_prompts(ratios: Sequence[tuple[Run, float]]) -> Middle:
    repeats: dict[tuple[int, float], list[float]] = {}
    for run, ratio in ratios:
        repeats.setdefault((run.prompt, run.temperature), []).append(ratio)
    by_prompt: dict[int, list[float]] = {}
    for (prompt, _), values in repeats.items():
        by_prompt.setdefault(prompt, []).append(median(values))
    return middle([median(values) for values in by_prompt.values()])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at `share` of the way through sorted values, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def middle(values: Iterable[float]) -> Middle:
    ordered = sorted(values)
    outside = _outside(len(ordered))
    low, high = (ordered[outside - 1], ordered[-outside]) if outside else (None, None)
    return Middle(median(ordered), low, high, ordered[0], ordered[-1])


@lru_cache(maxsize=1024)
def _outside(n: int) -> int:
    """The largest k for which the true median lies between the k-th least and the k-th largest of n values in 95 % of cases; 0 if none
    does. Below the k-th least it lies only if fewer than k fall below it: P(Bin(n, ½) < k)."""
    k, ways, fewer = 0, 1, 0                    # C(n, k), and its sum over all fewer
    while 40 * (fewer + ways) <= 1 << n:
        fewer += ways
        ways = ways * (n - k) // (k + 1)
        k += 1
    return k


def _median_of(runs: Iterable[Run], key: str) -> float:
    values = [float(r.metrics[key]) for r in runs if r.metrics.get(key) is not None]
    return median(values) if values else 0.0


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
