"""Function calls through the Responses API: what agents send, in the form they send it, and what they read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve.serving import Running

pytest.importorskip("llguidance")

PATH = "/v1/responses"
CLOCK = {"type": "function", "name": "clock", "description": "time", "strict": True, "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["north", "south"]}}, "required": ["zone"], "additionalProperties": False}}
OTHER = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
ASK: dict[str, Any] = {"input": [{"role": "user", "content": "ab"}], "include": [], "instructions": "cd", "max_output_tokens": 400,
                       "seed": 3, "temperature": 1.0}
MUST: dict[str, Any] = {**ASK, "tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}


def answer(running: Running, **body: Any) -> dict[str, Any]:
    reply = running.post(PATH, body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}], ids=["required", "named"])
def test_a_call_is_an_item_of_its_own(running: Running, choice: Any) -> None:
    listed = [CLOCK] if choice == "required" else [OTHER, CLOCK]
    found = answer(running, **{**MUST, "tools": listed, "tool_choice": choice})
    (call,) = found["output"]
    assert (found["status"], call["type"], call["name"], call["status"]) == ("completed", "function_call", "clock", "completed")
    assert json.loads(call["arguments"])["zone"] in ("north", "south")
    assert call["call_id"].startswith("call_") and call["id"].startswith("fc_")
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == (listed, choice, False)


def test_a_stream_says_the_same(running: Running) -> None:
    whole = answer(running, **MUST)["output"][0]
    events = running.stream(PATH, **MUST)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed"]
    added, delta, done, item, end = events[2:]
    assert (added["item"]["arguments"], added["item"]["status"], added["item"]["name"]) == ("", "in_progress", "clock")
    assert delta["delta"] == done["arguments"] == item["item"]["arguments"] == whole["arguments"] and done["name"] == "clock"
    assert {event.get("item_id", event.get("item", {}).get("id")) for event in events[2:6]} == {end["response"]["output"][0]["id"]}
    assert [item["item"]] == end["response"]["output"] and {event["output_index"] for event in events[2:6]} == {0}


def test_several_calls_at_once(running: Running) -> None:
    for seed in range(20):
        body = {**MUST, "parallel_tool_calls": True, "max_output_tokens": 2000, "seed": seed}
        found = answer(running, **body)
        if len(found["output"]) > 1:
            break
    assert len({call["call_id"] for call in found["output"]}) == len({call["id"] for call in found["output"]}) == len(found["output"]) > 1
    events = running.stream(PATH, **body)
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == list(range(len(found["output"])))
    assert [event["item"]["arguments"] for event in done] == [call["arguments"] for call in found["output"]]


@pytest.mark.parametrize("seed", range(4))
def test_text_beside_tools_flows(running: Running, seed: int) -> None:
    body = {**ASK, "tools": [CLOCK], "seed": seed, "max_output_tokens": 30}
    whole, events = answer(running, **body), running.stream(PATH, **body)
    (message,) = whole["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == message["content"][0]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"] and len(deltas) > 1
    assert whole["tool_choice"] == "auto" and whole["parallel_tool_calls"] is True


def test_a_call_that_is_cut_off_is_text(running: Running) -> None:
    found, events = answer(running, **{**MUST, "max_output_tokens": 16}), running.stream(PATH, **{**MUST, "max_output_tokens": 16})
    assert found["status"] == "incomplete" and found["output"][0]["content"][0]["text"].startswith("<tool")
    assert events[-1]["type"] == "response.incomplete"
    assert "".join(event.get("delta", "") for event in events) == found["output"][0]["content"][0]["text"]


def test_what_calls_came_to_goes_back_as_in_a_chat(running: Running) -> None:
    call = answer(running, **MUST)["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
    tokens = set()
    for items in ([call, result],
                  [{**call, "namespace": None}, {**result, "output": [{"type": "input_text", "text": "12:00"}], "id": None}],
                  [{name: call[name] for name in ("type", "call_id", "name", "arguments")}, {**result, "status": "completed"}]):
        found = answer(running, **{**ASK, "input": [*ASK["input"], *items], "tools": [CLOCK], "tool_choice": "none"})
        tokens.add(found["usage"]["input_tokens"])
    chat = [{"role": "system", "content": "cd"}, *ASK["input"], {"role": "assistant", "content": "", "tool_calls": [
        {"id": call["call_id"], "type": "function", "function": {"name": "clock", "arguments": call["arguments"]}}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "12:00"}]
    tokens.add(running.post("/v1/chat/completions", {"messages": chat, "max_tokens": 2}).json()["usage"]["prompt_tokens"])
    assert len(tokens) == 1


@pytest.mark.parametrize(("more", "param"), [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK, CLOCK]}, "tools"), ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input.0"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name"), ({"input": [{"role": "x"}]}, "input.0.role"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]}, "input.0.output.0.type"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(running: Running, more: dict[str, Any], param: str) -> None:
    reply = running.post(PATH, {**ASK, **more})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(param), reply.text
