"""What rounds are said to cost, where the truth is known: rounds that are made up, of target passes with a price per row."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any

import pytest

from draftproof.advise.measure import Rounds, _costs, _free_rows
from draftproof.advise.predict import Cost, forecast, predict, verdict
from draftproof.bench.cells import Spread

ROW, PASS = 0.4, 5.0


def rounds(depth: int, seed: int, noise: float, drafting: float = 0.05) -> Rounds:
    """Two of three rounds draft, half of them one token only, as timed rounds do where the log drafts more."""
    dice = Random(seed)
    return [(PASS + drafting + ROW * nodes + dice.gauss(0, noise), float(nodes), 50.0)
            for _, nodes in zip(range(24), cycle((0, 1, depth)), strict=False)]


def timed(seed: int, noise: float) -> dict[tuple[str, int], Cost]:
    made = {("none", 0): [(PASS, 0.0, 50.0)] * 24}
    made |= {(spec, depth): rounds(depth, seed * 10 + 2 * depth + (spec == "suffix"), noise)
             for spec in ("ngram", "suffix") for depth in (2, 4)}
    made["model:x", 2] = [(seconds + 3.0 * nodes, nodes, length) for seconds, nodes, length in rounds(2, 99, 0.0)]
    return {(one.drafter, one.depth): one for one in _costs(made, 1)}


def test_drafters_that_copy_have_one_price_of_a_row() -> None:
    worst = 0.0
    for seed in range(20):
        costs = timed(seed, 0.5)
        copying = [cost for (spec, _), cost in costs.items() if spec in ("ngram", "suffix")]
        assert len({(cost.slope, cost.slope_error) for cost in copying}) == 1 and copying[0].slope_error > 0
        worst = max(worst, abs(copying[0].slope - ROW) / copying[0].slope_error)
        assert costs["model:x", 2].slope == pytest.approx(3.0 + ROW), "its own passes are no row of the target's"
    assert worst < 2.5, "the error is about as large as is said"
    still = timed(0, 0.0)["suffix", 4]
    assert still.slope == pytest.approx(ROW) and still.slope_error == pytest.approx(0, abs=1e-9)
    assert still.at(4, 50) == pytest.approx(PASS + 0.05 + 4 * ROW)


def heard(nodes: float, length: float = 2.0) -> dict[str, Any]:
    return {"drafter": "ngram", "depth": 4, "class": "all", "rounds": 100, "drafted": int(100 * nodes), "acceptance_length": length,
            "tokens": 101 * 10, "requests": 10, "prompt_tokens": 0.0}


def made(drafter: str, seconds: float, **more: Any) -> Cost:
    return Cost(drafter, 0 if drafter == "none" else 4, 1, Spread(seconds, seconds, seconds), **more)


def test_what_is_extrapolated_is_less_certain_and_says_so() -> None:
    drafts = made("ngram", 1.2, nodes=1.0, slope=0.1, slope_error=0.1)
    near, far = (forecast(heard(nodes), made("none", 1.0), drafts) for nodes in (1.0, 3.0))
    assert near is not None and near.speedup.low == near.speedup.high and "extrapolated" not in near.reason
    assert far is not None and far.speedup.high / far.speedup.median == pytest.approx(1.154, abs=0.001), "0.1 × 2 of 1.4 seconds"
    assert "rounds that draft 3.0 tokens are extrapolated from 1.0" in far.reason


@pytest.mark.parametrize(("seconds", "said"), [((1.0, 1.3, 1.4), "drafting takes more time"), ((1.0, 1.3, 1.9), "compute-bound beyond 1")])
def test_the_larger_part_of_what_a_round_takes_longer_is_its_reason(seconds: tuple[float, ...], said: str) -> None:
    passes = tuple(enumerate(seconds, 1))
    plain = made("none", 1.0, free_rows=_free_rows(passes, 1), passes=passes)
    one = forecast(heard(2.0, 1.5), plain, made("ngram", 2.0, nodes=2.0))
    assert one is not None and said in one.reason and "2.00× a plain one" in one.reason


def test_verification_by_a_mixture_of_experts_reads_more_of_them() -> None:
    """Until hardly any is left: then more rows cost arithmetic."""
    passes = (1, 1.0), (2, 1.5), (3, 1.9)
    for experts, said in (((128, 8), "reads more experts than a plain pass, about 23 of 128 for 3 rows, where 8 are read for 1"),
                          ((4, 4), "compute-bound beyond 1 rows"), (None, "compute-bound beyond 1 rows")):
        plain = replace(made("none", 1.0, free_rows=1, passes=passes), experts=experts)
        one = forecast(heard(2.0, 1.5), plain, made("ngram", 2.0, nodes=2.0))
        assert one is not None and said in one.reason, one.reason


def test_a_gain_whose_interval_has_no_gain_in_it_is_not_shown() -> None:
    unsure = {**heard(1.0), "acceptance_length_interval": {"low": 0.8, "high": 5.0}}
    for cell, shown in ((heard(1.0), True), (unsure, False)):
        said = verdict(predict([cell], [made("none", 1.0), made("ngram", 1.2, nodes=1.0)]))
        assert ("not shown" not in said) is shown
