"""Is the advice right? Predicted speed-ups against measured ones, and what following the recommendation would have cost.

    python benchmarks/advice.py                                        the demo target, ngram, suffix and model, depths 1 to 8
    python benchmarks/advice.py --shape demo --shape 0.6B --shape 1B --each 4 --tokens 48 --depth 2 --depth 4 --budget 300 --repeats 6
        --write docs/advice_accuracy.md        the tables for docs/, each put there when it is done; hours where memory is slow
    python benchmarks/advice.py --target FOLDER --drafter ngram --drafter model:FOLDER --depth 2 --depth 4 --concurrency 1,8

Per target: the prompts of every class are answered with speculation off, which is the log. The advice is what `draftproof advise`
says of it: E of every drafter and depth from the audition, costs from rounds timed on texts of the log. Then every setting is
measured, repeat after repeat and class by class, until the time is up: whole requests, off and every arm side by side, a step of each in
turn, everyone on a clock of its own; more than one request at a time means that others of the class are always beside it, at other places
of their answers. The costs of a class are those timed just before and just after each of its repeats: memory's speed, and with it
what guesses save, may double within a minute. A cell's measured speed-up is off's seconds over the arm's, summed over its prompts (the
median of each over repeats), with a 95 % bootstrap interval over repeats: the log is the traffic that the advice is about. Cells known to
± 5 % judge the prediction. The recommendation is chosen from the log of every other prompt, the best setting by what was measured on them;
both are judged on the others, as a sample of traffic to come, and the other way round. A recommendation is *shown* slower if the whole
95 % interval of its loss, over repeats and prompts, lies above 3 %.

The last line of standard output is one JSON document; exit code 3 says that a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

from inflate import Shape
from pages import put
from pair import built
from provenance import provenance

from draftproof.advise.check import GOOD, check
from draftproof.advise.measure import measure
from draftproof.advise.predict import OFF, Cost, Forecast, predict
from draftproof.audition.logs import Skipped
from draftproof.audition.run import Arm, Work
from draftproof.audition.stories import Reader
from draftproof.audition.workers import run as audition
from draftproof.bench.arms import local_arms
from draftproof.bench.cells import ALL, Spread, percentile
from draftproof.bench.load import Answer, Job, Load, Local, paced, play
from draftproof.bench.sweep import Arm as Contender
from draftproof.bench.sweep import Plan, warm_up
from draftproof.bench.workload import Item, first_of_each, read_items
from draftproof.config import LoadConfig
from draftproof.drafters import build
from draftproof.models.load import WEIGHTS, load_target
from draftproof.models.target import Target
from draftproof.types import Sampling

SMALL = Shape(512, 4, 8, 4, 1728)
SHAPES = {"0.6B": (Shape(1536, 16, 24, 12, 6144), SMALL), "1B": (Shape(2048, 16, 32, 8, 8192), SMALL)}
MOST_LOSS = 0.03        # of the recommended setting against the best
SHARE = 0.9             # of the judged cells that must be right
RESAMPLES = 400
FEWEST = 3              # repeats


class OwnTime:
    """The seconds that passed while it was entered."""

    def __init__(self) -> None:
        self.spent, self.since = 0.0, 0.0

    def __enter__(self) -> None:
        self.since = time.perf_counter()

    def __exit__(self, *what: object) -> None:
        self.spent += time.perf_counter() - self.since
        self.since = 0.0

    def __call__(self) -> float:
        return self.spent + (time.perf_counter() - self.since if self.since else 0.0)


Times = Mapping[tuple[int, str, int], Sequence[float]]
"""(concurrency, arm, item) → seconds of each repeat."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One target with the drafters that are asked about."""

    name: str
    target: str
    drafters: tuple[str, ...]


