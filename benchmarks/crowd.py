"""Many users at once: ours and the engines one would use instead, each batching what it is given as it does.

    python benchmarks/crowd.py --work DIR                           # what is installed; models and environments are those of peers.py
    python benchmarks/crowd.py --work DIR --users 4 --prompts 16 --peers ours,ours+eagle3+auto,vllm --write docs/peers.md

So many users each hand over a prompt, wait for their text and hand over the next one, until all prompts are answered. Every arm serves all
of them --repeats times, in an order drawn anew, while the others stand still. Tokens a second are all new tokens over the time from the
first prompt to the last token, the reading of prompts included: what a machine gives. What a user feels stands beside it: the time until
the first token, the time of a token since then, and the longest pause within a text. Ratios are paired by repeat. transformers, which
does not batch by itself, is given batches; it guesses for one text alone, and onnxruntime-genai writes batches of prompts of one length
alone, so these are not asked.

Prints tables and, as the last line, JSON; exits with 3 if a goal is missed, with 1 if our own engine did not run.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))       # what stands there is no package: peers.py has its name

import torch
from crew import requests, understood
from peers import (
    OURS,
    PEERS,
    Arm,
    Broken,
    Crew,
    carry_out,
    ending,
    goals,
    listed,
    of_shape,
    pair_options,
    prepared,
    rates,
    same,
    shared_options,
    tell,
    verdict,
)
from provenance import provenance
from ratios import BRACKETS, paired, shown

from draftproof.bench.cells import percentile
from draftproof.commands.console import counted

ALONE = ("onnx",)       # asked for one text at a time only


@dataclass(frozen=True, slots=True)
class Text:
    """One user's answer; seconds. first_s: from handing over to the first tokens; token_s: of each later one; pause_s: the longest."""

    ids: tuple[int, ...]
    first_s: float
    token_s: float
    pause_s: float

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Text:
        """Raises Broken."""
        with understood():
            ids, came = tuple(answer["ids"]), [(float(when), int(count)) for when, count in answer["came"]]
            (began, first), (ended, _) = came[0], came[-1]
            pauses = [b - a for (a, _), (b, _) in pairwise(came)]
            text = cls(ids, began - float(answer["begun_s"]), (ended - began) / max(1, len(ids) - first), max(pauses, default=0.0))
        if sum(count for _, count in came) != len(ids):
            raise Broken(f"{len(ids)} tokens, told of {sum(count for _, count in came)}")
        return text


@dataclass(frozen=True, slots=True)
class Served:
    """What an arm made of all prompts."""

    texts: tuple[Text, ...]
    seconds: float

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [text.ids for text in self.texts]

    @property
    def rate(self) -> float:
        """New tokens of all per second."""
        return sum(map(len, self.ids)) / self.seconds

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Served:
        """Raises Broken."""
        with understood():
            return cls(tuple(Text.of(text) for text in answer["texts"]), float(answer["seconds"]))


Runs = dict[tuple[float, Arm], list[list[Served]]]      # temperature and arm → repeats, each alone


