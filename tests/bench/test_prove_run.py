"""prove's second and third level: a right engine passes, planted faults are found and named, scores are judged fairly."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.test_drafters import DRAFTERS, V
from engine.engine_support import table
from scipy import stats

from draftproof.bench import prove_task as task
from draftproof.bench.prove_rule import Check
from draftproof.bench.prove_run import END, Comparison, Divergence, Subject, judge, margin_at, prove_run
from draftproof.bench.statistics import chi2_fit, chi2_tail, mcnemar, normal_tail, skewed_tail, uniform_fit
from draftproof.config import LoadConfig, ProveConfig
from draftproof.core import noise, verify
from draftproof.core.tree import Odds
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import round as engine_round
from draftproof.errors import Failure
from draftproof.models.fake import TableTarget
from draftproof.types import Sampling, Verdict

CONFIG = ProveConfig(prompts=4, tokens=40, batch=4, statistics_tokens=800)
PROMPTS = [(1, 2, 3, 1, 2, i) for i in range(4)]


def subject(rule: Any = "match", **more: Any) -> Subject:
    target = table()
    drafter = ModelDrafter(table(seed=8))
    return Subject(**{"target": target, "drafter": drafter, "depth": 3, "tree": None, "rule": rule, "load": LoadConfig(), **more})


def outcomes(checks: list[Check]) -> str:
    return "\n".join(f"{check.passed} {check.name}: {check.detail}" for check in checks)


def test_a_right_engine_is_identical() -> None:
    report = prove_run(subject(), PROMPTS, CONFIG)
    assert report.as_json()["passed"], outcomes(report.checks)
    assert len(report.comparisons) == 6 and all(c.identical == c.texts == 4 and c.tokens > 20 for c in report.comparisons)


def test_a_token_that_was_not_earned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(parents: Any, tokens: Any, choices: Any) -> Verdict:
        verdict = verify.match(parents, tokens, choices)
        return Verdict((*verdict.accepted, verdict.rejected[0]), choices[verdict.rejected[0] + 1], "bonus") if verdict.rejected else verdict

    monkeypatch.setattr(engine_round, "match", eager)
    report = prove_run(subject(), PROMPTS, CONFIG)
    wrong = [check for check in report.checks if not check.passed]
    assert wrong and "not a near tie" in wrong[0].detail and "margin" in wrong[0].detail
    assert not report.comparisons[0].divergences, "the control has no drafter"


@pytest.mark.parametrize("name", [name for name in DRAFTERS if not re.match("none|oracle|always-wrong|junk", name)])
def test_every_drafter_passes(name: str) -> None:
    """With random weights hardly a guess may stand; then the report says that nothing was put to the proof, and nothing else."""
    target = TableTarget(V, order=2, seed=1)
    one = subject(target=target, drafter=DRAFTERS[name](target, lambda text: 0))
    report = prove_run(one, [(1, 2, 3, 1, 2, 3, 1, 2), (6,), (4, 4, 4, 0)], ProveConfig(prompts=3, tokens=20, batch=3))
    assert all(c.identical == c.texts for c in report.comparisons), outcomes(report.checks)
    assert all(check.passed or "nothing was put to the proof" in check.detail for check in report.checks), outcomes(report.checks)


def stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own token is read one row too early after accepted guesses."""
    def late(parents: Any, tokens: Any, choices: Any) -> Verdict:
        verdict = verify.match(parents, tokens, choices)
        return replace(verdict, next_token=choices[verdict.accepted[-1]]) if verdict.accepted else verdict

    monkeypatch.setattr(engine_round, "match", late)


def refused_keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps what was drafted last, though it was refused."""
    right = TableTarget.rewind

    def sticky(self: TableTarget, slot: Any, kept: Any) -> None:
        refused = [token for token, _ in slot.nodes[len(kept):]]
        right(self, slot, kept)
        slot.tokens[-1:] = refused[-1:] or slot.tokens[-1:]

    monkeypatch.setattr(TableTarget, "rewind", sticky)


def other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where guesses are scored, the target chooses with the noise of the next position."""
    def shifted(seed: int, sample: int, stream: str, position: int, attempt: int = 0) -> tuple[int, int]:
        return noise.key(seed, sample, stream, position + (DRAFTING[0] and stream == "text"), attempt)

    monkeypatch.setattr(engine_round, "key", shifted)
    right = ModelDrafter.propose

    def noted(self: ModelDrafter, states: Any, budgets: Any, its: Any) -> Any:
        DRAFTING[0] = True
        return right(self, states, budgets, its)

    monkeypatch.setattr(ModelDrafter, "propose", noted)


