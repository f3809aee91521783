"""One sample of one request: its text and everything that follows it. `commit` is the only mutator of the text."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..core.edits import Counts
from ..core.tally import Tally
from ..models.grammar import GrammarState
from ..models.target import Slot
from ..trace.events import Event
from ..trace.report import Clock
from ..types import Commit, FinishReason, Role, Rule, Sampling, Signals, Verdict
from .port import TokenLogprob
from .text import Text


class Status(Enum):
    WAITING = "waiting"       # in the queue, holds no memory
    PREFILL = "prefill"       # has a slot, whose prompt is being read
    RUNNING = "running"       # has its first token; takes part in rounds
    DONE = "done"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.DONE}),
    Status.PREFILL: frozenset({Status.RUNNING, Status.DONE}),
    Status.RUNNING: frozenset({Status.DONE}),
    Status.DONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Also the view that drafters read (`types.SequenceView`). Options in `sampling` are resolved, never None."""

    id: str
    request: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    sample: int
    end_ids: frozenset[int]
    limit: int                                   # longest text: prompt + max_tokens, or the target's context
    text: Text
    clock: Clock
    rule: Rule = "match"
    depth: int | str | None = None               # of this request: a fixed depth, "auto", or None for the engine's
    speculate: bool = True
    lane: int = 0                                # which of the engine's drafters guesses for it
    tenant: str = ""
    prompt_class: str | None = None
    tokens: list[int] = field(default_factory=list)          # prompt first
    output: list[int] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    status: Status = Status.WAITING
    finish: FinishReason | None = None
    error: BaseException | None = None
    slot: Slot | None = None
    grammar: GrammarState | None = None          # where the text stands in the grammar it must follow
    state: Any = None                            # the drafter's
    signals: Signals | None = None               # what the prefill left for it
    counts: Counts = field(default_factory=Counts)           # of its tokens, for penalties
    tally: Tally = field(default_factory=Tally)
    rounds: int = 0
    reason: str = ""                             # of the budget in its last round that was not near its end
    begun: bool = False                          # whether a pass has read a part of the prompt
    pause: int = 0                               # of the prompt's tokens, where a pass should end (models.target.Adopts)
    prefill_s: float = 0.0
    prefill_passes: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    records: list[Event] = field(default_factory=list)
    pieces: tuple[str, ...] = ()                 # the text that each token of the last commit made readable; filled by `spell`
    spelled: int = 0                             # tokens of the output that `spell` has done
    attempts: dict[int, int] = field(default_factory=dict)   # position → rounds that have drafted it

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def done(self) -> bool:
        return self.status is Status.DONE

    @property
    def room(self) -> int:
        """The deepest draft whose tokens could all be emitted together with the target's own."""
        return max(0, self.limit - len(self.tokens) - 1)

    def to(self, status: Status) -> None:
        assert status in TRANSITIONS[self.status], f"{self.id}: {self.status.value} → {status.value}"
        self.status = status

    def attempt(self, position: int) -> int:
        return self.attempts.get(position, 0)

    def drafted(self, depth: int) -> None:
        """Note, for a joint rule, that a drafter has seen the noise of the next `depth` positions: it may not be used again."""
        for position in range(len(self.tokens), len(self.tokens) + depth):
            self.attempts[position] = self.attempts.get(position, 0) + 1

    def commit(self, verdict: Verdict, nodes: abc.Sequence[int]) -> Commit:
        """Append what stands of a draft whose node i is token nodes[i], then the verdict's own token, up to the first stop."""
        assert self.status is Status.RUNNING, f"{self.id}: commit while {self.status.value}"
        self.spell()                                 # what a round that was interrupted left
        self.pieces = ()
        start = len(self.tokens)
        kept: list[int] = []
        for node in verdict.accepted:
            kept.append(node)
            self._append(nodes[node], "accepted")
            if self.finish is not None:
                break
        else:
            self._append(verdict.next_token, verdict.role)
        if self.grammar is not None:
            self.grammar.follow(self.output)
        if self.attempts:
            self.attempts = {at: n for at, n in self.attempts.items() if at >= len(self.tokens)}
        roles = tuple(self.roles[start - len(self.prompt):])
        return Commit(start, tuple(self.tokens[start:]), roles, tuple(kept), self.finish)

    def _append(self, token: int, role: Role) -> None:
        self.tokens.append(token)
        self.output.append(token)
        self.roles.append(role)
        if token in self.end_ids and len(self.output) > self.sampling.min_tokens:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
        if self.text.stops:
            self.spell()

    def spell(self) -> None:
        """Detokenise the new tokens into `pieces`. The next round needs that only where a stop string may end the text."""
        for at in range(self.spelled, len(self.output)):
            last = at == len(self.output) - 1
            if last and self.finish == "stop":       # by this token, which is not of the text
                piece = self.text.end()
            else:
                piece, stopped = self.text.push(self.output[at], armed=at >= self.sampling.min_tokens)
                if stopped:
                    self.finish = "stop"
                elif last and self.finish == "length":
                    piece += self.text.end()
            self.pieces += piece,
        self.spelled = len(self.output)
