"""Draft trees: their geometry, and recursive rejection along them.

A tree is its `parents`: parents[i] < i is the parent of node i, −1 the root (the last token of the text). A chain is the
tree −1, 0, 1, …, and rule `ratio` on chains is recursive rejection with one child per node, so both share this code.
Rows of p, choices and residuals are counted with the root: row 0 is the root's, row 1+i belongs to node i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DrafterError
from ..types import Role, Verdict
from .choice import choose
from .upload import uploaded


def children(parents: Sequence[int]) -> list[list[int]]:
    """[n+1] lists: children(parents)[0] are the root's children, [1+i] those of node i, in the order they are tried."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        below[parent + 1].append(node)
    return below


def depths(parents: Sequence[int]) -> list[int]:
    """Edges from the root to each node: 1 for the root's children."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def positions(parents: Sequence[int], base: int) -> list[int]:
    """Position of each node in the text, the root being at position `base`: base + depth."""
    return [base + depth for depth in depths(parents)]


def path(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The nodes from below the root down to `node`, itself included; () for the root (−1)."""
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return tuple(reversed(found))


def walk(parents: Sequence[int], passes: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...], Role]:
    """Descend from the root, each time to the first child that passes: (accepted, rejected, role of the next token).

    rejected are the children of the last standing node. One sweep is enough, because parents come before children.
    """
    accepted: list[int] = []
    node = -1
    for child, parent in enumerate(parents):
        if parent == node and passes[child]:
            accepted.append(child)
            node = child
    rejected = tuple(child for child, parent in enumerate(parents) if parent == node)
    role: Role = "plain" if not parents else "correction" if rejected else "bonus"
    return tuple(accepted), rejected, role


@dataclass(frozen=True, slots=True)
class Odds:
    """What a joint rule decides before any coin is thrown.

    accept [n] float64: the coin must be below it. NaN marks a token that its own law excludes.
    rest: row → law [V] float64 of the next token when the walk ends there; made on demand, because a verdict needs one row.
    dtype: of the laws that it was made from; the next token is drawn in no more precision.
    """

    accept: Tensor
    rest: Callable[[int], Tensor]
    dtype: torch.dtype = torch.float64

    @property
    def residual(self) -> Tensor:
        """[n+1, V] float64: the law of the next token at every row."""
        return torch.stack([self.rest(row) for row in range(self.accept.shape[0] + 1)])


class LawRows:
    """Laws [n, V] out of log-probabilities. A verdict reads a number of each row and all of one: they are made as they are asked for."""

    def __init__(self, logp: Tensor) -> None:
        self.logp, self.device, self.dtype = logp, logp.device, logp.dtype

    def __getitem__(self, index: int | tuple[Tensor, Tensor]) -> Tensor:
        return self.logp[index].exp()


def quotient(p: Tensor, q: Tensor) -> Tensor:
    """p/q, NaN where q = 0: such a token cannot have been drawn from q."""
    return torch.where(q > 0, p / q, torch.nan)


def normalised(rest: Tensor, otherwise: Tensor) -> Tensor:
    """Mass `rest` [..., V] ≥ 0 made to sum to one; where there is none, so that no coin leads there, `otherwise`."""
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, otherwise)


def refuse_all(p: Tensor, q: Tensor | None, tokens: Sequence[int], chances: list[Tensor] | None = None) -> Tensor:
    """Judge siblings in order: the law left when all were refused, and, into `chances`, each one's once its elders were.

    p [V], q [V] float64: the law from which they were drawn without replacement, or None for point masses. A sibling that
    comes after all of q's support cannot have been drawn and is refused; that is exact, since it depends on no coin.
    """
    for number, token in enumerate(tokens):
        if q is None:
            if chances is not None:
                chances.append(p[token])
            rest = p.clone()
            rest[token] = 0
        else:
            draft = normalised(q, q)
            if chances is not None:
                chances.append(torch.where(q.sum() > 0, quotient(p[token], draft[token]).clamp_max(1), 0))
            rest = (p - draft).clamp_min_(0)
            if number + 1 < len(tokens):
                q = q.clone()
                q[token] = 0
        p = normalised(rest, p)
    return p


def tree_odds(p: Tensor | LawRows, q: Tensor | None, tokens: Sequence[int], parents: Sequence[int]) -> Odds:
    """Recursive rejection: accept[i] is the chance of node i once its parent stands and its earlier siblings were refused.

    p [n+1, V]: the target's law at every row. q [n, V]: the law from which the children of node i's parent were drawn, in
    order and without replacement (Gumbel-top-k); None: point masses tried in order. Chains: Leviathan et al., arXiv
    2211.17192, and Chen et al., 2302.01318; siblings: Jeon et al., 2402.14160.
    """
    below = children(parents)

    def rest(row: int, chances: list[Tensor] | None = None) -> Tensor:
        kids = below[row]
        law = None if q is None or not kids else q[kids[0]].to(torch.float64)
        return refuse_all(p[row].to(torch.float64), law, [tokens[kid] for kid in kids], chances)

    # A first child needs no leftover law, so that chains are judged without touching the vocabulary.
    rows, ids = (uploaded(list(index), p.device, torch.int64) for index in ((parent + 1 for parent in parents), tokens))
    accept = p[rows, ids].to(torch.float64)
    if q is not None:
        accept = quotient(accept, q.gather(1, ids[:, None])[:, 0].to(torch.float64)).clamp_max(1)
    for row, kids in enumerate(below):
        if len(kids) > 1:
            chances: list[Tensor] = []
            rest(row, chances)
            accept[kids] = torch.stack(chances)
    return Odds(accept, rest, p.dtype)


def passes(odds: Odds, coins: Tensor) -> list[bool]:
    """Which nodes their coins [n] float64 let through; strict, so that a coin of 0 passes nothing of probability 0.

    Raises DrafterError where a drafted token has no probability under the law that the drafter reported.
    """
    thrown, chances = torch.stack((coins.to(odds.accept), odds.accept)).tolist()
    for node, chance in enumerate(chances):
        if math.isnan(chance):
            raise DrafterError(f"draft node {node} has probability 0 under the law reported for it, or a law holds NaN; "
                               "expected tokens drawn from Draft.law: fix the drafter, or let it report no law (point masses)")
    return [coin < chance for coin, chance in zip(thrown, chances, strict=True)]


def draw_next(odds: Odds, row: int, keys: Tensor | None) -> int:
    """The next token from residual row `row`, with the noise of keys [n+1, 2] (residual stream); None at temperature 0."""
    law = odds.rest(row)[None].to(odds.dtype)
    # A logarithm of zeros takes six times as long; what is as unlikely as the least number is out of any noise's reach.
    return int(choose(law.clamp_min(torch.finfo(law.dtype).tiny).log_(), None if keys is None else keys[row : row + 1]))


def tree_draw(odds: Odds, parents: Sequence[int], coins: Tensor, keys: Tensor | None) -> Verdict:
    """Coins [n] float64 in [0, 1) and residual keys [n+1, 2] → verdict. Raises DrafterError, see `passes`."""
    accepted, rejected, role = walk(parents, passes(odds, coins))
    return Verdict(accepted, draw_next(odds, accepted[-1] + 1 if accepted else 0, keys), role, rejected)
