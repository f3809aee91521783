"""Around everything else: every answer has the name of its request, and a line in the log where one is wanted."""

from __future__ import annotations

import logging
import re
import secrets
from time import monotonic

from .gate import App, Message, Receive, Scope, Send

log = logging.getLogger("draftproof.access")

HEADER = b"x-request-id"
TAKEN = re.compile(rb"[\x21-\x7e]{1,128}")               # nothing that could look like another line of a log


class Access:
    """An ASGI layer. A request keeps the X-Request-Id that its client gave, or gets one; scope["state"]["request_id"] holds it.

    logged: a line when an answer is over: from where, which tenant, what, the status, seconds, the request's names here and in the trace.
    """

    def __init__(self, app: App, logged: bool) -> None:
        self._app, self._logged = app, logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        name = given if TAKEN.fullmatch(given) else f"req_{secrets.token_hex(16)}".encode()
        scope.setdefault("state", {})["request_id"] = name.decode()
        answer = _Named(send, name)
        began = monotonic()
        try:
            await self._app(scope, receive, answer)
        finally:
            if self._logged:
                client, path = scope.get("client") or ("-",), scope.get("raw_path") or scope["path"].encode()
                log.info('%s %s "%s %s" %s %.3f s %s %s', client[0], scope["state"].get("tenant") or "-", scope["method"],
                         path.decode("ascii", "backslashreplace"), answer.status or "-", monotonic() - began, name.decode(),
                         answer.texts or "-")


class _Named:
    """`send` that adds the name, and keeps what it saw."""

    def __init__(self, send: Send, name: bytes) -> None:
        self._send, self._name = send, name
        self.status, self.texts = 0, ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self.status, self.texts = message["status"], dict(headers).get(b"x-draftproof-request", b"").decode()
            message = {**message, "headers": [*headers, (HEADER, self._name)]}
        await self._send(message)
