"""Two ways to speculate, compared on a server's own traffic: who writes which request, and what each arm's requests were like.

Nothing here has a clock or a thread. Times are seconds that others measured.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import AbConfig, AbSide
from ..core.tally import Tally
from ..drafters import parse_spec
from ..errors import OptionError
from ..types import RULES, Rule

CANDIDATE, CONTROL, SERVED = "candidate", "control", "served"
ALL = "all"                 # every class together
TIMES = ("ttft_s", "tpot_s", "e2e_s")
SAMPLE = 1024               # values that are kept of each time, of each arm and class


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to speculate. drafter: a spec, `none` for off, None for whatever the server does."""

    name: str
    drafter: str | None = None
    depth: int | str | None = None
    rule: Rule | None = None

    @property
    def guesses(self) -> bool:
        return self.drafter not in (None, "none")

    @property
    def wish(self) -> Mapping[str, Any] | None:
        """As `speculation` of a request."""
        given = {"drafter": self.drafter, "depth": self.depth, "rule": self.rule}
        return {name: value for name, value in given.items() if value is not None} or None

    @property
    def text(self) -> str:
        """As it is written in `--ab`."""
        spec = "the server's own" if self.drafter is None else "off" if self.drafter == "none" else self.drafter
        return " ".join([spec, *(f"{name}={value}" for name, value in (("depth", self.depth), ("rule", self.rule)) if value is not None)])


def arms_of(config: AbConfig) -> tuple[Arm, Arm]:
    """(candidate, control). Raises OptionError or SpecError."""
    candidate, control = config.sides
    return _arm(CANDIDATE, candidate), _arm(CONTROL, control)


def _arm(name: str, side: AbSide) -> Arm:
    parse_spec(side.drafter)
    depth, rule = side.options.get("depth"), side.options.get("rule")
    if depth not in (None, "auto") and not re.fullmatch(r"[0-9]{1,3}", str(depth)):
        raise OptionError(f"ab arms: depth={depth}; expected auto or an integer ≥ 0")
    if rule is not None and rule not in RULES:
        raise OptionError(f"ab arms: rule={rule}; expected one of {', '.join(RULES)}")
    return Arm(name, side.drafter, int(depth) if depth not in (None, "auto") else depth, next((r for r in RULES if r == rule), None))


def place(experiment: str, *key: object) -> float:
    """Where a key lies in [0, 1): a stable hash, so that whoever is below a share stays below every larger one."""
    digest = hashlib.sha256(json.dumps([experiment, *key], separators=(",", ":")).encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53        # what a float holds exactly, so never 1


class Reservoir:
    """A uniform sample of at most `size` of the values seen (Vitter 1985, algorithm R)."""

    __slots__ = ("values", "seen", "_size", "_rng")

    def __init__(self, size: int = SAMPLE, seed: int = 0) -> None:
        self.values: list[float] = []
        self.seen, self._size, self._rng = 0, size, random.Random(seed)

    def add(self, value: float) -> None:
        self.seen += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (spot := self._rng.randrange(self.seen)) < self._size:
            self.values[spot] = value

    def copy(self) -> Reservoir:
        """For reading."""
        twin = Reservoir(self._size)
        twin.values, twin.seen = self.values[:], self.seen
        return twin


@dataclass(frozen=True, slots=True)
class Flight:
    """Texts of one request that are on their way together. before: text-seconds of every arm when they began."""

    arm: str
    texts: int
    began: float
    before: Mapping[str, float]


class Flights:
    """Texts that are on their way, by arm, and how long they have been, added up: text-seconds."""

    def __init__(self) -> None:
        self._texts: Counter[str] = Counter()
        self._spent: dict[str, float] = {}
        self._at = 0.0

    def begin(self, arm: str, texts: int, now: float) -> Flight:
        self._spend(now)
        self._texts[arm] += texts
        return Flight(arm, texts, now, dict(self._spent))

    def end(self, flight: Flight, now: float) -> tuple[float, float] | None:
        """`beside` of an `Outcome`; None of a request that took no time."""
        self._spend(now)
        self._texts[flight.arm] -= flight.texts
        span = now - flight.began
        if not span > 0:
            return None
        means = {arm: (spent - flight.before.get(arm, 0.0)) / span for arm, spent in self._spent.items()}
        return max(0.0, round(means.pop(flight.arm) - flight.texts, 6)), sum(means.values())      # what rounding leaves is nobody

    def _spend(self, now: float) -> None:
        for arm, texts in self._texts.items():
            self._spent[arm] = self._spent.get(arm, 0.0) + texts * (now - self._at)
        self._at = now


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request that ended. failed: for whatever reason but that its client left. beside: other texts of its arm, and texts of the
    other arm, that were on their way while it ran, on average over that time."""

    failed: bool = False
    ttft_s: float | None = None           # time in the queue included
    tpot_s: float | None = None
    e2e_s: float | None = None
    tally: Tally = field(default_factory=Tally)
    draft_bytes: int = 0
    kv_tokens_lost: int = 0
    beside: tuple[float, float] | None = None

    @property
    def mixed(self) -> bool:
        """Whether it shared the engine with the other arm."""
        return self.beside is not None and self.beside[1] > 0

    @property
    def first_guess(self) -> float | None:
        """Share of its rounds whose first guess stood. It does not depend on how deep the drafts were."""
        return self.tally.hazard[0] if self.tally.reached else None


@dataclass(slots=True)
class Cell:
    """One arm in one class of prompts. Times, and what was beside them, are of requests that did not fail."""

    requests: int = 0
    failed: int = 0
    mixed: int = 0
    times: dict[str, Reservoir] = field(default_factory=lambda: {name: Reservoir() for name in TIMES})
    beside: tuple[float, float] = (0.0, 0.0)                 # sums over so many requests
    timed: int = 0
    tally: Tally = field(default_factory=Tally)
    draft_bytes: int = 0
    kv_tokens_lost: int = 0

    def add(self, outcome: Outcome) -> None:
        self.requests += 1
        self.mixed += outcome.mixed
        if outcome.failed:
            self.failed += 1
            return
        for name, sample in self.times.items():
            value = getattr(outcome, name)
            if value is not None:
                sample.add(value)
        if outcome.beside is not None:
            self.timed += 1
            self.beside = self.beside[0] + outcome.beside[0], self.beside[1] + outcome.beside[1]
        if outcome.tally.requests:
            self.tally = self.tally + outcome.tally
        self.draft_bytes, self.kv_tokens_lost = outcome.draft_bytes, outcome.kv_tokens_lost


class Book:
    """Cells by (arm, class), and by (arm, ALL)."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}

    def cell(self, arm: str, prompt_class: str = ALL) -> Cell:
        return self.cells.setdefault((arm, prompt_class), Cell())

    def add(self, arm: str, prompt_class: str, outcome: Outcome) -> None:
        for name in (prompt_class, ALL):
            self.cell(arm, name).add(outcome)

    @property
    def classes(self) -> list[str]:
        """All of them first, then each, by name."""
        return [ALL, *sorted({name for _, name in self.cells} - {ALL})] if self.cells else []
