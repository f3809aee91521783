"""Traffic logs of every common form, read line by line: one `Exchange` a request, and a count of what could not be read.

    minimal       {"prompt_token_ids": [...], "token_ids": [...], "max_tokens"?, "finish_reason"?, "class"?, "temperature"?, "logprobs"?}
    OpenAI pairs  {"request": {"messages" | "prompt", …}, "response": {"choices": [{"message" | "text"}]}}
    OpenAI chat   {"messages": [{"role", "content"}, …]}           the last assistant message is the answer
    ShareGPT      {"conversations": [{"from": "human" | "gpt", "value"}, …]}
    plain         {"prompt", "completion"?} · {"text"} · a .txt file, one document per blank-line block
    our traces    trace_started, request_started, … (level full has the ids)

A file is streamed: memory does not grow with its length (of traces, at most `OPEN` requests that have not ended are held).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from ..errors import Failure
from .logprobs import Place, read_places

Message = Mapping[str, str]
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
                  "model": "assistant", "system": "system", "tool": "tool"}
LONGEST = 64 << 20      # bytes of a record; a longer line is skipped without being held
OPEN = 4096     # traced requests that may be running at a time; what was begun before them has lost its end
SHOWN = 5       # complaints kept with their line numbers
MOST = 1 << 31  # token ids and counts are below
LAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer, as far as the log has them: ids where it has ids, else messages or text.

    Exactly one of prompt_ids, messages, prompt is set. answer_ids or answer may be set. `line` counts from 1.
    document: `prompt` is a whole text that nobody asked to continue.
    """

    line: int
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    document: bool = False
    answer_ids: tuple[int, ...] | None = None
    answer: str | None = None
    prompt_class: str | None = None
    max_tokens: int | None = None
    finish_reason: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""
    depths: tuple[tuple[int, int], ...] = ()      # of our traces: (position of a round's first token, depth it was granted)
    places: tuple[Place, ...] | None = None       # of every token of the answer, what the log says of the target's law there


@dataclass(slots=True)
class Skipped:
    """What a reader left out, and why."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def note(self, line: int, why: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"line {line}: {why}")


class NotReadable(ValueError):
    """A record of no known form; the message says what was found."""


def check_log(path: str | Path) -> Path:
    """The file. Raises Failure if it is missing, a pipe or a device, or compressed."""
    file = Path(path).expanduser()
    if not file.is_file():
        found = "is no plain file" if file.exists() else "does not exist"
        raise Failure(f"{path} {found}; expected a log in a file, one JSON object a line, or a .txt file")
    with file.open("rb") as stream:
        if stream.read(2) == b"\x1f\x8b":
            raise Failure(f"{path} is compressed with gzip; expected plain lines: unpack it first (gunzip -k)")
    return file


def read_log(path: str | Path, skipped: Skipped | None = None) -> Iterator[Exchange]:
    """Every exchange of a log, in its order. Unreadable lines are counted in `skipped`, with the first few reasons.

    Raises Failure as `check_log` does.
    """
    file = check_log(path)
    skipped = Skipped() if skipped is None else skipped
    with file.open("rb") as stream:
        yield from _documents(stream) if file.suffix == ".txt" else _records(stream, skipped)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines, of the longest ones only so much that they are seen to be too long."""
    while raw := stream.readline(LONGEST + 1):
        yield raw
        while len(raw) > LONGEST and not raw.endswith(b"\n"):
            raw = stream.readline(LONGEST + 1)


def _records(stream: IO[bytes], skipped: Skipped) -> Iterator[Exchange]:
    trace = _Trace()
    for number, raw in enumerate(_lines(stream), 1):
        if not raw.strip():
            continue
        try:
            record = _record(raw, number)
            if isinstance(record, dict) and "event" in record:
                found = trace.read(number, record, skipped)
            else:
                found = exchange(record, number)
        except NotReadable as error:
            skipped.note(number, str(error))
            continue
        if found is not None:
            yield found


def _record(raw: bytes, number: int) -> Any:
    if len(raw) > LONGEST:
        raise NotReadable(f"longer than {LONGEST >> 20} MB")
    try:
        return json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise NotReadable("not UTF-8") from None
    except ValueError:
        raise NotReadable("not a JSON object (a line cut short?)") from None
    except RecursionError:
        raise NotReadable("nested too deeply") from None


def _documents(stream: IO[bytes]) -> Iterator[Exchange]:
    block: list[str] = []
    start, held = 1, 0
    for number, raw in enumerate(_lines(stream), 1):
        text = raw.decode("utf-8", errors="replace")
        if text.strip():
            start = number if not block else start
            block.append(text)
            held += len(raw)
        if block and (held > LONGEST or not text.strip()):
            yield Exchange(start, prompt="".join(block), document=True)
            block, held = [], 0
    if block:
        yield Exchange(start, prompt="".join(block), document=True)


