"""Rounds as lines of text: glyphs that read without colour, 80 columns, nothing that could steer a terminal."""

from __future__ import annotations

import unicodedata
from typing import Any

GLYPHS = {"accepted": "■", "rejected": "×", "discarded": "·", "correction": "→", "bonus": "+", "plain": "o", "prefill": "o", "more": "…"}
COLOURS = {"accepted": "34", "rejected": "31", "discarded": "2", "correction": "33", "bonus": "36", "plain": "0",
           "prefill": "35", "more": "0"}
LEGEND = "■ accepted  × rejected  · discarded  → correction  + bonus  o no guess  … more"
MOST_GUESSES, NAME = 12, 7


class Screen:
    """What a trace's events say, one after the other. Once two requests run at a time, every line says whose it is."""

    def __init__(self, width: int = 80, colour: bool = False) -> None:
        self._width, self._colour = width, colour
        self._open: set[str] = set()
        self._begun = self._mixed = self._headed = False

    def lines(self, event: Any) -> list[str]:
        """None or a few lines for an event of trace/events.py."""
        kind = event.event
        if kind == "trace_started":
            self._open.clear()                            # another engine, whose names begin anew
        if kind == "request_started":
            return self._start(event)
        if kind == "prefill_done":
            return [*self._heading(), self._row(event, "prompt", ["prefill"], "", "", milliseconds(event.seconds))]
        if kind == "round_done":
            return [*self._heading(), self._round(event)]
        if kind == "request_done":
            self._open.discard(event.request)
            return [fit(f"done {event.request} ({event.finish}): {summary(event.completion_tokens, event.metrics)}", self._width)]
        return []

    def _start(self, event: Any) -> list[str]:
        self._open.add(event.request)
        self._mixed = self._mixed or len(self._open) > 1
        legend = [] if self._begun else [LEGEND]
        self._begun, self._headed = True, False
        name = f" · {event.prompt_class}" if event.prompt_class else ""
        title = f"request {event.request}{name} · {event.prompt_tokens} prompt tokens · seed {event.seed} · rule {event.rule}"
        return [fit(line, self._width) for line in (*legend, title)]

    def _heading(self) -> list[str]:
        """Above the first row behind the last title."""
        if self._headed:
            return []
        self._headed = True
        heads = f"{self._whose('request')}{'round':>6} {'guesses':<{MOST_GUESSES + 2}} {'stood':>6} {'draft':>7} {'score':>7}  text"
        return [fit(heads, self._width)]

    def _whose(self, request: str) -> str:
        """The column of the request's name, where there is one."""
        shown = fit(request, NAME)
        return shown + " " * (NAME + 1 - columns(shown)) if self._mixed else ""

    def _round(self, event: Any) -> str:
        nodes, own = event.nodes, event.tokens[-1].role if event.tokens else ""
        kinds = [node.fate for node in nodes[:MOST_GUESSES]] + ["more"] * (len(nodes) > MOST_GUESSES)
        kinds += [own] * (own not in ("", "accepted"))
        stood = f"{sum(node.fate == 'accepted' for node in nodes)}/{len(nodes)}" if nodes else "–"
        return self._row(event, str(event.round), kinds, stood, milliseconds(event.times.draft_s), milliseconds(event.times.score_s))

    def _row(self, event: Any, name: str, kinds: list[str], stood: str, draft: str, score: str) -> str:
        """A line that fits, whatever the width and however long its figures; its glyphs are painted last, as paint takes no columns."""
        glyphs = "".join(GLYPHS[kind] for kind in kinds)
        front = f"{self._whose(event.request)}{name:>6} "
        line = fit(f"{front}{glyphs:<{MOST_GUESSES + 2}} {stood:>6} {draft:>7} {score:>7}  {event.text}", self._width)
        begin = len(front)
        places = line[begin:begin + len(glyphs)]
        seen = zip(places, kinds, strict=False)
        painted = "".join(paint(one, kind, self._colour) if one == GLYPHS[kind] else one for one, kind in seen)
        return line[:begin] + painted + line[begin + len(glyphs):]


def summary(tokens: int, metrics: Any) -> str:
    parts = [f"{tokens} tokens"]
    if isinstance(metrics.get("tokens_per_s"), float):
        parts.append(f"{metrics['tokens_per_s']:.1f} tokens/s")
    if isinstance(metrics.get("acceptance_length"), float):
        parts.append(f"{metrics['acceptance_length']:.2f} a round")
    if metrics.get("drafted") is not None:
        parts.append(f"{metrics.get('accepted') or 0} of {metrics['drafted']} stood")
    return " · ".join(parts)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}ms" if seconds < 10 else f"{seconds:.0f}s"


def paint(text: str, kind: str, colour: bool) -> str:
    return f"\x1b[{COLOURS[kind]}m{text}\x1b[0m" if colour else text


def fit(text: str, width: int) -> str:
    """As much of `text` as `width` columns hold, with every character visible and none that a terminal would obey."""
    out, used = [], 0
    for char in text[:width + 1]:
        shown = visible(char)
        used += columns(shown)
        out.append(shown)
    if used <= width and len(text) <= width + 1:
        return "".join(out)
    while out and used > width - 1:
        used -= columns(out.pop())
    return "".join(out) + ("…" if width else "")


def visible(char: str) -> str:
    if char == "\n":
        return "↵"
    if char == "\t":
        return "⇥"
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and char != "\u200d":
        return f"⟨{ord(char):04X}⟩"
    return char


def columns(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) or c == "\u200d" else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
