"""Several drafters in one engine. A lane is one drafter with its own controller and its own failures (`Speculation`); every request
belongs to one lane, and all lanes share the target's passes.

Lane 0 is the engine's own drafter, which the runtime switch may replace; the others stay. The time of a shared pass counts in full for
each lane.
"""

from __future__ import annotations

from collections import abc
from time import perf_counter
from typing import TypeVar

from ..trace.events import Times
from ..types import Budget, Commit, Draft, Signals, Verdict
from .control import AutoDepth
from .costs import PassCosts
from .sequence import Sequence
from .speculation import NO_CAP, UNASKED, Speculation

T = TypeVar("T")
Part = tuple[Speculation, list[int]]


class Lanes:
    """`Speculation` for a batch whose sequences belong to different drafters."""

    def __init__(self, lanes: abc.Sequence[Speculation], passes: PassCosts) -> None:
        """passes: what the controllers know of the target's passes; it is told here of every round that one of them looks at."""
        self.lanes, self.passes = tuple(lanes), passes
        self._parts: list[Part] = []             # of this round: which places of the batch each drafter guesses for
        self._spent: dict[int, float] = {}       # seconds of this round's drafting, by id of the lane
        self._planning = 0.0                     # seconds of this round's planning

    def of(self, seq: Sequence) -> Speculation:
        return self.lanes[seq.lane]

    @property
    def tree(self) -> int | None:
        return self.lanes[0].tree

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that any of the drafters reads."""
        return tuple(sorted({layer for lane in self.lanes for layer in lane.taps}))

    @property
    def likely(self) -> int:
        """Of how many of the target's likeliest tokens any of the drafters is told."""
        return max(lane.likely for lane in self.lanes)

    def plan(self, batch: abc.Sequence[Sequence]) -> list[Budget]:
        """A budget per sequence; 0 for those that asked for no drafter. `propose`, `observe` and `learn` then expect the same batch."""
        start = perf_counter()
        self._parts = self._divided(batch)
        if (only := self._only(batch)) is not None:
            planned = only.plan(batch, batch)
            self._planning = perf_counter() - start
            return planned
        budgets: dict[int, Budget] = {}
        for lane, here in self._parts:
            budgets.update(zip(here, lane.plan(_taken(batch, here), batch), strict=True))
        for i, seq in enumerate(batch):
            if i not in budgets:
                state, why = self.of(seq).state
                budgets[i] = Budget(0, 0, "none", UNASKED if state == "on" else why)
        self._planning = perf_counter() - start
        return [budgets[i] for i in range(len(batch))]

    def propose(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[Draft]:
        if (only := self._only(batch)) is not None:
            return only.propose(batch, budgets)                      # how long it took is what the whole step did
        found: dict[int, Draft] = {}
        for lane, here in self._parts:
            start = perf_counter()
            found.update(zip(here, lane.propose(_taken(batch, here), _taken(budgets, here)), strict=True))
            self._spent[id(lane)] = perf_counter() - start
        return [found[i] if i in found else Draft.empty(budget.drafter) for i, budget in enumerate(budgets)]

    def observe(self, batch: abc.Sequence[Sequence], commits: abc.Sequence[Commit], signals: abc.Sequence[Signals | None]) -> None:
        for lane, here in self._parts:
            lane.observe(_taken(batch, here), _taken(commits, here), _taken(signals, here))

    def learn(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], drafts: abc.Sequence[Draft],
              verdicts: abc.Sequence[Verdict], times: Times, passing: float | None) -> None:
        """What a round showed and took. passing: seconds of the host, from asking for the scores to the end of the round's records; None
        where they and `times` say nothing of other rounds."""
        if any([isinstance(lane.control, AutoDepth) and lane.state[0] == "on" and not lane.control.rests for lane, _ in self._parts]):
            rows, keys = sum(map(len, drafts)) + len(batch), sum(len(seq.tokens) for seq in batch)
            self.passes.follow(len(batch), rows, keys, passing or 0.0)
        for lane, here in self._parts:
            spent = max(times.draft_s - self._planning, 0.0) if len(self._parts) == 1 else self._spent[id(lane)]
            own = None if passing is None else times._replace(draft_s=spent)             # planning is no drafter's doing
            lane.learn(_taken(batch, here), _taken(budgets, here), _taken(drafts, here), _taken(verdicts, here), own)

    @property
    def asks_early(self) -> bool:
        """Whether the next round begins before the records of this one are written: where the device works beside the host, and the only
        drafter guesses."""
        return self.passes.overlaps and len(self.lanes) == 1 and self.lanes[0].state[0] == "on"

    def go_on(self, batch: abc.Sequence[Sequence]) -> None:
        """The round goes on with this batch: the one that was planned for, less the texts that have left."""
        self._parts = self._divided(batch)

    @property
    def steered(self) -> tuple[object, ...]:
        """Everything that decides who guesses and how far, to compare: equal as long as nothing of it has changed."""
        return tuple(lane.steered for lane in self.lanes)

    @property
    def idle(self) -> bool:
        """Whether nobody guesses for this batch in this round, nor in the next one if the batch stays the same."""
        return all(lane.stays for lane, _ in self._parts)

    def begin(self, seq: Sequence, signals: Signals | None) -> None:
        self.of(seq).begin(seq, signals)

    def leave(self, seq: Sequence) -> None:
        self.of(seq).leave(seq)

    def forget(self, seq: Sequence) -> None:
        self.of(seq).control.forget(seq)

    def leave_all(self) -> None:
        for lane in self.lanes:
            lane.leave_all()

    def steer(self, enabled: bool | None, depth_cap: int | None) -> None:
        """The operator's word, to every drafter."""
        for lane in self.lanes:
            if depth_cap is not None:
                lane.depth_cap = None if depth_cap == NO_CAP else depth_cap
            if enabled is not None:
                lane.enabled = enabled
                if not enabled:
                    lane.leave_all()

    def _only(self, batch: abc.Sequence[Sequence]) -> Speculation | None:
        """The lane that guesses for all of the batch, which is nearly always so and needs no sorting."""
        return self._parts[0][0] if len(self._parts) == 1 and len(self._parts[0][1]) == len(batch) else None

    def _divided(self, batch: abc.Sequence[Sequence]) -> list[Part]:
        places: list[list[int]] = [[] for _ in self.lanes]
        for i, seq in enumerate(batch):
            if seq.speculate:
                places[seq.lane].append(i)
        return [(lane, here) for lane, here in zip(self.lanes, places, strict=True) if here]


def _taken(values: abc.Sequence[T], here: abc.Sequence[int]) -> abc.Sequence[T]:
    """The values at these ascending places; all of them as they are."""
    return values if len(here) == len(values) else [values[i] for i in here]
