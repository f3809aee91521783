"""Conversations for a chat template that does not know all of their turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parsed(arguments: Any) -> Any:
    """Templates want the arguments of a call as an object, where OpenAI's clients and logs have its JSON; what is no JSON stays text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def written(name: str, arguments: Any) -> str:
    """A call as it stands in a text: the form that most open models are trained on."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def answered(text: str) -> str:
    """What a call came to, in the same form."""
    return f"<tool_response>\n{text}\n</tool_response>"


def folded(turns: Sequence[Mapping[str, Any]], knows: Set[str]) -> list[dict[str, Any]]:
    """The turns for a template that `knows` only so much of `system`, `tool` and `tool_calls` beside user and assistant. What the system
    said and what calls came to stand in the user's turn beside them, or in one of its own; the assistant's calls in its text, as it would
    write them."""
    out: list[dict[str, Any]] = []
    joins = False                                            # whether the last turn holds what nobody said as the user
    for told in turns:
        turn = dict(told)
        role, text = turn["role"], turn.get("content") or ""
        foreign = role in ("system", "tool") and role not in knows
        if foreign:
            turn = {"role": "user", "content": answered(text) if role == "tool" else text}
        elif "tool_calls" in turn:
            called = [(call, call["function"]["name"], parsed(call["function"]["arguments"])) for call in turn["tool_calls"]]
            if "tool_calls" in knows:
                turn["tool_calls"] = [{**call, "function": {"name": name, "arguments": given}} for call, name, given in called]
            else:
                calls = [written(name, given) for _, name, given in called]
                turn = {"role": role, "content": "\n".join([text, *calls] if text else calls)}
        if out and out[-1]["role"] == turn["role"] == "user" and (foreign or joins):
            out[-1] = {**turn, "content": f"{out[-1]['content']}\n\n{turn['content']}"}
        else:
            out.append(turn)
        joins = foreign
    return out
