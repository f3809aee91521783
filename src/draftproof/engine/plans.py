"""What a controller is, and what it weighs: who can be asked, for what a plan is made, what it expects, what is tried in its place, what
rounds showed."""

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

FEE = 0.05       # of a plain pass: less to read first is not looked at


class Choice(NamedTuple):
    depth: int
    reason: str                      # in words
    drafter: str | None = None       # of a chain, the part to be asked; None: the drafter as it is
    prices: tuple[float, ...] = ()   # of nodes, and of a level, as a budget has them
    step: float = 0.0


class Control(Protocol):
    """Chooses depths; what the request, the context and the drafter forbid is cut off afterwards."""

    @property
    def holds(self) -> bool:
        """Whether `depths` would say of the same sequences what it said last."""
        return False

    @property
    def stays(self) -> bool:
        """Whether, while a round runs, it is known that `depths` will grant nothing again where it granted nothing."""
        return False

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int], whole: abc.Sequence[Sequence]) -> list[Choice]:
        """A choice per sequence; rooms[i] is the deepest draft that sequence i may have; whole: all that share the pass."""
        ...

    def learn(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], drafts: abc.Sequence[Draft],
              verdicts: abc.Sequence[Verdict], times: Times | None) -> None:
        """What a round showed and took, None if that says nothing of other rounds; nothing, unless a controller makes something of it."""
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
    asked: int = 0                        # the last round in which it was
    read: dict[str, int] = field(default_factory=dict)           # sequence → tokens of its text that the drafter has read
    kinds: dict[object, int] = field(default_factory=dict)       # kind of text → the last round in which it was asked about one
    share: float = 1.0                    # of the nodes that a tree may have, those that were worth their rows
    trees: int = 0

    def earn(self, load: int, seconds: float) -> None:
        if self.credit:                                          # not before its first trials have theirs
            self.credit[load] = self.credit.get(load, 0.0) + seconds

    def unread(self, seq: Sequence) -> int:
        return len(seq.tokens) - (self.read.get(seq.id, 0) if seq.state is not None else 0)

    def fee(self, seq: Sequence, scene: Scene) -> float:
        """Seconds that it would have to read for before it guesses; 0 where they do not count."""
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

    @property
    def least(self) -> float:
        """The chance of the least promising guess that is granted."""
        return min([chances[depth - 1] for chances, depth in zip(self.chances, self.depths, strict=True) if depth], default=inf)


@dataclass(frozen=True, slots=True)
class Trial:
    """Something tried in this round in place of the plan. It is expected to lose `loss` seconds against `rate`, to bring `tokens`
    more, and to take `drafting` seconds of drafting. arm None: a plain pass; asked: the sequences that are asked about, of which some may
    have left when it ends."""

    arm: Arm | None
    asked: abc.Sequence[Sequence]
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

    @property
    def load(self) -> int:
        """The texts of a pass, to a power of two."""
        return self.rows.bit_length()


class Outcome(NamedTuple):
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
    """What a round showed. at: its number; draft_s: seconds of its drafting step, None where they are not known; moment: in whose
    weather."""

    at: int
    asked: list[Outcome]
    draft_s: float | None
    moment: Moment


def reaching(shares: abc.Sequence[abc.Sequence[float]], whole: bool) -> abc.Sequence[float]:
    """How often a drafter is expected to go to level k = 1, 2, …: where any of these sequences has a k-th token. whole: as a tree grows, to
    the last level that is granted, whatever is kept of it."""
    if whole:
        shares = [[first] * len(share) for share in shares for first in share[:1]]
    if len(shares) == 1:
        return shares[0]
    return [1 - prod(1 - share for share in level) for level in zip_longest(*shares, fillvalue=0.0)]
