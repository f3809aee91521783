"""The checks themselves: every known wrong rule, put in place of the right one, must make them fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from enumerate_law import (
    Plan,
    World,
    block,
    check_lossless,
    distance,
    one_hot_chain,
    one_hot_tree,
    ratio,
    reused_noise_law,
    sampled_chain,
    sampled_tree,
    scan_branches,
    target_law,
    tree,
    walk_branches,
)
from scipy.stats import chi2
from test_match_pathwise import check_pathwise

from draftproof.core import noise
from draftproof.core.choice import choose
from draftproof.core.tree import Odds
from draftproof.core.verify import block_odds, match, ratio_draw, ratio_odds
from draftproof.types import Verdict

WORLD = World(2, 3)


def caught(check, *arguments) -> None:
    with pytest.raises(AssertionError):
        check(*arguments)


# --- wrong odds ---------------------------------------------------------------------------------------------------------


def hard(p, plan):
    """Accept if p ≥ q."""
    odds = ratio_odds(p, plan.q, plan.tokens)
    return walk_branches(replace(odds, accept=(odds.accept >= 1).double()), plan)


def residual_is_p(p, plan):
    """After a rejection, draw from p instead of what q left over."""
    odds = ratio_odds(p, plan.q, plan.tokens)
    return walk_branches(Odds(odds.accept, p.__getitem__), plan)


def first_failure(p, plan):
    """Block's odds, but stop at the first coin that fails."""
    return walk_branches(block_odds(p, plan.q, plan.tokens), plan)


def block_with_ratios_residual(p, plan):
    return scan_branches(Odds(block_odds(p, plan.q, plan.tokens).accept, ratio_odds(p, plan.q, plan.tokens).rest), plan)


def siblings_with_replacement(p, plan):
    """Judge children drawn without replacement by the law they would have with it."""
    law = p.clone()
    accept = torch.zeros(len(plan.tokens), dtype=torch.float64)
    for i, (token, parent) in enumerate(zip(plan.tokens, plan.parents, strict=True)):
        row = law[parent + 1]
        accept[i] = (row[token] / plan.q[i][token]).clamp_max(1)
        rest = (row - plan.q[i]).clamp_min(0)
        law[parent + 1] = rest / rest.sum() if rest.sum() > 0 else row
    return walk_branches(Odds(accept, law.__getitem__), plan)


@pytest.mark.parametrize("mutant", [hard, residual_is_p, first_failure, block_with_ratios_residual])
def test_wrong_odds_are_caught(mutant):
    caught(check_lossless, WORLD, sampled_chain(2), mutant, 3)


def test_siblings_judged_as_if_replaced_are_caught():
    check_lossless(WORLD, sampled_tree((2, 1)), tree, 3)
    caught(check_lossless, WORLD, sampled_tree((2, 1)), siblings_with_replacement, 3)


# --- drafts that are not what their law says ----------------------------------------------------------------------------


def soft(drafter):
    """Deterministic drafts that come with the soft q."""

    def plans(world: World, text) -> Iterator[Plan]:
        for plan in drafter(world, text):
            at = [text if parent < 0 else (*text, plan.tokens[parent]) for parent in plan.parents]
            yield replace(plan, q=torch.stack([world.q(t) for t in at]))

    return plans


def flattened(drafter):
    """Drafts drawn from q, reported with another temperature."""

    def plans(world: World, text) -> Iterator[Plan]:
        for plan in drafter(world, text):
            q = plan.q.sqrt()
            yield replace(plan, q=q / q.sum(-1, keepdim=True))

    return plans


def withheld(drafter):
    """Drafts cut before a token that looks unlikely, after its value was drawn."""

    def plans(world: World, text) -> Iterator[Plan]:
        for plan in drafter(world, text):
            keep = 0
            while keep < len(plan.tokens) and plan.q[keep, plan.tokens[keep]] >= 0.35:
                keep += 1
            yield Plan(plan.tokens[:keep], plan.parents[:keep], plan.q[:keep], plan.weight)

    return plans


