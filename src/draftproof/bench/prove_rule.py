"""Level (a), the rule: does the installed build keep the target's law? By enumeration, not by sampling, where that is possible.

Tiny vocabularies, laws that change with the text, drafts of every kind. Every draft and every way its coins can fall is run
through the shipped `odds` and `draw`, and the law of the emitted text is summed exactly over several rounds. Then the
shipped noise is put to χ² tests: alone, and inside the engine, where draft, coin and residual must not know each other.
A check that fails says which part is wrong by comparing it with the textbook formula.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..config import EngineConfig
from ..core import choice, noise, tree, verify
from ..drafters.model import ModelDrafter
from ..engine.engine import Engine
from ..models.fake import TableTarget
from ..types import Draft, DraftLaw, Rule, Sampling
from .statistics import chi2_fit

Text = tuple[int, ...]
Law = dict[Text, float]

EXACT = 1e-10                             # total variation that rounding may leave
ALARM = 1e-6                              # false-alarm rate of each χ² test
VECTORS = {(0, 0, "text", 0, 0): (0x6B5FD45E, 0x78AE5A9A, 0xFE97ADB4), (1, 3, "draft", 7, 2): (0xF36B4032, 0x081A6963, 0x27C41419),
           (2**63 - 1, 1, "residual", 131071, 1): (0xDC7C15D0, 0x6194B84C, 0xBBA263C6)}


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome; `detail` says what was found, in words."""

    name: str
    passed: bool
    detail: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """One possible draft: its probability, and the law that each node was drawn from (None: point masses)."""

    tokens: Text
    parents: tuple[int, ...]
    q: Tensor | None
    weight: float


class World:
    """p(text) and q(text) [V] float64, drawn from a seed for every text; some tokens impossible if `zeros`."""

    def __init__(self, seed: int, vocab: int, zeros: bool) -> None:
        self.vocab = vocab

        @cache
        def law(side: str, text: Text) -> Tensor:
            source = random.Random(f"{seed}{side}{text}")
            mass = [source.expovariate(1) ** 2 + 1e-3 for _ in range(vocab)]
            if zeros:
                keep = source.randrange(vocab)
                mass = [m if i == keep or source.random() < 0.7 else 0.0 for i, m in enumerate(mass)]
            return torch.tensor(mass, dtype=torch.float64) / sum(mass)

        self.law = law

    def rows(self, side: str, text: Text, plan: Plan | tuple[Text, Sequence[int]]) -> Tensor:
        """The laws at the root and after every node [n+1, V]."""
        tokens, parents = (plan.tokens, plan.parents) if isinstance(plan, Plan) else plan
        paths = [text, *(text + tuple(tokens[i] for i in tree.path(parents, node)) for node in range(len(tokens)))]
        return torch.stack([self.law(side, path) for path in paths])


def sampled(world: World, shape: Sequence[int], text: Text) -> Iterator[Plan]:
    """Every draft that a drafter with law q can draw: shape[d] children per node at depth d, in order, without replacement."""

    def grow(plan: Plan, level: Sequence[tuple[int, Text]], depth: int) -> Iterator[Plan]:
        if depth == len(shape):
            yield plan
            return
        families = [list(itertools.permutations([x for x in range(world.vocab) if world.law("q", at)[x] > 0],
                                                min(shape[depth], int((world.law("q", at) > 0).sum())))) for _, at in level]
        for chosen in itertools.product(*families):
            tokens, parents, weight, laws, following = list(plan.tokens), list(plan.parents), plan.weight, [], []
            for (parent, at), kids in zip(level, chosen, strict=True):
                q, left = world.law("q", at), 1.0
                for x in kids:
                    weight *= float(q[x]) / left
                    left -= float(q[x])
                    following.append((len(tokens), (*at, x)))
                    tokens.append(x)
                    parents.append(parent)
                    laws.append(q)
            assert plan.q is not None
            yield from grow(Plan(tuple(tokens), tuple(parents), torch.cat((plan.q, torch.stack(laws))), weight), following, depth + 1)

    yield from grow(Plan((), (), torch.zeros(0, world.vocab, dtype=torch.float64), 1.0), [(-1, text)], 0)


