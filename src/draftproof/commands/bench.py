"""draftproof bench: does guessing ahead pay, on which prompts, under which load? Off and every arm, interleaved."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import BenchConfig, LoadConfig, SpeculationConfig
from ..errors import OptionError, ParityError
from . import options as o
from .console import console, counted, emit_json, facts_lines, note, print_rows
from .switch import key_of
from .view_files import check_apart

if TYPE_CHECKING:
    from ..bench.endpoint import Counters
    from ..bench.load import Answer, Load
    from ..bench.sweep import Arm, Plan
    from ..bench.workload import Item
    from ..models.target import Target

BUILT_IN_EACH = 4                       # prompts of each class of the built-in workload


class Numbers(click.ParamType[tuple[float, ...]]):
    """Finite numbers > 0, separated by commas, each once."""

    name = "N,N,…"

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(word) if self.whole else float(word) for word in str(value).split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < number < math.inf for number in found):
            self.fail(f"{value!r}: expected {'integers' if self.whole else 'numbers'} > 0, separated by commas", param, ctx)
        return tuple(dict.fromkeys(found))


out_file = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Measure speculation against off: an engine here, or any server.")
@o.target_option
@click.option("--drafter", "drafters", multiple=True, metavar="SPEC",
              help="What guesses; repeatable.  [default: ngram, and model for the built-in target]")
@click.option("--depth", "depths", type=o.Depth(), multiple=True, metavar="N|auto", help="How far; repeatable.  [default: auto]")
@o.setting(SpeculationConfig, "tree", type=int, metavar="NODES", help="Guess trees of at most so many tokens.")
@o.setting(SpeculationConfig, "rule", type=click.Choice(("match", "ratio", "block", "lossy-typical")), help="How drafts are judged.")
@click.option("--url", "urls", multiple=True, metavar="[NAME=]URL", help="A server instead of an engine here; repeatable. Name one `off`.")
@click.option("--model", metavar="NAME", help="The server's model.  [default: its first]")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Its first line has the key, as `switch` reads it.")
@click.option("--workload", type=Path, metavar="FILE", help="Prompts, questions or traffic, JSON lines.  [default: the built-in prompts]")
@click.option("--synthetic", metavar="IN,OUT,COUNT", help="Random prompts of IN tokens, OUT of answer.")
@click.option("--concurrency", type=Numbers(True), metavar="N,N,…", help="Closed loop: so many requests at a time.  [default: 1]")
@click.option("--rate", type=Numbers(False), metavar="X,X,…", help="Open loop: so many requests a second, whoever waits.")
@click.option("--recorded", is_flag=True, help="Open loop: at the workload's own arrival times.")
@o.setting(BenchConfig, "each", type=int, metavar="N", help="Items of every class.")
@o.setting(BenchConfig, "repeats", type=int, metavar="N", help="Runs of everything, at least.")
@o.setting(BenchConfig, "most_repeats", type=int, metavar="N", help="And at most.  [default: 5, or --repeats]")
@o.setting(BenchConfig, "precision", type=float, metavar="SHARE", help="Stop once every speed-up is known so well.")
@o.setting(BenchConfig, "budget_s", type=float, metavar="S", help="No new repeat after so many seconds.")
@o.setting(BenchConfig, "tokens", type=int, metavar="N", help="Most tokens of an answer.")
@o.setting(BenchConfig, "temperature", type=float, metavar="T", help="0 is greedy.")
@o.setting(BenchConfig, "seed", type=int, metavar="S", help="The noise.")
@click.option("--ignore-eos", is_flag=True, help="Answers of full length.")
@click.option("--csv", "csv_file", type=out_file, metavar="FILE", help="The cells, for a spreadsheet.")
@click.option("--html", "html_file", type=out_file, metavar="FILE", help="One page with tables and plots.")
@click.option("--png", "png_file", type=out_file, metavar="FILE", help="The plots.")
@click.option("--answers", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="Spec-Bench answer files, one per arm.")
@o.load_options
@o.json_option
def bench(drafters: tuple[str, ...], depths: tuple[int | None, ...], urls: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Measure every arm against off, interleaved, repeat by repeat, until the intervals are narrow or the time is up."""
    config = BenchConfig.of(o.pick(BenchConfig, given))
    check(drafters, depths, urls, given)
    from ..bench.load import Load
    from ..bench.sweep import Plan

    loads = [Load(concurrency=int(n)) for n in given["concurrency"] or ()] + [Load(rate=x) for x in given["rate"] or ()]
    loads += [Load()] if given["recorded"] else []
    plan = Plan(tuple(loads) or (Load(1),), config.repeats, config.most, config.precision, config.budget_s, config.tokens,
                config.temperature, config.seed)
    with ExitStack() as stack:
        arms, items, target = (server if urls else here)(stack, drafters, depths or (None,), urls, given, config, plan)
        answers, counters, stopped = measure(arms, items, plan)
        document = describe(answers, arms, plan, counters, target, stopped)
    if as_json:
        emit_json(document)
    else:
        print_tables(document)
    leave(document, answers, arms, given, target)
    if target is not None and target.facts.invisible:
        differing = {c["arm"] for c in document["cells"] if c["identical"] is False}
        if differing:
            raise ParityError(f"not identical to speculation off, on a target that is invisible to the bit: {', '.join(sorted(differing))}")
    if stopped:
        raise KeyboardInterrupt
    return 0


