"""Formulas against closed forms, brute force and published cells."""

from __future__ import annotations

import itertools
import random
from itertools import accumulate

import numpy as np
import pytest
import torch

from draftproof.core.budget import (
    Memory,
    _best_of_many,
    best_batch,
    best_depth,
    break_even,
    distinct_experts,
    expected_tokens,
    expected_tokens_iid,
    match_acceptance,
    memory,
    speedup,
    survival,
)

ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
BEST = {                                   # c: (best depth, speed-up) by alpha, with v = 1 and o = 0
    0.01: ((3, 1.38), (5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49)),
    0.05: ((2, 1.26), (3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)),
    0.10: ((1, 1.18), (2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)),
    0.20: ((1, 1.08), (1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)),
    0.30: ((0, 1.00), (1, 1.15), (1, 1.23), (2, 1.37), (3, 1.55), (5, 1.87)),
}


@pytest.mark.parametrize(("c", "alpha", "cell"), [(c, a, cell) for c, row in BEST.items() for a, cell in zip(ALPHAS, row, strict=True)])
def test_optimal_depths_of_the_iid_model(c, alpha, cell):
    limit = 40
    found, rate = best_depth(survival([alpha] * limit), [k * c for k in range(limit + 1)], [1.0] * (limit + 1))
    assert (found, round(rate, 2)) == cell
    assert rate == pytest.approx(speedup(expected_tokens_iid(alpha, found), found, c))


