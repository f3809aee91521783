"""A roll-out: shares that rise by stages, and the rules that turn it back.

A rule compares bounds that hold for every distribution (`bench.quantiles`): a time's median or 90th percentile is too large if the
candidate's lower bound is above the limit times control's upper bound. The chance of turning a harmless candidate back is `alpha`
over the whole roll-out, for independent requests: it is divided evenly among the stages and what follows the last of them; half of
a stage's goes to all requests together and half to the classes; a cell is looked at when the candidate has 8, 16, 32, … requests
there, and its m-th look has 1/(m·(m + 1)) of its part, divided among the rules and both ends of a comparison. Looks are counted on
where a stage begins anew, so that no part is spent twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..bench.quantiles import bounds, rate_bounds
from ..bench.statistics import mcnemar
from ..config import AbConfig
from .ab import ALL, CANDIDATE, CONTROL, TIMES, Book, Cell, Outcome

FIRST_LOOK = 8
TEXTS = "(texts)"             # whose looks are at replays; no class has such a name
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9}
RULES = len(TIMES) * len(QUANTILES) + 2                       # and failures, and identity

State = Literal["open", "comparing", "shadow", "running", "holding", "returned", "ended"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Where it stands. open: no experiment · comparing, shadow: a fixed share, no rules · running: a stage · holding: the last one,
    passed · returned: a rule turned it back, everything is control's · ended: the operator ended it, nobody takes part any more."""

    shares: tuple[float, ...]
    state: State
    at: int = 0
    reason: str = ""
    since_s: float = 0.0

    @classmethod
    def of(cls, config: AbConfig | None, now_s: float) -> Rollout:
        if config is None:
            return cls((), "open", since_s=now_s)
        if config.stages:
            return cls(config.stages, "running", since_s=now_s)
        if not isinstance(config.share, float | int):
            return cls((), "shadow", since_s=now_s)
        return cls((float(config.share),), "comparing", since_s=now_s)

    @property
    def share(self) -> float:
        """Of requests that the candidate writes."""
        return self.shares[self.at] if self.state in ("comparing", "running", "holding") else 0.0

    @property
    def staged(self) -> bool:
        return self.state in ("running", "holding")

    @property
    def live(self) -> bool:
        """Whether requests take part."""
        return self.state not in ("open", "ended")


def advance(rollout: Rollout, now_s: float, enough: bool, breach: str | None, wait_s: float) -> Rollout:
    """The next state. Only a roll-out by stages moves: back if a rule was broken, on if a stage has lasted and has enough requests."""
    if not rollout.staged:
        return rollout
    if breach is not None:
        return replace(rollout, state="returned", reason=f"at {rollout.share:.3g}: {breach}", since_s=now_s)
    if rollout.state == "holding" or not enough or now_s - rollout.since_s < wait_s:
        return rollout
    if rollout.at + 1 == len(rollout.shares):
        return replace(rollout, state="holding", reason="every stage was passed", since_s=now_s)
    return replace(rollout, at=rollout.at + 1, reason=f"{rollout.share:.3g} was passed", since_s=now_s)


class Window:
    """The requests of one stage. `add` and `identity` say what is wrong, or None. looks: those that were had in this stage before it
    began anew, by cell, which are counted on."""

    def __init__(self, limits: AbConfig, classes: int, looks: Counter[str] | None = None) -> None:
        self.book, self._limits = Book(), limits
        part = limits.alpha / (len(limits.stages) + 1) / 2                  # once the last is passed, its share is held
        self._alpha = {True: part, False: part / max(1, classes)}           # of all, of one class
        self.looks = Counter[str]() if looks is None else looks
        self._differing = 0

    def _spend(self, cell: str, of_all: bool) -> float:
        """What the next look at a cell may err with."""
        self.looks[cell] += 1
        return self._alpha[of_all] / (self.looks[cell] * (self.looks[cell] + 1))

    def add(self, arm: str, prompt_class: str, outcome: Outcome) -> str | None:
        self.book.add(arm, prompt_class, outcome)
        if arm != CANDIDATE:
            return None
        for name in (ALL, prompt_class):
            candidate = self.book.cell(CANDIDATE, name)
            if is_look(candidate.requests):
                found = breach(candidate, self.book.cell(CONTROL, name), self._limits, self._spend(name, name == ALL))
                if found is not None:
                    return found if name == ALL else f"class {name}: {found}"
        return None

    def identity(self, gained: int, lost: int, exact: bool) -> str | None:
        """Texts that differ only when the candidate writes them again, and those that differ only when control does. exact: the
        target's load has shown that its texts do not depend on speculation, so that one is one too many."""
        if exact and gained:
            return f"{gained} texts were written differently by the candidate, and not by control"
        if exact or not is_look(gained + lost) or gained + lost == self._differing:
            return None
        self._differing = gained + lost
        alpha = self._spend(TEXTS, True) / RULES
        if gained > lost and mcnemar(gained, lost) <= alpha:
            return f"{gained} texts were written differently by the candidate alone, {lost} by control alone"
        return None

    @property
    def enough(self) -> bool:
        return all(self.book.cell(arm).requests >= self._limits.minimum for arm in (CANDIDATE, CONTROL))


def is_look(count: int) -> bool:
    """At FIRST_LOOK · 2ᵏ."""
    doubled, rest = divmod(count, FIRST_LOOK)
    return doubled > 0 and not rest and doubled & (doubled - 1) == 0


def breach(candidate: Cell, control: Cell, limits: AbConfig, alpha: float) -> str | None:
    """The first rule that is broken, in words. Errs with probability at most alpha where none is."""
    end = alpha / RULES / 2
    low, high = rate_bounds(candidate.failed, candidate.requests, end)[0], rate_bounds(control.failed, control.requests, end)[1]
    if low > high + limits.errors:
        return (f"{candidate.failed} of {candidate.requests} requests failed, {control.failed} of control's {control.requests}; "
                f"{limits.errors:.3g} more are allowed")
    for name in TIMES:
        mine, others = sorted(candidate.times[name].values), sorted(control.times[name].values)
        for label, share in QUANTILES.items():
            low, high = bounds(mine, share, end)[0], bounds(others, share, end)[1]
            if low > limits.ratio * high:
                return (f"{name.removesuffix('_s')} {label} is at least {low / high if high else math.inf:.2f} × control's "
                        f"({len(mine)} and {len(others)} requests); {limits.ratio:.3g} × is allowed")
    return None
