"""draftproof advise: would speculation pay on this traffic, with which drafter, how deep, and up to what load."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..config import LoadConfig
from ..errors import Failure, OptionError
from ..types import Sampling
from . import options as o
from .audition import DEPTHS, Depths, drafters_option, hear, prepare, remarks
from .console import console, emit_json, note
from .profile import Counts

if TYPE_CHECKING:
    from ..advise.predict import Cost, Forecast, Overall
    from ..models.target import Target

PROMPTS = 64            # of the log, from which timed rounds go on
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Whether speculation pays on a log of traffic, and how.")
@click.argument("log", type=FILE, required=False)
@o.target_option
@drafters_option
@click.option("--depth", "depths", type=Depths(), metavar="N,M,…", multiple=True, default=(DEPTHS,),
              help="How far it guesses; repeatable.  [default: 1,2,4,8]")
@click.option("--concurrency", type=Counts(), default=(1, 4), help="Requests side by side.  [default: 1,4]")
@click.option("--audition", "heard", type=FILE, metavar="FILE", help="What audition --json printed, instead of replaying LOG.")
@click.option("--profile", "curve", type=FILE, metavar="FILE", help="What profile --json printed, instead of timing rounds of the engine.")
@click.option("--draft-cost", type=click.FloatRange(0), default=0.0, show_default=True, metavar="C",
              help="With --profile: seconds to draft a token, in plain passes.")
@click.option("--bench", "measured", type=FILE, metavar="FILE", help="What bench --json printed: check the prediction against it.")
@click.option("--rounds", type=click.IntRange(4), default=48, show_default=True, help="Rounds timed of each drafter, depth and load.")
@click.option("--temperature", type=click.FloatRange(0), metavar="T", help="Of the timed rounds.  [default: the model's, else 1.0]")
@o.load_options
@o.json_option
def advise(log: Path | None, target: str | None, specs: tuple[str, ...], depths: tuple[tuple[int | None, ...], ...], as_json: bool,
           **given: Any) -> int:
    """Replay LOG, time rounds here, and say per class and load what to set, what it should bring, and why."""
    _check(log, depths, given)
    _check_unread(given)
    o.check_target(target)
    from ..advise.check import check
    from ..advise.predict import overall, predict, thresholds, verdict

    document, curve, measured = (None if given[name] is None else _read(given[name]) for name in ("heard", "curve", "measured"))
    place: str | Target | None = target
    if document is not None:
        cells = _heard(document, given["heard"])
    else:
        assert log is not None, "checked above"
        work = prepare(log, target, specs, depths, given)
        place = work.target or target           # loaded once
        result = hear(work, None, None)
        cells, document = result.cells(), {"log": result.log()}
        for line in remarks(result):
            note(line)
    plan: list[dict[str, Any]]
    if curve is not None:
        costs, plan = _from_curve(curve, cells, given["draft_cost"]), []
    else:
        costs, plan = _timed(log, place, cells, given)
    forecasts = predict(cells, costs)
    record: dict[str, Any] = {
        "cells": [one.as_json() for one in forecasts], "verdict": verdict(forecasts), "thresholds": thresholds(forecasts),
        "overall": _overall(overall(forecasts), target), "costs": [asdict(cost) for cost in costs], "log": document.get("log"),
        "memory": [entry for entry in plan if _recommended(entry, forecasts)]}
    unlike: Failure | None = None
    if measured is not None:
        try:
            record["check"] = check(forecasts, measured)
        except Failure as error:            # told behind the advice, which may have taken minutes
            unlike = error
    emit_json(record) if as_json else print_advice(record, forecasts)
    if unlike is not None:
        raise unlike
    return 0


def _check(log: Path | None, depths: Sequence[tuple[int | None, ...]], given: Mapping[str, Any]) -> None:
    if log is None and (given["heard"] is None or given["curve"] is None):
        raise OptionError("no LOG: expected the traffic to judge, or both --audition FILE and --profile FILE")
    if any(depth is None for each in depths for depth in each):
        raise OptionError("--depth traced: a prediction is for a fixed depth; give integers ≥ 1")


def _check_unread(given: Mapping[str, Any]) -> None:
    """Raises OptionError for an option that was given, and that a document given beside it leaves without effect."""
    heard, curve = given["heard"] is not None, given["curve"] is not None
    unread = dict.fromkeys(("specs", "depths"), "--audition, which says what was heard") if heard else {}
    unread |= dict.fromkeys(("concurrency", "rounds", "temperature"), "--profile, which says what was timed") if curve else {
        "draft_cost": "rounds that are timed here, drafting included"}
    if heard and curve:
        unread |= dict.fromkeys(("log", "target", *(f.name for f in fields(LoadConfig))), "--audition and --profile: nothing is run here")
    context = click.get_current_context()
    for option in context.command.params:
        name = str(option.name)
        if name in unread and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            called = "LOG" if name == "log" else option.opts[0]
            raise OptionError(f"{called} has no effect beside {unread[name]}; leave one of them out")


def _read(file: Path) -> dict[str, Any]:
    """The JSON document in a file, which may be a command's whole output: its last line counts."""
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
        try:
            found = json.loads(text)
        except ValueError:
            found = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError, RecursionError) as error:
        raise Failure(f"{file}: no JSON document ({error}); expected what a command printed with --json") from error
    if not isinstance(found, dict):
        raise Failure(f"{file}: found a JSON {type(found).__name__}, expected an object")
    return found


