"""`recycle`: what the target thought the last time these words stood here, and what it would choose now.

After Token Recycling (Luo et al., arXiv 2408.08696), which keeps the likeliest tokens of every row of the target's for the token before it.
Here they are kept for the last 1, 2, 4 and 8 tokens, with their logits; the longest ending that is known speaks. Where the text is sampled
under `match`, the noise that the target is about to add is known, so a remembered row gives the token that the target would choose today: a
copy can only repeat the choice of that day. Endings that no row is known of, such as those of a prompt, are copied as `ngram` does.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..core.host import COLD
from ..core.noise import gumbel_of, key
from ..core.verify import shares_noise
from ..types import Budget, Commit, Draft, Sampling, SequenceView, Signals
from .base import Needs, Noise, NoOptions, Site
from .confidence import Counts, floors_of
from .grow import GAPS, affordable, middles
from .occurrences import AGREEMENTS, agreed

LENGTHS = (8, 4, 2, 1)            # tokens of an ending
KEPT = 16               # likeliest tokens of a row
WIDTH = 5               # guesses at one place of a tree
BACKED = (1, 5, 9)      # and on a row's guess that a copy agrees with
BEYOND = GAPS[-1]       # how far below the last of a row's tokens the next one is taken to be
RARE = 1e-4             # of the likeliest token's chance: a token below is not drawn
LEAST = 0.02            # a chance below is no chance
MEMORY = 2000.0         # observations of a cell after which old ones fade

Ending = tuple[int, ...]
Key = tuple[int, ...]             # of a place's noise


def endings(before: Ending) -> list[Ending]:
    """What the last tokens of a text are known by, the longest first."""
    return [before[-n:] for n in LENGTHS if n <= len(before)]


class Rows:
    """The target's last `capacity` rows, of all tenants, in a ring; each tenant finds its own by the tokens before them."""

    def __init__(self, capacity: int) -> None:
        self._tokens, self._logits = np.zeros((capacity, KEPT), np.int64), np.zeros((capacity, KEPT), np.float32)
        self._owners: list[tuple[str, Ending] | None] = [None] * capacity
        self._tables: dict[str, dict[Ending, int]] = {}
        self._next = 0

    def of(self, tenant: str) -> Mapping[Ending, int]:
        """Where the row behind an ending is; no more than what the tenant's own texts left there."""
        return self._tables.get(tenant, {})

    def add(self, tenant: str, texts: Sequence[Ending], tokens: Tensor, logits: Tensor) -> None:
        """Rows [n, k], and the last tokens before each. An interruption leaves places that nobody finds, and no row that is another's."""
        count = len(self._owners)
        texts, tokens, logits = texts[-count:], tokens[-count:, :KEPT], logits[-count:, :KEPT]
        places, width = [(self._next + i) % count for i in range(len(texts))], tokens.shape[1]
        for at in places:
            self._forget(at)
        self._tokens[places, :width], self._logits[places, :width] = tokens.numpy(), logits.numpy()
        self._logits[places, width:] = -math.inf
        for at, before in zip(places, texts, strict=True):
            self._owners[at] = tenant, before
            table = self._tables.setdefault(tenant, {})
            for ending in endings(before):
                table[ending] = at
        self._next = (self._next + len(texts)) % count

    def __getitem__(self, at: int) -> tuple[list[int], list[float]]:
        """Its likeliest tokens and their logits, best first; −inf where there are no more."""
        return self._tokens[at].tolist(), self._logits[at].tolist()

    def _forget(self, at: int) -> None:
        owner = self._owners[at]
        if owner is None:
            return
        tenant, before = owner
        table = self._tables.get(tenant, {})                 # without one where an interruption came between
        for ending in endings(before):
            if table.get(ending) == at:
                del table[ending]
        if not table:
            self._tables.pop(tenant, None)
        self._owners[at] = None


class Offer(NamedTuple):
    """A guess at one place. cell: of its chance; place: where its copy goes on in the text, −1 without one."""

    token: int
    cell: int
    place: int


class Chances(Counts):
    """P(a guess stands | all before it do), by where it is from: a row, known by how many tokens, the guess's rank and gap there, and by
    how many tokens a copy agrees that says the same; or a copy, by how many tokens agree and whether it is the only guess."""

    COPIES = len(LENGTHS) * WIDTH * (len(GAPS) + 1) * (len(BACKED) + 1)

    def __init__(self) -> None:
        gaps = middles(0.0, GAPS, 2 * GAPS[-1])
        rows = (self._belief(rank, gap) * (1.0 + 0.1 * backed) for _ in LENGTHS for rank in range(WIDTH) for gap in gaps
                for backed in range(len(BACKED) + 1))
        copies = (share * a / (a + 2.0) for a in (1, *AGREEMENTS) for share in (1.0, 0.3))
        super().__init__((min(belief, 0.95) for belief in (*rows, *copies)), MEMORY)

    @staticmethod
    def _belief(rank: int, gap: float) -> float:
        return 0.7 / (1 + math.exp(0.5 - gap)) if rank == 0 else 0.25 * math.exp(-gap) / rank

    @staticmethod
    def row(which: int, rank: int, gap: float, agreement: int) -> int:
        """which: of `LENGTHS`; agreement: 0 where no copy says the same."""
        return ((which * WIDTH + rank) * (len(GAPS) + 1) + bisect(GAPS, gap)) * (len(BACKED) + 1) + bisect(BACKED, agreement)

    @classmethod
    def copy(cls, agreement: int, beside: bool) -> int:
        return cls.COPIES + bisect(AGREEMENTS, agreement) * 2 + beside


