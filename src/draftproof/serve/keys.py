"""How keys are written down: by lines, the same for the server that takes them and the command that sends one."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import OptionError

MARKS = ("admin", "trace")


class Words(NamedTuple):
    """One line: `[NAME] KEY [admin] [trace]`."""

    name: str | None
    key: str
    marks: frozenset[str]


def lines_of(text: str) -> list[str]:
    """Those that hold a key: not empty, and no comment."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def words_of(line: str, place: str) -> Words:
    """Raises OptionError that begins with `place`."""
    words, marks = line.split(), set()
    while len(words) > 1 and words[-1] in MARKS:
        marks.add(words.pop())
    if len(words) > 2 or len(words[-1]) < 8:
        raise OptionError(f"{place}: expected [NAME] KEY [admin] [trace], the key of at least 8 characters without spaces")
    return Words(words[0] if len(words) == 2 else None, checked(words[-1], place), frozenset(marks))


def checked(key: str, place: str) -> str:
    """Raises OptionError for a key that no header carries."""
    if not (key.isascii() and key.isprintable()):
        raise OptionError(f"{place}: the key holds characters that an HTTP header does not carry; expected printable ASCII: choose another")
    return key