def _heard(document: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    from ..advise.documents import cells_of

    try:
        return cells_of(document)
    except Failure as error:
        raise Failure(f"--audition {file}: {error}") from None


def _from_curve(record: Mapping[str, Any], cells: Sequence[dict[str, Any]], draft_cost: float) -> list[Cost]:
    from ..advise.measure import from_curve
    from ..bench.profile import experts_of, points_of

    whole = [cell for cell in cells if cell.get("class") == "all"]
    context = int((whole[0].get("prompt_tokens") or 64) if whole else 64)
    curve = dict(record)
    return from_curve(points_of(curve), cells, context, draft_cost, experts_of(curve))


def _timed(log: Path | None, place: str | Target | None, cells: Sequence[Mapping[str, Any]],
           given: Mapping[str, Any]) -> tuple[list[Cost], list[dict[str, Any]]]:
    """(costs of rounds of this engine, memory plans of every setting that was timed)."""
    from ..advise.measure import measure, memory_plan
    from ..audition.logs import Skipped
    from ..audition.stories import Reader
    from ..engine.setup import open_target

    assert log is not None, "checked before"
    load = LoadConfig.of({**o.pick(LoadConfig, given), "self_test": False})
    model = open_target(place, load)
    longest = model.context // 2
    texts = [(read.story.prompt[-longest:], read.story.answer) for read in islice(Reader.of(model).stories(log, Skipped()), PROMPTS)]
    arms = list(dict.fromkeys((cell["drafter"], cell["depth"]) for cell in cells if cell["rounds"]))
    if not texts or not arms:
        raise Failure(f"{log}: nothing to time, the log has no prompt that this target can go on from or the audition counted no round")
    sampling = Sampling(temperature=given["temperature"], max_tokens=min(128, max(2, model.context - longest - 1)), seed=1)
    costs, bytes_of = measure(model, arms, texts, given["concurrency"], sampling, given["rounds"], load, note)
    context = max(len(prompt) for prompt, _ in texts) + sampling.max_tokens
    plan = [{"drafter": spec, "depth": depth, "concurrency": batch, **_memory(memory_plan(model, *bytes_of[spec], depth, batch, context))}
            for spec, depth in arms for batch in given["concurrency"]]
    return costs, plan


def _memory(plan: Any) -> dict[str, int]:
    return {**asdict(plan), "total": plan.total}


def _overall(one: Overall | None, target: str | None) -> dict[str, Any] | None:
    """One drafter for all of it, and the command that says so in another engine's words."""
    if one is None:
        return None
    depths = set(one.depths.values())
    how = ["--depth", str(*depths)] if len(depths) == 1 else ["--depth-by-batch", one.schedule]
    whose = [] if target is None else ["--target", target]
    return {**asdict(one), "schedule": one.schedule,
            "export": shlex.join(["draftproof", "export", "config", "--to", "vllm", *whose, "--drafter", one.drafter, *how])}


def _recommended(entry: Mapping[str, Any], forecasts: Sequence[Forecast]) -> bool:
    return any(f.recommended and (f.drafter, f.depth, f.concurrency) == (entry["drafter"], entry["depth"], entry["concurrency"])
               for f in forecasts)


def print_advice(record: Mapping[str, Any], forecasts: Sequence[Forecast]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from .console import size

    table = Table(title="expected speed-up over speculation off (95 % interval); * recommended", title_justify="left", title_style="")
    for name in ("class", "concurrent", "drafter", "depth", "speed-up", "reason"):
        table.add_column(name, justify="right" if name in ("concurrent", "depth", "speed-up") else "left", no_wrap=name != "reason")
    before = None
    for one in forecasts:
        if before not in (None, (one.prompt_class, one.concurrency)):
            table.add_section()
        before = one.prompt_class, one.concurrency
        value = one.speedup
        table.add_row(escape(one.prompt_class), str(one.concurrency), escape(one.drafter), f"{one.depth}{'*' if one.recommended else ''}",
                      f"{value.median:.2f}× ({value.low:.2f}–{value.high:.2f})" if one.depth else "1", escape(one.reason))
    console().print(table)
    for entry in record["memory"]:
        click.echo(f"memory of {entry['drafter']} at depth {entry['depth']}, {entry['concurrency']} concurrent: {size(entry['total'])} "
                   f"(weights {size(entry['weights'])}, logits {size(entry['logits'])}), {entry['kv_tokens_lost']} tokens of cache lost")
    if "check" in record:
        found = record["check"]
        good = found["within_10_percent"]
        share = "none was measured narrowly enough" if good is None else f"{good:.0%} within 10 %"
        click.echo(f"Checked against {len(found['cells'])} measured cells, {found['judged']} of them narrow: {share}.")
    loads = [f"{name} up to {most} concurrent" if most else f"{name} at no load" for name, most in record["thresholds"].items()]
    click.echo(f"It pays at the loads looked at: {', '.join(loads)}.")
    one = record["overall"]
    if one is not None:
        depths = ", ".join(f"{depth} from {load} on" if depth else f"off from {load} on" for load, depth in one["depths"].items())
        fixed = ", ".join(f"{value:.2f}× at {load}" for load, value in one["speedups"].items())
        click.echo(f"One drafter for all classes: {one['drafter']}, depth by concurrent requests {depths}; "
                   + (f"or depth {one['depth']} at all loads, {fixed}." if fixed else "no single depth is without loss at all loads."))
        click.echo(f"  {one['export']}")
    click.echo(f"Verdict: {record['verdict']}.")
