"""Is automatic depth ever slower than no speculation, and is a drafter that is configured but idle free?

    python benchmarks/never_slower.py --write docs/never_slower.md          # 24 pairs a cell: about an hour on 2 cores
    python benchmarks/never_slower.py --drafter ngram --pairs 8 --seconds 180
    python benchmarks/never_slower.py --concurrency 16 --waves 4            # a queue in place of requests that all begin at once
    python benchmarks/never_slower.py --pairs 0 --write docs/never_slower.md        # only the idle part: about 6 minutes

A cell is a drafter, a class of prompts and a concurrency. A pair is the same prompts, as many as the concurrency (times --waves), with
the same seeds, answered by every arm in turn: off (no drafter), depths 0, 2, 4, 8, and auto; the order of the arms is drawn for each
pair. Cells alternate too, so one controller meets all classes and loads in one life, as a server's does. A pair's ratio is off's time
over the arm's; a cell's is the median with a 95 % interval, of fewer than six pairs with their range. The best fixed depth is chosen
on one half of the pairs and measured against on the other, both ways round.

Idle: two engines over one target, one with a drafter configured and off, take turns of 50 rounds on the same texts; round i of one
is compared with round i of the other. Two engines without a drafter are the control.

Prints tables and the verdicts, the last line is JSON; exits with 3 if a verdict is "no".
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pages import put
from provenance import provenance

from draftproof import Engine, LoadConfig, Sampling
from draftproof.bench.arms import local_arms
from draftproof.bench.cells import OFF, Middle, middle
from draftproof.bench.load import Answer, Job, Load, play
from draftproof.bench.sweep import Arm, Plan, warm_up
from draftproof.bench.workload import Item
from draftproof.core.tally import Tally
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.models.target import Target
from draftproof.trace.events import RoundDone
from draftproof.trace.sinks import Memory

DEPTHS = (0, 2, 4, 8)
MEAN, CELL, BEST, IDLE = 0.98, 0.97, 0.97, 0.01      # the goals
BLOCK = 50                                            # rounds of an idle engine's turn


@dataclass(frozen=True, slots=True)
class Timed:
    """One arm's part of a pair."""

    seconds: float
    cpu_s: float
    tokens: int
    texts: tuple[tuple[int, ...], ...]
    tally: Tally


@dataclass(slots=True)
class Cell:
    drafter: str
    prompt_class: str
    concurrency: int
    pairs: list[dict[str, Timed]] = field(default_factory=list)      # depth as shown, or "off", → what it took

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.prompt_class}, {self.concurrency} at a time"

    def ratios(self, arm: str, against: str = OFF, cpu: bool = False, half: int | None = None) -> list[float]:
        """Seconds of `against` over those of `arm`, per pair; half: only every second pair, from 0 or from 1."""
        pairs = self.pairs if half is None else self.pairs[half::2]
        return [(p[against].cpu_s / p[arm].cpu_s if cpu else p[against].seconds / p[arm].seconds) for p in pairs]

    def against_best(self) -> tuple[float, str]:
        """Auto against the fixed depth that was best on the other half of the pairs, and these depths."""
        found, names = [], []
        for half in (0, 1):
            best = max(map(str, DEPTHS), key=lambda depth: median(self.ratios(depth, half=half)))
            found.append(median(self.ratios("auto", best, half=1 - half)))
            names.append(best)
        return exp(fmean(map(log, found))), "/".join(dict.fromkeys(names))

    def row(self) -> dict[str, Any]:
        speed, (best, depth) = middle(self.ratios("auto")), self.against_best()
        low, high = (speed.min, speed.max) if speed.low is None else (speed.low, speed.high)
        total = sum((pair["auto"].tally for pair in self.pairs), Tally())
        return {"drafter": self.drafter, "class": self.prompt_class, "concurrency": self.concurrency, "pairs": len(self.pairs),
                "auto": {"median": speed.median, "low": low, "high": high},
                "auto_cpu": median(self.ratios("auto", cpu=True)),
                "fixed": {str(d): median(self.ratios(str(d))) for d in DEPTHS}, "best_fixed": depth, "auto_over_best": best,
                "drafted_per_round": total.drafted / total.rounds if total.rounds else 0.0,
                "acceptance_length": total.acceptance_length,
                "identical": all(timed.texts == pair[OFF].texts for pair in self.pairs for timed in pair.values())}


