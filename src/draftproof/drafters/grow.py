"""Trees that grow level by level under `match`, and the odds by which their nodes are judged.

A node's candidates are its best tokens by log q + g, the noise being the target's own. What a candidate is worth is judged after
the noise, by its rank, its *gap* to the best of them (the best's own: first minus second) and its *share*, log q: what noise alone has
lifted seldom stands. The chance that it is the target's choice begins as a guess and is counted, online, by these three, from what the
texts became. A path's worth is the product of its chances; the next level extends the worthiest candidates, and at the end the worthiest of
all levels are kept (EAGLE-2's expand and re-rank, arXiv 2406.16858, with these chances in place of q).

    tree = Growth(depths, nodes, greedy, ends, margins, widths)
    front = tree.grow(tokens, values, shares [B, F, K])        None when no deeper node could enter any tree
    … the drafter runs its network on front.tokens [B, W], children of slots front.parents [B, W] of the frontier before …
    drafts = tree.finish(name)

A drafter that can only follow one line grows none, but gives it siblings: the `worthiest`. Where q is kept (`ratio`, `block`),
nothing may be decided after the draw: `evenly` fixes the siblings. spines.py builds the tree of either.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.upload import sent, uploaded
from ..models.heads.compiled import Made, Offered
from ..types import Draft

CANDIDATES = 8          # per node: the 8 best perturbed catch 0.93 of the target's choices at T = 1
SURE = 64.0             # margin of a token that has no rival
GAPS = (0.15, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0, 4.0, 5.5, 8.0)                         # edges of the bins
SHARES = (-6.5, -4.5, -3.0, -2.0, -1.2, -0.7, -0.35, -0.15, -0.05)
FIRST = (0.22, 0.66, -0.82), (1.75, 0.85, -1.63)        # of the guess, for sampled texts and greedy ones
OTHERS = (0.52, -0.52, -0.97, -0.48), (0.59, -0.99, -1.05, -0.44)
PRIOR = 20.0            # observations that the guess at a chance is worth
MEMORY = 4000.0         # observations of a cell after which old ones begin to fade


class Margins:
    """P(the candidate of this rank, gap and share is the target's choice), for sampled texts and for those at temperature 0. Starts
    from a guess, and counts: `learn` once per node that the target has judged."""

    def __init__(self) -> None:
        gaps, shares = middles(0.0, GAPS, 2 * GAPS[-1]), middles(-9.0, SHARES, 0.0)
        shape = 2, CANDIDATES, len(gaps), len(shares)
        hits = [PRIOR * _guess(*cell) for cell in product(range(2), range(CANDIDATES), gaps, shares)]
        # In flat arrays, whose single numbers are read and written in a tenth of the time that numpy's are.
        self._hits, self._seen, self._logs = array("d", hits), array("d", [PRIOR] * len(hits)), array("f", (_log(h / PRIOR) for h in hits))
        self.hits, self.seen = (np.frombuffer(part).reshape(shape) for part in (self._hits, self._seen))
        self._host = Odds(torch.frombuffer(self._logs, dtype=torch.float32).view(shape), torch.tensor(GAPS), torch.tensor(SHARES))
        self._kinds = [self._host._replace(chances=half) for half in self._host.chances]
        self._sent: Odds | None = None

    def table(self, device: torch.device) -> Odds:
        """What `learn` changes in place, on the host; elsewhere a copy, made anew when something was learnt."""
        if device.type == "cpu":
            return self._host
        if self._sent is None or self._sent.chances.device != device:
            self._sent = Odds(*(sent(part, device) for part in self._host))
        return self._sent

    def odds(self, greedy: bool) -> Odds:
        """The half of the table on the host [ranks, gaps, shares] that belongs to greedy texts, or to sampled ones."""
        return self._kinds[greedy]

    def learn(self, greedy: bool, gaps: Sequence[float], shares: Sequence[float], chosen: int | None) -> None:
        """One node: its candidates' gaps and shares, best first, and which of them the target chose, None if none."""
        hits, seen = self._hits, self._seen
        for rank, (gap, share) in enumerate(zip(gaps[:CANDIDATES], shares, strict=False)):
            if gap == math.inf:
                break
            row = (greedy * CANDIDATES + rank) * (len(GAPS) + 1) + bisect_left(GAPS, gap)
            cell = row * (len(SHARES) + 1) + bisect_left(SHARES, share)
            if seen[cell] >= MEMORY:
                hits[cell] /= 2
                seen[cell] /= 2
            seen[cell] += 1
            hits[cell] += rank == chosen
            self._logs[cell] = _log(hits[cell] / seen[cell])
        self._sent = None

    def follow(self, greedy: bool, committed: Sequence[int], levels: Iterable[Offered]) -> None:
        """A text went on with these tokens: learn which candidates of its tree's levels, on the way, were the target's choice."""
        spot = 0
        for token, (tokens, gaps, shares, spots) in zip(committed, levels, strict=False):
            if spot not in spots:
                return
            slot = spots.index(spot)
            rank = tokens[slot].index(token) if token in tokens[slot] else None
            self.learn(greedy, gaps[slot], shares[slot], rank)
            if rank is None:
                return
            spot = slot * len(tokens[slot]) + rank


def _log(chance: float) -> float:
    """What the table says of a chance that was counted."""
    return math.log(min(max(chance, 1e-4), 0.999))


class Odds(NamedTuple):
    """log chances float32 [2, ranks, gaps, shares], of sampled texts and greedy ones, and the edges of the bins of gaps and shares."""

    chances: Tensor
    gaps: Tensor
    shares: Tensor

    def of(self, rows: Tensor, gaps: Tensor, shares: Tensor) -> Tensor:
        """The log chance of each candidate. rows: of the first two dimensions, as one."""
        bins = (torch.bucketize(x.contiguous(), edges) for x, edges in ((gaps, self.gaps), (shares, self.shares)))
        return self.chances.flatten(0, 1)[rows, *bins]


def middles(low: float, edges: Sequence[float], high: float) -> list[float]:
    return [(a + b) / 2 for a, b in zip((low, *edges), (*edges, high), strict=True)]


def _guess(kind: int, rank: int, gap: float, share: float) -> float:
    """Before anything is counted: what a fair head shows, fitted (docs/log.md, 2026-11-25)."""
    gap, rare = min(gap, GAPS[-1]), math.sqrt(-share)
    if rank == 0:
        base, by_gap, by_rare = FIRST[kind]
        odds = base + by_gap * gap + by_rare * rare
    else:
        base, by_gap, by_rare, by_rank = OTHERS[kind]
        odds = base + by_gap * gap + by_rare * rare + by_rank * math.log(rank)
    return 1 / (1 + math.exp(-odds))


@dataclass(frozen=True, slots=True)
class Front:
    """The nodes that the next level extends. tokens [B, W] · parents [B, W]: slot of the frontier before that each one hangs from."""

    tokens: Tensor
    parents: Tensor


@dataclass(slots=True)
class Level:
    """candidates of one level: tokens, gaps, shares, worth (log) [B, F, K]; spots [B, F]: which candidate of the level above a slot is."""

    tokens: Tensor
    gaps: Tensor
    shares: Tensor
    worth: Tensor
    spots: Tensor


class Seen(NamedTuple):
    """A `Level` on the host."""

    tokens: NDArray[Any]
    gaps: NDArray[Any]
    shares: NDArray[Any]
    worth: NDArray[Any]
    spots: NDArray[Any]

    def of(self, i: int) -> Offered:
        """What it offered one sequence."""
        return self.tokens[i].tolist(), self.gaps[i].tolist(), self.shares[i].tolist(), self.spots[i].tolist()


class Company(NamedTuple):
    """What growing reads of its sequences. rows [B, 1, K] of the table of chances · table · widths [B, 1], None if all are one · ends
    [B, 1, 1, E], −1 for none, or None."""

    rows: Tensor
    table: Odds
    widths: Tensor | None
    ends: Tensor | None


@dataclass(slots=True)
class Growth:
    """Trees of B sequences that grow together; no value is read on the host until `finish`, except on a CPU, to stop early.

    depths, nodes, prices [B]: their budgets · greedy [B]: texts at temperature 0 · ends: tokens that end a text, behind which nothing
    grows · widths [B]: how many nodes the next level may extend; a function of the own budget alone, so that company changes nothing ·
    company: what growing reads of all that, if it lies there
    """

    depths: Sequence[int]
    nodes: Sequence[int]
    greedy: Sequence[bool]
    ends: Sequence[frozenset[int]]
    margins: Margins
    widths: Sequence[int]
    prices: Sequence[Sequence[float]] = ()
    levels: list[Level] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)              # the same, once they are read
    company: Company | None = None
    recorded: bool = False              # all levels are grown, whatever they hold
    _reach: Tensor | None = None        # [B, F] log chance that the walk comes to each slot of the frontier
    _spots: Tensor | None = None
    _kept: Tensor | None = None         # [B, n] worth of the best candidates so far, falling

    def grow(self, tokens: Tensor, values: Tensor, shares: Tensor) -> Front | None:
        """Take a level's candidates [B, F, K], their log q + g, −inf for none, best first, and log q; say which to extend, None if no
        further level pays."""
        batch, slots, count = tokens.shape
        device = tokens.device
        if self._reach is None or self._spots is None:
            self._reach, self._spots = values.new_zeros(batch, 1), torch.zeros(batch, 1, dtype=torch.int64, device=device)
        company = self.company = self.company or self._together(count, device)
        gaps = gaps_of(values)
        worth = self._reach[..., None] + company.table.of(company.rows, gaps, shares)
        worth = worth.masked_fill(values == -math.inf, -math.inf)
        self.levels.append(Level(tokens, gaps, shares, worth, self._spots))
        if len(self.levels) >= max(self.depths):
            return None
        open_ = worth                           # but those that end the text
        if company.ends is not None:
            open_ = worth.masked_fill((tokens[..., None] == company.ends).any(-1), -math.inf)
        self._reach, self._spots = _best(open_.view(batch, -1), max(self.widths))
        if company.widths is not None:
            beyond = torch.arange(self._reach.shape[1], device=device) >= company.widths
            self._reach = self._reach.masked_fill(beyond, -math.inf)
        if self._settled(worth):
            return None
        parents = self._spots // count
        return Front(tokens.reshape(batch, -1).gather(1, self._spots), parents)

    def _together(self, count: int, device: torch.device) -> Company:
        """Of so many candidates a node."""
        kinds = uploaded([[[greedy * CANDIDATES]] for greedy in self.greedy], device)
        widths = uploaded(self.widths, device)[:, None] if len(set(self.widths)) > 1 else None
        ends = uploaded(endings(self.ends), device)[:, None, None] if any(self.ends) else None
        return Company(kinds + torch.arange(count, device=device), self.margins.table(device), widths, ends)

    def _settled(self, worth: Tensor) -> bool:
        """Whether every tree already has so many candidates worthier than the whole frontier that none below can enter."""
        if self.recorded or worth.device.type != "cpu":         # where the question would wait for the device
            return False
        assert self._reach is not None
        both = worth.flatten(1) if self._kept is None else torch.cat((self._kept, worth.flatten(1)), 1)
        self._kept = both.topk(min(max(self.nodes), both.shape[1])).values
        last = torch.tensor([n - 1 for n in self.nodes])[:, None]
        if self._kept.shape[1] <= int(last.max()):
            return bool((self._reach[:, 0] == -math.inf).all())
        return bool((self._reach[:, :1] <= self._kept.gather(1, last)).all())

    def finish(self, name: str) -> list[Draft]:
        """The worthiest nodes of each tree, and no more than are worth their rows. score: perturbed margin, as for chains; a
        sibling's is negative. Reads the levels, if nobody has, which waits for the device."""
        self.seen = self.seen or look(self.levels)
        tokens, gaps, worth = (np.concatenate([part.reshape(part.shape[0], -1) for part in parts], 1)
                               for parts in zip(*(level[:2] + level[3:4] for level in self.seen), strict=True))
        starts = [0, *accumulate(level.tokens[0].size for level in self.seen)]
        for i, depth in enumerate(self.depths):
            worth[i, starts[min(depth, len(self.seen))]:] = -math.inf
        order = np.argsort(-worth, axis=1, kind="stable")[:, :max(self.nodes)]
        best = np.take_along_axis(worth, order, 1)
        counts = [min(n, int(room)) for n, room in zip(self.nodes, (best > -math.inf).sum(1), strict=True)]
        if any(self.prices):
            chances = [[math.exp(value) for value in row] for row in best.tolist()]
            counts = [affordable(row[:n], prices) for row, n, prices in zip(chances, counts, self.prices, strict=True)]
        return [self._draft(i, np.sort(order[i, :n]), starts, tokens[i], gaps[i], name) for i, n in enumerate(counts)]

    def _draft(self, i: int, chosen: NDArray[Any], starts: Sequence[int], tokens: NDArray[Any], gaps: NDArray[Any], name: str) -> Draft:
        """One tree out of candidates numbered over all levels, whose numbers begin at `starts`, in rising order, so that parents come
        first."""
        count, parents, place = self.seen[0].tokens.shape[2], [], dict[int, int]()
        at = 0
        for node, candidate in enumerate(chosen.tolist()):
            while candidate >= starts[at + 1]:
                at += 1
            slot = (candidate - starts[at]) // count
            parents.append(place[starts[at - 1] + int(self.seen[at].spots[i, slot])] if at else -1)
            place[candidate] = node
        score = np.minimum(gaps[chosen], np.float32(SURE)).astype(np.float32)
        score[chosen % count > 0] *= -1                                             # levels begin at multiples of it
        return Draft(torch.from_numpy(tokens[chosen].astype(np.int64)), tuple(parents), score=torch.from_numpy(score), drafter=name)

    def learn(self, i: int, committed: Sequence[int]) -> None:
        """The text of sequence i went on with these tokens: count which candidates on the way were the target's choice."""
        self.margins.follow(self.greedy[i], committed, (level.of(i) for level in self.seen))


