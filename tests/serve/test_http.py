"""The server over HTTP: what is answered, what is refused and how, and that nobody's leaving or arriving changes a text."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve.serving import Running, alone, letters, serving, words

from draftproof import Engine, Sampling
from draftproof.commands.switch import key_of
from draftproof.config import ServeConfig
from draftproof.drafters.ngram import NgramDrafter
from draftproof.errors import Failure, OptionError
from draftproof.serve.gate import Gate, Key, read_keys
from draftproof.serve.run import Listener, serve_engine

PROMPTS = ["ab", "abba c", "dead beef".replace("f", "d"), "a cab", "bad"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(letters(), "ngram:min=1,max=2", depth=3) as server:
        yield server


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def test_a_text_is_the_one_that_plain_decoding_writes(running: Running) -> None:
    for seed, prompt in enumerate(PROMPTS):
        want = alone(running.target, prompt, Sampling(seed=seed, max_tokens=30, temperature=0.9))
        got = running.complete(prompt=prompt, seed=seed, max_tokens=30, temperature=0.9)
        assert got["choices"] == [{"index": 0, "text": want.text, "finish_reason": want.finish_reason, "logprobs": None}]
        assert got["usage"]["completion_tokens"] == want.completion_tokens and got["usage"]["prompt_tokens"] == want.prompt_tokens
        assert got["seed"] == seed and got["model"] == "letters" and got["object"] == "text_completion"


def test_a_stream_says_the_same_in_pieces(running: Running) -> None:
    body = {"prompt": "abba", "seed": 4, "max_tokens": 30, "temperature": 0.9, "logprobs": 2, "stop": ["ca"]}
    whole = running.complete(**body)
    chunks = running.stream(**body, stream_options={"include_usage": True})
    *pieces, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in pieces][-1] == whole["choices"][0]["finish_reason"]
    assert all(chunk["usage"] is None for chunk in pieces)
    assert last["choices"] == [] and last["usage"] == whole["usage"] and len({chunk["id"] for chunk in chunks}) == 1
    found: dict[str, list[Any]] = {}
    for chunk in pieces:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values)
    assert found == whole["choices"][0]["logprobs"]
    assert last["metrics"]["speculative_decoding"] == whole["metrics"]["speculative_decoding"]


def test_many_prompts_and_samples_keep_their_places(running: Running) -> None:
    body = {"prompt": PROMPTS[:3], "n": 2, "seed": 5, "max_tokens": 12, "temperature": 1.0}
    whole = running.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6)) and "metrics" not in whole and "timings" not in whole
    for i, prompt in enumerate(PROMPTS[:3]):
        want = alone(running.target, prompt, Sampling(seed=5, max_tokens=12, temperature=1.0, n=2))
        assert [choice["text"] for choice in whole["choices"][2 * i:2 * i + 2]] == [sample.text for sample in want.samples]
    texts = [""] * 6
    for chunk in running.stream(**body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert running.complete(prompt=[0, 1, 2], max_tokens=3)["usage"]["prompt_tokens"] == 3


def test_numbers_of_speculation_are_absent_when_it_is_off(running: Running) -> None:
    on = running.complete(prompt="abababab", seed=1, max_tokens=30)
    numbers = on["metrics"]["speculative_decoding"]
    assert numbers["num_draft_tokens"] == on["timings"]["draft_n"] > 0
    assert sum(numbers["acceptance_histogram"]) == numbers["num_spec_steps"]
    assert sum(i * n for i, n in enumerate(numbers["acceptance_histogram"])) == numbers["num_accepted_draft_tokens"]
    assert numbers["mean_acceptance_length"] == pytest.approx(1 + numbers["num_accepted_draft_tokens"] / numbers["num_spec_steps"])
    for off in ({"drafter": "none"}, {"drafter": "off"}):
        plain = running.complete(prompt="abababab", seed=1, max_tokens=30, speculation=off)
        assert plain["choices"] == on["choices"] and "metrics" not in plain and "draft_n" not in plain["timings"]
        assert plain["speculation"]["state"] == "off"
    by_header = running.post("/v1/completions", {"prompt": "abababab", "seed": 1, "max_tokens": 30},
                             headers={"X-Draftproof-Speculation": "off"}).json()
    assert "metrics" not in by_header and by_header["choices"] == on["choices"]
    deep = running.complete(prompt="abababab", seed=1, max_tokens=30, speculation={"depth": 6})
    assert deep["choices"] == on["choices"] and deep["metrics"]["speculative_decoding"]["num_spec_tokens"] == 6


@pytest.mark.parametrize(("path", "body", "status", "param"), [
    ("/v1/completions", {"prompt": "a", "frobnicate": 1}, 400, "frobnicate"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"shape": 1}, "stream": True}, 400, "stream_options.shape"),
    ("/v1/completions", {"prompt": "a", "n": 10**9}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "logprobs": 999}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop.0"),
    ("/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "best_of": 4}, 400, "best_of"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "echo": 1}, 400, "echo"),
    ("/v1/completions", {"prompt": "a", "seed": -2**63 - 1}, 400, "seed"),
    ("/v1/completions", {"prompt": ["a"] * 33}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 30, "n": 30}, 400, "n"),
    ("/v1/completions", {"prompt": [999]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a" * 5000}, 400, "prompt"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", {"prompt": "a", "speculation": {"drafter": "eagle3:/etc"}}, 400, "drafter"),
    ("/v1/completions", {"prompt": "a", "speculation": {"depth": 65}}, 400, "speculation.depth"),
    ("/v1/completions", {"prompt": "a", "speculation": {"rule": "guess"}}, 400, "speculation.rule"),
    ("/v1/completions", {"prompt": "a", "metadata": {"prompt_class": "a b"}}, 400, "prompt_class"),
    ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]}, 400,
     "messages.0.content.0.image_url"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": "a"}}, 400,
     "prediction"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ("/v1/responses", {"input": "a", "store": True}, 400, "store"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
    ("/detokenize", {"tokens": [12]}, 400, "tokens"),
])
def test_what_is_not_supported_is_refused_by_name(running: Running, path: str, body: dict[str, Any], status: int, param: str) -> None:
    reply = running.post(path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"} and error["message"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "letters", "prompt": "\\ud800"}', b"[" * 100_000,
                                  b'{"model": "letters", "prompt": "a", "temperature": NaN}',
                                  b'{"model": "letters", "prompt": "a", "seed": 1e400}'])
def test_a_body_that_is_none(running: Running, data: bytes) -> None:
    with running.client() as client:
        reply = client.post("/v1/completions", content=data)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", reply.text


def test_small_routes(running: Running) -> None:
    with running.client() as client:
        assert client.get("/health").json()["status"] == "alive" and client.get("/ready").json() == {"status": "ready"}
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["letters"]
        assert client.get("/v1/models/letters").json()["max_model_len"] == 4096
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/nothing").json()["error"]["code"] == "not_found" and client.get("/v1/completions").status_code == 405
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        assert client.get("/v1/health").json() == client.get("/ping").json() == client.post("/ping").json() == client.get("/health").json()
        assert client.get("/version").json() == {"version": client.get("/health").json()["version"]}
    assert running.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json() == {
        "count": 3, "max_model_len": 4096, "tokens": [0, 1, 6], "token_strs": ["a", "b", "c"]}
    assert running.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}).json()["tokens"] == [9, 0, 1, 3, 9]
    assert running.post("/detokenize", {"tokens": [0, 2]}).json() == {"prompt": "aab"}


def test_the_api_describes_itself(running: Running) -> None:
    with running.client() as client:
        found = client.get("/openapi.json").json()
        names = found["components"]["schemas"]
        assert "surprise" not in names["ChatRequest"]["properties"] and names["ChatRequest"]["additionalProperties"] is False
        assert not [ref for ref in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found)) if ref not in names]
        for path, methods in found["paths"].items():
            for method in methods:
                named = path.replace("{name}", "letters")
                assert client.request(method, named, content=b"{}").status_code in (200, 400), (method, path)


def test_concurrent_texts_are_what_each_is_alone_while_clients_leave(running: Running) -> None:
    """64 requests, some streamed, some abandoned at any moment; every finished text is the one of the request alone."""
    wanted = {i: Sampling(seed=i, max_tokens=10 + i % 23, temperature=0.8 + i % 3 / 10, presence_penalty=i % 2 / 2) for i in range(64)}

    def ask(i: int) -> str | None:
        options = wanted[i]
        body = {"prompt": PROMPTS[i % 5], "seed": i, "max_tokens": options.max_tokens, "temperature": options.temperature,
                "presence_penalty": options.presence_penalty}
        if i % 7 == 3:
            leave(running, body, stream=i % 2 == 0)
            return None
        if i % 2:
            return "".join(chunk["choices"][0]["text"] for chunk in running.stream(**body))
        return str(running.complete(**body)["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(64)))
    for i, text in enumerate(texts):
        if text is not None:
            assert text == alone(running.target, PROMPTS[i % 5], wanted[i]).text
    until(lambda: running.idle and not running.target.open_slots)  # type: ignore[attr-defined]


def leave(running: Running, body: dict[str, Any], stream: bool, wait: Callable[[], Any] | None = None) -> None:
    """Send a request and hang up: after `wait`, or after the first bytes of a stream, or at once."""
    data = json.dumps({"model": "letters", "stream": stream, **body}).encode()
    host, _, port = running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        if wait is not None:
            wait()
        elif stream:
            connection.recv(10)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token(stream: bool) -> None:
    """Waiting in the queue: its place is given back, and the text before it goes on."""
    hold = threading.Event()

    class Held(Engine):
        def step(self) -> Any:
            hold.wait(20)
            return super().step()

    with serving(letters(), wrap=lambda engine: Held(engine.target), max_batch=1) as running, ThreadPoolExecutor(1) as pool:
        worker = running.server.worker
        text = pool.submit(running.complete, prompt="ab", seed=1, max_tokens=20)
        until(lambda: worker.load == (1, 0))
        leave(running, {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}, stream, lambda: until(lambda: worker.load == (1, 1)))
        until(lambda: bool(worker._cancelled))
        hold.set()
        assert text.result(20)["choices"][0]["text"] == alone(running.target, "ab", Sampling(seed=1, max_tokens=20)).text
        until(lambda: running.idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_text(running: Running, stream: bool) -> None:
    ends = running.server.metrics._ends
    before = ends["", "cancelled"], ends["", "length"]
    wait = None if stream else lambda: until(lambda: running.server.worker.load == (1, 0))
    leave(running, {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True, "seed": 1}, stream, wait)
    until(lambda: running.idle and not running.target.open_slots)  # type: ignore[attr-defined]
    assert (ends["", "cancelled"], ends["", "length"]) == (before[0] + 1, before[1])


def test_the_kill_switch_under_load() -> None:
    """Flipped 100 times while texts are written: each is the one of the unswitched run."""
    with serving(letters(), "ngram:min=1,max=2", depth=4) as running:
        stop = threading.Event()
        flips = [0]

        def flip() -> None:
            with running.client() as client:
                while flips[0] < 100 or not stop.is_set():
                    reply = client.put("/draftproof/speculation", json={"enabled": bool(flips[0] % 2)})
                    assert reply.status_code == 200 and reply.json()["enabled"] == bool(flips[0] % 2)
                    flips[0] += 1

        flipping = threading.Thread(target=flip)
        flipping.start()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: running.complete(prompt=PROMPTS[i % 5], seed=i, max_tokens=60), range(40)))
        texts = [each["choices"][0]["text"] for each in found]
        stop.set()
        flipping.join()
        for i, text in enumerate(texts):
            assert text == alone(running.target, PROMPTS[i % 5], Sampling(seed=i, max_tokens=60)).text
        assert flips[0] >= 100


def test_the_switch_says_what_it_did_and_takes_no_files() -> None:
    with serving(letters(), "ngram:min=1,max=2") as running, running.client() as client:
        put = lambda **body: client.put("/draftproof/speculation", json=body)  # noqa: E731
        assert client.get("/draftproof/speculation").json()["state"] == "on"
        assert put(enabled=False).json()["state"] == "off"
        assert put(enabled=True, depth_cap=2).json()["state"] == "on"
        assert put(drafter="suffix").json()["drafter"] == "suffix" and put(drafter="none").json()["state"] == "none"
        assert put(drafter="ngram:min=1,max=2").json()["drafter"] == "ngram"
        assert put(drafter="model:some/where").status_code == 403 and put(drafter="custom:os:system").status_code in (400, 403)
        assert put(drafter="suffix+model:some/where").status_code == 403
        assert put(drafter="nonsense").status_code == 400 and put().status_code == 400 and put(enabled=1).status_code == 400
        assert 'draftproof:speculation_changes_total{model_name="letters"} 5.0' in client.get("/metrics").text


NAMES = ["spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
         "spec_decode_num_accepted_tokens_per_pos_total", "spec_decode_num_rejected_tokens_total", "spec_decode_num_discarded_tokens_total",
         "spec_decode_depth", "spec_decode_passes_saved", "spec_decode_drafter_bytes", "spec_decode_kv_tokens_lost", "target_passes_total",
         "rounds_total", "round_seconds_total", "time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket",
         "inter_chunk_seconds_bucket", "num_requests_running", "num_requests_waiting", "request_queue_time_seconds_bucket", "build_info",
         "worker_restarts_total", "kv_cache_usage_perc"]


def test_metrics_have_the_names_and_the_counts() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        with running.client() as client:
            text = client.get("/metrics").text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    with serving(letters(), "ngram:min=1,max=2", config=ServeConfig(port=0, classes=2), depth=3) as running:
        assert not [name for name in read() if "spec_decode_num" in name], "absent, not zero"
        totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        for i in range(5):
            out = running.complete(prompt="abababa", seed=i, max_tokens=30, metadata={"prompt_class": f"class{i}"})
            numbers = out["metrics"]["speculative_decoding"]
            totals["drafts"] += numbers["num_spec_steps"]
            totals["draft_tokens"] += numbers["num_draft_tokens"]
            totals["accepted_tokens"] += numbers["num_accepted_draft_tokens"]
        found = read()
        for name, count in totals.items():
            assert found[f"draftproof:spec_decode_num_{name}_total"] == count
        assert found["draftproof:spec_decode_num_accepted_tokens_per_pos_total"] == totals["accepted_tokens"]
        assert not [name for name in NAMES if "draftproof:" + name not in found]
        with running.client() as client:
            text = client.get("/metrics").text
        assert 'prompt_class="class1"' in text and 'prompt_class="other"' in text and 'prompt_class="class3"' not in text


def test_keys_are_asked_on_every_route_but_health(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may\nalice first-secret-key\nsecond-secret-key admin\n")
    keys = read_keys(file)
    assert [key.tenant for key in keys][0] == "alice" and [key.admin for key in keys] == [False, True]
    with serving(letters(), keys=keys) as running, running.client() as client:
        assert client.get("/health").status_code == 200
        assert [client.get(path).status_code for path in ("/v1/health", "/ping", "/version")] == [200] * 3
        for path in ("/ready", "/metrics", "/v1/models", "/draftproof/speculation", "/nothing", "/health/", "/v1//health",
                     "/health?x=/v1/models"):
            reply = client.get(path)
            assert reply.status_code == (200 if path.startswith("/health?") else 401), path
            if reply.status_code == 401:
                assert reply.json()["error"]["code"] == "invalid_api_key" and reply.headers["www-authenticate"] == "Bearer"
        for headers in ({"Authorization": "Bearer first-secret-key"}, {"x-api-key": "second-secret-key"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        for wrong in ("Bearer first-secret-kez", "Bearer", "first-secret-key", "Basic first-secret-key", "Bearer \xff"):
            assert client.get("/v1/models", headers={"Authorization": wrong.encode("latin-1")}).status_code == 401
        steer = {"enabled": False}
        assert client.put("/draftproof/speculation", json=steer, headers={"Authorization": "Bearer first-secret-key"}).status_code == 403
        assert client.put("/draftproof/speculation", json=steer, headers={"Authorization": "Bearer second-secret-key"}).status_code == 200


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_API_KEYS", "one-secret-key, bob two-secret-key")
    assert [key.admin for key in read_keys(None)] == [True, True] and read_keys(None)[1].tenant == "bob"
    monkeypatch.setenv("DRAFTPROOF_API_KEYS", "short")
    with pytest.raises(OptionError, match="at least 8"):
        read_keys(None)


def test_without_a_key_only_the_loopback_is_served() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with pytest.raises(OptionError, match="API key"):
        Gate(app, ServeConfig(host="0.0.0.0"), (), lambda status: None)
    Gate(app, ServeConfig(host="0.0.0.0"), (Key(b"", "", True),), lambda status: None)


def test_foreign_hosts_and_origins_are_refused(running: Running) -> None:
    with running.client() as client:
        for host, status in (("evil.example", 403), ("localhost:1", 200), ("[::1]:8000", 200), ("", 403), ("127.0.0.1.evil.example", 403)):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status, host
        for origin, status in (("https://evil.example", 403), ("null", 403), (running.url, 200)):
            assert client.get("/v1/models", headers={"Origin": origin}).status_code == status, origin


def test_a_page_that_may_call_gets_what_browsers_ask_for() -> None:
    page = "https://app.example"
    with serving(letters(), config=ServeConfig(port=0, origins=(page,)), keys=(Key(b"", "", True),)) as running, running.client() as client:
        asked = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        reply = client.options("/v1/completions", headers=asked)
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == page
        assert client.get("/v1/models", headers={"Origin": page}).status_code == 401, "a page needs a key like anyone"
        assert client.options("/v1/completions", headers={**asked, "Origin": "https://evil.example"}).status_code == 403
        assert "access-control-allow-origin" not in client.get("/health").headers


def test_a_body_may_not_be_larger_than_agreed() -> None:
    with serving(letters(), config=ServeConfig(port=0, max_body_bytes=2000)) as running, running.client() as client:
        assert client.post("/v1/completions", content=b" " * 3000).status_code == 413

        def endless() -> Iterator[bytes]:
            for _ in range(40):
                yield b" " * 100

        assert client.post("/v1/completions", content=endless()).status_code == 413
        for whole in (b" " * 2000, (b" " * 100 for _ in range(20))):
            assert client.post("/v1/completions", content=whole).status_code == 400, "as large as agreed, and no request"
        assert running.complete(prompt="a", max_tokens=2)["choices"]


@pytest.mark.parametrize(("chunks", "sizes"), [("tokens:5", {5}), ("ms:5", None)])
def test_chunks_that_hide_acceptance(chunks: str, sizes: set[int] | None) -> None:
    with serving(letters(), lambda: NgramDrafter(1, 2), config=ServeConfig(port=0, chunks=chunks), depth=4) as running:
        body = {"prompt": "abab", "seed": 2, "max_tokens": 38, "ignore_eos": True, "logprobs": 0}
        pieces = running.stream(**body)
        assert "".join(p["choices"][0]["text"] for p in pieces) == running.complete(**body)["choices"][0]["text"]
        counts = [len(p["choices"][0]["logprobs"]["tokens"]) for p in pieces]
        assert sum(counts) == 38 and (sizes is None or set(counts[:-1]) == sizes)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    class Slow:
        """An engine whose steps take a moment, the first one until it is let go."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def step(self) -> Any:
            go.wait(20)
            time.sleep(0.01)
            return self._engine.step()

    go = threading.Event()
    with serving(letters(), wrap=Slow) as running:
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(running.complete, prompt="ab", seed=1, max_tokens=40, ignore_eos=True)
            until(lambda: running.server.worker.load[0] == 1)
            with running.client() as client:
                client.get("/health")
                running.listener.handle_exit(15, None)
                refused = client.post("/v1/completions", json={"model": "letters", "prompt": "a"})
                assert refused.status_code == 503 and refused.headers["retry-after"] and client.get("/ready").status_code == 503
            go.set()
            assert text.result(20)["usage"]["completion_tokens"] == 40
        running.thread.join(10)
        assert not running.thread.is_alive() and not running.server.worker.alive