def settings(asked: argparse.Namespace, work: Path) -> list[Setting]:
    """The demo target unless others are named; shapes are built from the demo pair, with a drafter of their own."""
    found = [Setting(Path(place).name, place, tuple(asked.drafter or ("ngram", "suffix"))) for place in asked.target or ()]
    demo = Setting("demo", str(WEIGHTS / "target"), tuple(asked.drafter or ("ngram", "suffix", "model")))
    for shape in asked.shape or ():
        if shape == demo.name:
            found.append(demo)
            continue
        folders = [built(WEIGHTS / name, work / shape / name, one, asked.seed)
                   for name, one in zip(("target", "draft"), SHAPES[shape], strict=True)]
        named = [f"model:{folders[1]}" if spec == "model" else spec for spec in asked.drafter or ("ngram", "model")]
        found.append(Setting(shape, str(folders[0]), tuple(named)))
    return found or [demo]


def half_of(number: int, items: Sequence[Item]) -> int:
    """0 or 1: which half an item is in, the items of every class in turn."""
    return sum(item.prompt_class == items[number].prompt_class for item in items[:number]) % 2


def write_log(client: Local, items: Sequence[Item], tokens: int, seed: int, file: Path) -> None:
    """What the target answers without guessing, as the least log that an audition reads."""
    answers: dict[int, Answer] = {}
    jobs = [Job("log", Load(1), 0, i, item, seed + i, tokens, 0.0) for i, item in enumerate(items)]
    for answer in play(client, jobs, Load(1)):
        assert answer.error is None, answer.error
        answers[answer.job.number] = answer
    with file.open("w") as out:
        for i, item in enumerate(items):
            found, finish = answers[i].token_ids or (), "length" if answers[i].tokens == tokens else "stop"
            out.write(json.dumps({"prompt_token_ids": list(client.prompt(jobs[i])), "token_ids": list(found), "max_tokens": tokens,
                                  "finish_reason": finish, "class": item.prompt_class, "temperature": 0}) + "\n")


def split(log: Path, items: Sequence[Item], half: int, file: Path) -> Path:
    """The lines of one half."""
    lines = log.read_text().splitlines(keepends=True)
    file.write_text("".join(line for i, line in enumerate(lines) if half_of(i, items) == half))
    return file


def heard(log: Path, target: Target, arms: Sequence[tuple[str, int]], load: LoadConfig) -> list[dict[str, Any]]:
    work = Work(str(log), tuple(Arm(*arm) for arm in arms), Reader.of(target), target, lambda spec: build(spec, target, "match", load))
    return audition(work).cells()


def pooled(parts: Sequence[Sequence[Cost]]) -> list[Cost]:
    """One list of costs from several of the same rounds, timed at different moments: means, of the intervals the mean's, and medians of
    what few rounds said about the differences between them."""
    typical: dict[str, Callable[[Iterator[float]], float]] = {
        "nodes": fmean, "context": fmean, "slope": median, "slope_error": median, "context_s": median, "start_s": median, "token_s": median}
    found = []
    for group in zip(*parts, strict=True):
        middle = fmean(cost.seconds.median for cost in group)
        half = fmean(cost.seconds.high - cost.seconds.low for cost in group) / 2 / len(group) ** 0.5
        found.append(replace(group[0], seconds=Spread(middle, middle - half, middle + half),
                             **{name: of(getattr(cost, name) for cost in group) for name, of in typical.items()}))
    return found


def forecast(counts: Sequence[dict[str, Any]], costs: Mapping[str, Sequence[Cost]]) -> list[Forecast]:
    """`predict`, every class at its own costs."""
    return [one for name, of_class in costs.items() for one in predict(counts, of_class, apart=True) if one.prompt_class == name]


# Measured


def side_by_side(arms: Sequence[Contender], items: Mapping[int, Item], loads: Sequence[int], repeat: int,
                 asked: argparse.Namespace) -> list[Answer]:
    """Every item once, by every arm and under every load. Between two steps of one arm all others do theirs."""
    found: list[Answer] = []
    block = count(1 + repeat * len(loads) * len(items))
    for load in (Load(n, steady=True) for n in loads):
        pieces = [[number] for number in items] if load.concurrency == 1 else [list(items)]
        for piece in pieces:
            runs, this = [], next(block)
            for arm in arms:
                assert isinstance(arm.client, Local)
                arm.client.clock = clock = OwnTime()
                jobs = [Job(arm.name, load, repeat, number, items[number], asked.seed + number, items[number].max_tokens or asked.tokens,
                            0.0, this) for number in piece]
                runs.append((clock, paced(arm.client, jobs, load, clock)))
            dice = random.Random(this)
            while runs:
                for run in dice.sample(runs, len(runs)):
                    clock, steps = run
                    with clock:
                        answers = next(steps, None)
                    if answers is None:
                        runs.remove(run)
                    else:
                        found += answers
    return found