@dataclass(slots=True)
class Guessed:
    """What was offered in a round behind a text of `length` tokens: at the root (−1) and behind each node, with the node that an offer
    became."""

    length: int
    offers: dict[int, list[Offer]] = field(default_factory=dict)
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class RecycleState:
    seq: SequenceView
    copies: dict[Ending, int] = field(default_factory=dict)       # where the text went on behind an ending, the last time
    indexed: int = 0
    out: Guessed | None = None


class _View(NamedTuple):
    """What a guess looks at."""

    text: Sequence[int]
    copies: Mapping[Ending, int]
    rows: Mapping[Ending, int]
    sampling: Sampling
    width: int


@dataclass(slots=True)
class _Keys:
    """The keys of the shared noise of the tokens that come next, made as guesses get there: on the host, where they are read. The engine's
    lie on the target's device, and a look would wait for it."""

    seq: SequenceView
    made: list[Key] = field(default_factory=list)

    def of(self, level: int) -> Key:
        while level >= len(self.made):
            self.made.append(key(self.seq.seed, self.seq.sample, "text", len(self.seq.tokens) + len(self.made)))
        return self.made[level]


class RecycleDrafter(NoOptions):
    """Guesses from remembered rows of the target's, else copies; point masses (no law). Chains follow the best guess, trees grow best
    first, by chances that are counted; where rows have prices, only as far as guesses are worth theirs. A tenant's rows serve that tenant
    only. The options of a request that change logits one by one (bias, penalties) are not looked at.
    score: estimated probability that the node stands.
    Under `ratio` and `block` a request that repeats the seed of one that left rows is no independent draw any more, as with `suffix`.
    """

    name = "recycle"
    needs = Needs(tree=True, prices=True, likely=KEPT)
    keys: ClassVar[Mapping[str, tuple[int, int]]] = {"rows": (1, 10_000_000)}
    takes_path: ClassVar[bool] = False

    def __init__(self, rows: int = 100_000) -> None:
        """rows: how many of the target's rows are remembered, about a kilobyte each."""
        self.rows, self.chances = Rows(rows), Chances()
        self._nothing = Draft.empty(self.name, "nothing is known of the last token")
        self._unworthy = Draft.empty(self.name, "no guess is worth its row")

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(**options)

    def open(self, seq: SequenceView, signals: Signals | None) -> RecycleState:
        return RecycleState(seq)

    def close(self, state: RecycleState) -> None:
        """Rows stay; they are the drafter's."""

    def propose(self, states: Sequence[RecycleState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        return [self._guess(state, budget) if budget.depth else Draft.empty(self.name)
                for state, budget in zip(states, budgets, strict=True)]

    def _guess(self, state: RecycleState, budget: Budget) -> Draft:
        text, seq = state.seq.tokens, state.seq
        _index(state, text)
        keys = _Keys(seq) if shares_noise(seq.rule) and not seq.sampling.greedy else None
        tokens, parents, chances = self._grow(state, text, budget, keys)
        if not tokens:
            return self._unworthy if state.out and state.out.offers[-1] else self._nothing
        kept = affordable(chances, budget.prices, 0)
        if not kept:
            return self._unworthy
        ids, score = np.array(tokens[:kept]), torch.from_numpy(np.array(chances[:kept], np.float32))        # sooner than torch.tensor
        return Draft(torch.from_numpy(ids), tuple(parents[:kept]), score=score, drafter=self.name)

    def _grow(self, state: RecycleState, text: Sequence[int], budget: Budget,
              keys: _Keys | None) -> tuple[list[int], list[int], list[float]]:
        """Nodes, the likeliest first, which puts parents before children: their tokens, parents and chances."""
        state.out = out = Guessed(len(text))
        view = _View(text, state.copies, self.rows.of(state.seq.tenant), state.seq.sampling, WIDTH if budget.nodes > budget.depth else 1)
        floors, greedy = floors_of(budget.prices), state.seq.sampling.greedy
        heap: list[tuple[float, int, int, int, Offer, Ending, int]] = []
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        order = count()

        def offer(node: int, level: int, chance: float, before: Ending, place: int, agreement: int) -> None:
            out.offers[node] = self._offers(view, before, place, agreement, None if keys is None else keys.of(level))
            for one in out.offers[node]:
                stands = chance * self.chances.of(greedy, one.cell)
                if stands >= LEAST:
                    heapq.heappush(heap, (-stands, next(order), node, level, one, before, agreement))

        tail = tuple(text[-LENGTHS[0]:])
        place, known = _found(state.copies, tail)
        offer(-1, 0, 1.0, tail, place, agreed(text, place) if known else 0)
        while heap and len(tokens) < budget.nodes:
            less, _, parent, level, one, before, agreement = heapq.heappop(heap)
            if floors and -less <= floors[len(tokens)]:
                break
            node = out.nodes[parent, one.token] = len(tokens)
            tokens.append(one.token)
            parents.append(parent)
            chances.append(-less)
            if level + 1 < budget.depth:
                behind = (*before, one.token)[-LENGTHS[0]:]
                place, known = (one.place, 0) if 0 <= one.place < len(text) else _found(state.copies, behind)
                offer(node, level + 1, -less, behind, place, agreement + 1 if one.place >= 0 else known)
        return tokens, parents, chances

    def _offers(self, view: _View, before: Ending, place: int, agreement: int, key: Key | None) -> list[Offer]:
        """What may stand behind an ending. place: where a copy would go on, −1 without one; so many tokens agree in front of it."""
        copied = view.text[place] if place >= 0 else -1
        found: list[Offer] = []
        for which, length in enumerate(LENGTHS):
            at = view.rows.get(before[-length:]) if length <= len(before) else None
            if at is None and agreement >= length:
                break                                            # a copy knows more of what came before
            if at is not None:
                tokens, values = _perturbed(*self.rows[at], view.sampling, key)
                for rank, (token, value) in enumerate(zip(tokens[:view.width], values, strict=False)):
                    gap = values[0] - (value if rank else values[1])
                    same = token == copied
                    found.append(Offer(token, Chances.row(which, rank, gap, agreement if same else 0), place + 1 if same else -1))
                break
        if place >= 0 and (not found or view.width > 1) and all(one.token != copied for one in found):
            found.append(Offer(copied, Chances.copy(agreement, bool(found)), place + 1))
        return found

    def observe(self, states: Sequence[RecycleState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit, signal in zip(states, commits, signals, strict=True):
            self._learn(state, commit)
            likely = None if signal is None else signal.likely
            if likely is not None:
                texts = [tuple(state.seq.tokens[max(0, commit.start - LENGTHS[0]):commit.start])]
                for token, parent in zip(likely.nodes, likely.parents, strict=True):
                    texts.append((*texts[parent + 1], token)[-LENGTHS[0]:])
                self.rows.add(state.seq.tenant, texts, likely.tokens, likely.logits)

    def _learn(self, state: RecycleState, commit: Commit) -> None:
        """Count which offers the text went on with."""
        out, state.out = state.out, None
        if out is None or commit.start != out.length:
            return
        node, greedy = -1, state.seq.sampling.greedy
        for chosen in commit.tokens:
            offers = out.offers.get(node)
            if offers is None:
                return
            for one in offers:
                self.chances.learn(greedy, one.cell, one.token == chosen)
            following = out.nodes.get((node, chosen))
            if following is None:
                return
            node = following


def _index(state: RecycleState, text: Sequence[int]) -> None:
    """Where each ending stood last; that of the whole text is no earlier place."""
    copies = state.copies
    for end in range(state.indexed + 1, len(text)):
        for ending in endings(tuple(text[max(0, end - LENGTHS[0]):end])):
            copies[ending] = end
    state.indexed = max(state.indexed, len(text) - 1)


def _found(copies: Mapping[Ending, int], before: Ending) -> tuple[int, int]:
    """Where the longest known part of an ending stood last, and how long it is; (−1, 0) if nowhere."""
    for ending in endings(before):
        place = copies.get(ending)
        if place is not None:
            return place, len(ending)
    return -1, 0


def _perturbed(tokens: list[int], logits: list[float], sampling: Sampling, key: Key | None) -> tuple[list[int], list[float]]:
    """A remembered row as the target would see it now, best first: under the temperature and the filters, with the noise of the place.
    At least one token, and one value more than tokens: what is not among them is out of reach."""
    if not sampling.greedy:
        heat = 1.0 if sampling.temperature is None else max(sampling.temperature, COLD)
        left = _left(logits, heat, sampling)
        values = [value / heat for value in logits[:left]]
        if key is not None and left > 1:
            drawn = sorted(((value + gumbel_of(key, token), token) for value, token in zip(values, tokens, strict=False)), reverse=True)
            values, tokens = [value for value, _ in drawn], [token for _, token in drawn]
        return tokens[:left], [*values, values[-1] - BEYOND]
    left = sum(value > -math.inf for value in logits)
    return tokens[:left], [*logits[:left], logits[left - 1] - BEYOND]


def _left(logits: Sequence[float], heat: float, sampling: Sampling) -> int:
    """How many of a row's likeliest tokens the request's filters leave, the rest of the row counting as nothing, and a draw may reach."""
    shares = [math.exp((value - logits[0]) / heat) for value in logits[:sampling.top_k or None]]
    most = math.inf if sampling.top_p is None else sampling.top_p * sum(shares)
    least, run = max(RARE, sampling.min_p or 0.0), 0.0
    for left, share in enumerate(shares):
        if run >= most or share < least:
            return left
        run += share
    return len(shares)
