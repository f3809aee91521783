"""How the token of one place came about, from a trace of level full: both models' likeliest, the guess, the noise or the coin."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..types import Fate
from .events import NodeRecord, RequestStarted, RoundDone

TINY = 1e-300


class Candidate(NamedTuple):
    """A token of one place, as far as the trace knows it. target and draft: log p + g and log q + g."""

    token: int
    p: float | None
    q: float | None
    g: float
    drafted: bool
    emitted: bool

    @property
    def target(self) -> float | None:
        return _perturbed(self.p, self.g)

    @property
    def draft(self) -> float | None:
        return _perturbed(self.q, self.g)


def _perturbed(chance: float | None, g: float) -> float | None:
    return math.log(chance) + g if chance else None


class Guess(NamedTuple):
    """A guess of one place. limit: what its coin had to be below; None but under `ratio`, and where the trace holds too little of the
    laws, as it does of `block`, whose coins judge prefixes."""

    candidate: Candidate
    fate: Fate
    coin: float | None
    limit: float | None


class Judgement(NamedTuple):
    """Candidates come likeliest first, guesses in the order in which they were judged. greedy: temperature 0, without noise.

    left: of p under `ratio`, candidate by candidate, where the guesses with a limit were refused; at most that where `at_most` is true,
    for the trace does not tell q there.
    """

    candidates: list[Candidate]
    greedy: bool
    rule: str
    role: str
    guesses: list[Guess]
    left: list[float]

    @property
    def decisive(self) -> Guess | None:
        """The guess that stood, else the first one."""
        return next((one for one in self.guesses if one.fate == "accepted"), self.guesses[0] if self.guesses else None)

    @property
    def at_most(self) -> list[bool]:
        points = all(one.candidate.q is None for one in self.guesses)
        return [not points and one.q is None and left > 0 for one, left in zip(self.candidates, self.left, strict=True)]

    @property
    def guess(self) -> Candidate | None:
        return None if self.decisive is None else self.decisive.candidate

    @property
    def coin(self) -> float | None:
        return None if self.decisive is None else self.decisive.coin


def judgement(request: RequestStarted, record: RoundDone, place: int) -> Judgement:
    """The `place`-th token of a round, with all guesses at its place."""
    token, nodes = record.tokens[place], [record.nodes[i] for i in _offers(record)[place]]
    rows: dict[int, dict[str, float | None]] = {}
    for name, listed in (("p", token.alternatives), ("q", token.draft_alternatives)):
        for one in listed:
            rows.setdefault(one.token, {})[name] = one.probability
    rows.setdefault(token.token, {}).setdefault("p", token.p)
    for node in nodes:
        row = rows.setdefault(node.token, {})
        row.setdefault("p", node.p)
        row.setdefault("q", node.q)
    drafted = {node.token for node in nodes}
    greedy = request.sampling.get("temperature") == 0
    noise = dict.fromkeys(rows, 0.0) if greedy else _noise(request, record.position + place, list(rows))
    found = [Candidate(key, row.get("p"), row.get("q"), noise[key], key in drafted, key == token.token) for key, row in rows.items()]
    found.sort(key=lambda one: -(one.p or 0.0))
    limits, left = _refusals(found, nodes) if request.rule == "ratio" else ([None] * len(nodes), {})
    known = {one.token: one for one in found}
    guesses = [Guess(known[node.token], node.fate, node.coin, limit) for node, limit in zip(nodes, limits, strict=True)]
    return Judgement(found, greedy, request.rule, token.role, guesses, [left.get(one.token, 0.0) for one in found])


def _refusals(found: list[Candidate], nodes: list[NodeRecord]) -> tuple[list[float | None], dict[int, float]]:
    """Each guess's limit once those before it were refused, and what these leave of p: `core.tree.refuse_all` over the tokens that the
    trace holds. It ends, with None, where the others could move a limit by a hundredth; point masses need no other."""
    left, law = {one.token: one.p or 0.0 for one in found}, {one.token: one.q or 0.0 for one in found}
    points = all(node.q is None for node in nodes)
    unseen = max(0.0, 1 - sum(left.values())) + (0.0 if points else max(0.0, 1 - sum(law.values())))
    limits, undrawn, sure, mass = list[float | None](), 1.0, True, 1.0
    for node in nodes:
        if not sure:
            limits.append(None)
            continue
        left, unseen = {token: chance / mass for token, chance in left.items()}, unseen / mass
        draft = {node.token: 1.0} if points else {token: chance / undrawn for token, chance in law.items()}
        drawn = draft[node.token]
        limits.append(min(1.0, left[node.token] / drawn) if drawn else 0.0)
        left = {token: max(0.0, chance - draft.get(token, 0.0)) for token, chance in left.items()}
        undrawn, law[node.token] = max(TINY, undrawn - law[node.token]), 0.0
        mass = max(TINY, sum(left.values()) + (unseen if points else 0.0))
        sure = points or unseen <= 0.01 * mass
    return limits, left


def _noise(request: RequestStarted, position: int, tokens: list[int]) -> dict[int, float]:
    """The Gumbel values of stream `text`, which a reader can compute again."""
    import torch

    from ..core.noise import gumbel, key, key_rows

    values = gumbel(key_rows([key(request.seed, request.sample, "text", position)], "cpu"), torch.tensor(tokens))[0]
    return dict(zip(tokens, values.tolist(), strict=True))


def _offers(record: RoundDone) -> list[list[int]]:
    """Per emitted token the nodes that were drafted at its place, along the way that the walk took."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(record.nodes):
        children.setdefault(node.parent, []).append(i)
    at: int | None = -1
    offers: list[list[int]] = []
    for token in record.tokens:
        offers.append([] if at is None else children.get(at, []))
        at = next((i for i in offers[-1] if record.nodes[i].fate == "accepted" and record.nodes[i].token == token.token), None)
    return offers
