"""`draftproof serve` and `draftproof switch` as processes: the line they print, the signals they know, what they refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from draftproof.cli import run

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
BODY: dict[str, Any] = {"model": "draftproof-demo", "prompt": "def add(", "seed": 1, "ignore_eos": True}


def draftproof(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftproof", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


@contextmanager
def started(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the demo model, and the address it told. log: where its standard error goes."""
    command = [sys.executable, "-m", "draftproof", "serve", "--port", "0", *arguments]
    with log.open("w") as errors, \
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"draftproof serves draftproof-demo on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            yield process, found.group(1)
        finally:
            process.kill()


def test_serve_switch_and_a_gentle_end(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ops the-secret-key admin\n")
    with started("--drafter", "model", "--api-key-file", str(tmp_path / "keys"), "--trace", str(tmp_path / "trace"), "--access-log",
                 log=tmp_path / "log") as (process, url):
        assert draftproof("switch", "off", "--url", url).returncode == 1, "no key"
        keyed = ("--url", url, "--api-key-file", str(tmp_path / "keys"))
        off = draftproof("switch", "off", "--json", *keyed)
        assert off.returncode == 0 and json.loads(off.stdout)["state"] == "off", off.stderr
        status = draftproof("switch", "status", *keyed)
        assert status.stdout.startswith("speculation off: drafter model")
        headers = {"Authorization": "Bearer the-secret-key"}
        got: list[httpx2.Response] = []
        asking = threading.Thread(target=lambda: got.append(httpx2.post(
            url + "/v1/completions", json={**BODY, "max_tokens": 150}, headers=headers, timeout=60)))
        asking.start()
        with httpx2.Client(base_url=url, headers=headers) as client:
            full = re.compile(r'kv_cache_usage_perc\{model_name="draftproof-demo"\} (?!0\.0\b)[0-9.e-]+$', re.MULTILINE)
            busy = 'num_requests_running{model_name="draftproof-demo"} 1.0'
            while not (busy in (told := client.get("/metrics").text) and full.search(told)):
                assert asking.is_alive()
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert got[0].status_code == 200 and got[0].json()["usage"]["completion_tokens"] == 150
        assert process.wait(30) == 0
    assert '"request_done"' in (tmp_path / "trace").read_text()
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if " draftproof." in line]
    assert not [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (INFO|WARNING) draftproof\.\w+: ", line)]
    for said in ("tenant ops switched speculation: {'enabled': False}", "stopping: 1 requests run, 0 wait; they have 60 s to end",
                 '127.0.0.1 - "PUT /draftproof/speculation" 401 ', '127.0.0.1 ops "POST /v1/completions" 200 '):
        assert sum(said in line for line in lines) == 1, said


def test_a_second_signal_stops_at_once() -> None:
    with started() as (process, url):
        def ask() -> None:
            with pytest.raises(httpx2.HTTPError):
                httpx2.post(url + "/v1/completions", json={**BODY, "max_tokens": 2000}, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None, "it finishes what runs"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM and time.monotonic() - began < 2
        asking.join(10)


@pytest.mark.parametrize(("arguments", "said"), [
    (("serve", "--host", "0.0.0.0", "--drafter", "ngram"), "API key"),
    (("serve", "--port", "99999"), "port=99999"),
    (("serve", "--chunks", "never"), "chunks='never'"),
    (("serve", "--drain", "inf"), "drain_s=inf"),
    (("serve", "--max-batch", "0"), "max_batch=0: expected an integer ≥ 1"),
    (("serve", "--engine", "vllm", "--max-batch", "0"), "max_batch=0: expected an integer ≥ 1"),
    (("serve", "--api-key-file", "does-not-exist"), "--api-key-file"),
    (("serve", "--target", "./does-not-exist"), "no such folder"),
    (("switch", "status", "--depth-cap", "2"), "changes nothing"),
    (("switch", "off", "--url", "file:///etc"), "expected http"),
    (("switch", "off", "--url", "http://h:abc"), "expected http"),
    (("switch", "off", "--url", "http://"), "expected http"),
    (("switch", "off", "--url", "http://h: 1"), "expected http"),
    (("switch", "off", "--url", "http://[::1"), "expected http"),
])
def test_wrong_usage_is_told_before_anything_is_loaded(arguments: tuple[str, ...], said: str) -> None:
    done = draftproof(*arguments)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    """As work that could not be done (1), not as a check that failed (3)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = draftproof("serve", "--port", port)
    assert done.returncode == 1 and not done.stdout, done.stderr
    said = rf"draftproof: host=127\.0\.0\.1, port={port}: .*address already in use; .*\n"
    assert re.fullmatch(said, done.stderr), "one line, and none of a model that was loaded: " + done.stderr


def test_nobody_there() -> None:
    done = draftproof("switch", "off", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and "is the server running there?" in done.stderr


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"<html>", b"\xff", b'{"state": "on"}'])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_answer_of_another_server_is_told(answer: bytes, form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        assert run(["switch", "status", "--url", f"http://127.0.0.1:{server.server_port}", *form]) == 1
        serving.join(10)
    said = capsys.readouterr()
    assert "expected the state of speculation" in said.err and "unforeseen" not in said.err and not said.out
