"""How many rounds sampled drafts would have taken on a text whose noise nobody kept, between bounds, from logged log-probabilities.

Under `match` a drafter with law q guesses argmax(log q + g) with the noise g by which the target chose y = argmax(log p + g).
Both are x with probability 1 / Σ_z max(p_z/p_x, q_z/q_x) (docs/design.md, section 4), and the target's choice is x with
probability p_x. So, given that the text says x, the guess stands with probability

    a = 1 / Σ_z max(p_z, p_x q_z / q_x)

independently of every other position, whose noise is another. A log has p for some tokens S only, x among them. Let s_z = p_z^(1/T)
at temperature T (unnormalised; r = s_x / q_x), S₀ = Σ_S s, B = Σ_S max(s, r q), Q = Σ_{z∉S} q_z, and W = Σ_{z∉S} s_z of the tokens
that the log does not name, each s_z ≤ c. Normalising cancels:

    a = (S₀ + W) / (B + Σ_{z∉S} max(s_z, r q_z)),   and   r Q + max(0, W − F) ≤ Σ_{z∉S} max(s_z, r q_z) ≤ r Q + W

with F = Σ_{z∉S} min(c, r q_z): max(s, rq) = rq + (s − rq)⁺, the excess is at most W, and at least what is left of W once every token
has taken what fits under its r q_z and under c. Both ends grow with W, because B + r Q ≥ S₀, so W's own bounds give a's. At T = 1
W is the mass that is missing, m = 1 − S₀. Otherwise N unnamed tokens of mass m and at most p̂ each have, by convexity of s(p) = p^(1/T),
W between N (m/N)^(1/T) (spread evenly) and m p̂^(1/T − 1) (as few as can be), the two changing sides at T = 1. Where top-k, top-p or
min-p leave only named tokens, W = 0; where the log does not show what they leave, a is only known to be in [0, 1].

Expected rounds: from a round that begins at `at` with room for J guesses, N(at) = 1 + w₀, w_j = (1 − a_j) N(at + j + 1) + a_j w_{j+1},
w_J = N(at + J + 1). Every a stands in one term of one equation, so the bounds of N follow by taking, backwards, whichever end is worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from ..drafters.base import Drafter
from ..types import Budget, Commit, Draft, DraftLaw, Sampling
from .logprobs import Seen
from .replay import Reading, States, Story, TextNoise, opened

Chance = tuple[float, float]
"""Bounds of the probability that a sampled guess is the text's token."""

ANY: Chance = (0.0, 1.0)
NEVER: Chance = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Named:
    """The tokens of one place whose s is known: x is the first. low, high: bounds of W, and cap of each unnamed s."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    low: float
    high: float
    cap: float


def named(seen: Seen, sampling: Sampling, vocab_size: int) -> Named | None:
    """What a place says of the target's law under these options; None where it does not say what the filters leave."""
    power = 1 / (sampling.temperature or 1.0)
    mass = max(0.0, 1 - math.fsum(map(math.exp, seen.logprobs.values())))
    others = [logprob for token, logprob in seen.logprobs.items() if token != seen.token]
    # Whoever is not named is not likelier than the last of the likeliest; the chosen token may stand behind them, and says nothing.
    highest = math.exp(max(seen.nameless) if seen.nameless else min(others, default=0.0))
    low, high = _unnamed(mass, highest, vocab_size - len(seen.logprobs), power)
    highest = highest if high else 0.0
    weights = {token: math.exp(logprob * power) for token, logprob in sorted(seen.logprobs.items(), key=lambda pair: -pair[1])}
    left = _filtered(weights, sampling, (low, high), highest ** power)
    if left is None or seen.token not in left[0]:
        return None
    weights, (low, high) = left
    rest = [token for token in weights if token != seen.token]
    return Named((seen.token, *rest), (weights[seen.token], *(weights[token] for token in rest)), low, high, highest ** power)


def _unnamed(mass: float, most: float, count: int, power: float) -> tuple[float, float]:
    """Bounds of Σ p^power over `count` tokens of this mass, of which none has more than `most`."""
    if count < 1 or not mass:
        return 0.0, 0.0
    most = min(mass, max(most, mass / count))               # logged figures are rounded
    even, few = count * (mass / count) ** power, mass * most ** (power - 1)
    return (even, few) if power >= 1 else (few, even)


def _filtered(weights: dict[int, float], sampling: Sampling, unnamed: tuple[float, float],
              cap: float) -> tuple[dict[int, float], tuple[float, float]] | None:
    """The named tokens, likeliest first, and the bounds of the others, after top-k, top-p and min-p; None where that is not known."""
    first = list(takewhile(lambda token: weights[token] >= cap, weights))       # these are the likeliest of all
    if sampling.top_k:
        if len(first) < sampling.top_k:
            return None
        weights, unnamed = {token: weights[token] for token in first[:sampling.top_k]}, (0.0, 0.0)
        first = list(weights)
    if sampling.top_p is not None and sampling.top_p < 1:
        total, sums = math.fsum(weights.values()), list(accumulate(weights[token] for token in first))
        ends = {next((n for n, part in enumerate(sums, 1) if part >= sampling.top_p * (total + rest)), None) for rest in unnamed}
        if len(ends) > 1 or None in ends:
            return None
        weights, unnamed = {token: weights[token] for token in first[:ends.pop()]}, (0.0, 0.0)
    if sampling.min_p:
        least = sampling.min_p * max(weights.values())
        if unnamed[1] and (not first or cap >= least):
            return None
        weights, unnamed = {token: weight for token, weight in weights.items() if weight >= least}, (0.0, 0.0)
    return weights, unnamed