DRAFTING = [False]
PLANTED = {"stale row": (stale_row, 0.0), "refused keys stay": (refused_keys_stay, 0.0), "other noise": (other_noise, 0.8)}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found_and_told_from_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, temperature = PLANTED[name]
    DRAFTING[0] = False
    plant(monkeypatch)
    report = prove_run(subject(), PROMPTS, replace(CONFIG, temperatures=(temperature,)))
    wrong = [check for check in report.checks if not check.passed]
    assert wrong and "not a near tie" in wrong[0].detail and "where plain decoding wrote" in wrong[0].detail, outcomes(report.checks)
    assert not report.comparisons[0].divergences and report.comparisons[1].divergences, "the control has no drafter"


def test_the_law_under_ratio_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ProveConfig(prompts=4, tokens=40, batch=8, statistics_tokens=1000, temperatures=(1.0,))
    for rule in ("ratio", "block"):
        report = prove_run(subject(rule), PROMPTS, config)
        assert report.as_json()["passed"], outcomes(report.checks)
        assert report.statistics["temperature 1"]["tokens"] >= 1000
    right = verify.tree_odds  # type: ignore[attr-defined]
    monkeypatch.setattr(verify, "tree_odds", lambda p, q, tokens, parents: Odds(
        torch.ones_like(right(p, q, tokens, parents).accept), right(p, q, tokens, parents).rest))
    report = prove_run(subject("ratio"), PROMPTS, config)
    found = {check.name.split(",")[0] for check in report.checks if not check.passed}
    assert "martingale" in found, outcomes(report.checks)


def test_any_number_of_texts_is_looked_at_and_short_ones_are_no_error() -> None:
    one = subject("ratio", target=TableTarget(3, 1, seed=3), drafter="ngram", depth=2)
    report = prove_run(one, [(1, 2)] * 1100, ProveConfig(tokens=1, statistics_tokens=1100, temperatures=(1.0,), batch=64))
    assert report.statistics["temperature 1"] | {"z": 0, "tokens": 1100, "rounds": 0} == report.statistics["temperature 1"]
    assert [check.passed for check in report.checks] == [True, True, True, False] and "nothing was put" in report.checks[-1].detail


def test_margins() -> None:
    target = table()
    law = target.law((1, 2, 3))
    best = law.topk(2)
    margin, ulps, near = margin_at(target, (1, 2), (3,), Sampling(temperature=0), *best.indices.tolist())
    assert margin == pytest.approx(float(best.values[0] - best.values[1])) and not near and ulps > 4
    target.table[2, 3] = target.table[2, 3].index_fill(0, best.indices, 0.0)
    assert margin_at(target, (1, 2), (3,), Sampling(temperature=0), *best.indices.tolist()) == (0.0, 0.0, True)


def divergence(margin: float | None, near: bool) -> Divergence:
    return Divergence("x", 0.0, 0, 5, "a", "b", margin, near)


@pytest.mark.parametrize(("found", "invisible", "ok", "word"), [
    ((), True, True, "identical"),
    ((divergence(0.01, True),), False, True, "near ties"),
    ((divergence(0.01, True),), True, False, "invisible"),
    ((divergence(1.7, False),), False, False, "not a near tie"),
    ((divergence(None, False),), False, False, "margin unknown"),
    ((replace(divergence(None, False), expected=END),), False, False, "one text ended"),
    (tuple(divergence(0.01, True) for _ in range(60)), False, False, "more often than the control"),
])
def test_what_counts_as_proved(found: tuple[Divergence, ...], invisible: bool, ok: bool, word: str) -> None:
    checks: list[Check] = []
    judge(checks, Comparison("control", 0.0, 100, 98, 10_000, (divergence(0.01, True),) * 2),
          [Comparison("on", 0.0, 100, 100 - len(found), 10_000, found)], invisible, 0.0)
    assert checks[0].passed is ok and word in checks[0].detail