def check(drafters: Sequence[str], depths: Sequence[int | None], urls: Sequence[str], given: Mapping[str, Any]) -> None:
    """What can be refused before anything is loaded."""
    if urls and (given["target"] or given["tree"] or given["rule"]):
        raise OptionError("--url with --target, --tree or --rule: a server has its own; leave them out, or leave --url out")
    if urls and drafters and len(urls) > 1:
        raise OptionError("--drafter with several --url: name drafters for one server (ours), or servers without drafters")
    if urls and not (given["workload"] or given["synthetic"]):
        raise OptionError("--url without a workload: add --workload FILE or --synthetic IN,OUT,COUNT")
    if depths and not drafters and urls:
        raise OptionError("--depth with --url: name a --drafter too; the depth goes into the request, as our server takes it")
    if any(url.startswith("=") for url in urls):
        raise OptionError("--url without a name before its =: expected NAME=URL, or the URL alone")
    for option, names in (("--drafter", drafters), ("--depth", ["auto" if depth is None else depth for depth in depths]),
                          ("--url", [url.partition("=")[0] for url in urls if "=" in url.partition("://")[0]])):
        for name in names:
            if list(names).count(name) > 1:
                raise OptionError(f"{option} {name} twice: every arm has one name; leave one out, or name it otherwise")
    o.check_server(urls, given)
    if given["synthetic"] and given["each"]:
        raise OptionError("--each with --synthetic: that has as many prompts as its third number says; leave one out")
    if given["workload"] and given["synthetic"]:
        raise OptionError("--workload and --synthetic: expected one workload")
    if given["synthetic"] and not re.fullmatch(r"[1-9]\d*,[1-9]\d*,[1-9]\d*", given["synthetic"]):
        raise OptionError(f"--synthetic {given['synthetic']}: expected three integers ≥ 1, as in 512,128,32")
    o.check_target(given["target"])
    for spec in drafters if not urls else ():
        o.check_drafter(spec)
    check_apart([("--workload", given["workload"]), ("--api-key-file", given["api_key_file"])],
                [(f"--{name}", given[f"{name}_file"]) for name in ("csv", "html", "png")])
    for name in ("csv_file", "html_file", "png_file"):
        if given[name] is not None and not given[name].absolute().parent.is_dir():
            raise OptionError(f"{given[name]}: the folder does not exist; create it, or name a file elsewhere")
    if given["answers"] is not None:
        there = next(folder for folder in given["answers"].absolute().parents if folder.exists())
        if not there.is_dir():
            raise OptionError(f"--answers {given['answers']}: {there} is a file; name a folder")