def guessed(world: World, shape: Sequence[int], text: Text) -> Iterator[Plan]:
    """The one draft of a drafter that guesses: its likeliest tokens, point masses."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [(-1, text)]
    for width in shape:
        following = []
        for parent, at in level:
            for x in world.law("q", at).argsort(descending=True, stable=True)[:width].tolist():
                following.append((len(tokens), (*at, x)))
                tokens.append(x)
                parents.append(parent)
        level = following
    yield Plan(tuple(tokens), tuple(parents), None, 1.0)


def outcomes(rule: Rule, p: Tensor, plan: Plan) -> Iterator[tuple[Text, float, Tensor]]:
    """(accepted tokens, probability, law of the next token) of every way the coins can fall, by the shipped odds and draw."""
    chain = plan.parents == tuple(range(-1, len(plan.tokens) - 1))
    if rule == "block":
        odds = verify.block_odds(p, plan.q, plan.tokens)
    else:
        odds = verify.ratio_odds(p, plan.q, plan.tokens) if chain else tree.tree_odds(p, plan.q, plan.tokens, plan.parents)
    chances = odds.accept.tolist()
    for falls in itertools.product((True, False), repeat=len(chances)):
        weight = 1.0
        for low, chance in zip(falls, chances, strict=True):
            weight *= chance if low else 1 - chance
        if weight <= 0:
            continue
        coins = torch.tensor([chance / 2 if low else (1 + chance) / 2 for low, chance in zip(falls, chances, strict=True)],
                             dtype=torch.float64)
        if rule == "block":
            verdict = verify.block_draw(odds, coins, None)
        else:
            verdict = verify.ratio_draw(odds, coins, None) if chain else tree.tree_draw(odds, plan.parents, coins, None)
        row = verdict.accepted[-1] + 1 if verdict.accepted else 0
        yield tuple(plan.tokens[i] for i in verdict.accepted), weight, odds.rest(row)


def emitted_law(world: World, rule: Rule, drafter: Callable[[Text], Iterator[Plan]], length: int) -> Law:
    """The law of the first `length` tokens, round after round."""

    @cache
    def one_round(text: Text) -> list[tuple[Text, float]]:
        law: Law = defaultdict(float)
        for plan in drafter(text):
            for accepted, weight, rest in outcomes(rule, world.rows("p", text, plan), plan):
                for token, chance in enumerate(rest.tolist()):
                    law[(*accepted, token)] += plan.weight * weight * chance
        return [(emitted, chance) for emitted, chance in law.items() if chance > 0]

    whole: Law = defaultdict(float)
    unfinished: Law = {(): 1.0}
    while unfinished:
        following: Law = defaultdict(float)
        for text, weight in unfinished.items():
            for emitted, chance in one_round(text):
                longer = (text + emitted)[:length]
                (whole if len(longer) == length else following)[longer] += weight * chance
        unfinished = following
    return whole


def distance(world: World, rule: Rule, drafter: Callable[[Text], Iterator[Plan]], length: int) -> float:
    """Total variation between what is emitted and the target's own law."""
    own: Law = {(): 1.0}
    for _ in range(length):
        own = {(*text, x): weight * chance for text, weight in own.items() for x, chance in enumerate(world.law("p", text).tolist())}
    found = emitted_law(world, rule, drafter, length)
    return sum(abs(found.get(text, 0.0) - own.get(text, 0.0)) for text in found.keys() | own.keys()) / 2


CASES: tuple[tuple[Rule, str, str, tuple[int, ...], int], ...] = (
    ("ratio", "chains drawn from q", "sampled", (1, 1), 3), ("ratio", "chains of guesses", "guessed", (1, 1), 3),
    ("ratio", "trees drawn from q", "sampled", (2, 1), 2), ("ratio", "trees of guesses", "guessed", (2, 2), 3),
    ("block", "chains drawn from q", "sampled", (1, 1), 3), ("block", "chains of guesses", "guessed", (1, 1, 1), 3),
)


