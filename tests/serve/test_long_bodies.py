"""Bodies that are long, or wrong in many places: they cost who sent them time, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import make_tokenizer
from pydantic import ValidationError
from serve.serving import ChatLetters, Running, serving
from serve.test_http import until

from draftproof.config import ServeConfig
from draftproof.models.fake import TableTarget
from draftproof.models.tokenizer import Tokenizer
from draftproof.serve import schema
from draftproof.serve.app import LONG_BYTES


class Watched(Tokenizer):
    """Remembers in which threads it read a text."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer(vocab_size=303))
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads += [threading.current_thread().name] if text else []
        return super().encode(text)

    def encode_plain(self, text: str) -> list[int]:
        self.threads += [threading.current_thread().name] if text else []
        return super().encode_plain(text)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    target = TableTarget(303, order=1, seed=3, eos_ids=(0,), tokenizer=Watched())
    with serving(target, "prediction", name="m") as server:
        yield server


@pytest.fixture
def threads(running: Running) -> list[str]:
    found: list[str] = running.target.tokenizer.threads  # type: ignore[union-attr]
    found.clear()
    return found


def test_texts_are_read_outside_the_engines_thread(running: Running, threads: list[str]) -> None:
    for prompt in ("ab", ["ab", "abc"]):
        assert running.complete(prompt=prompt, max_tokens=3)["usage"]["prompt_tokens"] > 1
    body = {"messages": [{"role": "user", "content": "ab"}], "prediction": {"type": "content", "content": "ab"}, "max_tokens": 3}
    assert running.post("/v1/chat/completions", body).status_code == 200
    assert len(threads) == 4 and not any(name.startswith("draftproof-engine") for name in threads)


def test_what_is_surely_too_long_is_not_even_read(running: Running, threads: list[str]) -> None:
    most = running.target.tokenizer.most_bytes  # type: ignore[union-attr]
    longest = running.target.context * most
    for prompt in ("a" * longest, [5] * running.target.context):
        reply = running.post("/v1/completions", {"prompt": prompt})
        assert reply.status_code == 400 and not threads
        assert reply.json()["error"]["param"] == "prompt" and reply.json()["error"]["code"] == "context_length_exceeded"
    assert running.post("/v1/completions", {"prompt": "a" * (running.target.context * 2)}).status_code == 400 and threads


def test_only_what_is_spelled_byte_by_byte_has_a_longest_token() -> None:
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    def bound(**changed: Any) -> int | None:
        tokenizer = Tokenizer(make_tokenizer())
        for name, value in changed.items():
            setattr(tokenizer.backend, name, value)
        return tokenizer.most_bytes

    plain = bound()
    split = [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel()]
    assert plain and bound(pre_tokenizer=pre_tokenizers.Sequence(split)) == plain and bound(normalizer=normalizers.NFC()) == 3 * plain
    assert bound(normalizer=normalizers.Replace(" ", "")) is None and bound(pre_tokenizer=None) is None
    removing = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    assert bound(pre_tokenizer=pre_tokenizers.Whitespace()) is None and bound(pre_tokenizer=pre_tokenizers.Sequence(removing)) is None
    greedy = Tokenizer(make_tokenizer())
    greedy.hf.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert greedy.most_bytes is None


@pytest.mark.parametrize("body", [{"prompt": [-1] * 3000}, {"prompt": [[-1] * 3000] * 3}, {"prompt": [1] * 9 + [-1] * 3000},
                                  {"prompt": ["a", *[3] * 3000]}])
def test_the_first_mistake_of_a_list_is_enough(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.CompletionRequest.model_validate({"model": "m", **body})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "a", **{f"x{i}": 1 for i in range(3000)}}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(3000)}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", **{f"x{i}": 1 for i in range(3000)}}] * 2}),
])
def test_mistakes_without_end_are_counted_and_not_listed(running: Running, path: str, body: dict[str, Any]) -> None:
    reply = running.post(path, body)
    assert reply.status_code == 400 and ("3000 tokens" if "logit_bias" in body else "3000 mistakes") in reply.json()["error"]["message"]


@pytest.mark.parametrize(("prompt", "param", "said"), [
    ([1] * 40 + [-1], "prompt.40", "greater than or equal to 0"), ([["a"]], "prompt.0.0", "integer"), (["a", 1], "prompt.1", "string"),
    ([[1], [1, 2**31]], "prompt.1.1", "less than"), ([], "prompt", "at least 1"), ([[]], "prompt.0", "at least 1"),
    (7, "prompt", "expected a text"), ([True], "prompt.0", "integer"), ([1.5], "prompt", "expected a text"), (["a"] * 33, "prompt", "32"),
])
def test_a_mistake_in_a_prompt_is_told_as_what_it_is(running: Running, prompt: Any, param: str, said: str) -> None:
    error = running.post("/v1/completions", {"prompt": prompt}).json()["error"]
    assert error["param"] == param and said in error["message"] and error["code"] == "invalid_value"


class Slow(ChatLetters):
    """A template that takes its time over long conversations."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[int]:
        if len(messages[0]["content"]) > LONG_BYTES:
            self.begun.set()
            assert self.go.wait(20)
            return [9]
        return super().chat(messages, tools)


@pytest.fixture
def slow() -> Iterator[tuple[Running, Slow]]:
    from engine.engine_support import table

    tokenizer = Slow()
    with serving(table(seed=3, tokenizer=tokenizer), config=ServeConfig(port=0, max_per_tenant=13)) as server:
        try:
            yield server, tokenizer
        finally:
            tokenizer.go.set()


def chat(running: Running, letters: int) -> int:
    return running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * letters}], "max_tokens": 2}).status_code


def test_long_conversations_wait_for_each_other_and_short_ones_do_not(slow: tuple[Running, Slow]) -> None:
    running, tokenizer = slow
    with ThreadPoolExecutor(12) as pool:
        long = [pool.submit(chat, running, LONG_BYTES + 1) for _ in range(12)]
        assert tokenizer.begun.wait(20)
        assert chat(running, 2) == 200 and running.complete(prompt="ab", max_tokens=2)
        assert not any(each.done() for each in long)
        tokenizer.go.set()
        assert {each.result(20) for each in long} == {200}


def test_what_is_being_read_counts_as_open(slow: tuple[Running, Slow]) -> None:
    running, tokenizer = slow
    with ThreadPoolExecutor(13) as pool:
        long = [pool.submit(chat, running, LONG_BYTES + 1) for _ in range(13)]
        until(lambda: running.server.reading[""] == 13)
        assert chat(running, 2) == 429
        tokenizer.go.set()
        assert {each.result(20) for each in long} == {200}
    assert not running.server.reading and chat(running, 2) == 200