def test_expected_tokens():
    assert expected_tokens([]) == 1
    assert expected_tokens([0.5, 0.8]) == pytest.approx(1 + 0.5 + 0.4)
    assert expected_tokens_iid(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert expected_tokens_iid(1.0, 5) == 6
    # convexity: a mixture of requests emits more than one request of the mean acceptance
    assert (expected_tokens_iid(0.2, 4) + expected_tokens_iid(0.8, 4)) / 2 > expected_tokens_iid(0.5, 4)


@pytest.mark.parametrize(("experts", "chosen", "rows"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 2, 5), (4, 3, 4), (3, 3, 2), (6, 2, 0)])
def test_distinct_experts_by_enumeration(experts, chosen, rows):
    """Over every choice that so many rows can make; and in groups of which each row chooses one first, as DeepSeek's do."""
    choices = [*itertools.product(itertools.combinations(range(experts), chosen), repeat=rows)]
    mean = sum(len(set().union(*each)) for each in choices) / len(choices)
    assert distinct_experts(experts, chosen, rows) == pytest.approx(mean, rel=1e-12, abs=1e-12)
    if experts % 2 == 0 and chosen <= experts // 2:
        groups = range(experts // 2), range(experts // 2, experts)
        choices = [*itertools.product([one for group in groups for one in itertools.combinations(group, chosen)], repeat=rows)]
        mean = sum(len(set().union(*each)) for each in choices) / len(choices)
        assert distinct_experts(experts, chosen, rows) == pytest.approx(mean, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_unequal_experts_are_fewer(seed):
    """A router that prefers some experts: its rows, independent as before, read no more than those of an even one."""
    experts, rows = 5, 4
    dice = random.Random(seed)
    weights = [dice.random() ** 2 for _ in range(experts)]
    choices = [*itertools.combinations(range(experts), 2)]
    chance = [weights[a] * weights[b] for a, b in choices]
    included = [sum(c for c, one in zip(chance, choices, strict=True) if expert in one) / sum(chance) for expert in range(experts)]
    assert sum(1 - (1 - p) ** rows for p in included) < distinct_experts(experts, 2, rows)
    assert np.array_equal(distinct_experts(experts, 2, np.arange(4.0)), [distinct_experts(experts, 2, n) for n in range(4)])


def test_break_even():
    assert break_even(1, c=0.2) == pytest.approx(0.2)                          # α > c, Corollary 3.9
    assert break_even(1, c=0.2, v=1.3, o=0.05) == pytest.approx(0.55)          # α > c + (v − 1) + o
    first = next(a / 1e4 for a in range(10**4) if expected_tokens_iid(a / 1e4, 4) > 1.6)
    assert break_even(4, c=0.1, v=1.2) == pytest.approx(first, abs=1e-4)
    assert break_even(2, c=0.0) == 0
    assert break_even(1, c=1.5) is None
    assert speedup(1.8, depth=2, c=0.1, v=1.1, o=0.1) == pytest.approx(1.8 / 1.4)


def test_best_depth_counts_every_cost():
    alike = survival([0.9] * 4)
    assert best_depth(alike, [0, 0, 0, 0, 0], [1, 1, 1, 1, 1])[0] == 4
    assert best_depth(alike, [0, 0, 0, 0, 0], [1, 1, 1, 9, 9])[0] == 2          # the third row falls off a step of the pass
    assert best_depth(alike, [0, 1, 1, 1, 1], [1, 1, 1, 1, 1])[0] == 4          # a drafter that guesses in one pass
    assert best_depth(alike, [0, 0, 0, 0, 0], [1] * 5, overhead=5)[0] == 0      # overhead burdens drafting rounds only
    assert best_depth(alike, [0, 0, 0], [1] * 5)[0] == 2                        # the shortest table is the limit
    assert best_depth([], [0], [0.5]) == (0, 2.0)
    assert best_depth([0.0, 0.0], [0, 0, 0], [1, 1, 1])[0] == 0                 # of equal rates the least depth


def test_best_depth_is_the_marginal_rule():
    """With convex costs, drafting on while a token's survival beats what its time buys at the best rate ends at the best depth."""
    for seed in range(50):
        source = random.Random(seed)
        chances = survival([source.uniform(0.3, 0.95) for _ in range(8)])
        step, row = source.uniform(0.01, 0.3), source.uniform(0.0, 0.1)
        found, rate = best_depth(chances, [k * step for k in range(9)], [1 + k * row for k in range(9)])
        worth = [chance > rate * (step + row) for chance in chances]
        assert worth == [True] * found + [False] * (8 - found)


def batch_rate(depths, chances, drafting, scoring, overhead) -> float:
    tokens = len(depths) + sum(sum(chances[i][:d]) for i, d in enumerate(depths))
    deepest, rows = max(depths), len(depths) + sum(depths)
    return tokens / (drafting[deepest] + scoring[rows - 1] + (overhead if deepest else 0))


def test_best_batch_is_the_best_of_all_plans():
    for seed in range(60):
        source = random.Random(seed)
        chances = [survival([source.uniform(0.2, 0.95) for _ in range(3)]) for _ in range(3)]
        drafting = [0.0, *accumulate([source.uniform(0.05, 0.5) for _ in range(3)], max)]
        scoring = list(accumulate([1 + source.uniform(0, 0.2) * r for r in range(12)], max))
        overhead = source.uniform(0, 0.2)

        depths, found = best_batch(chances, drafting, scoring, overhead)
        plans = itertools.product(range(4), repeat=3)
        best = max(batch_rate(plan, chances, drafting, scoring, overhead) for plan in plans)
        assert found == pytest.approx(best) and batch_rate(depths, chances, drafting, scoring, overhead) == pytest.approx(best)


def test_best_batch_of_one_is_best_depth():
    for seed in range(20):
        source = random.Random(seed)
        chances = survival([source.uniform(0.3, 0.95) for _ in range(6)])
        drafting, scoring = [0.05 * k for k in range(7)], [1 + 0.03 * k for k in range(7)]
        depth, rate = best_depth(chances, drafting, scoring)
        assert best_batch([chances], drafting, scoring) == ([depth], pytest.approx(rate))


@pytest.mark.parametrize("seed", range(200))
def test_one_sequence_is_planned_as_a_batch_of_one(seed):
    """The short way for one sequence against the general one, bit for bit."""
    source = random.Random(seed)
    length = source.randint(0, 12)
    chances = survival([source.uniform(0.2, 1.0) for _ in range(length)])
    shares = source.choice([None, [[source.uniform(0.1, 1.0) for _ in range(length)]]])
    others = source.randint(0, 5)
    drafting = [0.0, *accumulate([source.uniform(0.0, 0.3) for _ in range(source.randint(0, 12))], max)]
    scoring = list(accumulate([1 + source.uniform(0, 0.1) * r for r in range(1 + others + source.randint(0, 12))], max))
    overhead = source.choice([0.0, source.uniform(0, 0.2)])
    assert best_batch([chances], drafting, scoring, overhead, shares, others) == _best_of_many(
        [chances], drafting, scoring, overhead, shares, 1 + others)


def test_best_batch_gives_to_those_who_will_use_it():
    depths, _ = best_batch([[0.9, 0.8, 0.7], [0.1, 0.01, 0.0]], [0, 0.1, 0.2, 0.3], [1 + 0.2 * r for r in range(8)])
    assert depths[0] == 3 and depths[1] == 0
    assert best_batch([[0.9, 0.8], [0.9, 0.8]], [0, 0, 0], [1.0, 1.0])[0] == [0, 0]      # no rows to spare
    assert best_batch([[], []], [0.0], [1.0, 1.5]) == ([0, 0], pytest.approx(2 / 1.5))


def test_acceptance_of_two_laws():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    assert float(match_acceptance(p, p)) == pytest.approx(1)
    assert float(match_acceptance(torch.tensor([1.0, 0]), torch.tensor([0, 1.0]))) == 0
    source = torch.Generator().manual_seed(0)
    p, q = ((torch.randn(30, 7, generator=source, dtype=torch.float64) * 2).softmax(-1) for _ in range(2))
    p[::3, 2], q[::4, 2], q[::5, 4] = 0, 0, 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    found, best = match_acceptance(p, q), torch.minimum(p, q).sum(-1)
    for row in range(30):
        a, b = p[row].tolist(), q[row].tolist()
        by_hand = sum(1 / sum(max(a[y] / a[x], b[y] / b[x]) for y in range(7)) for x in range(7) if a[x] and b[x])
        assert float(found[row]) == pytest.approx(by_hand, abs=1e-12)
    assert (found <= best + 1e-12).all() and (found >= best / (2 - best) - 1e-12).all()      # 1 − TV and (1 − TV)/(1 + TV)


def test_memory():
    kib = 1024
    spent = memory(depth=5, batch=64, context=4096, vocab_size=128_000, weight_bytes=10**9, draft_bytes_per_token=4 * kib,
                   target_bytes_per_token=128 * kib, keeps_law=True)
    assert spent == Memory(10**9, 64 * 4096 * 4 * kib, 64 * 5 * 128 * kib, 64 * 6 * 128_000 * 4, 64 * 5 * 128_000 * 4, spent.kv_tokens_lost)
    assert round(spent.logits / 1e6) == 197 and round(spent.laws / 1e6) == 164
    assert (spent.kv_tokens_lost - 1) * 128 * kib < spent.total <= spent.kv_tokens_lost * 128 * kib
    assert memory(0, 1, 10, 0, 0, 0, 0).total == 0
