"""Logs of every form give the same exchanges; what cannot be read is counted with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.audition import logs
from draftproof.audition.logs import Exchange, Skipped, read_log
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
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