def enumerated() -> Iterator[Check]:
    """A check per rule and kind of draft, over worlds of 2 and 3 tokens, some with impossible tokens."""
    worlds = [World(0, 3, False), World(1, 3, True), World(2, 2, False)]
    for rule, what, kind, shape, length in CASES:
        away, fault = 0.0, ""
        try:
            away = max(distance(world, rule, partial(sampled if kind == "sampled" else guessed, world, shape), length) for world in worlds)
        except Exception as error:                       # a broken rule may break in any way
            fault = f"{type(error).__name__}: {error}"
        passed = not fault and away < EXACT
        words = f"total variation {away:.1e} from the target's law over {length} tokens" if not fault else fault
        yield Check(f"rule {rule}, {what}", passed, words if passed else f"{words}; {diagnose(rule)}")


def diagnose(rule: Rule) -> str:
    """Which part of a joint rule is not the textbook's: odds, residual law, or the walk that coins steer. On one chain of two tokens."""
    world = World(5, 3, False)
    plans = list(sampled(world, (1, 1), ()))
    found = []
    for plan in plans:
        p, q = world.rows("p", (), plan), plan.q
        assert q is not None
        odds = verify.block_odds(p, q, plan.tokens) if rule == "block" else verify.ratio_odds(p, q, plan.tokens)
        accept, rest = (_block if rule == "block" else _ratio)(p, q, plan.tokens)
        if not torch.allclose(odds.accept, accept, atol=1e-9):
            found.append(f"the odds are wrong: {[round(x, 4) for x in odds.accept.tolist()]} where the rule says "
                         f"{[round(x, 4) for x in accept.tolist()]}")
        if not all(torch.allclose(odds.rest(row), rest[row], atol=1e-9) for row in range(len(rest))):
            found.append("the residual law after a rejection is wrong: it is not what the draft's law leaves of the target's")
        for coins in ((0.0, 1.0), (1.0, 0.0)):
            thrown = torch.tensor([float(a) / 2 if low == 0 else (1 + float(a)) / 2 for low, a in zip(coins, odds.accept, strict=True)],
                                  dtype=torch.float64)
            draw = verify.block_draw if rule == "block" else verify.ratio_draw
            length = len(draw(odds, thrown, None).accepted)
            wanted = {(0.0, 1.0): 1, (1.0, 0.0): 2 if rule == "block" else 0}[coins]
            if length != wanted and 0 < float(odds.accept.min()) and float(odds.accept.max()) < 1:
                how = "the longest prefix whose coin passes stands" if rule == "block" else "the walk ends at the first coin that fails"
                found.append(f"the draw is wrong: {length} tokens stood where {wanted} should, for {how}")
        if found:
            return found[0]
    return "odds, residual and draw are right on chains of two: the fault is in trees, siblings or point masses"


def _ratio(p: Tensor, q: Tensor, tokens: Text) -> tuple[Tensor, list[Tensor]]:
    """Leviathan et al., arXiv 2211.17192."""
    accept = torch.tensor([min(1.0, float(p[i, x] / q[i, x])) for i, x in enumerate(tokens)], dtype=torch.float64)
    return accept, [_left(p[i], q[i]) for i in range(len(tokens))] + [p[-1]]


def _block(p: Tensor, q: Tensor, tokens: Text) -> tuple[Tensor, list[Tensor]]:
    """Sun et al., arXiv 2403.10444."""
    rho, accept, rest = 1.0, [], [_left(p[0], q[0])]
    for i, x in enumerate(tokens):
        rho = min(1.0, rho * float(p[i, x] / q[i, x]))
        if i + 1 == len(tokens):
            accept.append(rho)
            rest.append(p[-1])
        else:
            mass = float((rho * p[i + 1] - q[i + 1]).clamp_min(0).sum())
            accept.append(mass / (mass + 1 - rho) if mass + 1 - rho > 0 else 1.0)
            rest.append(_left(rho * p[i + 1], q[i + 1], p[i + 1]))
    return torch.tensor(accept, dtype=torch.float64), rest


