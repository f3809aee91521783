"""A server that was told to stop: who comes meanwhile is answered, what runs is finished, and what takes too long ends as documented."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from serve.serving import Running, letters, serving
from serve.test_faults import Around
from serve.test_http import until

from draftproof.config import ServeConfig
from draftproof.serve import run

TEXT: dict[str, Any] = {"prompt": "ab", "seed": 1, "ignore_eos": True}


def slow(engine: Any) -> Any:
    return Around(engine, lambda: time.sleep(0.02))


def stopped(running: Running) -> None:
    """The server has ended by itself."""
    running.thread.join(10)
    assert not running.thread.is_alive() and not running.server.worker.alive


def test_who_comes_while_the_server_stops_is_answered() -> None:
    go = threading.Event()
    with serving(letters(), wrap=lambda engine: Around(engine, lambda: go.wait(20) and None)) as running, ThreadPoolExecutor(1) as pool:
        text = pool.submit(running.complete, **TEXT, max_tokens=40)
        until(lambda: running.server.worker.load[0] == 1)
        running.listener.handle_exit(15, None)
        time.sleep(0.2)                                      # longer than the listener takes to look
        with running.client() as client:                     # a connection of its own
            refused, ready = running.post("/v1/completions", {"prompt": "a"}), client.get("/ready")
            assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "stopping", "10")
            assert (ready.status_code, client.get("/health").status_code) == (503, 200) and "is stopping" in ready.text
            assert 'draftproof:ready{model_name="letters"} 0.0' in client.get("/metrics").text
        go.set()
        assert text.result(20)["usage"]["completion_tokens"] == 40
        stopped(running)


def test_what_the_drain_cuts_off_ends_as_documented(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftproof.serve")
    with serving(letters(), wrap=slow, config=ServeConfig(port=0, drain_s=0.3), max_batch=3) as running, ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(running.stream, **TEXT, max_tokens=4000) for _ in range(2)]
        until(lambda: running.server.worker.load == (2, 0) and all(sum(t.written) for t in running.server.worker._running))
        whole = [pool.submit(running.post, "/v1/completions", {**TEXT, "max_tokens": 4000}) for _ in range(2)]
        until(lambda: running.server.worker.load == (3, 1))
        running.listener.handle_exit(2, None)
        replies = [one.result(20) for one in whole]
        assert all(reply.status_code == 503 and reply.headers["retry-after"] for reply in replies)
        ends = [stream.result(20)[-1] for stream in streams] + [reply.json() for reply in replies]
        assert [end["error"]["code"] for end in ends] == ["stopping"] * 4
        stopped(running)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["stopping: 3 requests run, 1 wait; they have 0.3 s to end", "stopped 4 requests after 0.3 s"]


def test_an_engine_that_hangs_holds_no_answer_up(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a step longer than the drain takes: clients that have no answer yet get one without it."""
    monkeypatch.setattr(run, "STOP_S", 0)
    hangs, over = threading.Event(), threading.Event()

    def before() -> None:
        time.sleep(0.01)
        if hangs.is_set():
            over.wait(20)

    with serving(letters(), wrap=lambda engine: Around(engine, before), config=ServeConfig(port=0, drain_s=0.1)) as running, \
            ThreadPoolExecutor(3) as pool:
        begun = pool.submit(running.stream, **TEXT, max_tokens=4000)
        until(lambda: any(sum(ticket.written) for ticket in running.server.worker._running))
        hangs.set()
        replies = [pool.submit(running.post, "/v1/completions", {**TEXT, "max_tokens": 3, "stream": stream}) for stream in (False, True)]
        until(lambda: sum(running.server.worker.load) == 3)
        running.listener.handle_exit(15, None)
        assert [(one.result(20).status_code, one.result().json()["error"]["code"]) for one in replies] == [(503, "stopping")] * 2
        with pytest.raises(httpx2.HTTPError):
            begun.result(20)
        over.set()
        stopped(running)
    assert not [record for record in caplog.records if record.exc_info]


def test_nothing_to_finish_is_no_reason_to_wait() -> None:
    with serving(letters()) as running, running.client() as client:
        client.get("/health")                                # a connection that stays open
        began = time.monotonic()
        running.listener.handle_exit(15, None)
        stopped(running)
        assert time.monotonic() - began < 5
