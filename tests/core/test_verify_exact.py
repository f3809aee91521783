"""The joint rules keep the target's law exactly, and their draws follow their odds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from enumerate_law import (
    Fixed,
    Plan,
    World,
    block,
    check_lossless,
    expected_accepted,
    one_hot_chain,
    one_hot_tree,
    random_law,
    ratio,
    rows_of,
    sampled_chain,
    sampled_tree,
    scan_branches,
    tree,
    walk_branches,
)
from scipy.stats import chi2

from draftproof.core import noise
from draftproof.core.tree import LawRows, Odds, draw_next, tree_draw, tree_odds
from draftproof.core.verify import (
    allowed,
    block_draw,
    block_odds,
    dense_law,
    joint,
    ratio_draw,
    ratio_odds,
    shape_of,
)
from draftproof.errors import DrafterError, OptionError
from draftproof.types import Draft, DraftLaw

SHAPES = [(2, 3), (3, 1), (3, 2), (4, 2)]      # vocabulary, depth; texts are two tokens longer than the depth


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize(("vocab", "depth"), SHAPES)
@pytest.mark.parametrize("zeros", [False, True])
def test_sampled_chain_keeps_the_law(rule, vocab, depth, zeros):
    for seed in range(3 if vocab < 4 else 1):
        check_lossless(World(seed, vocab, zeros), sampled_chain(depth), rule, depth + 2)


@pytest.mark.parametrize("rule", [ratio, block])
def test_deep_chain_keeps_the_law(rule):
    check_lossless(World(7, 3), sampled_chain(3), rule, 4)


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (3, 2), (4, 3)])
def test_one_hot_chain_keeps_the_law(rule, vocab, depth):
    for seed in range(3):
        check_lossless(World(seed, vocab, zeros=seed == 2), one_hot_chain(depth), rule, depth + 2)


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize("drafter", [sampled_chain(2), one_hot_chain(2)])
def test_greedy_target_keeps_its_text(rule, drafter):
    for seed in range(3):
        check_lossless(World(seed, 3, greedy=True), drafter, rule, 4)


@pytest.mark.parametrize("rule", [ratio, block])
def test_depth_may_follow_from_the_text(rule):
    for seed in range(3):
        check_lossless(World(seed, 3), sampled_chain(lambda text: (3 * len(text) + sum(text)) % 3), rule, 4)


@pytest.mark.parametrize("widths", [(2,), (3,), (2, 2), (2, 1), (1, 3)])
def test_sampled_tree_keeps_the_law(widths):
    for seed in range(2):
        check_lossless(World(seed, 3, zeros=seed == 1), sampled_tree(widths), tree, 3)


@pytest.mark.parametrize("widths", [(2, 2), (3, 2), (2, 1, 2)])
@pytest.mark.parametrize("greedy", [False, True])
def test_one_hot_tree_keeps_the_law(widths, greedy):
    for seed in range(2):
        check_lossless(World(seed, 3, greedy=greedy), one_hot_tree(widths), tree, 4)


def test_greedy_target_keeps_its_text_on_sampled_trees():
    check_lossless(World(0, 3, greedy=True), sampled_tree((2, 2)), tree, 3)


def test_the_toy_of_the_block_paper():
    toy = Fixed([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    assert expected_accepted(toy, sampled_chain(2), ratio) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(toy, sampled_chain(2), block) == pytest.approx(11 / 9, abs=1e-12)


def test_block_never_accepts_less_than_ratio():
    gains = []
    for seed in range(12):
        world = World(seed, 3, zeros=seed % 2 == 1)
        gains.append(expected_accepted(world, sampled_chain(3), block) - expected_accepted(world, sampled_chain(3), ratio))
    assert min(gains) > -1e-12 and max(gains) > 1e-3


def test_block_is_ratio_on_point_masses_and_at_depth_one():
    for seed in range(6):
        world = World(seed, 4)
        by_block, by_ratio = (expected_accepted(world, one_hot_chain(3), rule) for rule in (block, ratio))
        assert by_block == pytest.approx(by_ratio, abs=1e-12)
        for plan in sampled_chain(1)(world, ()):
            p = rows_of(world, (), plan)
            a, b = ratio_odds(p, plan.q, plan.tokens), block_odds(p, plan.q, plan.tokens)
            torch.testing.assert_close(a.accept, b.accept, atol=1e-14, rtol=0)
            torch.testing.assert_close(a.residual, b.residual, atol=1e-14, rtol=0)


def test_ratio_accepts_one_minus_total_variation():
    for seed in range(6):
        world = World(seed, 4, zeros=True)
        most = float(torch.minimum(world.p(()), world.q(())).sum())
        assert expected_accepted(world, sampled_chain(1), ratio) == pytest.approx(most, abs=1e-12)


def test_more_children_catch_more():
    for seed in range(4):
        world = World(seed, 4)
        caught = [expected_accepted(world, sampled_tree((k,)), tree) for k in (1, 2, 3)]
        assert caught == sorted(caught) and caught[2] > caught[0] + 1e-3


def test_reduced_vocabulary_keeps_the_law():
    ids = torch.tensor([3, 1])

    class Reduced(World):
        def __init__(self, seed: int) -> None:
            super().__init__(seed, 4)
            self.q = lambda text: dense_law(DraftLaw(random_law(f"{seed} small {text}", 2, False).log()[None], (0,), ids), 4)[0]

    for seed in range(3):
        for rule in (ratio, block):
            check_lossless(Reduced(seed), sampled_chain(2), rule, 4)
        check_lossless(Reduced(seed), sampled_tree((2, 1)), tree, 3)


def test_dense_law():
    logq = torch.tensor([[0.25, 0.75], [1.0, 0.0]]).log()
    q = dense_law(DraftLaw(logq, (0, 0, 1), torch.tensor([2, 0])), 4)
    assert q.dtype == torch.float64
    torch.testing.assert_close(q, torch.tensor([[0.75, 0, 0.25, 0], [0.75, 0, 0.25, 0], [0, 0, 1, 0]], dtype=torch.float64))
    assert dense_law(DraftLaw(logq, (1,)), 3).tolist() == [[1.0, 0.0, 0.0]]
    assert dense_law(DraftLaw(logq, (0,), torch.tensor([2, 2])), 3).tolist() == [[0.0, 0.0, 1.0]]      # two draft tokens that mean one
    swapped = dense_law(DraftLaw(logq, (0, 1), torch.tensor([1, 0])), 2)                               # as many, in another order
    torch.testing.assert_close(swapped, torch.tensor([[0.75, 0.25], [0.0, 1.0]], dtype=torch.float64))
    with pytest.raises(DrafterError, match="2 tokens and no id map, the target 1"):
        dense_law(DraftLaw(logq, (0,)), 1)


def test_a_token_outside_its_own_law_is_an_error():
    p, q = torch.full((2, 3), 1 / 3), torch.tensor([[0.5, 0.5, 0.0]])
    for odds, draw in ((ratio_odds(p, q, [2]), ratio_draw), (block_odds(p, q, [2]), block_draw)):
        with pytest.raises(DrafterError, match="node 0 has probability 0"):
            draw(odds, torch.tensor([0.5], dtype=torch.float64), None)


def test_a_child_beyond_the_support_of_q_is_refused_for_free():
    p = torch.tensor([[0.2, 0.3, 0.5]] * 3, dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    odds = tree_odds(p, q, [0, 1], (-1, -1))
    torch.testing.assert_close(odds.accept, torch.tensor([0.2, 0.0], dtype=torch.float64))
    torch.testing.assert_close(odds.residual[0], torch.tensor([0, 0.375, 0.625], dtype=torch.float64))


def test_equal_laws_accept_everything_and_leave_no_nan():
    p = torch.tensor([[0.2, 0.0, 0.8]] * 3, dtype=torch.float64)
    for odds in (ratio_odds(p, p[:2], [2, 0]), block_odds(p, p[:2], [2, 0])):
        assert odds.accept.tolist() == [1.0, 1.0] and not odds.residual.isnan().any()


def test_certain_point_masses_leave_no_nan():
    p = torch.tensor([[0.0, 1.0]] * 3, dtype=torch.float64)
    for odds in (ratio_odds(p, None, [1, 0]), block_odds(p, None, [1, 0])):
        assert not odds.residual.isnan().any() and not odds.accept.isnan().any()


def test_empty_draft_draws_from_p():
    p = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    empty = torch.zeros(0, dtype=torch.float64)
    for odds, draw in ((ratio_odds(p, None, []), ratio_draw), (block_odds(p, None, []), block_draw)):
        verdict = draw(odds, empty, None)
        assert (verdict.accepted, verdict.next_token, verdict.role, verdict.rejected) == ((), 1, "plain", ())


def test_coins_are_compared_strictly():
    """A coin of exactly 0 lets no impossible token through, and one just below 1 stops no certain one."""
    p = torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)
    for odds, draw in ((ratio_odds(p, None, [1]), ratio_draw), (block_odds(p, None, [1]), block_draw)):
        assert draw(odds, torch.zeros(1, dtype=torch.float64), None).accepted == ()
    certain = ratio_odds(p, None, [0])
    assert ratio_draw(certain, torch.tensor([1 - 2.0**-33], dtype=torch.float64), None).role == "bonus"


@pytest.mark.parametrize(("draw", "branches", "odds_of"),
                         [(ratio_draw, walk_branches, ratio_odds), (block_draw, scan_branches, block_odds)])
def test_draw_follows_its_odds_on_a_grid_of_coins(draw, branches, odds_of):
    """Over a grid of coins each ending is as frequent as its odds say, up to the grid's step."""
    steps, world = 40, World(3, 3)
    tokens = (1, 2)
    q = torch.stack([world.q(()), world.q((1,))])
    plan = Plan(tokens, (-1, 0), q, 1.0)
    odds = odds_of(rows_of(world, (), plan), q, tokens)
    grid = [(i + 0.5) / steps for i in range(steps)]
    ends = Counter(len(draw(odds, torch.tensor(coins, dtype=torch.float64), None).accepted) for coins in itertools.product(grid, repeat=2))
    for accepted, weight, _ in branches(odds, plan):
        assert abs(ends[len(accepted)] / steps**2 - weight) <= 2.5 / steps


