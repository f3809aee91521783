"""`echo`: the prompt in front of its answer, and how likely its tokens are. That is how harnesses rank given answers."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serve.serving import Running, letters, serving, words

from draftproof.audition.logs import Skipped, read_log
from draftproof.config import ServeConfig
from draftproof.serve.reply import CompletionReply

PROMPT = "héllo, wörld 👋 and on"


@pytest.fixture(scope="module")
def ids(running: Running) -> list[int]:
    found: list[int] = running.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    return found


ASKED: dict[str, Any] = {"seed": 4, "max_tokens": 12, "ignore_eos": True}


def test_the_prompt_stands_before_its_answer(running: Running, ids: list[int]) -> None:
    plain = running.complete(prompt=PROMPT, **ASKED)
    for prompt in (PROMPT, ids):
        found = running.complete(prompt=prompt, **ASKED, echo=True)
        assert found["choices"] == [{**plain["choices"][0], "text": PROMPT + plain["choices"][0]["text"]}]
        assert {**found["usage"], "prompt_tokens_details": None} == {**plain["usage"], "prompt_tokens_details": None}
    assert running.complete(prompt=PROMPT, **ASKED, echo=False)["choices"] == plain["choices"]


def test_how_likely_it_is(running: Running, ids: list[int]) -> None:
    plain = running.complete(prompt=PROMPT, **ASKED, logprobs=3)["choices"][0]
    found = running.complete(prompt=PROMPT, **ASKED, logprobs=3, echo=True)["choices"][0]
    told, own = found["logprobs"], plain["logprobs"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    law = running.target.table.float()               # type: ignore[attr-defined]
    assert told["token_logprobs"][1:len(ids)] == pytest.approx([float(law[a, b]) for a, b in zip(ids, ids[1:], strict=False)], abs=1e-6)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert told[name][len(ids):] == own[name]
    assert told["text_offset"] == [0, *sorted(told["text_offset"][1:])]
    assert told["text_offset"][len(ids)] == len(PROMPT)
    assert [at - len(PROMPT) for at in told["text_offset"][len(ids):]] == own["text_offset"]


def test_where_tokens_of_a_prompt_begin_that_names_special_ones(running: Running, tmp_path: Path) -> None:
    """Sent as text they stand in the answer; sent as ids they write nothing, as in any text."""
    prompt = "<|user|>héllo 👋<|assistant|>so"
    prompt_ids = running.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    for sent in (prompt, prompt_ids):
        for choice in running.complete(prompt=sent, **ASKED, logprobs=0, echo=True, n=2)["choices"]:
            told, text = choice["logprobs"], choice["text"]
            for token, at in list(zip(told["tokens"], told["text_offset"], strict=True))[:len(prompt_ids) + 1]:
                assert "\ufffd" in token or text.startswith(token, at) or sent is prompt_ids and token.startswith("<|"), (token, at)
            assert told["text_offset"][len(prompt_ids)] == len(prompt if sent is prompt else "héllo 👋so")
    request, log = {"prompt": prompt, **ASKED, "logprobs": 0}, tmp_path / "log.jsonl"
    found = []
    for echo in (False, True):
        log.write_text(json.dumps({"request": {**request, "echo": echo}, "response": running.complete(**request, echo=echo)}) + "\n")
        found.append(next(read_log(log)))
    assert found[0].answer == found[1].answer and found[0].places == found[1].places


def test_as_harnesses_rank_answers(running: Running, ids: list[int]) -> None:
    """Token ids of context and continuation, one token that nobody reads; whether the continuation is the likeliest one, too."""
    context, most = ids[:4], running.target.table.argmax(-1)      # type: ignore[attr-defined]
    likeliest = [*context]
    for _ in range(3):
        likeliest.append(int(most[likeliest[-1]]))
    answers = [likeliest, [*context, 5, 6, 7]]
    found = running.complete(prompt=answers, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    for choice, best in zip(found["choices"], (True, False), strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context):-1]
        tops = choice["logprobs"]["top_logprobs"][len(context):-1]
        assert len(logprobs) == 3 and all(value == max(top.values()) for value, top in zip(logprobs, tops, strict=True)) == best


def test_apart_as_vllm_tells_it(running: Running, ids: list[int]) -> None:
    """Beside any answer that is not a stream: null for the first token, then each token with the likeliest ones, by id, with ranks."""
    echoed = running.complete(prompt=PROMPT, **ASKED, logprobs=3, echo=True)["choices"][0]["logprobs"]
    law = running.target.table.float()               # type: ignore[attr-defined]
    for more in ({}, {"echo": True}, {"echo": True, "logprobs": 3}, {"logprobs": 1}, {"n": 2}):
        found = running.complete(prompt=[ids, ids], **ASKED, prompt_logprobs=3, **more)["choices"]
        for told in [choice["prompt_logprobs"] for choice in found]:
            assert len(told) == len(ids) and told[0] is None
            for i, entries in enumerate(told[1:], 1):
                own, row = entries[str(ids[i])], law[ids[i - 1]]
                assert own["logprob"] == echoed["token_logprobs"][i] and own["decoded_token"] == echoed["tokens"][i]
                assert own["rank"] == int((row >= row[ids[i]]).sum())
                assert [entry["rank"] for entry in entries.values()] == sorted({1, 2, 3, own["rank"]}) and len(entries) <= 4
                assert {*echoed["top_logprobs"][i].items()} <= {(entry["decoded_token"], entry["logprob"]) for entry in entries.values()}
    plain = running.complete(prompt=PROMPT, **ASKED)["choices"][0]
    assert "prompt_logprobs" not in plain and found[0]["text"] == plain["text"]


def test_apart_in_a_chat_and_not_in_a_stream() -> None:
    with serving(letters(), "ngram", depth=3) as running:
        asked = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
        found = running.post("/v1/chat/completions", {**asked, "prompt_logprobs": 0}).json()
        told = found["prompt_logprobs"]
        assert len(told) == found["usage"]["prompt_tokens"] and told[0] is None and all(len(entries) == 1 for entries in told[1:])
        assert "prompt_logprobs" not in running.post("/v1/chat/completions", asked).json()
        for path, body in (("/v1/chat/completions", asked), ("/v1/completions", {"prompt": "abc"})):
            refused = running.post(path, {**body, "prompt_logprobs": 1, "stream": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs" and "stream" in refused.text
        refused = running.post("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1, "logprobs": 2, "echo": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_the_prompt_alone(running: Running, ids: list[int]) -> None:
    found = running.complete(prompt=[PROMPT, "ab"], max_tokens=0, echo=True, logprobs=0, n=2)
    assert [choice["text"] for choice in found["choices"]] == [PROMPT, PROMPT, "ab", "ab"]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"} and found["usage"]["completion_tokens"] == 0
    assert len(found["choices"][1]["logprobs"]["tokens"]) == len(ids)
    chunks = running.stream(prompt=PROMPT, max_tokens=0, echo=True, stream_options={"include_usage": True})
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == [PROMPT] and chunks[0]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    refused = running.post("/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens" and "echo" in refused.text


@pytest.mark.parametrize("chunks", ["round", "tokens:5", "ms:5"])
def test_a_stream_begins_with_it(chunks: str) -> None:
    with serving(words(), "ngram:min=1,max=2", depth=3, config=ServeConfig(port=0, chunks=chunks)) as running:
        asked = {"prompt": [PROMPT, "ab"], "n": 2, **ASKED, "logprobs": 2, "echo": True}
        whole = running.complete(**asked)["choices"]
        told = running.stream(**asked)
        for choice in whole:
            own = [each for chunk in told for each in chunk["choices"] if each["index"] == choice["index"]]
            assert own[0]["text"].startswith(asked["prompt"][choice["index"] // 2])
            assert "".join(each["text"] for each in own) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [value for each in own if each["logprobs"] for value in each["logprobs"][name]] == values


def test_others_are_answered_while_a_prompt_is_put_into_words(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token a long one takes seconds: not in the thread that answers everybody."""
    threads, real = list[str](), CompletionReply._logprobs

    def noted(*about: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*about)

    monkeypatch.setattr(CompletionReply, "_logprobs", noted)
    running.complete(prompt=PROMPT, max_tokens=1, logprobs=1)
    here = set(threads)
    running.complete(prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)
    running.stream(prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)
    assert len(here) == 1 and not here & set(threads[1:]) and len(threads) == 3


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_log_of_such_answers_has_no_prompt_in_them(running: Running, ids: list[int], tmp_path: Path, as_ids: bool) -> None:
    """An audition counts what the model wrote. Where it cannot be seen how far the prompt goes, the record is not read."""
    request = {"prompt": ids if as_ids else PROMPT, **ASKED, "temperature": 0.7, "top_p": 1.0, "logprobs": 2}
    log, found = tmp_path / "log.jsonl", []
    for echo in (False, True):
        asked = {**request, "echo": echo}
        log.write_text(json.dumps({"request": asked, "response": running.complete(**asked)}) + "\n")
        found.append(next(read_log(log)))
    assert found[0].answer and found[0].places and len(found[0].places) == ASKED["max_tokens"]
    assert replace(found[1], sampling={}) == replace(found[0], sampling={})
    skipped = Skipped()
    log.write_text(json.dumps({"request": {"prompt": [1, 2], "echo": True}, "response": {"choices": [{"text": "abc"}]}}) + "\n")
    assert not list(read_log(log, skipped)) and skipped.count == 1 and "echo" in skipped.shown[0]
