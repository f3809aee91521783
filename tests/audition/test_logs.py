"""Logs of every form give the same exchanges; what cannot be read is counted with its line."""

from __future__ import annotations

import json
import random
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftproof.audition import logs
from draftproof.audition.logs import Exchange, Skipped, check_log, read_log
from draftproof.audition.stories import Reader, tokenizer_at
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.records import json_options
from draftproof.errors import Failure
from draftproof.models.fake import TableTarget
from draftproof.trace.sinks import Jsonl
from draftproof.types import Sampling

CHAT = ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize("record, expected", [
    ({"prompt_token_ids": [1, 2], "token_ids": [3], "class": "code", "max_tokens": 9},
     Exchange(1, prompt_ids=(1, 2), answer_ids=(3,), prompt_class="code", max_tokens=9)),
    ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}, Exchange(1, messages=CHAT, answer="yes")),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, Exchange(1, messages=CHAT, answer="yes")),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
     Exchange(1, messages=CHAT)),
    ({"prompt": "a", "completion": "b"}, Exchange(1, prompt="a", answer="b")),
    ({"text": "a b"}, Exchange(1, prompt="a b", document=True)),
    ({"request": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "metadata": {"prompt_class": "chat"}},
      "response": {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}},
     Exchange(1, messages=CHAT, answer="yes", prompt_class="chat", finish_reason="stop",
              sampling={"temperature": 0.5, "metadata": {"prompt_class": "chat"}})),
    ({"request": {"prompt": "a", "max_tokens": 5}, "response": {"choices": [{"text": "b"}]}},
     Exchange(1, prompt="a", answer="b", max_tokens=5, sampling={"max_tokens": 5})),
])
def test_each_form(tmp_path: Path, record: dict, expected: Exchange) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert list(read_log(file)) == [expected]


def test_what_cannot_be_read_is_counted_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [b'{"prompt": "a"}', b"", b'{"prompt": ', b'\xff\xfe{"prompt": "b"}', b"[1, 2]", b'{"nothing": 1}', b'{"messages": []}',
             b'{"messages": [{"role": "wizard", "content": "x"}]}', b'{"prompt_token_ids": [1.5], "token_ids": []}', b'{"text": "last"}']
    file.write_bytes(b"\n".join(lines))
    skipped = Skipped()
    assert [(e.line, e.prompt) for e in read_log(file, skipped)] == [(1, "a"), (10, "last")]
    assert skipped.count == 7
    assert [line.partition(":")[0] for line in skipped.shown] == ["line 3", "line 4", "line 5", "line 6", "line 7"]


def test_a_text_file_is_its_blocks(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("one\ntwo\n\n\nthree\n", encoding="utf-8")
    assert [(e.line, e.prompt) for e in read_log(file)] == [(1, "one\ntwo\n"), (5, "three\n")]


def test_an_endless_line_is_skipped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LONGEST", 50)
    file, skipped = tmp_path / "log.jsonl", Skipped()
    file.write_text(json.dumps({"prompt": "x" * 120}) + "\n" + json.dumps({"prompt": "a"}) + "\n")
    assert [(e.line, e.prompt) for e in read_log(file, skipped)] == [(2, "a")]
    assert skipped.count == 1 and skipped.shown[0].startswith("line 1: longer than")
    file = tmp_path / "log.txt"
    file.write_text(("y" * 30 + "\n") * 4)
    assert [(e.line, len(e.prompt or "")) for e in read_log(file)] == [(1, 62), (3, 62)]


def test_a_missing_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="does not exist"):
        list(read_log(tmp_path / "none.jsonl"))


def test_our_own_traces_give_back_their_texts(tmp_path: Path) -> None:
    file, sink = tmp_path / "trace.jsonl", None
    sink = Jsonl(file)
    with Engine(TableTarget(7, order=2), "ngram", 3, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        done = engine.generate_batch([[1, 2, 3], [4, 5]], Sampling(temperature=1.0, seed=5, max_tokens=12), prompt_class="c")
    sink.close()
    found = {e.prompt_ids: e for e in read_log(file)}
    for prompt, completion in zip([(1, 2, 3), (4, 5)], done, strict=True):
        assert found[prompt].answer_ids == completion.token_ids
        assert found[prompt].prompt_class == "c" and found[prompt].sampling["seed"] == completion.seed


def test_a_summary_trace_has_no_prompts_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    sink = Jsonl(file)
    with Engine(TableTarget(7), config=EngineConfig(trace="summary"), sinks=[sink]) as engine:
        engine.generate([1], Sampling(max_tokens=3, seed=1))
    sink.close()
    skipped = Skipped()
    assert list(read_log(file, skipped)) == [] and "trace level full" in skipped.shown[0]


def test_a_trace_without_ids_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    header, bare = {"event": "trace_started", "version": 1}, {k: v for k, v in STARTED.items() if k != "prompt_ids"}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in [header, bare, *GOOD[8:]]))
    with pytest.raises(Failure, match="recorded with --trace-level full"):
        check_log(file)
    for more in (STARTED, GOOD[0]):                     # a later run, or another log, in the same file
        file.write_text("".join(json.dumps(event) + "\n" for event in [header, bare, header, more]))
        assert check_log(file) == file