def measure(cells: Sequence[Cell], arms: Mapping[str, Sequence[Arm]], items: Mapping[str, Sequence[Item]], pairs: int, seconds: float,
            tokens: int, temperature: float, waves: int = 1) -> Iterator[Cell]:
    """Pair by pair, every cell in turn, until there are enough or the time is up; yields the cell that has a new pair."""
    began, dice = time.perf_counter(), random.Random(0)
    for number in range(pairs):
        order = list(cells)
        dice.shuffle(order)
        for cell in order:
            if number >= 2 and time.perf_counter() - began > seconds:
                return
            pool = items[cell.prompt_class]
            requests = waves * cell.concurrency
            chosen = [pool[(number * requests + i) % len(pool)] for i in range(requests)]
            turn = list(arms[cell.drafter])
            dice.shuffle(turn)
            pair = {}
            for arm in turn:
                load = Load(cell.concurrency)
                jobs = [Job(arm.name, load, number, i, item, 1 + i, tokens, temperature) for i, item in enumerate(chosen)]
                pair[OFF if arm.name == OFF else arm.depth] = _block(arm, jobs, load)
            cell.pairs.append(pair)
            yield cell


def _block(arm: Arm, jobs: Sequence[Job], load: Load) -> Timed:
    start, cpu = time.perf_counter(), time.process_time()
    answers: list[Answer] = list(play(arm.client, jobs, load))
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    failed = [a.error for a in answers if a.error]
    if failed:
        sys.exit(f"{arm.name}: {failed[0]}")
    answers.sort(key=lambda a: a.job.number)
    return Timed(seconds, cpu_s, sum(a.tokens for a in answers), tuple(a.token_ids or () for a in answers),
                 sum((a.tally for a in answers if a.tally), Tally()))


# A drafter that is configured and idle.

