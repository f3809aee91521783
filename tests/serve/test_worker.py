"""The worker while its engine cannot be had, and at its end: every promise to a reader and to a caller is kept. And how long it took."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.serving import letters, serving
from serve.test_faults import Around
from serve.test_http import until

from draftproof import Engine, Sampling
from draftproof.config import ServeConfig
from draftproof.serve import worker as module
from draftproof.serve.refusal import Refusal
from draftproof.serve.stream import Reading
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


@pytest.mark.parametrize(("waiting", "places", "seconds"), [(1, 16, 1), (12, 2, 3), (300, 1, 60)])
def test_who_finds_no_place_is_told_when_to_come_back(waiting: int, places: int, seconds: int) -> None:
    """Half a second for each request ahead and place of a batch, from a second to a minute."""
    worker = Worker(lambda: Engine(letters()), ServeConfig(max_queue=waiting, max_per_tenant=waiting + 1), places)
    for _ in range(waiting):
        worker.submit(Ticket("ab", Sampling()))
    limits = {(503, "queue_full"): (waiting, waiting + 1), (429, "rate_limit_exceeded"): (waiting + 1, waiting)}
    for (status, code), (most, each) in limits.items():
        worker.config = ServeConfig(max_queue=most, max_per_tenant=each)
        with pytest.raises(Refusal) as refused:
            worker.check_room("")
        assert (refused.value.status, refused.value.code, refused.value.retry_after) == (status, code, seconds)
    worker.check_room("another")
    worker.config = ServeConfig(max_queue=waiting + 1, max_per_tenant=waiting + 2)
    worker.check_room("", coming=1)
    with pytest.raises(Refusal, match=f"{waiting + 2} requests of this key are open"):
        worker.check_room("", coming=2)
    assert worker.refused == 3


def test_who_came_first_is_served_first() -> None:
    done: list[int] = []
    worker = Worker(lambda: Engine(letters()), ServeConfig(), 1)
    for i in range(4):
        worker.submit(Ticket("ab", Sampling(seed=1, max_tokens=1), news=lambda i=i: done.append(i)))  # type: ignore[misc]
    worker.start()
    until(lambda: len(done) == 4)
    worker.close()
    assert done == [0, 1, 2, 3]


def test_a_probe_asks_for_a_token_after_a_failure_only() -> None:
    asked: list[Sampling] = []

    class Counting(Around):
        def submit(self, prompt: Any, sampling: Sampling) -> Any:
            asked.append(sampling)
            return self._engine.submit(prompt, sampling)

    worker = Worker(lambda: Engine(letters()), ServeConfig())
    with Engine(letters()) as engine:
        for suspect in (False, True, False):
            worker._suspect = suspect or worker._suspect
            worker._probe(Counting(engine, lambda: None))  # type: ignore[arg-type]
            assert not worker._suspect
    assert asked == [Sampling(temperature=0, max_tokens=1, ignore_eos=True)]


def test_a_request_of_which_one_prompt_finds_no_place_leaves_none_behind() -> None:
    worker = Worker(lambda: Engine(letters()), ServeConfig(max_per_tenant=1))
    tickets = [Ticket("ab", Sampling()) for _ in range(2)]

    async def ask() -> None:
        Reading(worker, tickets).begin()

    with pytest.raises(Refusal, match="are open") as refused:
        asyncio.run(ask())
    worker._let_go()
    assert [ticket.error for ticket in tickets] == [refused.value] * 2 and worker.load == (0, 0)


# Times, as a client sees them


def seconds_of(text: str, name: str) -> tuple[float, int]:
    """Sum and count of a histogram, all classes together."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return (sum(one.value for one in samples if one.name == f"draftproof:{name}_sum"),
            int(sum(one.value for one in samples if one.name == f"draftproof:{name}_count")))


