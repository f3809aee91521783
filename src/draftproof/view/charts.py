"""Charts over many rounds: what was accepted, whether it pays, two traces side by side.

Each function draws the numbers of `trace.figures` on a matplotlib figure, inside `style.sheet`. None of them counts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .style import Colours, looks, title, words

MOST_GROUPS, MOST_LINES, MOST_POSITIONS = 8, 5, 16
ROOMY = 12              # bars above which a number of any size finds room in half a figure
METRICS = {"tokens_per_s": "tokens per second", "ttft_s": "time to first token", "tpot_s": "time per token after it",
           "acceptance_length": "tokens per round", "draft_utilisation": "guesses that stood",
           "passes_per_token": "target passes per token"}
BETTER = {1: "▲ better", -1: "▼ worse", 0: "= equal"}


def acceptance(figure: Any, colours: Colours, data: Any) -> None:
    """`figures.Acceptance`: by position with intervals, how many guesses stood, by class, by drafter."""
    (by_position, lengths), (classes, drafters) = figure.subplots(2, 2, height_ratios=(3, 2))
    positions(by_position, colours, data.positions)
    histogram(lengths, colours, data.lengths)
    groups(classes, colours, data.classes, "By class of prompts", "verify")
    groups(drafters, colours, data.drafters, "By drafter", "draft")


def positions(axes: Any, colours: Colours, shares: Sequence[Any]) -> None:
    shares = shares[:MOST_POSITIONS]
    places = range(1, len(shares) + 1)
    values = [share.value for share in shares]
    axes.bar(places, values, width=0.66, color=colours["score"])
    whiskers(axes, colours, shares, places)
    for place, share in zip(places, shares, strict=True):
        above(axes, f"{100 * share.value:.0f}%", place, share.interval[1], len(shares))
    percent(axes.yaxis)
    axes.set(xlabel="position of the guess in its round", ylim=(0, 1.1), xticks=list(places) or [1], xlim=(0.4, max(len(shares), 1) + 0.6))
    title(axes, "A guess stands, if its round got there", "share of judged guesses, with Wilson’s 95 % interval", colours)


def whiskers(axes: Any, colours: Colours, shares: Sequence[Any], places: Sequence[float], across: bool = False) -> None:
    """95 % intervals at `places`, upright or lying."""
    ends = [[max(0.0, share.value - share.interval[0]) for share in shares],
            [max(0.0, share.interval[1] - share.value) for share in shares]]
    values = [share.value for share in shares]
    kind = {"fmt": "none", "ecolor": colours["ink"], "elinewidth": 1.4, "capsize": 4}
    if across:
        axes.errorbar(values, places, xerr=ends, **kind)
    else:
        axes.errorbar(places, values, yerr=ends, **kind)


def above(axes: Any, text: str, x: float, y: float, bars: int) -> None:
    """Above one of so many bars, small enough that the words beside it stay apart."""
    axes.annotate(text, (x, y), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=min(9.5, 9.5 * ROOMY / bars))


def percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(True)


def histogram(axes: Any, colours: Colours, lengths: Sequence[int]) -> None:
    total = sum(lengths)
    places = range(len(lengths))
    axes.bar(places, lengths, width=0.78, color=colours["accepted-back"], edgecolor=colours["accepted"], linewidth=1.4)
    for place, count in zip(places, lengths, strict=True):
        above(axes, f"{count:,}", place, count, len(lengths))
    axes.grid(True, axis="y")
    axes.set(xlabel="guesses of a round that stood", ylabel="rounds", xticks=list(places) or [0], ylim=(0, 1.12 * max(lengths, default=1)))
    mean = sum(place * count for place, count in zip(places, lengths, strict=True)) / total if total else 0.0
    title(axes, "How many stood at once", f"{total:,} rounds with a guess, {mean:.2f} accepted on average", colours)


def groups(axes: Any, colours: Colours, shares: Sequence[Any], heading: str, colour: str) -> None:
    shown = shares[:MOST_GROUPS]
    places = list(range(len(shown)))
    axes.barh(places, [share.value for share in shown], height=0.62, color=colours[colour])
    whiskers(axes, colours, shown, places, across=True)
    for place, share in zip(places, shown, strict=True):
        axes.annotate(f"{100 * share.value:.0f}% of {share.whole:,}", (share.interval[1], place), xytext=(5, 0), textcoords="offset points",
                      va="center", fontsize=9.5)
    percent(axes.xaxis)
    widest = max([0.2, *(share.interval[1] for share in shown)])
    axes.set(yticks=places, xlim=(0, 1.4 * widest), ylim=(max(len(shown), 2) - 0.4, -0.6))
    axes.set_yticklabels([words(share.name, 18) for share in shown])
    rest = len(shares) - len(shown)
    title(axes, heading, f"guesses that stood, of all{f'; {rest} smaller groups are left out' if rest else ''}", colours)


def pays(figure: Any, colours: Colours, data: Sequence[Any]) -> None:
    """`figures.Payoff` of each drafter: predicted and measured speed-up against depth, and the line where nothing is gained."""
    axes = figure.subplots()
    shown = data[:MOST_LINES]
    for number, (one, look) in enumerate(zip(shown, looks(colours, len(shown)), strict=True)):
        depths, gains = zip(*one.predicted, strict=True)
        axes.plot(depths, gains, color=look["color"], linestyle="--", linewidth=1.6, zorder=2)
        aside = 0.14 * (number - (len(shown) - 1) / 2)              # so that drafters of one depth do not hide each other
        at, measured = [speed.depth + aside for speed in one.measured], [speed.gain for speed in one.measured]
        most = max((speed.rounds for speed in one.measured), default=1)
        size = [40 + 160 * speed.rounds / most for speed in one.measured]
        axes.errorbar(at, measured, yerr=[speed.half for speed in one.measured], fmt="none", ecolor=look["color"], elinewidth=1.4, zorder=2)
        axes.scatter(at, measured, s=size, edgecolor=colours["ink"], linewidth=0.8, zorder=3, **look,
                     label=f"{words(one.drafter, 28)}: {verdict(one)}")
    deepest = max((depth for one in shown for depth, *_ in [*one.predicted, *one.measured]), default=1)
    top = max((gain for one in shown for _, gain, *_ in [*one.predicted, *one.measured]), default=1.0)
    axes.axhspan(0, 1, color=colours["rejected-back"], alpha=0.45, zorder=0, linewidth=0)
    axes.axhline(1, color=colours["correction"], linewidth=1.8, zorder=1)
    step = next(2 ** power for power in range(32) if deepest < 16 * 2 ** power)           # at most 16 ticks
    axes.annotate("break-even: plain decoding", (deepest + 0.4, 1), xytext=(0, -14), textcoords="offset points", ha="right",
                  color=colours["correction"], fontsize=10)
    axes.grid(True, axis="y")
    axes.set(xlim=(-0.2, deepest + 0.5), ylim=(0, max(1.5, (1.2 if len(shown) < 3 else 1.3) * top)), xticks=range(0, deepest + 1, step),
             xlabel="depth: tokens guessed per round", ylabel="speed-up over plain decoding")
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.legend(loc="upper left", ncols=1 if len(shown) < 3 else 2)
    rest = len(data) - len(shown)
    left_out = f"; {rest} drafters with fewer rounds are left out" if rest else ""
    base = f"plain decoding {1e3 * shown[0].plain.seconds:.2f} ms a token, {shown[0].plain.how}" if shown else "nothing was guessed"
    key = "points: measured rounds of that depth (larger: more of them), 95 %; dashed: predicted from acceptance and costs"
    title(axes, "Does guessing pay, and how deep", f"{key}\n{base}{left_out}", colours)


def verdict(one: Any) -> str:
    depth, gain = one.best
    return f"best depth {depth}, {gain:.2f}× predicted" if depth else "best depth 0: it does not pay"


def compare(figure: Any, colours: Colours, data: Any) -> None:
    """(name a, name b, `figures.Change`s, shares by position of a, of b)."""
    one, two, changes, ours, theirs = data
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    ratios(left, colours, changes)
    title(left, "B against A", f"A: {words(one, 22)} · B: {words(two, 22)}", colours)
    for shares, name, colour, marker, shift in ((ours, "A", "score", "o", -0.08), (theirs, "B", "draft", "s", 0.08)):
        kept = shares[:MOST_POSITIONS]
        places = [place + shift for place in range(1, len(kept) + 1)]
        whiskers(right, {**colours, "ink": colours[colour]}, kept, places)
        right.plot(places, [share.value for share in kept], color=colours[colour], marker=marker, label=name)
    percent(right.yaxis)
    right.set(ylim=(0, 1.05), xlabel="position of the guess in its round",
              xticks=range(1, min(max(len(ours), len(theirs), 1), MOST_POSITIONS) + 1))
    right.legend(loc="lower left")
    title(right, "Acceptance by position", "of the rounds that got there, 95 % intervals", colours)


def ratios(axes: Any, colours: Colours, changes: Sequence[Any]) -> None:
    places = range(len(changes))
    for place, change in zip(places, changes, strict=True):
        colour = colours[{1: "verify", -1: "rejected", 0: "plain"}[change.better]]
        axes.barh(place, change.ratio - 1, left=1, height=0.6, color=colour, hatch="" if change.better >= 0 else "///",
                  edgecolor=colours["card"])
        side = 1 if change.ratio >= 1 else -1
        axes.annotate(f"{change.ratio:.2f}× {BETTER[change.better]}", (change.ratio, place), xytext=(5 * side, 0), va="center",
                      textcoords="offset points", ha="left" if side > 0 else "right", fontsize=9.5)
    widest = 1.6 * max([1.2, *(max(change.ratio, 1 / change.ratio) for change in changes)]) ** 1.6        # with room for the labels
    axes.set_xscale("log", base=2)
    axes.xaxis.get_major_locator().set_params(numticks=6)
    axes.axvline(1, color=colours["ink"], linewidth=1.2)
    axes.set(xlim=(1 / widest, widest), ylim=(len(changes) - 0.4, -0.6), yticks=list(places), xlabel="B / A")
    axes.xaxis.set_major_formatter("{x:.3g}×")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticklabels([f"{METRICS[change.metric]}\n{change.a:.3g} → {change.b:.3g}" for change in changes])