def chance(place: Named, q: Tensor) -> Chance:
    """Bounds of a. q [V] float64 over the target's ids."""
    weights, mine = torch.tensor(place.weights, dtype=torch.float64), q[list(place.tokens)]
    if not mine[0]:
        return NEVER
    scale = float(weights[0] / mine[0])
    total, named_part = float(weights.sum()), float(torch.maximum(weights, scale * mine).sum())
    drafted = scale * max(0.0, float(q.sum() - mine.sum()))
    fits = float((scale * q).clamp_max(place.cap).sum() - (scale * mine).clamp_max(place.cap).sum()) if place.high else 0.0
    low = (total + place.low) / (named_part + drafted + place.low)
    high = (total + place.high) / (named_part + drafted + max(0.0, place.high - max(0.0, fits)))
    return min(1.0, low), min(1.0, high)


def chances(drafter: Drafter, stories: Sequence[Story], seen: Sequence[Sequence[Seen]], vocab_size: int, *, batch: int = 8,
            states: States | None = None, device: torch.device | None = None) -> list[list[Chance]]:
    """Per story and token of its answer after the first: bounds of the probability that the drafter's first guess there is right.

    The drafter reads the texts token by token, through its own protocol, and says the law that it draws from.
    """
    noise = TextNoise(device or torch.device("cpu"), keep_law=True)
    found: list[list[Chance]] = [[] for _ in stories]
    waiting = [(i, Reading(f"law-{i}", story, story.tenant, [*story.prompt, story.answer[0]])) for i, story in enumerate(stories)]
    waiting.reverse()
    live: list[tuple[int, Reading]] = []
    with torch.inference_mode():
        while live or waiting:
            while waiting and len(live) < batch:
                i, reading = waiting.pop()
                live.append((i, opened(drafter, reading, states)))
            for _, reading in live:
                if not reading.left and reading.state is not None:
                    drafter.close(reading.state)
            live = [(i, reading) for i, reading in live if reading.left]
            for (i, reading), draft in zip(live, _guesses(drafter, [reading for _, reading in live], noise), strict=True):
                place = named(seen[i][len(found[i]) + 1], reading.story.sampling, vocab_size)
                found[i].append(_stands(draft, reading.left[0], place, vocab_size))
            _go_on(drafter, [reading for _, reading in live])
    return found


def _guesses(drafter: Drafter, live: Sequence[Reading], noise: TextNoise) -> list[Draft]:
    longest = drafter.needs.context
    able = [reading for reading in live if longest is None or len(reading.tokens) < longest]
    for reading in able:
        if reading.state is None:
            reading.state = drafter.open(reading, None)
    drafts = iter(drafter.propose([reading.state for reading in able], [Budget(1, 1, drafter.name, "audition")] * len(able), noise))
    return [next(drafts) if reading in able else Draft.empty(drafter.name) for reading in live]


def _go_on(drafter: Drafter, live: Sequence[Reading]) -> None:
    """Every text says its next token."""
    commits, signals = [], []
    for reading in live:
        start, token = len(reading.tokens), reading.left[0]
        reading.tokens.append(token)
        commits.append(Commit(start, (token,), ("correction",), ()))
        signals.append(reading.signals(start - 1, start))
    here = [i for i, reading in enumerate(live) if reading.state is not None]
    drafter.observe([live[i].state for i in here], [commits[i] for i in here], [signals[i] for i in here])


def _stands(draft: Draft, token: int, place: Named | None, vocab_size: int) -> Chance:
    if not len(draft):
        return NEVER
    if draft.law is None:                                   # a point mass: the noise has no say
        return (1.0, 1.0) if int(draft.tokens[0]) == token else NEVER
    return ANY if place is None else chance(place, _whole(draft.law, vocab_size))


def _whole(law: DraftLaw, vocab_size: int) -> Tensor:
    q = law.logq[law.row[0]].double().exp().cpu()
    return q if law.ids is None else torch.zeros(vocab_size, dtype=torch.float64).index_copy_(0, law.ids.cpu(), q)


def expected_rounds(found: Sequence[Chance], depth: int, last: int) -> tuple[float, float]:
    """(fewest, most) rounds that an answer is expected to take at a depth. found: of every token after the first; last: tokens
    that may be emitted, less one: no draft reaches beyond."""
    n = len(found) + 1
    fewest, most = [0.0] * (n + 1), [0.0] * (n + 1)
    for at in range(n - 1, 0, -1):
        room = max(0, min(depth, last - at, n - at))
        for rounds, worse in ((fewest, False), (most, True)):
            ahead = rounds[min(at + room + 1, n)]
            for j in range(room - 1, -1, -1):
                stop = rounds[min(at + j + 1, n)]
                stands = found[at + j - 1][(ahead < stop) != worse]
                ahead = (1 - stands) * stop + stands * ahead
            rounds[at] = 1 + ahead
    return fewest[1], most[1]