def times_of(answers: Sequence[Answer]) -> dict[tuple[int, str, int], list[float]]:
    found: dict[tuple[int, str, int], list[float]] = {}
    for a in answers:
        assert a.error is None and a.job.load.concurrency is not None, a.error
        found.setdefault((a.job.load.concurrency, a.job.arm, a.job.number), []).append(a.e2e_s)
    return found


def resampled(times: Times, concurrency: int, sides: tuple[Mapping[int, str], Mapping[int, str]], seed: int = 0,
              others: bool = False) -> tuple[float, float, float]:
    """(seconds of the first side over the second's, and its 95 % interval over repeats; of `others` like these items, over items too), each
    summed over the items. A side: item → arm."""
    first, second = ({i: times[concurrency, arm, i] for i, arm in side.items()} for side in sides)
    items, dice = list(first), random.Random(seed)
    repeats = len(first[items[0]])

    def ratio(draws: Sequence[tuple[int, Sequence[int]]]) -> float:
        a, b = (sum(median(side[i][r] for r in draw) for i, draw in draws) for side in (first, second))
        return a / b

    def drawn() -> list[tuple[int, Sequence[int]]]:
        return [(i, dice.choices(range(repeats), k=repeats)) for i in (dice.choices(items, k=len(items)) if others else items)]

    found = sorted(ratio(drawn()) for _ in range(RESAMPLES))
    return ratio([(i, range(repeats)) for i in items]), percentile(found, 0.025), percentile(found, 0.975)


def arm_name(drafter: str, depth: int, depths: Sequence[int]) -> str:
    return "off" if drafter == OFF else drafter if len(depths) == 1 else f"{drafter}@{depth}"


