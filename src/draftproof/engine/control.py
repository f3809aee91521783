"""How far to guess this round. Only past rounds decide, never the values of the tokens about to be offered: a depth that
looked at them would bias the rules `ratio` and `block`.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..core.budget import best_batch, monotone, survival
from ..core.tree import depths as levels
from ..trace.events import Times
from ..types import Draft, Verdict
from .sequence import Sequence


class Control(Protocol):
    """Chooses depths; what the request, the context and the drafter forbid is cut off afterwards."""

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> list[tuple[int, str]]:
        """A depth and its reason in words per sequence; rooms[i] is the deepest draft that sequence i may have."""
        ...

    def learn(self, batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], verdicts: abc.Sequence[Verdict], times: Times) -> None:
        """What a round showed and took."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence is gone."""
        ...


class FixedDepth:
    """Always the same depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> list[tuple[int, str]]:
        return [(self.depth, "fixed")] * len(batch)

    def learn(self, batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], verdicts: abc.Sequence[Verdict], times: Times) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass


class Hazards:
    """P(token k accepted | the walk reached it) for every depth k, as decayed counts under a Beta prior.

    An unseen depth is believed to be like the one before it.
    """

    FIRST, WEIGHT = 0.6, 2.0

    def __init__(self, depth: int, decay: float) -> None:
        self._passed, self._reached, self._decay = [0.0] * depth, [0.0] * depth, decay

    def learn(self, accepted: int, refused: bool) -> None:
        for k in range(min(accepted + refused, len(self._reached))):
            self._reached[k] = self._reached[k] * self._decay + 1
            self._passed[k] = self._passed[k] * self._decay + (k < accepted)

    def means(self, prior: abc.Sequence[float] | None = None, weight: float = WEIGHT) -> list[float]:
        """Posterior means; `prior` [depth] stands in for the depth before."""
        before, out = self.FIRST, []
        for k, (passed, reached) in enumerate(zip(self._passed, self._reached, strict=True)):
            before = (passed + weight * (before if prior is None else prior[k])) / (reached + weight)
            out.append(before)
        return out


class Costs:
    """Seconds as a function of a count (rows, tokens), learnt while running: a moving average where it was measured, and a
    line through all measurements elsewhere. `slope` is the believed rise per unit, relative to the value at the first unit.
    """

    RATE, FADE, CLIP = 0.25, 0.98, 2.0

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._seen: dict[int, tuple[float, float]] = {}      # count → average, weight

    def learn(self, count: int, seconds: float) -> None:
        for at, (value, weight) in self._seen.items():
            self._seen[at] = value, weight * self.FADE
        old, weight = self._seen.get(count, (seconds, 0.0))
        seconds = min(seconds, self.CLIP * old)              # a pause of the machine is not a cost
        self._seen[count] = old + max(self.RATE, 1 / (weight + 1)) * (seconds - old), weight + 1

    def age(self, count: int) -> float:
        """How much is known about this very count: 0 nothing, 1 one recent measurement."""
        return self._seen.get(count, (0.0, 0.0))[1]

    def curve(self, counts: Iterator[int] | range) -> list[float]:
        """Estimates, non-decreasing. At least one measurement is needed."""
        total = sum(w for _, w in self._seen.values())
        centre = sum(x * w for x, (_, w) in self._seen.items()) / total
        level = sum(y * w for y, w in self._seen.values()) / total
        spread = sum(w * (x - centre) ** 2 for x, (_, w) in self._seen.items())
        rise = sum(w * (x - centre) * (y - level) for x, (y, w) in self._seen.items())
        believed = level * self._slope / (1 + self._slope * max(0.0, centre - 1))
        slope = max(0.0, (rise + believed) / (spread + 1))
        out = []
        for x in counts:
            line = max(level + slope * (x - centre), 0.1 * level)
            value, weight = self._seen.get(x, (0.0, 0.0))
            out.append((value * weight + line * 0.5) / (weight + 0.5))
        return monotone(out)


SHORTEST, LONGEST = 16, 64
"""Rounds at depth 0 before a probe, at first and at most."""


@dataclass(slots=True)
class _Belief:
    hazards: Hazards
    depth: int | None = None          # last decision
    idle: int = 0                     # rounds since it last had a draft
    patience: int = SHORTEST          # rounds to stay at depth 0 before a probe


@dataclass(slots=True)
class AutoDepth:
    """The depth with the most expected tokens per second, from hazards and costs measured so far; one object per drafter.

    A sequence's own hazards are shrunk towards the drafter's. A better depth must win by `margin`. A sequence at depth 0 is
    probed now and then: more seldom after each probe that failed, at once again after one that was right. A plain pass is
    timed again when its last timing is old.
    """

    max_depth: int
    tree: int | None = None
    margin: float = 0.03
    replan: int = 4
    hazards: Hazards = field(init=False)
    draft: Costs = field(init=False)
    score: Costs = field(init=False)
    rounds: int = 0
    _plan: list[tuple[int, str]] = field(default_factory=list)
    _planned: tuple[str, ...] = ()
    _beliefs: dict[str, _Belief] = field(default_factory=dict)

    START = (4, 0, 2, 0, 4)           # depths of the first rounds, which measure the costs
    PROBE = 2
    OLD = 0.02                        # weight of a plain pass's timing below which it is taken again
    OWN_PRIOR = 4.0                   # observations that the drafter's hazards are worth against the sequence's own

    def __post_init__(self) -> None:
        self.hazards = Hazards(self.max_depth, 0.98)
        self.draft, self.score = Costs(0.5), Costs(0.05)

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> list[tuple[int, str]]:
        if self.rounds < len(self.START):
            return [(min(self.START[self.rounds], self.max_depth), "auto: measuring what a round costs")] * len(batch)
        if self.score.age(len(batch)) < self.OLD and self.rounds % self.replan == 0:
            return [(0, "auto: timing a plain pass again")] * len(batch)
        ids = tuple(seq.id for seq in batch)
        if ids != self._planned or self.rounds % self.replan == 0:
            self._plan, self._planned = self._decide(batch, rooms), ids
        return [self._probe(seq, *choice) for seq, choice in zip(batch, self._plan, strict=True)]

    def learn(self, batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], verdicts: abc.Sequence[Verdict], times: Times) -> None:
        self.rounds += 1
        deepest = max((_depth(draft) for draft in drafts), default=0)
        self.score.learn(sum(len(draft) + 1 for draft in drafts), times.score_s + times.verify_s + times.other_s)
        if deepest:
            self.draft.learn(deepest, times.draft_s)
        for seq, draft, verdict in zip(batch, drafts, verdicts, strict=True):
            belief = self._belief(seq)
            belief.idle = 0 if len(draft) else belief.idle + 1
            if len(draft):
                for hazards in (self.hazards, belief.hazards):
                    hazards.learn(len(verdict.accepted), bool(verdict.rejected))
                failed = min(max(2 * belief.patience, SHORTEST), LONGEST)
                belief.patience = SHORTEST if belief.depth else failed if verdict.rejected else 1

    def forget(self, seq: Sequence) -> None:
        self._beliefs.pop(seq.id, None)

    def _belief(self, seq: Sequence) -> _Belief:
        if seq.id not in self._beliefs:
            self._beliefs[seq.id] = _Belief(Hazards(self.max_depth, 0.95))
        return self._beliefs[seq.id]

    def _decide(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> list[tuple[int, str]]:
        common = self.hazards.means()
        beliefs = [self._belief(seq) for seq in batch]
        chances = [survival(b.hazards.means(common, self.OWN_PRIOR)[:room]) for b, room in zip(beliefs, rooms, strict=True)]
        draft = [0.0, *self.draft.curve(range(1, self.max_depth + 1))] if self._has_drafted() else [0.0] * (self.max_depth + 1)
        widest = max(self.max_depth, self.tree or 0)
        score = self.score.curve(range(1, len(batch) * (widest + 1) + 1))
        depths = self._best_tree(chances, draft, score) if self.tree else best_batch(chances, draft, score)[0]
        plain = self._rate([0] * len(batch), chances, draft, score)
        before = [min(b.depth, room) for b, room in zip(beliefs, rooms, strict=True) if b.depth is not None]
        best = self._rate(depths, chances, draft, score)
        if len(before) == len(batch) and best < (1 + self.margin) * self._rate(before, chances, draft, score):
            depths, best = before, self._rate(before, chances, draft, score)
        gain = best / plain
        for belief, depth in zip(beliefs, depths, strict=True):
            belief.depth = depth
        return [(depth, _why(depth, chance, gain)) for depth, chance in zip(depths, chances, strict=True)]

    def _best_tree(self, chances: list[list[float]], draft: list[float], score: list[float]) -> list[int]:
        """A common depth: the nodes of a tree are paid for whatever its depth."""
        options = [[min(depth, len(c)) for c in chances] for depth in range(self.max_depth + 1)]
        return max(options, key=lambda depths: self._rate(depths, chances, draft, score))

    def _rate(self, depths: abc.Sequence[int], chances: list[list[float]], draft: list[float], score: list[float]) -> float:
        """Expected tokens per second of a round with these depths."""
        tokens = sum(1 + sum(chance[:depth]) for depth, chance in zip(depths, chances, strict=True))
        rows = sum(1 + (max(depth, self.tree or 0) if depth else 0) for depth in depths)
        return tokens / (draft[max(depths)] + score[rows - 1])

    def _has_drafted(self) -> bool:
        return any(self.draft.age(depth) for depth in range(1, self.max_depth + 1))

    def _probe(self, seq: Sequence, depth: int, reason: str) -> tuple[int, str]:
        belief = self._belief(seq)
        if depth or belief.idle < belief.patience:
            return depth, reason
        return min(self.PROBE, self.max_depth), f"auto: a probe after {belief.idle} plain rounds"


def _why(depth: int, chances: list[float], gain: float) -> str:
    if depth:
        return f"auto: {1 + sum(chances[:depth]):.2f} tokens expected, {gain:.2f}× the plain rate"
    return "auto: no draft is expected to pay for its time"



def _depth(draft: Draft) -> int:
    return len(draft) if draft.is_chain else max(levels(draft.parents))
