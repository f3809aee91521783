"""The worker while its engine cannot be had, and at its end: every promise to a reader and to a caller is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serve.serving import letters
from serve.test_faults import Around
from serve.test_http import until

from draftproof import Engine, Sampling
from draftproof.config import ServeConfig
from draftproof.serve import worker as module
from draftproof.serve.refusal import Refusal
from draftproof.serve.ticket import Ticket
from draftproof.serve.worker import Worker


@contextmanager
def lost(config: ServeConfig | None = None) -> Iterator[Worker]:
    """A worker whose engine breaks at its first step and cannot be opened again."""
    opened = [0]

    def before() -> None:
        raise RuntimeError("the device is lost")

    def open_engine() -> Any:
        opened[0] += 1
        if opened[0] > 1:
            raise RuntimeError("the device is lost")
        return Around(Engine(letters()), before)

    worker = Worker(open_engine, config or ServeConfig(), 2)
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def test_a_deadline_holds_while_no_engine_can_be_opened() -> None:
    with lost() as worker:
        running, queued = (Ticket("ab", Sampling(seed=1, max_tokens=3), deadline=time.monotonic() + 1) for _ in range(2))
        worker.submit(running)
        until(lambda: worker.restarts > 1)
        worker.submit(queued)
        until(lambda: running.done and queued.done, 5)
        for ticket in (running, queued):
            assert isinstance(ticket.error, Refusal) and (ticket.error.status, ticket.error.code) == (504, "deadline")
        assert worker.load == (0, 0)


def test_cancelling_while_no_engine_can_be_opened() -> None:
    with lost() as worker:
        ticket = Ticket("ab", Sampling(seed=1, max_tokens=3))
        worker.submit(ticket)
        until(lambda: worker.restarts > 1)
        assert not ticket.done
        worker.cancel(ticket)
        until(lambda: ticket.done, 5)
        assert isinstance(ticket.error, Refusal) and ticket.error.status == 499 and worker.load == (0, 0)


def test_a_thousand_failures_in_a_row_end_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    monkeypatch.setattr(module, "sleep", lambda seconds: (paused.append(seconds), time.sleep(0.01))[0])
    with lost() as worker:
        worker._failures = 2000
        worker.submit(Ticket("ab", Sampling(seed=1, max_tokens=3)))
        until(lambda: len(paused) > 3 or bool(died), 5)
        assert not died and worker.alive and set(paused) == {2.0}


@contextmanager
def in_a_step(closed: list[bool]) -> Iterator[tuple[Worker, Ticket, Callable[[], None]]]:
    """A worker in a step that goes on until the function is called."""
    began, over = threading.Event(), threading.Event()

    def before() -> None:
        began.set()
        over.wait(20)

    class Closing(Around):
        def close(self) -> None:
            closed.append(True)
            self._engine.close()

    worker = Worker(lambda: Closing(Engine(letters()), before), ServeConfig(), 2)
    worker.start()
    try:
        ticket = Ticket("ab", Sampling(seed=1, max_tokens=3))
        worker.submit(ticket)
        assert began.wait(20)
        yield worker, ticket, over.set
    finally:
        over.set()
        worker.close()


def test_a_look_that_was_given_up_does_not_spoil_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that timed out during a long step is cancelled, and still stands in line when the server stops."""
    closed: list[bool] = []
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with in_a_step(closed) as (worker, ticket, let_go):
        given_up, waiting = (worker.call(lambda engine: engine.stats()) for _ in range(2))
        assert given_up.cancel()
        threading.Timer(0.2, let_go).start()
        worker.close()
        assert not died and closed == [True] and ticket.done
        with pytest.raises(Refusal, match="stopping"):
            waiting.result(1)
