"""The controller's protocol, and what automatic depth (`control.py`) works with: an arm, which is somebody who can draft; the scene that a
plan is made for; the plan; a trial in its place; and what rounds have shown."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, prod
from typing import NamedTuple, Protocol, Self

from ..core.tree import depths as levels
from ..trace.events import Times
from ..types import Budget, Draft, Verdict
from .costs import DraftCosts, Moment
from .sequence import Sequence
from .survival import Survival

FEE = 0.05       # of a plain pass: reading that takes less is ignored


class Choice(NamedTuple):
    """What a controller grants one sequence, before it is cut to what the request and the drafter allow (`Speculation.plan`)."""

    depth: int
    reason: str
    drafter: str | None = None       # the part of a chain that drafts; None: the drafter as it is
    prices: tuple[float, ...] = ()   # as `Budget` has them
    step: float = 0.0


class Control(Protocol):
    """Chooses depths; what the request, the context and the drafter forbid is cut off afterwards."""

    @property
    def holds(self) -> bool:
        """Whether `depths` would return for the same sequences what it returned last."""
        return False

    @property
    def stays(self) -> bool:
        """Whether it is known, while a round without drafts runs, that `depths` will grant its sequences nothing in the next one either."""
        return False

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int], whole: abc.Sequence[Sequence]) -> list[Choice]:
        """A choice per sequence. rooms[i]: the deepest draft that sequence i may have; whole: all sequences of the pass, those of other
        drafters too."""
        ...

    def learn(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], drafts: abc.Sequence[Draft],
              verdicts: abc.Sequence[Verdict], times: Times | None) -> None:
        """A round is over. times: None if they say nothing of other rounds, as something was recorded in it. By default nothing is done."""
        return

    def forget(self, seq: Sequence) -> None:
        """The sequence is gone."""
        return


class FixedDepth(Control):
    """Always the same depth, whatever rounds show."""

    holds = stays = True

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int], whole: abc.Sequence[Sequence]) -> list[Choice]:
        return [Choice(self.depth, "fixed")] * len(batch)


@dataclass(slots=True)
class Arm:
    """A drafter, or a part of a chain that can be asked alone."""

    name: str | None
    survival: Survival
    costs: DraftCosts = field(default_factory=DraftCosts)
    credit: dict[int, float] = field(default_factory=dict)       # `Scene.load` → seconds that trials may lose there
    asked: int = 0                        # the last round in which it drafted
    read: dict[str, int] = field(default_factory=dict)           # sequence → tokens of its text that the drafter has read
    kinds: dict[object, int] = field(default_factory=dict)       # kind of text → the last round in which it drafted for one
    share: float = 1.0                    # of the nodes that a tree may have, the share that was worth its rows …
    trees: int = 0                        # … in so many trees

    def earn(self, load: int, seconds: float) -> None:
        if self.credit:                                          # not before its first trials have theirs
            self.credit[load] = self.credit.get(load, 0.0) + seconds

    def unread(self, seq: Sequence) -> int:
        return len(seq.tokens) - (self.read.get(seq.id, 0) if seq.state is not None else 0)

    def fee(self, seq: Sequence, scene: Scene) -> float:
        """Seconds that reading the text would take before it can draft; 0 where they are too few to count."""
        seconds = self.costs.per_unread * self.unread(seq)
        return seconds if seconds > FEE * scene.plain.seconds else 0.0

    def chances(self, batch: abc.Sequence[Sequence], at: int, rooms: abc.Sequence[int],
                least: float) -> tuple[list[list[float]], list[list[float]]]:
        """As `Survival.of`, with nothing for those whose first guess stands less often than `least`."""
        if least:
            rooms = [room if self.survival.first(seq) >= least else 0 for seq, room in zip(batch, rooms, strict=True)]
        return self.survival.of(batch, at, rooms)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is granted, and expected of a round: tokens of the whole batch, and seconds in fair weather (`costs.py`). arm None: plain
    decoding. chances[i][k−1]: that the first k guesses for sequence i all stand."""

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

    @property
    def least(self) -> float:
        """The chance to stand of the least likely guess that is granted."""
        return min([chances[depth - 1] for chances, depth in zip(self.chances, self.depths, strict=True) if depth], default=inf)


@dataclass(frozen=True, slots=True)
class Trial:
    """Something tried in this round in place of the plan. It is expected to lose `loss` seconds against the plan's `rate`, to bring
    `tokens` accepted ones, and to take `drafting` seconds of drafting. arm None: a plain pass is timed; asked: the sequences that the arm
    drafts for, of which some may have left when the round ends."""

    arm: Arm | None
    asked: abc.Sequence[Sequence]
    loss: float
    tokens: float
    drafting: float
    rate: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What a plan is made for. rows: of a pass without drafts, one per sequence; score[r−1]: seconds of a pass over r rows; plain: the plan
    to draft nothing."""

    batch: abc.Sequence[Sequence]
    rooms: abc.Sequence[int]
    rows: int
    score: list[float]
    plain: Plan

    @property
    def others(self) -> int:
        return self.rows - len(self.batch)

    @property
    def load(self) -> int:
        """The number of texts in the pass, to a power of two."""
        return self.rows.bit_length()


class Outcome(NamedTuple):
    """What became of one sequence's budget. granted, nodes: levels and nodes of the budget (nodes 0: the drafter had no choice of their
    number); depth, drafted: levels and nodes of the draft; accepted: nodes; length: of the text before the round, in tokens."""

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
    """What a round has shown. at: its number; asked: of the sequences that had a budget; draft_s: seconds of its drafting step, None where
    they are not known; moment: the weather then."""

    at: int
    asked: list[Outcome]
    draft_s: float | None
    moment: Moment


def reaching(shares: abc.Sequence[abc.Sequence[float]], whole: bool) -> abc.Sequence[float]:
    """How often a drafter is expected to run level k = 1, 2, …, which it does where any of the sequences has a k-th token. shares[i][k−1]:
    how often sequence i has one. whole: every level that is granted is run wherever there is a draft, as by a tree that grows."""
    if whole:
        shares = [[first] * len(share) for share in shares for first in share[:1]]
    if len(shares) == 1:
        return shares[0]
    return [1 - prod(1 - share for share in level) for level in zip_longest(*shares, fillvalue=0.0)]
