"""What a controller weighs: who can be asked, for what a plan is made, what it expects, what is tried in its place, what rounds showed."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from ..core.tree import depths as levels
from ..types import Budget, Draft, Verdict
from .costs import DraftCosts, Moment
from .sequence import Sequence
from .survival import Survival


class Choice(NamedTuple):
    depth: int
    reason: str                      # in words
    drafter: str | None = None       # of a chain, the part to be asked; None: the drafter as it is
    prices: tuple[float, ...] = ()   # of the nodes of a tree, as a budget has them


@dataclass(slots=True)
class Arm:
    """A drafter, or a part of a chain that can be asked alone."""

    name: str | None
    survival: Survival
    costs: DraftCosts = field(default_factory=DraftCosts)
    credit: float | None = None           # seconds that trials may lose; None before the first plan
    asked: int = 0                        # the last round in which it was
    read: dict[str, int] = field(default_factory=dict)           # sequence → tokens of its text that the drafter has read
    kinds: dict[object, int] = field(default_factory=dict)       # kind of text → the last round in which it was asked about one
    share: float = 1.0                    # of the nodes that a tree may have, those that were worth their rows
    trees: int = 0

    def earn(self, seconds: float) -> None:
        if self.credit is not None:
            self.credit += seconds

    def unread(self, seq: Sequence) -> int:
        return len(seq.tokens) - (self.read.get(seq.id, 0) if seq.state is not None else 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is expected of a round: tokens of the whole pass, and seconds in fair weather. chances[i][k−1]: that k tokens stand."""

    arm: Arm | None
    depths: list[int]
    tokens: float
    seconds: float
    chances: list[list[float]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def drafts(self) -> bool:
        return any(self.depths)


@dataclass(frozen=True, slots=True)
class Trial:
    """Something tried in this round in place of the plan. It is expected to lose `loss` seconds against `rate`, to bring `tokens`
    more, and to take `drafting` seconds of drafting. arm None: a plain pass; places: of the sequences that are asked about."""

    arm: Arm | None
    places: list[int]
    loss: float
    tokens: float
    drafting: float
    rate: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What a plan is made for. score[r−1]: seconds of a pass over r rows, `rows` of which would be there without a draft."""

    batch: abc.Sequence[Sequence]
    rooms: abc.Sequence[int]
    rows: int
    score: list[float]
    plain: Plan

    @property
    def others(self) -> int:
        return self.rows - len(self.batch)


class Asked(NamedTuple):
    """What became of one sequence's budget: levels granted, nodes granted (0: their number was fixed), levels and nodes drafted, and
    nodes accepted. length: of the text, in tokens, when it was asked about."""

    seq: Sequence
    drafter: str
    granted: int
    nodes: int
    depth: int
    drafted: int
    accepted: int
    length: int

    @classmethod
    def of(cls, seq: Sequence, budget: Budget, draft: Draft, verdict: Verdict) -> Self:
        accepted, drafted = len(verdict.accepted), len(draft)
        depth = drafted if draft.is_chain else max(levels(draft.parents))
        nodes = budget.nodes if budget.prices else 0
        return cls(seq, budget.drafter, budget.depth, nodes, depth, drafted, accepted, len(seq.tokens) - accepted - 1)


class Shown(NamedTuple):
    """What a round showed. at: its number; draft_s: seconds of its drafting step; moment: in whose weather."""

    at: int
    asked: list[Asked]
    draft_s: float
    moment: Moment
