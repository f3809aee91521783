"""The file of the target's answers: only answers of ours to this log are taken from it, and nothing else in it is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.audition.logs import Exchange, Skipped
from draftproof.engine.engine import Engine
from draftproof.errors import Failure
from draftproof.models.fake import TableTarget
from draftproof.train import answers, corpus
from draftproof.train.corpus import Text, regenerated

V = 9


def asked(count: int, shift: int = 0) -> list[Exchange]:
    return [Exchange(i + 1, prompt_ids=((i + shift) % V, 1, i % 4), sampling={"temperature": 0.0}) for i in range(count)]


def made(file: Path, exchanges: list[Exchange], length: int = 10, **more: object) -> list[Text]:
    with Engine(TableTarget(V, order=1)) as engine:
        return regenerated(exchanges, engine, length, 1, file, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("foreign", [b"my notes\n", b"my notes", b'{"event": "trace_started"}\n', b'[1, 2]\n', b"\n\n",
                                     b'{"index": 0, "ids": ["a"], "answer_from": 0, "prompt_class": null}\n',
                                     b'{"index": 0, "ids": [1], "answer_from": 4, "prompt_class": null}\n'])
def test_a_file_of_something_else_is_refused_as_it_is(foreign: bytes, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(foreign)
    with pytest.raises(Failure, match=r"notes\.txt, line 1: .*expected answers"):
        made(file, asked(3))
    assert file.read_bytes() == foreign


def test_good_answers_behind_a_damaged_line_are_not_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    whole = made(file, asked(12))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:5], b'{"index": 4, "ids": [1,\n', *lines[6:]]))
    damaged = file.read_bytes()
    with pytest.raises(Failure, match="line 6"):
        made(file, asked(12))
    assert file.read_bytes() == damaged
    file.write_bytes(b"".join([*lines[:5], *lines[6:]]))              # as the message says
    assert made(file, asked(12)) == whole and len(file.read_bytes().splitlines()) == 13


def test_answers_of_another_log_target_or_length_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "answers.jsonl"
    made(file, asked(6))
    with pytest.raises(Failure, match="to another prompt than line 1 .*--answers"):
        made(file, asked(6, shift=1))
    with pytest.raises(Failure, match="length was 10, is 12"):
        made(file, asked(6), length=12)
    monkeypatch.setattr(corpus, "identity", lambda name: "another")
    with pytest.raises(Failure, match="target was 'table.*', is 'another'"):
        made(file, asked(6))
    monkeypatch.undo()
    grown = made(file, asked(9))
    assert len(grown) == 9 and made(file, asked(4)) == grown[:4]      # a log may grow, or be cut


def test_a_file_of_an_earlier_version_is_taken_where_its_prompts_are_the_log_s(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    whole = made(file, asked(6))
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:5]))
    assert made(file, asked(6)) == whole
    with pytest.raises(Failure, match="another prompt"):
        made(file, asked(6, shift=1))


def test_an_answer_that_two_runs_wrote_is_taken_once_and_a_run_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "answers.jsonl"
    whole = made(file, asked(6))
    with file.open("ab") as stream:
        stream.write(json.dumps({"index": 2, "ids": [2, 1, 2, 0], "answer_from": 3, "prompt_class": None}).encode() + b"\n")
    said: list[str] = []
    assert made(file, asked(6), say=said.append) == whole and not said
    with file.open("ab") as other:
        assert answers.lock(other)
        monkeypatch.setattr(answers, "wait", lambda stream: other.close())       # its end
        assert made(file, asked(6), say=said.append) == whole and "waiting" in said[0]


def test_lines_that_the_target_cannot_take_are_left_out_and_told(tmp_path: Path) -> None:
    skipped = Skipped()
    bad = [Exchange(7, prompt_ids=(1, 900)), Exchange(8, prompt_ids=(1, 2), sampling={"temperature": "warm"}), Exchange(9, prompt_ids=()),
           Exchange(10, prompt="text without a tokenizer"), Exchange(11, prompt_ids=(1, 2), sampling={"stop_token_ids": [99]})]
    good = Exchange(12, prompt_ids=(3, 3), sampling={"temperature": 0.0, "top_k": -1, "logit_bias": {"5": -100.0}, "model": "x"})
    texts = made(tmp_path / "answers.jsonl", [*asked(2), *bad, good], skipped=skipped)
    assert len(texts) == 3 and skipped.count == 5 and "line 7: token id 900" in skipped.shown[0] and 5 not in texts[2].ids[2:]
