"""Rounds as lines of text: glyphs that read without colour, 80 columns, nothing that could steer a terminal.

    ■ accepted   × rejected   · discarded   → the target's token after a rejection   + after all guesses stood   o no guess
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

GLYPHS = {"accepted": "■", "rejected": "×", "discarded": "·", "correction": "→", "bonus": "+", "plain": "o", "prefill": "o", "more": "…"}
COLOURS = {"accepted": "34", "rejected": "31", "discarded": "2", "correction": "33", "bonus": "36", "plain": "0",
           "prefill": "35", "more": "0"}
MOST_GUESSES = 12

Words = Callable[[int], str]


def heading(width: int = 80) -> str:
    return f"{'round':>6} {'guesses':<{MOST_GUESSES + 2}} {'stood':>6} {'draft':>7} {'score':>7}  text"[:width]


def lines(event: Any, width: int = 80, colour: bool = False) -> list[str]:
    """What a trace event (of trace/events.py) says on a terminal: none, one or two lines."""
    kind = event.event
    if kind == "request_started":
        name = f" · {event.prompt_class}" if event.prompt_class else ""
        title = f"request {event.request}{name} · {event.prompt_tokens} prompt tokens · seed {event.seed} · rule {event.rule}"
        return [fit(title, width), heading(width)]
    if kind == "prefill_done":
        return [row("prompt", ["prefill"], "", "", milliseconds(event.seconds), event.text, width, colour)]
    if kind == "round_done":
        return [round_line(event, width, colour)]
    if kind == "request_done":
        return [fit(f"done ({event.finish}): {summary(event.completion_tokens, event.metrics)}", width)]
    return []


def round_line(event: Any, width: int = 80, colour: bool = False) -> str:
    nodes, own = event.nodes, event.tokens[-1].role if event.tokens else ""
    kinds = [node.fate for node in nodes[:MOST_GUESSES]] + ["more"] * (len(nodes) > MOST_GUESSES)
    kinds += [own] * (own not in ("", "accepted"))
    stood = f"{sum(node.fate == 'accepted' for node in nodes)}/{len(nodes)}" if nodes else "–"
    times = event.times
    return row(str(event.round), kinds, stood, milliseconds(times.draft_s), milliseconds(times.score_s), event.text, width, colour)


def row(name: str, kinds: list[str], stood: str, draft: str, score: str, text: str, width: int, colour: bool) -> str:
    """A line that fits, whatever the width and however long its figures; its glyphs are painted last, as paint takes no columns."""
    glyphs = "".join(GLYPHS[kind] for kind in kinds)
    line = fit(f"{name:>6} {glyphs:<{MOST_GUESSES + 2}} {stood:>6} {draft:>7} {score:>7}  {text}", width)
    begin = max(6, len(name)) + 1
    places = line[begin:begin + len(glyphs)]
    painted = "".join(paint(seen, kind, colour) if seen == GLYPHS[kind] else seen for seen, kind in zip(places, kinds, strict=False))
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
