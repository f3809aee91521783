"""What is asked: prompts with classes, Spec-Bench's and SPEED-Bench's questions, recorded traffic, random tokens.

One JSON object a line; the keys tell the form:

    prompts       {"prompt", "class"?, "max_tokens"?}  ·  {"prompt_token_ids", …}  ·  {"messages", "tools"?, …}
    pairs         {"request": {"messages" | "prompt", "max_tokens"?, …}, …}      a recorded request; the response is not read
    questions     {"question_id", "category", "turns": [text, …]}                Spec-Bench (github.com/hemingkx/Spec-Bench), SPEED-Bench

`arrival_s` or `timestamp` (seconds, or ISO 8601) on every line makes it traffic that can be replayed as it came. A line without a class,
or of the class `all`, which is what all of them together are called, is of the class `other`. Every request takes along what its line has
of `PROMPTING` and `BINDING`; what it has of `APART` is told instead.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import Failure
from .cells import ALL

Message = Mapping[str, Any]
Turn = str | tuple[int, ...] | Message

# Spec-Bench asks MT-Bench's eight categories too and reports them as one.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
SYNTHETIC = "synthetic"
OTHER = "other"
PROMPTING = ("tools", "chat_template_kwargs")            # what a chat template is told besides; "tool_choice" may take the tools away
BINDING = ("tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
           "guided_grammar")                             # what the answer must follow
FREE: tuple[Any, ...] = (None, [], {}, "", "auto", "none", True, {"type": "text"})                        # values with which it need not
APART: Mapping[str, tuple[Any, ...]] = {                 # options that no request here is sent with, and values with which they do nothing
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": (), "bad_words": (), "min_tokens": (0,), "ignore_eos": (False,), "stop": (), "stop_token_ids": (), "n": (1,),
    "prediction": ()}
WORDS = ("time year people way day man thing woman life child world school state family student group country problem hand part "
         "place case week company system program question work government number night point home water room mother area").split()


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation of the workload: its turns are asked one after the other, each with the answers so far."""

    name: str                             # question id, or line number
    prompt_class: str
    turns: tuple[Turn, ...]
    chat: bool = False                    # turns are a user's messages, or whole ones of others; otherwise a bare prompt
    history: tuple[Message, ...] = ()     # messages before the first turn
    category: str = ""                    # as the file has it
    max_tokens: int | None = None
    arrival_s: float | None = None        # since the first arrival
    asked: Mapping[str, Any] = field(default_factory=dict)   # goes into every request: PROMPTING and BINDING
    apart: tuple[str, ...] = ()           # options of the recorded request that go into none


def read_items(path: str | Path, each: int | None = None) -> list[Item]:
    """All items of a file, or the first `each` of every class. Raises Failure naming the line that has no known form, or a wrong value."""
    items = [item_of(line, f"{path}, line {number}", number) for number, line in read_lines(path, "a workload")]
    return first_of_each(_arrivals(_grouped(items), path), each)


def read_lines(path: str | Path, what: str) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is not blank. Raises Failure, naming `what` was expected, if there is no such file or line."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise Failure(f"{path} does not exist; expected {what}, one JSON object a line")
    empty = True
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                empty = False
                yield number, line
    if empty:
        raise Failure(f"{path} is empty; expected {what}, one JSON object a line")


def unsent(items: Iterable[Item], here: bool, takes_tools: bool = True) -> list[str]:
    """A remark on options that the workload has and no request is sent with, if there are any, and how many of its requests have them.

    here: to an engine in this process, which is asked for no structure; takes_tools: whether its chat template does.
    """
    lost = (*(BINDING if here else ()), *(() if takes_tools else ("tools",)))
    found = Counter(name for item in items for name in (*item.apart, *(name for name in lost if item.asked.get(name) not in FREE)))
    words = ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))
    return [f"NOT SENT of what the workload's requests have: {words}"] if words else []


def first_of_each(items: Iterable[Item], each: int | None) -> list[Item]:
    """The first `each` items of every class, in the order of the workload."""
    seen: dict[str, int] = {}
    chosen = []
    for item in items:
        seen[item.prompt_class] = seen.get(item.prompt_class, 0) + 1
        if each is None or seen[item.prompt_class] <= each:
            chosen.append(item)
    return chosen


def synthetic(count: int, input_tokens: int, output_tokens: int, seed: int, vocab_size: int | None = None) -> list[Item]:
    """Random prompts of one length: ids below vocab_size, or words (about one token each) for a server whose vocabulary is unknown.

    They measure kernels, not acceptance: no drafter guesses noise, and models answer noise with repetition.
    """
    rng = random.Random(seed)
    items = []
    for i in range(count):
        turn: Turn = (" ".join(rng.choices(WORDS, k=input_tokens)) if vocab_size is None
                      else tuple(rng.randrange(vocab_size) for _ in range(input_tokens)))
        items.append(Item(f"{SYNTHETIC}-{i}", SYNTHETIC, (turn,), max_tokens=output_tokens))
    return items


def poisson(items: Sequence[Item], rate: float, seed: int) -> list[Item]:
    """Arrivals at `rate` a second with exponential gaps, the first at 0: an open loop, which does not wait for answers."""
    rng, at, out = random.Random(seed), 0.0, []
    for item in items:
        out.append(replace(item, arrival_s=at))
        at += rng.expovariate(rate)
    return out