def stopped_after(drafter):
    """The safe form: the unlikely token is offered, the draft ends behind it."""

    def plans(world: World, text) -> Iterator[Plan]:
        seen = set()
        for plan in drafter(world, text):
            likely = [bool(plan.q[i, token] >= 0.35) for i, token in enumerate(plan.tokens)]
            keep = likely.index(False) + 1 if False in likely else len(likely)
            if plan.tokens[:keep] not in seen:
                seen.add(plan.tokens[:keep])
                weight = float(plan.q[:keep].gather(1, torch.tensor(plan.tokens[:keep])[:, None]).prod())
                yield Plan(plan.tokens[:keep], plan.parents[:keep], plan.q[:keep], weight)

    return plans


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize("fault", [lambda: soft(one_hot_chain(2)), lambda: flattened(sampled_chain(2)), lambda: withheld(sampled_chain(2))],
                         ids=["argmax with a soft q", "q is not the proposal", "withheld after it was seen"])
def test_false_proposals_are_caught(rule, fault):
    caught(check_lossless, WORLD, fault(), rule, 3)


def test_best_children_with_a_soft_q_are_caught():
    check_lossless(WORLD, one_hot_tree((2,)), tree, 2)
    caught(check_lossless, WORLD, soft(one_hot_tree((2,))), tree, 2)


@pytest.mark.parametrize("rule", [ratio, block])
def test_ending_a_draft_behind_a_token_is_safe(rule):
    check_lossless(WORLD, stopped_after(sampled_chain(3)), rule, 3)


# --- noise used twice ---------------------------------------------------------------------------------------------------


def check_position_keyed(rule, seeds=range(4)) -> None:
    for seed in seeds:
        world = World(seed, 2)
        away = distance(reused_noise_law(world, rule, depth=2, length=3), target_law(world, 3))
        assert away < 1e-12, f"total variation {away:.3f}"


def test_block_with_position_keyed_draft_noise_is_caught():
    """One round cannot show it: the same rule with fresh noise is exact. Ratio survives even the reuse."""
    for seed in range(4):
        check_lossless(World(seed, 2), sampled_chain(2), block, 3)
    caught(check_position_keyed, block)
    check_position_keyed(ratio)


def check_streams(residual_stream: str, trials: int = 4000) -> None:
    """Draft, coin and residual with the shipped noise: χ² of the first emitted token, false-alarm rate 1e-6, fixed seeds."""
    p, q = torch.tensor([0.02, 0.68, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.45, 0.05], dtype=torch.float64)
    cpu = torch.device("cpu")

    def keys(stream: str) -> torch.Tensor:
        return noise.key_rows([noise.key(seed, 0, stream, 3) for seed in range(trials)], cpu)

    drafts = choose(q.log().to(torch.float32).expand(trials, -1), keys("draft")).tolist()
    coins, residual_keys, bonus_keys = noise.uniform(keys("coin"), torch.arange(1)), keys(residual_stream), keys("residual")
    odds = [ratio_odds(p.expand(2, -1), q[None], [x]) for x in range(3)]
    counts = [0.0] * 3
    for i, x in enumerate(drafts):
        verdict = ratio_draw(odds[x], coins[i], torch.stack((residual_keys[i], bonus_keys[i])))
        counts[x if verdict.accepted else verdict.next_token] += 1
    statistic = sum((count - trials * float(chance)) ** 2 / (trials * float(chance)) for count, chance in zip(counts, p, strict=True))
    assert statistic < chi2.isf(1e-6, 2), f"χ² {statistic:.1f}: {counts}"


def test_noise_shared_between_draft_and_residual_is_caught():
    check_streams("residual")
    caught(check_streams, "draft")


# --- match --------------------------------------------------------------------------------------------------------------


def keeps_the_draft(parents, tokens, choices) -> Verdict:
    """One token more than was earned."""
    verdict = match(parents, tokens, choices)
    return Verdict((*verdict.accepted, verdict.rejected[0]), choices[verdict.rejected[0] + 1], "bonus") if verdict.rejected else verdict


def chooses_at_the_wrong_row(parents, tokens, choices) -> Verdict:
    verdict = match(parents, tokens, choices)
    return replace(verdict, next_token=choices[len(verdict.accepted)])      # right on chains only


@pytest.mark.parametrize("mutant", [keeps_the_draft, chooses_at_the_wrong_row])
def test_wrong_walks_are_caught(mutant):
    caught(check_pathwise, mutant, 200)