def test_roles_and_fates_of_a_drawn_tree():
    """Coins given, the walk is read off: the refused are the children of the node where it ended."""
    parents, accept = (-1, -1, 0, 0, 1), torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    odds = Odds(accept, torch.eye(6, dtype=torch.float64).__getitem__)

    def draw(coins: list[float]):
        return tree_draw(odds, parents, torch.tensor(coins, dtype=torch.float64), None)

    hit, miss = 0.1, 0.9
    coins = ([miss, miss, hit, hit, hit], [hit, hit, miss, miss, hit], [hit, hit, miss, hit, hit], [miss, hit, hit, hit, hit])
    ends = [draw(thrown) for thrown in coins]
    assert [v.accepted for v in ends] == [(), (0,), (0, 3), (1, 4)]
    assert [v.rejected for v in ends] == [(0, 1), (2, 3), (), ()]
    assert [v.role for v in ends] == ["correction", "correction", "bonus", "bonus"]
    assert [v.next_token for v in ends] == [0, 1, 4, 5]


def sampled_ends(draw, nodes: int, trials: int) -> Counter:
    """(accepted nodes, next token) of `trials` draws with the shipped noise, one seed each."""
    cpu = torch.device("cpu")
    coins = noise.uniform(noise.key_rows([noise.key(seed, 0, "coin", 5) for seed in range(trials)], cpu), torch.arange(nodes))
    rows = [noise.key_rows([noise.key(seed, 0, "residual", 5 + i) for i in range(nodes + 1)], cpu) for seed in range(trials)]
    verdicts = (draw(coins[seed], rows[seed]) for seed in range(trials))
    return Counter((verdict.accepted, verdict.next_token) for verdict in verdicts)


