"""Recent trace events, kept for whoever follows: a ring that the engine fills and for which it never waits.

Ids grow by one with every event. They begin at the clock (microseconds), so a server that was started again goes on above the ids
of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from time import time

from ..trace.events import Event, NodeRecord, PrefillDone, RequestDone, RequestStarted, RoundDone, TokenRecord, TraceStarted
from ..trace.sinks import Null, to_json

WITHHELD = -1           # stands for a token of another tenant
BATCH = 256             # events that one look gives at most


@dataclass(slots=True)
class Record:
    """One event; tenant: whose it is, None for what everyone may see; size: about the bytes of its JSON."""

    id: int
    event: Event
    tenant: str | None
    size: int
    _lines: dict[bool, str] = field(default_factory=dict)        # made once, when first read

    def line(self, whole: bool) -> str:
        """JSON, as in a trace file. Not `whole`: without anything that is text, or that says which token it was."""
        if whole not in self._lines:
            text = to_json(self.event if whole else withheld(self.event))
            self._lines[whole] = text if whole or not isinstance(self.event, RequestStarted) else text[:-1] + ',"withheld":true}'
        return self._lines[whole]


@dataclass(frozen=True, slots=True)
class Look:
    """What there is behind an id."""

    header: Record | None             # the header of `records`, if it fell out of the ring and the reader has not had it
    lost: bool                        # events between are not kept any more
    records: Sequence[Record]         # the next ones
    oldest: int                       # id of the oldest event that is kept


class Feed(Null):
    """A trace sink that keeps the last events, at most `most` of at most about `most_bytes`."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lock = Lock()
        self._kept: dict[int, Record] = {}                       # by id, the oldest first
        self._base = self._last = int(time() * 1e6)
        self._size = 0
        self._behind: Record | None = None                       # the last header that fell out
        self._tenants: dict[str, str] = {}                       # of requests that have begun and not ended
        self._listeners: list[Callable[[], None]] = []

    def write(self, event: Event) -> None:
        tenant: str | None = None
        if isinstance(event, TraceStarted):
            self._tenants.clear()                                # another engine: nothing of the old one lives
        else:
            if isinstance(event, RequestStarted):
                self._tenants[event.request] = event.tenant
            tenant = self._tenants.get(event.request)
            if tenant is None:                                   # it ended before it began
                return
            if isinstance(event, RequestDone):
                del self._tenants[event.request]
        with self._lock:
            self._last += 1
            record = self._kept[self._last] = Record(self._last, event, tenant, size_of(event))
            self._size += record.size
            while len(self._kept) > self._most or self._size > self._most_bytes and len(self._kept) > 1:
                self._forget()
        for listener in self._listeners:
            listener()

    def _forget(self) -> None:
        oldest = self._kept.pop(next(iter(self._kept)))
        self._size -= oldest.size
        if isinstance(oldest.event, TraceStarted):
            self._behind = oldest

    @property
    def last(self) -> int:
        """The id of the newest event."""
        return self._last

    @property
    def kept(self) -> tuple[int, int]:
        """(events, about bytes)."""
        return len(self._kept), self._size

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, which must not wait, in the engine's thread after each event; the returned function ends that."""
        with self._lock:
            self._listeners = [*self._listeners, listener]

        def leave() -> None:
            with self._lock:
                self._listeners = [one for one in self._listeners if one is not listener]

        return leave

    def after(self, since: int) -> Look:
        """The next events behind the id `since`; 0 is before all of them. An id of another life of the server has lost the thread."""
        with self._lock:
            oldest = next(iter(self._kept), self._last + 1)
            known = since == 0 or self._base <= since <= self._last
            begin = since if known and since else self._base
            header = self._behind if self._behind is not None and self._behind.id > begin else None
            first = max(begin + 1, oldest)
            records = [self._kept[i] for i in range(first, min(first + BATCH, self._last + 1))]
            return Look(header, not known or begin < oldest - 1, records, oldest)


def size_of(event: Event) -> int:
    """About the bytes of its JSON. Rounds are estimated: they are many."""
    if not isinstance(event, RoundDone):
        return len(to_json(event))
    lists = sum(len(token.alternatives) + len(token.draft_alternatives) + len(token.top_logprobs) for token in event.tokens)
    return 400 + len(event.text) + 60 * (len(event.nodes) + len(event.tokens)) + 40 * lists


def withheld(event: Event) -> Event:
    """The event's figures alone. What a client chose freely (stop texts, grammars, the seed of the noise) is left out as well."""
    if isinstance(event, RequestStarted):
        plain = {name: value for name, value in event.sampling.items() if name != "seed" and isinstance(value, int | float | None)}
        return replace(event, sampling=plain, seed=0, prompt_ids=None)
    if isinstance(event, PrefillDone):
        return replace(event, token=TokenRecord(WITHHELD, event.token.role), text="")
    if isinstance(event, RoundDone):
        nodes = tuple(NodeRecord(WITHHELD, node.parent, node.fate) for node in event.nodes)
        tokens = tuple(TokenRecord(WITHHELD, token.role) for token in event.tokens)
        return replace(event, nodes=nodes, tokens=tokens, text="", draft_reason="")
    if isinstance(event, RequestDone) and event.error is not None:
        return replace(event, error="withheld")
    return event
