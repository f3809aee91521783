"""One drafter's part of a round: plan, propose, observe and learn. Whatever the drafter does, the request goes on without it."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.noise import gumbel, key, key_rows, shared_rows
from ..core.tree import depths as levels
from ..core.verify import shares_noise
from ..drafters.base import Drafter
from ..errors import DrafterError
from ..trace.events import Times
from ..types import Budget, Commit, Draft, DraftLaw, SequenceView, Signals, Verdict
from .plans import Choice, Control
from .sequence import Sequence

log = logging.getLogger("draftproof.engine")

NO_CAP = 1 << 30         # as an operator's cap: none, deeper than any text
ENDS = "the end of the text is near"
UNASKED = "the request asked for no drafter"
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_budget = lru_cache(maxsize=64)(Budget)          # a plan grants the same for many rounds


@dataclass(slots=True)
class RoundNoise:
    """`drafters.base.Noise` for one round. A sequence's rule decides from which stream its noise comes."""

    device: torch.device
    keep_law: bool

    def keys(self, seqs: abc.Sequence[SequenceView], positions: abc.Sequence[int]) -> Tensor:
        if all(shares_noise(seq.rule) for seq in seqs):
            return shared_rows([(seq.seed, seq.sample) for seq in seqs], positions, self.device)
        return key_rows([_draft_key(seq, at) for seq, at in zip(seqs, positions, strict=True)], self.device)

    def __call__(self, seqs: abc.Sequence[SequenceView], positions: abc.Sequence[int], token_ids: Tensor | None,
                 vocab_size: int) -> Tensor:
        width = vocab_size if token_ids is None else token_ids.shape[0]
        if all(seq.sampling.greedy for seq in seqs):
            return torch.zeros((), device=self.device).expand(len(seqs), width)
        ids = torch.arange(vocab_size, device=self.device) if token_ids is None else token_ids.to(self.device)
        noise = gumbel(self.keys(seqs, positions), ids)
        quiet = [i for i, seq in enumerate(seqs) if seq.sampling.greedy]
        if quiet:
            noise[quiet] = 0
        return noise


def _draft_key(seq: SequenceView, position: int) -> tuple[int, int]:
    assert isinstance(seq, Sequence), "drafters hand back the sequences they were given"
    if shares_noise(seq.rule):
        return key(seq.seed, seq.sample, "text", position)
    return key(seq.seed, seq.sample, "draft", position, seq.attempt(position))


class Held(NamedTuple):
    """The last plan, which may serve again. ends: how long each text may become before its budget no longer fits its room; steered: as
    `Speculation.steered` was."""

    batch: abc.Sequence[Sequence]
    budgets: list[Budget]
    ends: list[int]
    steered: tuple[object, ...]


