"""Who may come in: keys, Host, Origin and the size of a body, decided on the raw request before anything else looks at it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from ..config import ServeConfig
from ..errors import Failure, OptionError
from .keys import lines_of, words_of
from .refusal import Refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENVIRONMENT = "DRAFTPROOF_API_KEYS"
SHOWN = ("X-Draftproof-Request", "X-Request-Id", "Retry-After")   # of an answer, to a page of another origin
OPEN_PATHS = ("/health", "/v1/health", "/ping", "/version")


@dataclass(frozen=True, slots=True)
class Key:
    """One API key, by its digest. The tenant is the name it was given, or else follows from the digest."""

    digest: bytes
    tenant: str
    admin: bool                   # may steer speculation
    trace: bool = False           # may see the figures of all tenants, and never what they wrote

    @classmethod
    def of(cls, line: str, number: int) -> Key:
        name, key, marks = words_of(line, f"api key {number}")
        digest = hashlib.sha256(key.encode()).digest()
        return cls(digest, name or digest.hex()[:12], "admin" in marks, bool(marks))


NOBODY = Key(b"", "", admin=True, trace=True)
"""Whoever calls where no key is asked for."""


def read_keys(file: Path | None) -> tuple[Key, ...]:
    """Keys from a file and from the environment variable DRAFTPROOF_API_KEYS: one a line (or between commas), `[NAME] KEY [admin] [trace]`.

    If none is marked admin, every key may steer speculation. Only a mark, either of the two, shows a key the figures of other tenants.
    Raises OptionError.
    """
    text = ""
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")      # some editors begin with a mark
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--api-key-file {file}: {error}; expected a text file with one key a line") from None
    kept = lines_of(text) + lines_of(os.environ.get(ENVIRONMENT, "").replace(",", "\n"))
    keys = tuple(Key.of(line, number) for number, line in enumerate(kept, 1))
    if file is not None and not keys:
        raise OptionError(f"--api-key-file {file}: found no key; expected one a line")
    if any(key.admin for key in keys):
        return keys
    return tuple(replace(key, admin=True) for key in keys)


def check_address(config: ServeConfig, keys: Sequence[Key]) -> None:
    """Raises OptionError for an address that strangers reach, without a key."""
    if not keys and config.host not in LOOPBACK:
        raise OptionError(f"host={config.host} without an API key: this would let anyone in; give --api-key-file (or {ENVIRONMENT}), "
                          "or listen on 127.0.0.1")


def check_free(config: ServeConfig) -> None:
    """Before a model is loaded: whether this address can be had. It is asked for as `run.Listener` will, and given back. Raises Failure."""
    async def ask() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, config.host, config.port, start_serving=False)
        server.close()

    try:
        asyncio.run(ask())
    except OSError as error:
        raise Failure(f"host={config.host}, port={config.port}: {error.strerror or error}; give another with --host or --port (0: a free "
                      "one), or stop what listens there") from None


class Gate:
    """An ASGI layer. It puts `tenant`, `admin` and `trace` into scope["state"], and refuses the rest in OpenAI's form.

    open_paths: what needs no key, beside OPEN_PATHS.
    """

    def __init__(self, app: App, config: ServeConfig, keys: Sequence[Key], refused: Callable[[int], None],
                 open_paths: Iterable[str] = ()) -> None:
        check_address(config, keys)
        self._open = {*OPEN_PATHS, *open_paths}
        self._app, self._config, self._keys, self._refused = app, config, tuple(keys), refused
        names = {name.lower() for name in (*LOOPBACK, config.host, *config.hosts)}
        self._inner: App = CORSMiddleware(self._keyed, allow_origins=config.origins, allow_methods=("GET", "POST", "PUT"),
                                          allow_headers=("*",), expose_headers=SHOWN)    # clients add headers of their own
        # Without a key, a page in the user's own browser could reach the server under a name of its choice (DNS rebinding).
        self._hosts = None if keys and not config.hosts and config.host not in LOOPBACK else names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            headers = _headers(scope)
            self._check_host(headers)
            self._check_origin(headers)
        except Refusal as refusal:
            self._refused(refusal.status)
            return await answer(send, refusal)
        await self._inner(scope, receive, send)

    async def _keyed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Behind Host and Origin, and behind the answers to a browser's own questions (CORS), which carry no key."""
        try:
            headers = _headers(scope)
            if scope["path"] not in self._open:
                key = self._key(headers) or NOBODY
                scope.setdefault("state", {}).update(tenant=key.tenant, admin=key.admin, trace=key.trace)
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > self._config.max_body_bytes:
                raise self._too_large()
            encoding = headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise Refusal(415, f"Content-Encoding {encoding!r}: bodies are not unpacked here; send it as it is", code="body_encoded")
        except Refusal as refusal:
            self._refused(refusal.status)
            return await answer(send, refusal)
        await self._app(scope, self._limited(receive), send)

    def _check_host(self, headers: MutableMapping[str, str]) -> None:
        name = _hostname(headers.get("host", ""))
        if self._hosts is not None and name not in self._hosts:
            raise Refusal(403, f"Host {name!r} is not served here; start the server with --allow-host {name or 'NAME'}", "permission_error")

    def _check_origin(self, headers: MutableMapping[str, str]) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._config.origins:
            return
        if origin in (f"http://{headers.get('host', '')}", f"https://{headers.get('host', '')}"):
            return                                           # the server's own page, also behind something that ends TLS
        raise Refusal(403, f"Origin {origin!r} may not call; start the server with --allow-origin {origin}", "permission_error")

    def _key(self, headers: MutableMapping[str, str]) -> Key | None:
        if not self._keys:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            given = headers.get("x-api-key", "")
        digest, found = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest(), None
        for key in self._keys:                               # all of them, each in constant time
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            raise Refusal(401, "no valid API key; send Authorization: Bearer KEY", "authentication_error", code="invalid_api_key")
        return found

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that stops a body which says less than it sends."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._config.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._config.max_body_bytes} bytes", code="body_too_large")


async def answer(send: Send, refusal: Refusal) -> None:
    body = json.dumps(refusal.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    await send({"type": "http.response.start", "status": refusal.status,
                "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _hostname(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
