"""Speed on a laptop-sized model: transformers plain and assisted, ours off and on, in one interleaved run.

    python benchmarks/engine.py                        # the demo pair, inflated to 579 M and 18 M; about 20 minutes on 2 cores
    python benchmarks/engine.py --prompts 4 --repeats 1 --work DIR         # quicker; keeps the inflated models in DIR

bfloat16, greedy, batch 1, the end token ignored on both sides. Every prompt meets every arm once per repeat, in a random
order, so that each ratio compares runs that are seconds to a minute apart. Rates are of decoding: tokens after the first
delivery over the time since it, the same definition on both sides. Prints a table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from overhead import EVERY_OPTION, Stopwatch, constant_overhead, overhead, scoring_pass
from pair import SHAPES, inflated, read_prompts
from provenance import provenance
from ratios import BRACKETS, Ratio, paired, shown
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from draftproof import Engine, LoadConfig, Sampling
from draftproof.bench.cells import percentile
from draftproof.drafters.model import ModelDrafter
from draftproof.models.load import WEIGHTS, load_target

ASSISTED = (2, 4, 6)                     # num_assistant_tokens
DEPTHS = tuple(range(1, 9))
PLAIN, OFF = "transformers", "ours off"
LONG_VOCABULARY = 128_256
GOALS = {  # name → (bound, whether more is better)
    "off / transformers plain": (1.8, True),
    "on at its best depth / transformers assisted at its best K": (1.6, True),
    "scoring pass of 5 rows / plain pass": (1.25, False),
    "overhead per round, greedy, ms": (3.0, False),
    "overhead per round, every option, ms": (3.0, False),
    f"overhead per round, top-p 0.95, vocabulary {LONG_VOCABULARY}, ms": (6.0, False),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One run. rate: decoded tokens per second; whole: all tokens over all of the time."""

    tokens: tuple[int, ...]
    rate: float
    whole: float
    acceptance_length: float


Arm = Callable[[list[int], int], Timed]
Runs = dict[str, list[list[Timed]]]      # arm → prompt → repeats


class Ticks(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; notes when how many tokens stood."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def transformers_arms(target: Path, draft: Path) -> dict[str, Arm]:
    model, assistant = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (target, draft))
    for each in (model, assistant):
        each.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)       # no end token: nothing to stop at

    def arm(ahead: int) -> Arm:
        def run(prompt: list[int], new_tokens: int) -> Timed:
            more: dict[str, Any] = {}
            if ahead:
                more["assistant_model"] = assistant
                assistant.generation_config.num_assistant_tokens = ahead
                assistant.generation_config.num_assistant_tokens_schedule = "constant"
                assistant.generation_config.assistant_confidence_threshold = 0.0
            ids, ticks = torch.tensor([prompt]), Ticks()
            start = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                                     stopping_criteria=StoppingCriteriaList([ticks]), **more)
            (first, had), (last, have) = ticks.seen[0], ticks.seen[-1]
            return Timed(tuple(out[0, len(prompt):].tolist()), (have - had) / (last - first), (have - len(prompt)) / (last - start),
                         (have - had) / (len(ticks.seen) - 1))
        return run

    return {PLAIN: arm(0), **{f"{PLAIN} assisted K={k}": arm(k) for k in ASSISTED}}


def our_arms(engine: Engine) -> dict[str, Arm]:
    count = iter(range(1 << 30))

    def arm(speculation: dict[str, Any]) -> Arm:
        def run(prompt: list[int], new_tokens: int) -> Timed:
            out = engine.generate(prompt, Sampling(temperature=0, max_tokens=new_tokens, ignore_eos=True, seed=1),
                                  speculation=speculation, tenant=f"run {next(count)}")        # a tenant of its own: no prefix is reused
            return Timed(tuple(out.token_ids), 1 / out.metrics["tpot_s"], out.metrics["tokens_per_s"], out.metrics["acceptance_length"])
        return run

    return {OFF: arm({"drafter": "none"}), **{f"ours depth {d}": arm({"depth": d}) for d in DEPTHS}, "ours auto": arm({"depth": "auto"})}