class Speculation:
    """Plans budgets, calls the drafter and keeps its states. A drafter that raises or breaks its contract is taken out of service."""

    def __init__(self, drafter: Drafter | None, control: Control, vocab_size: int, device: torch.device, tree: int | None = None,
                 keep_law: bool = False, pressure: Callable[[], str] = str, trees: bool = True) -> None:
        """tree: most nodes of a draft (None: chains); keep_law: of every draft, for the trace; trees: whether the target scores them;
        pressure: called once a round, says why drafting should pause now, or nothing (`memory.Pressure`)."""
        self.drafter, self.control, self.tree, self.keep_law = drafter, control, tree, keep_law
        self.enabled = True
        self.depth_cap: int | None = None        # the operator's, for fixed and automatic depths alike
        self.failure = ""                        # why the drafter is out of service
        self.reason = "no round yet"             # of the text that was planned for last
        self._pressure, self.pressed = pressure, ""      # pressed: why drafting pauses now
        self._vocab_size, self._device, self._trees = vocab_size, device, trees
        self._mapped: Tensor | None = None       # the last id map of a law that was found right
        self._open: dict[str, Sequence] = {}     # sequences with a drafter state
        self._held: Held | None = None

    @property
    def name(self) -> str:
        return "none" if self.drafter is None else self.drafter.name

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states the drafter reads; none while it is out of service or switched off."""
        return self.drafter.needs.taps if self.drafter is not None and self._serves else ()

    @property
    def likely(self) -> int:
        """How many of the target's likeliest tokens the drafter is told behind every row; none while it does not serve."""
        return self.drafter.needs.likely if self.drafter is not None and self._serves else 0

    @property
    def _serves(self) -> bool:
        return not self.failure and self.enabled and not self.pressed

    @property
    def state(self) -> tuple[str, str]:
        """One of none, off, out of service, on; and why."""
        if self.drafter is None:
            return "none", "no drafter was given"
        if self.failure:
            return "out of service", self.failure
        if not self.enabled:
            return "off", "speculation is switched off"
        if self.pressed:
            return "off", self.pressed
        return "on", self.reason

    @property
    def steered(self) -> tuple[object, ...]:
        """Everything that decides on budgets, but for texts and what rounds show. To be compared."""
        return self.drafter, self.control, self.enabled, self.failure, self.pressed, self.depth_cap

    def plan(self, batch: abc.Sequence[Sequence], whole: abc.Sequence[Sequence]) -> list[Budget]:
        """A budget per sequence. Deeper than the request's end, the context or the drafter reach is never granted.

        whole: all sequences of the pass, those of other drafters too.
        """
        self._look_at_memory()
        held, steered = self._held, self.steered
        if held is not None and held.batch == batch and held.steered == steered and self.control.holds:
            if all([len(seq.tokens) <= end for seq, end in zip(batch, held.ends, strict=True)]):
                return held.budgets
        self._held = None
        state, why = self.state
        if state != "on":
            return [Budget(0, 0, self.name, why)] * len(batch)
        limits = [self._limit(seq) for seq in batch]
        rooms = [0 if isinstance(seq.depth, int) else limit for seq, (limit, _) in zip(batch, limits, strict=True)]
        chosen = self.control.depths(batch, rooms, whole)
        budgets = [self._granted(seq, limit, choice) for seq, limit, choice in zip(batch, limits, chosen, strict=True)]
        self.reason = batch[-1].reason if batch else self.reason
        ends = [len(seq.tokens) + self._room(seq)[0] - budget.depth - 1 for seq, budget in zip(batch, budgets, strict=True)]
        self._held = Held(batch, budgets, ends, steered)
        return budgets

    def _look_at_memory(self) -> None:
        """Pause where memory is short, and go on when it no longer is."""
        if self.drafter is None or not self.enabled or self.failure:
            return
        before, self.pressed = self.pressed, self._pressure()
        if self.pressed and not before:
            log.warning("drafter %s pauses: %s", self.name, self.pressed)
            self.leave_all()

    def _granted(self, seq: Sequence, limit: tuple[int, str], choice: Choice) -> Budget:
        """The request's own depth, or else the controller's choice, cut to the limit."""
        depth, reason, part, prices, step = choice
        if isinstance(seq.depth, int):
            depth, reason, prices, step = seq.depth, "fixed by the request", (), 0.0
        if depth > limit[0] or self.depth_cap == 0:              # without room a controller has no reason of its own
            depth, reason = limit
        nodes = max(depth, self.tree) if depth and self.tree else depth
        if reason != ENDS or not seq.reason:                     # every text ends: that says nothing of it
            seq.reason = reason
        return _budget(depth, nodes, part or self.name, reason, prices[:nodes], step)

    @property
    def stays(self) -> bool:
        """Whether it guesses for none of this batch in this round, nor in the next one if the batch stays the same."""
        if self.state[0] != "on":
            return True
        return self._held is not None and self.control.stays and not any([budget.depth for budget in self._held.budgets])

    def propose(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[Draft]:
        """A valid draft per sequence, empty where the budget is 0 or the drafter failed."""
        drafts = [Draft.empty(self.name)] * len(batch)
        asked = [i for i, budget in enumerate(budgets) if budget.depth]
        if not asked or self.drafter is None:
            return drafts
        keep_law = self.keep_law or any(not shares_noise(batch[i].rule) and not batch[i].sampling.greedy for i in asked)
        try:
            for i in asked:
                self._enter(batch[i], None)
            found = self.drafter.propose([batch[i].state for i in asked], [budgets[i] for i in asked], RoundNoise(self._device, keep_law))
            if len(found) != len(asked):
                raise DrafterError(f"drafter {self.name} gave {len(found)} drafts for {len(asked)} sequences; expected one each")
            checked = self._within([self._checked(draft, budgets[i]) for i, draft in zip(asked, found, strict=True)])
            for i, draft in zip(asked, checked, strict=True):
                drafts[i] = draft
        except Exception as error:
            self.retire(error)
            drafts = [Draft.empty(self.name, self.failure if budget.depth else "") for budget in budgets]
        return drafts

    def observe(self, batch: abc.Sequence[Sequence], commits: abc.Sequence[Commit], signals: abc.Sequence[Signals | None]) -> None:
        here = [i for i, seq in enumerate(batch) if seq.state is not None]
        if not here or self.drafter is None:
            return
        try:
            self.drafter.observe([batch[i].state for i in here], [commits[i] for i in here], [signals[i] for i in here])
        except Exception as error:
            self.retire(error)

    def learn(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], drafts: abc.Sequence[Draft],
              verdicts: abc.Sequence[Verdict], times: Times | None) -> None:
        if self.state[0] == "on":
            self.control.learn(batch, budgets, drafts, verdicts, times)

    def begin(self, seq: Sequence, signals: Signals | None) -> None:
        """The prefill is over. Only a drafter that reads hidden states must follow from the start; others join when first asked."""
        if self.drafter is None or not self.drafter.needs.taps or self.state[0] != "on" or not seq.speculate:
            return
        try:
            self._enter(seq, signals)
        except Exception as error:
            self.retire(error)

    def leave(self, seq: Sequence) -> None:
        """Give the drafter's state of a sequence back."""
        self._held = None
        state, seq.state = seq.state, None
        self._open.pop(seq.id, None)
        if state is None or self.drafter is None:
            return
        try:
            self.drafter.close(state)
        except Exception as error:
            self.retire(error)

    def leave_all(self) -> None:
        for seq in list(self._open.values()):
            self.leave(seq)

    def replace(self, drafter: Drafter | None, control: Control) -> None:
        """Another drafter from the next round on; open texts are joined in the middle."""
        self.leave_all()
        self.drafter, self.control, self.failure, self.reason = drafter, control, "", "no round yet"

    def retire(self, error: Exception) -> None:
        """Take the drafter out of service for good, saying why."""
        if self.failure:
            return
        who, what = f"drafter {self.name}", f"{error}"
        if not isinstance(error, DrafterError):
            what = f"{who} raised {type(error).__name__}: {error}"
        elif not what.startswith("drafter "):
            what = f"{who}: {error}"
        self.failure = f"{what}; it is out of service and the text goes on without it"
        log.warning(self.failure, exc_info=None if isinstance(error, DrafterError) else error)
        self.leave_all()

    def _enter(self, seq: Sequence, signals: Signals | None) -> None:
        if seq.state is None and self.drafter is not None:
            seq.state = self.drafter.open(seq, signals)
            self._open[seq.id] = seq

    def _room(self, seq: Sequence) -> tuple[int, str]:
        """The deepest draft that there is room for, which shrinks as the text grows, and what bounds it."""
        assert self.drafter is not None
        room, context = (seq.room, ENDS), self.drafter.needs.context
        return room if context is None else min(room, (max(0, context - len(seq.tokens)), "the drafter's context ends"))

    def _limit(self, seq: Sequence) -> tuple[int, str]:
        """The deepest draft allowed, and what bounds it."""
        room = self._room(seq)
        return room if self.depth_cap is None or self.depth_cap > room[0] else (self.depth_cap, "the operator's cap")

    def _checked(self, draft: Draft, budget: Budget) -> Draft:
        """The draft, on its budget and, as far as the host sees, inside the vocabulary; otherwise DrafterError saying what it broke."""
        broken = _broken(draft, budget, self._vocab_size, self._trees) or self._outside(draft)
        if broken is not None:
            found, expected = broken
            raise DrafterError(f"drafter {self.name} proposed {found}; expected {expected}")
        return replace(draft, drafter=self.name) if draft.drafter == "none" else draft

    def _outside(self, draft: Draft) -> tuple[str, str] | None:
        """As `_broken`, of the id map of a law. A map is as long as a vocabulary, so that the same one is not looked at again."""
        ids = draft.law.ids if len(draft) and draft.law is not None else None
        if ids is None or ids is self._mapped or not ids.is_cpu:
            return None
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            return f"a law with token id {low if low < 0 else high}", f"ids in [0, {self._vocab_size})"
        self._mapped = ids
        return None

    def _within(self, drafts: list[Draft]) -> list[Draft]:
        """The drafts with tokens that lie on a device clamped to the vocabulary, in one operation per device: to check them would wait for
        it, and so a guess that is no token becomes a wrong one."""
        far: dict[torch.device, list[int]] = {}
        for i, draft in enumerate(drafts):
            if len(draft) and not draft.tokens.is_cpu:
                far.setdefault(draft.tokens.device, []).append(i)
        for here in far.values():
            tokens = [drafts[i].tokens for i in here]
            inside = (tokens[0] if len(here) == 1 else torch.cat(tokens)).clamp(0, self._vocab_size - 1)
            for i, own in zip(here, torch.split(inside, [len(one) for one in tokens]), strict=True):
                one = drafts[i]
                drafts[i] = Draft(own, one.parents, one.score, one.law, one.drafter, one.reason)       # `replace` takes twice as long
        return drafts