@pytest.mark.parametrize("rule", ["ratio", "block", "tree"])
def test_draw_with_shipped_noise_follows_its_odds(rule):
    """χ² over (what stood, next token), threshold at a false-alarm rate of 1e-6; the seeds are fixed."""
    trials, world = 3000, World(11, 3)
    drafter = sampled_tree((2, 2)) if rule == "tree" else sampled_chain(3)
    plan = next(plan for plan in drafter(world, ()) if len(set(plan.tokens[:3])) > 1)
    p = rows_of(world, (), plan)
    odds = block_odds(p, plan.q, plan.tokens) if rule == "block" else tree_odds(p, plan.q, plan.tokens, plan.parents)

    def draw(coins, keys):
        return block_draw(odds, coins, keys) if rule == "block" else tree_draw(odds, plan.parents, coins, keys)

    ends = sampled_ends(draw, len(plan.tokens), trials)
    expected: Counter = Counter()
    for accepted, weight, residual in (scan_branches if rule == "block" else walk_branches)(odds, plan):
        for token, chance in enumerate(residual.tolist()):
            expected[(accepted, token)] += weight * chance * trials
    seen = Counter({(tuple(plan.tokens[i] for i in nodes), token): count for (nodes, token), count in ends.items()})
    assert all(expected[end] > 0 for end in seen), "an ending of probability zero was drawn"
    big = [end for end, count in expected.items() if count >= 5]
    statistic = sum((seen[end] - expected[end]) ** 2 / expected[end] for end in big)
    assert statistic < chi2.isf(1e-6, len(big)), f"χ² {statistic:.1f} over {len(big)} cells"


