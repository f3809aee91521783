"""Answers of other engines as their clients save them: whole or streamed, one or many, of one engine or of both.

    {"id", "choices", "usage", "metrics": {"speculative_decoding"}}    vLLM; a choice may name its tokens (`token_ids`, `logprobs`)
    {"content", "tokens", "stop", "timings"} · {"choices", "timings"}  llama.cpp, its own form and OpenAI's
    {"request": {…}, "response": {…}, "class"?}                        an answer with what was asked
    {"at_s": seconds, "data": {…}}                                     a chunk with the moment when it arrived, on any clock
    data: {…}                                                          the lines of a stream, as they came

One JSON value a line, or one for the whole file. Chunks belong to the answer whose `id` they carry; llama.cpp's own chunks carry
none and belong together up to `"stop": true`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Failure
from .wire import error_of

EXPECTED = "expected answers of a server, one JSON object a line"
AROUND = (":", "event:", "id:", "retry:")      # lines of a stream that hold no data
TOKEN_ID = "token_id:"                        # how vLLM writes ids where a text is due (return_tokens_as_token_ids)


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at once. `ids` and `words` have one entry a token, or none where the answer does not name its tokens.

    total: tokens of the answer so far, where the engine counts them. timings: llama.cpp's, so far. at: when it arrived, seconds.
    """

    text: str
    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    at: float | None = None
    total: int | None = None
    timings: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Answer:
    """One text with what its engine says of it. `line`: where it begins in the file."""

    line: int
    name: str
    model: str = ""
    created: float | None = None              # seconds, of the server's wall clock
    pieces: list[Piece] = field(default_factory=list)
    finish: str | None = None                 # the engine's own word; None: the stream was cut off
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    prompt_class: str | None = None

    @property
    def report(self) -> Mapping[str, Any] | None:
        """vLLM's `metrics.speculative_decoding`."""
        found = self.metrics.get("speculative_decoding")
        return found if isinstance(found, dict) else None

    @property
    def timings(self) -> Mapping[str, Any] | None:
        """llama.cpp's `timings` of the whole answer."""
        return next((piece.timings for piece in reversed(self.pieces) if piece.timings), None)


@dataclass(slots=True)
class Answers:
    """What a file holds, and what of it was left out, a sentence each."""

    found: list[Answer] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read(path: Path) -> Answers:
    """Every answer of a file. Raises Failure naming the line that is damaged."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{path}: {error}; {EXPECTED}") from error
    gathering = _Gathering()
    for line, record in _records(path, text):
        try:
            gathering.take(line, record)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise Failure(f"{path}, line {line}: an answer of another form ({error}); expected vLLM's or llama.cpp's") from error
    if not gathering.answers.found and not gathering.answers.left_out:
        raise Failure(f"{path}: no answer in it; {EXPECTED}")
    return gathering.answers


def is_answer(path: Path) -> bool:
    """Whether the file begins as answers of another engine do, and not as a trace."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line.strip() for line in file if line.strip() and not line.startswith(AROUND)), "")
        if first in ("{", "["):
            return path.stat().st_size < 1 << 26 and _looks(json.loads(path.read_text(encoding="utf-8-sig")))
        return first.startswith("data:") or _looks(json.loads(first))
    except (OSError, ValueError, RecursionError):
        return False


def _looks(record: Any) -> bool:
    if isinstance(record, list):
        return bool(record) and _looks(record[0])
    if not isinstance(record, dict) or "event" in record:
        return False
    inner = record.get("response", record.get("data", record))
    return isinstance(inner, dict) and ("choices" in inner or "timings" in inner or {"content", "stop"} <= inner.keys())


