"""What breaks behind the server: each request by itself, the drafter, the engine, its thread, the disk, the clock."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_faulty_drafters import FAULTS, Faulty
from serve.serving import Running, alone, letters, serving
from serve.test_http import PROMPTS, until

from draftproof import Draft, Engine, Sampling
from draftproof.config import ServeConfig
from draftproof.errors import CacheFull, OptionError
from draftproof.serve import app
from draftproof.serve.refusal import Refusal
from draftproof.serve.ticket import Ticket
from draftproof.serve.worker import Worker
from draftproof.trace.sinks import Jsonl, Memory
from draftproof.types import DraftLaw


class Around:
    """An engine with something in between its steps."""

    def __init__(self, engine: Engine, before: Callable[[], None]) -> None:
        self._engine, self._before = engine, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self._before()
        return self._engine.step()


def all_right(running: Running, seeds: range, tokens: int = 40, **more: Any) -> None:
    """Requests at the same time, whole and streamed; every text is the one of the request alone."""
    def ask(seed: int) -> str:
        body = {"prompt": PROMPTS[seed % 5], "seed": seed, "max_tokens": tokens, **more}
        if seed % 2:
            return "".join(chunk["choices"][0]["text"] for chunk in running.stream(**body))
        return str(running.complete(**body)["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, seeds))
    for seed, text in zip(seeds, texts, strict=True):
        assert text == alone(running.target, PROMPTS[seed % 5], Sampling(seed=seed, max_tokens=tokens)).text
    until(lambda: running.idle and not running.target.open_slots)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_fails_is_taken_out_and_texts_go_on(fault: str) -> None:
    with serving(letters(), lambda: Faulty(fault), depth=3) as running, running.client() as client:
        all_right(running, range(8))
        state = client.get("/draftproof/speculation").json()
        assert state["state"] == "out of service" and "out of service" in state["reason"] and not state["enabled"]
        assert "draftproof:spec_decode_state_out_of_service{model_name=\"letters\"} 1.0" in client.get("/metrics").text
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize(("what", "rule"), [("scores", "match"), ("law", "ratio"), ("law", "block"), ("infinite law", "ratio")])
def test_a_drafter_of_nan_harms_nobody(what: str, rule: str) -> None:
    """Under `match` the text does not change; under a joint rule a law that is none takes the drafter out of service."""
    class Blind(Faulty):
        def draft(self, fault: str, depth: int) -> Any:
            if what == "scores":
                return Draft(torch.ones(depth, dtype=torch.int64), tuple(range(-1, depth - 1)), torch.full((depth,), float("nan")))
            logq = torch.full((1, 11), float("nan" if what == "law" else "inf"))
            return Draft.chain([1] * min(depth, 2), law=DraftLaw(logq, (0,) * min(depth, 2)))

    with serving(letters(), lambda: Blind(""), depth=3) as running, running.client() as client:
        if rule == "match":
            return all_right(running, range(6))
        for seed in range(4):
            body = {"prompt": "ab", "seed": seed, "max_tokens": 30, "ignore_eos": True, "speculation": {"rule": rule}}
            assert running.complete(**body)["usage"]["completion_tokens"] == 30
        assert client.get("/draftproof/speculation").json()["state"] == "out of service"
        all_right(running, range(4))
        assert client.get("/ready").status_code == 200 and running.server.worker.restarts == 0


@pytest.mark.parametrize("crash", [RuntimeError("the device is lost"), SystemExit(1)])
def test_an_engine_that_dies_is_replaced_and_nothing_is_lost(crash: BaseException) -> None:
    """The failed step, an exception or the death of the thread; streams go on where they were."""
    steps, died = [0], threading.Event()

    def before() -> None:
        steps[0] += 1
        if steps[0] == 12:
            died.set()
            raise crash

    with serving(letters(), "ngram:min=1,max=2", wrap=lambda engine: Around(engine, before)) as running, running.client() as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda _: None)
            all_right(running, range(8))
        assert died.is_set() and running.server.worker.restarts == 1
        until(lambda: client.get("/ready").status_code == 200)
        assert "draftproof:worker_restarts_total{model_name=\"letters\"} 1.0" in client.get("/metrics").text


def test_an_engine_that_cannot_be_opened_again_at_once() -> None:
    """The model's memory comes back only at the third attempt. Until then /ready says so, and nothing that was begun is lost."""
    opened, steps, held, free = [0], [0], threading.Event(), threading.Event()

    def before() -> None:
        steps[0] += 1
        if steps[0] == 12:
            raise RuntimeError("the device is lost")

    def wrap(engine: Engine) -> Any:
        opened[0] += 1
        if 1 < opened[0] < 4:
            held.set()
            free.wait(20)
            raise torch.OutOfMemoryError("the device is still in use")
        return Around(engine, before)

    with serving(letters(), "ngram:min=1,max=2", wrap=wrap) as running, running.client() as client, ThreadPoolExecutor(1) as pool:
        texts = pool.submit(all_right, running, range(8))
        assert held.wait(20)
        for _ in range(2):
            reply = client.get("/ready")
            assert reply.status_code == 503 and "has not answered" in reply.json()["error"]["message"]
        assert client.get("/health").status_code == 200
        free.set()
        texts.result(60)
        assert opened[0] == 4 and running.server.worker.restarts == 3
        until(lambda: client.get("/ready").status_code == 200)