def test_times_count_the_queue() -> None:
    """One at a time, and the first is held for half a second: the second waits as long."""
    hold = threading.Event()
    with serving(letters(), wrap=lambda engine: Around(engine, lambda: hold.wait(20) and None), max_batch=1) as running, \
            running.client() as client, ThreadPoolExecutor(2) as pool:
        def ask(seed: int) -> float:
            began = time.monotonic()
            running.complete(prompt="ab", max_tokens=20, ignore_eos=True, seed=seed)
            return time.monotonic() - began

        asked = [pool.submit(ask, seed) for seed in range(2)]
        until(lambda: running.server.worker.load == (1, 1))
        time.sleep(0.5)
        hold.set()
        took = sum(one.result(20) for one in asked)
        text = client.get("/metrics").text
    (first, firsts), (whole, wholes) = (seconds_of(text, name) for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"))
    assert firsts == wholes == 2 and 1.0 < first < whole < took
    queued, counted = seconds_of(text, "request_queue_time_seconds")
    assert counted == 2 and 0.5 < queued < first - 0.4, "the second alone waited"


def test_a_crash_does_not_set_the_clock_back() -> None:
    """Written again after a crash, a text has the beginning and the first token that its client saw, once."""
    steps = [0]

    def before() -> None:
        steps[0] += 1
        time.sleep(0.02)
        if steps[0] == 20:
            time.sleep(0.5)
            raise RuntimeError("the device is lost")

    with serving(letters(), wrap=lambda engine: Around(engine, before)) as running, running.client() as client:
        began = time.monotonic()
        running.complete(prompt="ab", max_tokens=30, ignore_eos=True, seed=1, n=2)
        took, text = time.monotonic() - began, client.get("/metrics").text
        assert running.server.worker.restarts == 1
    (first, firsts), (whole, wholes) = (seconds_of(text, name) for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"))
    assert firsts == wholes == 2, "each sample is a text of its own"
    assert first < 2 * 0.4 and 2 * 0.9 < whole <= 2 * took


def test_a_drafter_that_cannot_be_had_again_keeps_no_engine_from_opening(caplog: pytest.LogCaptureFixture) -> None:
    """Its files may be gone, or the memory for it: then the new engine goes on without one, and with all else that was switched."""
    gone, opened = threading.Event(), [0]

    class Forgetful(Around):
        def set_speculation(self, enabled: Any = None, depth_cap: Any = None, drafter: Any = None) -> Any:
            if drafter == "ngram" and gone.is_set():
                raise RuntimeError("no memory")
            return self._engine.set_speculation(enabled, depth_cap, drafter)

    def before() -> None:
        if opened[0] == 1:
            raise RuntimeError("the device is lost")

    def wrap(engine: Engine) -> Any:
        opened[0] += 1
        return Forgetful(engine, before)

    with serving(letters(), wrap=wrap) as running, running.client() as client:
        assert client.put("/draftproof/speculation", json={"drafter": "ngram", "depth_cap": 2}).status_code == 200
        gone.set()
        assert running.complete(prompt="ab", max_tokens=3)["usage"]["completion_tokens"]
        assert client.get("/draftproof/speculation").json()["drafter"] == "none" and running.server.worker._switches["drafter"] == "ngram"
        assert opened[0] == 2 and "'ngram' cannot be had again" in caplog.text


def test_only_texts_that_began_have_times() -> None:
    """What expires in the queue has none; what is cut off while it runs ends there."""
    steps = [0]

    def before() -> None:
        steps[0] += 1
        time.sleep(0.8 if steps[0] == 8 else 0.02)           # over both deadlines at a time

    config = ServeConfig(port=0, deadline_s=0.5)
    with serving(letters(), wrap=lambda engine: Around(engine, before), max_batch=1, config=config) as running, \
            running.client() as client, ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda seed: running.post("/v1/completions", {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True,
                                                                            "seed": seed}), range(2)))
        assert [reply.status_code for reply in replies] == [504, 504]
        text = client.get("/metrics").text
    assert seconds_of(text, "time_to_first_token_seconds")[1] == 1
    whole, wholes = seconds_of(text, "e2e_request_latency_seconds")
    assert wholes == 1 and 0.4 < whole < 2
