"""How a token was judged, in the charts: several guesses of one place, and guesses without a law, are explained as the rules judge them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import Engine, EngineConfig, Jsonl, Sampling
from draftproof.cli import run
from draftproof.core.tree import tree_odds
from draftproof.drafters.model import ModelDrafter
from draftproof.models.fake import TableTarget
from draftproof.trace.events import Alternative, NodeRecord, RequestStarted, RoundDone, Times, TokenRecord, TraceStarted
from draftproof.trace.judged import Judgement, judgement
from draftproof.trace.sinks import read_trace, to_json
from draftproof.view import charts_token, style

drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib: the extra report")
P, Q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.5, 0.3, 0.1]


def judged(path: Path, drafter: str | None, **options: Any) -> list[tuple[str, RoundDone, int, Judgement]]:
    """(role, round, place, judgement) of every token of one exact little run."""
    sink, target = Jsonl(path), TableTarget(vocab_size=6, order=1, seed=1)
    guesser = drafter or ModelDrafter(TableTarget(vocab_size=6, order=1, seed=2, sharpness=1.1))
    with Engine(target, guesser, config=EngineConfig(trace="full", trace_alternatives=6), sinks=[sink], **options) as engine:
        engine.generate([0, 1, 2] * 4, Sampling(temperature=0.9, seed=7, max_tokens=60))
    sink.close()
    events = list(read_trace(path))
    (request,) = [event for event in events if isinstance(event, RequestStarted)]
    return [(token.role, event, place, judgement(request, event, place)) for event in events if isinstance(event, RoundDone)
            for place, token in enumerate(event.tokens)]


@pytest.mark.parametrize(("drafter", "options"), [("ngram", {"depth": 4}), (None, {"depth": 4}), (None, {"depth": 3, "tree": 9})])
def test_the_coin_lies_below_the_limit_where_the_guess_stood(tmp_path: Path, drafter: str | None, options: dict[str, Any]) -> None:
    counts = {True: 0, False: 0}
    for role, *_, found in judged(tmp_path / "t.jsonl", drafter, rule="ratio", **options):
        one = found.decisive
        assert one is None or (one.fate == "accepted") == (role == "accepted")
        if one is not None and one.limit is not None:
            assert one.coin is not None and (one.coin < one.limit) == (one.fate == "accepted")
            counts[role == "accepted"] += 1
    assert min(counts.values()) >= 5


def of_two(q: list[float] | None, fates: tuple[str, str], rule: str = "ratio") -> tuple[RoundDone, Judgement]:
    """Tokens 1 and 2 were guessed at one place, of four tokens in all."""
    nodes = tuple(NodeRecord(i, -1, fate, P[i], q and q[i], None, coin)  # type: ignore[arg-type]
                  for i, fate, coin in zip((1, 2), fates, (0.9, 0.1), strict=True))
    stood = fates[1] == "accepted"
    laws = [tuple(Alternative(i, chance) for i, chance in enumerate(law or [])) for law in (P, q)]
    record = RoundDone("r", 0, 1.0, 1, 4, 1, "d", "", "", nodes, (TokenRecord(2 if stood else 0, "accepted" if stood else "correction",
                                                                             P[2 if stood else 0], None, *laws),), "", Times(0, 0, 0, 0))
    return record, judgement(RequestStarted("r", 0.0, 3, 0, {"temperature": 1.0}, 1, 0, rule=rule), record, 0)


@pytest.mark.parametrize("q", [Q, None])
def test_later_guesses_are_judged_against_what_is_left(q: list[float] | None) -> None:
    _, found = of_two(q, ("rejected", "rejected"))
    p, law = (None if rows is None else torch.tensor([rows] * 3, dtype=torch.float64) for rows in (P, q))
    assert p is not None
    odds = tree_odds(p, None if law is None else law[:2], [1, 2], [-1, -1])
    assert [one.limit for one in found.guesses] == pytest.approx(odds.accept.tolist())
    by_token = {one.token: left for one, left in zip(found.candidates, found.left, strict=True)}
    rest = torch.tensor([by_token[token] for token in range(4)], dtype=torch.float64)
    assert (rest / rest.sum()).tolist() == pytest.approx(odds.rest(0).tolist())


def test_a_limit_that_the_trace_cannot_tell_is_none() -> None:
    record, _ = of_two(Q, ("rejected", "rejected"))
    token = record.tokens[0]._replace(alternatives=(Alternative(0, P[0]),))
    found = judgement(RequestStarted("r", 0.0, 3, 0, {"temperature": 1.0}, 1, 0, rule="ratio"),
                      RoundDone("r", 0, 1.0, 1, 4, 1, "d", "", "", record.nodes, (token,), "", Times(0, 0, 0, 0)), 0)
    assert [one.limit for one in found.guesses] == [pytest.approx(0.6), None]


def test_what_a_drafter_gave_its_guesses_is_known_without_its_likeliest() -> None:
    record, _ = of_two(Q, ("rejected", "rejected"))
    record = replace(record, tokens=(record.tokens[0]._replace(draft_alternatives=()),))
    found = judgement(RequestStarted("r", 0.0, 3, 0, {"temperature": 1.0}, 1, 0, rule="ratio"), record, 0)
    assert {one.token: (one.p, one.q) for one in found.candidates} == {0: (P[0], None), 1: (P[1], Q[1]), 2: (P[2], Q[2]), 3: (P[3], None)}


@pytest.fixture
def sheet() -> Iterator[style.Colours]:
    with style.sheet("light") as colours:
        yield colours


def said(colours: style.Colours, record: RoundDone, found: Judgement) -> tuple[Any, str]:
    figure = style.figure(4.8)
    charts_token.verification(figure, colours, (record, 0, found, str))
    every = [*figure.axes, *(child for axes in figure.axes for child in axes.child_axes)]
    return figure, " ".join(text.get_text() for axes in every for text in [*axes.texts, axes._left_title, *axes.get_yticklabels()])


@drawn
def test_the_chart_explains_the_guess_that_stood(sheet: style.Colours) -> None:
    for q in (Q, None):
        figure, text = said(sheet, *of_two(q, ("discarded", "accepted")))
        assert "guess 2 of 2" in text and "the guess stands" in text and "u = 0.100" in text and "◇ 1" in text and "★ ◇ 2" in text
    _, text = said(sheet, *of_two(None, ("discarded", "accepted"), "match"))
    assert "one of the guesses is the target’s choice: it stands" in text
    figure, text = said(sheet, *of_two(None, ("rejected", "rejected")))
    assert "p = 0.300" in text and "every u lies beyond" in text
    assert [bar.get_width() for bar in figure.axes[1].patches] == pytest.approx([0.4 / 0.7, 0, 0, 0.1 / 0.7])


@drawn
def test_block_and_lossy_are_drawn_by_their_own_rules(sheet: style.Colours) -> None:
    record, found = of_two(Q, ("accepted", "rejected"), "block")
    _, text = said(sheet, record, found)
    assert "lower bound" not in text and "p/q" not in text and "u = 0.900" in text and "u = 0.100" in text
    assert [one.limit for one in found.guesses] == [None, None]
    lossy = {("discarded", "accepted"): "p = 0.200: typical, it stands", ("rejected", "rejected"): "the target’s own choice"}
    for fates, told in lossy.items():
        _, text = said(sheet, *of_two(Q, fates, "lossy-typical"))
        assert told in text and "LOSSY" in text and "target’s choice: it stands" not in text


@drawn
def test_a_residual_without_q_is_a_bound(sheet: style.Colours) -> None:
    record, _ = of_two(Q, ("rejected", "rejected"))
    token = record.tokens[0]._replace(draft_alternatives=tuple(Alternative(i, Q[i]) for i in (1, 2)))
    record = replace(record, nodes=record.nodes[:1], tokens=(token,))
    found = judgement(RequestStarted("r", 0.0, 3, 0, {"temperature": 1.0}, 1, 0, rule="ratio"), record, 0)
    assert found.at_most == [True, False, False, True]
    assert "≤ 0.400" in said(sheet, record, found)[1]


@drawn
def test_words_are_those_of_the_request_s_own_model(tmp_path: Path) -> None:
    record, _ = of_two(None, ("rejected", "rejected"))
    events: list[Any] = []
    for target, words in (("t", ("zero", "one")), ("u", ("null", "eins")), ("t", None)):
        events += [TraceStarted(1, target, "model", "match", "2", {}, words), RequestStarted("r", 0.0, 3, 0, {}, 1, 0), record]
    (tmp_path / "t.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
    out = tmp_path / "a.svg"
    for number, word in enumerate(("one", "eins", "one")):
        assert run(["view", str(tmp_path / "t.jsonl"), "--chart", "tree", "--request", str(number), "--out", str(out)]) == 0
        assert f"{word}<" in out.read_text()
