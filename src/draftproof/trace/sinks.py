"""Where trace events go, and their JSON form: one object a line, "event" first, fields at their default left out."""

from __future__ import annotations

import gzip
import json
import logging
import os
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, get_args

from ..errors import Failure
from ..types import Fate, Role
from .events import (
    VERSION,
    Alternative,
    Event,
    NodeRecord,
    PrefillDone,
    RequestDone,
    RequestStarted,
    RoundDone,
    Times,
    TokenRecord,
    TraceStarted,
)

log = logging.getLogger("draftproof.trace")

LINE = 256      # bytes, about: of a round with few nodes


class Sink(Protocol):
    def write(self, event: Event) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Null:
    """Forgets everything."""

    def write(self, event: Event) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Memory(Null):
    """Keeps every event in `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)


class Jsonl:
    """One file, one event a line. Events are gathered and written many at a time, in whole lines: rounds wait neither for a disk nor, each
    by itself, for their words, which would find the caches cold between two passes.

    When the file cannot be written (a full disk) generation goes on: the file is cut back to its last whole line, the
    reason is logged and kept in `error`, later events are counted in `lost`, and `close` raises `Failure`.
    """

    def __init__(self, path: str | Path, buffer_bytes: int = 1 << 16, flush_s: float = 1.0) -> None:
        self.path, self._buffer_bytes, self._flush_s = Path(path), buffer_bytes, flush_s
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise Failure(f"trace file {self.path}: {error.strerror}; expected a writable file in an existing folder") from error
        self._open, self._events, self._written, self._flushed_at = True, list[Event](), 0, time.monotonic()
        self.error: str | None = None
        self.lost = 0

    def write(self, event: Event) -> None:
        if self.error is not None or not self._open:
            self.lost += 1
            return
        self._events.append(event)
        full = len(self._events) * LINE >= self._buffer_bytes
        if full or isinstance(event, RequestDone) or time.monotonic() - self._flushed_at > self._flush_s:
            self.flush()

    def flush(self) -> None:
        self._flushed_at = time.monotonic()
        if not self._events:
            return
        count, done = len(self._events), 0
        data = memoryview("".join([to_json(event) + "\n" for event in self._events]).encode())
        self._events = []
        try:
            while done < len(data):
                done += self._put(data[done:])
            self._written += done
        except OSError as error:
            self.lost += count
            self.error = f"trace file {self.path}: {error.strerror} after {self._written} bytes; only the trace ends there: free some space"
            log.error(self.error)
            with suppress(OSError):                      # a pipe or a device has no end to cut
                os.ftruncate(self._file, self._written)

    def close(self) -> None:
        """Raises Failure when events were lost."""
        if self._open:
            self.flush()
            self._open = False
            os.close(self._file)
        if self.error is not None:
            raise Failure(f"{self.error} ({self.lost} events lost)")

    def _put(self, data: memoryview) -> int:
        return os.write(self._file, data)


def to_json(event: Event) -> str:
    """One line without its newline; `from_json(to_json(e)) == e`."""
    return _round_line(event) if isinstance(event, RoundDone) else _dumps({"event": event.event, **_plain(event)})


def from_json(line: str) -> Event | None:
    """The event of a line; unknown keys are ignored, and an unknown event is None. Raises Failure on what is no trace."""
    try:
        record = json.loads(line)
        name = record["event"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Failure(f"not a line of a trace: {line[:80]!r}; expected a JSON object with \"event\"") from error
    if not isinstance(name, str):
        raise Failure(f"not a line of a trace: {line[:80]!r}; expected \"event\" with a name as {', '.join(_EVENTS)}")
    kind = _EVENTS.get(name)
    if kind is None:
        return None
    try:
        event: Event = _build(kind, record)
        _check(event)
    except (TypeError, ValueError, AttributeError) as error:
        raise Failure(f"a {name} record of another form ({error}); expected trace version {VERSION}") from error
    if isinstance(event, TraceStarted) and not isinstance(event.version, int):
        raise Failure(f"trace version {event.version!r}; expected an integer up to {VERSION}")
    if isinstance(event, TraceStarted) and event.version > VERSION:
        raise Failure(f"trace version {event.version}; this reader knows up to {VERSION}: upgrade draftproof")
    return event


def _check(event: Event) -> None:
    """Raises TypeError or ValueError where a reader would stumble: over what is no finite number, and over guesses that are no tree."""
    for name in _NUMBERS[type(event)]:
        if not isfinite(value := getattr(event, name)):
            raise ValueError(f"{name} is {value}")
    if isinstance(event, RequestDone) and not isinstance(event.metrics, dict):
        raise TypeError("metrics are no object")
    if not isinstance(event, RoundDone):
        return
    if not all(map(isfinite, event.times)):
        raise ValueError(f"times are {', '.join(map(str, event.times))}")
    for place, node in enumerate(event.nodes):
        if not -1 <= node.parent < place or node.fate not in get_args(Fate):
            raise ValueError(f"guess {place} has parent {node.parent} and fate {node.fate!r}")
    if unknown := {token.role for token in event.tokens} - {*get_args(Role)}:
        raise ValueError(f"a token has role {unknown.pop()!r}")


def trace_lines(path: str | Path) -> Iterator[str]:
    """The lines of a trace; a name that ends with .gz is unpacked. A last line without its newline may end within a character.

    Raises Failure naming the file that cannot be read.
    """
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            for line in file:
                line = line.removeprefix(BOM_UTF8)              # where a file begins, or was appended to another
                yield line.decode(errors="strict" if line.endswith(b"\n") else "replace")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Failure(f"trace file {path}: {error}; expected a JSONL trace") from error


def read_trace(path: str | Path) -> Iterator[Event]:
    """Every event of a JSONL trace. A last line without its newline (the writer was killed) is left out.

    Raises Failure naming the line that is no trace record, or the file that cannot be read.
    """
    for number, line in enumerate(trace_lines(path), 1):
        if not line.endswith("\n"):
            return
        try:
            event = from_json(line)
        except Failure as error:
            raise Failure(f"{path}, line {number}: {error}") from error
        if event is not None:
            yield event


_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _round_line(e: RoundDone) -> str:
    """The one record that is written every round, in half the time of the general form and equal to it (a test compares)."""
    t = e.times
    nodes = ",".join([
        f'{{"token":{n.token},"parent":{n.parent},"fate":"{n.fate}"}}' if n.p is None and n.score is None else _dumps(_plain(n))
        for n in e.nodes])
    tokens = ",".join([
        f'{{"token":{k.token},"role":"{k.role}"}}' if k.p is None and k.logprob is None else _dumps(_plain(k)) for k in e.tokens])
    return (
        f'{{"event":"round_done","request":{_dumps(e.request)},"round":{e.round},"at_s":{e.at_s!r},"batch":{e.batch},"position":{e.position},'
        f'"depth":{e.depth},"drafter":{_dumps(e.drafter)},"reason":{_dumps(e.reason)},"draft_reason":{_dumps(e.draft_reason)},'
        f'"nodes":[{nodes}],"tokens":[{tokens}],"text":{_dumps(e.text)},'
        f'"times":{{"draft_s":{t.draft_s!r},"score_s":{t.score_s!r},"verify_s":{t.verify_s!r},"other_s":{t.other_s!r}}}}}')


_EVENTS: dict[str, Any] = {kind.event: kind for kind in (TraceStarted, RequestStarted, PrefillDone, RoundDone, RequestDone)}
_NUMBERS: dict[type, tuple[str, ...]] = {
    TraceStarted: (), RequestStarted: ("at_s", "prompt_tokens"), PrefillDone: ("at_s", "seconds", "passes"),
    RoundDone: ("round", "at_s", "batch", "position", "depth"), RequestDone: ("at_s", "completion_tokens"),
}
_RECORDS = (Alternative, NodeRecord, TokenRecord, Times, *_EVENTS.values())
_REQUIRED: Any = object()


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return _REQUIRED if field.default is MISSING else field.default


def _fields(kind: Any) -> list[tuple[str, Any]]:
    """Names, and what each is unless somebody says otherwise."""
    if issubclass(kind, tuple):
        return [(name, kind._field_defaults.get(name, _REQUIRED)) for name in kind._fields]
    return [(f.name, _default(f)) for f in fields(kind)]


_FIELDS: dict[type, list[tuple[str, Any]]] = {kind: _fields(kind) for kind in _RECORDS}


def _plain(record: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, default in _FIELDS[type(record)]:
        value = getattr(record, name)
        if value is default or value == default:
            continue
        if type(value) is tuple and value and type(value[0]) in _FIELDS:
            out[name] = [_plain(v) for v in value]
        else:
            out[name] = _plain(value) if type(value) in _FIELDS else value
    return out


def _tuple_of(kind: type) -> Callable[[list[dict[str, Any]]], tuple[Any, ...]]:
    return lambda values: tuple(_build(kind, v) for v in values)


_READ: dict[str, Callable[[Any], Any]] = {
    "nodes": _tuple_of(NodeRecord),
    "tokens": _tuple_of(TokenRecord),
    "alternatives": _tuple_of(Alternative),
    "draft_alternatives": _tuple_of(Alternative),
    "top_logprobs": _tuple_of(Alternative),
    "times": lambda value: _build(Times, value),
    "prompt_ids": tuple,
    "vocabulary": tuple,
}


def _build(kind: Any, record: dict[str, Any]) -> Any:
    values = {name: record[name] for name, _ in _FIELDS[kind] if name in record}
    for name, value in values.items():
        if name in _READ and value is not None:
            values[name] = _READ[name](value)
        elif name == "token" and isinstance(value, dict):      # a prefill's token is a record, a node's is an id
            values[name] = _build(TokenRecord, value)
    return kind(**values)
