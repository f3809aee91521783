"""The numbers of every chart, from a trace: counts are `core.tally`'s, times `trace.report`'s, predictions `core.budget`'s.

A trace is reduced to a few numbers a round while it is read, so that a long one fits into memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import mean, median
from types import MappingProxyType
from typing import NamedTuple

from ..core.tally import Tally, ratio
from .events import UNCLASSED, Event, PrefillDone, RequestDone, RequestStarted, RoundDone, TraceStarted
from .report import RequestReport

Z95 = 1.959963984540054
FEWEST_ROUNDS = 2                             # of one depth, for its measured speed to be drawn; of one load, to be a measure
MOST_TOKENS = 0.9                             # of a run, at loads for which plain decoding is known
WANTED = {"tokens_per_s": 1, "ttft_s": -1, "tpot_s": -1, "acceptance_length": 1, "draft_utilisation": 1, "passes_per_token": -1}
"""The metrics that two traces are compared by; 1: more is better."""


class Round(NamedTuple):
    """A round in numbers; times in seconds."""

    number: int
    at_s: float
    depth: int                                # granted
    drafted: int
    accepted: int
    rejected: int
    emitted: int
    draft_s: float
    score_s: float
    verify_s: float
    other_s: float
    levels: int                               # deepest node of the draft: what a chain or a tree of that depth costs to draft
    batch: int                                # texts that were written at a time

    @property
    def parts(self) -> tuple[float, float, float, float]:
        return self.draft_s, self.score_s, self.verify_s, self.other_s

    @property
    def seconds(self) -> float:
        return sum(self.parts)


@dataclass(slots=True)
class Run:
    """One request of a trace."""

    index: int
    header: TraceStarted
    started: RequestStarted
    report: RequestReport
    rounds: list[Round] = field(default_factory=list)
    first_token: int | None = None
    prefill_s: float = 0.0
    whole: bool = False                           # it came to its own end

    @property
    def name(self) -> str:
        parts = (self.started.request, self.report.drafter, self.started.prompt_class)
        return " · ".join(part for part in parts if part)

    @property
    def kind(self) -> str:
        """The drafter, and whether it guessed trees, which cost other rounds than chains."""
        return self.report.drafter + (" · trees" if any(one.drafted > one.levels for one in self.rounds) else "")

    @property
    def guesses(self) -> bool:
        return self.report.tally.drafted > 0

    @property
    def tokens(self) -> int:
        return self.report.clock.tokens

    def since(self, at_s: float) -> float:
        return at_s - self.started.at_s

    def key(self) -> str:
        """Equal for the same request asked twice: prompt, seed, options and first token."""
        one = self.started
        options = {name: value for name, value in one.sampling.items() if name != "prediction"}
        known = [one.prompt_class, one.prompt_tokens, one.seed, one.sample, options, one.prompt_ids, self.first_token]
        return json.dumps(known, default=str)


def runs(events: Iterable[Event]) -> list[Run]:
    """Every request of a trace, in the order in which they started; ids that several engines used are several requests."""
    found: list[Run] = []
    open_: dict[str, Run] = {}
    header = TraceStarted(0, "", "none", "", "")
    for event in events:
        if isinstance(event, TraceStarted):
            header = event
        elif isinstance(event, RequestStarted):
            run = open_[event.request] = Run(len(found), header, event, RequestReport.of(event, header.drafter))
            found.append(run)
        elif isinstance(event, PrefillDone | RoundDone | RequestDone) and event.request in open_:
            run = open_[event.request]
            run.report.add(event)
            if isinstance(event, PrefillDone):
                run.first_token, run.prefill_s = event.token.token, event.seconds
            elif isinstance(event, RequestDone):
                run.whole = event.finish in ("stop", "length")
            else:
                fates, t = [node.fate for node in event.nodes], event.times
                run.rounds.append(Round(event.round, event.at_s, event.depth, len(fates), fates.count("accepted"), fates.count("rejected"),
                                        len(event.tokens), t.draft_s, t.score_s, t.verify_s, t.other_s, _levels(event), event.batch))
    return found


def _levels(record: RoundDone) -> int:
    depths: list[int] = []
    for node in record.nodes:
        depths.append(1 + (depths[node.parent] if node.parent >= 0 else 0))
    return max(depths, default=0)


def without_guesses(all_runs: Sequence[Run], run: Run) -> Run | None:
    """The same request as `run`, answered without guesses; of several the one asked as often before. Both must be whole: what was cut
    short took less time for less text."""
    key = run.key()
    alike = [one for one in all_runs if one.whole and one.key() == key]
    off = [one for one in alike if not one.guesses and one.report.drafter == "none"]
    same = [one for one in alike if one.guesses and (one.report.drafter, one.started.rule) == (run.report.drafter, run.started.rule)]
    return off[min(same.index(run), len(off) - 1)] if off and run in same else None


# Acceptance

class Share(NamedTuple):
    """A proportion with Wilson's 95 % interval."""

    name: str
    part: int
    whole: int

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.part, self.whole)


