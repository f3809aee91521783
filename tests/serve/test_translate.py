"""What a request means to the engine: every option, at the edge of what it may say and just beyond, and who has the last word."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from serve.serving import ChatLetters

from draftproof import Sampling
from draftproof.engine.port import TokenEvent
from draftproof.serve.refusal import Refusal, of_validation
from draftproof.serve.schema import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, ChatRequest, CompletionRequest
from draftproof.serve.stream import Pacer
from draftproof.serve.translate import ONE, Headers, Order, chat, completion


def order(headers: dict[str, str] | None = None, **body: Any) -> Order:
    return completion(CompletionRequest.model_validate_json(json.dumps({"prompt": "ab", **body})), Headers.of(headers or {}))


def spoken(**body: Any) -> Order:
    request = ChatRequest.model_validate_json(json.dumps({"messages": [{"role": "user", "content": "ab"}], **body}))
    return chat(request, Headers(), SimpleNamespace(name="letters", tokenizer=ChatLetters()))  # type: ignore[arg-type]


def test_every_option_reaches_the_engine() -> None:
    same: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1.0,
                            "frequency_penalty": 2.0, "min_tokens": 2, "ignore_eos": True, "max_tokens": 7, "top_k": 3, "seed": 9, "n": 2,
                            "logprobs": 1}
    nothing: dict[str, Any] = {"prediction": ""}
    found = order(**same, stop=["x", "y"], stop_token_ids=[4], bad_words=["z"], logit_bias={"5": -1.0}, guided_regex="a").sampling
    assert found == Sampling(**same, **nothing, stop=("x", "y"), stop_token_ids=(4,), bad_words=("z",), logit_bias={5: -1.0},
                             grammar={"regex": "a"})
    assert order().sampling == Sampling(**nothing)
    for said, meant in (({"temperature": 0}, {"temperature": 0}), ({"top_p": 0}, {"top_p": ONE}), ({"top_k": -1}, {"top_k": 0}),
                        ({"stop": "xy"}, {"stop": ("xy",)}), ({"stop": ""}, {}), ({"seed": -1}, {}), ({"seed": 0}, {"seed": 0}),
                        ({"presence_penalty": 0}, {}), ({"logprobs": 0}, {"logprobs": 0})):
        assert order(**said).sampling == Sampling(**nothing, **meant), said


@pytest.mark.parametrize(("said", "tokens"), [({}, 256), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6),
                                              ({"max_tokens": 7, "max_completion_tokens": 7}, 7)])
def test_a_chat_has_two_names_for_its_longest_answer(said: dict[str, int], tokens: int) -> None:
    assert spoken(**said).sampling.max_tokens == tokens
    with pytest.raises(Refusal, match="differ") as refused:
        spoken(max_tokens=7, max_completion_tokens=8)
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize(("said", "count"), [({}, None), ({"logprobs": False}, None), ({"logprobs": False, "top_logprobs": 0}, None),
                                             ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)])
def test_a_chat_asks_for_log_probabilities_in_two_fields(said: dict[str, Any], count: int | None) -> None:
    assert spoken(**said).sampling.logprobs == count


def test_a_body_has_the_last_word_about_its_class() -> None:
    named = {"x-draftproof-class": "code"}
    assert (order(named).prompt_class, order().prompt_class) == ("code", None)
    assert order(named, metadata={"prompt_class": "chat"}).prompt_class == "chat" and order({"x-draftproof-class": "x" * 64}).prompt_class
    for wrong in ("", "a b", "x" * 65):
        with pytest.raises(Refusal, match="header X-Draftproof-Class") as refused:
            order({"x-draftproof-class": wrong})
        assert refused.value.param == "prompt_class"


def test_a_header_that_says_nothing_of_speculation_is_refused_by_its_name() -> None:
    wishes = [order({"x-draftproof-speculation": said}).speculation for said in ("on", "off", "none", '{"depth": 2}')]
    assert wishes == [None, {"drafter": "none"}, {"drafter": "none"}, {"depth": 2}]
    for wrong in ("", "maybe", "{", "[]", '{"deep": 1}'):
        with pytest.raises(Refusal, match="expected off, on or a JSON object") as refused:
            order({"x-draftproof-speculation": wrong})
        assert refused.value.param == "X-Draftproof-Speculation"


def test_who_asks_is_the_user_before_all_other_names() -> None:
    names: dict[str, Any] = {"user": "a", "safety_identifier": "b", "metadata": {"user": "c"}}
    assert [order(**{name: names[name] for name in list(names)[first:]}).user for first in range(4)] == ["a", "b", "c", None]


@pytest.mark.parametrize(("options", "told"), [
    (None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)])
def test_a_stream_tells_its_usage_where_it_is_asked_for(options: dict[str, Any] | None, told: bool) -> None:
    assert order(stream=True, stream_options=options).include_usage is told is spoken(stream=True, stream_options=options).include_usage


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(("name", "fits", "beyond"), [
    ("guided_json", nested(MAX_SCHEMA_DEPTH), nested(MAX_SCHEMA_DEPTH + 1)),
    ("guided_json", {"a": "x" * (MAX_SCHEMA_CHARS - 9)}, {"a": "x" * (MAX_SCHEMA_CHARS - 8)}),
    ("logit_bias", {str(i): 0.5 for i in range(1024)}, {str(i): 0.5 for i in range(1025)}),
    ("stop", ["x"] * 16, ["x"] * 17), ("stop", ["x" * 256], ["x" * 257]), ("n", 32, 33), ("logprobs", 20, 21),
    ("prompt", ["x"] * 32, ["x"] * 33), ("metadata", {str(i): "" for i in range(16)}, {str(i): "" for i in range(17)}),
    ("speculation", {"depth": 64}, {"depth": 65}), ("user", "x" * 512, "x" * 513),
], ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "")
def test_limits_are_the_last_that_fits(name: str, fits: Any, beyond: Any) -> None:
    order(**{name: fits})
    with pytest.raises(ValidationError) as error:
        order(**{name: beyond})
    assert str(of_validation(error.value).param).split(".")[0] == name


@pytest.mark.parametrize(("body", "place"), [
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"), ({"stop": 7}, "stop"), ({"stop": ["a", ""]}, "stop.1"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name")])
def test_a_mistake_is_told_by_the_names_of_fields_alone(body: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as error:
        spoken(**body)
    assert of_validation(error.value).param == place


def test_pieces_of_a_stream_are_cut_as_was_agreed() -> None:
    events = [TokenEvent(token, "", "plain", 0, "r", finish="length" if token == 4 else None) for token in range(6)]
    pacer = Pacer("tokens:2")
    assert pacer.cut({0: events[:3]}) == [(0, events[:2])] and pacer.cut({1: events[3:4]}) == []
    assert pacer.cut({0: events[4:5]}) == [(0, [events[2], events[4]])] and pacer.cut({}, last=True) == [(1, events[3:4])]
    for chunks, seconds in (("ms:250", 0.25), ("round", 0.0)):
        assert Pacer(chunks).wait_s == seconds and Pacer(chunks).cut({0: events[:3], 1: events[3:4]}) == [(0, events[:3]), (1, events[3:4])]
