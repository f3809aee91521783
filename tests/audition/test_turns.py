"""Conversations as logs have them: tools, reasoning, several choices, every turn, arrays; and what a template is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.audition import logs
from draftproof.audition.logs import Exchange, Skipped, read_log
from draftproof.audition.stories import conversation
from draftproof.config import LoadConfig
from draftproof.models.load import builtin, load_target
from draftproof.models.tokenizer import Tokenizer
from draftproof.models.turns import written

ASK = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "a cat", "tool_call_id": "c1"}


def read(folder: Path, *records: Any, skipped: Skipped | None = None) -> list[Exchange]:
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    skipped = Skipped() if skipped is None else skipped
    found = list(read_log(file, skipped))
    assert skipped.count == 0, skipped.shown
    return found


def pair(*messages: dict[str, Any], **request: Any) -> dict[str, Any]:
    return {"request": {"messages": [ASK], **request}, "response": {"choices": [{"message": one} for one in messages]}}


def test_traffic_with_tools_is_read(tmp_path: Path) -> None:
    skipped = Skipped()
    told = {"role": "developer", "content": "be brief"}
    (one,) = read(tmp_path, pair(CALLED, messages=[told, ASK, CALLED, FOUND]), skipped=skipped)
    parsed = {**CALL, "function": {"name": "look", "arguments": {"at": 3}}}
    assert one.messages == ({**told, "role": "system"}, ASK, {"role": "assistant", "content": "", "tool_calls": [parsed]}, FOUND)
    assert one.answer == '{"name": "look", "arguments": {"at": 3}}' and one.joined and skipped.remarks() == [f"{logs.JOINED}: 1"]


def test_reasoning_is_part_of_an_answer(tmp_path: Path) -> None:
    found = read(tmp_path, pair({"content": "4 it is.", "reasoning_content": "Two and two. "}),
                 pair({"content": "4", "reasoning": "2 + 2: "}), pair({"content": "4"}))
    assert [(one.answer, one.joined) for one in found] == [("Two and two. 4 it is.", True), ("2 + 2: 4", True), ("4", False)]


def test_every_choice_is_an_answer(tmp_path: Path) -> None:
    one, other = read(tmp_path, pair({"content": "yes"}, {"content": "no"}))
    assert (one.answer, other.answer) == ("yes", "no") and one.messages == other.messages == (ASK,)


def test_every_turn_of_the_assistant_is_an_answer_to_those_before_it(tmp_path: Path) -> None:
    hello, yes = ({"role": "assistant", "content": text} for text in ("hello", "yes"))
    more = {"role": "user", "content": "more"}
    found = read(tmp_path, {"messages": [hello, ASK, yes, more, yes], "tools": [{"type": "function"}]})
    assert [(one.messages, one.answer) for one in found] == [((hello, ASK), "yes"), ((hello, ASK, yes, more), "yes")]
    assert all(one.sampling == {"tools": [{"type": "function"}]} for one in found)
    assert [one.answer for one in read(tmp_path, {"messages": [ASK, yes, more]})] == ["yes", None]


def test_a_pair_of_another_api_is_named(tmp_path: Path) -> None:
    file, skipped = tmp_path / "log.jsonl", Skipped()
    file.write_text('{"request": {"input": "hi"}, "response": {"output": []}}\n{"messages": [{"role": "assistant", "content": "x"}]}\n')
    assert not list(read_log(file, skipped)) and "Responses API" in skipped.shown[0] and "nobody speaks" in skipped.shown[1]


@pytest.mark.parametrize("form", [{"indent": 2}, {}, {"separators": (",\n", ":")}])
def test_an_array_of_records_is_read_one_by_one(form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PIECE", 7)
    file, skipped = tmp_path / "sharegpt.json", Skipped()
    talks = [{"id": i, "conversations": [{"from": "human", "value": f"é {i}"}, {"from": "gpt", "value": "[yes] {"}]} for i in range(5)]
    talks[2]["conversations"] = 3
    text = json.dumps(talks, ensure_ascii=False, **form)
    file.write_text("\ufeff " + text, encoding="utf-8")
    assert [(e.line, e.messages[0]["content"], e.answer) for e in read_log(file, skipped) if e.messages] == [
        (i + 1, f"é {i}", "[yes] {") for i in (0, 1, 3, 4)]
    assert skipped.count == 1 and skipped.shown[0].startswith("line 3: an empty conversation")
    file.write_text(text[:-30], encoding="utf-8")
    assert len(list(read_log(file, skipped))) == 3 and skipped.shown[2].startswith("line 5: no JSON object from here")


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: tuple[Path, Path]) -> Tokenizer:
    found = load_target(tiny_pair[0], LoadConfig(threads=1, self_test=False)).tokenizer
    assert found is not None
    return found


def test_the_template_hears_of_tools_and_of_what_the_request_tells_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer.hf, "chat_template",
                        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ thinking }}|{{ messages[0].content }}")
    asked = {"tools": [{"type": "function", "function": {"name": "look"}}], "chat_template_kwargs": {"thinking": "off", "tokenize": False}}

    def shown(asked: dict[str, Any]) -> str:
        return tokenizer.decode(conversation(tokenizer, (ASK,), asked))

    assert shown(asked) == "look;off|hi" and shown({**asked, "tool_choice": "none"}) == "off|hi" and shown({}) == "|hi"


def test_turns_that_a_template_does_not_know_are_read_as_the_server_sends_them(tmp_path: Path) -> None:
    """The built-in model's template refuses all but user and assistant."""
    known, system = Tokenizer.load(str(builtin("target"))), {"role": "system", "content": "Be brief."}
    spoken = [system, ASK, CALLED, FOUND, {"role": "assistant", "content": "a cat is there"}]
    first, last = read(tmp_path, {"messages": spoken})
    user = {"role": "user", "content": "Be brief.\n\nhi"}
    assert first.messages is not None and conversation(known, first.messages, {}) == known.chat([user])
    assert last.messages is not None
    call = {"role": "assistant", "content": written("look", {"at": 3})}
    told = {"role": "user", "content": "<tool_response>\na cat\n</tool_response>"}
    assert conversation(known, last.messages, {}) == known.chat([user, call, told])
