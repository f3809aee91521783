"""What an audition counted, per class of prompts: mergeable, JSON both ways, with the spread over requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..core.tally import Tally, ratio

ALL = "all"
Figure = Literal["exact", "retokenised", "greedy", "mixed"]


@dataclass(slots=True)
class Ratio:
    """Tokens per round over requests: n requests, e tokens emitted by rounds, r rounds (which may be expected ones), Σ e², Σ e·r, Σ r²."""

    n: int = 0
    e: int = 0
    r: float = 0
    ee: int = 0
    er: float = 0
    rr: float = 0

    def add(self, emitted: int, rounds: float) -> None:
        self.n, self.e, self.r = self.n + 1, self.e + emitted, self.r + rounds
        self.ee, self.er, self.rr = self.ee + emitted * emitted, self.er + emitted * rounds, self.rr + rounds * rounds

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.n + other.n, self.e + other.e, self.r + other.r, self.ee + other.ee, self.er + other.er, self.rr + other.rr)

    @property
    def value(self) -> float | None:
        return self.e / self.r if self.r else None

    def interval(self) -> tuple[float, float] | None:
        """95 % over requests, by the delta method for a ratio of sums; None for fewer than two requests."""
        value = self.value
        if self.n < 2 or value is None:
            return None
        squares = max(0.0, self.ee - 2 * value * self.er + value * value * self.rr)
        half = 1.96 * math.sqrt(self.n / (self.n - 1) * squares) / self.r
        return max(1.0, value - half), value + half


@dataclass(slots=True)
class Counts:
    """Counts of some requests. exact: of how many the figures are those of the engine; near: of how many they would be, were the ids the
    engine's too and not made from text; of the others they are those of greedy drafts.

    least, most: of requests whose log bounds the target's law, the ratio with the most and with the fewest rounds that sampled
    drafts can be expected to need (`audition.sampled`). prompt_tokens: of all requests.
    """

    tally: Tally = field(default_factory=Tally)
    exact: int = 0
    near: int = 0
    prompt_tokens: int = 0
    spread: Ratio = field(default_factory=Ratio)
    least: Ratio = field(default_factory=Ratio)
    most: Ratio = field(default_factory=Ratio)

    def add(self, one: Tally, exact: bool, prompt_tokens: int, rounds: tuple[float, float] | None = None,
            retokenised: bool = False) -> None:
        """One request more. exact: but for its ids, if they are `retokenised`. rounds: fewest and most expected with sampled drafts,
        where the log says enough."""
        self.tally = self.tally + one
        self.exact += exact and not retokenised
        self.near += exact and retokenised
        self.prompt_tokens += prompt_tokens
        self.spread.add(one.emitted, one.rounds)
        if rounds is not None:
            self.most.add(one.emitted, rounds[0])
            self.least.add(one.emitted, rounds[1])

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tally + other.tally, self.exact + other.exact, self.near + other.near, self.prompt_tokens + other.prompt_tokens,
                      self.spread + other.spread, self.least + other.least, self.most + other.most)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Counts:
        return cls(Tally.from_dict(record["tally"]), record["exact"], record["near"], record["prompt_tokens"],
                   *(Ratio(**record[name]) for name in ("spread", "least", "most")))

    @property
    def figure(self) -> Figure:
        if self.exact == self.tally.requests:
            return "exact"
        return "retokenised" if self.near == self.tally.requests else "mixed" if self.exact or self.near else "greedy"

    def sampled(self) -> dict[str, Any] | None:
        """What sampled drafts that share the target's noise would reach: bounds that hold whatever the log left out of the target's
        law, and with the spread over requests (95 %); None where no request's log says enough."""
        if self.least.value is None or self.most.value is None:
            return None
        low, high = self.least.interval(), self.most.interval()
        return {"low": self.least.value, "high": self.most.value, "requests": self.least.n,
                "interval": None if low is None or high is None else {"low": low[0], "high": high[1]}}

    def as_cell(self, drafter: str, depth: int | str, prompt_class: str) -> dict[str, Any]:
        """One cell of `audition --json`; ratios of nothing are null."""
        tally, interval = self.tally, self.spread.interval()
        return {
            "drafter": drafter, "depth": depth, "class": prompt_class, "rounds": tally.rounds, "drafted": tally.drafted,
            "accepted": tally.accepted, "acceptance_length": tally.acceptance_length, "hazard": tally.hazard,
            "draft_utilisation": tally.draft_utilisation, "rounds_drafted": tally.rounds_drafted, "requests": tally.requests,
            "tokens": tally.completion_tokens, "prompt_tokens": ratio(self.prompt_tokens, tally.requests),
            "acceptance_length_interval": None if interval is None else {"low": interval[0], "high": interval[1]},
            "figure": self.figure, "exact_requests": self.exact, "sampled": self.sampled(),
        }


def worth(cell: Mapping[str, Any], row_cost: float) -> float | None:
    """Tokens per plain pass's time, if every drafted token costs `row_cost` of one (drafting and scoring it); None without rounds."""
    if not cell["rounds"]:
        return None
    return float(cell["acceptance_length"] / (1 + row_cost * cell["drafted"] / cell["rounds"]))


def best_depths(cells: Iterable[Mapping[str, Any]], row_cost: float) -> list[dict[str, Any]]:
    """Per drafter and class the depth that is worth most at this cost, and what it is worth; below 1 it should be off."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for cell in cells:
        value, key = worth(cell, row_cost), (cell["drafter"], cell["class"])
        if value is not None and (key not in best or value > best[key]["worth"]):
            best[key] = {"drafter": cell["drafter"], "class": cell["class"], "depth": cell["depth"], "worth": value}
    return list(best.values())
