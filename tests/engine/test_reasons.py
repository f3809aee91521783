"""What an answer says of how far was guessed, and why: its own text's reason, and the operator's word where that decided."""

from __future__ import annotations

from typing import Any

import pytest
from engine.engine_support import VOCABULARY, table

from draftproof import Completion, Engine, EngineConfig, Sampling
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.speculation import NO_CAP
from draftproof.serve.metrics import as_gauges


def engine_of(depth: Any = 4) -> Engine:
    return Engine(table(), NgramDrafter(1, 3), depth=depth, config=EngineConfig(trace="summary"))


def written(engine: Engine, tokens: int = 30, **wish: Any) -> Completion:
    return engine.generate([1, 2, 3, 1, 2, 3], Sampling(seed=1, max_tokens=tokens, ignore_eos=True), speculation=wish or None)


@pytest.mark.parametrize("depth", [4, "auto"])
def test_the_operators_cap_is_the_reason_where_it_decides(depth: Any) -> None:
    with engine_of(depth) as engine:
        engine.set_speculation(depth_cap=0)
        out = written(engine)
        assert out.metrics["drafted"] == 0 and out.speculation["reason"] == "the operator's cap"
        assert {event.reason for event in out.trace if event.event == "round_done"} == {"the operator's cap"}
        assert engine.set_speculation()["reason"] == "the operator's cap"
        engine.set_speculation(depth_cap=3)
        assert written(engine, depth=8).speculation["reason"] == "the operator's cap"
        engine.set_speculation(depth_cap=NO_CAP)
        assert written(engine, depth=8).speculation["reason"] == "fixed by the request"


def test_the_state_tells_the_cap() -> None:
    with engine_of() as engine:
        for cap, told in ((None, None), (2, 2), (None, 2), (NO_CAP, None)):
            state = engine.set_speculation(depth_cap=cap)
            assert state["depth_cap"] == told
            assert as_gauges(state).get("spec_decode_depth_cap") == told, "absent where there is none"


def test_the_end_of_a_text_is_its_reason_only_where_there_is_no_other() -> None:
    with engine_of() as engine:
        assert written(engine).speculation["reason"] == "fixed" == engine.set_speculation()["reason"]
        assert written(engine, 3).speculation["reason"] == "the end of the text is near"
        assert written(engine, 1).speculation["reason"] == "no round yet", "and not that of another text"


def test_texts_side_by_side_have_their_own_reasons() -> None:
    with engine_of() as engine:
        handles = [engine.submit([1, 2, 3], Sampling(seed=1, max_tokens=20, ignore_eos=True), speculation=wish)[0]
                   for wish in ({"depth": 2}, None)]
        while not all(handle.done for handle in handles):
            engine.step()
        assert [handle.completion().speculation["reason"] for handle in handles] == ["fixed by the request", "fixed"]


def test_a_switched_off_text_has_no_depth() -> None:
    with engine_of() as engine:
        by_wish = written(engine, drafter="none").speculation
        engine.set_speculation(enabled=False)
        by_switch = written(engine).speculation
        assert by_wish["state"] == by_switch["state"] == "off" and by_wish["depth"] == by_switch["depth"] == 0


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_text_that_asked_for_no_drafter_is_recorded_under_none(others: int, beside: bool, enabled: bool) -> None:
    """And not under the engine's: it is what a text with guesses is compared with."""
    with Engine(table(), NgramDrafter(1, 3), depth=4, others=[AlwaysWrong(VOCABULARY)] * others) as engine:
        engine.set_speculation(enabled=enabled)
        handles = [engine.submit([1, 2, 3, 1, 2, 3], Sampling(seed=1, max_tokens=20, ignore_eos=True), speculation=wish)[0]
                   for wish in ({"drafter": "none"}, None)[:1 + beside]]
        while not all(handle.done for handle in handles):
            engine.step()
        found = [{event.drafter for event in handle.completion().trace if event.event == "round_done"} for handle in handles]
    assert found == [{"none"}, {"ngram"}][:1 + beside]


@pytest.mark.parametrize(("depth", "wish", "told"), [(4, "auto", 4), (4, 2, 2), ("auto", "auto", "auto"), ("auto", 2, 2)])
def test_the_depth_that_is_told_is_the_one_that_was_guessed_by(depth: Any, wish: Any, told: Any) -> None:
    """An engine of a fixed depth has no automatic one for a request that asks for it."""
    with engine_of(depth) as engine:
        assert written(engine, depth=wish).speculation["depth"] == told