def packed(levels: Sequence[Level]) -> Tensor:
    """int32 [B, n]: a sequence's tokens and spots level by level, then its gaps, shares and worth, as their bits."""
    ids = [part.flatten(1).int() for level in levels for part in (level.tokens, level.spots)]
    reals = [part.flatten(1).float() for level in levels for part in (level.gaps, level.shares, level.worth)]
    return torch.cat((*ids, torch.cat(reals, 1).view(torch.int32)), 1)


def unpacked(rows: NDArray[np.int32], slots: Sequence[int], count: int) -> list[Seen]:
    """The levels of so many slots and `count` candidates each that were `packed`."""
    split = sum(slots) * (count + 1)
    ids, reals = rows[:, :split], rows[:, split:].view(np.float32)
    found, a, b = [], 0, 0
    for width in slots:
        size = width * count
        tokens = ids[:, a:a + size].reshape(-1, width, count)
        gaps, shares, worth = reals[:, b:b + 3 * size].reshape(-1, 3, width, count).swapaxes(0, 1)
        found.append(Seen(tokens, gaps, shares, worth, ids[:, a + size:a + size + width]))
        a, b = a + size + width, b + 3 * size
    return found


def look(levels: Sequence[Level]) -> list[Seen]:
    """The levels on the host, in one look."""
    if levels[0].tokens.is_cpu:
        return [Seen(*(part.numpy() for part in (level.tokens, level.gaps, level.shares, level.worth, level.spots))) for level in levels]
    return unpacked(packed(levels).cpu().numpy(), [level.tokens.shape[1] for level in levels], levels[0].tokens.shape[2])