def here(stack: ExitStack, drafters: Sequence[str], depths: Sequence[int | None], urls: Sequence[str], given: Mapping[str, Any],
         config: BenchConfig, plan: Plan) -> tuple[list[Arm], list[Item], Target | None]:
    from ..bench.arms import local_arms
    from ..drafters import parse_spec
    from ..models.load import builtin, load_target

    load = LoadConfig.of(o.pick(LoadConfig, given))
    drafters = drafters or (("ngram",) if given["target"] else ("ngram", "model"))
    for spec in drafters:
        parse_spec(spec)                                # a wrong spec is told before a model is loaded
    note("loading the target …")
    target = load_target(given["target"] or builtin("target"), load)
    for line in facts_lines(target.facts, load.cache_tokens):
        note(line)
    options = {"ignore_eos": True} if given["ignore_eos"] else {}
    most = max([load.concurrency or 16 for load in plan.loads])
    arms = local_arms(stack, target, drafters, depths, load, tree=given["tree"], rule=given["rule"] or "match", batch=most,
                      options=options, greedy=plan.temperature == 0)
    return arms, workload(given, config, plan, target.vocab_size), target


def server(stack: ExitStack, drafters: Sequence[str], depths: Sequence[int | None], urls: Sequence[str], given: Mapping[str, Any],
           config: BenchConfig, plan: Plan) -> tuple[list[Arm], list[Item], Target | None]:
    from ..bench.arms import url_arms

    key = key_of(given["api_key_file"]) if given["api_key_file"] else None       # the variable's is for our own servers alone
    extra = {"ignore_eos": True} if given["ignore_eos"] else {}
    return url_arms(stack, urls, given["model"], key, drafters, depths, extra, plan.temperature == 0), workload(given, config, plan), None


def workload(given: Mapping[str, Any], config: BenchConfig, plan: Plan, vocab_size: int | None = None) -> list[Item]:
    from ..bench.workload import Item, first_of_each, read_items, synthetic
    from .demo import packaged_prompts

    if given["synthetic"]:
        length, answer, count = map(int, given["synthetic"].split(","))
        return synthetic(count, length, answer, plan.seed, vocab_size)
    if given["workload"]:
        return read_items(given["workload"], config.each)
    items = [Item(str(i), record["class"], (record["prompt"],)) for i, record in enumerate(packaged_prompts(), 1)]
    return first_of_each(items, config.each or BUILT_IN_EACH)


def measure(arms: Sequence[Arm], items: Sequence[Item], plan: Plan) -> tuple[list[Answer], Mapping[tuple[str, Load], Counters], str]:
    """All answers, what servers counted meanwhile for each arm under each load, and what is missing: nothing, unless an interruption came
    behind the first answer."""
    from ..bench.meter import Meter
    from ..bench.sweep import expected, sweep, warm_up

    note(f"{len(items)} items, arms {', '.join(arm.name for arm in arms)}, loads {', '.join(load.name for load in plan.loads)}: "
         f"{expected(arms, items, plan)} answers or more; warming up …")
    warm_up(arms, items, plan)
    answers: list[Answer] = []
    meter, stopped = Meter(), ""
    total = expected(arms, items, plan)
    try:
        for answer in watched(sweep(arms, items, plan, around=meter.around), total):
            answers.append(answer)
    except KeyboardInterrupt:
        if not answers:
            raise
        stopped = f"INTERRUPTED after {len(answers)} of {max(total, len(answers))} answers"
        note(f"{stopped}: what follows is of these")
    return answers, meter.counted, stopped


