"""The drafter's protocol: one object per engine, a small state per sequence, four methods, a name and what it needs.

A drafter never sees the target's cache and never decides acceptance. Whatever it proposes, the text does not change
(rule `match`), or its law does not (rules `ratio` and `block`); it can only make generation faster or slower.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ..config import LoadConfig
from ..core.choice import Law, perturbed_top
from ..core.edits import Counts, Rows
from ..core.host import COLD, HOT, Filters
from ..core.probs import check_finite, laws
from ..core.upload import uploaded
from ..models.heads.detect import require
from ..models.heads.files import HeadFiles, read_files
from ..models.target import Target, TargetParts
from ..types import Budget, Commit, Draft, Rule, SequenceView, Signals

H = TypeVar("H")

NOTHING = "the options leave none of the drafter's tokens"     # why a draft ends there


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the engine, declared once.

    taps: layer ids whose hidden states it reads · parts: of the target's parts, which ("embed", "output", "layers")
    law: whether it can give q · tree: whether it can fill a budget of more nodes than depth · context: longest text or None
    prediction: whether it reads the text that a request predicts · prices: whether it ends a chain where guesses
    are not worth their rows · likely: how many of the target's likeliest tokens it is told behind every row
    """

    taps: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    law: bool = False
    tree: bool = False
    context: int | None = None
    prediction: bool = False
    prices: bool = False
    likely: int = 0


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
        """A new state, behind a prompt and its first token or in the middle of a text; signals say which positions they cover."""
        ...

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        """One draft per state, at most its budget; an empty draft is an ordinary answer. Called once per round."""
        ...

    def observe(self, states: Sequence[Any], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        """What entered each text; caches follow the text, never lead it. `state.seq.tokens` already holds it.

        commit.kept counts nodes of the draft that was scored: in a chain of drafters that may not be this one's, so compare tokens.
        """
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

    @property
    def graphs(self) -> bool:
        """Whether what runs again and again is recorded, where the device can; not where processes talk to each other within a pass."""
        return self.load.graphs and self.load.tensor_parallel == 1


def published(family: str, read: Callable[[HeadFiles, TargetParts, int], H], path: str | None, site: Site) -> H:
    """The head in a folder, or the built-in one of its family, for the target of `site`. Raises LoadError if it is of another family."""
    from ..models.load import builtin

    files = read_files(path or builtin(family))
    require(files, family)
    return read(files, site.target.parts, site.target.vocab_size)


class Named(Protocol):
    """What a name in a spec stands for: it makes a drafter, of its own class as a rule. `keys`: the options and the integers
    that each may take, both ends included."""

    keys: ClassVar[Mapping[str, tuple[int, int]]]
    takes_path: ClassVar[bool]

    @classmethod
    def check(cls, options: Mapping[str, int]) -> None:
        """Raises SpecError if the options, each right alone, do not go together. Looks at nothing else, so that it is cheap."""
        ...

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Drafter: ...


class NoOptions:
    """The part of `Named` about options, for a drafter that has none."""

    keys: ClassVar[Mapping[str, tuple[int, int]]] = {}

    @classmethod
    def check(cls, options: Mapping[str, int]) -> None:
        """There are none."""


class Plain(NoOptions):
    """`Named` for a drafter whose name says everything: no options, no path."""

    takes_path: ClassVar[bool] = False

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls()


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
    """tokens [N, k] int64, the target's ids, best first · values [N, k] log q + noise, −inf where q excludes the token
    logq [N, V or Vd], the law they were drawn from, None unless the noise asks for it (`keep_law`) · ids [Vd]: its columns'
    target ids, None for the target's whole vocabulary · shares [N, k]: log q, None unless they were asked for."""

    tokens: Tensor
    values: Tensor
    logq: Tensor | None
    ids: Tensor | None = None
    shares: Tensor | None = None

    def offered(self, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, values and shares in this shape, as trees grow by them."""
        assert self.shares is not None, "asked for"
        return self.tokens.view(shape), self.values.view(shape), self.shares.float().view(shape)


class Ranking:
    """The options by which a drafter ranks its candidates for one sequence: the request's own; at temperature 0, where the law is a
    single token and could order nothing else, those of temperature 1 without filters (the winner is the same)."""

    def __init__(self, seq: SequenceView) -> None:
        s = seq.sampling
        self.seq, self.counts = seq, Counts()
        self.sampling = replace(s, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if s.greedy else s

    @property
    def looks_back(self) -> bool:
        """Whether the tokens on the way to a row matter."""
        return self.sampling.needs_history

    @property
    def names_tokens(self) -> bool:
        return bool(self.sampling.needs_history or self.sampling.logit_bias)

    @property
    def filters(self) -> Filters:
        """What makes a law of logits where no token is named; temperature 0: they are ranked as they are, or by the law at 1."""
        s = self.sampling
        heat = min(max(1.0 if s.temperature is None else s.temperature, COLD), HOT)
        return Filters(0.0 if self.seq.sampling.greedy else heat, s.top_k, 1.0 if s.top_p is None else s.top_p, s.min_p)

    def rows(self, *paths: Sequence[int]) -> Rows:
        """The rows of the text as it is, followed by each path."""
        seq = self.seq
        return Rows(self.sampling, seq.tokens, seq.prompt_tokens, paths, seq.end_ids, counts=self.counts)


def pick(logits: Tensor, groups: Sequence[Rows], seqs: Sequence[SequenceView], positions: Sequence[int], noise: Noise, k: int,
         ids: Tensor | None = None, vocab_size: int = 0, *, shares: bool = False) -> Picks:
    """The k best tokens of each row by log q + g (Gumbel-top-k: without replacement, first drawn first; Kool et al., arXiv 1903.06059).

    logits [N, V] over the target's ids, groups[i] being the rows of seqs[i], one per path, with its `Ranking`, and
    positions[i] the number of tokens before the ones to pick; the rows of a sequence share their noise, which is drawn once. At
    temperature 0 nothing is added, and rows without any option stay raw logits unless `shares` are asked for. Reduced vocabularies:
    logits [N, Vd], ids int64 [Vd] the target's id of each column, vocab_size the target's; noise is keyed by the target's ids, and
    only options that name ids make the rows as wide as the target's. A row whose options leave none of the drafter's tokens has
    values of −inf.
    """
    quiet = [seq.sampling.greedy for seq in seqs]
    greedy, edited = all(quiet), any(g.edited for g in groups)
    k = min(k, logits.shape[-1])                            # a wider row has no more tokens
    if ids is not None and edited:
        logits, ids = _widened(logits, ids, vocab_size), None
    law = Law(logits.shape[-1], logits.float()) if greedy and not edited and not shares else laws(logits, groups, ())
    check_finite(logits, law.dead)
    counts = [len(g.paths) for g in groups]
    keys = None if greedy else noise.keys(seqs, positions).to(logits.device)     # a draft model may have a device of its own
    best, columns = perturbed_top(law, keys, k, ids, counts)
    if any(quiet) and not greedy:
        rows = [row for row, still in enumerate(still for still, count in zip(quiet, counts, strict=True) for _ in range(count)) if still]
        here = uploaded(rows, best.device)
        best[here], columns[here] = perturbed_top(law.of(rows), None, k)
    if law.dead:
        best[list(law.dead)] = -math.inf
    return Picks(columns if ids is None else ids[columns], best, law.whole if noise.keep_law and not greedy else None, ids,
                 law.at(columns) if shares else None)


def joined_laws(levels: Sequence[Picks], vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """The laws of all levels, one under the other, and their columns' ids. Of a reduced vocabulary, levels where some sequence's
    options named ids are as wide as the target's; then all are made so."""
    if levels[0].logq is None:
        return None, None
    ids = [p.ids for p in levels]
    if all(i is None for i in ids) or all(i is not None for i in ids):
        return torch.cat([p.logq for p in levels if p.logq is not None]), ids[0]
    wide = []
    for p in levels:
        assert p.logq is not None
        wide.append(p.logq if p.ids is None else p.logq.new_full((p.logq.shape[0], vocab_size), -math.inf).index_copy_(1, p.ids, p.logq))
    return torch.cat(wide), None


def _widened(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """[N, Vd] as [N, V], −inf where the drafter has no token."""
    wide = logits.new_full((logits.shape[0], vocab_size), -math.inf, dtype=torch.float32)
    wide[:, ids] = logits.float()
    return wide
