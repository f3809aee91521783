"""Between the worker's thread and one HTTP answer: wait for tokens, cut them into chunks, notice that the client left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from ..engine.port import Completion, TokenEvent
from .gate import Receive, Scope, Send
from .refusal import of_error
from .reply import Reply
from .ticket import Ticket
from .worker import Worker

T = TypeVar("T")

# JSON lets them stand, and SSE too; but clients that cut lines as str.splitlines does would cut an event in two.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Reading:
    """The tickets of one request, read by one task of the event loop."""

    def __init__(self, worker: Worker, tickets: Sequence[Ticket]) -> None:
        self.worker, self.tickets = worker, list(tickets)
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        for ticket in self.tickets:
            ticket.news = lambda: _call_soon(loop, self._news)

    def begin(self) -> None:
        """Queue every ticket or none. Raises Refusal."""
        try:
            for ticket in self.tickets:
                self.worker.submit(ticket)
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, why: BaseException | None = None) -> None:
        """Nobody reads any more."""
        for ticket in self.tickets:
            if not ticket.done:
                self.worker.cancel(ticket, why)

    async def news(self) -> None:
        """Until a token arrived or a ticket ended. Raises what ended a ticket in error."""
        await self._news.wait()
        self._news.clear()
        for ticket in self.tickets:
            if ticket.error is not None:
                raise ticket.error

    async def first(self) -> bool:
        """When there is something to tell. Raises what ended a ticket before that."""
        await self.news()
        return True

    async def groups(self) -> list[list[Completion]]:
        """The samples of every prompt, when all are done."""
        while not self.done:
            await self.news()
        return self.finished()

    def finished(self) -> list[list[Completion]]:
        return [[ticket.completions[sample] for sample in range(ticket.samples)] for ticket in self.tickets]

    @property
    def done(self) -> bool:
        return all(ticket.done and ticket.error is None for ticket in self.tickets)

    @property
    def headers(self) -> dict[str, str]:
        """The names that the trace has for the texts which have begun."""
        return {"X-Draftproof-Request": ",".join(handle.id for ticket in self.tickets for handle in ticket.handles)}

    def arrived(self) -> dict[int, list[TokenEvent]]:
        """What came since the last look, by choice."""
        found: dict[int, list[TokenEvent]] = {}
        for i, ticket in enumerate(self.tickets):
            while ticket.events:
                event = ticket.events.popleft()
                found.setdefault(i * ticket.samples + event.sample, []).append(event)
        return found


class Pacer:
    """How tokens become chunks. In fixed sizes or at fixed times, a listener on the wire does not see how many were accepted."""

    def __init__(self, chunks: str) -> None:
        kind, _, size = chunks.partition(":")
        self._tokens = int(size) if kind == "tokens" else 0
        self.wait_s = int(size) / 1000 if kind == "ms" else 0.0
        self._held: dict[int, list[TokenEvent]] = {}

    def cut(self, arrived: dict[int, list[TokenEvent]], last: bool = False) -> list[tuple[int, list[TokenEvent]]]:
        if not self._tokens:
            return list(arrived.items())
        out = []
        for choice, events in arrived.items():
            self._held.setdefault(choice, []).extend(events)
        for choice, held in self._held.items():
            while len(held) >= self._tokens or held and (last or held[-1].finish is not None):
                out.append((choice, held[:self._tokens]))
                del held[:self._tokens]
        return out


class EventStream(Response):
    """Server-Sent Events until the texts end, an error comes, or the client leaves.

    The head of the answer waits for the first token, so that whatever is wrong with a request has a status of its own.
    """

    def __init__(self, reading: Reading, reply: Reply, pacer: Pacer, long: bool = False) -> None:
        """long: a piece may hold a whole prompt, token by token; pieces are put together in a thread, while others are answered."""
        super().__init__(media_type="text/event-stream")
        self.reading, self.reply, self.pacer, self.long = reading, reply, pacer, long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send(send), receive)
        finally:
            self.reading.leave()

    async def _send(self, send: Send) -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no",
                   **self.reading.headers}
        await begin(send, headers)
        async for data in self._events():
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            yield self._packed(self.reply.first())
            while True:
                ended = self.reading.done
                yield await asyncio.to_thread(self._arrived) if self.long else self._arrived()
                if ended:
                    break
                await self.reading.news()
                if self.pacer.wait_s:
                    await asyncio.sleep(self.pacer.wait_s)
            yield self._packed(self.reply.last(self.reading.finished()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            yield self._arrived(last=True) + self._packed([self.reply.failed(of_error(error).body["error"])])
        if self.reply.done_mark:
            yield b"data: [DONE]\n\n"

    def _arrived(self, last: bool = False) -> bytes:
        pieces = self.pacer.cut(self.reading.arrived(), last)
        return self._packed([chunk for choice, events in pieces for chunk in self.reply.chunks(choice, events)])

    def _packed(self, objects: Sequence[dict[str, Any]]) -> bytes:
        named = not self.reply.done_mark
        return b"".join((f"event: {one['type']}\n" if named else "").encode() + b"data: " + compact(one) + b"\n\n" for one in objects)


async def begin(send: Send, headers: Mapping[str, str]) -> None:
    await send({"type": "http.response.start", "status": 200,
                "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]})


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(LINE_ENDS).encode()


async def unless_gone(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of `work`; None, and `work` is cancelled, if the client leaves first. The body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return task.result()
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _call_soon(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(news.set)
    except RuntimeError:
        pass                                                 # the loop is closed: the server stopped, and nobody waits
