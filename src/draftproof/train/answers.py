"""The file that keeps the target's answers: whose they are, then one a line, added as they are made.

    {"answers_of": {"target": …, "length": …}}
    {"index": 0, "ids": [...], "answer_from": 7, "prompt_class": null}

`index` counts the exchanges of the log from 0. A file without the first line, as earlier versions wrote it, is read too: whether its
answers are to this log is seen by their prompts; which target wrote them is not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import Failure
from .place import lock, wait, written

Record = dict[str, Any]
BEGINNINGS = (b'{"index": ', b'{"answers_of": ')
FORM = 'expected answers as draftproof train keeps them, {"index": …, "ids": […], "answer_from": …, "prompt_class": …} a line'


class Answers:
    """An open file of answers, this process's alone. made: by index, those it held when it was opened."""

    def __init__(self, file: Path, stream: IO[bytes], whose: Mapping[str, Any]) -> None:
        """Raises Failure, changing nothing, where the file is another's or damaged. A last line that a kill cut short is cut off."""
        self.file, self._stream = file, stream
        self.made, whole = _read(file, stream, whose)
        stream.truncate(whole)
        if not whole:
            self._write({"answers_of": dict(whose)})
            self.flush()

    def add(self, record: Record) -> None:
        self._write(record)

    def flush(self) -> None:
        with written(self.file):
            self._stream.flush()

    def _write(self, record: Record) -> None:
        with written(self.file):
            self._stream.write(json.dumps(record).encode() + b"\n")


@contextmanager
def opened(file: Path, whose: Mapping[str, Any], say: Callable[[str], None]) -> Iterator[Answers]:
    """The file for this process alone: where another one is answering into it, its end is waited for."""
    with written(file):
        stream = file.open("a+b")
    with stream:
        if not lock(stream):
            say(f"another run is answering into {file}; waiting for it")
            wait(stream)
        yield Answers(file, stream, whose)


def read(file: Path) -> dict[int, Record]:
    """By index, the answers that another process of the team has made."""
    with file.open("rb") as stream:
        return _read(file, stream, {})[0]


def _read(file: Path, stream: IO[bytes], whose: Mapping[str, Any]) -> tuple[dict[int, Record], int]:
    """The answers, and how many bytes of whole lines hold them."""
    made: dict[int, Record] = {}
    whole = 0
    stream.seek(0)
    for number, line in enumerate(stream, 1):
        if not line.endswith(b"\n") and any(line.startswith(begin) or begin.startswith(line) for begin in BEGINNINGS):
            break                                            # cut short: it is written again
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if number == 1 and isinstance(record, dict) and isinstance(record.get("answers_of"), dict):
            _require(file, record["answers_of"], whose)
        elif _answer(record):
            made.setdefault(record["index"], record)         # two runs at once may have written one twice
        else:
            found = line[:60].decode(errors="replace").strip()
            raise Failure(f"{file}, line {number}: {found!r}; {FORM}. Name another file, or delete that line")
        whole += len(line)
    return made, whole


def _answer(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("ids"), list) or "prompt_class" not in record:
        return False
    numbers = [record.get("index"), record.get("answer_from"), *record["ids"]]
    return all(isinstance(n, int) and n >= 0 for n in numbers) and record["answer_from"] <= len(record["ids"])


def _require(file: Path, found: Mapping[str, Any], whose: Mapping[str, Any]) -> None:
    differing = [f"{name} was {found.get(name)!r}, is {value!r}" for name, value in whose.items() if found.get(name) != value]
    if differing:
        raise Failure(f"{file} holds answers of another run ({'; '.join(differing)}); name another file with --answers, "
                      "or delete this one to have all prompts answered again")
