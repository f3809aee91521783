"""Traffic logs of every common form, read line by line: an `Exchange` for every request, and a count of what could not be read.

    minimal       {"prompt_token_ids": [...], "token_ids": [...], "max_tokens"?, "finish_reason"?, "class"?, "temperature"?, "logprobs"?}
    OpenAI pairs  {"request": {"messages" | "prompt", …}, "response": {"choices": [{"message" | "text"}, …]}}     one of every choice
    OpenAI chat   {"messages": [{"role", "content"}, …], "tools"?}      one of every turn of the assistant, to the turns before it
    ShareGPT      {"conversations": [{"from": "human" | "gpt", "value"}, …]}
    plain         {"prompt", "completion"?} · {"text"} · a .txt file, one document per blank-line block
    our traces    trace_started, request_started, … (level full has the ids)

A file may also be one JSON array of such records; its lines are then its records. A file is streamed: memory does not grow with its
length (of traces, at most `OPEN` requests that have not ended are held).
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from ..errors import Failure
from .logprobs import Place, read_places
from .turns import Message, NotReadable, messages_of, said_in, text_of, unechoed

LONGEST = 64 << 20      # bytes of a record; a longer line is skipped without being held
OPEN = 4096     # traced requests that may be running at a time; what was begun before them has lost its end
PIECE = 1 << 20  # characters of an array that are read at a time
BETWEEN = re.compile(r"[\s,\[\]]*")     # records of an array
TRACE = re.compile(rb'\{"event": ?"trace_started"')
USABLE = re.compile(rb'(?!\{"event": ?")\s*\S|.*"prompt_ids": ?\[')       # a line of a trace, or of a file that begins with one
SHOWN = 5       # complaints kept with their line numbers
MOST = 1 << 31  # token ids and counts are below
JOINED = "answers put together from their text, reasoning and calls, without the marks that the model wrote between them"
LAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Where a trace's ids are from."""

    target: str
    tokens: tuple[str, ...]         # the text of each


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer, as far as the log has them: ids where it has ids, else messages or text.

    Exactly one of prompt_ids, messages, prompt is set. answer_ids or answer may be set. `line` counts from 1.
    document: `prompt` is a whole text that nobody asked to continue. joined: `answer` was put together from parts. usage: tokens of the
    answer as the log counts them.
    """

    line: int
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    document: bool = False
    answer_ids: tuple[int, ...] | None = None
    answer: str | None = None
    joined: bool = False
    usage: int | None = None
    prompt_class: str | None = None
    max_tokens: int | None = None
    finish_reason: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""
    recorded: Recorded | None = None              # of our traces, level full
    depths: tuple[tuple[int, int], ...] = ()      # of our traces: (position of a round's first token, depth it was granted)
    places: tuple[Place, ...] | None = None       # of every token of the answer, what the log says of the target's law there


@dataclass(slots=True)
class Skipped:
    """What a reader left out, and why; and what it had to change."""

    count: int = 0
    shown: list[str] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)     # what was taken, but not as it stands: how many of each kind

    def note(self, line: int, why: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"line {line}: {why}")

    def remarks(self) -> list[str]:
        """What had to be changed, a line each."""
        return [f"{what}: {count}" for what, count in self.told.items() if count]


def check_log(path: str | Path) -> Path:
    """The file. Raises Failure as `read_log` does, and for a trace that has no ids at all."""
    file = _plain(path)
    with file.open("rb") as stream:
        if TRACE.match(stream.readline(LONGEST)) and not any(USABLE.match(line) for line in _lines(stream)):
            raise Failure(f"{path} is a trace without prompt ids; expected one that was recorded with --trace-level full")
    return file


def _plain(path: str | Path) -> Path:
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

    Raises Failure if the file is missing, a pipe or a device, or compressed.
    """
    file = _plain(path)
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
    for number, record in _listed(stream) if _is_array(stream) else _lined(stream):
        try:
            if isinstance(record, NotReadable):
                raise record
            if isinstance(record, dict) and "event" in record:
                found = trace.read(number, record, skipped)
            else:
                found = list(exchanges(record, number))
        except NotReadable as error:
            skipped.note(number, str(error))
            continue
        skipped.told[JOINED] += sum(one.joined for one in found)
        yield from found