def test_why_an_event_is_not_readable_is_said_once(tmp_path: Path) -> None:
    file, skipped = tmp_path / "trace.jsonl", Skipped()
    file.write_text(json.dumps({**STARTED, "prompt_ids": None}) + "\n")
    assert not list(read_log(file, skipped))
    assert skipped.shown == ["line 1: a traced request without prompt ids; record with trace level full"]


TINY = Path(__file__).parents[2] / "src" / "draftproof" / "weights" / "target"
STARTED = {"event": "request_started", "request": "r", "prompt_ids": [1, 2], "sampling": {"temperature": 0.5, "max_tokens": 4}, "seed": 1}
GOOD = [
    {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "max_tokens": 9, "class": "c", "temperature": 0.7,
     "logprobs": [{"token_id": 4, "logprob": -0.5, "top": [{"token_id": 4, "logprob": -0.5}]}, {"token_id": 5, "logprob": -1.0}]},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, yes"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    {"request": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "metadata": {"prompt_class": "chat"},
                 "prediction": {"type": "content", "content": "yes"}},
     "response": {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop", "logprobs": {"content": [
         {"token": "yes", "logprob": -0.1, "top_logprobs": [{"token": "yes", "logprob": -0.1}]}]}}]}},
    {"request": {"prompt": [5, 6, 7], "max_tokens": 5}, "response": {"choices": [{"text": "b"}]}},
    {"text": "a b c d e f"}, {"prompt": "a", "completion": "b"}, STARTED,
    {"event": "prefill_done", "request": "r", "token": {"token": 5}},
    {"event": "round_done", "request": "r", "position": 3, "depth": 2, "tokens": [{"token": 6}]},
    {"event": "request_done", "request": "r", "finish": "stop"},
]
JUNK = [None, True, -1, 1.5, 1e999, 2**70, "", "x", "\ud800", "\x1b[31m", [], [[]], {}, {"a": 1}, [None], ["x"], [1, "x"], [2**40]]


