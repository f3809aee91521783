"""draftproof demo: the built-in models with speculation off, `ngram`, `model` and `eagle3`, side by side, token by token.

One table and one verdict in words. Ends with 3 if a single token differs from plain decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import DemoConfig, EngineConfig, LoadConfig
from ..errors import LoadError, OptionError, ParityError
from . import options as o
from .console import console, counted, emit_json, facts_lines, note, print_rows
from .view import EMBEDDED_LIMIT, write_page
from .view_files import check_apart

if TYPE_CHECKING:
    from ..bench.cells import Cell, Run, Spread
    from ..bench.run import Arm, Prompt

DRAFTERS = ("none", "ngram", "model", "eagle3")
TRACE = Path("draftproof-demo.jsonl")
QUICK = {"prompts": 2, "repeats": 1, "tokens": 64}
NAMES = {"data": "data/repetition"}                 # of classes, as the table shows them


@click.command(short_help="The built-in models, with and without speculation.")
@click.option("--quick", is_flag=True, help="Fewer prompts and shorter texts: a smoke test, not a measurement.")
@o.setting(DemoConfig, "prompts", type=int, metavar="N", help="Prompts of each class.")
@o.setting(DemoConfig, "repeats", type=int, metavar="N", help="Runs of each prompt.")
@o.setting(DemoConfig, "tokens", type=int, metavar="N", help="Most tokens of a text.")
@o.setting(DemoConfig, "seed", type=int, metavar="S", help="The noise at temperature 0.8.")
@click.option("--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), default=TRACE, show_default=True, metavar="FILE",
              help="Where the trace goes.")
@o.load_options
@o.json_option
def demo(quick: bool, trace_file: Path, as_json: bool, **given: Any) -> int:
    """Run the built-in models with speculation off, ngram, model and eagle3, at temperature 0 and 0.8, and compare every token."""
    plan = DemoConfig.of({**(QUICK if quick else {}), **o.pick(DemoConfig, given)})
    load = LoadConfig.of(o.pick(LoadConfig, given))
    o.check_trace(trace_file)
    page = page_of(trace_file)
    from ..bench.cells import ALL, OFF, cells
    from ..bench.run import by_class
    from ..trace.sinks import Jsonl

    prompts = by_class(packaged_prompts(), plan.prompts)
    with ExitStack() as stack:
        sink = Jsonl(trace_file)
        stack.callback(sink.close)
        arms = open_arms(stack, load)
        warm_up(arms, prompts, plan)
        for arm in arms:                            # the trace has what was measured, and nothing before it
            arm.engine.events(sink)
        runs = list(watched(arms, prompts, plan))
        words = token_texts(arms[0])
    rows = cells(runs)
    if as_json:
        emit_json(document(rows))
    else:
        print_table(rows)
        click.echo(verdict(rows))
    if page is not None:
        write_page(trace_file, page, EMBEDDED_LIMIT, words)
    note(f"trace: {trace_file}\npage: {page or 'none, for the trace is no file'}")
    differing = [row for row in rows if not row.identical and row.prompt_class != ALL and row.arm != OFF]
    if differing:
        where = ", ".join(f"{row.arm} on {row.prompt_class} at temperature {row.temperature:g}" for row in differing)
        raise ParityError(f"not identical to speculation off: {where}")
    return 0


def page_of(trace_file: Path) -> Path | None:
    """Where the page goes, beside the trace; None where that goes to a device or a pipe. Raises OptionError if that is the trace."""
    if trace_file.exists() and not trace_file.is_file():
        return None
    page = trace_file.with_suffix(".html")
    if trace_file.suffix.lower() == ".html":
        raise OptionError(f"--trace {trace_file}: the page will be {page}, beside the trace; "
                          f"name the trace otherwise, as in {trace_file.with_suffix('.jsonl')}")
    check_apart([("--trace", trace_file)], [("the page", page)])
    return page


def packaged_prompts() -> list[dict[str, str]]:
    """The held-out prompts beside the built-in weights, one JSON object a line with "class" and "prompt"."""
    from ..models.load import WEIGHTS

    file = WEIGHTS / "prompts.jsonl"
    if not file.exists():
        raise LoadError(f"the prompts of the demo are missing at {file}; reinstall the package")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def open_arms(stack: ExitStack, load: LoadConfig) -> list[Arm]:
    """One engine per drafter over one loaded target."""
    from ..bench.cells import OFF
    from ..bench.run import Arm
    from ..engine.engine import Engine
    from ..models.load import builtin, load_target

    note("loading the built-in models and testing the target …")
    target = load_target(builtin("target"), load)
    for line in facts_lines(target.facts, load.cache_tokens):
        note(line)
    arms = []
    for drafter in DRAFTERS:
        engine = stack.enter_context(Engine(target, drafter, load=load, config=EngineConfig(trace="summary")))
        arms.append(Arm(OFF if drafter == "none" else drafter, engine, drafter, "0" if drafter == "none" else "auto"))
    return arms


def warm_up(arms: Sequence[Arm], prompts: Sequence[Prompt], plan: DemoConfig) -> None:
    from ..bench.run import measure

    note("warming up …")
    for _ in measure(arms, prompts[:1], plan.temperatures, 1, min(plan.tokens, 32), plan.seed):
        pass


def watched(arms: Sequence[Arm], prompts: Sequence[Prompt], plan: DemoConfig) -> Iterator[Run]:
    """Measure, with progress on standard error: a bar on a terminal, a line per repeat elsewhere."""
    from ..bench.run import measure

    total = len(arms) * len(prompts) * len(plan.temperatures) * plan.repeats
    note(f"{counted(len(prompts), 'prompt')}, {counted(plan.repeats, 'repeat')}, at most {counted(plan.tokens, 'token')}: "
         f"{counted(total, 'run')}")
    runs = measure(arms, prompts, plan.temperatures, plan.repeats, plan.tokens, plan.seed)
    if sys.stderr.isatty():
        from rich.progress import track

        yield from track(runs, "measuring", total, console=console(error=True), transient=True)
    else:
        for done, run in enumerate(runs, 1):
            if done * plan.repeats % total == 0 or done == 1:
                note(f"{done} of {total} runs")
            yield run


def token_texts(arm: Arm) -> list[str]:
    """The text of every token, which a trace of level summary leaves out and the page shows."""
    from ..engine.engine import Engine

    assert isinstance(arm.engine, Engine), "the demo's arms are local engines"
    target = arm.engine.target
    return [] if target.tokenizer is None else [target.tokenizer.piece(i) for i in range(target.vocab_size)]


def document(rows: Sequence[Cell]) -> dict[str, Any]:
    """The same document that every benchmark prints."""
    from ..bench.machine import machine, versions

    command = " ".join(["draftproof", *sys.argv[1:]])
    return {"machine": machine(), "versions": versions(), "command": command, "cells": [row.as_json() for row in rows]}


def print_table(rows: Sequence[Cell]) -> None:
    from ..bench.cells import OFF

    lines = []
    for row in rows:
        off = row.arm == OFF
        lines.append([
            NAMES.get(row.prompt_class, row.prompt_class), "all" if row.temperature is None else f"{row.temperature:g}", row.arm,
            spread(row.tokens_per_s), "" if off else row.speedup.text, "" if off or row.decoding is None else f"{row.decoding.median:.2f}×",
            f"{row.acceptance_length:.2f}", "" if off else f"{'yes' if row.identical else 'NO'} ({row.tokens} tokens)"])
    words = "class", "temper\xadature", "drafter"
    print_rows("speculation off against every drafter; spread: 10th to 90th percentile; interval: 95 % over prompts, or the range of fewer "
               "than six", [*words, "tokens/s (spread)", "speed-up (interval)", "decoding", "acceptance length", "identical to off"], lines,
               words, together=2)


def spread(value: Spread) -> str:
    return f"{value.median:.0f} ({value.low:.0f}–{value.high:.0f})"


def verdict(rows: Sequence[Cell]) -> str:
    """One sentence on exactness, one on speed at each temperature."""
    from ..bench.cells import ALL, OFF

    whole = [row for row in rows if row.prompt_class == ALL and row.arm != OFF]
    if not all(row.identical for row in whole):
        return "Verdict: some tokens differ from plain decoding; speculation is not exact on this machine. Please report it with the trace."
    tokens = sum(row.tokens for row in rows if row.prompt_class != ALL and row.arm != OFF)
    told = [f"Verdict: all {tokens} tokens written with speculation are identical to plain decoding."]
    for temperature in dict.fromkeys(row.temperature for row in rows if row.prompt_class != ALL):
        told.append(_fastest([row for row in rows if row.temperature == temperature and row.arm != OFF], f"At temperature {temperature:g}"))
    return " ".join(told)


def _fastest(rows: Sequence[Cell], when: str) -> str:
    from ..bench.cells import ALL

    classes = [row for row in rows if row.prompt_class != ALL]
    whole = [row for row in rows if row.prompt_class == ALL]
    best = max(whole, key=lambda row: row.speedup.median)
    others = "; ".join(f"{row.arm} {row.speedup.text}" for row in whole if row is not best)
    if best.speedup.low is not None and best.speedup.low > 1:
        fastest = f"{when} {best.arm} is the fastest drafter over all classes, {best.speedup.text} the speed of off"
    else:
        fastest = f"{when} no drafter is faster for certain over all classes; {best.arm} reaches {best.speedup.text}"
    cell = max((row for row in classes if row.arm == best.arm), key=lambda row: row.speedup.median)
    where = NAMES.get(cell.prompt_class, cell.prompt_class)
    return f"{fastest}{_decoding(best)} ({others}); its best: {where}, {cell.speedup.median:.2f}×{_decoding(cell)}."


def _decoding(row: Cell) -> str:
    """Of the tokens after the first, in words."""
    return "" if row.decoding is None else f", {row.decoding.median:.2f}× after the first token"
