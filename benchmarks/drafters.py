"""Every built-in drafter on the demo target, per class of prompts and temperature: the table of docs/drafters.md.

    python benchmarks/drafters.py --write docs/drafters.md             # about 30 minutes on 2 cores
    python benchmarks/drafters.py --prompts 2 --arms ngram,eagle3,eagle3/8x4

Arms are run in one process over one loaded target, interleaved, each prompt with the same seed in all arms. An arm is a drafter
spec; `SPEC/NODES` asks for a tree of so many nodes. All arms draft to one depth, so that acceptance lengths compare; the
draft cost is the drafter's time over the tokens it drafted. Prints the tables and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pages import put
from provenance import provenance

from draftproof import Engine, LoadConfig
from draftproof.bench.cells import ALL, OFF, Middle, Run, cells
from draftproof.bench.run import Arm, by_class, measure
from draftproof.core.tally import Tally
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.trace.report import requests
from draftproof.trace.sinks import Memory

ARMS = ("ngram", "suffix", "recycle", "recycle/16", "model", "model/16", "eagle3", "eagle3/16", "medusa", "medusa/16", "mlp", "mlp/16",
        "mtp", "mtp/16", "pard", "dflash", "dflash/16", "layer-skip:exit=5", "ngram+eagle3", "suffix+eagle3", "suffix+eagle3/16")


def open_arms(specs: Sequence[str], depth: int, threads: int | None) -> tuple[list[Arm], dict[str, Memory]]:
    load = LoadConfig(threads=threads, self_test=False)
    target = load_target(builtin("target"), load)
    arms, sinks = [Arm(OFF, Engine(target, load=load), "none", "0")], {}
    for spec in specs:
        drafter, _, nodes = spec.partition("/")
        sinks[spec] = Memory()
        engine = Engine(target, drafter, depth, tree=int(nodes) if nodes else None, load=load, sinks=[sinks[spec]])
        arms.append(Arm(spec, engine, drafter, str(depth)))
    return arms, sinks


def tallies(runs: Sequence[Run], sinks: Mapping[str, Memory]) -> dict[tuple[str, str, float], tuple[Tally, float]]:
    """(arm, class or ALL, temperature) → counts and seconds of drafting. A sink saw its arm's requests in the order of the runs."""
    found: dict[tuple[str, str, float], tuple[Tally, float]] = {}
    for arm, sink in sinks.items():
        mine = [run for run in runs if run.arm == arm]
        for run, report in zip(mine, requests(sink.events).values(), strict=True):
            for name in (run.prompt_class, ALL):
                tally, seconds = found.get((arm, name, run.temperature), (Tally(), 0.0))
                found[arm, name, run.temperature] = tally + report.tally, seconds + report.clock.draft_s
    return found


def rows(runs: Sequence[Run], sinks: Mapping[str, Memory]) -> list[dict[str, Any]]:
    """Per arm and temperature, over all classes and then class by class."""
    counts = tallies(runs, sinks)
    table = []
    for cell in sorted(cells(runs), key=lambda cell: cell.prompt_class != ALL):
        if cell.arm == OFF or cell.temperature is None:
            continue
        tally, seconds = counts[cell.arm, cell.prompt_class, cell.temperature]
        table.append({"drafter": cell.arm, "class": "all classes" if cell.prompt_class == ALL else cell.prompt_class,
                      "temperature": cell.temperature, "speedup": cell.speedup,
                      "tokens_per_round": tally.acceptance_length, "acceptance_length": tally.acceptance_length_drafted,
                      "hazard": [round(h, 3) for h in tally.hazard],
                      "reached": tally.reached, "rounds": tally.rounds, "drafted": tally.drafted, "accepted": tally.accepted,
                      "draft_ms_per_token": 1e3 * seconds / tally.drafted if tally.drafted else None, "identical": cell.identical})
    return table


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(row["class"] for row in table):
        for temperature in dict.fromkeys(row["temperature"] for row in table):
            lines += [f"\n**{name}, temperature {temperature:g}**\n",
                      "| drafter | tokens per round | acceptance length | accepted / drafted | hazard by depth | ms per draft "
                      "| speed-up (95 %) | identical |", "|---|---|---|---|---|---|---|---|"]
            chosen = [row for row in table if row["class"] == name and row["temperature"] == temperature]
            for row in sorted(chosen, key=lambda r: -(r["tokens_per_round"] or 0)):
                speed: Middle = row["speedup"]
                cost = row["draft_ms_per_token"]
                length = row["acceptance_length"]
                lines.append(f"| {row['drafter']} | {row['tokens_per_round']:.2f} | {'–' if length is None else f'{length:.2f}'} "
                             f"| {row['accepted']} / {row['drafted']} | {' '.join(f'{h:.2f}' for h in row['hazard'])} "
                             f"| {'–' if cost is None else f'{cost:.2f}'} "
                             f"| {speed.text} | {'yes' if row['identical'] else 'NO'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="drafter specs, separated by commas; SPEC/NODES for a tree")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4, help="of each class")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this page")
    args = parser.parse_args()
    records = [json.loads(line) for line in (WEIGHTS / "prompts.jsonl").read_text(encoding="utf-8").splitlines() if line]
    specs = [spec for spec in args.arms.split(",") if spec]
    arms, sinks = open_arms(specs, args.depth, args.threads)
    prompts = by_class(records, args.prompts)
    for _ in measure(arms, prompts[:1], [0.0], 1, 16, 1):
        pass
    for sink in sinks.values():
        sink.events.clear()
    runs = []
    total = len(arms) * len(prompts) * len(args.temperatures) * args.repeats
    for run in measure(arms, prompts, args.temperatures, args.repeats, args.tokens, 1):
        runs.append(run)
        if len(runs) % len(arms) == 0:
            print(f"{len(runs)} of {total} runs", file=sys.stderr, flush=True)
    table, facts = rows(runs, sinks), provenance()
    where = facts["machine"]
    made = (f"Made by `{facts['command']}` on {where['cpu']}, {where['threads']} threads, {facts['date']}, revision "
            f"{facts['versions']['revision']}: depth {args.depth}, {args.prompts} prompts a class, at most {args.tokens} tokens.\n")
    page = made + markdown(table)
    print(page)
    if args.write:
        put(args.write, "table", page)
    plain = [{**row, "speedup": asdict(row["speedup"])} for row in table]
    print(json.dumps({**facts, "depth": args.depth, "cells": plain}))


if __name__ == "__main__":
    main()