def test_a_port_that_was_taken_meanwhile() -> None:
    """Between the look at it and listening, while a model was loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1])
        server = serve_engine(lambda: Engine(letters()), "letters", letters(), "none", config)
        with pytest.raises(Failure, match="cannot listen there"):
            Listener(server, (), lambda address: None).run()
    until(lambda: not server.worker.alive)


@pytest.mark.parametrize("name", ["my model", "./models/a+b@main", "模型", "x" * 1000])
def test_any_name_may_be_asked_for(name: str) -> None:
    """Whatever a model is served as, it can be named in every form of request; other names are not known."""
    with serving(letters(), name=name) as running, running.client() as client:
        assert running.complete(prompt="ab", max_tokens=2)["model"] == name
        assert running.post("/tokenize", {"prompt": "ab"}).status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == name
        assert running.post("/v1/completions", {"prompt": "ab", "model": name + "?"}).status_code == 404
        assert running.post("/v1/completions", {"prompt": "ab", "model": "x" * 5000}).status_code == 400


def test_a_key_file_may_begin_with_a_byte_order_mark(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst-secret-key\r\nbob second-secret-key\r\n")
    alone = Key.of("first-secret-key", 1)
    assert [(key.digest == alone.digest, key.tenant) for key in read_keys(file)] == [(True, alone.tenant), (False, "bob")]
    assert key_of(file) == "first-secret-key"


def test_names_of_hosts_know_no_capitals() -> None:
    with serving(letters(), config=ServeConfig(port=0, hosts=("My-Box",))) as running, running.client() as client:
        for host in ("My-Box", "my-box", "MY-BOX:8000"):
            assert client.get("/health", headers={"Host": host}).status_code == 200
        assert client.get("/health", headers={"Host": "other"}).status_code == 403


def test_the_likeliest_tokens_have_the_one_beside_them_that_was_written(running: Running) -> None:
    """As OpenAI and vLLM tell a completion's: up to one more than was asked for."""
    for count in (0, 2):
        told = running.complete(prompt="abba", seed=4, max_tokens=30, temperature=2.0, logprobs=count)["choices"][0]["logprobs"]
        entries = list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))
        assert all(token in top and (top[token] == own or "\ufffd" in token) for token, own, top in entries)
        assert max(len(top) for _, _, top in entries) == count + 1