def grown(made: Made, prices: Sequence[float], name: str) -> Draft:
    """What `Growth.finish` makes, of one sequence's tree that grew in the kernels and is ranked."""
    number, above, named, worth, score = made.best()
    kept = affordable([math.exp(value) for value in worth], prices) if prices else len(worth)
    chosen = sorted(range(kept), key=number.__getitem__)                        # parents come first
    place = {-1: -1, **{number[i]: node for node, i in enumerate(chosen)}}
    tokens, scores = array("q", [named[i] for i in chosen]), array("f", [score[i] for i in chosen])
    return Draft(torch.frombuffer(tokens, dtype=torch.int64), tuple(place[above[i]] for i in chosen),
                 score=torch.frombuffer(scores, dtype=torch.float32), drafter=name)


def endings(ends: Sequence[Iterable[int]], least: int = 0) -> list[list[int]]:
    """Tokens that end texts [B, at least so many], −1 for none."""
    rows = [[*own] for own in ends]
    longest = max(least, *map(len, rows))
    return [[*own, *[-1] * (longest - len(own))] for own in rows]


def sight(seen: Tensor, parents: Tensor) -> Tensor:
    """seen [B, slots before, n] → [B, slots, n + slots]: what the parent sees, and oneself."""
    batch, slots = parents.shape
    above = seen.gather(1, parents[..., None].expand(-1, -1, seen.shape[2]))
    return torch.cat((above, torch.eye(slots, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)), 2)