def test_ready_knows_within_two_seconds() -> None:
    """It asks the engine itself and waits this long; a dead thread is seen at the watchdog's next look, or at once."""
    assert app.ANSWER_S + app.WATCH_S < 2


def test_a_request_that_kills_twice_is_given_up_and_the_switch_is_remembered() -> None:
    opened: list[Engine] = []
    broken = threading.Event()

    def before() -> None:
        if broken.is_set():
            raise RuntimeError("no")

    def wrap(engine: Engine) -> Any:
        opened.append(engine)
        return Around(engine, before)

    with serving(letters(), "ngram", wrap=wrap) as running, running.client() as client:
        client.put("/draftproof/speculation", json={"enabled": False, "depth_cap": 3})
        broken.set()
        reply = running.post("/v1/completions", {"prompt": "ab"})
        assert reply.status_code == 503 and "send it again" in reply.json()["error"]["message"]
        broken.clear()
        until(lambda: client.get("/ready").status_code == 200)
        assert len(opened) >= 3 and client.get("/draftproof/speculation").json()["state"] == "off"
        assert opened[-1].speculation.depth_cap == 3
        all_right(running, range(4))


def test_one_request_without_memory_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass fails whenever a certain text is in it: in the prefill, or later in a round."""
    target = letters()
    for name in ("extend", "score"):
        with serving(target) as running, running.client() as client, monkeypatch.context() as patch:
            true = getattr(target, name)

            def failing(slots: Any, *more: Any, true: Any = true) -> Any:
                if any(slot.tokens[:3] == [8, 8, 8] or more and slot.tokens == [] and more[0][i][:3].tolist() == [8, 8, 8]
                       for i, slot in enumerate(slots) if not isinstance(more[0], torch.Tensor) or slot.tokens):
                    raise torch.OutOfMemoryError("out of memory at 0x7f00deadbeef")
                return true(slots, *more)

            patch.setattr(target, name, failing)
            with ThreadPoolExecutor(1) as pool:
                guilty = pool.submit(running.post, "/v1/completions", {"prompt": "ddd", "max_tokens": 30})
                all_right(running, range(6))
                reply = guilty.result()
            assert reply.status_code == 500 and "0x7f" not in reply.text, reply.text
            assert client.get("/ready").status_code == 200 and running.server.worker.restarts == 0


def test_a_text_that_is_written_differently_after_a_crash_is_not_gone_on_with() -> None:
    """A replay must say again what was said; here the target has changed in between."""
    steps = [0]

    def before() -> None:
        steps[0] += 1
        if steps[0] == 15:
            target.table = target.table.flip(-1)  # type: ignore[attr-defined]
            raise RuntimeError("the device is lost")

    target = letters()
    with serving(target, wrap=lambda engine: Around(engine, before)) as running:
        events = running.stream(prompt="abba", max_tokens=60, seed=1, ignore_eos=True)
        said = "".join(event["choices"][0]["text"] for event in events[:-1])      # steps that end together are one event
        assert "differently" in events[-1]["error"]["message"] and len(said) > 5
        until(lambda: running.idle and not target.open_slots)  # type: ignore[attr-defined]


def test_what_breaks_after_a_commit_loses_no_token() -> None:
    """A trace sink that raises once: the text had already grown, so the engine is replaced and the text written again."""
    class Sink(Memory):
        broken = False

        def write(self, event: Any) -> None:
            if event.event == "round_done" and event.round == 9 and not self.broken:
                self.broken = True
                raise RuntimeError("no")
            super().write(event)

    sink = Sink()
    with serving(letters(), "ngram:min=1,max=2", sinks=[sink], depth=3) as running:
        all_right(running, range(6))
        assert sink.broken and running.server.worker.restarts == 1


def test_a_text_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = letters()

    def full(tokens: Any, tenant: str = "", room: int = 0, true: Any = target.open) -> Any:
        if room > 100:
            raise CacheFull(f"{room} tokens do not fit")
        return true(tokens, tenant, room)

    monkeypatch.setattr(target, "open", full)
    with serving(target) as running:
        reply = running.post("/v1/completions", {"prompt": "a", "max_tokens": 200})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
        all_right(running, range(2))


def test_an_engine_that_hangs_is_not_ready() -> None:
    hold = threading.Event()
    with serving(letters(), wrap=lambda engine: Around(engine, lambda: hold.wait(20) and None),
                 config=ServeConfig(port=0, stall_s=0.5)) as running, running.client() as client:
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(running.complete, prompt="a", max_tokens=3)
            until(lambda: running.server.worker.stalled_s > 0)
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
            hold.set()
            text.result(10)
        until(lambda: client.get("/ready").status_code == 200)


def test_a_deadline_ends_a_text_wherever_it_is() -> None:
    with serving(letters(), wrap=lambda engine: Around(engine, lambda: time.sleep(0.02)), max_batch=1,
                 config=ServeConfig(port=0, deadline_s=0.4)) as running:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda _: running.post("/v1/completions", body), range(2)))
            assert [reply.status_code for reply in replies] == [504, 504]
            events = running.stream(**body)
        assert events[-1]["error"]["code"] == "deadline" and events[0]["choices"]
        until(lambda: running.idle and not running.target.open_slots)  # type: ignore[attr-defined]


def test_a_clock_that_jumps_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = [0.0]
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + jumps[0])

    def before() -> None:
        jumps[0] = 1e6 if jumps[0] <= 0 else -1e6

    with serving(letters(), "ngram", wrap=lambda engine: Around(engine, before), config=ServeConfig(port=0, deadline_s=20)) as running:
        all_right(running, range(6))


def test_a_full_disk_ends_the_trace_and_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Jsonl(tmp_path / "trace.jsonl")
    written = [0]

    def put(data: Any, true: Any = sink._put) -> int:
        written[0] += 1
        if written[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(true(data))

    monkeypatch.setattr(sink, "_put", put)
    with serving(letters(), "ngram", sinks=[sink]) as running:
        all_right(running, range(8))
        assert sink.error is not None and sink.lost and running.server.worker.restarts == 0
    assert all(json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()), "whole lines up to the end"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_that_is_full_from_the_start() -> None:
    """Not a file: there is nothing that could be cut back."""
    sink = Jsonl("/dev/full")
    with serving(letters(), "ngram", sinks=[sink]) as running:
        all_right(running, range(4))
        assert sink.error is not None and "No space left" in sink.error and running.server.worker.restarts == 0


def test_a_clients_mistakes_are_not_the_servers(caplog: pytest.LogCaptureFixture) -> None:
    """What is answered with 400 leaves no warning and no traceback, wherever it is found."""
    with serving(letters()) as running:
        for body in ({"prompt": ""}, {"prompt": "a" * 5000}, {"prompt": "a", "n": 0}, {"prompt": "a", "logit_bias": {"99": 1}},
                     {"prompt": [99]}, {"prompt": "a", "speculation": {"drafter": "medusa"}}):
            assert running.post("/v1/completions", body).status_code == 400
        assert not [record for record in caplog.records if record.name.startswith("draftproof")]
    assert not [record for record in caplog.records if record.name.startswith("draftproof") and record.levelno > logging.INFO], "its end"


# Clients that vanish


class Gate:
    """A place where somebody waits while the test does something."""

    def __init__(self) -> None:
        self.shut, self.reached, self.open = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if self.shut.is_set():
            self.reached.set()
            self.open.wait(20)


VANISHING = ("half a body", "a grammar compiles", "in the queue", "in the prefill", "between tokens", "written again", "at the end, unread")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", VANISHING)
def test_a_client_that_vanishes(state: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every state: its memory is given back, the others' texts are right, and the server is ready."""
    gate, opening, opened = Gate(), Gate(), [0]
    target = letters()

    def before() -> None:
        gate()
        if opening.shut.is_set() and not opening.reached.is_set():
            raise RuntimeError("the device is lost")

    def wrap(engine: Engine) -> Any:
        opened[0] += 1
        if opened[0] == 2:
            opening()
        return Around(engine, before)

    def extend(*arguments: Any, true: Any = target.extend) -> Any:
        if state == "in the prefill":
            gate()
        return true(*arguments)

    monkeypatch.setattr(target, "extend", extend)
    with serving(target, "ngram:min=1,max=2", wrap=wrap, max_batch=1) as running, ThreadPoolExecutor(1) as pool:
        worker, others = running.server.worker, None
        options: dict[str, Any] = {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True, "seed": 1}
        if state == "a grammar compiles":
            options = {"prompt": "ab", "response_format": {"type": "json_object"}}
            running.server._compile = gate
        if state == "at the end, unread":
            options["max_tokens"] = 30
        if state in ("in the queue", "in the prefill", "a grammar compiles"):
            gate.shut.set()
        if state == "in the queue":
            others = pool.submit(running.complete, prompt="ba", seed=5, max_tokens=20)
            assert gate.reached.wait(20)
        data = json.dumps({"model": "letters", "stream": stream, **options}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
            client.sendall(head + data[:10 if state == "half a body" else None])
            if state == "in the queue":
                until(lambda: worker.load == (1, 1))
            elif state in ("between tokens", "written again"):
                until(lambda: any(ticket.events or ticket.told[0] for ticket in list(worker._running)))
                (gate if state == "between tokens" else opening).shut.set()
            elif state == "at the end, unread":
                until(lambda: not worker.load[0] and running.server.metrics._ends["", "length"] == 1)
            for place in (gate, opening):
                assert not place.shut.is_set() or place.reached.wait(20)
        if state in ("between tokens", "in the queue", "in the prefill", "written again"):
            until(lambda: bool(worker._cancelled))
        for place in (gate, opening):
            place.shut.clear()
            place.open.set()
        if others is not None:
            assert others.result(20)["choices"][0]["text"] == alone(target, "ba", Sampling(seed=5, max_tokens=20)).text
        until(lambda: running.idle and not target.open_slots)  # type: ignore[attr-defined]
        assert worker.restarts == (state == "written again")
        all_right(running, range(4))
        with running.client() as looking:
            assert looking.get("/ready").status_code == 200


# The worker without HTTP


def worker_of(config: ServeConfig | None = None, max_batch: int = 2, before: Callable[[], None] = lambda: None) -> Worker:
    worker = Worker(lambda: Around(Engine(letters()), before), config or ServeConfig(), max_batch)
    worker.start()
    return worker


def test_queues_have_an_end_and_say_when_to_come_back() -> None:
    hold = threading.Event()
    worker = worker_of(ServeConfig(max_queue=3, max_per_tenant=4), 1, lambda: hold.wait(20) and None)
    try:
        tickets = [Ticket("ab", Sampling(seed=i, max_tokens=3), tenant="a") for i in range(4)]
        worker.submit(tickets[0])
        until(lambda: worker.load == (1, 0))
        for ticket in tickets[1:3]:
            worker.submit(ticket)
        worker.submit(Ticket("ab", Sampling(max_tokens=3), tenant="b"))
        with pytest.raises(Refusal, match="waiting") as full:
            worker.submit(tickets[3])
        assert (full.value.status, full.value.retry_after) == (503, 2)
        worker.config = ServeConfig(max_queue=30, max_per_tenant=3)
        with pytest.raises(Refusal, match="this key") as many:
            worker.submit(tickets[3])
        assert many.value.status == 429 and many.value.headers["Retry-After"]
        worker.submit(Ticket("ab", Sampling(max_tokens=3), tenant="b"))
        hold.set()
        until(lambda: worker.load == (0, 0))
        assert all(ticket.done and ticket.error is None for ticket in tickets[:3])
    finally:
        hold.set()
        worker.close()


def test_tenants_take_turns() -> None:
    order: list[str] = []
    hold = threading.Event()
    worker = worker_of(max_batch=1, before=lambda: hold.wait(20) and None)
    try:
        worker.submit(Ticket("a", Sampling(max_tokens=1), tenant="busy"))
        until(lambda: worker.load == (1, 0))
        for tenant in ["busy"] * 6 + ["rare"] * 2:
            worker.submit(Ticket("a", Sampling(max_tokens=1, seed=1), tenant=tenant, news=lambda tenant=tenant: order.append(tenant)))
        hold.set()
        until(lambda: worker.load == (0, 0))
        assert order[:4] in (["busy", "rare", "busy", "rare"], ["rare", "busy", "rare", "busy"])
    finally:
        hold.set()
        worker.close()


def test_cancelling_at_every_state() -> None:
    worker = worker_of(max_batch=1)
    try:
        running, queued = (Ticket("ab", Sampling(max_tokens=4000, ignore_eos=True, seed=1)) for _ in range(2))
        done = Ticket("ab", Sampling(max_tokens=1))
        worker.submit(done)
        until(lambda: done.done)
        worker.submit(running)
        worker.submit(queued)
        until(lambda: bool(running.events))
        for ticket in (queued, running, done, running):
            worker.cancel(ticket)
        until(lambda: worker.load == (0, 0))
        assert running.error is not None and queued.error is not None and done.error is None and not queued.events
    finally:
        worker.close()
    with pytest.raises(Refusal, match="stopping"):
        worker.submit(Ticket("a", Sampling()))
    with pytest.raises(Refusal, match="stopping"):
        worker.call(lambda engine: engine.stats()).result(5)


def test_limits_hold_in_the_engine_too() -> None:
    with Engine(letters()) as engine:
        for options in (Sampling(n=5000), Sampling(logprobs=5000)):
            with pytest.raises(OptionError, match="expected at most"):
                engine.submit("ab", options)


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on() -> None:
    hold = threading.Event()
    with serving(letters(), config=ServeConfig(port=0, grammar_s=0.2)) as running:
        running.server._compile = lambda grammar: hold.wait(20)
        began = time.monotonic()
        reply = running.post("/v1/completions", {"prompt": "ab", "response_format": {"type": "json_object"}})
        assert reply.status_code == 400 and "does not compile within" in reply.json()["error"]["message"] and time.monotonic() - began < 5
        all_right(running, range(3))
        hold.set()
