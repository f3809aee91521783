"""How the token of one place came about, from a trace of level full: both models' likeliest, the guess, the noise or the coin."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .events import RequestStarted, RoundDone


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


class Judgement(NamedTuple):
    """Candidates come likeliest first. greedy: temperature 0, without noise."""

    candidates: list[Candidate]
    greedy: bool
    rule: str
    role: str
    coin: float | None
    guess: Candidate | None


def judgement(request: RequestStarted, record: RoundDone, place: int) -> Judgement:
    """The `place`-th token of a round. Guesses at the same place are all among the candidates; `guess` and `coin` are the first one's."""
    token, siblings = record.tokens[place], _offers(record)[place]
    rows: dict[int, dict[str, Any]] = {}
    for name, listed in (("p", token.alternatives), ("q", token.draft_alternatives)):
        for one in listed:
            rows.setdefault(one.token, {})[name] = one.probability
    rows.setdefault(token.token, {}).setdefault("p", token.p)
    for i in siblings:
        node = record.nodes[i]
        row = rows.setdefault(node.token, {})
        row.setdefault("p", node.p)
        row.setdefault("q", node.q)
        row["node"] = node
    greedy = request.sampling.get("temperature") == 0
    noise = dict.fromkeys(rows, 0.0) if greedy else _noise(request, record.position + place, list(rows))
    found = [Candidate(key, row.get("p"), row.get("q"), noise[key], "node" in row, key == token.token) for key, row in rows.items()]
    found.sort(key=lambda one: -(one.p or 0.0))
    first = record.nodes[siblings[0]] if siblings else None
    guess = next((one for one in found if first is not None and one.token == first.token), None)
    return Judgement(found, greedy, request.rule, token.role, None if first is None else first.coin, guess)


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
