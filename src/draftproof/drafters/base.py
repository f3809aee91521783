"""The drafter's protocol: one object per engine, a small state per sequence, three methods and one class attribute.

A drafter never sees the target's cache and never decides acceptance. Whatever it proposes, the text does not change
(rule `match`), or its law does not (rules `ratio` and `block`); it can only make generation faster or slower.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor

from ..config import LoadConfig
from ..core.probs import Rows, distribution, perturbed_top
from ..models.target import Target
from ..types import Budget, Commit, Draft, Rule, Sampling, SequenceView, Signals


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the engine, declared once.

    taps: layer ids whose hidden states it reads · parts: of the target's parts, which ("embed", "output", "layers")
    law: whether it can give q · tree: whether it can fill a budget of more nodes than depth · context: longest text or None
    """

    taps: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    law: bool = False
    tree: bool = False
    context: int | None = None


class Noise(Protocol):
    """Noise that a drafter adds to log q. Under `match` it is the target's own, shared noise; under the joint rules the
    draft stream, fresh for each attempt at a position. Zero at temperature 0. `keep_law`: the rule needs `Draft.law`."""

    @property
    def keep_law(self) -> bool: ...

    def __call__(self, seqs: Sequence[SequenceView], positions: Sequence[int], token_ids: Tensor | None, vocab_size: int) -> Tensor:
        """Gumbel noise [len(seqs), len(token_ids) or vocab_size] float32; row i belongs to the token at positions[i] of seqs[i]."""
        ...

    def keys(self, seqs: Sequence[SequenceView], positions: Sequence[int]) -> Tensor:
        """The same noise unspent: `core.noise` keys [len(seqs), 2] int32, with which `perturbed_top` draws only what can win.
        Rows at temperature 0 have keys too; whoever uses them leaves those rows alone."""
        ...


class State(Protocol):
    """What a drafter keeps for one sequence; it may hold more."""

    @property
    def seq(self) -> SequenceView: ...


class Drafter(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...            # a class attribute, unless it follows from weights

    def open(self, seq: SequenceView, signals: Signals | None) -> Any:
        """A new state, at admission or in the middle of a text; signals say which positions they cover."""
        ...

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        """One draft per state, at most its budget; an empty draft is an ordinary answer. Called once per round."""
        ...

    def observe(self, states: Sequence[Any], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        """What entered each text; caches follow the text, never lead it. `state.seq.tokens` already holds it."""
        ...

    def close(self, state: Any) -> None:
        """The sequence is gone (finished, cancelled, or speculation switched off for it); give its memory back."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """Where a drafter will work: what `from_spec` may look at."""

    target: Target
    rule: Rule
    load: LoadConfig


class Named(Drafter, Protocol):
    """A drafter that a spec can name. `keys`: its options and the integers that each may take, both ends included."""

    keys: ClassVar[Mapping[str, tuple[int, int]]]
    takes_path: ClassVar[bool]

    @classmethod
    def check(cls, options: Mapping[str, int]) -> None:
        """Raises SpecError if the options, each right alone, do not go together. Looks at nothing else, so that it is cheap."""
        ...

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self: ...


S = TypeVar("S", bound=State)


class PerSequence(ABC, Generic[S]):
    """Writes the batched protocol around a drafter that thinks of one sequence at a time and has no weights.

    A subclass gives `start` and `guess`, and `follow` and `leave` if it has something to do there.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs()

    @abstractmethod
    def start(self, seq: SequenceView) -> S:
        """A new state for a text of any length."""

    @abstractmethod
    def guess(self, state: S, budget: Budget) -> Draft:
        """At most budget.nodes tokens and budget.depth ≥ 1 levels. May be called twice for the same text."""

    def follow(self, state: S, commit: Commit) -> None:  # noqa: B027
        """The text grew by `commit`."""

    def leave(self, state: S) -> None:  # noqa: B027
        """The sequence is gone."""

    def open(self, seq: SequenceView, signals: Signals | None) -> S:
        return self.start(seq)

    def propose(self, states: Sequence[S], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        return [self.guess(s, b) if b.depth else Draft.empty(self.name) for s, b in zip(states, budgets, strict=True)]

    def observe(self, states: Sequence[S], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit in zip(states, commits, strict=True):
            self.follow(state, commit)

    def close(self, state: S) -> None:
        self.leave(state)


@dataclass(frozen=True, slots=True)
class Picks:
    """tokens [B, k] int64, best first · values [B, k] log q + noise, −inf where q excludes the token
    logq [B, V], the law they were drawn from, None unless the noise asks for it (`keep_law`)."""

    tokens: Tensor
    values: Tensor
    logq: Tensor | None


def ranking(sampling: Sampling) -> Sampling:
    """The options by which a drafter ranks its candidates: the request's own; at temperature 0, where the law is a single
    token and could order nothing else, those of temperature 1 without filters (the winner is the same)."""
    return replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if sampling.greedy else sampling


def pick(logits: Tensor, groups: Sequence[Rows], seqs: Sequence[SequenceView], positions: Sequence[int], noise: Noise, k: int) -> Picks:
    """The k best tokens of each row by log q + g (Gumbel-top-k: without replacement, first drawn first; Kool et al., arXiv 1903.06059).

    logits [B, V] over the target's ids; groups[i] has one row and the `ranking` options of seqs[i]; positions[i] is the
    number of tokens before the one to pick. At temperature 0 nothing is added, and rows without any option stay raw logits.
    """
    quiet = [i for i, seq in enumerate(seqs) if seq.sampling.greedy]
    greedy, k = len(quiet) == len(seqs), min(k, logits.shape[-1])
    if greedy and not any(g.sampling.needs_history or g.sampling.logit_bias for g in groups):
        logq = logits.float()
    else:
        logq = distribution(logits, groups)
    best, tokens = perturbed_top(logq, None if greedy else noise.keys(seqs, positions), k)
    if quiet and not greedy:
        best[quiet], tokens[quiet] = perturbed_top(logq[quiet], None, k)
    return Picks(tokens, best, logq if noise.keep_law and not greedy else None)