def longer(paths: Sequence[Sequence[tuple[int, ...]]], front: Front) -> list[list[tuple[int, ...]]]:
    """The tokens on the way to every slot of the new frontier, on the host, for options that look back."""
    return [[(*above[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for above, parents, tokens in zip(paths, front.parents.tolist(), front.tokens.tolist(), strict=True)]


def _best(worth: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row and their places; equals in order of place, so that company cannot decide between them."""
    values, places = worth.sort(dim=1, descending=True, stable=True)
    return values[:, :n], places[:, :n]


def affordable(chances: Sequence[float], prices: Sequence[float], at_least: int = 1) -> int:
    """How many of the worthiest nodes to keep: as many as bring most beyond what their rows cost (`Budget.prices`).

    chances: P(the node stands), never rising. As costs may jump, where a kernel takes another form, no number is skipped.
    """
    if not prices:
        return len(chances)
    brought, kept, best = 0.0, min(at_least, len(chances)), 0.0 if not at_least else -math.inf
    for n, (chance, price) in enumerate(zip(chances, prices, strict=False), 1):
        brought += chance
        if n >= kept and brought - price > best:
            kept, best = n, brought - price
    return kept


def evenly(levels: int, spare: int) -> list[int]:
    """Siblings per level where q is kept: fixed before anything is drawn. A sibling withheld because of the value it
    turned out to have would no longer be a draw from q."""
    return [spare // levels + (level < spare % levels) for level in range(levels)]


def worthiest(gaps: Tensor, shares: Tensor, spare: int, greedy: bool, margins: Margins, prices: Sequence[float] = ()) -> list[int]:
    """Siblings per level beside a line of the best, where only the choice matters (`match`, and greedy): those likeliest to be
    the target's choice, each discounted by the chance that the walk gets to its level at all.

    gaps [levels, k]: as `gaps_of` gives them · shares [levels, k]: log q · prices: of 1, 2, … siblings (`Budget.prices`). The answer counts
    them, and a level's come in order of rank.
    """
    ranks = torch.arange(gaps.shape[1], device=gaps.device).clamp(max=CANDIDATES - 1)
    chances = margins.table(gaps.device).of(int(greedy) * CANDIDATES + ranks, gaps, shares)
    reach = chances[:, 0].cumsum(0) - chances[:, 0]
    worth = (reach[:, None] + chances[:, 1:]).masked_fill(gaps[:, 1:] == math.inf, -math.inf).flatten()
    best = worth.sort(descending=True, stable=True)
    kept = affordable(best.values[:spare][best.values[:spare] > -math.inf].exp().tolist(), prices, 0)
    levels = best.indices[:kept] // max(1, gaps.shape[1] - 1)
    counts: list[int] = torch.bincount(levels, minlength=gaps.shape[0]).tolist()
    return counts


def gaps_of(values: Tensor) -> Tensor:
    """How far each candidate [..., K], best first, lies below the best of its node; the best's own: how far above the second.
    inf where there is no candidate."""
    gaps = values[..., :1] - values
    gaps[..., 0] = gaps[..., 1] if values.shape[-1] > 1 else SURE
    return gaps.nan_to_num(nan=math.inf, posinf=math.inf)
