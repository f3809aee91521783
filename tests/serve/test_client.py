"""The official client against the built-in demo model: what its users do, through its own code."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from serve.serving import Running, alone, letters, serving, words
from serve.test_faults import Around
from serve.test_http import until

from draftproof import Sampling
from draftproof.config import LoadConfig, ServeConfig
from draftproof.models.load import builtin, load_target
from draftproof.serve.gate import read_keys

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

MODEL = "draftproof-demo"
ASK: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA = {"type": "object",
          "properties": {"identifier": {"type": "integer", "minimum": 0, "maximum": 99}, "category": {"enum": ["alpha", "beta"]}},
          "required": ["identifier", "category"], "additionalProperties": False}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city, today.", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bonn", "Oslo"]}, "days": {"$ref": "#/$defs/days"}}, "required": ["city", "days"],
    "additionalProperties": False, "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTPROOF_API_KEYS", "tester the-secret-key")
        keys = read_keys(None)
    target = load_target(builtin("target"), LoadConfig(self_test=False))
    with serving(target, "prediction+model", keys=keys, name=MODEL, depth=4) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="the-secret-key", max_retries=0, timeout=60) as client:
        yield client


def plain(running: Running, **options: Any) -> Any:
    assert running.target.tokenizer is not None
    return alone(running.target, running.target.tokenizer.chat(ASK), Sampling(**options))


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).owned_by == "draftproof"
    assert client.models.retrieve(MODEL)._request_id.startswith("req_")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chat(running: Running, client: Any, temperature: float) -> None:
    want = plain(running, temperature=temperature, seed=7, max_tokens=30)
    got = client.chat.completions.create(model=MODEL, messages=ASK, temperature=temperature, seed=7, max_completion_tokens=30)
    assert got.choices[0].message.content == want.text and got.choices[0].finish_reason == want.finish_reason
    assert got.usage.total_tokens == want.prompt_tokens + want.completion_tokens and got.object == "chat.completion"
    assert got.metrics["speculative_decoding"]["num_draft_tokens"] > 0


def test_chat_as_a_stream(running: Running, client: Any) -> None:
    want = plain(running, temperature=0.9, seed=7, max_tokens=30)
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, temperature=0.9, seed=7, max_tokens=30, stream=True,
                                                 stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == want.finish_reason
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == want.text
    assert chunks[-1].usage.completion_tokens == want.completion_tokens and all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_samples_and_stops(running: Running, client: Any) -> None:
    want = plain(running, temperature=1.0, seed=3, max_tokens=20, n=3, stop=("return", "("))
    got = client.chat.completions.create(model=MODEL, messages=ASK, temperature=1.0, seed=3, max_tokens=20, n=3, stop=["return", "("])
    assert [choice.message.content for choice in got.choices] == [sample.text for sample in want.samples]
    assert [choice.finish_reason for choice in got.choices] == [sample.finish_reason for sample in want.samples]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_targets(running: Running, client: Any, stream: bool) -> None:
    want = plain(running, temperature=0, seed=1, max_tokens=12, logprobs=2).logprobs
    got = client.chat.completions.create(messages=ASK, max_tokens=12, logprobs=True, top_logprobs=2, stream=stream, **GREEDY)
    parts = got if stream else [got]
    entries = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in want]
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [[a.probability for a in e.top] for e in want]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == plain(running, temperature=0, seed=1, max_tokens=12).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema(client: Any, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "record", "schema": SCHEMA, "strict": True}}
    got = client.chat.completions.create(messages=ASK, max_tokens=200, response_format=form, stream=stream, **GREEDY)
    text = "".join(c.choices[0].delta.content or "" for c in got) if stream else got.choices[0].message.content
    assert set(json.loads(text)) == {"identifier", "category"}


def test_a_json_object_and_bad_schemas(client: Any) -> None:
    got = client.chat.completions.create(messages=ASK, max_tokens=200, response_format={"type": "json_object"}, **GREEDY)
    text = got.choices[0].message.content
    assert text.startswith("{") and (got.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict))
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in ({"type": "nonsense"}, {"pattern": "(", "type": "string"}, deep, {"enum": ["x" * 70_000]}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(messages=ASK, max_tokens=5, **GREEDY, response_format={
                "type": "json_schema", "json_schema": {"name": "bad", "schema": schema}})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Any, choice: Any, stream: bool) -> None:
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    got = client.chat.completions.create(messages=ASK, max_tokens=200, tools=tools, tool_choice=choice, parallel_tool_calls=False,
                                         stream=stream, **GREEDY)
    if stream:
        chunks = list(got)
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert chunks[-1].choices[0].finish_reason == "tool_calls" and not any(c.choices[0].delta.content for c in chunks)
    else:
        calls = got.choices[0].message.tool_calls
        assert got.choices[0].finish_reason == "tool_calls" and got.choices[0].message.content is None
    assert [call.function.name for call in calls] == ["weather"] and calls[0].id.startswith("call_")
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["city"] in ("Bonn", "Oslo") and 1 <= arguments["days"] <= 9


def test_tools_that_may_be_left_alone(client: Any) -> None:
    got = client.chat.completions.create(messages=ASK, max_tokens=20, tools=[WEATHER], **GREEDY)
    pieces = client.chat.completions.create(messages=ASK, max_tokens=20, tools=[WEATHER], stream=True, **GREEDY)
    assert got.choices[0].message.tool_calls is None and got.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == got.choices[0].message.content


def test_a_loop_of_tools_with_a_model_that_knows_user_and_assistant_alone(running: Running, client: Any) -> None:
    talk: list[Any] = [{"role": "developer", "content": "Be brief."}, *ASK]
    first = client.chat.completions.create(messages=talk, max_tokens=200, tools=[WEATHER], tool_choice="required",
                                           parallel_tool_calls=False, **GREEDY).choices[0].message
    talk += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]
    got = client.chat.completions.create(messages=talk, max_tokens=9, tools=[WEATHER], tool_choice="none", **GREEDY)
    spoken = client.responses.create(model=MODEL, instructions="Be brief.", input=ASK, temperature=0, max_output_tokens=9)
    assert got.usage.prompt_tokens > 40 and running.target.tokenizer is not None
    folded = [{"role": "user", "content": "Be brief.\n\n" + ASK[0]["content"]}]
    want = alone(running.target, running.target.tokenizer.chat(folded), Sampling(temperature=0, max_tokens=9))
    assert spoken.output_text == want.text


def test_a_predicted_output(running: Running, client: Any) -> None:
    want = plain(running, temperature=0, seed=1, max_tokens=40)
    got = client.chat.completions.create(messages=ASK, max_tokens=40, prediction={"type": "content", "content": want.text}, **GREEDY)
    assert got.choices[0].message.content == want.text and got.timings["draft_n_accepted"] > want.completion_tokens / 2


def test_control_of_speculation(client: Any) -> None:
    texts = {}
    for wish in ({}, {"drafter": "none"}, {"depth": 2}, {"depth": 0}, {"depth": "auto"}):
        got = client.chat.completions.create(messages=ASK, max_tokens=20, extra_body={"speculation": wish}, **GREEDY)
        texts[str(wish)] = got.choices[0].message.content
    assert len(set(texts.values())) == 1
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(messages=ASK, extra_body={"speculation": {"drafter": "medusa"}}, **GREEDY)
    assert "medusa" in error.value.message and error.value.param == "drafter"


def test_completions(running: Running, client: Any) -> None:
    want = alone(running.target, "def add(", Sampling(temperature=0, seed=1, max_tokens=10))
    assert client.completions.create(prompt="def add(", max_tokens=10, **GREEDY).choices[0].text == want.text
    pieces = client.completions.create(prompt="def add(", max_tokens=10, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == want.text


def test_responses(running: Running, client: Any) -> None:
    more: dict[str, Any] = {"temperature": 0, "max_output_tokens": 20, "extra_body": {"ignore_eos": True}}
    want = plain(running, temperature=0, max_tokens=20, ignore_eos=True)
    got = client.responses.create(model=MODEL, input=ASK[0]["content"], **more)
    assert got.output_text == want.text and got.status == "incomplete" and got.usage.output_tokens == 20
    events = list(client.responses.create(model=MODEL, input=ASK, stream=True, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want.text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete") and events[-1].response.output_text == want.text
    record = client.responses.create(model=MODEL, input="A record.", temperature=0, max_output_tokens=200, text={"format": {
        "type": "json_schema", "name": "record", "schema": SCHEMA}})
    assert json.loads(record.output_text)["category"] in ("alpha", "beta")


def test_an_answer_of_responses_goes_back_into_the_conversation(running: Running, client: Any) -> None:
    more: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 9, "instructions": "Be brief."}
    first = client.responses.create(input=ASK, **more)
    again = {"role": "user", "content": "Again."}
    forms = [first.output, [item.to_dict() for item in first.output], [item.model_dump() for item in first.output]]     # as clients do
    texts = {client.responses.create(input=[*ASK, *form, again], **more).output_text for form in forms}
    assert running.target.tokenizer is not None
    talk = [{"role": "user", "content": "Be brief.\n\n" + ASK[0]["content"]}, {"role": "assistant", "content": first.output_text}, again]
    assert texts == {alone(running.target, running.target.tokenizer.chat(talk), Sampling(temperature=0, max_tokens=9)).text}
    streamed = list(client.responses.create(input=ASK, stream=True, **more))
    assert [first.instructions, streamed[0].response.instructions, streamed[-1].response.instructions] == ["Be brief."] * 3
    assert client.responses.create(input=ASK, model=MODEL, max_output_tokens=2).instructions is None


def test_errors(running: Running, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(messages=ASK, extra_body={"frobnicate": 1}, **GREEDY)
    assert unknown.value.param == "frobnicate" and unknown.value.code == "unknown_parameter"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=ASK)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="word " * 3000, **GREEDY)
    assert long.value.code == "context_length_exceeded"
    with openai.OpenAI(base_url=running.url + "/v1", api_key="another-secret", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


# The same client against a table, where texts cost nothing: what depends on the server alone


@pytest.fixture(scope="module")
def table() -> Iterator[Running]:
    with serving(words(), "prediction", name=MODEL, config=ServeConfig(port=0), depth=4) as server:
        yield server


@pytest.fixture(scope="module")
def quick(table: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=table.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")

    side: Literal["left", "right"]
    size: Literal[1, 2, 3]


WARM: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "seed": 1}


def test_a_typed_answer(quick: Any) -> None:
    got = quick.chat.completions.parse(messages=ASK, response_format=Record, max_tokens=200, **WARM)
    assert got.choices[0].message.parsed.side in ("left", "right")
    with quick.chat.completions.stream(messages=ASK, response_format=Record, max_tokens=200, **WARM) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == got.choices[0].message.parsed


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_accounted_for(table: Running, quick: Any, stream: bool) -> None:
    """What OpenAI reports of Predicted Outputs, with the drafter that uses nothing else."""
    assert table.target.tokenizer is not None
    want = alone(table.target, table.target.tokenizer.chat(ASK), Sampling(temperature=0, seed=1, max_tokens=40, ignore_eos=True))
    ask = {"messages": ASK, "max_tokens": 40, "stream": stream, "extra_body": {"ignore_eos": True}, **GREEDY}
    if stream:
        ask["stream_options"] = {"include_usage": True}
    got = quick.chat.completions.create(prediction={"type": "content", "content": want.text}, **ask)
    parts = list(got) if stream else [got]
    text = "".join(c.choices[0].delta.content or "" for c in parts if c.choices) if stream else got.choices[0].message.content
    details = parts[-1].usage.completion_tokens_details
    drafts = parts[-1].metrics["speculative_decoding"]
    assert text == want.text and details.accepted_prediction_tokens == drafts["num_accepted_draft_tokens"] > 5
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == drafts["num_draft_tokens"]
    without = quick.chat.completions.create(**ask)
    assert (list(without)[-1] if stream else without).usage.completion_tokens_details is None


def test_a_call_and_its_result_go_back_into_the_conversation(quick: Any) -> None:
    first = quick.chat.completions.create(messages=ASK, max_tokens=200, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
                                          **WARM)
    call = first.choices[0].message.tool_calls[0]
    talk = [*ASK, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert quick.chat.completions.create(messages=talk, max_tokens=5, tools=[WEATHER], tool_choice="none", **WARM).usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tokens", "finished"), [(40, 0), (110, 1), (190, 2)])
def test_calls_before_one_that_is_cut_off_are_not_lost(quick: Any, tokens: int, finished: int, stream: bool) -> None:
    schema = {"type": "object", "properties": {"left": {"enum": [1, 2]}}, "required": ["left"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    got = quick.chat.completions.create(messages=ASK, max_tokens=tokens, tools=[tool], tool_choice="required", stream=stream,
                                        logit_bias={"0": -100}, **WARM)
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    said = [choice.delta if stream else choice.message for choice in choices]
    calls, text = [call for one in said for call in one.tool_calls or ()], "".join(one.content or "" for one in said)
    assert choices[-1].finish_reason == "length" and bool(text) == (not finished)
    assert [(call.function.name, json.loads(call.function.arguments)["left"] in (1, 2)) for call in calls] == [("f", True)] * finished


def test_many_at_once(table: Running) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=table.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(client.completions.create(model=MODEL, prompt="def", seed=i, max_tokens=20) for i in range(12)))

    for i, got in enumerate(asyncio.run(ask())):
        assert got.choices[0].text == alone(table.target, "def", Sampling(seed=i, max_tokens=20)).text


def test_a_stream_that_is_closed_ends_the_text(table: Running, quick: Any) -> None:
    with quick.completions.create(prompt="def", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}, **GREEDY) as stream:
        next(iter(stream))
    until(lambda: table.idle and not table.target.open_slots)  # type: ignore[attr-defined]


def test_errors_of_a_busy_and_of_a_failing_server() -> None:
    """Each arrives as the class of error that OpenAI's users catch, and those that say when to come back are tried again."""
    hold, slow = threading.Event(), ServeConfig(port=0, max_per_tenant=2, max_queue=1, deadline_s=1.0)
    with serving(letters(), wrap=lambda engine: Around(engine, lambda: hold.wait(20) and None), max_batch=1, config=slow) as running:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0, timeout=60) as client, ThreadPoolExecutor(2) as pool:
            ask = {"model": "letters", "prompt": "ab", "max_tokens": 3}
            first = pool.submit(client.completions.create, **ask)
            until(lambda: running.server.worker.load == (1, 0))
            second = pool.submit(client.completions.create, **ask)
            until(lambda: running.server.worker.load == (1, 1))
            with pytest.raises(openai.InternalServerError) as full:
                client.completions.create(**ask)
            assert full.value.status_code == 503 and int(full.value.response.headers["retry-after"]) >= 1
            running.server.worker.config = ServeConfig(max_per_tenant=2)
            with pytest.raises(openai.RateLimitError) as many:
                client.completions.create(**ask)
            assert many.value.code == "rate_limit_exceeded" and int(many.value.response.headers["retry-after"]) >= 1
            patient = pool.submit(client.with_options(max_retries=5).completions.create, **ask)
            hold.set()
            outcomes = [each.exception(30) for each in (first, second)]
            assert all(error is None or isinstance(error, openai.InternalServerError) for error in outcomes), "in time, or 504"
            assert patient.result(30).usage.completion_tokens


def test_an_error_inside_a_stream_is_raised() -> None:
    late = ServeConfig(port=0, deadline_s=0.5)
    with serving(letters(), wrap=lambda engine: Around(engine, lambda: time.sleep(0.02)), config=late) as slow:
        with openai.OpenAI(base_url=slow.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
            with pytest.raises(openai.APIError, match="not finished within"):
                list(client.completions.create(model="letters", prompt="ab", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}))
