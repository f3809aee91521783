"""The page at `/`, and the events that it follows: server-sent events with ids, from a ring that the engine never waits for."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response

from ..trace.events import TraceStarted
from ..view.bundle import PAGE, TYPES, files
from ..view.server import HEADERS
from .feed import Feed, Record
from .gate import Receive, Scope, Send
from .refusal import Refusal
from .stream import begin, compact, unless_gone
from .translate import Served

FILES = {"/" + file.name: file for file in files()} | {"/": PAGE / "index.html"}
WATCHERS = 16                # readers of one tenant at a time
GATHER_S = 0.02              # what arrives within this time goes out together
HEARTBEAT_S = 15.0
LOOK_S = 1.0                 # how soon a reader is told that the server stops


class Page:
    """The page's files and its events. `over` says whether nothing more will come."""

    def __init__(self, feed: Feed, served: Served, over: Callable[[], bool]) -> None:
        self.feed, self.served, self.over = feed, served, over
        self.reading: Counter[str] = Counter()                   # readers by tenant

    async def file(self, request: Request) -> Response:
        path = FILES[request.url.path]
        return Response(path.read_bytes(), headers={**HEADERS, "Content-Type": TYPES[path.suffix]})

    async def events(self, request: Request) -> Response:
        """What happened behind the id in `Last-Event-ID`, else in `?since=` (0: all that is kept), and then what happens."""
        tenant = request.state.tenant
        if self.reading[tenant] >= WATCHERS:
            raise Refusal(429, f"{WATCHERS} readers of this key follow already; close one", "rate_limit_error", retry_after=5)
        since = _since(request)
        self.reading[tenant] += 1                                # from now on, as others may ask while this one waits
        try:
            await asyncio.to_thread(lambda: self._vocabulary)    # made once; it may take a second
        except BaseException:
            self.reading[tenant] -= 1
            raise
        return Following(self, since, tenant, request.state.trace)

    @cached_property
    def _vocabulary(self) -> str:
        """The texts of all tokens as JSON, so that a reader can show each by itself; "" without a tokenizer."""
        tokenizer = self.served.tokenizer
        return "" if tokenizer is None else json.dumps([tokenizer.piece(i) for i in range(self.served.vocab_size)], ensure_ascii=False)

    def line(self, record: Record, tenant: str, trace: bool) -> bytes:
        """A record as one event of the stream; b"" if this reader may not see it."""
        own = record.tenant in (None, tenant)
        if not (own or trace):
            return b""
        line = record.line(whole=own)
        if isinstance(record.event, TraceStarted) and record.event.vocabulary is None and self._vocabulary:
            line = f'{line[:-1]},"vocabulary":{self._vocabulary}}}'
        return f"id: {record.id}\ndata: {line}\n\n".encode()


class Bell:
    """Rung in the engine's thread, heard in the loop: however often it rings, the loop is called once."""

    def __init__(self) -> None:
        self._loop, self._heard, self._rung = asyncio.get_running_loop(), asyncio.Event(), False

    def ring(self) -> None:
        if self._rung:
            return
        self._rung = True
        try:
            self._loop.call_soon_threadsafe(self._heard.set)
        except RuntimeError:
            pass                                                 # the loop is closed: the server stopped

    async def wait(self, seconds: float) -> None:
        """Until it rang, and a moment for what follows; or until the time is over."""
        try:
            async with asyncio.timeout(seconds):                 # wait_for of Python 3.11 loses a cancellation that meets the bell
                await self._heard.wait()
        except TimeoutError:
            return
        await asyncio.sleep(GATHER_S)
        self._heard.clear()
        self._rung = False                                       # before the next look, so that nothing is missed


class Following(Response):
    """The stream of one reader, who is counted already. It holds one batch of events at most; who is too slow is told that some are
    lost."""

    def __init__(self, page: Page, since: int, tenant: str, trace: bool) -> None:
        super().__init__()
        self._page, self._since, self._tenant, self._trace = page, since, tenant, trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bell = Bell()
        leave = self._page.feed.listen(bell.ring)
        try:
            await unless_gone(self._send(send, bell), receive)
        finally:
            leave()
            self._page.reading[self._tenant] -= 1

    async def _send(self, send: Send, bell: Bell) -> None:
        headers = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        await begin(send, headers)
        async for data in self._pieces(bell):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self, bell: Bell) -> AsyncIterator[bytes]:
        yield b": draftproof\nretry: 1000\n\n"
        spoke = monotonic()
        while True:
            data, more = self._next()
            if data:
                yield data
                spoke = monotonic()
            if more:
                continue
            if self._page.over():
                return
            if monotonic() - spoke > HEARTBEAT_S:
                yield f": still here\nid: {self._since}\n\n".encode()       # the id moves on past what is others'
                spoke = monotonic()
            await bell.wait(LOOK_S)

    def _next(self) -> tuple[bytes, bool]:
        """The next events, and whether there were any."""
        look = self._page.feed.after(self._since)
        parts = [] if look.header is None else [self._line(look.header)]
        if look.lost:
            gap = {"after": self._since, "before": look.oldest}
            self._since = look.oldest - 1
            parts.append(f"event: gap\nid: {self._since}\ndata: ".encode() + compact(gap) + b"\n\n")
        parts += map(self._line, look.records)
        if look.records:
            self._since = look.records[-1].id
        return b"".join(parts), bool(look.records)

    def _line(self, record: Record) -> bytes:
        return self._page.line(record, self._tenant, self._trace)


def _since(request: Request) -> int:
    """Raises Refusal."""
    said = request.headers.get("last-event-id") or request.query_params.get("since", "0")
    if not (said.isascii() and said.isdecimal() and len(said) < 20):
        raise Refusal(400, f"since={said[:40]!r}: expected the id of an event, or 0", param="since")
    return int(said)
