"""The one thread that owns the engine, and what others may ask of it.

Tickets are queued here, fairly between tenants, admitted when the engine has room, and told of every token. The worker survives
whatever a step raises: the engine is opened anew and what was running is written again from its seed, without the tokens that were
already delivered.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic, sleep
from typing import Any, TypeVar

from ..config import ServeConfig
from ..engine.port import Port, TokenEvent
from ..errors import DraftproofError, Failure
from ..types import Sampling
from .refusal import Refusal
from .ticket import Ticket

log = logging.getLogger("draftproof.serve")
T = TypeVar("T")

IDLE_S = 0.5            # how long an idle worker sleeps before it looks around
PAUSE_S, LONGEST_S = 0.05, 2.0   # before another engine is opened: doubled with every failure in a row, up to the longest
REPLAYS = 1             # crashes that one request may live through: the next may be its own fault


class Worker:
    """Runs an engine that `open_engine` makes. Every public method may be called from any thread."""

    def __init__(self, open_engine: Callable[[], Port], config: ServeConfig, max_batch: int = 16) -> None:
        self._open_engine, self.config, self.max_batch = open_engine, config, max_batch
        self._lock = threading.Condition()
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()      # by tenant, whoever is next first
        self._running: list[Ticket] = []
        self._calls: deque[tuple[Callable[[Port], Any], Future[Any]]] = deque()
        self._cancelled: deque[tuple[Ticket, BaseException]] = deque()
        self._switches: dict[str, Any] = {}                 # what a new engine is to be told
        self._engine: Port | None = None
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None
        self._failures = 0                                  # turns that failed in a row
        self._suspect = False                               # a request failed and none has gone well since
        self.opened: list[Callable[[Port], None]] = []      # called with every engine that is opened
        self.lost: list[Callable[[], None]] = []            # called before an engine that failed is closed
        self.spare: Callable[[], Ticket | None] = lambda: None   # asked for something to do when nobody else asks
        self._spared = False                                # the last turn ended such a ticket
        self.restarts, self.refused, self.draining, self._closing = 0, 0, False, False

    # Asked by others

    def start(self) -> None:
        """Open the engine and begin. Raises what opening raises."""
        self._engine = self._opened()
        self._spawn()

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises Refusal when there is no place: 503 for everyone, 429 for this tenant."""
        with self._lock:
            self.check_room(ticket.tenant)
            ticket.queued = monotonic()
            ticket.told, ticket.written = [[] for _ in range(ticket.samples)], [0] * ticket.samples
            self._queues.setdefault(ticket.tenant, deque()).append(ticket)
            self._lock.notify()

    def check_room(self, tenant: str, coming: int = 0) -> None:
        """Raises the Refusal of `submit`. coming: requests of this tenant that will be submitted before this one."""
        with self._lock:
            if self.draining:
                raise stopping()
            waiting = self._waiting()
            mine = coming + len(self._queues.get(tenant, ())) + sum(t.tenant == tenant and not t.spare for t in self._running)
            if waiting >= self.config.max_queue:
                self.refused += 1
                raise Refusal(503, f"{waiting} requests are waiting, the limit is {self.config.max_queue}", "server_error",
                              code="queue_full", retry_after=self._patience(waiting))
            if mine >= self.config.max_per_tenant:
                self.refused += 1
                raise Refusal(429, f"{mine} requests of this key are open, the limit is {self.config.max_per_tenant}", "rate_limit_error",
                              code="rate_limit_exceeded", retry_after=self._patience(mine))

    def cancel(self, ticket: Ticket, why: BaseException | None = None) -> None:
        """End a ticket, wherever it is; its reader is told unless it left."""
        with self._lock:
            self._cancelled.append((ticket, why or Refusal(499, "the client went away", "server_error")))
            self._lock.notify()

    def call(self, function: Callable[[Port], T]) -> Future[T]:
        """Run `function(engine)` between two rounds. The future holds a Refusal once the worker is closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closing:
                future.set_exception(stopping())
            else:
                self._calls.append((function, future))
                self._lock.notify()
        return future

    def switch(self, **settings: Any) -> Future[dict[str, Any]]:
        """`set_speculation` from the next round on, also in an engine that takes this one's place."""
        def apply(engine: Port) -> dict[str, Any]:
            state = engine.set_speculation(**settings)
            self._switches.update({name: value for name, value in settings.items() if value is not None})
            return state

        return self.call(apply)

    def probe(self) -> Future[None]:
        """Touch the engine: after a failure, and with nothing else running, a token is generated."""
        return self.call(self._probe)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds since the step in progress began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else monotonic() - began

    @property
    def load(self) -> tuple[int, int]:
        """Requests (running, waiting)."""
        with self._lock:
            return sum(not ticket.spare for ticket in self._running), self._waiting()

    def drain(self) -> None:
        """Take no new requests; what runs goes on."""
        with self._lock:
            self.draining = True

    def close(self, timeout_s: float = 5.0) -> None:
        """End everything that runs, and the engine."""
        with self._lock:
            self.draining = self._closing = True
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def watch(self) -> bool:
        """The watchdog's look: a dead thread is replaced. True if it was."""
        if self.alive or self._closing or self._thread is None:
            return False
        log.error("the engine's thread is dead; starting another")
        self._recover(Failure("the engine's thread died"))
        self._spawn()
        return True

    # The worker's own thread

    def _spawn(self) -> None:
        self._thread = threading.Thread(target=self._run, name="draftproof-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not (self._running or self._calls or self._cancelled or self._waiting() or self._closing):
                    self._lock.wait(0 if self._spared else IDLE_S)
            if self._closing:
                return self._finish()
            try:
                self._turn()
            except Exception as error:
                log.exception("the engine failed; opening another")
                self._recover(error)
                sleep(min(LONGEST_S, PAUSE_S * 2 ** min(self._failures, 30)))    # no float holds the power of a thousand failures
                self._failures += 1

    def _turn(self) -> None:
        """Do what was asked, admit what fits, one step, tell the readers."""
        self._let_go()                                      # first, as it needs no engine, and none may be had for long
        if self._engine is None:
            self._engine = self._opened()
        while self._calls:
            self._answer(*self._calls.popleft())
        self._admit()
        self._fill_in()
        if not self._running:
            return
        self._step_began = monotonic()
        try:
            events = self._engine.step()
        finally:
            self._step_began = None
        self._failures = 0
        self._tell(events)

    def _answer(self, function: Callable[[Port], Any], future: Future[Any]) -> None:
        assert self._engine is not None, "opened before"
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(self._engine))
        except Exception as error:
            future.set_exception(error)

    def _admit(self) -> None:
        """Tickets enter the engine in turns between tenants, as many samples as share its rounds."""
        assert self._engine is not None, "opened before"
        while True:
            with self._lock:
                if not self._queues or sum(ticket.samples for ticket in self._running if not ticket.spare) >= self.max_batch:
                    return
                tenant, queue = next(iter(self._queues.items()))
                ticket = queue.popleft()
                self._queues.move_to_end(tenant)
                if not queue:
                    del self._queues[tenant]
                spare = [one for one in self._running if one.spare]
                self._running.append(ticket)
            for one in spare:                               # it has cost who came the step that ran then, at most
                self._end(one, Refusal(499, "somebody came who waits for an answer", "server_error"))
            self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        assert self._engine is not None, "opened before"
        try:
            ticket.handles = list(self._engine.submit(ticket.prompt, ticket.sampling, prompt_class=ticket.prompt_class,
                                                      tenant=ticket.tenant, speculation=ticket.speculation))
        except DraftproofError as error:
            return self._end(ticket, error)
        ticket.admitted = ticket.admitted or monotonic()
        first = ticket.handles[0]
        ticket.sampling, ticket.rule = replace(ticket.sampling, seed=first.seed), first.completion().speculation["rule"]

    def _fill_in(self) -> None:
        """With nothing else to do, a spare ticket."""
        self._spared = False
        if self._running or self.draining or self._suspect:
            return
        ticket = self.spare()
        if ticket is None:
            return
        ticket.told, ticket.written = [[] for _ in range(ticket.samples)], [0] * ticket.samples
        with self._lock:
            self._running.append(ticket)
        self._begin(ticket)

    def _let_go(self) -> None:
        """End what was cancelled and what is late."""
        while self._cancelled:
            self._end(*self._cancelled.popleft())
        now = monotonic()
        with self._lock:
            late = [ticket for queue in (*self._queues.values(), self._running) for ticket in queue if ticket.deadline <= now]
        for ticket in late:
            refusal = Refusal(504, f"not finished within {self.config.deadline_s:g} s", "server_error", code="deadline")
            ids = ", ".join(handle.id for handle in ticket.handles)
            log.warning("%s: %s", f"request {ids}" if ids else "a request that waits", refusal)
            self._end(ticket, refusal)

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        owners = {handle.id: ticket for ticket in self._running for handle in ticket.handles}
        heard: set[int] = set()
        for event in events:
            ticket = owners[event.request]
            if self._is_new(ticket, event):
                ticket.events.append(event)
                heard.add(id(ticket))
        for ticket in list(self._running):
            for handle in ticket.handles:
                if handle.done and handle.sample not in ticket.completions:
                    ticket.completions[handle.sample] = handle.completion()
                    self._suspect = handle.error is not None and not isinstance(handle.error, DraftproofError)
                    if handle.error is not None:
                        log.warning("request %s failed: %s", handle.id, handle.error, exc_info=handle.error if self._suspect else None)
                        self._end(ticket, handle.error)
            if not ticket.done and len(ticket.completions) == ticket.samples:
                self._end(ticket, None)
            elif not ticket.done and id(ticket) in heard:
                ticket.news()

    def _is_new(self, ticket: Ticket, event: TokenEvent) -> bool:
        """Whether the reader has not heard this token yet. A replay that writes another text than it was told ends the ticket."""
        told, at = ticket.told[event.sample], ticket.written[event.sample]
        ticket.written[event.sample] += 1
        if at == len(told):
            ticket.first.setdefault(event.sample, monotonic())
            told.append(event.token_id)
            return not ticket.done
        if told[at] != event.token_id:
            self._end(ticket, Failure("the engine failed while this request ran, and writes it differently now; send it again"))
        return False

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        """The ticket is over: out of the queue or the engine, and its reader knows."""
        if ticket.done:
            return
        with self._lock:
            queue = self._queues.get(ticket.tenant)
            if queue is not None and ticket in queue:
                queue.remove(ticket)
                if not queue:
                    del self._queues[ticket.tenant]
            if ticket in self._running:
                self._running.remove(ticket)
        ticket.error, ticket.done = error, True
        self._spared = ticket.spare
        ticket.news()
        for handle in ticket.handles:
            if not handle.done and self._engine is not None:
                self._engine.cancel(handle.id)

    def _probe(self, engine: Port) -> None:
        engine.stats()
        if not self._suspect or self._running:
            return
        handles = engine.submit([0], Sampling(temperature=0, max_tokens=1, ignore_eos=True))
        while not all(handle.done for handle in handles):
            engine.step()
        error = handles[0].error
        if error is not None:
            raise Failure("the engine cannot generate a token") from error
        self._suspect = False

    # After a crash

    def _recover(self, error: BaseException) -> None:
        """Another engine; what was running is queued again in front, or ends if it cannot be written again."""
        self.restarts += 1
        self._suspect, self._step_began = True, None
        try:
            for hear in self.lost:
                hear()
            if self._engine is not None:
                self._engine.close()
        except Exception:
            log.warning("the failed engine did not close", exc_info=True)
        self._engine = None
        with self._lock:
            running, self._running = self._running, []
        for ticket in reversed(running):
            ticket.handles = []
            if ticket.spare or ticket.replays >= REPLAYS or any(ticket.told) and ticket.rule != "match":
                self._end(ticket, Failure("the engine failed while this request ran; send it again"))
                continue
            ticket.replays += 1
            ticket.completions.clear()
            ticket.written = [0] * ticket.samples
            with self._lock:
                self._queues.setdefault(ticket.tenant, deque()).appendleft(ticket)
        log.warning("%d requests are written again after: %s", len(running), error)

    def _opened(self) -> Port:
        engine = self._open_engine()
        try:
            if self._switches:
                engine.set_speculation(**self._switches)
        except Exception:
            if "drafter" not in self._switches:
                raise
            log.exception("drafter %r cannot be had again; the engine goes on without one", self._switches["drafter"])
            engine.set_speculation(**{**self._switches, "drafter": "none"})
        for use in self.opened:
            use(engine)
        return engine

    def _finish(self) -> None:
        with self._lock:
            left = [ticket for queue in (*self._queues.values(), self._running) for ticket in queue]
        for ticket in left:
            self._end(ticket, stopping())
        while self._calls:
            _, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():       # who asked may have given up meanwhile
                future.set_exception(stopping())
        if self._engine is not None:
            self._engine.close()

    def _waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def _patience(self, ahead: int) -> int:
        """Seconds after which to try again: about as long as those ahead take, half a second each per place in the batch."""
        return max(1, min(60, round(ahead * 0.5 / self.max_batch)))


def stopping() -> Refusal:
    return Refusal(503, "the server is stopping", "server_error", code="stopping", retry_after=10)
