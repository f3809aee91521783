"""Charts of one request in time: where its milliseconds went, what each round did, how its text grew.

The numbers are a `trace.figures.Run` and, where the trace has it, the same request without guesses.
"""

from __future__ import annotations

from math import inf
from typing import Any

from .style import Colours, seconds, tick, title, words

PHASES = ("draft", "score", "verify", "other")
MOST_ROUNDS, LANE_ROUNDS = 60, 14
ROOM = 0.03                           # of the clock's width: what a label over a pass takes


def gantt(figure: Any, colours: Colours, data: Any) -> None:
    """(run, run without guesses or None, `figures.Plain` or None, first round): two lanes on one clock, then a token's time by phase."""
    run, off, plain, first = data
    lanes, bars = figure.subplots(2, 1, height_ratios=(5, 4))
    shown = run.rounds[first:first + LANE_ROUNDS]
    begin = run.since(shown[0].at_s) - shown[0].seconds
    end = run.since(shown[-1].at_s)
    for one in shown:
        at = run.since(one.at_s) - one.seconds
        for phase, length in zip(PHASES, one.parts, strict=True):
            lanes.broken_barh([(at, length)], (1.15, 0.7), facecolor=colours[phase], edgecolor=colours["card"], linewidth=0.4)
            at += length
    passes = plain_passes(run, off, plain, begin, end, first)
    lanes.broken_barh(passes, (0.1, 0.7), facecolor=colours["plain"], edgecolor=colours["card"], linewidth=0.8)
    _label(lanes, ROOM * (end - begin), 1.85, [(run.since(one.at_s) - one.seconds / 2, one.emitted, one.accepted > 0) for one in shown])
    _label(lanes, ROOM * (end - begin), 0.8, [(at + length / 2, 1, False) for at, length in passes])
    lanes.set(ylim=(0, 2.25), yticks=(0.45, 1.5), xlim=(begin, end))
    lanes.set_yticklabels(["plain decoding", words(run.report.drafter, 16)])
    lanes.xaxis.set_major_formatter(tick)
    lanes.tick_params(axis="y", length=0)
    lanes.spines["left"].set_visible(False)
    tokens = sum(one.emitted for one in shown)
    how = "the same request without guesses" if off is not None else plain.how if plain is not None else "its passes are not known"
    title(lanes, f"{tokens} tokens in {len(shown)} passes; plain decoding makes {len(passes)} in that time",
          f"{words(run.name, 60)}, rounds {shown[0].number}–{shown[-1].number} of {len(run.rounds):,}; plain: {how}", colours)
    per_token(bars, colours, run, off, plain)


def _label(lanes: Any, room: float, height: float, passes: list[tuple[float, int, bool]]) -> None:
    """What passes (middle, tokens, whether guesses stood) brought, over those that leave a label its room."""
    places = [-inf, *(middle for middle, _, _ in passes), inf]
    for before, (middle, tokens, stood), behind in zip(places, passes, places[2:], strict=False):
        if min(middle - before, behind - middle) >= room:
            lanes.annotate(f"+{tokens}", (middle, height), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9.5,
                           fontweight="bold" if stood else "normal")


def plain_passes(run: Any, off: Any, plain: Any, begin: float, end: float, first: int) -> list[tuple[float, float]]:
    """(begin, length) of the passes that plain decoding does between two moments, from where the window begins."""
    if off is not None and off.rounds:
        skip = sum(one.emitted for one in run.rounds[:first])
        mine = off.rounds[skip:]
        shift = begin - (off.since(mine[0].at_s) - mine[0].seconds) if mine else 0.0
        found = [(shift + off.since(one.at_s) - one.seconds, one.seconds) for one in mine]
    elif plain is not None:
        spent = sum(one.seconds for one in run.rounds[first:first + LANE_ROUNDS])
        step = plain.seconds * (end - begin) / spent if spent else plain.seconds      # what lies between rounds counts in proportion
        found = [(begin + n * step, min(step, plain.seconds)) for n in range(min(5000, int((end - begin) / step) + 1))]
    else:
        found = []
    return [(at, length) for at, length in found if at + length <= end * (1 + 1e-9)]