def cells(times: Times, items: Sequence[Item], arms: Sequence[tuple[str, int]], depths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """As `bench --json` has them: per class (and over all), load and arm."""
    for name in [*dict.fromkeys(item.prompt_class for item in items), ALL]:
        mine = [i for i, item in enumerate(items) if name in (ALL, item.prompt_class)]
        for concurrency in sorted({key[0] for key in times}):
            for drafter, depth in arms:
                off, on = (dict.fromkeys(mine, arm) for arm in ("off", arm_name(drafter, depth, depths)))
                mid, low, high = resampled(times, concurrency, (off, on))
                yield {"class": name, "concurrency": concurrency, "drafter": drafter, "depth": str(depth),
                       "speedup": {"median": mid, "low": low, "high": high}}


def regrets(chosen: tuple[Sequence[Forecast], Sequence[Forecast]], times: Times, items: Sequence[Item], arms: Sequence[tuple[str, int]],
            depths: Sequence[int]) -> list[dict[str, Any]]:
    """Per class and load what recommended settings lose against the best of the sweep, off included. chosen: by the log of each half.

    Both are chosen on one half and judged on the other, both ways round: on the half that chose it the best would be so by luck, too."""
    names, found = ["off", *(arm_name(*arm, depths) for arm in arms)], []
    for pair in zip(*([one for one in half if one.recommended] for half in chosen), strict=True):
        name, concurrency = pair[0].prompt_class, pair[0].concurrency
        assert (name, concurrency) == (pair[1].prompt_class, pair[1].concurrency), "both halves have the same classes and loads"
        mine = [i for i, item in enumerate(items) if name in (ALL, item.prompt_class)]
        own: dict[int, str] = {}
        best: dict[int, str] = {}
        for half, one in enumerate(pair):
            choosing = [i for i in mine if half_of(i, items) == half]
            fastest = min(names, key=lambda arm: sum(median(times[concurrency, arm, i]) for i in choosing))
            judging = [i for i in mine if half_of(i, items) != half]
            own |= dict.fromkeys(judging, arm_name(one.drafter, one.depth, depths))
            best |= dict.fromkeys(judging, fastest)
        loss, low, high = (1 - 1 / value for value in resampled(times, concurrency, (own, best), others=True))
        found.append({"class": name, "concurrency": concurrency, "recommended": list(dict.fromkeys(own.values())),
                      "best": list(dict.fromkeys(best.values())), "slower_by": loss, "low": low, "high": high, "shown": low > MOST_LOSS})
    return found


# One target


def examine(setting: Setting, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Log, advice, measurement and comparison."""
    load = LoadConfig(self_test=False, threads=asked.threads)
    target = load_target(setting.target, load)
    items = first_of_each(read_items(asked.prompts_file), asked.each)
    depths, loads = asked.depth or [1, 2, 4, 8], [int(n) for n in asked.concurrency.split(",")]
    log = folder / f"{setting.name}.jsonl"
    arms = [(spec, depth) for spec in setting.drafters for depth in depths]
    with ExitStack() as stack:
        clients = local_arms(stack, target, setting.drafters, depths, load, batch=max(loads))
        say(f"{setting.name}: {len(items)} prompts, {len(arms)} arms; the log …")
        off = clients[0].client
        assert isinstance(off, Local)
        write_log(off, items, asked.tokens, asked.seed, log)
        say("the audition …")
        whole = heard(log, target, arms, load)
        halves = [heard(split(log, items, half, folder / "half.jsonl"), target, arms, load) for half in (0, 1)]
        texts = [(read.story.prompt, read.story.answer) for read in Reader.of(target).stories(log, Skipped())]
        classes = list(dict.fromkeys(item.prompt_class for item in items))
        sampling = Sampling(temperature=0.0, max_tokens=asked.tokens, seed=1)
        timed = partial(measure, target, arms, texts, loads, sampling, asked.rounds, load)
        warm_up(clients, items, Plan(tokens=asked.tokens))
        began, answers, parts = time.perf_counter(), list[Answer](), [timed()[0]]
        for repeat in range(asked.repeats):
            if repeat >= FEWEST and time.perf_counter() - began > asked.budget:
                break
            for name in classes:
                say(f"repeat {repeat + 1}, {name} …")
                mine = {number: item for number, item in enumerate(items) if item.prompt_class == name}
                answers += side_by_side(clients, mine, loads, repeat, asked)
                parts.append(timed()[0])
    times = times_of(answers)
    around = {name: [part for before in range(place, len(parts) - 1, len(classes)) for part in parts[before:before + 2]]
              for place, name in enumerate(classes)}
    costs = {ALL: pooled(parts), **{name: pooled(own) for name, own in around.items()}}
    forecasts, first, second = (forecast(counts, costs) for counts in (whole, *halves))
    found = check(forecasts, {"cells": list(cells(times, items, arms, depths))})
    lengths = {(c["drafter"], c["depth"], c["class"]): c["acceptance_length"] for c in whole}
    intervals = {(f.prompt_class, f.concurrency, f.drafter, f.depth): f.speedup for f in forecasts}
    for row in found["cells"]:
        row["tokens_per_round"] = lengths[row["drafter"], row["depth"], row["class"]]
        spread = intervals[row["class"], row["concurrency"], row["drafter"], row["depth"]]
        row["predicted_low"], row["predicted_high"] = spread.low, spread.high
    lost, facts = regrets((first, second), times, items, arms, depths), target.facts
    return {"name": setting.name, "facts": {"parameters": facts.parameters, "dtype": facts.dtype, "threads": facts.threads},
            "prompts": len(items), "tokens": asked.tokens, "repeats": len(next(iter(times.values()))), "cells": found["cells"],
            "seconds": [[*key, list(seconds)] for key, seconds in times.items()],
            "costs": [[asdict(cost) for cost in part] for part in parts],
            "judged": found["judged"], "within_10_percent": found["within_10_percent"], "regret": lost,
            "passed": (found["within_10_percent"] or 1.0) >= SHARE and not any(one["shown"] for one in lost)}


# On paper


def section(one: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The tables of one target as Markdown."""
    machine = facts["machine"]
    lines = [*_summary(one), f"Made by `{facts['command']}` on {facts['date']}, draftproof at {facts['versions']['revision']}; "
             f"{machine['cpu']}, {machine['cores']} cores, {machine['read_gb_per_s']} GB/s of memory, load {machine['load_average']}.", "",
             "| class | concurrent | drafter | depth | tokens per round | predicted | measured | error | |",
             "|---|---|---|---|---|---|---|---|---|", *map(_line, one["cells"]),
             "", "Chosen on one half of the prompts and measured on the other, both ways round:", "",
             "| class | concurrent | recommended | best | slower by (95 %) | |", "|---|---|---|---|---|---|"]
    for r in one["regret"]:
        own, best = (", ".join(map(_spec, r[side])) for side in ("recommended", "best"))
        lines.append(f"| {r['class']} | {r['concurrency']} | {own} | {best} | {r['slower_by']:.1%} ({r['low']:.1%}–{r['high']:.1%}) "
                     f"| {'**shown**' if r['shown'] else ''} |")
    return "\n".join(lines)


def _summary(one: Mapping[str, Any]) -> list[str]:
    facts, share = one["facts"], one["within_10_percent"]
    errors = [row["error"] for row in one["cells"] if row["narrow"]]
    right = "" if share is None else f", {share:.0%} of them right, median error {median(errors):+.1%}"
    return [f"## {one['name']}: {facts['parameters'] / 1e6:.0f} M, {facts['dtype']}, {facts['threads']} threads", "",
            f"{one['prompts']} prompts, {one['tokens']} tokens at most, {one['repeats']} repeats. {one['judged']} of {len(one['cells'])} "
            f"cells judged{right}.", ""]


def _line(row: Mapping[str, Any]) -> str:
    verdict = "" if not row["narrow"] else "right" if abs(row["error"]) <= GOOD else "**wrong**"
    values = [f"{row[name]:.2f} ({row[name + '_low']:.2f}–{row[name + '_high']:.2f})" for name in ("predicted", "measured")]
    return (f"| {row['class']} | {row['concurrency']} | {_spec(row['drafter'])} | {row['depth']} | {row['tokens_per_round']:.2f} "
            f"| {' | '.join(values)} | {row['error']:+.0%} | {verdict} |")


def _spec(spec: str) -> str:
    """Without the path of a model."""
    name, _, rest = spec.partition(":")
    return name + (f"@{rest.rpartition('@')[2]}" if "@" in rest else "")


def say(words: str) -> None:
    print(words, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="a model folder; repeatable")
    parser.add_argument("--shape", action="append", choices=["demo", *SHAPES], help="the demo pair, as it is or inflated; repeatable")
    parser.add_argument("--drafter", action="append", help="a spec; repeatable. `model` is the shape's own draft model")
    parser.add_argument("--depth", action="append", type=int)
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--prompts-file", type=Path, default=WEIGHTS / "prompts.jsonl")
    parser.add_argument("--each", type=int, default=6, help="prompts of every class")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=24, help="timed around each class of a repeat, of every drafter, depth and load")
    parser.add_argument("--repeats", type=int, default=5, help=f"of the measurement, at most; {FEWEST} are always finished")
    parser.add_argument("--budget", type=float, default=600, help="seconds after which no further repeat begins, per target")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep logs, inflated models and what was found here")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between each target's marks of this page")
    asked = parser.parse_args()
    if asked.repeats < FEWEST:
        parser.error(f"--repeats {asked.repeats}: {FEWEST} are the least that say something about the noise")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        work = asked.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for setting in settings(asked, work):
            results.append(examine(setting, asked, work))
            (work / f"{setting.name}.json").write_text(json.dumps(results[-1]))
            facts = provenance()
            text = section(results[-1], facts)
            say(text)
            if asked.write:
                put(asked.write, setting.name, text)
    passed = all(one["passed"] for one in results)
    print(json.dumps({**facts, "passed": passed, "targets": results}))
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
