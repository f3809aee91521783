"""Exact enumeration: the law of a text that rounds of speculation emit, by summing over every draft and every coin.

Nothing is sampled here. A *world* is a pair of context-dependent laws on a tiny vocabulary, a *drafter* lists its possible
drafts with their probabilities, a *rule* lists how a verdict can fall. Because tests pass the rule in, a wrong one can be
passed as well, and must be caught.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftproof.core.tree import Odds, children, path, tree_odds
from draftproof.core.verify import block_odds, ratio_odds

Text = tuple[int, ...]
Law = dict[Text, float]


class World:
    """Laws p(text), q(text) [V] float64, drawn anew for every text. `zeros`: some tokens are impossible. `greedy`: p is one-hot."""

    def __init__(self, seed: int, vocab: int, zeros: bool = False, greedy: bool = False) -> None:
        self.vocab = vocab

        @cache
        def p(text: Text) -> Tensor:
            law = random_law(f"{seed} p {text}", vocab, zeros)
            return torch.nn.functional.one_hot(law.argmax(), vocab).to(torch.float64) if greedy else law

        @cache
        def q(text: Text) -> Tensor:
            return random_law(f"{seed} q {text}", vocab, zeros)

        self.p, self.q = p, q


class Fixed(World):
    """The same p and q after every text."""

    def __init__(self, p: Sequence[float], q: Sequence[float]) -> None:
        self.vocab = len(p)
        self.p = lambda text: torch.tensor(p, dtype=torch.float64)
        self.q = lambda text: torch.tensor(q, dtype=torch.float64)


def random_law(seed: str, vocab: int, zeros: bool) -> Tensor:
    source = random.Random(seed)
    mass = [source.gammavariate(0.6, 1) + 1e-3 for _ in range(vocab)]
    if zeros:
        keep = source.randrange(vocab)
        mass = [m if i == keep or source.random() > 0.35 else 0.0 for i, m in enumerate(mass)]
    return torch.tensor(mass, dtype=torch.float64) / sum(mass)


@dataclass(frozen=True)
class Plan:
    """One possible draft and its probability. q [n, V]: the law each node was drawn from, None for point masses."""

    tokens: Text
    parents: tuple[int, ...]
    q: Tensor | None
    weight: float


Drafter = Callable[[World, Text], Iterator[Plan]]
Branch = tuple[Text, float, Tensor]        # accepted tokens, probability, law of the next token
RuleFn = Callable[[Tensor, Plan], list[Branch]]


def sampled_chain(depth: int | Callable[[Text], int]) -> Drafter:
    """Tokens drawn from q one after the other; the depth may depend on the text."""

    def plans(world: World, text: Text) -> Iterator[Plan]:
        n = depth if isinstance(depth, int) else depth(text)
        for tokens in itertools.product(range(world.vocab), repeat=n):
            laws = [world.q(text + tokens[:i]) for i in range(n)]
            weight = 1.0
            for law, token in zip(laws, tokens, strict=True):
                weight *= float(law[token])
            if weight > 0:
                yield Plan(tokens, tuple(range(-1, n - 1)), torch.stack(laws) if n else torch.zeros(0, world.vocab), weight)

    return plans


def one_hot_chain(depth: int) -> Drafter:
    """The likeliest token of q, again and again: a function of the text, so a point mass."""
    return one_hot_tree((1,) * depth)


def one_hot_tree(widths: Sequence[int]) -> Drafter:
    """At depth d the widths[d] likeliest tokens, in that order."""

    def plans(world: World, text: Text) -> Iterator[Plan]:
        tokens, parents = grow(text, widths, lambda t, k: world.q(t).argsort(descending=True, stable=True)[:k].tolist())
        yield Plan(tuple(tokens), tuple(parents), None, 1.0)

    return plans


def grow(text: Text, widths: Sequence[int], pick: Callable[[Text, int], list[int]]) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    level = [(-1, text)]
    for width in widths:
        following = []
        for parent, at in level:
            for token in pick(at, width):
                following.append((len(tokens), (*at, token)))
                tokens.append(token)
                parents.append(parent)
        level = following
    return tokens, parents


def sampled_tree(widths: Sequence[int]) -> Drafter:
    """Every node's children drawn from q in order and without replacement, as many as widths and q's support allow."""

    def plans(world: World, text: Text) -> Iterator[Plan]:
        def families(at: Text, width: int) -> Iterator[tuple[Text, float]]:
            q = world.q(at).tolist()
            support = [x for x, mass in enumerate(q) if mass > 0]
            for kids in itertools.permutations(support, min(width, len(support))):
                weight, left = 1.0, 1.0
                for x in kids:
                    weight *= q[x] / left
                    left = sum(q[y] for y in support if y not in kids[: kids.index(x) + 1])
                yield kids, weight

        def expand(level: list[tuple[int, Text]], plan: Plan, rest: Sequence[int]) -> Iterator[Plan]:
            if not rest:
                yield plan
                return
            for grown in itertools.product(*(families(at, rest[0]) for _, at in level)):
                tokens, parents, weight, rows, following = list(plan.tokens), list(plan.parents), plan.weight, [], []
                for (parent, at), (kids, chance) in zip(level, grown, strict=True):
                    weight *= chance
                    for x in kids:
                        following.append((len(tokens), (*at, x)))
                        tokens.append(x)
                        parents.append(parent)
                        rows.append(world.q(at))
                assert plan.q is not None
                yield from expand(following, Plan(tuple(tokens), tuple(parents), torch.cat((plan.q, torch.stack(rows))), weight), rest[1:])

        yield from expand([(-1, text)], Plan((), (), torch.zeros(0, world.vocab, dtype=torch.float64), 1.0), widths)

    return plans


def walk_branches(odds: Odds, plan: Plan) -> list[Branch]:
    """How a walk can end: children are judged in order, each with its own coin."""
    accept, below, found = odds.accept.tolist(), children(plan.parents), []

    def visit(node: int, weight: float) -> None:
        for child in below[node + 1]:
            if weight * accept[child] > 0:
                visit(child, weight * accept[child])
            weight *= 1 - accept[child]
        if weight > 0:
            found.append((tuple(plan.tokens[i] for i in path(plan.parents, node)), weight, odds.residual[node + 1]))

    visit(-1, 1.0)
    return found


def scan_branches(odds: Odds, plan: Plan) -> list[Branch]:
    """How a scan for the longest standing prefix can end."""
    found, weight = [], 1.0
    for length in range(len(plan.tokens), -1, -1):
        chance = float(odds.accept[length - 1]) if length else 1.0
        if weight * chance > 0:
            found.append((plan.tokens[:length], weight * chance, odds.residual[length]))
        weight *= 1 - chance
    return found


def ratio(p: Tensor, plan: Plan) -> list[Branch]:
    return walk_branches(ratio_odds(p, plan.q, plan.tokens), plan)


def tree(p: Tensor, plan: Plan) -> list[Branch]:
    return walk_branches(tree_odds(p, plan.q, plan.tokens, plan.parents), plan)


def block(p: Tensor, plan: Plan) -> list[Branch]:
    return scan_branches(block_odds(p, plan.q, plan.tokens), plan)


def rows_of(world: World, text: Text, plan: Plan) -> Tensor:
    """p [n+1, V] at the root and after every node."""
    paths = [()] + [tuple(plan.tokens[j] for j in path(plan.parents, i)) for i in range(len(plan.tokens))]
    return torch.stack([world.p(text + p) for p in paths])


def emitted_law(world: World, drafter: Drafter, rule: RuleFn, length: int) -> Law:
    """The law of the first `length` tokens that round after round emits, beginning with an empty text."""

    @cache
    def round_law(text: Text) -> list[tuple[Text, float]]:
        law: Law = defaultdict(float)
        for plan in drafter(world, text):
            for accepted, weight, residual in rule(rows_of(world, text, plan), plan):
                for token, chance in enumerate(residual.tolist()):
                    if chance > 0:
                        law[(*accepted, token)] += plan.weight * weight * chance
        return list(law.items())

    texts: Law = defaultdict(float)
    open_texts: Law = {(): 1.0}
    while open_texts:
        grown: Law = defaultdict(float)
        for text, weight in open_texts.items():
            for emitted, chance in round_law(text):
                longer = (text + emitted)[:length]
                (texts if len(longer) == length else grown)[longer] += weight * chance
        open_texts = grown
    return texts


def target_law(world: World, length: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {(*text, x): weight * chance for text, weight in law.items() for x, chance in enumerate(world.p(text).tolist()) if chance > 0}
    return law


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())


def check_lossless(world: World, drafter: Drafter, rule: RuleFn, length: int) -> None:
    """The law of `length` emitted tokens is the target's to 1e-12; several rounds, with rejections between them."""
    away = distance(emitted_law(world, drafter, rule, length), target_law(world, length))
    assert away < 1e-12, f"total variation {away:.2e} from the target's law"