def _lined(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """(number, record or why there is none) of every line that is not blank."""
    for number, raw in enumerate(_lines(stream), 1):
        if raw.strip():
            try:
                record = _record(raw, number)
            except NotReadable as error:
                record = error
            yield number, record


def _is_array(stream: IO[bytes]) -> bool:
    head = stream.read(4096)
    stream.seek(0)
    return re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", head) is not None


def _listed(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """As `_lined`, of an array of records, of which one at a time is held."""
    decode, text, at, number = json.JSONDecoder().raw_decode, "", 0, 1
    with io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape") as reader:
        while True:
            at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            try:
                record, at = decode(text, at)
            except (ValueError, RecursionError) as error:
                more = reader.read(max(PIECE, len(text) - at)) if len(text) - at <= LONGEST and isinstance(error, ValueError) else ""
                if not more:
                    if at < len(text):
                        yield number, NotReadable("no JSON object from here to the end (a file cut short?), or one that is too long")
                    return
                text, at = text[at:] + more, 0
                continue
            yield number, record
            number += 1


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


def exchanges(record: Any, line: int) -> Iterator[Exchange]:
    """Those of one record of any form but a trace's. Raises NotReadable."""
    if not isinstance(record, dict):
        raise NotReadable(f"a JSON {type(record).__name__}; expected an object")
    prompt_class = _class(record.get("class") or record.get("prompt_class"))
    if "prompt_token_ids" in record:
        yield Exchange(line, prompt_ids=_ids(record, "prompt_token_ids"), answer_ids=_ids(record, "token_ids"), prompt_class=prompt_class,
                       max_tokens=_count(record.get("max_tokens")), finish_reason=_word(record.get("finish_reason")),
                       sampling={name: record[name] for name in LAW if record.get(name) is not None},
                       places=read_places(record.get("logprobs")))
        return
    if isinstance(record.get("request"), dict):
        yield from _pair(record["request"], record.get("response"), line, prompt_class)
        return
    turns = record.get("messages") or record.get("conversations")
    if turns is not None:
        asked = {name: record[name] for name in ("tools", "chat_template_kwargs") if record.get(name) is not None}
        yield from _talk(turns, line, prompt_class, asked)
        return
    for name in ("prompt", "text"):
        if isinstance(record.get(name), str) and record[name]:
            answer = record.get("completion") or record.get("response")
            yield Exchange(line, prompt=text_of(record[name]), answer=text_of(answer) if isinstance(answer, str) else None,
                           prompt_class=prompt_class, document=name == "text")
            return
    raise NotReadable(f"no known form: keys {', '.join(repr(name)[1:-1] for name in sorted(record)[:8])[:200] or 'none'}")


def _talk(turns: Any, line: int, prompt_class: str | None, asked: Mapping[str, Any]) -> Iterator[Exchange]:
    """Each turn of the assistant's, and the end if that waits for one."""
    messages, spoken = messages_of(turns), False
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            spoken |= message["role"] != "system"
        elif spoken:
            answer, joined = said_in(turns[at])
            yield Exchange(line, messages=messages[:at], answer=answer, joined=joined, prompt_class=prompt_class, sampling=asked)
    if messages[-1]["role"] != "assistant":
        yield Exchange(line, messages=messages, prompt_class=prompt_class, sampling=asked)
    elif not spoken:
        raise NotReadable("a conversation in which nobody speaks to the assistant")


def _pair(request: Mapping[str, Any], response: Any, line: int, prompt_class: str | None) -> Iterator[Exchange]:
    metadata, response = request.get("metadata"), response if isinstance(response, dict) else {}
    asked = Exchange(
        line, max_tokens=_count(request.get("max_tokens") or request.get("max_completion_tokens")),
        sampling={k: v for k, v in request.items() if k not in ("messages", "prompt", "model", "stream")},
        prompt_class=prompt_class or (_class(metadata.get("prompt_class")) if isinstance(metadata, dict) else None))
    prompt = request.get("prompt")
    if request.get("messages"):
        asked = replace(asked, messages=messages_of(request["messages"]))
    elif isinstance(prompt, list) and prompt:
        asked = replace(asked, prompt_ids=_ids(request, "prompt"))
    elif isinstance(prompt, str) and prompt:
        asked = replace(asked, prompt=text_of(prompt))
    else:
        raise NotReadable("a request of the Responses API (input, no messages); expected one of chat completions or completions"
                          if request.get("input") else "a request without messages or prompt")
    choices, usage = response.get("choices"), response.get("usage")
    answered: list[Mapping[str, Any]] = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    written = _count(usage.get("completion_tokens")) if isinstance(usage, dict) and len(answered) == 1 else None
    if request.get("echo") is True:
        answered = [unechoed(choice, prompt) for choice in answered]
    for choice in answered or [{}]:
        answer, joined = said_in(choice["message"] if isinstance(choice.get("message"), dict) else {"content": choice.get("text")})
        yield replace(asked, answer=answer, joined=joined, usage=written, finish_reason=_word(choice.get("finish_reason")),
                      places=read_places(choice.get("logprobs")))


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
        self._recorded: Recorded | None = None

    def read(self, line: int, event: Mapping[str, Any], skipped: Skipped) -> list[Exchange]:
        """What ends with this event, none or one. Raises NotReadable; a request with an unreadable event is left out."""
        request = str(event.get("request", ""))
        try:
            ended = self._event(line, event, request, skipped)
            return [] if ended is None else [ended]
        except NotReadable:
            self._open.pop(request, None)
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._open.pop(request, None)
            found = f"{type(error).__name__}: {error}"
            raise NotReadable(f"an event {str(event['event'])[:40]!r} without what it should have ({found[:80]})") from None

    def _event(self, line: int, event: Mapping[str, Any], request: str, skipped: Skipped) -> Exchange | None:
        kind = event["event"]
        if kind == "trace_started":
            words = event.get("vocabulary")
            self._recorded = Recorded(str(event.get("target")), tuple(words)) if isinstance(words, list) else None
        elif kind == "request_started":
            if event.get("prompt_ids") is None:
                raise NotReadable("a traced request without prompt ids; record with trace level full")
            sampling = {**event.get("sampling", {}), "seed": event.get("seed"), "sample": event.get("sample", 0)}
            begun = Exchange(line, prompt_ids=_ids(event, "prompt_ids"), prompt_class=_class(event.get("prompt_class")),
                             max_tokens=_count(sampling.get("max_tokens")), sampling=sampling, tenant=str(event.get("tenant", "")),
                             recorded=self._recorded)
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
