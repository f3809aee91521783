"""prove's first level finds every known wrong rule when it is planted in the shipped functions, and says which part is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftproof.bench import prove_rule as level
from draftproof.config import ProveConfig
from draftproof.core import choice, host, noise, tree, verify
from draftproof.core.tree import Odds
from draftproof.engine import round as engine_round
from draftproof.engine.sequence import Sequence
from draftproof.errors import OptionError
from draftproof.types import Verdict

DRAWS = 1200


def failed(checks: Any) -> dict[str, str]:
    return {check.name: check.detail for check in checks if not check.passed}


def test_the_installed_rules_pass() -> None:
    assert not failed([level.matched(), level.coins_at_the_edge(), *level.enumerated(), level.judged_joint(), level.noise_vectors(),
                       *level.noise_law(DRAWS), level.in_the_engine("match", 300, 2)])


RATIO_ODDS = {
    "accept where p ≥ q": (lambda odds, p: Odds((odds.accept >= 1).double(), odds.rest), "odds are wrong"),
    "accept too often": (lambda odds, p: Odds(odds.accept.sqrt(), odds.rest), "odds are wrong"),
    "the residual is p": (lambda odds, p: Odds(odds.accept, lambda row: p[row]), "residual law"),
}


@pytest.mark.parametrize("name", RATIO_ODDS)
def test_wrong_odds_of_ratio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, word = RATIO_ODDS[name]
    right = verify.tree_odds  # type: ignore[attr-defined]
    monkeypatch.setattr(verify, "tree_odds", lambda p, q, tokens, parents: wrong(right(p, q, tokens, parents), p))
    found = failed(level.enumerated())
    assert word in found["rule ratio, chains drawn from q"]
    assert not any("block" in check for check in found)
    assert failed([level.judged_joint()])


def test_wrong_odds_and_residual_of_block(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.block_odds
    monkeypatch.setattr(verify, "block_odds", lambda p, q, tokens: Odds(right(p, q, tokens).accept, verify.ratio_odds(p, q, tokens).rest))
    assert "residual law" in failed(level.enumerated())["rule block, chains drawn from q"]
    monkeypatch.setattr(verify, "block_odds", verify.ratio_odds)
    assert "odds are wrong" in failed(level.enumerated())["rule block, chains drawn from q"]


def test_block_that_stops_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "block_draw", verify.ratio_draw)
    assert "draw is wrong" in failed(level.enumerated())["rule block, chains drawn from q"]


def test_ratio_that_takes_the_longest_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ratio_draw", verify.block_draw)
    assert "draw is wrong" in failed(level.enumerated())["rule ratio, chains drawn from q"]


def test_siblings_judged_as_if_they_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tree.refuse_all

    def replaced(p: torch.Tensor, q: torch.Tensor | None, tokens: Any, chances: list[torch.Tensor] | None = None) -> torch.Tensor:
        if q is None:
            return right(p, q, tokens, chances)
        for token in tokens:
            if chances is not None:
                chances.append((p[token] / q[token]).clamp_max(1))
            p = tree.normalised((p - q).clamp_min(0), p)
        return p

    monkeypatch.setattr(tree, "refuse_all", replaced)
    found = failed(level.enumerated())
    assert "trees" in found["rule ratio, trees drawn from q"] and "rule ratio, chains drawn from q" not in found


def test_a_coin_that_may_equal_its_odds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "passes", lambda odds, coins: (coins <= odds.accept).tolist())
    assert "strict" in failed([level.coins_at_the_edge()])["coins at the edge"]


def one_too_many(parents: Any, tokens: Any, choices: Any, right: Any = verify.match) -> Verdict:
    verdict = right(parents, tokens, choices)
    return Verdict((*verdict.accepted, verdict.rejected[0]), choices[verdict.rejected[0] + 1], "bonus") if verdict.rejected else verdict


def wrong_row(parents: Any, tokens: Any, choices: Any, right: Any = verify.match) -> Verdict:
    verdict = right(parents, tokens, choices)
    return replace(verdict, next_token=choices[len(verdict.accepted)])


@pytest.mark.parametrize("mutant", [one_too_many, wrong_row])
def test_wrong_walks_of_match(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "match", mutant)
    assert "the walk is wrong" in failed([level.matched()])["rule match"]


def test_noise_that_ignores_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.key
    monkeypatch.setattr(noise, "key", lambda seed, sample, stream, position, attempt=0: right(seed, sample, "text", position, attempt))
    found = failed([level.noise_vectors(), *level.noise_law(DRAWS)])
    assert set(found) == {"noise vectors", "noise streams"} and "share noise" in found["noise streams"]


def test_as_many_draws_as_are_asked_for_show_a_choice_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="draws=99: expected an integer ≥ 100"):
        ProveConfig(draws=99)
    monkeypatch.setattr(choice, "choose", lambda law, keys, right=choice.choose: right(law, None))
    assert failed(level.noise_law(ProveConfig(draws=100).draws))


def test_noise_with_arithmetic_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_MIX", tuple((shift, -1, factor) for shift, _, factor in noise._MIX))
    assert "among many tokens" in failed([level.noise_vectors()])["noise vectors"]


def test_noise_of_a_few_tokens_by_another_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ROUNDS", host._ROUNDS[::-1])
    assert "among few tokens" in failed([level.noise_vectors()])["noise vectors"]


def test_residual_noise_that_the_draft_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine_round.key
    monkeypatch.setattr(engine_round, "key", lambda seed, sample, stream, *rest: right(
        seed, sample, "draft" if stream == "residual" else stream, *rest))
    check = level.in_the_engine("ratio", DRAWS, 3)
    assert not check.passed and "noise is not fresh" in check.detail


def test_noise_that_is_used_again_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "attempt", lambda self, position: 0)
    check = level.in_the_engine("block", DRAWS, 2)
    assert not check.passed and "noise is not fresh" in check.detail