def idle(target: Target, drafter: str, load: LoadConfig, prompt: str, mode: str, rounds: int, tokens: int = 4 * BLOCK) -> dict[str, Any]:
    """Rounds with the drafter configured against rounds without; mode "switched off" or "depth 0", or "control": two engines without.

    Where a text's pages lie in memory is worth a percent or two, so the engines change places with every text and a text is short. How far
    two engines without a drafter differ is what the others' differences may be by chance.
    """
    events, calls = Memory(), [0]
    with ExitStack() as stack:
        plain = stack.enter_context(Engine(target, load=load))
        if mode == "control":
            idler = stack.enter_context(Engine(target, load=load, sinks=[events]))
        else:
            idler = stack.enter_context(Engine(target, drafter, 0 if mode == "depth 0" else "auto", load=load, sinks=[events]))
            guesser = idler.speculation.drafter
            assert guesser is not None
            propose = guesser.propose

            def counted(*args: Any) -> Any:
                calls[0] += 1
                return propose(*args)

            guesser.propose = counted  # type: ignore[method-assign]
        if mode == "switched off":
            idler.set_speculation(enabled=False)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        text, turn = 0, 0
        while len(times[False]) < rounds:
            text += 1
            sampling = Sampling(temperature=0.8, top_p=1.0, seed=text, max_tokens=tokens + 2, ignore_eos=True)
            for engine in (plain, idler) if text % 2 else (idler, plain):
                engine.submit(prompt, sampling, tenant=f"idle {text} {engine is plain}")     # no pages in common
                while not engine.step():
                    pass
            for _ in range(tokens // BLOCK):
                turn += 1
                for on in (turn % 2 == 0, turn % 2 == 1):
                    times[on] += [_step(idler if on else plain) for _ in range(BLOCK)]
            for engine in (plain, idler):
                while engine.stats()["requests"]["running"]:
                    engine.step()
    wall, cpu = (against([a[i] for a in times[False]], [b[i] for b in times[True]]) for i in (0, 1))
    done = [event for event in events.events if isinstance(event, RoundDone)]
    return {"drafter": drafter, "mode": mode, "rounds": len(times[False]), "draft_calls": calls[0],
            "extra_rows": sum(len(event.nodes) for event in done),
            "round_ms": 1e3 * median(a[0] for a in times[False]), "difference": wall.median,
            "low": wall.min if wall.low is None else wall.low, "high": wall.max if wall.high is None else wall.high,
            "difference_cpu": cpu.median}


def against(off: Sequence[float], on: Sequence[float]) -> Middle:
    """How much longer the rounds of `on` took than those of `off`, as a share of one of these; both in turns of BLOCK rounds.

    Of turns, not of rounds: a machine that is slow for a tenth of a second is slow for a whole turn, so that its rounds say one thing.
    """
    turns = [median(b) - median(a) for a, b in zip(_turns(off), _turns(on), strict=True)]
    return middle(turn / median(off) for turn in turns)


def _turns(times: Sequence[float]) -> list[Sequence[float]]:
    return [times[at:at + BLOCK] for at in range(0, len(times), BLOCK)]


def _step(engine: Engine) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    engine.step()
    return time.perf_counter() - start, time.process_time() - cpu


# What it says.

def verdicts(rows: Sequence[Mapping[str, Any]], idles: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The goals, what was found, and whether it is enough."""
    found = []

    def goal(name: str, value: str, passed: bool) -> None:
        found.append({"goal": name, "found": value, "passed": passed})

    if rows:
        mean = exp(fmean(log(row["auto"]["median"]) for row in rows))
        best = exp(fmean(log(row["auto_over_best"]) for row in rows))
        slow = [f"{row['drafter']}/{row['class']}/{row['concurrency']}" for row in rows if row["auto"]["high"] < CELL]
        goal(f"auto / off, geometric mean over {len(rows)} cells ≥ {MEAN}", f"{mean:.3f}", mean >= MEAN)
        goal(f"no cell whose whole 95 % interval of auto / off lies below {CELL}", ", ".join(slow) or "none", not slow)
        goal(f"auto / best fixed depth, geometric mean ≥ {BEST}", f"{best:.3f}", best >= BEST)
        different = [f"{row['drafter']}/{row['class']}/{row['concurrency']}" for row in rows if not row["identical"]]
        goal("every text is off's, token for token", ", ".join(different) or "yes", not different)
    if idles:
        calls, extra = sum(r["draft_calls"] for r in idles), sum(r["extra_rows"] for r in idles)
        goal("configured and idle: no draft call, no extra row", f"{calls} calls, {extra} rows", calls == extra == 0)
        worst = max(r["difference"] for r in idles if r["mode"] != "control")
        noise = ", ".join(f"{r['difference']:+.2%}" for r in idles if r["mode"] == "control")
        goal(f"configured and idle: median difference per round ≤ {IDLE:.0%} of a round",
             f"{worst:+.2%} (two engines without a drafter: {noise})", worst <= IDLE)
    return found


def page(facts: Mapping[str, Any], made: str, rows: Sequence[Mapping[str, Any]], idles: Sequence[Mapping[str, Any]], image: str) -> str:
    """Verdicts and tables of one part: of the cells or of the idle drafters."""
    where, goals = facts["machine"], verdicts(rows, idles)
    lines = [f"Made by `{facts['command']}` on {where['cpu']}, {where['threads']} threads, {facts['date']}, revision "
             f"{facts['versions']['revision']}, load average {where['load_average']}: {made}.", "",
             "| goal | found | reached |", "|---|---|---|"]
    lines += [f"| {g['goal']} | {g['found']} | {'yes' if g['passed'] else 'NO'} |" for g in goals]
    if rows:
        lines += ["", f"![auto and fixed depths against off]({image})", "",
                  "| drafter | class | at a time | pairs | auto / off (95 %) | CPU time | " +
                  " | ".join(f"depth {d}" for d in DEPTHS) + " | auto / best fixed | drafted a round | acceptance length |",
                  "|---" * (9 + len(DEPTHS)) + "|"]
        for r in rows:
            auto = r["auto"]
            lines.append(f"| {r['drafter']} | {r['class']} | {r['concurrency']} | {r['pairs']} "
                         f"| {auto['median']:.2f} ({auto['low']:.2f}–{auto['high']:.2f}) | {r['auto_cpu']:.2f} | "
                         + " | ".join(f"{r['fixed'][str(d)]:.2f}" for d in DEPTHS)
                         + f" | {r['auto_over_best']:.2f} (depth {r['best_fixed']}) | {r['drafted_per_round']:.2f} "
                           f"| {r['acceptance_length']:.2f} |")
    if idles:
        lines += ["", "| configured and idle | how | rounds | draft calls | extra rows | difference per round (95 %) | CPU time |",
                  "|---|---|---|---|---|---|---|"]
        lines += [f"| {r['drafter']} | {r['mode']} | {r['rounds']} | {r['draft_calls']} | {r['extra_rows']} "
                  f"| {r['difference']:+.2%} ({r['low']:+.2%} to {r['high']:+.2%}) of {r['round_ms']:.1f} ms | {r['difference_cpu']:+.2%} |"
                  for r in idles]
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Every cell's ratios to off, one line a cell."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    places = list(range(len(rows), 0, -1))
    for depth, shade in zip(DEPTHS, ("0.75", "0.6", "0.45", "0.3"), strict=True):
        axes.plot([r["fixed"][str(depth)] for r in rows], places, "o", color=shade, markersize=4, label=f"depth {depth}")
    middle = [r["auto"]["median"] for r in rows]
    below = [r["auto"]["median"] - r["auto"]["low"] for r in rows]
    above = [r["auto"]["high"] - r["auto"]["median"] for r in rows]
    axes.errorbar(middle, places, xerr=[below, above], fmt="D", color="#c0392b", markersize=5, capsize=3, label="auto, 95 %")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(CELL, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(places, [f"{r['drafter']}, {r['class']}, {r['concurrency']} at a time" for r in rows])
    axes.set_xscale("log")
    ticks = [0.25, 0.5, 0.7, 0.85, 1, 1.25, 1.5, 2, 3, 4]
    axes.set_xticks(ticks, [f"{t:g}×" for t in ticks], minor=False)
    axes.set_xticks([], minor=True)
    low = min([CELL, *(min(r["auto"]["low"], *r["fixed"].values()) for r in rows)])
    axes.set_xlim(0.95 * low, 1.05 * max([1.0, *(max(r["auto"]["high"], *r["fixed"].values()) for r in rows)]))
    axes.set_xlabel("tokens per second, speculation off = 1")
    axes.legend(fontsize="small", loc="best")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    args = _arguments()
    if args.write and args.pairs and find_spec("matplotlib") is None:           # asked before what takes many minutes
        sys.exit("the picture needs matplotlib; install draftproof[report], or leave --write out")
    load = LoadConfig(threads=args.threads, self_test=False)
    target = load_target(args.target or builtin("target"), load)
    records = [json.loads(line) for line in (WEIGHTS / "prompts.jsonl").read_text(encoding="utf-8").splitlines() if line]
    items: dict[str, list[Item]] = {}
    for number, record in enumerate(records):
        items.setdefault(record["class"], []).append(Item(str(number), record["class"], (record["prompt"],)))
    drafters = [d for d in args.drafter.split(",") if d]
    loads = [int(c) for c in args.concurrency.split(",")]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        arms = {d: local_arms(stack, target, [d], [*DEPTHS, None], load, batch=max(loads), options={"ignore_eos": True}) for d in drafters}
        for mine in arms.values():
            warm_up(mine, next(iter(items.values())), Plan(tokens=16))
        cells = [Cell(d, name, c) for d in drafters for c in loads for name in items]
        if args.pairs:
            for done, cell in enumerate(measure(cells, arms, items, args.pairs, args.seconds, args.tokens, args.temperature,
                                                  args.waves), 1):
                shown = ", ".join(f"{name} {r:.2f}" for name in (*map(str, DEPTHS), "auto") for r in cell.ratios(name)[-1:])
                print(f"{done} of {args.pairs * len(cells)} pairs: {cell.name}: {shown}", file=sys.stderr, flush=True)
            rows = [cell.row() for cell in cells if len(cell.pairs) >= 2]
    prompt = items["code"][0].turns[0]
    assert isinstance(prompt, str)
    modes = [("none", "control"), *((d, mode) for d in drafters for mode in ("switched off", "depth 0"))]
    idles = [idle(target, drafter, load, prompt, mode, args.idle) for drafter, mode in modes] if args.idle else []
    goals, facts, image = verdicts(rows, idles), provenance(), Path("images/never_slower.svg")
    target_name = f"target {Path(args.target).name if args.target else 'built in'}"
    fewest = min((row["pairs"] for row in rows), default=0)
    waves = f"{args.waves} requests one after another in each place, " if args.waves > 1 else ""
    made = f"at least {fewest} pairs a cell, {waves}{args.tokens} tokens, temperature {args.temperature:g}, {target_name}"
    parts = {"cells": page(facts, made, rows, [], str(image)) if rows else "",
             "idle": page(facts, f"temperature 0.8, {target_name}", [], idles, "") if idles else ""}
    for name, text in parts.items():
        if text:
            print(text, end="\n\n")
        if text and args.write:
            put(args.write, name, text)
    if args.write and rows:
        plot(rows, args.write.parent / image)
    print(json.dumps({**facts, "cells": rows, "idle": idles, "goals": goals}))
    sys.exit(0 if all(g["passed"] for g in goals) else 3)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="ngram,model", help="drafter specs, separated by commas (ngram,model)")
    parser.add_argument("--concurrency", default="1,4,16", help="requests at a time (1,4,16)")
    parser.add_argument("--pairs", type=int, default=24, help="of each cell; 0: only the idle part")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further pair after so long (two of each cell are always run)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer; the end of a text is ignored")
    parser.add_argument("--waves", type=int, default=1, help="requests for each place: 1 begins all at once and waits for the slowest, "
                                                             "more keep a queue, as a busy server does (1)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", help="a model folder in place of the built-in one")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--idle", type=int, default=2000, help="rounds of the idle part, for each drafter and way to be idle; 0: none")
    parser.add_argument("--write", type=Path, help="put each table between its marks in this page, and the picture in images/ beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
