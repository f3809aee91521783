"""The page and its events over HTTP: what may run in it, what a reader gets, what it may not see, and that the engine never waits."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from serve.serving import Running, letters, serving
from serve.test_faults import Around
from serve.test_http import PROMPTS, until

from draftproof import Memory, Sampling
from draftproof.commands.switch import key_of
from draftproof.config import ServeConfig
from draftproof.errors import OptionError
from draftproof.serve import page as page_module
from draftproof.serve.feed import Feed
from draftproof.serve.gate import Key, read_keys
from draftproof.trace.events import RequestDone, RequestStarted, RoundDone, Times, TokenRecord, TraceStarted
from draftproof.trace.sinks import from_json, to_json
from draftproof.view import bundle

Block = dict[str, str]
ALICE, BOB = ("Authorization", "Bearer alice-secret"), ("Authorization", "Bearer bob-secret")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(letters(), "ngram:min=1,max=2", depth=3) as server:
        yield server


@pytest.fixture
def keys(tmp_path: Any) -> tuple[Key, ...]:
    file = tmp_path / "keys"
    file.write_text("alice alice-secret\nbob bob-secret\neye eye-secret trace\nroot root-secret admin\n")
    return read_keys(file)


class Reader:
    """An open stream of events, read in a thread."""

    def __init__(self, running: Running, since: int | None = 0, **headers: str) -> None:
        self.blocks: list[Block] = []
        self.ended = threading.Event()
        self._client = running.client(headers=headers)
        self._stack = ExitStack()
        query = "" if since is None else f"?since={since}"
        self.reply = self._stack.enter_context(self._client.stream("GET", "/draftproof/events" + query))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        block: Block = {}
        try:
            for line in self.reply.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    block[name] = value
                elif block:
                    self.blocks.append(block)
                    block = {}
        except Exception:
            pass                                   # closed below
        self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [int(block["id"]) for block in self.blocks if "id" in block]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(block["data"]) for block in self.blocks if "data" in block and "event" not in block]

    @property
    def gaps(self) -> list[dict[str, Any]]:
        return [json.loads(block["data"]) for block in self.blocks if block.get("event") == "gap"]

    def done(self, count: int) -> Reader:
        """Once so many requests have ended."""
        until(lambda: sum(event["event"] == "request_done" for event in self.events) >= count)
        return self

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        try:                                       # the thread waits in it: closing alone would not wake it
            self.reply.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        except OSError:
            pass                                   # the server was quicker
        self._thread.join(10)
        for connection in (self._stack, self._client):
            connection.close()


def write(running: Running, count: int, tokens: int = 20, header: tuple[str, str] | None = None, **more: Any) -> None:
    for seed in range(count):
        body = {"prompt": PROMPTS[seed % 5], "seed": seed, "max_tokens": tokens, "ignore_eos": True, **more}
        reply = running.post("/v1/completions", body, headers=dict([header]) if header else {})
        assert reply.status_code == 200, reply.text


def test_the_page_runs_its_own_files_only(running: Running) -> None:
    with running.client() as client:
        names = {file.name for file in bundle.files()}
        assert {"index.html", "main.js", "live.js", "chat.js", "style.css"} <= names
        for path in ("/", *("/" + name for name in names)):
            reply = client.get(path)
            assert reply.status_code == 200 and reply.content == (bundle.PAGE / (path[1:] or "index.html")).read_bytes(), path
            policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
            assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["referrer-policy"] == "no-referrer"
        assert client.get("/").headers["content-type"].startswith("text/html")
        assert client.get("/main.js").headers["content-type"].startswith("text/javascript")
        for path in ("/bundle.py", "/%2e%2e/bundle.py", "/page/main.js", "/..%2fserver.py"):
            assert client.get(path).status_code == 404, path
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/draftproof/events", headers={"Origin": "https://evil.example"}).status_code == 403


def test_events_are_the_trace(running: Running) -> None:
    sink = Memory()
    running.server.worker.call(lambda engine: engine.events(sink)).result(5)
    with Reader(running, running.server.feed.last) as reader:
        assert reader.reply.headers["content-type"].startswith("text/event-stream") and "no-store" in reader.reply.headers["cache-control"]
        write(running, 4)
        reader.done(4)
        expected = [json.loads(to_json(event)) for event in sink.events[1:]]       # after the header, which was told before
        assert reader.events == expected and not reader.gaps
        assert reader.ids == list(range(reader.ids[0], reader.ids[0] + len(expected)))


def test_the_first_event_has_the_words_of_the_vocabulary(running: Running) -> None:
    write(running, 1)
    with Reader(running) as reader:
        reader.done(1)
        first = reader.events[0]
        tokenizer = running.target.tokenizer
        assert first["event"] == "trace_started" and first["vocabulary"] == [tokenizer.piece(i) for i in range(running.target.vocab_size)]
        assert all(from_json(block["data"]) is not None for block in reader.blocks if "data" in block)


def test_reading_goes_on_where_it_broke(running: Running) -> None:
    write(running, 2)
    with Reader(running) as whole:
        whole.done(2)
        middle = whole.ids[len(whole.ids) // 2]
        rest = [one for one in whole.ids if one > middle]
    for given in (Reader(running, middle), Reader(running, None, **{"Last-Event-ID": str(middle)}),
                  Reader(running, 0, **{"Last-Event-ID": str(middle)})):
        with given as reader:
            until(lambda reader=reader: len(reader.ids) >= len(rest))  # type: ignore[misc]
            assert reader.ids[:len(rest)] == rest and not reader.gaps
    with running.client() as client:
        for wrong in ("-1", "x", "1e3", "9" * 30, "%00"):
            reply = client.get(f"/draftproof/events?since={wrong}")
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "since", wrong


def test_a_ring_that_lost_events_says_so() -> None:
    with serving(letters(), "ngram", config=ServeConfig(port=0, events=30)) as running:
        write(running, 1, 4)
        early = running.server.feed.after(0).records[0].id
        write(running, 6)
        for since in (0, early, 17):                # 17: the id of another life
            with Reader(running, since) as reader:
                reader.done(1)
                gap, ids = reader.gaps[0], reader.ids
                assert gap == {"after": since, "before": ids[ids.index(gap["before"] - 1) + 1]} and ids == sorted(ids)
                # what follows needs its header, which whoever read the first event has
                assert [event["event"] for event in reader.events].count("trace_started") == (since != early)
                assert len(reader.events) == 30 + (since != early) and reader.ids[-1] == running.server.feed.last
        with Reader(running, running.server.feed.last) as reader:
            write(running, 1, 2)
            reader.done(1)
            assert not reader.gaps and reader.events[0]["event"] == "request_started"


@pytest.mark.parametrize("level", ["summary", "full"])
def test_a_tenant_never_sees_what_another_one_wrote(keys: tuple[Key, ...], level: Any) -> None:
    with serving(letters(), "ngram:min=1,max=2", depth=3, keys=keys, trace=level) as running:
        for header, seed in ((ALICE, 10110110114), (BOB, 20220220220)):
            write(running, 3, 30, header, seed=seed, stop=[f"secret{seed}"], bad_words=["dd"])
        streams = {}
        for name in ("alice", "bob", "eye", "root"):
            with Reader(running, 0, Authorization=f"Bearer {name}-secret") as reader:
                streams[name] = reader.done(6 if name in ("eye", "root") else 3)
        own = {name: streams[name].events for name in ("alice", "bob")}
        for name, other in (("alice", 20220220220), ("bob", 10110110114)):
            assert {event["tenant"] for event in own[name] if event["event"] == "request_started"} == {name}
            assert all(event.get("text") for event in own[name] if event["event"] == "prefill_done") and "withheld" not in str(own[name])
            assert str(other) not in str(own[name])
        for name in ("eye", "root"):
            seen = streams[name].events
            figures = [{key: event[key] for key in ("round", "depth", "drafter", "batch", "at_s", "times", "position")}
                       for event in seen if event["event"] == "round_done"]
            assert figures == [{key: event[key] for key in figures[0]} for event in (*own["alice"], *own["bob"])
                               if event["event"] == "round_done"]
            fates = [[node["fate"] for node in event["nodes"]] for event in seen if event["event"] == "round_done"]
            said = str(seen[1:])
            assert any(fates) and not re.search("secret[0-9]|prompt_ids|alternatives|noise|'(p|q|score|coin|stop|seed)': [^0]", said)
            for event in seen[1:]:
                assert event.get("text", "") == "" and event.get("draft_reason", "") == ""
                tokens = [*event.get("nodes", ()), *event.get("tokens", ()), *([event["token"]] if "token" in event else [])]
                assert all(token["token"] == -1 and set(token) <= {"token", "role", "fate", "parent"} for token in tokens)
                if event["event"] == "request_started":
                    assert event["withheld"] is True and event["seed"] == 0 and event["sampling"]["temperature"] == 1.0


def test_marks_of_keys(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alice-secret\nbob bob-secret trace\nroot root-secret trace admin\nonly-secret admin\n")
    found = read_keys(file)
    assert [(key.admin, key.trace) for key in found] == [(False, False), (False, True), (True, True), (True, True)]
    assert [key.tenant for key in found[:3]] == ["alice", "bob", "root"]
    file.write_text("alice alice-secret\nbob bob-secret trace\n")
    assert [(key.admin, key.trace) for key in read_keys(file)] == [(True, False), (True, True)], "without a mark nobody sees others"
    file.write_text("root root-secret admin trace\n")
    assert key_of(file) == "root-secret"
    monkeypatch.setenv("DRAFTPROOF_API_KEYS", "a b c-secret trace")
    with pytest.raises(OptionError, match="trace"):
        read_keys(None)


def test_a_page_without_a_key_is_asked_for_one(keys: tuple[Key, ...]) -> None:
    with serving(letters(), keys=keys) as running, running.client() as client:
        assert client.get("/").status_code == client.get("/main.js").status_code == 200
        for path in ("/draftproof/events", "/draftproof/speculation", "/v1/models"):
            assert client.get(path).status_code == 401


def test_a_reader_that_never_reads_costs_a_bounded_buffer() -> None:
    times = Times(0.0, 0.0, 0.0, 0.0)
    with serving(letters(), config=ServeConfig(port=0, events=500, event_bytes=200_000)) as running:
        feed, address = running.server.feed, urlsplit(running.url)

        def rounds(count: int) -> None:
            """As an engine would write them, 1 kB each."""
            for number in range(count):
                feed.write(RoundDone("r0", number, 0.0, 1, 9, 0, "none", "", "", (), (TokenRecord(1, "plain"),), "x" * 1000, times))

        feed.write(RequestStarted("r0", 0.0, 3, 0, {}, 1, 0))
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))       # closing tells the other side at once
            stuck.connect((address.hostname, address.port))
            stuck.sendall(b"GET /draftproof/events?since=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            until(lambda: running.server.page.reading[""] == 1)
            with Reader(running, feed.last) as other:
                for _ in range(60):
                    rounds(100)
                    until(lambda: other.ids and other.ids[-1] == feed.last)
                assert not other.gaps and len(other.events) == 6000, "another reader misses nothing"
            count, size = feed.kept
            assert count <= 500 and size <= 200_000
            held = [connection.transport.get_write_buffer_size() for connection in running.listener.server_state.connections]
            assert max(held) < 500_000, "what is held for the reader: one batch, and the transport's own limit"
            stuck.settimeout(30)
            heard = b""
            while b"event: gap" not in heard:
                heard = heard[-100:] + (piece := stuck.recv(1 << 16))
                assert piece, "it is told what it missed"
        until(lambda: running.server.page.reading[""] == 0)


@pytest.mark.parametrize("between", range(6))
def test_a_reader_that_leaves_while_the_bell_rings_is_let_go(between: int) -> None:
    """Cancelled so many turns of the loop after the bell: the wait ends as cancelled, or the reader would count for ever."""
    async def leave() -> bool:
        bell = page_module.Bell()
        waiting = asyncio.ensure_future(bell.wait(30))
        for _ in range(3):
            await asyncio.sleep(0)
        bell.ring()
        for _ in range(between):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled()

    assert asyncio.run(leave())


def test_the_engine_writes_on_while_the_server_cannot() -> None:
    """The loop stands still, with a reader in it; the engine must not notice."""
    def write_one(engine: Any) -> int:
        handle = engine.submit("ab", Sampling(seed=3, max_tokens=16, ignore_eos=True))[0]
        while not handle.done:
            engine.step()
        return len(handle.completion().token_ids)

    with serving(letters(), "ngram", depth=2) as running, Reader(running) as reader:
        blocked, free = threading.Event(), threading.Event()
        next(iter(running.listener.server_state.connections)).loop.call_soon_threadsafe(lambda: (blocked.set(), free.wait(60)))
        assert blocked.wait(10)
        try:
            before = running.server.feed.last
            written = running.server.worker.call(write_one).result(30)
            assert written > 1 and running.server.feed.last > before + 3, "it waited for the loop"
        finally:
            free.set()
        reader.done(1)


def test_stopping_a_stream_gives_its_place_back(running: Running) -> None:
    with Reader(running, running.server.feed.last) as reader, running.client() as client:
        body = {"model": "letters", "prompt": "ab", "max_tokens": 3000, "stream": True, "ignore_eos": True, "seed": 3}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            name = reply.headers["x-draftproof-request"]
            next(reply.iter_lines())
        reader.done(1)
        ended = reader.events[-1]
        assert ended["finish"] == "cancelled" and ended["request"] == name and ended["completion_tokens"] < 3000
        until(lambda: running.idle and not running.target.open_slots)  # type: ignore[attr-defined]
        assert "draftproof:num_requests_running{model_name=\"letters\"} 0.0" in client.get("/metrics").text


def test_an_answer_names_its_records(running: Running) -> None:
    with Reader(running, running.server.feed.last) as reader:
        reply = running.post("/v1/completions", {"prompt": "ab", "max_tokens": 5, "n": 2, "seed": 1})
        names = reply.headers["x-draftproof-request"].split(",")
        reader.done(2)
        assert [event["request"] for event in reader.events if event["event"] == "request_started"] == names and len(names) == 2


def test_a_new_engine_begins_a_new_trace_under_higher_ids() -> None:
    broken = threading.Event()

    def before() -> None:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("the device is lost")

    with serving(letters(), "ngram", wrap=lambda engine: Around(engine, before)) as running, Reader(running) as reader:
        write(running, 1)
        broken.set()
        write(running, 2)
        reader.done(3)
        assert [event["event"] for event in reader.events].count("trace_started") == 2
        assert reader.ids == sorted(set(reader.ids))


def test_readers_are_counted_and_leave(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    monkeypatch.setattr(page_module, "WATCHERS", 2)
    with Reader(running), Reader(running), running.client() as client:
        until(lambda: running.server.page.reading[""] == 2)
        reply = client.get("/draftproof/events")
        assert reply.status_code == 429 and "Retry-After" in reply.headers
    until(lambda: running.server.page.reading[""] == 0 and not running.server.feed._listeners)
    with Reader(running) as reader:
        assert reader.reply.status_code == 200


def test_an_idle_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    monkeypatch.setattr(page_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(page_module, "LOOK_S", 0.02)
    with Reader(running, running.server.feed.last) as reader:
        until(lambda: len(reader.ids) >= 2)
        assert set(reader.ids) == {running.server.feed.last} and not reader.events


def test_readers_are_let_go_when_the_server_stops() -> None:
    with serving(letters()) as running, Reader(running) as reader:
        write(running, 1, 3)
        running.listener.handle_exit(15, None)
        assert reader.ended.wait(10), "an open page holds the server up"
        assert reader.events[-1]["event"] == "request_done"


def test_the_cap_is_taken_away_by_null(running: Running) -> None:
    with running.client() as client:
        put: Callable[..., Any] = lambda **body: client.put("/draftproof/speculation", json=body)  # noqa: E731
        deep = {"prompt": "abababababab", "max_tokens": 24, "seed": 1, "temperature": 0}

        def deepest() -> int:
            found = running.complete(**deep).get("metrics", {}).get("speculative_decoding", {})
            return int(found.get("num_spec_tokens", 0))

        assert deepest() == 3 and client.get("/draftproof/speculation").json()["depth_cap"] is None
        assert put(depth_cap=1).json()["depth_cap"] == 1 and deepest() == 1
        assert put(enabled=True).json()["depth_cap"] == 1 and deepest() == 1, "absent: as it was"
        assert put(depth_cap=None).json()["depth_cap"] is None and deepest() == 3
        assert put(enabled=None).status_code == 400 and put(depth_cap=-1).status_code == 400


def test_the_ring_keeps_what_fits() -> None:
    feed = Feed(most=10, most_bytes=2000)
    feed.write(TraceStarted(1, "t", "none", "match", "auto"))
    feed.write(RequestDone("r9", 0.0, "cancelled", 0, {}))                 # it never began
    assert feed.kept[0] == 1
    began = feed.last
    for number in range(50):
        feed.write(RequestStarted(f"r{number}", 0.0, 3, 0, {"stop": ["x" * 150]}, 1, 0))
        feed.write(RequestDone(f"r{number}", 1.0, "stop", 1, {}, None))
    count, size = feed.kept
    assert count <= 10 and size <= 2000 and feed.last == began + 100
    look = feed.after(began)
    assert look.lost and look.header is None and look.oldest == feed.last - count + 1 and len(look.records) == count
    fresh = feed.after(0)
    assert fresh.header is not None and fresh.header.id == began
    assert feed.after(feed.last).records == [] and not feed.after(feed.last).lost and feed.after(feed.last + 5).lost
    feed.write(RequestStarted("big", 0.0, 3, 0, {"stop": ["x" * 5000]}, 1, 0))
    assert feed.kept[0] == 1, "one event that is too large is kept alone"
