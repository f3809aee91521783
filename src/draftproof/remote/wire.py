"""HTTP to a vLLM server with nothing but the standard library: small questions, and streams of token ids, one thread each."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

CONNECT_S = 10.0
ANSWER_S = 5.0           # for a small question
MOST_IDS = 1 << 31
SILENCE_S = 600.0        # a stream that says nothing for so long is lost; a hanging server is found by its health sooner


@dataclass(frozen=True, slots=True)
class Arrived:
    """Tokens of one engine step (or of several, if the reader was slow). logprobs: vLLM's object for them, if asked for."""

    at: float                                       # of `perf_counter`
    tokens: tuple[int, ...]
    logprobs: Mapping[str, Any] | None = None
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream is whole. report: `metrics.speculative_decoding`, if the server gives it. cached: prompt tokens, if it says."""

    report: Mapping[str, Any] | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer that would be the same everywhere: a 4xx."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The server died, hung or failed; another one may do."""

    reason: str


News = Arrived | Ended | Refused | Lost


def connect(url: str, timeout: float) -> HTTPConnection:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)


def headers_of(key: str | None) -> dict[str, str]:
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


class Denied(OSError):
    """A server that answers, and does not take our key."""


def ask(url: str, path: str, key: str | None = None) -> bytes:
    """The body of a GET. Raises OSError for everything that is no 200, Denied where the key is not taken."""
    connection = connect(url, ANSWER_S)
    try:
        connection.request("GET", urlsplit(url).path.rstrip("/") + path, headers=headers_of(key))
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise (Denied if answer.status in (401, 403) else OSError)(f"{url}{path} answered {answer.status}")
        return body
    except HTTPException as error:
        raise OSError(f"{url}{path}: {type(error).__name__}") from error
    finally:
        connection.close()


class Stream:
    """One completion, read in a thread of its own; `tell` is called there. After `stop` nothing is told."""

    def __init__(self, url: str, key: str | None, body: Mapping[str, Any], tell: Callable[[Stream, News], None]) -> None:
        self._url, self._key, self._body, self._tell = url, key, body, tell
        self._connection: HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._stopped = False
        threading.Thread(target=self._run, name="draftproof-stream", daemon=True).start()

    def stop(self) -> None:
        """Leave; the server sees the connection close and ends the request."""
        self._stopped = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass                                # it was gone already

    def _run(self) -> None:
        try:
            last: News = self._read()
        except IncompleteRead:
            last = Lost("the connection broke")
        except Exception as error:                  # whatever it is: without a last word the text would wait for ever
            last = Lost(f"{type(error).__name__}: {error}")
        finally:
            if self._connection is not None:
                self._connection.close()
        self._say(last)

    def _say(self, news: News) -> None:
        if not self._stopped:
            self._tell(self, news)

    def _read(self) -> News:
        self._connection = connection = connect(self._url, CONNECT_S)
        connection.connect()
        self._socket = connection.sock
        self._socket.settimeout(SILENCE_S)
        if self._stopped:
            return Lost("nobody waits")
        connection.request("POST", urlsplit(self._url).path.rstrip("/") + "/v1/completions", json.dumps(self._body), headers_of(self._key))
        answer = connection.getresponse()
        if answer.status != 200:
            return refusal(answer.status, answer.read())
        report: Mapping[str, Any] | None = None
        cached, finished = 0, False
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return Ended(report, cached) if finished else Lost("the stream ended without a reason")
            try:
                found = json.loads(data)
                said = error_of(found)
                if said is not None:
                    return Lost(said)
                report = (found.get("metrics") or {}).get("speculative_decoding", report)
                cached = ((found.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
                arrived = [(_arrived(choice), choice.get("finish_reason")) for choice in found.get("choices") or ()]
            except (AttributeError, TypeError, ValueError) as error:
                return Lost(f"it sent {data[:100].decode(errors='replace')}, expected a piece of a completion ({error})")
            for piece, finish in arrived:
                finished = finished or finish is not None
                self._say(piece)
                if finish is not None and piece.finish is None:
                    return Lost(f"it ended the text: {finish}")
        return Lost("the connection broke")


def _arrived(choice: Mapping[str, Any]) -> Arrived:
    """Raises ValueError for what cannot be a token."""
    tokens, finish = tuple(choice.get("token_ids") or ()), choice.get("finish_reason")
    wrong = [token for token in tokens if type(token) is not int or not 0 <= token < MOST_IDS]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no token id")
    return Arrived(perf_counter(), tokens, choice.get("logprobs"), finish if finish in ("stop", "length") else None)


def error_of(answer: Mapping[str, Any]) -> str | None:
    """The words of an answer that is an error: an object, a text, or (an older form) the answer itself. `"error": null` is none."""
    error = answer.get("error")
    if error is None and answer.get("object") != "error":
        return None
    said = (answer if error is None else error)
    return str(said.get("message", said) if isinstance(said, dict) else said)[:300]


def refusal(status: int, body: bytes) -> News:
    """A 4xx is the request's fault, but for those that say 'not now' or 'not you'."""
    try:
        found = json.loads(body)
        message = error_of(found) or str(found) if isinstance(found, dict) else str(found)
    except ValueError:
        message = body[:300].decode(errors="replace")
    if 400 <= status < 500 and status not in (401, 403, 404, 408, 425, 429):
        return Refused(status, message[:500])
    return Lost(f"it answered {status}: {message[:300]}")