def test_statistics_agree_with_scipy() -> None:
    assert chi2_tail(31.4, 7) == pytest.approx(stats.chi2.sf(31.4, 7), rel=1e-9)
    for gained, lost in ((0, 0), (3, 11), (11, 3), (600, 424), (900, 1100), (5, 2000)):
        expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9), "also where 2ⁿ is beyond a float"
    values = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sample in (values, values**1.2):
        assert uniform_fit(sample.tolist()) == pytest.approx(stats.kstest(sample.numpy(), "uniform").pvalue, rel=0.1)
    assert chi2_fit([5, 95, 0], [0.05, 0.95, 0.0]) > 0.9 and chi2_fit([5, 94, 1], [0.05, 0.95, 0.0]) == 0.0


@pytest.mark.parametrize("rare", [0.005, 0.02, 0.1])
def test_a_skewed_sum_alarms_as_seldom_as_it_says(rare: float) -> None:
    """1500 tokens of which a rare one surprises: how many do is binomial, so the rate of false alarms is a sum."""
    n, law = 1500, stats.binom(1500, rare)
    skew = (1 - 2 * rare) / (n * rare * (1 - rare))**0.5
    for sign in (1, -1):
        alarms = [k for k in range(n + 1) if skewed_tail(sign * (k - n * rare) / float(law.std()), sign * skew) <= 1e-6]
        assert 2e-8 < sum(law.pmf(k) for k in alarms) <= 1.2e-6
    assert skewed_tail(3.0, 0.0) == normal_tail(3.0) == pytest.approx(skewed_tail(3.0, 0.011), rel=0.1)
    assert skewed_tail(2.5, -0.4) == pytest.approx(2 * stats.pearson3.sf(2.5, -0.4)) and skewed_tail(0.0, 0.5) > 0.9


@pytest.mark.parametrize(("pairs", "same", "passed", "word"), [
    ([(True, True)] * 10, 10, True, "same text"),
    ([(True, True)] * 400 + [(True, False)] * 4 + [(False, True)] * 4, 0, True, "equivalent"),
    ([(True, True)] * 20 + [(False, True)] * 2, 0, False, "not shown"),
    ([(True, True)] * 60 + [(False, True)] * 40, 0, False, "WORSE"),
])
def test_task_scores(pairs: list[tuple[bool, bool]], same: int, passed: bool, word: str) -> None:
    report = task.judge(pairs, same, 0.05)
    assert report.check.passed is passed and word in report.check.detail


def test_tasks_are_read_and_scored(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in [
        {"prompt": "2+2?", "answer": "4"}, {"prompt": "capital?", "answer": "Paris"}, {"prompt": "code", "expect": r"return \d+"}]))
    tasks = task.read_tasks(file)
    assert [t.right(text) for t, text in zip(tasks, ["so 3, no, 4.0.", "it is paris", "return 7"], strict=True)] == [True] * 3
    assert [t.right(text) for t, text in zip(tasks, ["4 or 5", "Rome", "return x"], strict=True)] == [False] * 3
    for bad, word in (({"prompt": "x"}, "expect"), ({"prompt": "x", "expect": "("}, "regular expression"),
                      ({"prompt": "x", "expect": 42}, "line 1: expect 42"), ({"prompt": "x", "answer": ["4"]}, "line 1: answer")):
        file.write_text(json.dumps(bad))
        with pytest.raises(Failure, match=word):
            task.read_tasks(file)
    file.write_text("\n")
    with pytest.raises(Failure, match="is empty"):
        task.read_tasks(file)
    with pytest.raises(Failure, match="does not exist"):
        task.read_tasks(tmp_path / "none.jsonl")


def test_every_task_has_the_answer_of_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": f"Q{i}", "answer": f"A{i}", "timestamp": 9 - i}) for i in (1, 2, 3)))
    assert [(t.item.turns, t.answer) for t in task.read_tasks(file)] == [((f"Q{i}",), f"A{i}") for i in (1, 2, 3)]
