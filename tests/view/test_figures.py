"""The numbers of the charts from traces that are unlike the usual ones: trees, cancelled texts, rounds without times, great depths."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from test_views import around, header, request

from draftproof.trace import figures
from draftproof.trace.events import Event, NodeRecord, RoundDone, Times, TokenRecord
from draftproof.view import charts, charts_time, style

drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib: the extra report")
PLAIN = around((), (TokenRecord(3, "plain"),), "three", times=Times(0.0, 0.01, 0.0, 0.0), drafter="none")


def chain(depth: int, stood: int, times: Times, granted: int | None = None) -> RoundDone:
    fates: Any = ["accepted"] * stood + ["rejected"] * (depth > stood) + ["discarded"] * (depth - stood - 1)
    nodes = tuple(NodeRecord(1, i - 1, fate) for i, fate in enumerate(fates))
    return around(nodes, tuple(TokenRecord(1, "accepted") for _ in range(stood)) + (TokenRecord(2, "correction"),), "", granted, times)


def loaded(rounds: list[RoundDone], name: str) -> list[Event]:
    """A request whose rounds keep their batch sizes."""
    sizes = iter([one.batch for one in rounds])
    return [replace(event, batch=next(sizes)) if isinstance(event, RoundDone) else event for event in request(rounds, name)]


def test_costs_are_by_the_levels_that_were_drafted() -> None:
    rounds = [replace(PLAIN, drafter="model")] * 4 + [chain(2, 1, Times(0.006, 0.012, 0.0, 0.0), granted=6)] * 4
    found = figures.runs([header(), *request(rounds)])
    (line,) = figures.payoffs(found, found)
    assert (line.c, line.row) == pytest.approx((0.3, 0.1)) and found[0].kind == "model"


def test_plain_decoding_is_that_of_as_many_texts_at_a_time() -> None:
    """A server's plain passes at its busiest make no text, that was written when it was idle, four times as fast."""
    slow = replace(PLAIN, batch=8, times=Times(0.0, 0.04, 0.0, 0.0))
    mine = [chain(2, 1, Times(0.0, 0.01, 0.0, 0.0))] * 9 + [replace(chain(2, 0, Times(0.0, 0.05, 0.0, 0.0)), batch=8)] * 3
    idle, busy = request([PLAIN] * 3, "idle"), loaded([slow] * 3, "busy")
    found = figures.runs([header(), *loaded(mine, "on"), *idle, *busy])
    base = figures.plain(found, found[:1])
    assert base is not None and base.by == pytest.approx({1: 0.01, 8: 0.04}) and base.how.startswith("measured on 6 passes of runs")
    assert base.seconds == pytest.approx((18 * 0.01 + 3 * 0.04) / 21)
    about, (line,) = base.estimate(found[0]), figures.payoffs(found, found[:1])
    assert about is not None and about.gain == pytest.approx((18 * 0.01 + 3 * 0.04) / (9 * 0.01 + 3 * 0.05))
    assert [speed.gain for speed in line.measured] == [pytest.approx(about.gain)]
    few = figures.runs([header(), *loaded(mine, "on"), *request([PLAIN] * 3, "idle")])
    unknown = figures.plain(few, few[:1])
    assert unknown is not None and not unknown.measured, "a seventh of the tokens were written at a load of which nothing is known"


@pytest.mark.parametrize("finish", ["stop", "length", "cancelled", "error", None])
def test_what_was_cut_short_is_compared_with_nothing(finish: Any) -> None:
    def ends(events: list[Event], last: Any) -> list[Event]:
        return [*events[:-1], *([replace(events[-1], finish=last)] if last else [])]  # type: ignore[type-var]

    off, on = request([PLAIN] * 3, "off"), request([chain(2, 1, Times(0.001, 0.01, 0.0, 0.0))], "on")
    for one, other in ((finish, "length"), ("length", finish)):
        found = figures.runs([header(), *ends(off, one), *ends(on, other)])
        assert figures.without_guesses(found, found[1]) is (found[0] if finish in ("stop", "length") else None)


