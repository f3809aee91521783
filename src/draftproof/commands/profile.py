"""draftproof profile: what a scoring pass costs on this device, by rows, context and batch, and where guesses stop being free."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Failure, OptionError
from . import options as o
from .console import emit_json, facts_lines, note, print_rows, size

if TYPE_CHECKING:
    from ..bench.profile import Plan, Point


class Counts(click.ParamType[tuple[int, ...]]):
    name = "N,M,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and int(word) >= 1 for word in words):
            self.fail(f"{value!r}: expected integers ≥ 1, separated by commas", param, ctx)
        return tuple(dict.fromkeys(map(int, words)))


@click.command(short_help="What a scoring pass costs on this device.")
@o.target_option
@click.option("--rows", type=Counts(), help="Rows per sequence.  [default: some from 1 to 32]")
@click.option("--context", "contexts", type=Counts(), help="Tokens before them.  [default: 64,512]")
@click.option("--batch", "batches", type=Counts(), help="Sequences side by side.  [default: 1,4]")
@click.option("--repeats", type=click.IntRange(1), metavar="N", help="Passes of each kind.  [default: 15]")
@click.option("--quick", is_flag=True, help="Fewer widths and repeats, one context: seconds instead of a minute.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw the curve (needs matplotlib).")
@o.load_options
@o.json_option
def profile(target: str | None, quick: bool, png: Path | None, as_json: bool, **given: Any) -> int:
    """Measure T(rows, context, batch) of a target, its roofline, and the rows up to which verification is free."""
    if png is not None and not png.absolute().parent.is_dir():
        raise OptionError(f"--png {png}: the folder does not exist; create it, or name a file elsewhere")
    if png is not None and png.suffix not in ("", ".png", ".svg"):
        raise OptionError(f"--png {png}: expected a name that ends in .png or .svg")
    o.check_target(target)
    settings = o.settings_of(given)
    from dataclasses import replace

    from ..bench import profile as bench
    from ..bench.machine import machine, versions
    from ..bench.report import write_files
    from ..engine.setup import open_target

    wanted = {name: given[name] for name in ("rows", "contexts", "batches", "repeats") if given[name] is not None}
    short: dict[str, Any] = {"rows": bench.QUICK_ROWS, "contexts": (64,), "repeats": 5} if quick else {}
    plan = bench.Plan(**{**short, **wanted})
    model = open_target(target, replace(settings.load, self_test=False))
    for line in facts_lines(model.facts, settings.load.cache_tokens)[:2]:
        note(line)
    points = []
    for point in bench.curve(model, plan):
        if point.rows == plan.rows[0]:
            note(f"context {point.context}, batch {point.batch}: {point.seconds.median * 1e3:.2f} ms for {point.rows} row(s) each")
        points.append(point)
    if not points:
        raise Failure(f"nothing was measured: no context of {plan.contexts} "
                      f"leaves room in the target's {model.context} tokens and its cache")
    for line in left_out(plan, points, model.context):
        note(line)
    record = {"machine": machine(), "versions": versions(), "command": " ".join(["draftproof", *sys.argv[1:]]),
              **bench.document(model, points, bench.read_bandwidth(model.device, 64 if quick else 256))}
    if as_json:
        emit_json(record)
    else:
        print_curve(record)
    if png is not None:
        write_files({png: partial(bench.plot, record)})
        note(f"picture: {png}")
    return 0


def left_out(plan: Plan, points: Sequence[Point], longest: int) -> list[str]:
    """What was to be measured and was not, a sentence for every context and batch."""
    done: dict[tuple[int, int], set[int]] = {}
    for point in points:
        done.setdefault((point.context, point.batch), set()).add(point.rows)
    said = []
    for context, batch in ((context, batch) for context in plan.contexts for batch in plan.batches):
        missing = [rows for rows in plan.rows if rows not in done.get((context, batch), ())]
        if missing:
            rows = "" if len(missing) == len(plan.rows) else f", rows {', '.join(map(str, missing))}"
            said.append(f"left out: context {context}, batch {batch}{rows}: the target has room for {longest} tokens in a text, and its "
                        "cache for so many texts of that length as fit")
    return said


def print_curve(record: Mapping[str, Any]) -> None:
    widths, lines = sorted({p["rows"] for p in record["curve"]}), []
    for roof in record["roofline"]["passes"]:
        here = (roof["context"], roof["batch"])
        mine = {p["rows"]: p["seconds"]["median"] for p in record["curve"] if (p["context"], p["batch"]) == here}
        rate = "" if roof["bytes_per_s"] is None else f"{size(roof['bytes_per_s'])}/s"
        share = "" if roof["share_of_limit"] is None else f" ({roof['share_of_limit']:.0%})"
        lines.append([str(roof["context"]), str(roof["batch"]), *(f"{mine[w] * 1e3:.2f}" if w in mine else "" for w in widths),
                      str(roof["free_rows"]), rate + share])
    print_rows("milliseconds per pass, by rows per sequence", ["context", "batch", *map(str, widths), "free rows", "read at"], lines)
    roof = record["roofline"]
    click.echo(f"Verification is free (at most {roof['free_means']:g} times a one-row pass) up to the rows named; this device reads "
               f"{size(roof['read_bytes_per_s'])}/s.")
    experts = record["target"].get("experts")
    if experts:
        click.echo(f"A mixture of experts: a row reads {experts['chosen']} of {experts['count']} in a layer, and wider passes, where rows "
                   "choose independently, so many times the bytes of a plain one:")
        for one in roof["passes"]:
            told = ", ".join(f"{wide['bytes'] / one['bytes']:.2f} at {wide['rows']}" for wide in one["by_rows"])
            click.echo(f"  context {one['context']}, batch {one['batch']}, by rows per sequence: {told}.")