class Acceptance(NamedTuple):
    """positions: of the rounds that got there; lengths[a]: rounds with a draft of which a guesses stood; groups: of all guesses."""

    positions: list[Share]
    lengths: list[int]
    classes: list[Share]
    drafters: list[Share]
    tally: Tally


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95 % (E. B. Wilson, JASA 1927)."""
    if not whole:
        return 0.0, 1.0
    p, square = part / whole, Z95 * Z95 / whole
    middle = (p + square / 2) / (1 + square)
    half = Z95 * sqrt(p * (1 - p) / whole + square / (4 * whole)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def acceptance(chosen: Sequence[Run]) -> Acceptance:
    tally = sum((run.report.tally for run in chosen), Tally())
    positions = [Share(str(i + 1), passed, reached) for i, (passed, reached) in enumerate(zip(tally.passed, tally.reached, strict=True))]
    counts = [one.accepted for run in chosen for one in run.rounds if one.drafted]
    lengths = [counts.count(length) for length in range(max(counts, default=-1) + 1)]
    return Acceptance(positions, lengths, _groups(chosen, lambda run: run.started.prompt_class or UNCLASSED),
                      _groups(chosen, lambda run: run.kind), tally)


def _groups(chosen: Sequence[Run], name_of: Callable[[Run], str]) -> list[Share]:
    """Guesses that stood, of all guesses, by name; the largest group first."""
    sums: dict[str, Tally] = {}
    for run in chosen:
        if run.guesses:
            sums[name_of(run)] = sums.get(name_of(run), Tally()) + run.report.tally
    shares = [Share(name, tally.accepted, tally.drafted) for name, tally in sums.items()]
    return sorted(shares, key=lambda share: (-share.whole, share.name))


# Does it pay

class Plain(NamedTuple):
    """Seconds of plain decoding per token, and how they are known; `by`: at so many texts at a time, where that was measured."""

    seconds: float
    measured: bool
    how: str
    by: Mapping[int, float] = MappingProxyType({})

    def at(self, rounds: Sequence[Round]) -> float:
        """Seconds a token at the load of these rounds."""
        return sum(one.emitted * self.by.get(one.batch, self.seconds) for one in rounds) / max(1, sum(one.emitted for one in rounds))

    def estimate(self, run: Run) -> Speed | None:
        """How many times as fast a run's rounds were; None without times. What lies between rounds is not counted."""
        timed = any(one.emitted for one in run.rounds) and sum(one.seconds for one in run.rounds) > 0
        return _speed(0, run.rounds, self.at(run.rounds)) if timed else None


class Speed(NamedTuple):
    """Rounds that were granted one depth (0: any): their speed-up over plain decoding, with a 95 % interval over the rounds."""

    depth: int
    gain: float
    rounds: int
    half: float


@dataclass(frozen=True, slots=True)
class Payoff:
    """One drafter against plain decoding, costs in units of its pass: c to draft one level, row to score it, o of a round besides.

    predicted: (depth, speed-up) with the measured acceptance, depth 0 first; best: the depth with the most tokens a second by these
    costs, and its speed-up; break_even: the acceptance at which depth k + 1 loses nothing, None where none is enough.
    """

    drafter: str
    plain: Plain
    hazards: list[float]
    c: float
    row: float
    o: float
    predicted: list[tuple[int, float]]
    measured: list[Speed]
    best: tuple[int, float]
    break_even: list[float | None]


def plain(all_runs: Sequence[Run], chosen: Sequence[Run]) -> Plain | None:
    """What plain decoding of the chosen runs' target takes; `plainOf` of the page is its twin. By whole rounds: of runs without guesses,
    else of the chosen runs' rounds without one, at as many texts at a time; else by their scoring passes, as if these were plain."""
    targets = {run.header.target for run in chosen}
    bare = [run for run in all_runs if not run.guesses and run.report.drafter == "none" and run.header.target in targets]
    off = [one for run in bare for one in run.rounds]
    own = [one for run in chosen for one in run.rounds if not one.drafted]
    for rounds, how in ((off, "passes of runs without guesses"), (own, "passes without a guess")):
        if found := _at_load(rounds, [one for run in chosen for one in run.rounds], how):
            return found
    passes = [one.score_s for run in chosen for one in run.rounds]
    return Plain(mean(passes), False, "estimated: the mean scoring pass") if sum(passes) > 0 else None