def _broken(draft: Draft, budget: Budget, vocab_size: int, trees: bool) -> tuple[str, str] | None:
    """What a draft breaks, as what was found and what was expected; None if it keeps its contract."""
    if not isinstance(draft, Draft):
        return type(draft).__name__, "a Draft"
    tokens, parents, score = draft.tokens, draft.parents, draft.score
    if not isinstance(draft.drafter, str) or not isinstance(draft.reason, str):
        return f"drafter {draft.drafter!r} and reason {draft.reason!r}", "two texts"
    n = len(parents)
    if not n:
        return None
    if type(parents[0]) is not int:          # a tensor's, or a float: what only compares like integers fails where it is used
        return f"parents {parents}", "a tuple of integers, −1 for the root"
    if tokens.ndim != 1 or tokens.shape[0] != n or tokens.dtype not in INTEGERS:
        return f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype}", f"{n} integers, one per parent"
    if n > budget.nodes:
        return f"{n} nodes", f"at most {budget.nodes}"
    chain = draft.is_chain
    if not chain and not trees:
        return "a tree", "a chain, since this target scores no trees"
    if not chain and not all(-1 <= parent < i for i, parent in enumerate(parents)):
        return f"parents {parents}", "parents before children, −1 for the root"
    depth = n if chain else max(levels(parents))
    if depth > budget.depth:
        return f"a draft of depth {depth}", f"at most {budget.depth}"
    if score is not None and not (isinstance(score, Tensor) and score.shape == (n,)):
        return f"a score of {_form(score)}", f"a tensor [{n}], one number per node"
    if draft.law is not None and (broken := _broken_law(draft.law, n, vocab_size)) is not None:
        return broken
    if tokens.is_cpu:
        ids = tokens.tolist()
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            return f"token id {low if low < 0 else high}", f"ids in [0, {vocab_size})"
    return None


def _broken_law(law: DraftLaw, n: int, vocab_size: int) -> tuple[str, str] | None:
    """As `_broken`, of the form of the law of n nodes."""
    logq, row, ids = law.logq, law.row, law.ids
    if not isinstance(logq, Tensor) or logq.ndim != 2 or not logq.is_floating_point():
        return f"a law of {_form(logq)}", "log-probabilities [rows, V] in floating point"
    rows, width = logq.shape
    if len(row) != n or type(row[0]) is not int or min(row) < 0 or max(row) >= rows:
        return f"a law whose rows do not cover its nodes ({row} of {rows})", f"one row for each of {n} nodes"
    if ids is None:
        if width > vocab_size:
            return f"a law of {width} tokens without an id map", f"at most the target's {vocab_size}, or DraftLaw.ids"
    elif not isinstance(ids, Tensor) or ids.shape != (width,) or ids.dtype not in (torch.int64, torch.int32):
        return f"a law whose id map is {_form(ids)}", f"{width} integers, one per token of the law"
    return None


def _form(value: object) -> str:
    return f"shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
