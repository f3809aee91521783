"""What clients of today send and look for, byte for byte, without the clients."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.serving import Running, serving, words


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(words(), "ngram:min=1,max=2", depth=3) as server:
        yield server


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