def interleaved(arms: dict[str, Arm], prompts: Sequence[list[int]], repeats: int, new_tokens: int, console: Console) -> Runs:
    """Every arm on every prompt, `repeats` times, in a new order each time."""
    runs: Runs = {name: [[] for _ in prompts] for name in arms}
    for name, arm in arms.items():
        console.print(f"warming up {name}", style="dim")
        arm(prompts[0], 8)
    order, rng = list(arms), random.Random(0)
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            rng.shuffle(order)
            for name in order:
                runs[name][i].append(arms[name](prompt, new_tokens))
            console.print(f"repeat {repeat + 1}/{repeats}, prompt {i + 1}/{len(prompts)}", style="dim")
    return runs


def ratio(runs: Runs, over: str, under: str, whole: bool = False) -> Ratio:
    """`paired` of the rates of two arms; whole: of whole requests."""
    def rate(run: Timed) -> float:
        return run.whole if whole else run.rate

    over_rates, under_rates = ([[rate(run) for run in each] for each in runs[name]] for name in (over, under))
    return {name: None if value is None else round(value, 3) for name, value in paired(over_rates, under_rates).items()}


def fastest(runs: Runs, names: Sequence[str]) -> str:
    return max(names, key=lambda name: median(r.rate for each in runs[name] for r in each))


def cells(runs: Runs, best_assisted: str) -> list[dict[str, Any]]:
    rows = []
    for name, by_prompt in runs.items():
        flat = [r for each in by_prompt for r in each]
        rates = sorted(r.rate for r in flat)
        base = PLAIN if name.startswith(PLAIN) else OFF
        same = [a.tokens == b.tokens for x, y in zip(by_prompt, runs[base], strict=True) for a, b in zip(x, y, strict=True)]
        rows.append({
            "arm": name, "tokens_per_s": {"median": round(median(rates), 2), "low": round(percentile(rates, 0.1), 2),
                                          "high": round(percentile(rates, 0.9), 2)},
            "whole_tokens_per_s": round(median(r.whole for r in flat), 2),
            "acceptance_length": round(sum(r.acceptance_length for r in flat) / len(flat), 2), "identical": f"{sum(same)}/{len(same)}",
            "over_plain": ratio(runs, name, PLAIN), "over_off": ratio(runs, name, OFF), "over_assisted": ratio(runs, name, best_assisted)})
    return rows


