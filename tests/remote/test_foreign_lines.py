"""Lines that vLLM does not send, or sends only sometimes: no text hangs on one, and no other text hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from remote.scripted import DONE, Lines, Scripted, chunk, data, engine_over, plain, write

from draftproof import Memory
from draftproof.remote.vllm import VllmEngine
from draftproof.trace.events import RoundDone
from draftproof.trace.report import requests

Make = Callable[..., VllmEngine]
TOPS = {"tokens": ["token_id:1", "token_id:2"], "token_logprobs": [-0.5, None], "top_logprobs": [{"token_id:1": -0.5}, None]}


@pytest.fixture
def make(target: Any) -> Iterator[Make]:
    closing: list[Callable[[], None]] = []

    def build(*lines: Lines, **more: Any) -> VllmEngine:
        servers = [Scripted(each) for each in lines]
        engine = engine_over(target, servers, **more)
        closing.extend([engine.close, engine.fleet.close, *(server.close for server in servers)])
        return engine

    yield build
    for close in closing:
        close()


def once(*lines: bytes) -> Lines:
    """These lines for the first request, and a good text for the others."""
    left = [lines]
    return lambda body: left.pop() if left else plain(body)


@pytest.mark.parametrize("line", [
    data({"error": "upstream timed out"}), data({"object": "error", "message": "EngineCore died", "code": 500}), b"data: []\n\n",
    b"data: 1\n\n", data({"choices": [None]}), data({"choices": 1}), data({"choices": [], "usage": {"prompt_tokens_details": [1]}}),
    data({"choices": [], "metrics": [1]}), chunk([2, -1]), chunk([2, 1 << 40]), chunk([2, None]), chunk([2, True]),
    chunk([1, 2], logprobs=TOPS), chunk([1, 2], logprobs={"tokens": ["token_id:1"]}), chunk([1], logprobs=[1])])
def test_a_line_of_another_form_moves_the_text(make: Make, line: bytes) -> None:
    engine = make(once(chunk([1]), line, DONE))
    handle = write(engine)
    assert handle.failure is None and handle.output == [1, *[7] * 11] and handle.restarted == 1


def test_the_words_of_an_error_are_told(make: Make) -> None:
    for document, words in (({"error": "upstream timed out"}, "upstream timed out"), ({"error": {"message": "engine died"}}, "one: engine"),
                            ({"object": "error", "message": "engine died"}, "one: engine died"), ({"error": {"code": 5}}, "'code': 5"),
                            ([], "[], expected")):
        handle = write(make(lambda body, document=document: [chunk([1]), data(document)]))
        assert words in str(handle.failure)


def test_no_error_is_none(make: Make) -> None:
    choice = {"token_ids": [1], "finish_reason": None}
    handle = write(make(lambda body: [data({"error": None, "choices": [choice]})] * 11 + [chunk([1], "length"), DONE]))
    assert handle.output == [1] * 12 and not handle.restarted


def told(**metrics: Any) -> Lines:
    """1 token, 3 steps of 4 tokens and one of 1, and what is said of them."""
    def lines(body: dict[str, Any]) -> Iterable[bytes]:
        yield chunk([1])
        for _ in range(3):
            yield chunk([2, 3, 4, 5])
        yield chunk([6], "length")
        yield data({"choices": [], "metrics": {"speculative_decoding": metrics} if metrics else None})
        yield DONE

    return lines


TOTALS = {"num_spec_tokens": 5, "num_draft_tokens": 20, "num_accepted_draft_tokens": 9, "num_spec_steps": 4,
          "acceptance_histogram": [1, 0, 0, 3, 0, 0], "mean_acceptance_length": 3.25}
LISTS = {"per_step_accepted": [3, 3, 3, 0], "per_step_drafted": [5, 5, 5, 5]}
FLAG = "--per-request-spec-decode-metrics detailed"


@pytest.mark.parametrize(("metrics", "drafted", "rounds", "why"), [
    (TOTALS | LISTS, 20, 4, ""), (TOTALS, 20, 4, FLAG), ({}, 9, 4, FLAG), (LISTS | {"per_step_drafted": [5]}, 9, 4, "contradict"),
    (TOTALS | {"acceptance_histogram": [9, 9]}, 9, 4, "contradict"),
    (TOTALS | {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "acceptance_histogram": [0] * 6}, 0, 13, "")])
def test_what_a_report_lacks(make: Make, metrics: dict[str, Any], drafted: int, rounds: int, why: str,
                             caplog: pytest.LogCaptureFixture) -> None:
    engine, memory = make(told(**metrics)), Memory()
    engine.events(memory)
    with caplog.at_level(logging.WARNING):
        handles = [write(engine, max_tokens=14) for _ in range(2)]
    found = handles[0].completion().metrics
    assert (found["rounds"], found["drafted"], found["accepted"]) == (rounds, drafted, 9 if drafted else 0)
    reasons = {event.draft_reason for event in memory.events if isinstance(event, RoundDone)}
    assert all(why in reason for reason in reasons) and not any("lost" in reason for reason in reasons) and bool(why) == any(reasons)
    assert sum("tell" in record.message for record in caplog.records) == bool(why), "once"
    assert requests(memory.events)[handles[0].id].tally.as_metrics() == {k: found[k] for k in handles[0].tally.as_metrics()}


def test_an_end_is_what_the_server_calls_it(make: Make) -> None:
    for finish in ("length", "stop"):
        handle = write(make(lambda body, finish=finish: [chunk([1, 2, 3]), chunk([], finish), DONE]))
        assert (handle.finish, handle.output) == (finish, [1, 2, 3])


def test_the_server_is_told_where_texts_end(target: Any, make: Make) -> None:
    server = Scripted(plain)
    try:
        engine = engine_over(target, [server])
        write(engine, stop_token_ids=(9,), ignore_eos=False)
        write(engine, stop_token_ids=(9,))
        engine.fleet.close()
    finally:
        server.close()
    assert [body["stop_token_ids"] for body in server.bodies] == [sorted({9, *target.eos_ids}), [9]]


def test_arms_hold_what_belongs_to_them(make: Make) -> None:
    engine = make(plain)
    write(engine)
    before = engine.stats()["speculation"]["arms"]["speculative"]
    for _ in range(3):                                     # cancelled before a token came
        engine.cancel(engine.submit([5, 11])[0].request)
    assert engine.stats()["speculation"]["arms"]["speculative"] == {**before, "requests": 4}
    engine = make(lambda body: [chunk([1]), chunk([2, 3])], plain, plain=(1,))
    handle = write(engine)
    assert handle.output[:3] == [1, 2, 3] and handle.restarted == 1
    assert {name: arm["requests"] for name, arm in engine.stats()["speculation"]["arms"].items()} == {"moved": 1}, "of neither"


def test_a_server_that_comes_back_under_another_name(target: Any, make: Make) -> None:
    server = Scripted(plain)
    engine = engine_over(target, [server])
    try:
        assert write(engine).failure is None
        server.name = "another"
        assert write(engine).failure is None and [body["model"] for body in server.bodies] == ["m", "another"]
    finally:
        engine.fleet.close()
        server.close()