def test_odds_of_a_tree_ignore_other_families():
    """Judging one node changes nothing at another: odds of two subtrees side by side are those of each alone."""
    world = World(4, 4)
    p = torch.stack([world.p((i,)) for i in range(5)])
    q = torch.stack([world.q((9,)), world.q((9,)), world.q((0,)), world.q((0,))])
    both = tree_odds(p, q, (0, 1, 2, 3), (-1, -1, 0, 0))
    below = tree_odds(p[[1, 3, 4]], q[2:], (2, 3), (-1, -1))
    torch.testing.assert_close(both.accept[2:], below.accept)
    torch.testing.assert_close(both.residual[[1, 3, 4]], below.residual)


def test_rules_and_shapes():
    exact = {("match", s) for s in ("chain", "tree", "merged tree")} | {("ratio", "chain"), ("ratio", "tree"), ("block", "chain")}
    for rule, shape in itertools.product(("match", "ratio", "block"), ("chain", "tree", "merged tree")):
        if (rule, shape) in exact:
            allowed(rule, shape, "eagle3")
        else:
            with pytest.raises(OptionError, match=f"rule={rule}, shape={shape}, drafter=eagle3"):
                allowed(rule, shape, "eagle3")


def test_shape_of_a_draft():
    law = DraftLaw(torch.zeros(2, 3), (0, 0, 1))
    merged = DraftLaw(torch.zeros(2, 3), (0, 1, 1))
    tokens = torch.tensor([0, 1, 2])
    assert shape_of(Draft.empty()) == shape_of(Draft.chain([1, 2])) == "chain"
    assert shape_of(Draft(tokens, (-1, -1, 0))) == shape_of(Draft(tokens, (-1, -1, 0), law=law)) == "tree"
    assert shape_of(Draft(tokens, (-1, -1, 0), law=merged)) == "merged tree"


def test_joint_judges_drafts():
    logp = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]).log()
    coins = torch.full((2,), 0.5, dtype=torch.float64)
    for rule in ("ratio", "block"):
        verdict = joint(rule, Draft.chain([1, 2]), logp, coins, None)
        assert (verdict.accepted, verdict.next_token, verdict.role) == ((0, 1), 0, "bonus")
        verdict = joint(rule, Draft.chain([1, 0], law=DraftLaw(torch.zeros(1, 3), (0, 0))), logp, coins, None)
        assert (verdict.accepted, verdict.next_token, verdict.rejected) == ((0,), 2, (1,))
    siblings = Draft(torch.tensor([0, 1]), (-1, -1), drafter="eagle2")
    assert joint("ratio", siblings, logp, coins, None).accepted == (1,)
    with pytest.raises(OptionError, match="rule=block, shape=tree, drafter=eagle2"):
        joint("block", siblings, logp, coins, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)])
def test_laws_made_on_demand_are_those_that_lie_there(dtype: torch.dtype, parents: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(7)
    logp, q = (torch.randn(rows, 9, generator=random, dtype=dtype).log_softmax(-1) for rows in (4, 3))
    logp[2, 4] = -torch.inf
    tokens = [1, 5, 4]
    for law in (None, q.exp()):
        lazy, whole = (tree_odds(p, law, tokens, parents) for p in (LawRows(logp), logp.exp()))
        assert lazy.dtype == whole.dtype == dtype and torch.equal(lazy.accept, whole.accept) and torch.equal(lazy.residual, whole.residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_law_excludes_is_never_drawn(dtype: torch.dtype) -> None:
    """Nor what is as unlikely as a type's least numbers; under 4,000 keys, whose share is 5.5 standard errors wide (false alarm 4e-8), and
    under none."""
    law = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0, torch.finfo(dtype).tiny / 8], dtype=torch.float64)
    odds = Odds(torch.empty(0, dtype=torch.float64), lambda row: law, dtype)
    keys = noise.key_rows([noise.key(3, 0, "residual", at) for at in range(4000)], "cpu")
    drawn = [draw_next(odds, row, keys) for row in range(4000)]
    assert set(drawn) == {1, 3} and abs(drawn.count(3) / 4000 - 0.3) < 0.04 and draw_next(odds, 0, None) == 1
    assert law[0] == 0, "the law stays as it was"
