"""The page against a server that behaves as `serve` does: events with ids, a lost connection, a chat that is stopped."""

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

from draftproof.view import server
from draftproof.view.bundle import PAGE, files

pytestmark = pytest.mark.browser


class Fake:
    """What the handler shares with the test."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.asked, self.bodies, self.left = lines, list[int](), list[dict[str, Any]](), threading.Event()
        self.open = threading.Event()                 # set: the stream may end


class LiveHandler(server.Handler):
    def __init__(self, fake: Fake, *rest: Any) -> None:
        self.fake = fake
        places = {"/" + file.name: file for file in files()} | {"/": PAGE / "index.html"}
        super().__init__(places, *rest)

    def do_GET(self) -> None:
        if not self.path.startswith("/draftproof/events"):
            super().do_GET()
            return
        since = int(parse_qs(urlsplit(self.path).query)["since"][0])
        self.fake.asked.append(since)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        stop = len(self.fake.lines) // 2 if len(self.fake.asked) == 1 else len(self.fake.lines)      # the first connection breaks
        self.wfile.write(b": ping\n\n")
        for number in range(since, stop):
            self.wfile.write(f"id: {number + 1}\ndata: {self.fake.lines[number]}\n\n".encode())
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
def live(lines: list[str]) -> Iterator[tuple[str, Fake]]:
    fake = Fake(lines)
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
        assert fake.asked[0] == 0 and fake.asked[1] == len(lines) // 2
        tokens = [option.split(" · ")[-1] for option in page.js(
            "return [...document.querySelectorAll('select[aria-label=request] option')].map((o) => o.textContent)")]
        page.show("status", r=started - 1)
        done = json.loads(lines[-1])["metrics"]
        assert {name: page.metrics()[name] for name in ("rounds", "drafted", "accepted")} == {
            name: done[name] for name in ("rounds", "drafted", "accepted")}, tokens


def test_the_chat_sends_what_was_chosen_and_stops(page: Page, tmp_path: Path) -> None:
    engines(tmp_path / "t.jsonl")
    with live((tmp_path / "t.jsonl").read_text().splitlines()) as (address, fake):
        page.open(address)
        page.until("document.querySelector('#chat-send') !== null")
        page.js("""document.querySelector('textarea[name=prompt]').value = 'hello';
            document.querySelector('input[name=drafter]').value = 'ngram'; document.querySelector('input[name=depth]').value = '3';
            document.querySelector('input[name=seed]').value = '5'; document.querySelector('#chat-send').click()""")
        page.until("document.querySelector('#chat-answer').textContent.includes('<b>word3</b>')")
        body = fake.bodies[0]
        assert body["speculation"] == {"drafter": "ngram", "depth": 3} and body["seed"] == 5 and body["stream"] is True
        assert body["messages"] == [{"role": "user", "content": "hello"}]
        assert page.js("return document.querySelectorAll('#talk b').length") == 0
        page.js("document.querySelector('#chat-stop').click()")
        assert fake.left.wait(10), "the server was not told"
        page.until("document.querySelector('#chat-answer').textContent.includes('[stopped]')")
        assert page.errors() == []