@pytest.mark.parametrize(("header", "body", "found"), [
    ("off", {}, ("off", 0, "match")), ("off", {"rule": "ratio"}, ("off", 0, "ratio")), ("off", {"drafter": "ngram"}, ("on", 3, "match")),
    ('{"rule": "ratio"}', {"depth": 2}, ("on", 2, "ratio")),
    ('{"rule": "ratio", "depth": 1}', {"depth": 2, "rule": "block"}, ("on", 2, "block")), ("on", {"drafter": "off"}, ("off", 0, "match"))])
def test_what_a_body_does_not_say_the_header_says(running: Running, header: str, body: dict[str, Any], found: tuple[str, Any, str]) -> None:
    answer = running.post("/v1/completions", {"prompt": "abab", "max_tokens": 4, "seed": 1, "speculation": body},
                          headers={"X-Draftproof-Speculation": header}).json()
    assert tuple(answer["speculation"][name] for name in ("state", "depth", "rule")) == found


def test_more_prompts_than_a_key_may_ever_have_open() -> None:
    """Each counts as one. To try again later, as a 429 asks, would not help; and nothing of it is begun."""
    with serving(letters(), config=ServeConfig(port=0, max_per_tenant=2)) as running:
        refused = running.post("/v1/completions", {"prompt": ["ab"] * 3, "max_tokens": 2})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt" and "Retry-After" not in refused.headers
        assert "3 prompts" in refused.text and "at most 2" in refused.text
        assert len(running.complete(prompt=["ab"] * 2, max_tokens=2)["choices"]) == 2


