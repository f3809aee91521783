"""A draft model's chains where rows and levels have prices: they end where going on is not worth its time, by chances that are counted."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text

from draftproof import Sampling
from draftproof.drafters.confidence import Confidence, Run
from draftproof.drafters.model import UNWORTHY, ModelDrafter
from draftproof.models.fake import TableTarget
from draftproof.types import Budget, Commit, Draft, Rule

V, DEPTH = 13, 6
GREEDY, SAMPLED = Sampling(temperature=0.0, top_p=1.0), Sampling(temperature=1.0, top_p=1.0)
KINDS = pytest.mark.parametrize("kind", [GREEDY, SAMPLED])


def priced(each: float, step: float = 0.0) -> Budget:
    return Budget(DEPTH, DEPTH, "", "", tuple(accumulate([each] * DEPTH)), step)


def model() -> ModelDrafter:
    return ModelDrafter(TableTarget(V, order=1, seed=9), V)


def text_of(seed: int, kind: Sampling, rule: Rule = "match") -> Text:
    return Text.of(torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(seed)).tolist(), kind, seed=seed, rule=rule)


def guess(drafter: ModelDrafter, state: Any, budget: Budget, keep_law: bool = False) -> Draft:
    return drafter.propose([state], [budget], SharedNoise(keep_law))[0]


@KINDS
@pytest.mark.parametrize("seed", range(8))
def test_a_priced_chain_is_a_beginning_and_spares_passes(seed: int, kind: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs nothing is drafted to the full depth, what costs more than it can bring is not, and where levels cost anything at most
    one token was drafted in vain."""
    text, sizes = text_of(seed, kind), []
    whole = guess(model(), model_state(text)[1], Budget(DEPTH, DEPTH, "", "")).tokens.tolist()
    for each in (0.0, 0.05, 0.2, 0.5, 1.0):
        drafter, state = model_state(text)
        passes = [0]

        def counted(*told: Any, extend: Any = drafter.lm.extend, passes: list[int] = passes) -> Any:
            passes[0] += 1
            return extend(*told)

        monkeypatch.setattr(drafter.lm, "extend", counted)
        draft = guess(drafter, state, priced(each, 0.01 if each else 1e-9))
        tokens = draft.tokens.tolist()
        assert tokens == whole[:len(tokens)] and passes[0] <= min(len(tokens) + 1, DEPTH)
        assert (draft.reason == UNWORTHY) == (len(tokens) < DEPTH)
        sizes.append(len(tokens))
    assert sizes[0] == DEPTH and sizes[-1] == 0 and sizes == sorted(sizes, reverse=True)


def model_state(text: Text) -> tuple[ModelDrafter, Any]:
    drafter = model()
    return drafter, drafter.open(text, None)


@KINDS
@pytest.mark.parametrize("stands", [True, False])
def test_chances_are_counted_by_what_texts_became(stands: bool, kind: Sampling) -> None:
    """A text takes all that was guessed, and more, or never what was guessed."""
    drafter = model()
    sizes = []
    for seed in range(900):
        text = text_of(seed, kind)
        state = drafter.open(text, None)
        draft = guess(drafter, state, priced(0.2, 0.1))
        sizes.append(len(draft))
        said = state.run.tokens
        came = (*said, 0) if stands else ((said[0] + 1) % V,)
        text.tokens += came
        drafter.observe([state], [Commit(len(text.tokens) - len(came), came, ("bonus",) * len(came), ())], [None])
        drafter.close(state)
    early, late = sum(sizes[:20]) / 20, sum(sizes[-200:]) / 200
    assert late > early if stands else late < 0.1
    assert drafter.sure.usual(not kind.greedy) == Confidence().usual(True), "texts of the other kind"


