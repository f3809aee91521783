"""What clients of today send and look for, byte for byte, without the clients."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve.serving import Running, serving, words

from draftproof.config import ServeConfig

JSON = {"prompt": "ab", "max_tokens": 2, "response_format": {"type": "json_object"}}


@pytest.mark.parametrize("prompt", ["a" * 5000, [1] * 5000, "a" * 1_000_000], ids=["text", "ids", "megabyte"])
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(running: Running, prompt: Any) -> None:
    """Some shorten a conversation and try again; they know this error by its code, or by these words alone."""
    error = running.post("/v1/completions", {"prompt": prompt}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"this model's maximum context length is {running.target.context} tokens" in error["message"]


def test_a_body_that_is_compressed_is_refused_for_what_it_is(running: Running) -> None:
    """It was called invalid JSON."""
    plain = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
    with running.client() as client:
        refused = client.post("/v1/completions", content=gzip.compress(plain), headers={"Content-Encoding": "gzip"})
        assert refused.status_code == 415 and "gzip" in refused.json()["error"]["message"], refused.text
        assert refused.headers["accept-encoding"] == "identity"
        assert client.post("/v1/completions", content=plain, headers={"Content-Encoding": "identity"}).status_code == 200


def statuses(running: Running, clients: int) -> Counter[int]:
    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(lambda _: running.post("/v1/completions", JSON).status_code, range(clients)))


def test_many_clients_may_ask_for_the_same_structure_at_once() -> None:
    """All but eight of those that came together were refused."""
    pytest.importorskip("llguidance")
    with serving(words()) as running:
        compile = running.server._compile
        running.server._compile = lambda grammar: (time.sleep(0.02), compile(grammar))
        assert statuses(running, 30) == {200: 30}


def test_a_structure_that_finds_no_compiler_in_time_may_be_asked_for_again() -> None:
    with serving(words(), config=ServeConfig(port=0, grammar_s=0.3)) as running:
        running.server._compile = lambda grammar: time.sleep(1)
        assert statuses(running, 5) == {400: 2, 503: 3}
