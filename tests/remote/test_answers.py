"""Files of other engines' answers: where their lines end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.errors import Failure
from draftproof.remote.answers import is_answer, read

TEXT = "a\u2028b\u2029c\x85d"                 # JSON lets all of them stand as they are


def record(name: str) -> str:
    choice = {"index": 0, "text": TEXT, "finish_reason": "stop"}
    return json.dumps({"id": name, "choices": [choice], "usage": {"completion_tokens": 4}}, ensure_ascii=False)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("before", ["", "data: "])
def test_lines_end_at_line_feeds_only(before: str, end: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes("".join(f"{before}{record(name)}{end}{end}" for name in "xy").encode())
    found = read(file).found
    assert [(answer.line, answer.name, answer.pieces[0].text) for answer in found] == [(1, "x", TEXT), (3, "y", TEXT)]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_cut_short_at_the_end_is_called_so(end: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(f"{record('x')}\n{record('y')[:30]}{end}".encode())
    with pytest.raises(Failure, match="line 2: not JSON: .*cut short"):
        read(file)


@pytest.mark.parametrize(("line", "words"), [
    (json.dumps({"content": "x", "stop": True, "tokens": [float("inf")]}), "an answer of another form"),
    (json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": float("inf")}}), "an answer of another form"),
    ("data: " + "[" * 200_000, "not JSON"),
])
def test_numbers_without_end_and_lists_without_end_are_told(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(f"{record('x')}\n{line}\n")
    with pytest.raises(Failure, match=f"line 2: {words}"):
        read(file)
    file.write_text(line.removeprefix("data: ")[:200_000])
    assert is_answer(file) is (words != "not JSON")


def test_a_mark_before_the_first_line_and_an_error_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({**json.loads(record("x")), "error": None}).encode())
    assert is_answer(file)
    found = read(file)
    assert [answer.name for answer in found.found] == ["x"] and not found.left_out