def _at_load(plain_rounds: Sequence[Round], chosen: Sequence[Round], how: str) -> Plain | None:
    """A pass over more texts takes longer, so each of the chosen rounds is held against plain ones of as many; None if there are such
    rounds for too few of the chosen tokens."""
    groups: dict[int, list[Round]] = {}
    for one in plain_rounds:
        groups.setdefault(one.batch, []).append(one)
    costs: dict[int, float] = {}
    for batch, group in groups.items():
        seconds, emitted = sum(one.seconds for one in group), sum(one.emitted for one in group)
        if len(group) > FEWEST_ROUNDS and seconds > 0 and emitted:
            costs[batch] = seconds / emitted
    by = {one.batch: costs[one.batch] for one in chosen if one.batch in costs}
    known = [one for one in chosen if one.batch in by]
    tokens = sum(one.emitted for one in known)
    if not tokens or tokens < MOST_TOKENS * sum(one.emitted for one in chosen):
        return None
    mean_cost = sum(one.emitted * by[one.batch] for one in known) / tokens
    return Plain(mean_cost, True, f"measured on {sum(len(groups[batch]) for batch in by)} {how}", by)


def payoffs(all_runs: Sequence[Run], chosen: Sequence[Run]) -> list[Payoff]:
    """Every drafter of the chosen runs, most rounds first. Empty where the trace has no times of rounds, or no guess."""
    groups: dict[str, list[Run]] = {}
    for run in chosen:
        if run.guesses and run.rounds:
            groups.setdefault(run.kind, []).append(run)
    found = [(plain(all_runs, group), name, group) for name, group in groups.items()]
    lines = [_payoff(name, base, group) for base, name, group in found if base is not None]
    return sorted(lines, key=lambda one: -sum(speed.rounds for speed in one.measured))


def _payoff(drafter: str, base: Plain, group: Sequence[Run]) -> Payoff:
    from ..core import budget  # with torch, which nothing else here needs

    hazards = sum((run.report.tally for run in group), Tally()).hazard
    drafted = [one for run in group for one in run.rounds if one.drafted]
    levels, second = sum(one.levels for one in drafted), base.at(drafted)
    bare = [one.score_s for run in group for one in run.rounds if not one.drafted and one.score_s > 0]
    single = mean(bare) if len(bare) > FEWEST_ROUNDS else second
    c = sum(one.draft_s for one in drafted) / levels / second
    row = max(0.0, sum(one.score_s - single for one in drafted) / levels / second)
    o = mean(one.verify_s + one.other_s for one in drafted) / second
    v = [single / second + row * depth for depth in range(len(hazards) + 1)]
    predicted = [(0, 1.0), *((depth, budget.speedup(budget.expected_tokens(hazards[:depth]), depth, c, v[depth], o))
                             for depth in range(1, len(hazards) + 1))]
    depth, rate = budget.best_depth(budget.survival(hazards), [k * c for k in range(len(v))], [1.0, *v[1:]], o)
    need = [budget.break_even(k, c, v[k], o) for k in range(1, len(v))]
    by_depth: dict[int, list[Round]] = {}
    for one in drafted:
        by_depth.setdefault(one.depth, []).append(one)
    measured = [_speed(k, rounds, base.at(rounds)) for k, rounds in sorted(by_depth.items())
                if len(rounds) >= FEWEST_ROUNDS and sum(one.seconds for one in rounds) > 0]
    return Payoff(drafter, base, hazards, c, row, o, predicted, measured, (depth, rate), need)


def _speed(depth: int, rounds: Sequence[Round], second: float) -> Speed:
    """A ratio of sums with its standard error by residuals (Cochran, Sampling Techniques, chapter 6); plain decoding counts as known."""
    seconds, count = sum(one.seconds for one in rounds), len(rounds)
    rate = sum(one.emitted for one in rounds) / seconds
    squares = sum((one.emitted - rate * one.seconds) ** 2 for one in rounds)
    half = Z95 * second * sqrt(count / (count - 1) * squares) / seconds if count > 1 else inf
    return Speed(depth, second * rate, count, half)


# Two traces

class Change(NamedTuple):
    """One metric of two traces. ratio is b / a; better: 1, −1, or 0 where they are equal."""

    metric: str
    a: float
    b: float
    ratio: float
    better: int


def summary(chosen: Sequence[Run]) -> dict[str, float | None]:
    """The metrics that two traces are compared by: of counts over all requests, of times medians over requests."""
    tally = sum((run.report.tally for run in chosen), Tally())
    told = [run.report.metrics() for run in chosen]

    def middle(name: str) -> float | None:
        values = [one[name] for one in told if one.get(name) is not None]
        return median(values) if values else None

    tokens = tally.completion_tokens
    return {**{name: middle(name) for name in ("tokens_per_s", "ttft_s", "tpot_s")}, "acceptance_length": tally.acceptance_length,
            "draft_utilisation": tally.draft_utilisation, "passes_per_token": ratio(tally.target_passes, tokens if tally.rounds else 0)}


def changes(a: Sequence[Run], b: Sequence[Run]) -> list[Change]:
    """What both traces know, metric by metric."""
    found = []
    ours, theirs = summary(a), summary(b)
    for name, wanted in WANTED.items():
        one, two = ours[name], theirs[name]
        if one and two:
            sign = (two > one) - (two < one)
            found.append(Change(name, one, two, two / one, wanted * sign))
    return found
