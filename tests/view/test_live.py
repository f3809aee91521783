"""The page against a server that misbehaves: a connection that breaks, events that are lost, answers that would be markup."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from browser import Page, chromium
from traces import engines

from draftproof.trace.events import PrefillDone, RequestDone, RequestStarted, TokenRecord, TraceStarted
from draftproof.trace.sinks import to_json
from draftproof.view import server
from draftproof.view.bundle import PAGE, files

pytestmark = pytest.mark.browser
BASE = 1_763_000_000_000_000            # ids begin at the clock
STATE = {"state": "on", "enabled": True, "drafter": "ngram", "depth": 3, "reason": "<i>because</i>", "configured": "ngram", "model": "fake",
         "others": {"suffix": {"state": "on", "reason": ""}}, "depth_cap": None}


class Fake:
    """What the handler shares with the test."""

    def __init__(self, lines: list[str], breaks: int, loses: int) -> None:
        self.lines, self.breaks, self.loses = lines, breaks, loses
        self.asked, self.bodies, self.left = list[int](), list[dict[str, Any]](), threading.Event()
        self.open = threading.Event()                 # set: the stream may end


class LiveHandler(server.Handler):
    def __init__(self, fake: Fake, *rest: Any) -> None:
        self.fake = fake
        places = {"/" + file.name: file for file in files()} | {"/": PAGE / "index.html"}
        super().__init__(places, *rest)

    def do_GET(self) -> None:
        if self.path == "/draftproof/speculation":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(STATE).encode())
            return
        if not self.path.startswith("/draftproof/events"):
            super().do_GET()
            return
        since = max(0, int(parse_qs(urlsplit(self.path).query)["since"][0]) - BASE)
        self.fake.asked.append(since)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        stop = self.fake.breaks if len(self.fake.asked) == 1 else len(self.fake.lines)
        self.wfile.write(b": ping\n\n")
        if since and self.fake.loses:
            since += self.fake.loses
            self.wfile.write(f"event: gap\nid: {BASE + since}\ndata: {{}}\n\n".encode())
        for number in range(since, stop):
            self.wfile.write(f"id: {BASE + number + 1}\ndata: {self.fake.lines[number]}\n\n".encode())
        self.wfile.flush()
        if stop == len(self.fake.lines):
            self.fake.open.wait(30)

    def do_POST(self) -> None:
        self.fake.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for number in range(600):
                delta = {"choices": [{"delta": {"content": f"<b>word{number}</b> "}}]}
                self.wfile.write(f"data: {json.dumps(delta)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            self.fake.left.set()


@contextmanager
def live(lines: list[str], breaks: int | None = None, loses: int = 0) -> Iterator[tuple[str, Fake]]:
    """breaks: after so many lines the first connection ends; loses: so many are then not to be had any more."""
    fake = Fake(lines, len(lines) // 2 if breaks is None else breaks, loses)
    http = ThreadingHTTPServer((server.HOST, 0), partial(LiveHandler, fake))
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/", fake
    finally:
        fake.open.set()
        http.shutdown()
        http.server_close()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as tab:
        yield tab


def test_events_arrive_once_each_over_a_lost_connection(page: Page, tmp_path: Path) -> None:
    engines(tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    started = sum('"request_started"' in line[:30] for line in lines)
    with live(lines) as (address, fake):
        page.open(address)
        page.until(f"document.querySelectorAll('select[aria-label=request] option').length === {started}")
        page.until("document.querySelector('#notice').hidden")
        assert fake.asked == [0, len(lines) // 2]
        tokens = [option.split(" · ")[-1] for option in page.js(
            "return [...document.querySelectorAll('select[aria-label=request] option')].map((o) => o.textContent)")]
        page.show("status", r=started - 1)
        done = json.loads(lines[-1])["metrics"]
        assert {name: page.metrics()[name] for name in ("rounds", "drafted", "accepted")} == {
            name: done[name] for name in ("rounds", "drafted", "accepted")}, tokens


def test_a_server_that_is_gone_is_said_in_words(page: Page, tmp_path: Path) -> None:
    """What browsers say of it ("Failed to fetch") is for whoever wrote the page."""
    engines(tmp_path / "t.jsonl")
    with live((tmp_path / "t.jsonl").read_text().splitlines()) as (address, _):
        page.open(address)
        page.until("document.querySelector('#chat-send') !== null")
    page.js("document.querySelector('.chat textarea').value = 'abab'; document.querySelector('#chat-send').click()")
    said = page.until("document.querySelector('#chat-answer [data-ended=failed]')?.textContent")
    assert "the server does not answer; it may have been stopped" in said and "fetch" not in said
    assert "the server does not answer" in page.until("document.querySelector('#notice').textContent")


def test_numbers_of_a_text_whose_rounds_were_lost_are_the_engine_s(page: Page, tmp_path: Path) -> None:
    done = engines(tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    guessed = [i for i, line in enumerate(lines) if '"fate"' in line]
    with live(lines, breaks=guessed[3], loses=3) as (address, fake):
        page.open(address)
        page.until("document.querySelector('#notice').hidden && document.querySelectorAll('select[aria-label=request] option').length > 2")
        assert len(fake.asked) == 2
        broken, counted = 0, ("rounds", "drafted", "accepted", "hazard")
        for number in range(page.js("return document.querySelectorAll('select[aria-label=request] option').length")):
            page.show("status", r=number)
            shown = page.metrics()
            if "did not reach this page" in page.text():
                broken += 1
                assert any(all(shown[name] == one.metrics[name] for name in counted) for one in done.values())
        assert broken == 1


def test_what_a_model_writes_is_text_and_the_boxes_are_sent(page: Page, tmp_path: Path) -> None:
    engines(tmp_path / "t.jsonl")
    with live((tmp_path / "t.jsonl").read_text().splitlines()) as (address, fake):
        page.open(address)
        page.until("document.querySelector('#chat-send') !== null")
        assert "<i>because</i>" in page.js("return document.querySelector('#server-state').textContent")
        drafters = page.js("return [...document.querySelector('select[aria-label=drafter]').options].map((o) => o.value)")
        assert drafters == ["", "suffix", "none"]
        page.js("""document.querySelector('textarea[name=prompt]').value = 'hello';
            document.querySelector('select[aria-label=drafter]').value = 'suffix'; document.querySelector('input[name=depth]').value = '3';
            document.querySelector('input[name=seed]').value = '5'; document.querySelector('#chat-send').click()""")
        page.until("document.querySelector('#chat-answer').textContent.includes('<b>word3</b>')")
        body = fake.bodies[0]
        assert body["speculation"] == {"drafter": "suffix", "depth": 3} and body["seed"] == 5 and body["stream"] is True
        assert body["messages"] == [{"role": "user", "content": "hello"}] and body["model"] == "fake" and body["temperature"] == 0.8
        assert page.js("return document.querySelectorAll('#talk b, #talk i').length") == 0
        page.js("document.querySelector('#chat-stop').click()")
        assert fake.left.wait(10), "the server was not told"
        page.until("document.querySelector('#chat-answer').textContent.includes('Stopped')")
        assert page.errors() == []


def test_a_page_that_is_open_for_long_stays_small(page: Page) -> None:
    """5,000 requests and more: the old ones are let go, and the newest is shown with its numbers."""
    lines = [to_json(TraceStarted(1, "t", "none", "match", "auto"))]
    for number in range(5200):
        name, at, first = f"r{number}", float(number), TokenRecord(1, "prefill")
        lines += [to_json(RequestStarted(name, at, 3, 0, {}, number, 0)), to_json(PrefillDone(name, at, 0.1, 1, first, "a")),
                  to_json(RequestDone(name, at + 0.5, "length", 1, {"draft_bytes": 0, "kv_tokens_lost": 0}))]
    with live(lines, breaks=1 + 3 * 5100) as (address, _):
        page.open(address)
        page.until("document.querySelector('[data-metric=seed]')?.dataset.value === '5199'", 60)
        page.until("document.querySelectorAll('select[aria-label=request] option').length === 100")
        assert page.js("return document.querySelector('select[aria-label=request]').selectedOptions[0].textContent").startswith("r5199 ")
        assert page.errors() == []


def test_what_runs_when_old_requests_are_let_go_is_shown_to_its_end(page: Page, tmp_path: Path) -> None:
    """The rounds that were let go are missing, so the numbers at its end are the engine's."""
    engines(tmp_path / "t.jsonl")
    whole = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    first = next(i for i, record in enumerate(whole) if record.get("nodes"))
    mine = [i for i, record in enumerate(whole) if record.get("request") == whole[first]["request"]]
    begin = max(i for i in mine if i < first and whole[i]["event"] == "request_started")
    end = min(i for i in mine if i > first and whole[i]["event"] == "request_done")
    own = [json.dumps(whole[i], separators=(",", ":")) for i in mine if begin <= i <= end]
    said = json.loads(own[-1])
    lines = [to_json(TraceStarted(1, "t", "none", "match", "auto")), *own[:6]]
    for number in range(5100):
        lines += [to_json(RequestStarted(f"s{number}", float(number), 3, 0, {}, number, 0)),
                  to_json(RequestDone(f"s{number}", number + 0.5, "length", 1, {}))]
    with live([*lines, *own[6:]], breaks=len(lines)) as (address, _):
        page.open(address)
        page.until("document.querySelectorAll('select[aria-label=request] option').length === 1", 60)
        page.show("status", r=0)
        page.until("document.querySelector('[data-metric=rounds]')?.dataset.value !== '0'")
        assert "did not reach this page" in page.text() and page.metrics()["rounds"] == said["metrics"]["rounds"]
        assert page.metrics()["accepted"] == said["metrics"]["accepted"] > 0 and page.errors() == []
