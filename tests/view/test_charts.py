"""Charts: what is drawn is what the report counts, read back from the picture; a model's text stays text; every picture can be had."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from test_imports import write_all
from traces import HOSTILE, engines, hostile

from draftproof import Engine, EngineConfig, Sampling
from draftproof.cli import run
from draftproof.core import budget
from draftproof.core.tally import Tally
from draftproof.models.fake import TableTarget
from draftproof.remote.imports import load
from draftproof.trace import figures, judged
from draftproof.trace.events import NodeRecord, RoundDone, TokenRecord
from draftproof.trace.report import requests
from draftproof.trace.sinks import Jsonl, read_trace, to_json
from draftproof.view import bundle, charts, charts_time, charts_token, style

drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib: the extra report")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("charts") / "engines.jsonl"
    engines(path)
    return path


@pytest.fixture(scope="module")
def runs(trace: Path) -> list[figures.Run]:
    return figures.runs(read_trace(trace))


@pytest.fixture
def sheet() -> Iterator[style.Colours]:
    with style.sheet("light") as colours:
        yield colours


def named(runs: list[figures.Run], kind: str) -> figures.Run:
    """The arm off, chain, tree or ratio of the trace."""
    rule, trees = ("ratio" if kind == "ratio" else "match"), kind == "tree"
    found = [run for run in runs if run.rounds and run.started.rule == rule and run.kind.endswith("trees") == trees
             and run.guesses == (kind != "off")]
    assert len(found) == 1
    return found[0]


def heights(axes: Any) -> list[float]:
    return [patch.get_height() for patch in axes.patches]


def widths(axes: Any) -> list[float]:
    return [patch.get_width() for patch in axes.patches]


def said(figure: Any) -> str:
    return " ".join(text.get_text() for axes in figure.axes for text in [*axes.texts, axes.title, axes._left_title])


def test_runs_are_the_report_s(trace: Path, runs: list[figures.Run]) -> None:
    told = requests(read_trace(trace))
    for kind in ("off", "chain", "tree", "ratio"):
        one = named(runs, kind)
        assert one.report.metrics() == told[one.started.request].metrics()
        assert sum(part.emitted for part in one.rounds) == one.report.tally.emitted
        spent = sum(one.report.metrics()[f"{name}_s"] for name in charts_time.PHASES)
        assert sum(part.seconds for part in one.rounds) == pytest.approx(spent)
    off, chain = named(runs, "off"), named(runs, "chain")
    assert figures.without_guesses(runs, chain) is off and figures.without_guesses(runs, off) is None
    assert figures.without_guesses([run for run in runs if run is not off], chain) is None


def test_one_id_of_two_engines_is_two_runs(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text(trace.read_text() * 2)
    once, twice = figures.runs(read_trace(trace)), figures.runs(read_trace(path))
    assert len(twice) == 2 * len(once) and [run.index for run in twice] == list(range(len(twice)))
    assert [run.report.metrics() for run in twice] == 2 * [run.report.metrics() for run in once]


@drawn
def test_acceptance_is_drawn_as_counted(runs: list[figures.Run], sheet: style.Colours) -> None:
    data, figure = figures.acceptance(runs), style.figure(7.2)
    charts.acceptance(figure, sheet, data)
    by_position, lengths, classes, drafters = figure.axes
    tally = sum((run.report.tally for run in runs), Tally())
    assert heights(by_position) == tally.hazard and len(tally.hazard) >= 4
    whiskers = by_position.collections[0].get_segments()
    for share, segment, chance in zip(data.positions, whiskers, tally.hazard, strict=True):
        (_, low), (_, high) = segment
        assert (low, high) == pytest.approx(share.interval) and low <= chance <= high
    assert sum(heights(lengths)) == tally.rounds_drafted
    assert sum(n * count for n, count in enumerate(heights(lengths))) == tally.accepted
    assert [label.get_text() for label in classes.get_yticklabels()] == ["table"] and widths(classes) == [tally.draft_utilisation]
    assert sum(share.whole for share in data.drafters) == tally.drafted and widths(drafters) == [share.value for share in data.drafters]
    assert f"{tally.rounds_drafted:,} rounds" in said(figure)


def test_wilson_is_the_page_s() -> None:
    assert figures.wilson(0, 0) == (0.0, 1.0) and figures.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    if shutil.which("node") is None:
        return
    program = """import { wilson } from './tally.js';
        console.log(JSON.stringify([[0, 9], [5, 10], [300, 301]].map(([a, b]) => wilson(a, b))))"""
    done = subprocess.run(["node", "--input-type=module", "-e", program], cwd=bundle.PAGE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for found, pair in zip(json.loads(done.stdout), ((0, 9), (5, 10), (300, 301)), strict=True):
        assert found == pytest.approx(figures.wilson(*pair), abs=1e-4)


def slow(run_: figures.Run, scale: float) -> figures.Run:
    """The same run with times of a machine that knows what it is: plain pass 1 (the scale), a guess 0.1, a row 0.02, besides 0.05."""
    own = [one._replace(draft_s=0.1 * scale * one.depth * bool(one.drafted), score_s=scale * (1 + 0.02 * one.depth * bool(one.drafted)),
                        verify_s=0.05 * scale * bool(one.drafted), other_s=0.0) for one in run_.rounds]
    return figures.Run(run_.index, run_.header, run_.started, run_.report, own, run_.first_token, run_.prefill_s, run_.whole)


@drawn
def test_the_payoff_is_the_formulas(runs: list[figures.Run], sheet: style.Colours) -> None:
    mine = [slow(named(runs, kind), 0.01) for kind in ("off", "chain")]
    (line,), figure = figures.payoffs(mine, mine), style.figure(5.4)
    assert (line.plain.seconds, line.plain.measured) == (pytest.approx(0.01), True)
    assert (line.c, line.row, line.o) == pytest.approx((0.1, 0.02, 0.05))
    hazards = mine[1].report.tally.hazard
    assert [depth for depth, _ in line.predicted] == list(range(len(hazards) + 1)) and line.predicted[0][1] == 1
    for depth, gain in line.predicted[1:]:
        assert gain == pytest.approx(budget.speedup(budget.expected_tokens(hazards[:depth]), depth, 0.1, 1 + 0.02 * depth, 0.05))
        assert line.break_even[depth - 1] == pytest.approx(budget.break_even(depth, 0.1, 1 + 0.02 * depth, 0.05))
    best = max(line.predicted, key=lambda point: point[1])
    assert line.best == (best[0], pytest.approx(best[1]))
    for depth, gain, count, half in line.measured:
        assert half >= 0
        its = [one for one in mine[1].rounds if one.drafted and one.depth == depth]
        assert count == len(its) and gain == pytest.approx(sum(one.emitted for one in its) / len(its) / (1.05 + 0.12 * depth))
    charts.pays(figure, sheet, [line])
    (axes,) = figure.axes
    curve, even = [line_ for line_ in axes.lines if len(line_.get_xdata())]
    assert list(zip(*curve.get_data(), strict=True)) == line.predicted and list(even.get_ydata()) == [1, 1]
    whiskers, points = axes.collections
    assert [tuple(point) for point in points.get_offsets().tolist()] == [speed[:2] for speed in line.measured]
    for segment, speed in zip(whiskers.get_segments(), line.measured, strict=True):
        assert [y for _, y in segment] == pytest.approx([speed.gain - speed.half, speed.gain + speed.half])
    assert "break-even" in said(figure)


def test_without_times_nothing_is_said_of_speed(runs: list[figures.Run]) -> None:
    assert figures.payoffs([], [slow(named(runs, "chain"), 0.0)]) == [] and figures.plain([], []) is None
    alone = figures.plain([], [slow(named(runs, "chain"), 0.01)])
    assert alone is not None and not alone.measured and alone.seconds >= 0.01


@drawn
@pytest.mark.parametrize("kind", ["chain", "tree", "ratio"])
def test_time_charts_draw_every_round(runs: list[figures.Run], sheet: style.Colours, kind: str) -> None:
    one = named(runs, kind)
    off, plain = figures.without_guesses(runs, one), figures.plain(runs, [one])
    figure = style.figure(5.4)
    charts_time.gantt(figure, sheet, (one, off, plain, 0))
    lanes, bars = figure.axes
    shown = one.rounds[:charts_time.LANE_ROUNDS]
    spans = [path.get_extents() for collection in lanes.collections[:4 * len(shown)] for path in collection.get_paths()]
    assert [span.width for span in spans] == pytest.approx([part for part_ in shown for part in part_.parts])
    assert f"{sum(part.emitted for part in shown)} tokens in {len(shown)} passes" in said(figure)
    clock, emitted = one.report.clock, one.report.tally.emitted
    mine = [1e3 * total / emitted for total in (clock.draft_s, clock.score_s, clock.verify_s, clock.other_s)]
    assert widths(bars)[:4] == pytest.approx(mine) and f"{sum(mine):.2f} ms" in said(figure)
    if off is not None:
        assert widths(bars)[4] == pytest.approx(1e3 * sum(part.seconds for part in off.rounds) / off.report.tally.emitted)

    figure = style.figure(4.8)
    charts_time.rounds(figure, sheet, (one, 0))
    count, drawn_heights = len(one.rounds), heights(figure.axes[0])
    tally = one.report.tally
    sums = [sum(drawn_heights[count * part:count * (part + 1)]) for part in range(4)]
    assert sums == [tally.accepted, tally.emitted - tally.accepted, -tally.rejected, -(tally.drafted - tally.accepted - tally.rejected)]

    figure = style.figure(4.6)
    charts_time.timeline(figure, sheet, (one, off, plain))
    at, tokens = figure.axes[0].lines[0].get_data()
    assert tokens[0] == 1 and tokens[-1] == one.tokens == one.report.tally.completion_tokens
    assert at[-1] == pytest.approx(clock.last - clock.submitted) and at[0] == pytest.approx(clock.ttft_s)


def record_of(trace: Path, run_: figures.Run, shape: int, fates: set[str]) -> RoundDone:
    """A round of a run with at least so many guesses, of these fates among others."""
    for event in read_trace(trace):
        if isinstance(event, RoundDone) and event.request == run_.started.request and len(event.nodes) >= shape:
            if {node.fate for node in event.nodes} >= fates:
                return event
    raise AssertionError("no such round")


@drawn
def test_the_tree_has_every_guess(trace: Path, runs: list[figures.Run], sheet: style.Colours) -> None:
    record, figure = record_of(trace, named(runs, "tree"), 5, {"accepted", "discarded"}), style.figure(6)
    charts_token.tree(figure, sheet, (record, lambda token: f"<{token}>"))
    (axes,) = figure.axes
    own = record.tokens[-1].role != "accepted"
    boxes = [patch for patch in axes.patches if type(patch).__name__ == "FancyBboxPatch"]
    assert len(boxes) == len(record.nodes) + 1 + own and len(axes.patches) - len(boxes) == len(record.nodes) + own
    texts = [text.get_text() for text in axes.texts]
    for node in record.nodes:
        assert charts_token.GLYPHS[node.fate] + f"<{node.token}>" in texts
    assert any(charts_token.chance(node.p) in text for node in record.nodes for text in texts)
    depth, line = charts_token.layout([-1, 0, 0, 1, -1])
    assert depth == [1, 2, 2, 3, 1] and line == [0.5, 0.0, 1.0, 0.0, 2.0]


@drawn
def test_the_verification_draws_the_race_and_its_noise(trace: Path, runs: list[figures.Run], sheet: style.Colours) -> None:
    chain = named(runs, "chain")
    record = record_of(trace, chain, 2, {"accepted", "rejected"})
    place = len(record.tokens) - 1
    found = judged.judgement(chain.started, record, place)
    by_token = {one.token: one for one in found.candidates}
    token = record.tokens[place]
    assert by_token[token.token].g == pytest.approx(token.noise) and found.guess is not None and not found.guess.emitted
    fallen = next(node for node in record.nodes if node.fate == "rejected")
    assert by_token[fallen.token].g == pytest.approx(fallen.noise) and found.guess.token == fallen.token
    winner = max((one for one in found.candidates if one.target is not None), key=lambda one: one.target or 0.0)
    assert winner.emitted and all(by_token[one.token].p == one.probability for one in token.alternatives)
    figure = style.figure(4.8)
    charts_token.verification(figure, sheet, (record, place, found, str))
    laws, race = figure.axes
    shown = found.candidates[:charts_token.MOST_CANDIDATES]
    assert widths(laws) == [one.p or 0 for one in shown] + [one.q or 0 for one in shown]
    assert [point[0] for point in race.collections[0].get_offsets().tolist()] == [one.target for one in shown if one.target is not None]
    assert "it falls" in said(figure)


@drawn
def test_the_verification_draws_the_coin(trace: Path, runs: list[figures.Run], sheet: style.Colours) -> None:
    ratio = named(runs, "ratio")
    record = record_of(trace, ratio, 2, {"accepted", "rejected"})
    for place in range(len(record.tokens)):
        found = judged.judgement(ratio.started, record, place)
        if found.coin is None:
            continue
        figure = style.figure(4.8)
        charts_token.verification(figure, sheet, (record, place, found, str))
        coin = figure.axes[1].child_axes[0]
        limit = min(1.0, found.guess.p / found.guess.q)  # type: ignore[union-attr, operator]
        assert widths(coin)[0] == pytest.approx(limit) and coin.lines[0].get_xdata()[0] == found.coin
        stands = record.tokens[place].role == "accepted"
        assert (found.coin < limit) == stands and ("the guess stands" in said(figure)) == stands


@drawn
def test_two_traces_are_compared_by_their_metrics(runs: list[figures.Run], sheet: style.Colours) -> None:
    a, b = [slow(named(runs, "off"), 0.02)], [slow(named(runs, "chain"), 0.01)]
    changes = figures.changes(a, b)
    told = [group[0].report.metrics() for group in (a, b)]
    found = {change.metric: change for change in changes}
    assert found["tokens_per_s"].ratio == pytest.approx(told[1]["tokens_per_s"] / told[0]["tokens_per_s"])
    assert found["acceptance_length"].better == 1 and found["passes_per_token"].better == 1 and "draft_utilisation" not in found
    figure = style.figure(5)
    charts.compare(figure, sheet, ("a.jsonl", "b.jsonl", changes, [], figures.acceptance(b).positions))
    left, right = figure.axes
    assert widths(left) == pytest.approx([change.ratio - 1 for change in changes])
    (line,) = [line for line in right.lines if line.get_label() == "B"]
    assert list(line.get_ydata()) == b[0].report.tally.hazard


def nasty(tmp_path: Path) -> Path:
    """The hostile trace with a formula that is none, in tokens, names and classes."""
    path = hostile(tmp_path / "hostile.jsonl")
    path.write_text(path.read_text().replace("\"plain\"", json.dumps("$\\frac{1}{$ & <b>")))
    return path


@drawn
def test_hostile_texts_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["view", str(nasty(tmp_path)), "--chart", "all", "--out", str(out)]) == 0
    files = sorted(file.name for file in out.iterdir())
    assert {"acceptance.svg", "tree.svg", "rounds.svg", "verification.svg"} <= set(files)
    everything = ""
    for file in out.iterdir():
        tree = ElementTree.parse(file)                       # well-formed whatever the model wrote
        tags = {element.tag.removeprefix(SVG) for element in tree.iter()}
        assert not tags & {"script", "img", "image", "foreignObject", "a", "iframe"}, file
        assert not any(name.lower().startswith("on") or "href" in name and not value.startswith("#")
                       for element in tree.iter() for name, value in element.attrib.items()), file
        everything += "\n".join("".join(element.itertext()) for element in tree.iter(SVG + "text"))
    assert "<script>document.title='owned'</script>" in everything and "⟨202E⟩gnp.exe" in everything
    assert not set("\u202e\u0000\u001b\u2028") & set(everything)
    with style.sheet() as colours:
        figure = style.figure(3)
        record = RoundDone("r", 0, 1.0, 1, 4, 2, "$d$", "", "", tuple(NodeRecord(i, -1, "rejected") for i in range(3)),
                           (TokenRecord(3, "correction"),), "", next(read_round(tmp_path)).times)
        texts = ["$\\frac{1}{$", "</text><script>", "漢字 🚀", "\ud800"]
        charts_token.tree(figure, colours, (record, lambda token: texts[token]))
        style.save(figure, tmp_path / "one.svg", "svg")
        style.save(figure, tmp_path / "one.png", "png")
    words = ["".join(element.itertext()) for element in ElementTree.parse(tmp_path / "one.svg").iter(SVG + "text")]
    assert {"× $\\frac{1}{$", "× </text><scri…", "× 漢字 🚀", "→ ⟨D800⟩"} <= set(words)
    capsys.readouterr()


def read_round(tmp_path: Path) -> Iterator[RoundDone]:
    return (event for event in read_trace(tmp_path / "hostile.jsonl") if isinstance(event, RoundDone))


@drawn
def test_the_command_draws_files(trace: Path, runs: list[figures.Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pictures"
    assert run(["view", str(trace), "--chart", "all", "--out", str(out), "--with", str(trace), "--theme", "dark"]) == 0
    printed = capsys.readouterr()
    assert sorted(file.stem for file in out.iterdir()) == sorted(["acceptance", "compare", "gantt", "pays", "rounds", "timeline", "tree",
                                                                  "verification"])
    assert printed.out.splitlines()[0] == str(out / "acceptance.svg") and not printed.err
    again = tmp_path / "again.svg"
    assert run(["view", str(trace), "--chart", "tree", "--out", str(again), "--theme", "dark"]) == 0
    assert again.read_bytes() == (out / "tree.svg").read_bytes() and style.palette("dark")["card"] in again.read_text()
    one, index = tmp_path / "a.png", str(named(runs, "chain").index)
    assert run(["view", str(trace), "--chart", "gantt", "--request", index, "--round", "1", "--out", str(one)]) == 0
    assert one.read_bytes().startswith(b"\x89PNG")


@drawn
@pytest.mark.parametrize("request_id", [None, "0", "1"])
def test_rounds_behind_the_start_of_another_request_are_found(request_id: str | None, tmp_path: Path) -> None:
    path, out = tmp_path / "side.jsonl", tmp_path / "tree.svg"
    target, sink = TableTarget(vocab_size=6, order=1, seed=1), Jsonl(path)
    with Engine(target, "ngram", 4, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        engine.generate([0, 1, 2], Sampling(temperature=0.9, seed=7, max_tokens=24, n=2))
    sink.close()
    assert run(["view", str(path), "--chart", "tree", *(["--request", request_id] if request_id else []), "--out", str(out)]) == 0


@drawn
def test_charts_of_an_imported_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "imported.jsonl"
    path.write_text("".join(to_json(event) + "\n" for event in load(write_all(tmp_path / "answers.jsonl")).events))
    assert run(["view", str(path), "--chart", "all", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert {Path(line).stem for line in told.out.splitlines()} >= {"acceptance", "rounds", "tree", "timeline"}
    assert "verification is left out" in told.err and "compare is left out" in told.err
    tally = figures.acceptance(figures.runs(read_trace(path))).tally
    assert tally.drafted == sum(one.tally.drafted for one in requests(read_trace(path)).values())
    assert run(["view", str(path), "--chart", "gantt", "--request", "chatcmpl-L", "--out", str(tmp_path / "g.svg")]) == 0
    answers = str(tmp_path / "answers.jsonl")
    assert run(["view", answers, "--chart", "gantt", "--request", "none", "--out", str(tmp_path / "g.svg")]) == 1
    assert answers in capsys.readouterr().err, "the file is the one that was named"


@pytest.mark.parametrize(("arguments", "code", "told"), [
    (["--chart", "gantt"], 2, "--out"), (["--chart", "pie", "--out", "a.svg"], 2, "no such chart"),
    (["--out", "a.svg"], 2, "--out without --chart"),
    (["--chart", "gantt,tree", "--out", "a.svg"], 2, "name a folder"), (["--chart", "gantt", "--out", "a.gif"], 2, "FILE.svg"),
    (["--chart", "gantt", "--out", "no/such/a.svg"], 2, "does not exist"), (["--chart", "compare", "--out", "a.svg"], 2, "--with"),
    (["--with", __file__], 2, "--with without --chart"), (["--theme", "dark"], 2, "--theme without"),
    (["--chart", "gantt", "--out", "a.svg", "--request", "r99"], 1, "no request 'r99'"),
    *((["--chart", chart, "--out", "a.svg", "--round", "999"], 1, "no round 999") for chart in ("tree", "gantt", "rounds")),
    (["--chart", "verification", "--out", "a.svg", "--token", "99"], 1, "there is no --token 99"),
    (["--chart", "rounds", "--out", "a.svg", "--request", "0"], 1, "has no round"),
    (["--chart", "gantt", "--out", "a.svg", "--port", "0"], 2, "--port"),
])
def test_wrong_usage_is_one_line(trace: Path, tmp_path: Path, arguments: list[str], code: int, told: str, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["view", str(trace), *arguments]) == code
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1 and not list(tmp_path.iterdir()), error


def test_without_matplotlib_one_line_says_what_to_do(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["view", str(trace), "--chart", "gantt", "--out", str(tmp_path / "a.svg")]) == 1
    error = capsys.readouterr().err
    assert "draftproof[report]" in error and error.count("\n") == 1 and not (tmp_path / "a.svg").exists()


SIMULATIONS = {                                             # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour: str) -> list[float]:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(rgb: list[float]) -> float:
    return sum(weight * min(1.0, max(0.0, part)) for weight, part in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))


def lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, luminance(rgb), (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_apart(theme: str) -> None:
    colours = style.palette(theme)
    assert set(style.SERIES) <= set(colours) and colours["card"] != colours["ink"]
    sets = [("draft", "score", "verify"), ("score", "rejected"), ("accepted", "rejected")]        # others differ by hatches or places
    for kind, matrix in {"normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)), **SIMULATIONS}.items():
        seen = {name: lab([sum(m * part for m, part in zip(row, linear(value), strict=True)) for row in matrix])
                for name, value in colours.items()}
        for group in sets:
            for one, two in combinations(group, 2):
                distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[two], strict=True)) ** 0.5
                assert distance > 10, f"{one} and {two} look alike ({kind}, {theme}): {distance:.1f}"
    for name in ("ink", "quiet", "correction"):
        light, dark = sorted((luminance(linear(colours[one])) for one in (name, "card")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 4.5, f"{name} on the card of {theme}"


def test_labels_show_what_cannot_be_seen() -> None:
    assert style.words(" a b ") == "␣a b␣" and style.words("") == "∅" and style.words("  ") == "␣␣" and style.words("\n\t") == "↵⇥"
    assert style.words("x" * 99, 10) == "x" * 9 + "…" and re.fullmatch(r"⟨202E⟩.*", style.words(HOSTILE[3]))
    assert style.seconds(1.5) == "1.50 s" and style.seconds(0.0015) == "1.5 ms" and style.tick(0.4) == "400 ms" and style.tick(0.0) == "0"


def overlap(texts: list[Any]) -> list[tuple[str, str]]:
    """Texts of one axis that lie over their neighbours."""
    texts = sorted(texts, key=lambda text: text.get_window_extent().x0)
    return [(a.get_text(), b.get_text()) for a, b in pairwise(texts) if a.get_window_extent().overlaps(b.get_window_extent())]


@drawn
@pytest.mark.parametrize("stall", [0.3, 1.0])
def test_labels_of_short_passes_are_left_out(runs: list[figures.Run], sheet: style.Colours, stall: float) -> None:
    off, chain = named(runs, "off"), named(runs, "chain")
    rounds = [one._replace(at_s=chain.started.at_s + 0.1 + n * 0.02 + stall * (n > 5), score_s=0.016) for n, one in enumerate(chain.rounds)]
    plain = [one._replace(at_s=off.started.at_s + 0.1 + n * 0.002, score_s=0.002) for n, one in enumerate(off.rounds)]
    figure = style.figure(5.4)
    charts_time.gantt(figure, sheet, (replace(chain, rounds=rounds), replace(off, rounds=plain), None, 0))
    figure.canvas.draw()
    labels = [text for text in figure.axes[0].texts if text.get_text().startswith("+")]
    assert bool(labels) == (stall < 1) and overlap(labels) == []


@drawn
def test_the_legends_of_a_verification_hide_nothing(trace: Path, runs: list[figures.Run], sheet: style.Colours) -> None:
    chain = named(runs, "chain")
    record = record_of(trace, chain, 2, {"accepted", "rejected"})
    figure = style.figure(4.8)
    charts_token.verification(figure, sheet, (record, 0, judged.judgement(chain.started, record, 0), str))
    figure.canvas.draw()
    for axes in figure.axes:
        assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