def _left(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
    rest = (p - q).clamp_min(0)
    return rest / rest.sum() if rest.sum() > 0 else (p if otherwise is None else otherwise)


def matched() -> Check:
    """`match` on every tree of up to three nodes over two tokens, for every way the target can choose."""
    count = 0
    for n in range(4):
        for parents in itertools.product(*(range(-1, i) for i in range(n))):
            for tokens in itertools.product((0, 1), repeat=n):
                for choices in itertools.product((0, 1), repeat=n + 1):
                    count += 1
                    verdict = verify.match(parents, tokens, choices)
                    node, own = -1, []
                    while (child := next((i for i in range(n) if parents[i] == node and tokens[i] == choices[node + 1]), None)) is not None:
                        own.append(child)
                        node = child
                    if verdict.accepted != tuple(own) or verdict.next_token != choices[node + 1]:
                        return Check("rule match", False, f"the walk is wrong: draft {tokens} with parents {parents} and the target's "
                                     f"choices {choices} emit nodes {verdict.accepted} and token {verdict.next_token}; expected nodes "
                                     f"{tuple(own)} and token {choices[node + 1]}")
    return Check("rule match", True, f"the target's own choices on all {count} drafts of up to three tokens")


def coins_at_the_edge() -> Check:
    """A coin of 0 lets nothing of probability 0 pass, and a coin equal to the odds fails."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    odds = verify.ratio_odds(p, torch.full((1, 2), 0.5, dtype=torch.float64), [0])
    passed = verify.ratio_draw(odds, torch.zeros(1, dtype=torch.float64), None).accepted == ()
    return Check("coins at the edge", passed, "a coin of 0 passes no impossible token" if passed
                 else "a coin of 0 lets a token of probability 0 pass: the comparison must be strict")


def noise_vectors() -> Check:
    """By numpy, which draws for few tokens on a processor, and by torch, which does for many and on a device."""
    for words, (k0, k1, first) in VECTORS.items():
        found = noise.key(*words)
        for way, tokens in (("few", 1), ("many", noise.FEW + 1)):
            bits = int(noise.bits(noise.key_rows([found], "cpu"), torch.arange(tokens))[0, 0]) & 0xFFFFFFFF
            if (*found, bits) != (k0, k1, first):
                return Check("noise vectors", False, f"the noise of {words} is {(*map(hex, found), hex(bits))} among {way} tokens; "
                             f"expected {(hex(k0), hex(k1), hex(first))}")
    return Check("noise vectors", True, f"{len(VECTORS)} published test vectors hold")


def noise_law(draws: int) -> Iterator[Check]:
    """argmax(log p + g) draws from p; and the streams do not know each other (pairs of choices are independent)."""
    p = [0.55, 0.25, 0.15, 0.05]
    logp = torch.tensor(p, dtype=torch.float64).log().float().expand(draws, -1)
    picks = {stream: choice.choose(logp, noise.key_rows([noise.key(seed, 0, stream, 3, attempt) for seed in range(draws)], "cpu")).tolist()
             for stream, attempt in (("text", 0), ("draft", 1), ("coin", 1), ("residual", 1))}
    again = choice.choose(logp, noise.key_rows([noise.key(seed, 0, "draft", 3, 2) for seed in range(draws)], "cpu")).tolist()
    worst = min((chi2_fit([picks[s].count(x) for x in range(4)], p), s) for s in picks)
    yield Check("noise law", worst[0] > ALARM, f"χ² of {draws} choices per stream against their law: smallest p-value {worst[0]:.1e} "
                f"({worst[1]})")
    pairs = [(a, b, picks[a], picks[b]) for a, b in itertools.combinations(picks, 2)]
    pairs.append(("draft", "draft of the next attempt", picks["draft"], again))
    for a, b, first, second in pairs:
        counts = Counter(zip(first, second, strict=True))
        cells = list(itertools.product(range(4), repeat=2))
        chance = chi2_fit([counts[x, y] for x, y in cells], [p[x] * p[y] for x, y in cells])
        if chance <= ALARM:
            yield Check("noise streams", False, f"the streams {a} and {b} share noise (χ² p-value {chance:.1e}): what a rule has seen "
                        "of one would steer the other")
            return
    yield Check("noise streams", True, f"{len(pairs)} pairs of streams are independent")


def _pair(vocab: int) -> tuple[TableTarget, TableTarget]:
    """Target and drafter that show the faults: of two tokens, contexts where one round's noise steers the next (found by enumeration:
    9 % total variation under `block`); of three, laws that rank the tokens in opposite order."""
    if vocab == 2:
        return TableTarget(2, 2, seed=3, sharpness=1.2), TableTarget(2, 2, seed=54, sharpness=2.0)
    target, small = TableTarget(3, 1), TableTarget(3, 1)
    target.table[:] = torch.tensor([0.02, 0.68, 0.3], dtype=torch.float64).log()
    small.table[:] = torch.tensor([0.5, 0.45, 0.05], dtype=torch.float64).log()
    return target, small


def in_the_engine(rule: Rule, draws: int, vocab: int) -> Check:
    """χ² of the first tokens that the engine emits, drafted by a small model with another law, against the table's law.

    Two tokens show noise that is used again in the next round; three are needed to show residual noise that the draft has seen.
    """
    shown = 4 if vocab == 2 else 3
    target, small = _pair(vocab)
    counts: Counter[Text] = Counter()
    with Engine(target, ModelDrafter(small), 2, rule=rule, config=EngineConfig(max_batch=64, trace="none")) as engine:
        for begin in range(0, draws, 512):
            seeds = range(begin, min(begin + 512, draws))
            options = [Sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=shown + 2) for seed in seeds]
            counts.update(out.token_ids[:shown] for out in engine.generate_batch([[0, 1]] * len(options), options))
    texts = list(itertools.product(range(vocab), repeat=shown))
    law = [math.prod(float(target.law([0, 1, *text[:i]])[token].exp()) for i, token in enumerate(text)) for text in texts]
    chance = chi2_fit([counts[text] for text in texts], law)
    return Check(f"rule {rule} in the engine, {vocab} tokens", chance > ALARM, f"χ² of {draws} texts against the target's law: p-value "
                 f"{chance:.1e}" + ("" if chance > ALARM else f"; {diagnose_engine(rule)}"))


def diagnose_engine(rule: Rule) -> str:
    """The rule may be right and its noise wrong: used twice, or shared between what draws and what judges."""
    if rule != "match" and not all(check.passed for check in enumerated()):
        return "the rule itself is wrong, see the enumeration"
    return ("the rule is right by enumeration, so its noise is not fresh: draft, coin and residual noise must differ by stream and "
            "by attempt")


def judged_joint() -> Check:
    """`joint`, the door that the engine uses, agrees with the odds and draws that were enumerated."""
    source = random.Random(1)
    for rule in ("ratio", "block"):
        for seed in range(80):
            world = World(seed, 3, False)
            plan = source.choice(list(sampled(world, (1, 1) if rule == "block" or seed % 2 else (2,), ())))
            p = world.rows("p", (), plan)
            coins = torch.tensor([source.random(), source.random()], dtype=torch.float64)
            assert plan.q is not None
            row = (0, 0) if plan.parents == (-1, -1) else (0, 1)             # siblings are drawn from one law
            draft = Draft(torch.tensor(plan.tokens), plan.parents, law=DraftLaw(plan.q.log(), row))
            keys = noise.key_rows([noise.key(seed, 0, "residual", row) for row in range(3)], "cpu")
            found = verify.joint(rule, draft, p.log(), coins, keys)
            if rule == "block":
                right = verify.block_draw(verify.block_odds(p, plan.q, plan.tokens), coins, keys)
            else:
                right = tree.tree_draw(tree.tree_odds(p, plan.q, plan.tokens, plan.parents), plan.parents, coins, keys)
            if found != right:
                return Check("joint", False, f"rule {rule}: joint does not judge by the odds and the draw of its rule")
    return Check("joint", True, "the engine's door judges by the enumerated odds and draws")


def prove_rule(draws: int = 4000, note: Callable[[str], None] = lambda _: None) -> list[Check]:
    """All checks of this level, in order."""
    note("rule: enumerating every draft and every coin …")
    found = [matched(), coins_at_the_edge(), *enumerated(), judged_joint(), noise_vectors()]
    note(f"rule: χ² of the shipped noise, {draws} draws a test …")
    found += noise_law(draws)
    rules: tuple[Rule, ...] = ("match", "ratio", "block")
    return found + [in_the_engine(rule, draws, vocab) for rule in rules for vocab in (2, 3)]