def test_offsets_of_tokens_that_write_nothing() -> None:
    """A special token has a piece to show, and no place in the text: the next token begins where it stands."""
    target = words()
    with serving(target) as running:
        body: dict[str, Any] = {"prompt": "ab", "logit_bias": {"0": 4.0}, "ignore_eos": True, "max_tokens": 40, "seed": 3, "logprobs": 1}
        choice = running.complete(**body)["choices"][0]
        streamed = [chunk["choices"][0]["logprobs"] for chunk in running.stream(**body) if chunk["choices"][0]["logprobs"]]
    pieces, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    end = target.tokenizer.piece(0)                          # type: ignore[union-attr]
    assert end in pieces[:-1] and end not in choice["text"]
    for piece, offset, following in zip(pieces, offsets, [*offsets[1:], len(choice["text"])], strict=True):
        if piece == end:
            assert following == offset
        elif "\ufffd" in piece:                              # half of a character, or none at all
            assert following - offset in (0, 1)
        else:
            assert choice["text"][offset:following] == piece
    assert [offset for one in streamed for offset in one["text_offset"]] == offsets


def test_a_response_says_what_was_asked_and_why_it_ends(running: Running) -> None:
    asked: dict[str, Any] = {"temperature": 0.5, "top_p": 0.75, "max_output_tokens": 4, "metadata": {"a": "b"}}
    cut, ended = (running.post("/v1/responses", {"input": "ab", "seed": 1, **asked, **more}).json()
                  for more in ({"ignore_eos": True}, {"stop_token_ids": list(range(11))}))
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete",) * 2
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (ended["status"], ended["output"][0]["status"]) == ("completed",) * 2 and ended["incomplete_details"] is None
    for found, tokens in ((cut, 4), (ended, 1)):
        assert {name: found[name] for name in asked} == asked
        assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"], found["instructions"]) == ([], "none", False, None)
        counts = found["usage"]
        assert (counts["input_tokens"], counts["output_tokens"], counts["total_tokens"]) == (5, tokens, 5 + tokens)
        assert counts["output_tokens_details"] == {"reasoning_tokens": 0} and counts["input_tokens_details"]["cached_tokens"] >= 0