def per_token(axes: Any, colours: Colours, run: Any, off: Any, plain: Any) -> None:
    """Milliseconds per emitted token by phase, over all rounds of the request; plain decoding below."""
    clock, emitted = run.report.clock, max(1, run.report.tally.emitted)
    totals = [clock.draft_s, clock.score_s, clock.verify_s, clock.other_s]
    left, whole = 0.0, sum(totals)
    for phase, total, hatch in zip(PHASES, totals, ("", "", "//", ".."), strict=True):
        value = 1e3 * total / emitted
        axes.barh(1, value, left=left, height=0.55, color=colours[phase], hatch=hatch, edgecolor=colours["card"],
                  label=f"{phase} {100 * total / whole if whole else 0:.0f}%")
        left += value
    axes.annotate(f"{left:.2f} ms", (left, 1), xytext=(6, 0), textcoords="offset points", va="center", fontweight="bold")
    base = 1e3 * sum(one.seconds for one in off.rounds) / max(1, off.report.tally.emitted) if off is not None else \
        1e3 * plain.seconds if plain is not None else 0.0
    axes.barh(0, base, height=0.55, color=colours["plain"], label="plain pass")
    about = "" if off is not None else "about "
    note = f"{about}{base:.2f} ms" + (f": {about}{base / left:.2f}× as long" if left and base else "")
    axes.annotate(note if base else "not known", (base, 0), xytext=(6, 0), textcoords="offset points", va="center", fontweight="bold")
    axes.set(yticks=(0, 1), xlabel="milliseconds per token, prompt not included", xlim=(0, 1.45 * max(left, base) or 1), ylim=(-0.5, 1.6))
    axes.set_yticklabels(["plain decoding", words(run.report.drafter, 16)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, handlelength=1.2, columnspacing=1.4)


def rounds(figure: Any, colours: Colours, data: Any) -> None:
    """(run, first round): upwards what became text, downwards what was thrown away, a column a round."""
    run, first = data
    axes = figure.subplots()
    shown = run.rounds[first:first + MOST_ROUNDS]
    places = [one.number for one in shown]
    accepted, own = [one.accepted for one in shown], [one.emitted - one.accepted for one in shown]
    rejected, rest = [-one.rejected for one in shown], [-(one.drafted - one.accepted - one.rejected) for one in shown]
    kind = {"width": 0.8, "edgecolor": colours["card"], "linewidth": 0.5}
    axes.bar(places, accepted, color=colours["score"], label="accepted guesses", **kind)
    axes.bar(places, own, bottom=accepted, color=colours["verify"], hatch="..", label="the target’s own token", **kind)
    axes.bar(places, rejected, color=colours["rejected"], hatch="///", label="rejected", **kind)
    axes.bar(places, rest, bottom=rejected, color=colours["discarded"], alpha=0.55, label="discarded", **kind)
    axes.step(places, [one.depth for one in shown], where="mid", color=colours["draft"], linewidth=1.5, label="depth granted")
    axes.axhline(0, color=colours["ink"], linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.grid(True, axis="y")
    high = max(max(one.depth, one.emitted) for one in shown)
    axes.set(xlabel="round", ylabel="thrown away  |  became text", xlim=(places[0] - 0.7, places[-1] + 0.7), ylim=(min(-0.6, *(
        one + two for one, two in zip(rejected, rest, strict=True))) * 1.05, high + 0.5))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, handlelength=1.2, columnspacing=1.4)
    tokens, length = sum(one.emitted for one in shown), run.report.tally.acceptance_length
    mean = f"; {length:.2f} tokens a round over all {len(run.rounds):,}" if length is not None else ""
    title(axes, f"{tokens} tokens in {len(shown)} rounds", f"{words(run.name, 60)}{mean}", colours)


def timeline(figure: Any, colours: Colours, data: Any) -> None:
    """(run, run without guesses or None, `figures.Plain` or None): tokens written against time."""
    run, off, plain = data
    about = None if plain is None else plain.estimate(run)
    axes = figure.subplots()
    at, tokens = growth(run)
    axes.step(at, tokens, where="post", color=colours["score"], label=f"with {words(run.report.drafter, 24)}")
    others, said = None, ""
    if off is not None:
        others = (*growth(off), "plain decoding, measured: the same request without guesses")
        gain = others[0][-1] / others[1][-1] * tokens[-1] / at[-1] if at[-1] > 0 else 0.0
        said = f": {gain:.2f}× as fast, prompt included" if gain else ""
    elif about is not None:
        # what lies between rounds counts in proportion, so that the ends tell the speed-up that the title does
        others = ([at[0], at[0] + (at[-1] - at[0]) * about.gain], [1, tokens[-1]], f"plain decoding, {plain.how}")
        said = f": about {about.gain:.2f}× as fast, prompt not included"
    if others is not None:
        axes.plot(others[0], others[1], color=colours["plain"], linestyle="--", label=others[2])
    ends = [(at[-1], tokens[-1], "score"), *([(others[0][-1], others[1][-1], "plain")] if others is not None else [])]
    for when, count, colour in ends:
        close = colour == "plain" and abs(when - at[-1]) < 0.15 * max(when, at[-1])
        axes.plot([when], [count], marker="o", color=colours[colour])
        axes.annotate(seconds(when), (when, count), xytext=(0, 24 if close else 8), textcoords="offset points", ha="right",
                      fontweight="bold")
    axes.grid(True)
    axes.set(xlabel="time since the request", ylabel="tokens written", xlim=(0, None), ylim=(0, 1.2 * max(tokens[-1], 1)))
    axes.xaxis.set_major_formatter(tick)
    axes.legend(loc="lower right")
    title(axes, f"{run.tokens} tokens in {seconds(at[-1])}{said}", words(run.name, 60), colours)


def growth(run: Any) -> tuple[list[float], list[int]]:
    """Moments since the request and tokens written by then."""
    clock = run.report.clock
    at, tokens = [clock.first - clock.submitted if clock.first is not None else 0.0], [clock.first_tokens]
    for one in run.rounds:
        at.append(run.since(one.at_s))
        tokens.append(tokens[-1] + one.emitted)
    return at, tokens
