"""Calls in a text: which there are, whether one is cut off, and which tools may be called at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from serve.serving import ChatLetters

from draftproof import Sampling
from draftproof.engine.port import Completion, TokenEvent, TokenLogprob
from draftproof.serve import tools
from draftproof.serve.refusal import Refusal
from draftproof.serve.reply import ChatReply, Head, ResponsesReply
from draftproof.serve.schema import NamedTool, Tool, ToolName
from draftproof.serve.tools import Call
from draftproof.serve.translate import Order

ONE = '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {"arguments": "</tool_call>"}}\n</tool_call>'
F, G = Call("f", '{"a": [1, 2]}'), Call("g", '{"arguments": "</tool_call>"}')


@pytest.mark.parametrize(("text", "calls", "cut"), [
    ("", [], False), ("a text", [], False), (ONE, [F], False), (f"\n{ONE}\n{OTHER} ", [F, G], False), ("<tool", [], True),
    (ONE[:-1], [], True), (ONE[:30], [], True), (ONE + "\n<tool_c", [F], True), (ONE + OTHER[:-4], [F], True),
    (ONE + " and a text", [], False), (f"a text {ONE}", [], False), ('<tool_call>{"arguments": {}}</tool_call>', [], True),
    ('<tool_call>["name", "arguments"]</tool_call>', [], True)])
def test_the_calls_of_a_text(text: str, calls: list[Call], cut: bool) -> None:
    assert tools.parse(text) == (calls, cut)


@pytest.mark.parametrize(("text", "may"), [("", True), ("<", True), ("<tool_call>", True), (ONE, True), ("<tools", False), (" <", False),
                                           ("a", False)])
def test_what_may_yet_become_a_call_is_held(text: str, may: bool) -> None:
    assert tools.may_become_call(text) is may


def tool(name: str) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name}})


def named(name: str) -> NamedTool:
    return NamedTool(type="function", function=ToolName(name=name))


@pytest.mark.parametrize(("choice", "names"), [(None, "fg"), ("auto", "fg"), ("required", "fg"), ("none", ""), (named("g"), "g")])
def test_the_choice_says_which_may_be_called(choice: Any, names: str) -> None:
    assert [one.function.name for one in tools.chosen([tool("f"), tool("g")], choice)] == list(names)
    for nothing in (None, []):
        if choice in (None, "auto", "none"):
            assert tools.chosen(nothing, choice) == []
        else:
            with pytest.raises(Refusal, match="tool_choice without tools") as refused:
                tools.chosen(nothing, choice)
            assert refused.value.param == "tool_choice"


def test_a_choice_that_names_none_and_a_tool_that_stands_there_twice() -> None:
    with pytest.raises(Refusal, match="names function 'h'; expected one of f, g"):
        tools.chosen([tool("f"), tool("g")], named("h"))
    for choice in (None, "none"):
        with pytest.raises(Refusal, match="function 'f' stands there twice") as refused:
            tools.chosen([tool("f"), tool("g"), tool("f")], choice)
        assert refused.value.param == "tools"


@pytest.mark.parametrize(("must", "parallel"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_grammar_allows_one_call_or_several_and_text_beside_them(must: bool, parallel: bool) -> None:
    for answer in (None, {"type": "object"}):
        said = tools.grammar([tool("f"), tool("g")], must, parallel, answer)
        assert ("call (gap call){0,63}" in said) is parallel and ("start: answer | call" in said) is not must
        assert ("TEXT" in said) is (not must and answer is None) and "function: f0 | f1\n" in said


def head(*may_call: Tool) -> Head:
    served: Any = SimpleNamespace(name="letters", fingerprint="f", tokenizer=ChatLetters(), spell=lambda token: b"a")
    return Head("resp_1", 0, Order(((1,),), Sampling(), None, None, True, tools=may_call), served)


def event(text: str, finish: Any = None) -> TokenEvent:
    return TokenEvent(0, text, "plain", 0, "r", finish=finish, logprob=TokenLogprob(0, -0.5))


def test_text_that_is_no_call_flows_with_all_that_was_held() -> None:
    """Behind its beginning nothing is a call any more."""
    reply = ChatReply(head(tool("f")))
    assert reply.chunks(0, [event("<tool")]) == []
    (flown,) = (chunk["choices"][0] for chunk in reply.chunks(0, [event("s of")]))
    assert flown["delta"] == {"content": "<tools of"} and len(flown["logprobs"]["content"]) == 2
    told, end = (chunk["choices"][0] for chunk in reply.chunks(0, [event(ONE, "stop")]))
    assert told["delta"] == {"content": ONE} and (end["delta"], end["finish_reason"]) == ({}, "stop")
    assert ChatReply(head()).chunks(0, [TokenEvent(0, "", "plain", 0, "r")]) == [], "half a character"


@pytest.mark.parametrize(("text", "finish", "status", "items"), [
    (ONE, "stop", "completed", ["function_call"]), (ONE, "length", "completed", ["function_call"]),
    ("a", "length", "incomplete", ["message"]),
    (ONE + "<tool", "length", "incomplete", ["function_call"]), (ONE + OTHER, "length", "completed", ["function_call"] * 2),
    ("<tool", "length", "incomplete", ["message"]), ("a", "stop", "completed", ["message"])])
def test_calls_that_are_whole_complete_a_response(text: str, finish: Any, status: str, items: list[str]) -> None:
    metrics = {"drafted": 0, "accepted": 0, "tpot_s": None}
    done = Completion(text, (0,), 1, finish, 1, 0, metrics, {"state": "off", "drafter": "none"})
    found = ResponsesReply(head(tool("f"), tool("g"))).whole([[done]])
    assert (found["status"], [item["type"] for item in found["output"]]) == (status, items)
    assert found["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