def expected_accepted(world: World, drafter: Drafter, rule: RuleFn) -> float:
    """Mean accepted tokens of the first round."""
    return sum(plan.weight * weight * len(accepted)
               for plan in drafter(world, ()) for accepted, weight, _ in rule(rows_of(world, (), plan), plan))


def reused_noise_law(world: World, rule: RuleFn, depth: int, length: int) -> Law:
    """The law when draft noise is keyed by position alone, so that a token refused in one round lends its noise to the next.

    Two tokens: the noise of a position is one uniform r, the draft is token 1 where r < q(1). The draft is constant between
    neighbouring values of q(1) over all texts that can stand there, so integrating over r is a finite sum.
    """
    assert world.vocab == 2
    first = {text: float(world.q(text)[1]) for t in range(length + depth) for text in itertools.product((0, 1), repeat=t)}

    def cells(position: int) -> list[tuple[float, float]]:
        cuts = sorted({0.0, 1.0, *(cut for text, cut in first.items() if len(text) == position)})
        return [((low + high) / 2, high - low) for low, high in itertools.pairwise(cuts)]

    @cache
    def branches(text: Text, tokens: Text) -> list[tuple[Text, float]]:
        q = torch.stack([world.q(text + tokens[:i]) for i in range(depth)])
        plan = Plan(tokens, tuple(range(-1, depth - 1)), q, 1.0)
        return [((*accepted, x), weight * chance) for accepted, weight, residual in rule(rows_of(world, text, plan), plan)
                for x, chance in enumerate(residual.tolist()) if chance > 0]

    law: Law = defaultdict(float)

    def rounds(text: Text, noise: tuple[float, ...], weight: float) -> None:
        if len(text) >= length:
            law[text[:length]] += weight
        elif len(noise) < len(text) + depth:
            for r, width in cells(len(noise)):
                rounds(text, (*noise, r), weight * width)
        else:
            tokens: Text = ()
            for r in noise[len(text):len(text) + depth]:
                tokens += (int(r < first[text + tokens]),)
            for emitted, chance in branches(text, tokens):
                rounds(text + emitted, noise, weight * chance)

    rounds((), (), 1.0)
    return law
