"""prove's third level: equivalence is claimed as seldom as it says, advised prompts suffice, and numbers are read as numbers."""

from __future__ import annotations

import json
import math

import pytest

from draftproof.bench.prove_task import TaskReport, _task, judge
from draftproof.bench.statistics import paired_interval


def report(pairs: int, gained: int, lost: int, margin: float = 0.05) -> TaskReport:
    both = [(True, True)] * (pairs - gained - lost)
    return judge([(True, False)] * gained + [(False, True)] * lost + both, 0, margin)


def claimed(pairs: int, margin: float, gain: float) -> float:
    """The chance that a share of right answers which is lower by `margin` is called equivalent, over every outcome (trinomial)."""
    chance, rest = 0.0, 1 - margin - 2 * gain
    for gained in range(pairs + 1):
        for lost in range(pairs + 1 - gained):
            if (lost - gained) / pairs < margin and (gain or not gained):
                low, high = paired_interval(gained, lost, pairs)
                if -margin < low and high < margin:
                    chance += (math.comb(pairs, gained) * math.comb(pairs - gained, lost) * gain**gained * (margin + gain)**lost
                               * rest**(pairs - gained - lost))
    return chance


@pytest.mark.parametrize(("pairs", "margin"), [(33, 0.05), (34, 0.05), (59, 0.05), (93, 0.05), (18, 0.1), (60, 0.1), (7, 0.3)])
def test_a_loss_of_the_whole_margin_is_called_equivalent_in_one_proof_of_twenty_at_most(pairs: int, margin: float) -> None:
    assert max(claimed(pairs, margin, gain) for gain in (0.0, 0.004, 0.02, 0.1)) <= 0.05


def test_the_interval_has_two_equal_sides_and_ends_inside_the_possible() -> None:
    for gained, lost, pairs in ((0, 0, 1), (0, 0, 60), (1, 0, 1), (0, 9, 9), (4, 4, 400), (13, 9, 100), (300, 200, 500)):
        low, high = paired_interval(gained, lost, pairs)
        assert paired_interval(lost, gained, pairs) == (-high, -low) and -1 <= low <= (gained - lost) / pairs <= high <= 1
    assert paired_interval(0, 0, 1) == (-1, 1) and paired_interval(1, 0, 1)[1] == 1
    half = 1.645 * math.sqrt(500 - 100**2 / 5000) / 5000
    assert paired_interval(300, 200, 5000) == pytest.approx((0.02 - half, 0.02 + half), abs=5e-4)


def test_as_many_prompts_as_are_advised_suffice() -> None:
    """With the same shares, of which the counts are whole multiples."""
    for pairs, gained, lost in ((100, 13, 11), (249, 16, 11), (40, 1, 0), (20, 0, 0), (10, 1, 1)):
        words = report(pairs, gained, lost).check.detail
        advised = int(words.split("about ")[1].split()[0])
        times = math.ceil(advised / pairs)
        assert report(times * pairs, times * gained, times * lost).check.passed, words
        assert advised < 70 * pairs
    assert "prompts could" not in report(100, 9, 14).check.detail, "five points apart: no number of prompts would do"


@pytest.mark.parametrize(("answer", "right", "wrong"), [
    (1e-05, ["0.00001", "it is 1e-05.", "1E-5"], ["1e-06", "5"]), (1e22, ["10000000000000000000000"], ["22", "1e2"]),
    (".5", ["0.5", ".50", "x = .5"], ["-1.5", "5", "-.5"]), ("+5", ["5", "+5.0"], ["15", "-5"]), (-5, ["x = -5", "x = −5"], ["7-5", "5"]),
    ("1e3", ["1000", "1,000"], ["1", "3"]), (0.1, ["0.10"], ["10"]), (4, ["so 3, no, 4.0."], ["4 or 5"]),
])
def test_numbers_are_read_as_numbers(answer: float | str, right: list[str], wrong: list[str]) -> None:
    task = _task(json.dumps({"prompt": "q", "answer": answer}), "f", 1)
    assert [text for text in right if not task.right(text)] == [] and [text for text in wrong if task.right(text)] == []