def watched(answers: Iterator[Answer], total: int) -> Iterator[Answer]:
    """Progress on standard error: a live line on a terminal, ten notes elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    live = sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn())
    with Progress(*columns, console=console(error=True), transient=True, disable=not live) as progress:
        task = progress.add_task("measuring", total=total)
        for done, answer in enumerate(answers, 1):
            job = answer.job
            words = f"repeat {job.repeat + 1} · load {job.load.name} · {job.arm} · {answer.tokens_per_s:.0f} tokens/s"
            progress.update(task, completed=done, total=max(total, done), description=words)
            if not live and done % max(1, total // 10) == 0:
                note(f"{done} of {max(total, done)} answers: {words}")
            yield answer


def describe(answers: Sequence[Answer], arms: Sequence[Arm], plan: Plan, counters: Mapping[tuple[str, Load], Counters],
             target: Target | None, stopped: str = "") -> dict[str, Any]:
    """The JSON document of `bench`. stopped: what is missing."""
    from ..bench.load import Local
    from ..bench.machine import machine, versions
    from ..bench.summary import is_spec_bench, rows, serving, spec_bench
    from ..bench.workload import SYNTHETIC, unsent

    loads: list[Load] = list(dict.fromkeys(a.job.load for a in answers))
    repeats = counted(max(a.job.repeat for a in answers) + 1, "repeat")
    notes = [f"{counted(len(answers), 'answer')}, {repeats}, temperature {plan.temperature:g}"]
    if stopped:
        notes.insert(0, stopped)
    if any(a.job.item.prompt_class == SYNTHETIC for a in answers):
        notes.append("SYNTHETIC prompts of random tokens: they say nothing about acceptance on real text")
    tools = target is None or target.tokenizer is not None and target.tokenizer.takes_tools
    notes += unsent({a.job.number: a.job.item for a in answers}.values(), target is not None, tools)
    cut = sum(arm.client.cut for arm in arms if isinstance(arm.client, Local))
    if cut:
        notes.append(f"{cut} prompts were longer than the target's context and lost their beginning")
    failed = [a for a in answers if a.error]
    if failed:
        why = " ".join(str(failed[0].error).split())[:200]
        notes.append(f"FAILED: {len(failed)} of {len(answers)} requests, the first of arm {failed[0].job.arm}: {why}")
    document: dict[str, Any] = {
        "machine": machine(), "versions": versions(), "command": " ".join(["draftproof", *sys.argv[1:]]),
        "note": "; ".join(notes), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cells": [row.as_json() for row in rows(answers, arms)],
        # An answer's own numbers go first: a server's counters know no requests, so whoever else asks is among them.
        "serving": [(counters[arm.name, load].as_json() if (arm.name, load) in counters else {}) | serving(answers, arm, load)
                    for load in loads for arm in arms],
        "memory": None if target is None else {
            "weight_bytes": target.facts.weight_bytes, "cache_bytes_per_token": target.facts.cache_bytes_per_token,
            "peak_bytes": peak_bytes()},
    }
    if is_spec_bench(answers):
        document["spec_bench"] = {arm.name: spec_bench(answers, arm.name) for arm in arms}
    return document


def peak_bytes() -> int | None:
    """The most memory this process ever held; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def leave(document: Mapping[str, Any], answers: Sequence[Answer], arms: Sequence[Arm], given: Mapping[str, Any],
          target: Target | None) -> None:
    """The files that were asked for. Raises Failure naming those that cannot be written."""
    from ..bench.report import plot, write_answers, write_csv, write_files, write_html
    from ..bench.summary import answer_lines

    files: dict[Path, Callable[[Path], object]] = {}
    if given["csv_file"]:
        files[given["csv_file"]] = partial(write_csv, document["cells"])
    if given["html_file"]:
        files[given["html_file"]] = partial(write_html, document)
    if given["png_file"]:
        files[given["png_file"]] = lambda file: file.write_bytes(plot(document["cells"]))
    if given["answers"]:
        model = Path(target.facts.name).name if target else given["model"] or "server"
        for arm in arms:
            safe = re.sub(r"[^\w.@+-]+", "-", arm.name)
            files[given["answers"] / f"{safe}.jsonl"] = partial(write_answers, answer_lines(answers, arm.name, model, time.time()))
    write_files(files)


def print_tables(document: Mapping[str, Any]) -> None:
    from ..bench.report import lines_of, spec_bench_lines

    head, lines = lines_of(document["cells"])
    narrow = [i for i, name in enumerate(head) if not name.startswith("e2e") and any(line[i] for line in lines)]     # CSV and HTML have all
    words = "class", "arm", "task"
    print_rows(document["note"] + "; times are p50/p99", [head[i] for i in narrow], [[line[i] for i in narrow] for line in lines], words,
               together=1)
    for arm, rows in document.get("spec_bench", {}).items():
        print_rows(f"Spec-Bench's own report: {arm}", *spec_bench_lines(rows), words)