def _records(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """(line, JSON value) of every record; what a stream wraps around them is taken off."""
    lines = text.removesuffix("\n").split("\n")       # JSON lets U+2028, U+2029 and U+0085 stand, at which splitlines cuts too
    first = next((line.strip() for line in lines if line.strip()), "")
    if first in ("{", "["):                                        # one value over many lines
        try:
            whole = json.loads(text)
        except json.JSONDecodeError as error:
            raise Failure(f"{path}, line {error.lineno}: not JSON ({error.msg}); {EXPECTED}") from error
        yield from ((1, one) for one in (whole if isinstance(whole, list) else [whole]))
        return
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith(AROUND):
            continue
        line = line.removeprefix("data:").strip()
        if line == "[DONE]":
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = " (the file ends in it: a line cut short?)" if number == len(lines) else ""
            raise Failure(f"{path}, line {number}: not JSON: {line[:60]!r}{cut}; {EXPECTED}, or a stream's `data:` lines") from error
        yield from ((number, one) for one in (value if isinstance(value, list) else [value]))


class _Gathering:
    """Puts chunks together that belong to one answer."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._open: dict[str, Answer] = {}

    def take(self, line: int, record: Any) -> None:
        if not isinstance(record, dict):
            raise TypeError(f"a JSON {type(record).__name__} where an object is due")
        if isinstance(record.get("data"), dict):
            return self._answer(line, record["data"], at=float(record["at_s"]))
        if isinstance(record.get("request"), dict):
            if not isinstance(record.get("response"), dict):
                return self.answers.left_out.append(f"line {line}: a request without an answer")
            return self._answer(line, record["response"], asked=record["request"], prompt_class=record.get("class"))
        self._answer(line, record, prompt_class=record.get("class"))

    def _answer(self, line: int, record: Mapping[str, Any], at: float | None = None, asked: Mapping[str, Any] | None = None,
                prompt_class: object = None) -> None:
        if error_of(record) is not None:
            return self.answers.left_out.append(f"line {line}: the server answered with an error")
        choices = record.get("choices")
        if choices is None and "content" not in record and "timings" not in record:
            raise ValueError(f"keys {', '.join(sorted(record)[:8]) or 'none'}")
        if choices is not None and len(choices) > 1 or any(choice.get("index") for choice in choices or ()):
            return self.answers.left_out.append(f"line {line}: several texts in one answer, of which the engine tells no steps")
        choice = choices[0] if choices else record if choices is None else {}
        answer = self._of(line, record, bool(choice))
        answer.model = str(record.get("model") or answer.model)
        answer.created = answer.created if record.get("created") is None else float(record["created"])
        answer.usage.update(record.get("usage") or {})
        answer.metrics.update(record.get("metrics") or {})
        ids = choice.get("prompt_token_ids") or record.get("prompt_token_ids")
        answer.prompt_ids = tuple(map(int, ids)) if ids else answer.prompt_ids
        answer.asked, answer.prompt_class = asked or answer.asked, str(prompt_class) if prompt_class else answer.prompt_class
        if "content" in record and choices is None:
            answer.finish = str(record.get("stop_type") or "stop") if record.get("stop", True) else None
        else:
            answer.finish = choice.get("finish_reason") or answer.finish
        answer.pieces.append(_piece(record, choice, at))

    def _of(self, line: int, record: Mapping[str, Any], with_text: bool) -> Answer:
        """The answer that a record goes on with, or a new one."""
        key = str(record.get("id", ""))
        answer = self._open.get(key)
        if answer is None or answer.finish is not None and with_text:
            count = len(self.answers.found)
            answer = self._open[key] = Answer(line, key or f"a{count}")
            self.answers.found.append(answer)
        return answer


def _piece(record: Mapping[str, Any], choice: Mapping[str, Any], at: float | None) -> Piece:
    timings = record.get("timings")
    total = (timings or {}).get("predicted_n", (record.get("usage") or {}).get("completion_tokens"))
    ids, words = _tokens(record, choice)
    return Piece(_text(choice), ids, words, at, None if total is None else int(total), timings)


def _text(choice: Mapping[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    if isinstance(part, dict):
        return (part.get("reasoning_content") or part.get("reasoning") or "") + (part.get("content") or "")
    return str(choice.get("text") or choice.get("content") or "")


def _tokens(record: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids and token texts of a piece, as far as it names them."""
    ids: list[int] = [int(token) for token in choice.get("token_ids") or record.get("tokens") or ()]
    logprobs = choice.get("logprobs") or {}
    named = logprobs.get("content") or record.get("completion_probabilities") or ()
    words = [str(entry["token"]) for entry in named] or [str(word) for word in logprobs.get("tokens") or ()]
    if not ids and named and all("id" in entry for entry in named):
        ids = [int(entry["id"]) for entry in named]
    if words and all(word.startswith(TOKEN_ID) for word in words):
        ids, words = ids or [int(word.removeprefix(TOKEN_ID)) for word in words], []
    return tuple(ids), tuple(words)