def item_of(line: str, where: str, number: int) -> Item:
    """One line of a workload, of whatever form; where: what the errors call it. Raises Failure if it has none, or a wrong value."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{where}: not JSON ({error}); expected one JSON object a line") from None
    if not isinstance(record, dict):
        raise Failure(f"{where}: found a JSON {type(record).__name__}; expected an object")
    inner = record["request"] if isinstance(record.get("request"), dict) else {}
    body = {**inner, **record}
    marked = body["metadata"].get("prompt_class") if isinstance(body.get("metadata"), dict) else None       # as our server reads it
    category = _encoded(str(body.get("class") or body.get("prompt_class") or body.get("category") or marked or OTHER), where)
    category = OTHER if category == ALL else category
    known: dict[str, Any] = dict(name=str(body.get("question_id", number)), prompt_class=category, category=category,
                                 max_tokens=_most(body, where), arrival_s=_time(body, where),
                                 asked=_asked(body, where),
                                 apart=tuple(name for name, idle in APART.items() if body.get(name) not in (None, [], {}, "", *idle)))
    if body.get("turns"):
        return Item(turns=tuple(_text(turn, where) for turn in _list(body, "turns", where)), chat=True, **known)
    if body.get("messages"):
        messages = [_message(message, where) for message in _list(body, "messages", where)]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise Failure(f"{where}: only assistant messages; expected a user's message to answer")
        last = messages[-1]
        plain = last["role"] == "user" and len(last) == 2
        return Item(turns=(last["content"] if plain else last,), chat=True, history=tuple(messages[:-1]), **known)
    prompt = body.get("prompt_token_ids") or body.get("prompt")
    if isinstance(prompt, str):
        return Item(turns=(_encoded(prompt, where),), **known)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return Item(turns=(tuple(prompt),), **known)
    raise Failure(f"{where}: found the keys {', '.join(record) or 'none'}; expected prompt, prompt_token_ids, messages, turns or request")


def _asked(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    asked = {name: body[name] for name in (*PROMPTING, *BINDING) if body.get(name) is not None}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if not isinstance(asked.get(name, kind()), kind):
            raise Failure(f"{where}: {name} of type {type(asked[name]).__name__}; expected a {kind.__name__}")
    return asked


def _list(body: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = body[name]
    if not isinstance(found, list):
        raise Failure(f"{where}: {name} of type {type(found).__name__}; expected a list")
    return found


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise Failure(f'{where}: a message of type {type(message).__name__}; expected an object with "role" and "content"')
    if not isinstance(message.get("role"), str):
        raise Failure(f"{where}: a message with the role {message.get('role')!r}; expected text, such as \"user\"")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) and isinstance(call.get("function"), dict)
                                              and {"name", "arguments"} <= call["function"].keys() for call in calls):
        raise Failure(f"{where}: tool_calls {str(calls)[:60]!r}; expected a list of calls, each with a function's name and arguments")
    silent = calls and message.get("content") is None                  # it called, and said nothing
    said = {"role": message["role"], "content": "" if silent else _text(message, where)}
    return said | {name: message[name] for name in ("tool_calls", "tool_call_id", "name") if message.get(name)}


def _text(turn: Any, where: str) -> str:
    content = turn.get("content") if isinstance(turn, dict) else turn
    if isinstance(content, list):                       # OpenAI's parts: the text of them
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise Failure(f"{where}: a turn of type {type(content).__name__}; expected text")
    return _encoded(content, where)


def _part(part: Any, where: str) -> str:
    text, kind = (part.get("text"), part.get("type")) if isinstance(part, dict) else (part, None)
    if not isinstance(text, str):
        raise Failure(f"{where}: a part {f'of type {kind} ' if kind else ''}with the text {text!r}; expected text")
    return text


def _encoded(text: str, where: str) -> str:
    """The text, if it can be sent: bytes of another encoding and JSON's halves of characters are lone surrogates here."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Failure(f"{where}: {text[error.start:error.end]!r} in a text is no character; expected UTF-8") from None
    return text


def _most(body: Mapping[str, Any], where: str) -> int | None:
    """The most tokens of an answer, None where the line does not say."""
    for name in ("max_tokens", "max_completion_tokens"):
        most = body.get(name)
        if most is not None and (type(most) is not int or most < 1):        # True is an int, too
            raise Failure(f"{where}: {name} {most!r}; expected an integer ≥ 1")
        if most is not None:
            return most
    return None


def _time(body: Mapping[str, Any], where: str) -> float | None:
    stamp = body.get("arrival_s", body.get("timestamp"))
    if stamp is None:
        return None
    try:
        number = not isinstance(stamp, bool) and isinstance(stamp, int | float)
        seconds = float(stamp) if number else datetime.fromisoformat(str(stamp)).timestamp()
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):                      # JSON's NaN and 1e999: such a request would never be sent
        raise Failure(f"{where}: arrival {str(stamp)[:60]!r}; expected seconds, or ISO 8601")
    return seconds


def _grouped(items: list[Item]) -> list[Item]:
    """Of Spec-Bench's file, and only there, MT-Bench's categories become one class."""
    known = {*MT_BENCH, *SPEC_BENCH}
    spec = all(item.chat and item.name.isdecimal() and 81 <= int(item.name) <= 560 and item.category in known for item in items)
    return [replace(item, prompt_class="mt_bench") if spec and item.category in MT_BENCH else item for item in items]


def _arrivals(items: list[Item], path: str | Path) -> list[Item]:
    times = [item.arrival_s for item in items if item.arrival_s is not None]
    if not times:
        return items
    if len(times) < len(items):
        raise Failure(f"{path}: {len(times)} of {len(items)} lines have an arrival time; expected all of them, or none")
    first = min(times)
    return sorted((replace(item, arrival_s=item.arrival_s - first) for item in items if item.arrival_s is not None),
                  key=lambda item: item.arrival_s or 0.0)