def exchange(record: Any, line: int) -> Exchange:
    """One record of any form but a trace's. Raises NotReadable."""
    if not isinstance(record, dict):
        raise NotReadable(f"a JSON {type(record).__name__}; expected an object")
    prompt_class = _class(record.get("class") or record.get("prompt_class"))
    if "prompt_token_ids" in record:
        return Exchange(line, prompt_ids=_ids(record, "prompt_token_ids"), answer_ids=_ids(record, "token_ids"), prompt_class=prompt_class,
                        max_tokens=_count(record.get("max_tokens")), finish_reason=_word(record.get("finish_reason")),
                        sampling={name: record[name] for name in LAW if record.get(name) is not None},
                        places=read_places(record.get("logprobs")))
    if isinstance(record.get("request"), dict):
        return _pair(record["request"], record.get("response"), line, prompt_class)
    turns = record.get("messages") or record.get("conversations")
    if turns is not None:
        messages = _messages(turns)
        answer = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
        return Exchange(line, messages=messages if answer is None else messages[:-1], answer=answer, prompt_class=prompt_class)
    for name in ("prompt", "text"):
        if isinstance(record.get(name), str) and record[name]:
            answer = record.get("completion") or record.get("response")
            return Exchange(line, prompt=_text(record[name]), answer=_text(answer) if isinstance(answer, str) else None,
                            prompt_class=prompt_class, document=name == "text")
    raise NotReadable(f"no known form: keys {', '.join(repr(name)[1:-1] for name in sorted(record)[:8])[:200] or 'none'}")


def _pair(request: Mapping[str, Any], response: Any, line: int, prompt_class: str | None) -> Exchange:
    sampling = {k: v for k, v in request.items() if k not in ("messages", "prompt", "model", "stream")}
    metadata = request.get("metadata")
    prompt_class = prompt_class or (_class(metadata.get("prompt_class")) if isinstance(metadata, dict) else None)
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    answer = message.get("content") if isinstance(message, dict) else choice.get("text")
    known: dict[str, Any] = dict(answer=_text(answer) if isinstance(answer, str) else None, prompt_class=prompt_class, sampling=sampling,
                                 max_tokens=_count(request.get("max_tokens") or request.get("max_completion_tokens")),
                                 finish_reason=_word(choice.get("finish_reason")), places=read_places(choice.get("logprobs")))
    if request.get("messages"):
        return Exchange(line, messages=_messages(request["messages"]), **known)
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt:
        return Exchange(line, prompt_ids=_ids(request, "prompt"), **known)
    if isinstance(prompt, str) and prompt:
        return Exchange(line, prompt=_text(prompt), **known)
    raise NotReadable("a request without messages or prompt")


def _messages(turns: Any) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise NotReadable("an empty conversation")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise NotReadable(f"a turn that is a {type(turn).__name__}")
        role, content = turn.get("role") or turn.get("from"), turn.get("content", turn.get("value"))
        if isinstance(content, list):                       # OpenAI's parts: the text of them
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(role, str) or role not in SHAREGPT_ROLES or not isinstance(content, str):
            raise NotReadable(f"a turn with role {str(role)[:40]!r} and content of type {type(content).__name__}")
        messages.append({"role": SHAREGPT_ROLES[role], "content": _text(content)})
    return tuple(messages)


def _ids(record: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = record.get(name)
    if not isinstance(ids, list) or not all(isinstance(t, int) and 0 <= t < MOST for t in ids):
        raise NotReadable(f"{name} is no list of token ids")
    return tuple(ids)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < MOST:
        raise NotReadable(f"{str(value)[:20]!r} where an integer ≥ 0 should be")
    return value


def _token(value: Mapping[str, Any]) -> int:
    return _whole(value["token"])


def _text(value: str) -> str:
    """Text that a tokenizer takes. JSON may spell halves of characters that no text has."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise NotReadable("text with half a character (a lone surrogate)") from None
    return value


def _class(value: Any) -> str | None:
    if value is not None and not isinstance(value, str | int | float):
        raise NotReadable(f"a class that is a {type(value).__name__}; expected a name")
    return None if value is None else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)[:80])


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < MOST else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class _Trace:
    """Puts the events of one trace together again."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Exchange, list[int], list[tuple[int, int]]]] = {}

    def read(self, line: int, event: Mapping[str, Any], skipped: Skipped) -> Exchange | None:
        """What ends with this event, if anything does. Raises NotReadable; a request with an unreadable event is left out."""
        request = str(event.get("request", ""))
        try:
            return self._event(line, event, request, skipped)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._open.pop(request, None)
            found = f"{type(error).__name__}: {error}"
            raise NotReadable(f"an event {str(event['event'])[:40]!r} without what it should have ({found[:80]})") from None

    def _event(self, line: int, event: Mapping[str, Any], request: str, skipped: Skipped) -> Exchange | None:
        kind = event["event"]
        if kind == "request_started":
            if event.get("prompt_ids") is None:
                raise NotReadable("a traced request without prompt ids; record with trace level full")
            sampling = {**event.get("sampling", {}), "seed": event.get("seed"), "sample": event.get("sample", 0)}
            begun = Exchange(line, prompt_ids=_ids(event, "prompt_ids"), prompt_class=_class(event.get("prompt_class")),
                             max_tokens=_count(sampling.get("max_tokens")), sampling=sampling, tenant=str(event.get("tenant", "")))
            self._open[request] = begun, [], []
            if len(self._open) > OPEN:
                lost, _, _ = self._open.pop(next(iter(self._open)))
                skipped.note(lost.line, f"a traced request without an end: {OPEN} others began after it")
        elif request in self._open:
            known, ids, depths = self._open[request]
            if kind == "prefill_done":
                ids.append(_token(event["token"]))
            elif kind == "round_done":
                ids += map(_token, event["tokens"])
                depths.append((_whole(event["position"]), _whole(event["depth"])))
            elif kind == "request_done":
                del self._open[request]
                return replace(known, answer_ids=tuple(ids), finish_reason=_word(event.get("finish")), depths=tuple(depths))
        return None