def measure(crew: Crew, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Runs:
    """Every arm on all prompts, `repeats` times, in a new order each time."""
    cases = [(t, arm) for t in args.temperatures for arm in crew.arms]
    runs: Runs = {case: [] for case in cases}
    dice = random.Random(args.seed)
    for repeat in range(args.repeats):
        dice.shuffle(cases)
        seeds = range(1 + repeat * len(prompts), 1 + (repeat + 1) * len(prompts))
        for t, arm in cases:
            if arm not in crew.broken:
                try:
                    asked = requests(arm, prompts, args.tokens, t, seeds, args.users)
                    runs[t, arm].append([crew.answer(arm, asked, Served.of)])
                    tell(f"repeat {repeat + 1}/{args.repeats}, {arm}: {runs[t, arm][-1][0].rate:.1f} tokens/s")
                except Broken as error:
                    tell(f"{arm}: {error}")
    return {case: runs[case] for case in runs if case[1] not in crew.broken}


def cell(runs: Runs, key: tuple[float, Arm]) -> dict[str, Any]:
    (t, arm), flat = key, [run for run, in runs[key]]
    texts = [text for run in flat for text in run.texts]

    def over(other: Arm) -> Any:
        base = runs.get((t, other))
        return paired(rates(runs[key]), rates(base)) if base else None

    def ms(values: Sequence[float]) -> dict[str, float]:
        ordered = sorted(1e3 * value for value in values)
        return {"median": median(ordered), "p90": percentile(ordered, 0.9)}

    def equal(other: Arm) -> str | None:
        base = runs.get((t, other))
        return same([run.texts for run in flat], [run.texts for run, in base]) if base else None

    return {"temperature": t, "peer": arm.peer, "depth": arm.depth, "tokens_per_s": median(run.rate for run in flat),
            "over_off": over(Arm(OURS, 0)), "over_own_plain": over(Arm(arm.peer, 0)), "first_ms": ms([text.first_s for text in texts]),
            "token_ms": ms([text.token_s for text in texts]), "pause_ms": ms([text.pause_s for text in texts]),
            "same_as_own_plain": equal(Arm(arm.peer, 0)), "same_as_ours_off": equal(Arm(OURS, 0))}


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    facts, there = provenance(), prepared(args, work)
    if "transformers" in there.peers:
        there.peers["transformers"] = replace(there.peers["transformers"], guesses=False)
    arms = there.arms(args.depths)
    with there.crew(args, arms, work, args.users) as crew:
        runs = measure(crew, there.prompts, args)
    order = sorted(runs, key=lambda key: (key[0], list(there.peers).index(key[1].peer), key[1].depth))
    return {**facts, "threads": args.threads, "users": args.users, "prompt_tokens": [len(p) for p in there.prompts], "tokens": args.tokens,
            "repeats": args.repeats, "bits": args.bits, "peers": crew.versions, "load_s": crew.load_s,
            "not_run": {**there.missing, **{str(arm): why for arm, why in sorted(crew.broken.items())}},
            "cells": [cell(runs, key) for key in order], "goals": [goal for goal in goals(runs, {}, args.bits) if goal["found"]]}


def page(result: Mapping[str, Any]) -> str:
    lines = [f"Made by `{result['command']}` on {result['machine']['cpu']}, {result['threads']} threads, {result['date']}, revision "
             f"{result['versions']['revision']}: {counted(result['users'], 'user')}, {len(result['prompt_tokens'])} prompts of "
             f"{min(result['prompt_tokens'])} to {max(result['prompt_tokens'])} tokens, {result['tokens']} new ones each, "
             f"{counted(result['repeats'], 'repeat')}, {result['bits']} bits a weight. Ratios are paired medians "
             f"{BRACKETS.replace('prompts', 'repeats')}; times are a user's, the median and the 90th percentile.", "",
             "| T | engine | tokens/s of all | ÷ ours off | ÷ own plain | ms to the first token | ms a token | longest pause, ms "
             "| same ids as own plain | as ours off |", "|---" * 10 + "|"]
    for row in result["cells"]:
        times = [f"{row[name]['median']:.0f}, {row[name]['p90']:.0f}" for name in ("first_ms", "token_ms", "pause_ms")]
        words = [f"{row['temperature']:g}", str(Arm(row["peer"], row["depth"])), f"{row['tokens_per_s']:.1f}", shown(row["over_off"]),
                 shown(row["over_own_plain"]), *times, row["same_as_own_plain"] or "–", row["same_as_ours_off"] or "–"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, *ending(result)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared_options(parser, prompts=24, tokens=64)
    pair_options(parser, depths=(2, 4))
    parser.set_defaults(peers=[name for name in PEERS if name not in ALONE])
    parser.add_argument("--users", type=int, default=8, help="texts that are written at once; 2 or more")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperatures", type=listed(float), default=[0.0], help="(0)")
    args = parser.parse_args()
    if args.users < 2 or (asked := [name for name in args.peers if name in ALONE]):
        parser.error(f"--users {args.users}: 2 or more; peers.py asks for one" if args.users < 2 else
                     f"--peers {','.join(asked)}: it writes batches of prompts of one length alone")
    return args


def main() -> int:
    args = arguments()
    return carry_out(args, of_shape("crowd", args), run, page, verdict)


if __name__ == "__main__":
    sys.exit(main())
