"""Conversations as logs spell them: the turns before an answer as a chat template takes them, and what the model itself wrote in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..models.turns import parsed

Message = Mapping[str, Any]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
         "system": "system", "developer": "system", "tool": "tool", "function": "tool"}


class NotReadable(ValueError):
    """A record of no known form; the message says what was found."""


def messages_of(turns: Any) -> tuple[Message, ...]:
    """Raises NotReadable."""
    if not isinstance(turns, list) or not turns:
        raise NotReadable("an empty conversation")
    return tuple(map(_message, turns))


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise NotReadable(f"a turn that is a {type(turn).__name__}")
    said, content = turn.get("role") or turn.get("from"), _content(turn)
    role = ROLES.get(said) if isinstance(said, str) else None
    if content is None and role == "assistant":             # it called, and said nothing
        content = ""
    if role is None or not isinstance(content, str):
        raise NotReadable(f"a turn with role {str(said)[:40]!r} and content of type {type(content).__name__}")
    message: dict[str, Any] = {"role": role, "content": text_of(content)}
    if calls := _calls(turn):
        message["tool_calls"] = [{"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": parsed(arguments)}}
                                 for call, name, arguments in calls]
    return message | {name: text_of(turn[name]) for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}


def said_in(turn: Any) -> tuple[str | None, bool]:
    """(What the model wrote in its turn, None if nothing is told, whether that was put together from parts).

    Reasoning and calls stand apart from the text in a log, without the marks that the model wrote around them.
    """
    if not isinstance(turn, dict):
        return None, False
    reasoning, content = turn.get("reasoning_content") or turn.get("reasoning"), _content(turn)
    parts = [reasoning if isinstance(reasoning, str) else "",
             *(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for _, name, arguments in _calls(turn))]
    joined = any(parts)
    if not joined and not isinstance(content, str):
        return None, False
    return text_of("".join([parts[0], content if isinstance(content, str) else "", *parts[1:]])), joined


def unechoed(choice: Mapping[str, Any], prompt: Any) -> Mapping[str, Any]:
    """A choice of a completion whose request had `echo`, without the prompt (a text, or ids) that its text begins with.

    Raises NotReadable where it cannot be seen how far that goes.
    """
    text, told = choice.get("text"), choice.get("logprobs")
    told = told if isinstance(told, dict) else {}
    offsets = told.get("text_offset")
    offsets = offsets if isinstance(offsets, list) and all(isinstance(at, int) for at in offsets) else []
    if isinstance(prompt, str) and isinstance(text, str) and text.startswith(prompt):
        cut = len(prompt)
        first = next((i for i, at in enumerate(offsets) if at >= cut), len(offsets))
    elif isinstance(prompt, list) and isinstance(text, str) and len(offsets) >= len(prompt):
        first = len(prompt)
        cut = offsets[first] if first < len(offsets) else len(text)
    else:
        raise NotReadable("an answer that should begin with its prompt (echo), and where that ends is not told")
    rest = {name: values[first:] for name, values in told.items() if isinstance(values, list)} if offsets else None
    return {**choice, "text": text[cut:], "logprobs": rest}


def _content(turn: Mapping[str, Any]) -> Any:
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):                           # OpenAI's parts: the text of them
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content


def _calls(turn: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str, str]]:
    """(call, name, arguments as JSON) of every call of a function."""
    listed, found = turn.get("tool_calls"), []
    for call in listed if isinstance(listed, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments", "{}")
            found.append((call, text_of(function["name"]), text_of(arguments if isinstance(arguments, str) else json.dumps(arguments))))
    return found


def text_of(value: str) -> str:
    """Text that a tokenizer takes. JSON may spell halves of characters that no text has. Raises NotReadable."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise NotReadable("text with half a character (a lone surrogate)") from None
    return value