def spoilt(value: Any, dice: random.Random) -> Any:
    """The same, with one thing in it replaced, dropped or doubled."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice(list(value))
        what = dice.random()
        if what < 0.15:
            return {k: v for k, v in value.items() if k != name}
        return {**value, name: spoilt(value[name], dice)} if what < 0.75 else {**value, name: dice.choice(JUNK)}
    if isinstance(value, list) and value and dice.random() < 0.7:
        at = dice.randrange(len(value))
        return [*value[:at], spoilt(value[at], dice), *value[at + 1:]]
    return dice.choice(JUNK)


def test_spoilt_records_are_skipped_and_never_raise(tmp_path: Path) -> None:
    """3,000 records, each with something wrong in it, all the way to stories; every one is read, or counted with its line."""
    dice, file, skipped = random.Random(1), tmp_path / "log.jsonl", Skipped()
    with file.open("w") as out:
        for _ in range(3000):
            out.write(json.dumps(spoilt(dice.choice(GOOD), dice)) + "\n")
    reader = Reader(partial(tokenizer_at, str(TINY)), vocab_size=4096)
    read = list(reader.stories(file, skipped))
    assert len(read) > 200 and skipped.count > 500 and len(skipped.shown) == logs.SHOWN
    assert all(line.startswith("line ") and line.isprintable() for line in skipped.shown)
    assert all(story.story.prompt_class.isprintable() for story in read if story.story.prompt_class)


def test_bytes_of_any_kind_never_raise(tmp_path: Path) -> None:
    dice, file, skipped = random.Random(2), tmp_path / "log.jsonl", Skipped()
    lines = []
    for _ in range(600):
        raw = bytearray(json.dumps(dice.choice(GOOD)).encode(dice.choice(["utf-8", "utf-8", "utf-16", "latin-1"])))
        for _ in range(dice.randrange(3)):
            at = dice.randrange(len(raw))
            raw[at:at + dice.randrange(9)] = dice.randbytes(dice.randrange(6)) or b"\0"
        lines.append(bytes(raw[:dice.randrange(len(raw))] if dice.random() < 0.2 else raw))
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([json.dumps(GOOD[0]).encode(), *lines, b"[" * 100_000]))
    found = list(read_log(file, skipped))
    assert found[0].prompt_ids == (1, 2, 3), "a byte order mark is no error"
    assert len(found) > 50 and skipped.count > 50


def test_requests_that_never_end_are_not_held_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "OPEN", 3)
    file, skipped = tmp_path / "trace.jsonl", Skipped()
    file.write_text("".join(json.dumps({**STARTED, "request": str(i)}) + "\n" for i in range(10)) + "".join(
        json.dumps({**GOOD[at], "request": "9"}) + "\n" for at in (8, 9, 10)))
    (found,) = read_log(file, skipped)
    assert found.answer_ids == (5, 6) and skipped.count == 7 and skipped.shown[0].startswith("line 1: a traced request without an end")


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """8 MB with bad lines among them, against 2 MB of the same: what Python holds at most is the same."""
    peaks = []
    for times in (1, 4):
        file, skipped = tmp_path / "log.jsonl", Skipped()
        with file.open("wb") as out:
            for i in range(2500 * times):
                out.write(json.dumps({"prompt_token_ids": [i % 50] * 150, "token_ids": [7, 8] * 60}).encode() + b"\n")
                if i % 3 == 0:
                    out.write(b'{"prompt_token_ids": [1, 2,\n' if i % 2 else b"\xff\xfe\n")
        tracemalloc.start()
        assert sum(1 for _ in Reader().stories(file, skipped)) == 2500 * times
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert skipped.count == -(-2500 * times // 3)
    assert peaks[1] < 1.2 * peaks[0] + 100_000


@pytest.mark.parametrize(("context", "finish", "limit"), [(None, "stop", 11), (8, "stop", 8), (3, "stop", 4), (None, "length", None)])
def test_options_and_limits_of_a_traced_request_come_back(context: int | None, finish: str, limit: int | None) -> None:
    options = Sampling(temperature=0.75, top_k=3, top_p=0.9, min_p=0.125, repetition_penalty=1.25, presence_penalty=0.5,
                       frequency_penalty=-0.5, logit_bias={3: -2.0}, bad_word_ids=((1, 2), (4,)), min_tokens=2, max_tokens=9, stop=("x",),
                       stop_token_ids=(5,), ignore_eos=True, logprobs=2)
    told = {**json_options(options), "seed": 6, "sample": 2}
    exchange = Exchange(1, prompt_ids=(1, 2), answer_ids=(3, 4), sampling=json.loads(json.dumps(told)), max_tokens=9, finish_reason=finish)
    read = Reader(context=context, eos_ids=(0,)).story(exchange, Skipped())
    assert read is not None and read.known and not read.retokenised and read.story.sampling == options
    assert (read.story.seed, read.story.sample, read.story.limit, read.story.end_ids) == (6, 2, limit, {5})


@pytest.mark.parametrize(("prompt", "answer", "beyond"), [((1, 8), (2,), None), ((1, 9), (2,), 9), ((1,), (2, 11), 11), ((12,), (9,), 12)])
def test_ids_that_the_target_does_not_have_are_told(prompt: tuple[int, ...], answer: tuple[int, ...], beyond: int | None) -> None:
    skipped = Skipped()
    read = Reader(vocab_size=9).story(Exchange(1, prompt_ids=prompt, answer_ids=answer), skipped)
    assert (read is None) == (beyond is not None)
    assert skipped.shown == ([] if beyond is None else [f"line 1: token id {beyond}; the target's ids are below 9"])


@pytest.mark.parametrize("content", ["yes, yes", [{"type": "text", "text": "yes, "}, {"type": "text", "text": "yes"}]])
def test_a_prediction_comes_with_its_request(content: Any) -> None:
    tokenizer = tokenizer_at(str(TINY))
    assert tokenizer is not None
    exchange = Exchange(1, prompt_ids=(1, 2), answer_ids=(3, 4), sampling={"prediction": {"type": "content", "content": content}})
    read = Reader(partial(tokenizer_at, str(TINY))).story(exchange, Skipped())
    assert read is not None and read.story.sampling.prediction == tuple(tokenizer.encode_plain("yes, yes"))
