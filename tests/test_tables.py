"""Tables on terminals of any width: no value is ever cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftproof.commands import console

WORDS = "class", "temper\xadature", "drafter"
HEAD = [*WORDS, "tokens/s (spread)", "speed-up (interval)", "decoding", "acceptance length", "identical to off"]
ROWS = [["data/repetition", "0.8", "off", "494 (327–548)", "", "", "1.00", ""],
        ["data/repetition", "0.8", "eagle3", "994 (827–1048)", "1.62× (1.45–1.87)", "1.66×", "2.53", "yes (1472 tokens)"],
        ["all [x]", "0", "ngram", "1494 (1327–1548)", "3.62× (1.45–3.87)", "4.66×", "3.53", "NO (1472 tokens)"]]


@pytest.mark.parametrize("width", [40, 80, 110, 160])
def test_nothing_is_cut_off(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    terminal = Console(file=file, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "console", lambda error=False, wraps=True: terminal)
    title = "a title that is quite long, longer than some of the terminals that there are, for it explains"
    console.print_rows(title, HEAD, ROWS, WORDS, 2)
    said = file.getvalue()
    assert "…" not in said
    kept = {value if width > 100 else value.partition(" (")[0] for row in ROWS for value in row}
    assert all(value in said for value in kept)
    assert ("in brackets" in capsys.readouterr().err) == (width <= 100)
    assert ("┃" in said) == (width > 150) and (width < 80 or max(map(len, said.splitlines())) <= width)


def test_what_is_no_terminal_gets_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_rows("title", HEAD, ROWS, WORDS, 2)
    said = capsys.readouterr()
    assert all(value in said.out for row in ROWS for value in row) and "temperature" in said.out and not said.err
    console.print_rows("title", HEAD, [], WORDS)
    assert "speed-up (interval)" in capsys.readouterr().out