def test_a_rule_s_run_is_paired_in_its_own_order() -> None:
    """Plain decoding is that of any rule, but the second run of another rule is not the second of this one."""
    one = chain(2, 1, Times(0.001, 0.01, 0.0, 0.0))
    plain = [*request([PLAIN] * 3, "a"), *request([PLAIN] * 3, "b")]
    found = figures.runs([header(), *plain, *request([one], "c", "ratio"), *request([one], "d")])
    assert [figures.without_guesses(found, run) for run in found[2:]] == [found[0], found[0]]


@drawn
def test_the_charts_say_one_estimate() -> None:
    rounds = [replace(PLAIN, drafter="model")] * 4 + [chain(3, 2, Times(0.002, 0.011, 0.0, 0.0))] * 3
    run, = found = figures.runs([header(), *request(rounds)])
    plain = figures.plain(found, found)
    assert plain is not None and (about := plain.estimate(run)) is not None
    with style.sheet("light") as colours:
        for paint, data in ((charts_time.timeline, (run, None, plain)), (charts_time.gantt, (run, None, plain, 0))):
            figure = style.figure(5.4)
            paint(figure, colours, data)
            told = " ".join(text.get_text() for axes in figure.axes for text in [*axes.texts, axes._left_title])
            assert f"about {about.gain:.2f}×" in told
    assert figures.Plain(0.01, True, "").estimate(figures.runs([header(), *request([])])[0]) is None


def test_depths_without_times_have_no_speed() -> None:
    rounds = [PLAIN] * 4 + [chain(1, 1, Times(0.0, 0.0, 0.0, 0.0))] * 3 + [chain(2, 2, Times(0.0, 0.01, 0.0, 0.0))] * 3
    found = figures.runs([header(), *request(rounds)])
    (line,) = figures.payoffs(found, found)
    assert [speed.depth for speed in line.measured] == [2]


@drawn
def test_great_depths_have_few_ticks() -> None:
    found = figures.runs([header(), *request([PLAIN] * 4 + [chain(128, 20, Times(0.002, 0.005, 0.0, 0.0))] * 3)])
    with style.sheet("light") as colours:
        figure = style.figure(5.4)
        charts.pays(figure, colours, figures.payoffs(found, found))
        ticks = figure.axes[0].get_xticks()
    assert list(ticks) == list(range(0, 129, 16))


def test_a_speed_is_as_sure_as_its_rounds_are_alike() -> None:
    """Two rounds of ten milliseconds, of one token and of three, beside plain ones of five."""
    first, other = (chain(2, stood, Times(0.004, 0.006, 0.0, 0.0)) for stood in (0, 2))
    plain = figures.Plain(0.005, True, "")
    (run,) = figures.runs([header(), *request([first, other])])
    found = plain.estimate(run)
    assert found is not None and (found.gain, found.rounds, found.half) == pytest.approx((1.0, 2, figures.Z95 / 2))
    (run,) = figures.runs([header(), *request([first])])
    single = plain.estimate(run)
    assert single is not None and single.gain == pytest.approx(0.5) and single.half == float("inf"), "nobody knows"


def test_two_traces_differ_for_better_or_worse() -> None:
    guessed, refused = chain(2, 2, Times(0.001, 0.01, 0.0, 0.0)), chain(2, 1, Times(0.001, 0.01, 0.0, 0.0))
    a, b = (figures.runs([header(), *request([one] * 3)]) for one in (refused, guessed))
    found = {change.metric: change for change in figures.changes(a, b)}
    assert {name: change.better for name, change in found.items()} == {
        "tokens_per_s": 1, "ttft_s": 0, "tpot_s": 1, "acceptance_length": 1, "draft_utilisation": 1, "passes_per_token": 1}
    assert (found["tpot_s"].a, found["tpot_s"].b) == pytest.approx((0.03 / 6, 0.03 / 9))
    assert (found["passes_per_token"].a, found["passes_per_token"].b) == pytest.approx((4 / 7, 4 / 10))
    assert found["draft_utilisation"].ratio == pytest.approx(2.0) and found["tpot_s"].ratio == pytest.approx(2 / 3)
    assert {change.better for change in figures.changes(b, a)} == {-1, 0}


def test_what_began_before_the_trace_is_none_of_its_runs() -> None:
    late, whole = request([PLAIN] * 2, "late")[2:], request([PLAIN], "whole")
    (run,) = figures.runs([header(), *late[:1], *whole, *late[1:]])
    assert run.name.startswith("whole") and len(run.rounds) == 1
