"""How pictures look: the page's own colours, one sheet for every chart, PNG and SVG. Needs matplotlib, the extra `report`.

Text of a model is text: no markup of matplotlib's is read in it, and what could steer a reader's eye or terminal is named.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from .bundle import PAGE
from .terminal import fit

THEMES = {"light": ":root {", "dark": ':root[data-theme="dark"] {'}
WIDTH = 10.0                            # inches; 1600 pixels of a PNG, twice the width of a README's column
DPI = 160
MISSING = "charts need matplotlib; install draftproof[report]"
SERIES = ("score", "draft", "verify", "other", "prefill", "rejected", "ink")
"""Colours of several lines, in this order; with MARKERS, so that colour is never the only difference."""
MARKERS = "osD^vPX"
FALLBACKS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans SC", "WenQuanYi Zen Hei", "Hiragino Sans", "PingFang SC", "Microsoft YaHei",
             "Malgun Gothic", "Noto Sans", "Noto Sans Hebrew", "Noto Sans Arabic", "Noto Emoji", "Segoe UI Symbol")

Colours = Mapping[str, str]


@cache
def palette(theme: str) -> Colours:
    """The page's colours by name (accepted, rejected, draft, score, card, ink, …) in theme light or dark."""
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    block = style.partition(THEMES[theme])[2].partition("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


@contextmanager
def sheet(theme: str = "light") -> Iterator[Colours]:
    """Draw and save inside of it. Raises ImportError, with what to do, where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise ImportError(MISSING) from error
    colours = palette(theme)
    ink, quiet, rule, card = (colours[name] for name in ("ink", "quiet", "rule", "card"))
    installed = set(fontManager.get_font_names())
    with rc_context({
        "font.family": ["DejaVu Sans", *(name for name in FALLBACKS if name in installed)], "font.size": 11.0,
        "text.parse_math": False, "text.usetex": False, "text.color": ink, "svg.fonttype": "none", "svg.hashsalt": "draftproof",
        "figure.facecolor": card, "savefig.facecolor": card, "axes.facecolor": card, "axes.edgecolor": quiet, "axes.labelcolor": ink,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titleweight": "bold",
        "axes.titlesize": 12.0, "axes.titlecolor": ink, "axes.axisbelow": True, "axes.unicode_minus": True, "grid.color": rule,
        "xtick.color": ink, "ytick.color": ink, "xtick.labelsize": 10.0, "ytick.labelsize": 10.0, "legend.frameon": False,
        "legend.fontsize": 10.0, "lines.linewidth": 2.0, "lines.markersize": 6.0, "hatch.linewidth": 1.0, "patch.linewidth": 1.0,
    }), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")      # a box stands for it in a PNG, the text itself in an SVG
        yield colours


def figure(height: float, width: float = WIDTH) -> Any:
    """An empty matplotlib Figure, inches; inside `sheet`."""
    from matplotlib.figure import Figure

    empty: Any = Figure(figsize=(width, height), layout="constrained")
    empty.get_layout_engine().set(w_pad=0.12, h_pad=0.12, hspace=0.06, wspace=0.04)
    return empty


def save(drawn: Any, file: Path | IO[bytes], form: str) -> None:
    """Write a Figure as "png" or "svg"; inside `sheet`. The same figure gives the same bytes."""
    drawn.savefig(file, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else {"Software": None})


def looks(colours: Colours, count: int) -> list[dict[str, Any]]:
    """Colour and marker of so many lines."""
    return [{"color": colours[SERIES[i % len(SERIES)]], "marker": MARKERS[i % len(MARKERS)]} for i in range(count)]


def title(axes: Any, text: str, note: str, colours: Colours) -> None:
    """What is shown, and beneath it, quietly, of what."""
    axes.set_title(text, pad=8 + 16 * len(note.splitlines()))
    if note:
        axes.annotate(note, (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", color=colours["quiet"],
                      fontsize=9.5)


def words(text: str, limit: int = 24) -> str:
    """A short label: spaces at its ends, line breaks and characters without a shape are visible."""
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" ")) if inner else len(text)
    return fit("␣" * left + inner + "␣" * (len(text) - left - len(inner)), limit) or "∅"


def tick(value: float, _: int = 0) -> str:
    """Seconds on an axis."""
    return f"{value:g} s" if abs(value) >= 1 else f"{1e3 * value:g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:g} µs" if value else "0"


def seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.0f} µs"
