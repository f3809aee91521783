"""The edge of the server: browsers, keys, readers and scrapes, and fields that say nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serve.serving import Running, letters, serving, words

from draftproof.commands.switch import KEY, key_of
from draftproof.config import AbConfig, ServeConfig
from draftproof.errors import OptionError
from draftproof.serve import abmetrics
from draftproof.serve import page as page_module
from draftproof.serve.ab import Outcome
from draftproof.serve.experiment import Experiment
from draftproof.serve.feed import Feed
from draftproof.serve.gate import Key, read_keys
from draftproof.serve.page import Page
from draftproof.serve.refusal import Refusal
from draftproof.serve.translate import Served

PAGE = "https://app.example"
TURN = {"role": "user", "content": "ab"}


@pytest.fixture(scope="module")
def running() -> Any:
    with serving(letters(), config=ServeConfig(port=0, origins=(PAGE,))) as server:
        yield server


@pytest.mark.parametrize("headers", ["authorization,content-type,x-stainless-arch,x-stainless-retry-count", "content-type,traceparent"])
def test_a_page_may_send_what_its_client_sends(running: Running, headers: str) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    with running.client() as client:
        reply = client.options("/v1/chat/completions", headers=asked)
        assert reply.status_code == 200 and reply.headers["access-control-allow-headers"] == headers
    answer = running.post("/v1/completions", {"prompt": "ab", "max_tokens": 2}, headers={"Origin": PAGE})
    shown = answer.headers["access-control-expose-headers"].lower()
    assert "x-draftproof-request" in shown and "retry-after" in shown


@pytest.mark.parametrize("origin", ["*", PAGE + "/", PAGE + "/chat", "app.example", "https://*.example", "https://App.example", "null", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(OptionError, match="expected SCHEME://HOST"):
        ServeConfig(origins=(origin,))
    assert ServeConfig(origins=(PAGE, "http://localhost:3000", "http://[::1]:8080", "app://window")).origins


@pytest.mark.parametrize("fails", [False, True])
def test_readers_that_come_together_are_counted(fails: bool) -> None:
    async def ask(page: Page) -> list[Any]:
        request = SimpleNamespace(state=SimpleNamespace(tenant="", trace=True), headers={}, query_params={"since": "x" if fails else "0"})
        return await asyncio.gather(*(page.events(request) for _ in range(40)), return_exceptions=True)  # type: ignore[arg-type]

    page = Page(Feed(8, 1000), Served("m", None, 1, 1, lambda _: None, "f"), lambda: False)
    answers = asyncio.run(ask(page))
    refused = [answer.status for answer in answers if isinstance(answer, Refusal)]
    assert refused == ([400] * 40 if fails else [429] * (40 - page_module.WATCHERS))
    assert page.reading[""] == (0 if fails else page_module.WATCHERS)


@pytest.mark.parametrize("nothing", [{"audio": None, "function_call": None, "annotations": None}, {"annotations": [], "refusal": None}])
def test_an_answer_goes_back_as_it_came(running: Running, nothing: dict[str, Any]) -> None:
    talk = [TURN, {"role": "assistant", "content": "b", "tool_calls": None, **nothing}, TURN]
    assert running.post("/v1/chat/completions", {"messages": talk, "max_tokens": 2}).status_code == 200
    for something in ({"audio": {"id": "a"}}, {"function_call": {"name": "f", "arguments": ""}}, {"annotations": [{}]}):
        talk[1] = {"role": "assistant", "content": "b", **something}
        reply = running.post("/v1/chat/completions", {"messages": talk, "max_tokens": 2})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(f"messages.1.{next(iter(something))}")


def test_offsets_point_at_their_tokens_whatever_the_bytes_are() -> None:
    """Halves of characters, and bytes that are none: as many characters as the text has for them."""
    halves = pieces = 0
    with serving(words()) as running:
        for seed in range(6):
            body = {"prompt": "ab", "max_tokens": 60, "seed": seed, "logprobs": 0, "ignore_eos": True, "temperature": 1.5}
            choice = running.complete(**body)["choices"][0]
            found = choice["logprobs"]
            for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                halves += "\ufffd" in token
                if "\ufffd" not in token and not token.startswith("<|"):
                    pieces += 1
                    assert choice["text"][offset:offset + len(token)] == token
    assert halves > 60 < pieces


@pytest.mark.parametrize(("path", "body", "param"), [
    *(("/v1/chat/completions", {"messages": [TURN], "response_format": {"type": kind, "json_schema": {"schema": {}}}}, "response_format")
      for kind in ("text", "json_object")),
    *(("/v1/responses", {"input": "ab", "text": {"format": {"type": kind, **more}}}, "text.format")
      for kind in ("text", "json_object") for more in ({"schema": {}}, {"name": "n"}, {"strict": True})),
    ("/v1/responses", {"input": "ab", "text": {"format": {"type": "json_schema"}}}, "text.format"),
])
def test_a_schema_that_would_have_no_effect_is_refused(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = running.post(path, body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param and "schema" in reply.json()["error"]["message"]


def test_the_server_and_its_switch_read_a_key_file_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("  # the operators' key\n\n\tops the-secret-key admin\n")
    assert read_keys(file) == (Key.of("ops the-secret-key admin", 1),) and key_of(file) == "the-secret-key"
    file.write_text("größe schlüssel-geheim admin\n", encoding="utf-8")
    for read in (read_keys, key_of):
        with pytest.raises(OptionError, match="ASCII"):
            read(file)
    file.write_text("größe the-secret-key\n", encoding="utf-8")
    assert read_keys(file)[0].tenant == "größe" and key_of(file) == "the-secret-key"
    monkeypatch.setenv(KEY, "schlüssel-geheim")
    with pytest.raises(OptionError, match="ASCII"):
        key_of(None)


def test_a_scrape_sorts_once_and_outside_the_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(AbConfig("ngram vs off"), Served("m", None, 1, 1, lambda _: None, "f"), 4, 1.0)
    for i in range(50):
        experiment.books["served"].add("control", "code", Outcome(ttft_s=float(i), tpot_s=1.0, e2e_s=1.0))
    sorts: list[int] = []
    monkeypatch.setattr(abmetrics, "sorted", lambda values, **more: (sorts.append(len(values)), sorted(values, **more))[1], raising=False)
    found = {family.name: family.samples for family in abmetrics.AbMetrics("m", experiment).collect()}
    assert [one.value for one in found["draftproof:ab_ttft_seconds"]] == [24.5, pytest.approx(44.1), pytest.approx(48.51)]
    assert sorts.count(50) == 3, "once for each of the times"
    threads: list[str] = []
    text = running.server.metrics.text
    monkeypatch.setattr(running.server.metrics, "text", lambda: (threads.append(threading.current_thread().name), text())[1])
    with running.client() as client:
        assert client.get("/metrics").status_code == 200
    assert threads and threads[0].startswith("asyncio_")


@pytest.mark.parametrize(("method", "path", "allowed"), [
    ("GET", "/v1/chat/completions", "POST"), ("OPTIONS", "/v1/completions", "POST"), ("DELETE", "/metrics", "GET, HEAD"),
    ("POST", "/draftproof/speculation", "GET, HEAD, PUT")])
def test_a_wrong_method_is_told_which_is_right(running: Running, method: str, path: str, allowed: str) -> None:
    with running.client() as client:
        reply = client.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, reply.headers["allow"], error["code"]) == (405, allowed, "method_not_allowed")
    assert error["message"] == f"{method} {path}: expected {allowed.replace(', ', ' or ').replace('GET or HEAD', 'GET')}"
