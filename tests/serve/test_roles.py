"""Conversations for templates that do not know every role: nothing of them is lost, and a template that knows a role is used as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_tokenizer

from draftproof.models.load import builtin
from draftproof.models.tokenizer import Tokenizer
from draftproof.serve.refusal import Refusal
from draftproof.serve.schema import ChatRequest, ResponsesRequest
from draftproof.serve.translate import Headers, chat, responses

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hot?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "21"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "22"}]}]
RESULTS = "<tool_response>\n21\n</tool_response>\n\n<tool_response>\n22\n</tool_response>"
ALL = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% for c in m.tool_calls or () %}({{ c.function.name }} "
       "{{ c.function.arguments }}){% endfor %}{% endfor %}")
SILENT = "{% for m in messages if m['role'] in ('user', 'assistant') %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
STRICT = SILENT.replace("{% for m in messages if", "{% for m in messages if m['role'] == 'system' %}{{ raise_exception('no system') }}"
                        "{% endfor %}{% for m in messages if")
NEVER = "{{ raise_exception('nothing pleases me') }}"


def served(template: str | None) -> Any:
    tokenizer = Tokenizer.load(builtin("target")) if template is None else Tokenizer(make_tokenizer())
    if template is not None:
        tokenizer.hf.chat_template = template
    return SimpleNamespace(name="letters", tokenizer=tokenizer)


def rendered(template: str | None, messages: list[Any]) -> str:
    about = served(template)
    order = chat(ChatRequest.model_validate({"model": "letters", "messages": messages}), Headers(), about)
    return str(about.tokenizer.decode(order.prompts[0], skip_special=False))


@pytest.mark.parametrize("template", [None, SILENT, STRICT])
def test_what_a_template_does_not_know_stands_in_turns_of_the_user(template: str | None) -> None:
    found = rendered(template, [*TALK, {"role": "user", "content": "So?"}, {"role": "system", "content": "Now."}])
    end, answer = ("<|end|>", "<|assistant|>") if template is None else ("", "")
    assert found == (f"<|user|>Be brief.\n\nBe kind.\n\nHot?<|assistant|>{WRITTEN}\n{WRITTEN}{end}<|user|>{RESULTS}\n\nSo?"
                     f"\n\nNow.{answer}")
    assert rendered(template, TALK).endswith(f"<|user|>{RESULTS}{answer}")


def test_a_template_that_knows_them_is_used_as_it_is() -> None:
    call = "(weather {'city': 'Bonn'})"
    assert rendered(ALL, TALK) == f"<|system|>Be brief.<|system|>Be kind.<|user|>Hot?<|assistant|>{call}{call}<|tool|>21<|tool|>22"


def test_what_is_refused_is_told_by_the_name_of_its_field() -> None:
    for template, said in ((NEVER, "nothing pleases me"), ("", "no chat template")):
        with pytest.raises(Refusal, match=said) as of_chat:
            rendered(template, TALK)
        with pytest.raises(Refusal, match=said) as of_responses:
            responses(ResponsesRequest.model_validate({"model": "letters", "input": "a"}), Headers(), served(template))
        assert (of_chat.value.param, of_responses.value.param) == ("messages", "input")


def test_names_and_the_ids_of_calls_reach_the_template() -> None:
    told = ALL.replace("{{ m['content'] }}", "{{ m['content'] }}[{{ m.name }}|{{ m.tool_call_id }}]")
    told = told.replace("c.function.arguments", "c.id")
    talk = [{"role": "user", "name": "bo", "content": "Hot?"}, *TALK[3:5]]
    assert rendered(told, talk) == "<|user|>Hot?[bo|]<|assistant|>[|](weather call_1)(weather call_1)<|tool|>21[|call_1]"
