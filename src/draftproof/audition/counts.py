"""What an audition counted, per class of prompts: mergeable, JSON both ways, with the spread over requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..core.tally import Tally, ratio

ALL = "all"
SUMS = ("exact", "prompt_tokens", "ee", "er", "rr")
Figure = Literal["exact", "greedy", "mixed"]


@dataclass(slots=True)
class Counts:
    """Counts of some requests. exact: of how many the figures are those of the engine; of the others they are those of greedy drafts.

    ee, er, rr: Σ emitted², Σ emitted·rounds, Σ rounds² over requests, for the interval of their ratio. prompt_tokens: of all requests.
    """

    tally: Tally = field(default_factory=Tally)
    exact: int = 0
    prompt_tokens: int = 0
    ee: int = 0
    er: int = 0
    rr: int = 0

    def add(self, one: Tally, exact: bool, prompt_tokens: int) -> None:
        """One request more."""
        self.tally = self.tally + one
        self.exact += exact
        self.prompt_tokens += prompt_tokens
        self.ee += one.emitted ** 2
        self.er += one.emitted * one.rounds
        self.rr += one.rounds ** 2

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tally + other.tally, *(getattr(self, name) + getattr(other, name) for name in SUMS))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Counts:
        return cls(Tally.from_dict(record["tally"]), *(int(record[name]) for name in SUMS))

    @property
    def figure(self) -> Figure:
        return "exact" if self.exact == self.tally.requests else "mixed" if self.exact else "greedy"

    def interval(self) -> tuple[float, float] | None:
        """95 % of the acceptance length over requests, by the delta method for a ratio of sums; None for fewer than two requests."""
        tally = self.tally
        n, length = tally.requests, tally.acceptance_length
        if n < 2 or length is None:
            return None
        squares = max(0.0, self.ee - 2 * length * self.er + length * length * self.rr)
        half = 1.96 * math.sqrt(n / (n - 1) * squares) / tally.rounds
        return max(1.0, length - half), length + half

    def as_cell(self, drafter: str, depth: int | str, prompt_class: str) -> dict[str, Any]:
        """One cell of `audition --json`; ratios of nothing are null."""
        tally, interval = self.tally, self.interval()
        return {
            "drafter": drafter, "depth": depth, "class": prompt_class, "rounds": tally.rounds, "drafted": tally.drafted,
            "accepted": tally.accepted, "acceptance_length": tally.acceptance_length, "hazard": tally.hazard,
            "draft_utilisation": tally.draft_utilisation, "rounds_drafted": tally.rounds_drafted, "requests": tally.requests,
            "tokens": tally.completion_tokens, "prompt_tokens": ratio(self.prompt_tokens, tally.requests),
            "acceptance_length_interval": None if interval is None else {"low": interval[0], "high": interval[1]},
            "figure": self.figure, "exact_requests": self.exact,
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