def show(console: Console, rows: list[dict[str, Any]], best_assisted: str, results: list[dict[str, Any]]) -> None:
    table = Table(title="decoding, tokens per second (10th–90th percentile); ratios are paired medians " + BRACKETS)
    assisted = best_assisted.removeprefix(PLAIN).strip()
    for heading in ("arm", "tokens/s", f"÷ {PLAIN}", f"÷ {assisted}", f"÷ {OFF}", "tokens/pass", "same ids as plain"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")

    for row in rows:
        rate = row["tokens_per_s"]
        table.add_row(row["arm"], f"{rate['median']:.1f} ({rate['low']:.1f}–{rate['high']:.1f})", shown(row["over_plain"]),
                      shown(row["over_assisted"]), shown(row["over_off"]), f"{row['acceptance_length']:.2f}", row["identical"])
    console.print(table)
    goals = Table(title="goals")
    for heading in ("what", "measured", "goal", "met"):
        goals.add_column(heading, justify="left" if heading == "what" else "right")
    for r in results:
        goals.add_row(r["name"], f"{r['value']:.2f}", f"{'≥' if r['more_is_better'] else '≤'} {r['goal']}", "yes" if r["met"] else "no")
    console.print(goals)


def judge(values: dict[str, float]) -> list[dict[str, Any]]:
    out = []
    for name, (bound, more) in GOALS.items():
        value = values[name]
        met = value >= bound if more else value <= bound
        out.append({"name": name, "value": round(value, 3), "goal": bound, "more_is_better": more, "met": met})
    return out


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    console = Console(stderr=True)
    torch.set_num_threads(args.threads)
    folders = {name: inflated(getattr(args, name), name, work, args.seed) for name in SHAPES}
    prompts = read_prompts(args.prompts_file, AutoTokenizer.from_pretrained(folders["target"]), args.prompts, args.shortest, args.longest)
    load = LoadConfig(dtype="bfloat16", device="cpu", threads=args.threads, cache_tokens=16_384)
    target, lm = load_target(str(folders["target"]), load), load_target(str(folders["draft"]), replace(load, self_test=False))
    facts = {name: {"parameters": f.parameters, "tier": f.tier, "invisible": f.invisible_reason, "reasons": f.reasons}
             for name, f in (("target", target.facts), ("draft", lm.facts))}
    console.print(f"target {target.facts.parameters / 1e6:.1f} M, drafter {lm.facts.parameters / 1e6:.1f} M, {len(prompts)} prompts of "
                  f"{min(map(len, prompts))}–{max(map(len, prompts))} tokens, {args.new_tokens} new tokens")
    with Engine(target, ModelDrafter(lm)) as engine:
        runs = interleaved({**transformers_arms(folders["target"], folders["draft"]), **our_arms(engine)}, prompts, args.repeats,
                           args.new_tokens, console)
        passes = scoring_pass(target, prompts[0])
        best_depth = fastest(runs, [name for name in runs if name.startswith("ours depth")])
        at = int(best_depth.split()[-1])
        watch = Stopwatch(target, lm)                              # from here on passes are timed; the speed above is without
        real = overhead(engine, watch, prompts[:3], {}, at, 1, args.new_tokens)
        real_all = overhead(engine, watch, prompts[:3], EVERY_OPTION, at, 1, args.new_tokens)
    best_assisted = fastest(runs, [name for name in runs if "assisted" in name])
    nucleus = {"temperature": 1.0, "top_p": 0.95}
    long, flat = (constant_overhead(LONG_VOCABULARY, nucleus, at, 1, flat=f) for f in (False, True))
    rows = cells(runs, best_assisted)
    measured = (ratio(runs, OFF, PLAIN)["median"], ratio(runs, best_depth, best_assisted)["median"], passes[5] / passes[1],
                real["overhead_ms"], real_all["overhead_ms"], long["overhead_ms"])
    goals = judge(dict(zip(GOALS, measured, strict=True)))
    show(Console(width=None if sys.stdout.isatty() else 150), rows, best_assisted, goals)
    return {**provenance(), "models": facts, "threads": args.threads, "prompt_tokens": [len(p) for p in prompts],
            "new_tokens": args.new_tokens, "repeats": args.repeats, "cells": rows, "best_assisted": best_assisted, "best_depth": best_depth,
            "whole_request": {"off / plain": ratio(runs, OFF, PLAIN, True), "on / assisted": ratio(runs, best_depth, best_assisted, True)},
            "pass_ms_by_rows": {str(k): round(v, 2) for k, v in passes.items()},
            "overhead": {"depth": at, "greedy": real, "every option": real_all, f"vocabulary {LONG_VOCABULARY}, top-p 0.95": long,
                         f"vocabulary {LONG_VOCABULARY}, top-p 0.95, flat law": flat},
            "goals": goals}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WEIGHTS / "target", help="the small target; default: the demo model")
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "draft")
    parser.add_argument("--prompts-file", type=Path, default=WEIGHTS / "prompts.jsonl", help='lines of {"class", "prompt"}')
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=120, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the inflated weights")
    parser.add_argument("--work", type=Path, help="keep the inflated models here (1.2 GB)")
    parser.add_argument("--check", action="store_true", help="exit with 3 if a goal is missed")
    args = parser.parse_args()
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
        result = run(args, args.work)
    else:
        with tempfile.TemporaryDirectory(prefix="draftproof-bench-") as folder:
            result = run(args, Path(folder))
    print(json.dumps(result))
    return 3 if args.check and not all(goal["met"] for goal in result["goals"]) else 0


if __name__ == "__main__":
    sys.exit(main())
