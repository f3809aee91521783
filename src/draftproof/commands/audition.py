"""draftproof audition: what drafters would have guessed on a log of traffic, without running the target a token at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import LoadConfig
from ..errors import Failure, OptionError
from . import options as o
from .console import emit_json, facts_lines, note, print_rows
from .view_files import check_apart

if TYPE_CHECKING:
    from ..audition.counts import Counts
    from ..audition.run import Part, Result, Work

DRAFTERS, DEPTHS = ("ngram", "suffix"), (1, 2, 4, 8)
SMALL = 8 << 20         # bytes of a log below which starting other processes takes longer than reading it
EVERY_S = 5.0           # between lines of progress
COPY = ("ngram", "suffix", "prediction")        # drafters that need no target


class Depths(click.ParamType[tuple["int | None", ...]]):
    """One depth or several, separated by commas; None is that of each traced round."""

    name = "N|traced"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word == "traced" or (word.isdecimal() and int(word) >= 1) for word in words):
            self.fail(f"{value!r}: expected integers ≥ 1, as in 4 or 1,2,4, or traced", param, ctx)
        return tuple(None if word == "traced" else int(word) for word in words)


log_argument = click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
drafters_option = click.option("--drafter", "specs", multiple=True, metavar="SPEC", default=DRAFTERS, show_default=True,
                               help="A drafter to hear; repeatable.")
depths_option = click.option("--depth", "depths", type=Depths(), metavar=Depths.name, multiple=True, default=(DEPTHS,),
                             help="How far it guesses; repeatable. traced: as deep as the traced rounds did.  [default: 1,2,4,8]")


@click.command(short_help="What drafters would have guessed on a log of traffic.")
@log_argument
@o.target_option
@drafters_option
@depths_option
@click.option("--processes", type=click.IntRange(1), metavar="N",
              help="Work side by side, for ngram, suffix and prediction.  [default: chosen]")
@click.option("--partial", "kept", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Keep what is counted here; the same command, killed, goes on from it.")
@click.option("--row-cost", type=click.FloatRange(0), default=0.05, show_default=True, metavar="C",
              help="What a drafted token costs, drafting and scoring, in plain passes; the best depth follows from it.")
@o.load_options
@o.json_option
def audition(log: Path, target: str | None, specs: tuple[str, ...], depths: tuple[tuple[int | None, ...], ...], processes: int | None,
             kept: Path | None, row_cost: float, as_json: bool, **given: Any) -> int:
    """Replay LOG through every drafter at every depth and count what stands. Reads ids, OpenAI pairs, chats, text, and our traces."""
    check_apart([("LOG", log)], [("--partial", kept)])
    if kept is not None and not kept.absolute().parent.is_dir():
        raise OptionError(f"--partial {kept}: the folder does not exist; create it, or name a file elsewhere")
    from ..audition.counts import best_depths

    work = prepare(log, target, specs, depths, given, processes)
    result = hear(work, processes, kept)
    cells = result.cells()
    best = best_depths(cells, row_cost)
    if as_json:
        emit_json({"log": result.log(), "cells": cells, "best": best, "row_cost": row_cost})
    else:
        print_cells(cells, best, row_cost)
    for line in [*remarks(result), *off(best, row_cost)]:
        note(line)
    return 0


def _begin(log: Path, specs: Sequence[str], processes: int | None) -> None:
    """Where processes will be wanted, let them load while we do."""
    if processes != 1 and (processes is not None or log.stat().st_size >= SMALL) and {s.partition(":")[0] for s in specs} <= set(COPY):
        from ..audition.processes import begin

        begin()


def arms_of(specs: Sequence[str], depths: Sequence[tuple[int | None, ...]]) -> list[tuple[str, int | None]]:
    """Every drafter at every depth, each once."""
    return [(spec, depth) for spec in dict.fromkeys(specs) for depth in dict.fromkeys(d for each in depths for d in each)]


def prepare(log: Path, target: str | None, specs: Sequence[str], depths: Sequence[tuple[int | None, ...]],
            given: Mapping[str, Any], processes: int | None = None) -> Work:
    """The work, its target loaded only where a drafter needs it."""
    from ..audition.logs import check_log

    check_log(log)
    _begin(log, specs, processes)
    from ..audition.run import Arm, Work
    from ..audition.stories import Reader, tokenizer_at
    from ..models.load import builtin
    from ..serve.versions import target_version

    arms = tuple(Arm(spec, depth) for spec, depth in arms_of(specs, depths))
    o.check_target(target)
    place = str(builtin("target")) if target is None else target
    version = target_version(place)
    if all(arm.copies for arm in arms):
        return Work(str(log), arms, Reader(partial(tokenizer_at, place)), version=version)
    from ..drafters import build
    from ..engine.setup import open_target

    load = LoadConfig.of({**o.pick(LoadConfig, given), "self_test": False})
    model = open_target(target, load)
    for line in facts_lines(model.facts, load.cache_tokens)[:1]:
        note(line)
    return Work(str(log), arms, Reader.of(model), model, lambda spec: build(spec, model, "match", load), version=version)


def hear(work: Work, processes: int | None, kept: Path | None) -> Result:
    """Run it, with progress on standard error. Raises Failure if the log holds nothing to replay."""
    from ..audition.run import log_size
    from ..audition.workers import run
    from ..bench.machine import usable_cores

    if processes is None:
        processes = usable_cores() if log_size(work.log) >= SMALL else 1
    start = shown = time.monotonic()
    tokens = 0

    def progress(part: Part) -> None:
        nonlocal tokens, shown
        tokens += part.tokens
        now = time.monotonic()
        if now - shown > EVERY_S:
            shown = now
            arm = work.arms[part.arm]
            note(f"{arm.spec} at depth {arm.shown_depth}: block {part.block}; "
                 f"{tokens} tokens replayed, {tokens / (now - start):.0f} a second")

    result = run(work, processes, kept, progress)
    if not result.requests:
        why = "; ".join(result.skipped.shown) or "it is empty"
        raise Failure(f"{work.log}: no request with a prompt and an answer ({why}); "
                      "expected token ids, OpenAI pairs, chats, text or a trace of ours")
    if tokens:
        note(f"{tokens} tokens replayed in {time.monotonic() - start:.1f} s")
    return result


def remarks(result: Result) -> list[str]:
    """Which figures are exact, and what was left out."""
    lines = []
    if result.retokenised:
        lines.append(f"{result.retokenised} of {result.requests} requests had text where ids were expected; it was tokenised again, "
                     "which may cut it otherwise than the model wrote it: their figures are those of that text")
    for at, arm in enumerate(result.arms):
        counts = [found for (index, _), found in result.counts.items() if index == at]
        whole: Counts = sum(counts[1:], counts[0])
        if whole.exact + whole.near < whole.tally.requests:
            bounds = whole.sampled()
            more = "" if bounds is None else (f"; sampled drafts, on the {bounds['requests']} requests whose likeliest tokens the log has: "
                                              f"{bounds['low']:.2f} to {bounds['high']:.2f} tokens a round")
            lines.append(f"{arm.spec} at depth {arm.shown_depth}: exact for {whole.exact} of {whole.tally.requests} requests"
                         f"{f', and for {whole.near} but for their ids' if whole.near else ''}; "
                         f"the others were sampled with noise that the log does not have: theirs is the figure of greedy drafts{more}")
    skipped = result.skipped
    lines += skipped.remarks()
    if skipped.count:
        lines.append(f"{skipped.count} records skipped: {'; '.join(skipped.shown)}{' …' if skipped.count > len(skipped.shown) else ''}")
    return lines


def off(best: Sequence[Mapping[str, Any]], row_cost: float) -> list[str]:
    """Where no depth pays."""
    names = [f"{b['drafter']} of class {b['class']} ({b['worth']:.2f} at depth {b['depth']})" for b in best if b["worth"] <= 1]
    return [f"off, because at --row-cost {row_cost:g} no depth is worth more than a plain pass: {', '.join(names)}"] if names else []


def print_cells(cells: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]], row_cost: float) -> None:
    from ..audition.counts import worth

    sampled, lines = any(cell["sampled"] for cell in cells), []
    top = {(b["class"], b["drafter"], b["depth"]) for b in best if b["worth"] > 1}
    for cell in cells:
        mark = "*" if (cell["class"], cell["drafter"], cell["depth"]) in top else ""
        used, interval, length = cell["draft_utilisation"], cell["acceptance_length_interval"], cell["acceptance_length"]
        value = worth(cell, row_cost)
        paid = "" if value is None else f"{value:.2f}"
        spread = "" if interval is None else f" ({interval['low']:.2f}–{interval['high']:.2f})"
        plain = [str(cell[name]) for name in ("requests", "rounds", "drafted", "accepted")]
        bounds = cell["sampled"]
        between = [f"{bounds['low']:.2f}–{bounds['high']:.2f}" if bounds else ""] if sampled else []
        lines.append([cell["class"], cell["drafter"], f"{cell['depth']}{mark}", *plain,
                      "" if length is None else f"{length:.2f}{spread}", paid, "" if used is None else f"{used:.0%}",
                      " ".join(f"{h:.2f}" for h in cell["hazard"][:4]), cell["figure"], *between])
    words = "class", "drafter"
    print_rows("tokens per round that a replay of the log counts, their worth in plain passes at this row cost; * the best depth, if it "
               "pays", [*words, "depth", "requests", "rounds", "drafted", "accepted", "acceptance length", "worth", "used", "hazard",
                        "figure", *(["sampled drafts"] if sampled else [])], lines, words, together=1)
