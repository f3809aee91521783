"""The cost curve of a target: what is measured, how it is read, and the documents it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from draftproof.bench.cells import Spread
from draftproof.bench.profile import Plan, Point, curve, document, experts_of, free_rows, plot, points_of, read_bandwidth
from draftproof.cli import run as command
from draftproof.commands.console import parameters
from draftproof.commands.profile import left_out, print_curve
from draftproof.errors import Failure, OptionError
from draftproof.models.fake import TableTarget
from draftproof.models.target import ExpertFacts


class Slow(TableTarget):
    """A table whose passes take a time of their own: 10, and 1 for every row beyond the eighth of a pass."""

    now = 0.0

    def score(self, slots, roots, drafts):  # type: ignore[no-untyped-def]
        scores = super().score(slots, roots, drafts)
        Slow.now += 10 + max(0, scores.logits.shape[0] - 8)
        return scores


def test_the_curve_is_what_passes_take() -> None:
    target = Slow(5)
    points = list(curve(target, Plan(rows=(1, 2, 4, 8), contexts=(3, 20), batches=(1, 4), repeats=3), clock=lambda: Slow.now))
    assert len(points) == 16 and not target.open_slots
    for p in points:
        assert p.seconds.median == p.seconds.low == p.seconds.high == 10 + max(0, p.rows * p.batch - 8)
    assert free_rows(points, 3, 1) == 8 and free_rows(points, 20, 4) == 2 and free_rows(points, 7, 1) is None


def test_a_dear_row_ends_what_is_free_even_if_a_wider_pass_is_cheap() -> None:
    points = [Point(rows, 8, 1, Spread(t, t, t)) for rows, t in ((1, 1.0), (2, 1.2), (3, 1.3), (4, 1.1))]
    assert free_rows(points, 8, 1) == 2


def test_what_does_not_fit_is_left_out() -> None:
    target = TableTarget(5, context=40)
    plan = Plan(rows=(1, 16), contexts=(30, 39, 64), batches=(1,), repeats=1)
    points = list(curve(target, plan))
    assert {(p.context, p.rows) for p in points} == {(30, 1), (39, 1)}
    assert [line.partition(": the target has room for 40 tokens")[0] for line in left_out(plan, points, target.context)] == [
        "left out: context 30, batch 1, rows 16", "left out: context 39, batch 1, rows 16", "left out: context 64, batch 1"]


def test_wider_passes_of_a_mixture_read_more_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, ticks = TableTarget(5), count()
    target.facts = replace(target.facts, weight_bytes=1000, parameters=500, experts=ExpertFacts(8, 2, 800, 400))
    points = list(curve(target, Plan(rows=(1, 2, 3), contexts=(8,), batches=(1, 2), repeats=2), clock=lambda: float(next(ticks))))
    record = json.loads(json.dumps(document(target, points, 1e9)))
    one, two = record["roofline"]["passes"]
    assert one["bytes"] == 400 and two["bytes"] == pytest.approx(200 + 800 * 3.5 / 8) and record["target"]["active_parameters"] == 200
    assert [wide["rows"] for wide in one["by_rows"]] == [1, 2, 3] and one["by_rows"][1]["bytes"] == pytest.approx(two["bytes"])
    assert experts_of(record) == (8, 2)
    assert experts_of({"target": "x"}) is None and experts_of({"target": {"experts": {"count": 3}}}) is None
    print_curve(record)
    assert "context 8, batch 1, by rows per sequence: 1.00 at 1, 1.38 at 2" in capsys.readouterr().out
    plot(record, tmp_path / "curve.svg")
    assert "2 of 8 experts" in parameters(target.facts) and "experts" not in parameters(TableTarget(5).facts)


def test_the_document_goes_both_ways_and_onto_paper(tmp_path: Path) -> None:
    target, ticks = TableTarget(5), count()
    points = list(curve(target, Plan(rows=(1, 2, 3), contexts=(8,), batches=(1, 2), repeats=2), clock=lambda: float(next(ticks))))
    record = json.loads(json.dumps(document(target, points, 1e9)))
    assert points_of(record) == points
    (first, _) = record["roofline"]["passes"]
    assert first["bytes"] == target.facts.weight_bytes and first["bytes_per_s"] == first["bytes"] / 1.0 and first["free_rows"] == 3
    with pytest.raises(Failure, match="no cost curve"):
        points_of({"cells": []})
    for wrong in ({"rows": "1"}, {"batch": 0}, {"seconds": {"median": 0.0, "low": 0.0, "high": 0.0}}, {"context": True},
                  {"seconds": {"median": "x", "low": 1, "high": 1}}, {"seconds": {"median": 1.0, "low": 2.0, "high": 2.0}}):
        with pytest.raises(Failure, match="point 1 of the cost curve"):
            points_of({"curve": [record["curve"][0] | wrong]})
    with pytest.raises(Failure, match="point 2 .* a point before it"):
        points_of({"curve": record["curve"][:1] * 2})
    pytest.importorskip("matplotlib")
    plot(record, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_bandwidth_is_bytes_over_seconds() -> None:
    ticks = count()
    assert read_bandwidth(torch.device("cpu"), megabytes=1, repeats=1, clock=lambda: float(next(ticks))) == 1 << 20
    assert read_bandwidth(torch.device("cpu"), megabytes=4, repeats=2) > 1e6


def test_the_command(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["profile", "--target", str(tiny_pair[0]), "--rows", "1,4", "--context", "16", "--batch", "1,2", "--repeats", "2"]
    assert command([*arguments, "--quick", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(p["batch"], p["rows"]) for p in record["curve"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert record["roofline"]["read_bytes_per_s"] > 0 and record["target"]["weight_bytes"] > 1000
    assert command(arguments) == 0 and "free rows" in capsys.readouterr().out
    assert command([*arguments, "--png", "x.jpg"]) == 2 and ".png or .svg" in capsys.readouterr().err
    assert command([*arguments, "--rows", "0"]) == 2 and "integers ≥ 1" in capsys.readouterr().err


def test_wrong_plans_are_refused() -> None:
    for wrong in ({"rows": ()}, {"batches": (0,)}, {"repeats": 0}):
        with pytest.raises(OptionError):
            Plan(**wrong)  # type: ignore[arg-type]