@KINDS
def test_a_chain_that_ended_early_is_taken_back_as_others_are(kind: Sampling) -> None:
    """After every round the slot follows the text: what it would guess is what a fresh one guesses."""
    text = text_of(3, kind)
    drafter, state = model_state(text)
    for at in range(24):
        draft = guess(drafter, state, priced((0.05, 0.3, 0.7)[at % 3], 0.02))
        kept = at % (len(draft) + 1)
        came = (*draft.tokens.tolist()[:kept], at % V)
        text.tokens += came
        commit = Commit(len(text.tokens) - len(came), came, ("accepted",) * kept + ("bonus",), tuple(range(kept)))
        drafter.observe([state], [commit], [None])
        assert state.slot.length < len(text.tokens)
        fresh, other = model_state(text)
        budget = Budget(DEPTH, DEPTH, "", "")
        assert guess(drafter, state, budget).tokens.tolist() == guess(fresh, other, budget).tokens.tolist()


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_where_q_is_kept_nothing_is_decided_after_the_draw(rule: Rule) -> None:
    drafter, state = model_state(text_of(1, SAMPLED, rule))
    assert len(guess(drafter, state, priced(2.0, 0.1), True)) == DEPTH and state.run is None
    greedy, state = model_state(text_of(1, GREEDY, rule))
    assert len(guess(greedy, state, priced(2.0, 0.1), True)) == 0, "without a draw there is nothing to bias"


@KINDS
def test_before_it_is_known_what_a_level_takes_chains_are_whole(kind: Sampling) -> None:
    drafter, state = model_state(text_of(2, kind))
    assert len(guess(drafter, state, priced(2.0))) == DEPTH and state.run is None


def test_texts_of_a_batch_end_by_themselves() -> None:
    drafter = model()
    states = [drafter.open(text_of(seed, GREEDY), None) for seed in range(6)]
    budgets = [priced(each, 1e-9 + each / 10) for each in (0.0, 0.1, 0.3, 0.6, 2.0, 0.0)]
    together = drafter.propose(states, budgets, SharedNoise())
    assert len({len(draft) for draft in together}) > 2
    for seed, (draft, budget) in enumerate(zip(together, budgets, strict=True)):
        alone, state = model_state(text_of(seed, GREEDY))
        assert draft.tokens.tolist() == guess(alone, state, budget).tokens.tolist()


def test_a_level_is_drafted_for_what_it_may_bring() -> None:
    sure = Confidence()
    run = Run(priced(0.1, 0.3), True)
    assert run.takes(1, 8.0, sure) and run.goes_on(sure)
    assert run.takes(2, 0.5, sure) and not run.goes_on(sure), "two in five times three in five is not worth 0.4"
    assert not Run(priced(0.5), True).takes(1, 0.1, sure)


def test_a_dear_first_row_is_paid_by_cheap_later_ones() -> None:
    """As those of a mixture of experts are: alone the first row is not worth its price, six are."""
    prices = 0.9, 1.3, 1.6, 1.8, 1.9, 1.95
    sure = Confidence()
    run = Run(Budget(DEPTH, DEPTH, "", "", prices, 0.01), True)
    taken = 0
    while run.takes(taken, 2.0, sure) and (taken := taken + 1) < DEPTH and run.goes_on(sure):
        pass
    assert run.chances[0] < prices[0] and sum(run.chances) > prices[-1]
    assert taken == DEPTH and run.kept() == DEPTH
    run = Run(Budget(DEPTH, DEPTH, "", "", prices, 0.01), True)
    assert run.takes(0, 2.0, sure) and run.takes(1, -3.0, sure) and not run.takes(2, -3.0, sure)
    assert run.kept() == 0, "a guess is left out where its followers fail"


@KINDS
@pytest.mark.parametrize("seed", range(6))
def test_a_chain_never_costs_more_than_it_brings(seed: int, kind: Sampling) -> None:
    """Where first rows are dear, too: by the chances that the drafter itself believes in."""
    dice = Random(seed)
    for _ in range(6):
        drafter, state = model_state(text_of(seed, kind))
        prices = tuple(accumulate(sorted((dice.random() for _ in range(DEPTH)), reverse=True)))
        draft = guess(drafter, state, Budget(DEPTH, DEPTH, "", "", prices, 1e-6))
        worth = [0.0, *(brought - price for brought, price in zip(accumulate(state.run.chances), prices, strict=False))]
        assert worth[len(draft)] == pytest.approx(max(worth)) and state.guess.tolist() == draft.tokens.tolist()


@KINDS
def test_of_a_vocabulary_of_one_token_all_is_sure(kind: Sampling) -> None:
    drafter = ModelDrafter(TableTarget(1, order=1), 1)
    assert guess(drafter, drafter.open(Text.of([0, 0], kind), None), priced(0.05, 0.01)).tokens.tolist() == [0] * DEPTH
