"""Function calls through the grammar: a call that is written is one that its schema allows.

A call stands in the text as `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, the form that most open models are
trained on. The grammar lets the text begin with a call or be free of them (`auto`), or only be calls (`required`, or one by name).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.grammar import spaced
from ..models.turns import CLOSE, OPEN
from .refusal import Refusal
from .schema import MAX_TOOLS, NamedTool, Tool

FREE = r"(.|\n)*"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str          # JSON, as it stands in the text


def chosen(tools: Sequence[Tool] | None, choice: str | NamedTool | None) -> list[Tool]:
    """The tools that may be called; empty if none may. Raises Refusal for a choice that names none of them."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise Refusal(400, "tool_choice without tools: give tools, or leave the choice out", param="tool_choice")
        return []
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise Refusal(400, f"tools: function {twice!r} stands there twice", param="tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise Refusal(400, f"tool_choice names function {wanted!r}; expected one of {', '.join(names)}", param="tool_choice")
        return [tool for tool in tools if tool.function.name == wanted]
    return list(tools)


def grammar(tools: Sequence[Tool], must: bool, parallel: bool, answer: Mapping[str, Any] | None) -> str:
    """Lark for llguidance. must: only calls, no text · parallel: more than one · answer: the JSON schema of a text, if it has one."""
    calls = f"call (gap call){{0,{MAX_TOOLS - 1}}}" if parallel else "call"        # no more than a conversation takes back
    lines = [f"start: {calls}" if must else f"start: answer | {calls}", f'call: "{OPEN}" gap function gap "{CLOSE}"', r"gap: /\n?/"]
    if not must and answer is None:
        lines += ["answer: TEXT", f"TEXT: /{FREE}/ & ~/{OPEN}{FREE}/"]
    elif not must:
        lines.append(f"answer: %json {json.dumps(spaced(answer))}")
    rules = []
    for number, tool in enumerate(tools):
        head = json.dumps('{"name": ' + json.dumps(tool.function.name) + ', "arguments": ')
        schema = json.dumps(spaced(tool.function.parameters or {"type": "object"}))
        lines += [f'f{number}: {head} a{number} "}}"', f"a{number}: %json {schema}"]
        rules.append(f"f{number}")
    return "\n".join([*lines, "function: " + " | ".join(rules)]) + "\n"


def explained(tools: Sequence[Tool]) -> str:
    """What a model is told whose chat template does not know of tools."""
    listed = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)
    form = f'{OPEN}{{"name": …, "arguments": {{…}}}}{CLOSE}'
    return f"You may call these functions:\n{listed}\nTo call one, answer {form} and nothing else.\n\n"


def parse(text: str) -> tuple[list[Call], bool]:
    """The calls that a text consists of, and whether it is cut off inside another one; none if there is text of another kind."""
    calls: list[Call] = []
    rest = text.strip()
    while rest:
        if not rest.startswith(OPEN):
            return (calls, True) if may_become_call(rest) else ([], False)
        inside = rest[len(OPEN):].lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(inside)
            start = inside.index('"arguments": ') + len('"arguments": ')
            _, stop = json.JSONDecoder().raw_decode(inside, start)
            call = Call(value["name"], inside[start:stop])
        except (ValueError, KeyError, TypeError):
            return calls, True
        rest = inside[end:].lstrip()
        if not rest.startswith(CLOSE):
            return calls, True
        calls.append(call)
        rest = rest[len(CLOSE):].lstrip()
    return calls, False


def may_become_call(text: str) -> bool:
    """Whether text, as far as it is known, is or may yet be a call."""
    return text.startswith(OPEN) or OPEN.startswith(text)
