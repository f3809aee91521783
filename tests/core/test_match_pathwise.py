"""Rule `match`: whatever is drafted, however deep, the text is the one that plain decoding chooses, token for token."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch

from draftproof.core import noise
from draftproof.core.budget import match_acceptance
from draftproof.core.choice import choose
from draftproof.core.verify import match
from draftproof.types import Verdict


def noisy_choices(seed: int, vocab: int, length: int):
    """The target's choice after a text: argmax of a random law plus one random Gumbel array per position."""
    source = np.random.default_rng(seed)
    gumbel = -np.log(source.exponential(size=(length, vocab)))
    logp = source.normal(scale=1.5, size=(vocab, vocab))      # by last token

    @cache
    def choice(text: tuple[int, ...]) -> int:
        return int((logp[text[-1]] + gumbel[len(text)]).argmax())

    return choice


def any_tree(rng: random.Random, text: tuple[int, ...], vocab: int, choice, room: int):
    """A chain or tree of any form, its tokens random or stolen from the target; siblings may be equal, paths may coincide.

    Its size is decided by everything there is: the target's own next choices, luck, and the text.
    """
    greed = 3 if choice(text) % 2 else 1
    tokens, parents, texts = [], [], [text]
    form, right = rng.random(), rng.random()
    for node in range(rng.randrange(0, 7) * greed):
        parent = node - 1 if form < 0.4 else rng.randrange(-1, node)
        at = texts[parent + 1]
        if len(at) - len(text) >= room:
            break
        token = choice(at) if rng.random() < right else rng.randrange(vocab)
        tokens.append(token)
        parents.append(parent)
        texts.append((*at, token))
    return tokens, parents, texts


def check_pathwise(rule, cases: int, length: int = 14) -> None:
    """Plain decoding and rounds of draft, score and `rule` give the same text, for every noise array."""
    for seed in range(cases):
        rng = random.Random(seed)
        vocab = rng.randrange(2, 7)
        choice = noisy_choices(seed, vocab, length + 20)
        plain: tuple[int, ...] = (0,)
        while len(plain) < length:
            plain += (choice(plain),)
        text: tuple[int, ...] = (0,)
        while len(text) < length:
            tokens, parents, texts = any_tree(rng, text, vocab, choice, room=15)
            verdict: Verdict = rule(parents, tokens, [choice(t) for t in texts])
            above = -1
            for node in verdict.accepted:
                assert parents[node] == above, "the accepted nodes form a path from the root"
                above = node
            text += tuple(tokens[i] for i in verdict.accepted) + (verdict.next_token,)
        assert text[:length] == plain, f"case {seed}: {text[:length]} instead of {plain}"


def test_text_is_plain_decodings():
    check_pathwise(match, cases=10_000)


def test_nothing_that_was_right_is_thrown_away():
    """The walk ends only where no child is the target's choice."""
    for seed in range(300):
        rng = random.Random(seed)
        choice = noisy_choices(seed, 3, 40)
        tokens, parents, texts = any_tree(rng, (0,), 3, choice, room=15)
        verdict = match(parents, tokens, [choice(t) for t in texts])
        last = verdict.accepted[-1] if verdict.accepted else -1
        below = tuple(i for i, parent in enumerate(parents) if parent == last)
        assert all(tokens[i] != verdict.next_token for i in below)
        assert verdict.rejected == below
        assert verdict.role == ("plain" if not tokens else "correction" if below else "bonus")


def test_walk_by_hand():
    assert match((), (), (7,)) == Verdict((), 7, "plain")
    assert match((-1, 0, 1), (4, 5, 6), (4, 5, 6, 9)) == Verdict((0, 1, 2), 9, "bonus")
    assert match((-1, 0, 1), (4, 5, 6), (4, 8, 6, 9)) == Verdict((0,), 8, "correction", (1,))
    # two equal siblings: the first stands, and what hangs below the second is never judged
    assert match((-1, -1, 1, 0), (4, 4, 5, 6), (4, 5, 5, 0, 0)) == Verdict((0,), 5, "correction", (3,))
    # the second child stands; its refused elder sibling is not on the walked path's end, so it is discarded
    assert match((-1, -1, 1), (3, 4, 5), (4, 0, 5, 2)) == Verdict((1, 2), 2, "bonus")


def shared_noise_hits(p: torch.Tensor, q: torch.Tensor, trials: int) -> float:
    keys = noise.shared_rows([(seed, 0) for seed in range(trials)], [9] * trials, "cpu")
    x, y = (choose(law.log().to(torch.float32).expand(trials, -1), keys) for law in (q, p))
    return float((x == y).double().mean())


def test_shared_noise_meets_as_often_as_the_formula_says():
    """Σ_x 1/Σ_y max(p_y/p_x, q_y/q_x), within 4 standard errors: a false alarm in 1 of 16,000 runs per pair, at fixed seeds."""
    source, trials = np.random.default_rng(5), 40_000
    for vocab, concentration in ((2, 1.0), (3, 0.5), (8, 0.4), (40, 0.3)):
        p, q = (torch.from_numpy(source.dirichlet([concentration] * vocab)) for _ in range(2))
        q = 0.5 * p + 0.5 * q
        exact = float(match_acceptance(p, q))
        error = (exact * (1 - exact) / trials) ** 0.5
        assert abs(shared_noise_hits(p, q, trials) - exact) < 4 * error
