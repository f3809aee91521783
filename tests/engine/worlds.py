"""Worlds in which a controller plays: known costs, known chances, no clock. What it loses can be computed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul
from types import SimpleNamespace
from typing import Any

from draftproof import Budget, Draft, Verdict
from draftproof.core.budget import distinct_experts
from draftproof.drafters.grow import affordable
from draftproof.engine.control import AutoDepth
from draftproof.engine.costs import LINGER, PassCosts
from draftproof.engine.plans import Control
from draftproof.trace.events import Times

Chance = Callable[[str, str, int], Sequence[float]]
"""Of a drafter, a class of prompts and a round: P(token k stands | those before it did) for k = 1, 2, …"""


@dataclass(frozen=True)
class Arm:
    """What a drafter costs: seconds of a call, of a level, of a drafted token, and of a token of the text that it has not read."""

    call: float = 0.0
    level: float = 0.1
    token: float = 0.005
    lag: float = 0.002
    has: float = 1.0                     # how often it has a guess at all


CHAINS = [Draft.chain([0] * n) for n in range(33)]
SURE, UNSURE = 0.9, 0.35                 # of the worthiest guess after every node, in rounds of two kinds


@cache
def grown(depth: int, nodes: int, chance: float) -> list[tuple[float, int]]:
    """P(node stands), falling, and the level of the worthiest nodes of a tree that has two guesses after every node: one of `chance`,
    one of a third of the rest."""
    level, found = [1.0], list[tuple[float, int]]()
    for at in range(depth):
        level = sorted((up * each for up in level for each in (chance, (1 - chance) / 3)), reverse=True)[:nodes]
        found += [(each, -at) for each in level]
    return [(each, -at) for each, at in sorted(found, reverse=True)[:nodes]]


@cache
def kept(depth: int, nodes: int, chance: float, drafted: int) -> list[float]:
    """P(a node of the level stands), level by level, of the `drafted` worthiest nodes of such a tree."""
    return [sum(each for each, at in grown(depth, nodes, chance)[:drafted] if at == k) for k in range(depth)]


def flat(first: float, *more: float) -> Chance:
    """The same in all classes and rounds; the last chance goes on for ever."""
    chances = (first, *more)
    return lambda arm, kind, at: chances


def pass_seconds(batch: int, rows: int, keys: int, knee: float = math.inf, experts: tuple[int, int, float] | None = None) -> float:
    """A plain pass of one short text is 1; rows are paid for in full above the knee. experts: of a mixture, how many there are and how
    many a row chooses, which are half of that pass; and the power of the rows that choose independently, below 1 where they agree."""
    fixed = 0.8 if experts is None else 0.3 + 0.5 * distinct_experts(*experts[:2], rows ** experts[2]) / experts[1]
    return fixed + 0.05 * batch + 0.015 * rows + 1e-4 * keys + 2e-5 * rows * keys / batch + 0.15 * max(0.0, rows - knee)


@dataclass
class World:
    """Rounds of `batch` texts that are replaced when they are over, their classes in turn."""

    batch: int = 1
    chance: Chance = flat(0.6)
    arms: dict[str, Arm] = field(default_factory=lambda: {"": Arm()})
    classes: tuple[str, ...] = ("a",)
    knee: float = math.inf
    experts: tuple[int, int, float] | None = None        # see `pass_seconds`
    length: int = 96                     # tokens of an answer
    prompt: int = 100
    linger: float = 0.0                  # of a plain pass, by so much the first ones after one with guesses take longer
    noise: float = 0.0                   # of a measured time, as the standard deviation of its logarithm
    depth: int = 12
    tree: int | None = None              # trees as `grown`, sure in a third of the rounds; `chance` is not looked at
    even: bool = False                   # chains of such rounds: all their tokens are sure, or none
    seed: int = 4

    def __post_init__(self) -> None:
        self.dice, self.made, self.rounds = random.Random(self.seed), 0, 0
        self.seconds, self.tokens, self.asked, self.probes = 0.0, 0.0, 0, 0
        self.passes = PassCosts(experts=None if self.experts is None else self.experts[:2])
        self.weather, self.plain = 1.0, LINGER
        self.live: list[Any] = [self._fresh() for _ in range(self.batch)]
        for i, seq in enumerate(self.live):                      # they do not all end at once
            seq.tokens += [0] * (i * self.length // self.batch)

    def _fresh(self) -> Any:
        self.made += 1
        return SimpleNamespace(id=f"r{self.made}", prompt=(0,) * self.prompt, tokens=[0] * self.prompt,
                               prompt_class=self.classes[self.made % len(self.classes)],
                               sampling=SimpleNamespace(greedy=True), state=None, limit=self.prompt + self.length, read={}, depth=None)

    def play(self, control: Control, rounds: int) -> list[list[int]]:
        """Depths of every sequence, round by round."""
        found = []
        for _ in range(rounds):
            rooms = [max(0, s.limit - len(s.tokens) - 1) for s in self.live]
            chosen = control.depths(self.live, rooms, self.live)
            assert all(c.reason for c in chosen) and len(chosen) == len(self.live)
            self._round(control, [(min(c.depth, room), c) for c, room in zip(chosen, rooms, strict=True)])
            found.append([min(c.depth, room) for c, room in zip(chosen, rooms, strict=True)])
        return found

    def _round(self, control: Control, plan: Sequence[tuple[int, Any]]) -> None:
        budgets, drafts, verdicts, levels, tokens, lag = [], [], [], dict[str, int](), dict[str, int](), dict[str, int]()
        keys = sum(len(s.tokens) for s in self.live)
        for seq, (depth, choice) in zip(self.live, plan, strict=True):
            arm = choice.drafter or next(iter(self.arms))
            drafted = accepted = 0
            nodes, prices = max(depth, self.tree or 0) if depth else 0, getattr(choice, "prices", ())
            if depth and self.tree:
                self.asked += 1
                tree = depth, nodes, SURE if self.dice.random() < 1 / 3 else UNSURE
                drafted, luck = affordable([each for each, _ in grown(*tree)], prices), self.dice.random()
                reached = kept(*tree, drafted)
                self.tokens += sum(reached)
                accepted = sum(luck < each for each in reached)
                levels[arm], tokens[arm], lag[arm] = max(levels.get(arm, 0), depth), tokens.get(arm, 0) + drafted, 0
            elif depth and self.even:
                self.asked += 1
                stand = [*accumulate([SURE if self.dice.random() < 1 / 3 else UNSURE] * depth, mul)]
                drafted, luck = affordable(stand, prices, 0), self.dice.random()
                self.tokens += sum(stand[:drafted])
                accepted = sum(luck < each for each in stand[:drafted])
                levels[arm], tokens[arm], lag[arm] = max(levels.get(arm, 0), drafted), tokens.get(arm, 0) + drafted, 0
            elif depth:
                self.asked += 1
                self.probes += "probe" in choice.reason
                seq.state = seq
                lag[arm] = lag.get(arm, 0) + len(seq.tokens) - seq.read.get(arm, 0)
                seq.read[arm] = len(seq.tokens)
                chances = self.chance(arm, seq.prompt_class, self.rounds)
                self.tokens += self.arms[arm].has * sum(accumulate((chances[min(k, len(chances) - 1)] for k in range(depth)), mul))
                drafted = depth if self.dice.random() < self.arms[arm].has else 0
                while accepted < drafted and self.dice.random() < chances[min(accepted, len(chances) - 1)]:
                    accepted += 1
                levels[arm], tokens[arm] = max(levels.get(arm, 0), drafted), tokens.get(arm, 0) + drafted
            budgets.append(Budget(depth, nodes, arm, choice.reason, prices[:nodes]))
            drafts.append(CHAINS[drafted])
            verdicts.append(Verdict(tuple(range(accepted)), 0, "bonus", (accepted,) if accepted < drafted else ()))
        draft_s = sum(self.arms[a].call + self.arms[a].level * levels[a] + self.arms[a].token * tokens[a] + self.arms[a].lag * lag[a]
                      for a in levels)
        self.tokens += self.batch                    # expected tokens: their luck is no merit of the controller
        rows = self.batch + sum(map(len, drafts))
        self.plain = self.plain + 1 if rows == self.batch else 0
        score_s = pass_seconds(self.batch, rows, keys, self.knee, self.experts) * (1 + self.linger * (0 < self.plain <= LINGER))
        self.seconds += draft_s + score_s
        self.rounds += 1
        self.weather *= math.exp(self.dice.gauss(0, self.noise / 5))          # drifts, and comes back
        self.weather **= 0.99
        seen = [max(1e-6, s) * self.weather * math.exp(self.dice.gauss(0, self.noise)) for s in (draft_s, score_s)]
        for seq, verdict in zip(self.live, verdicts, strict=True):
            seq.tokens += [0] * (len(verdict.accepted) + 1)
        control.learn(self.live, budgets, drafts, verdicts, Times(seen[0], seen[1], 0.0, 0.0))
        self.passes.follow(self.batch, rows, keys, seen[1])
        for i, seq in enumerate(self.live):
            if len(seq.tokens) >= seq.limit:
                control.forget(seq)
                self.live[i] = self._fresh()

    def auto(self, profiled: bool = True, **options: Any) -> AutoDepth:
        """A controller for this world, which has timed some passes if `profiled`."""
        parts = [name for name in self.arms if len(self.arms) > 1 and "+" not in name]
        if profiled:
            shapes = [(rows, batch, 32) for batch in sorted({1, min(4, self.batch), self.batch}) for rows in (1, 1.5, 2, 3, 5, 9, 17)]
            for each, batch, keys in 2 * [*shapes, (1, 1, 256), (9, 1, 256)]:
                rows = int(each * batch)
                self.passes.learn(batch, rows, keys * batch, pass_seconds(batch, rows, keys * batch, self.knee, self.experts))
        return AutoDepth(self.depth, self.tree, parts=parts, passes=self.passes, **options)

    # What is compared with.

    def rate(self, control: Control, rounds: int) -> float:
        """Tokens per second of the next rounds."""
        seconds, tokens = self.seconds, self.tokens
        self.play(control, rounds)
        return (self.tokens - tokens) / (self.seconds - seconds)


@dataclass
class Always:
    """A controller that cannot learn: every sequence gets this depth, from this drafter."""

    depth: int
    drafter: str | None = None

    def depths(self, batch: Sequence[Any], rooms: Sequence[int], whole: Sequence[Any]) -> list[Any]:
        return [SimpleNamespace(depth=self.depth, drafter=self.drafter, reason="always")] * len(batch)

    def learn(self, *_: Any) -> None: ...

    def forget(self, seq: Any) -> None: ...


def best_fixed(rounds: int, drafters: Sequence[str | None] = (None,), depths: Sequence[int] = (0, 1, 2, 3, 4, 6, 8, 12),
               **world: Any) -> tuple[float, float]:
    """Tokens per second of plain decoding, and of the best fixed depth, in worlds that begin alike."""
    rates = {(a, d): World(**world).rate(Always(d, a), rounds) for a in drafters for d in depths if d or a == drafters[0]}
    return rates[drafters[0], 0], max(rates.values())
