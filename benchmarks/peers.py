"""Ours and the engines one would use instead, on the same models and prompts, in one interleaved run.

    python benchmarks/peers.py --work DIR                           # what is installed, on 579 M and 18 M
    python benchmarks/peers.py --work DIR --peers ours,vllm --prompts 4 --repeats 1 --temperatures 0
    python benchmarks/peers.py --work DIR --together 6 --write docs/peers.md        # at most 6 engines in memory
    python benchmarks/peers.py --work DIR --shape moe               # a mixture of experts in place of the dense target
    python benchmarks/peers.py --work DIR --bits 4                  # the target's weights rounded to four bits, by each engine's own rule

The built-in pair is inflated (see inflate.py: nothing to merge or skip) and converted for each engine, kept in DIR; the built-in EAGLE-3
head, which only our own arms use, is turned to fit the inflated target and stays as small as it is. Each engine runs in its own environment
as one or more workers (peers/), which are stopped while another one is measured. Prompt by prompt, every arm runs in an order drawn anew:
an engine, plain or guessing at one depth, at one temperature. Rates are of decoding: the tokens after the first delivery over the time
since it; the time until it is told beside them. Ratios are paired by prompt and repeat. Just before and just after every run the memory is
read; a plain pass cannot take less than reading the checkpoint's matrices does at that speed, the floor, unless it reads fewer bytes: ours
keeps bfloat16 weights in twelve bits, without loss, on processors with AVX512. "Best" is the arm with the highest median
rate of this very run. With --shape moe the target is a mixture of experts of as many parameters, a Mixtral, whose tables stand between
marks of their own; its floor counts the experts that a token chooses; the draft model is the same; onnxruntime-genai's builder knows no
such model. What cannot run is named with its reason. Prints tables and, as the last line, JSON; exits with 3 if a measured goal
is missed, with 1 if our own engine did not run.

The environments, in the repository's folder (elsewhere: --env NAME=PATH of a python):

    make .venv-vllm/.installed
    python3 -m venv .venv-openvino
    .venv-openvino/bin/pip install openvino-genai==2026.4.1.0 "optimum-intel[nncf]==2.2.0" torch==2.13.0
    .venv-openvino/bin/pip uninstall -y torchvision                 # where torch is a build for CPUs: theirs is not made for it
    python3 -m venv .venv-onnx
    .venv-onnx/bin/pip install onnxruntime-genai==0.18.0 onnx-ir==1.1.0 transformers==5.19.0 torch==2.13.0
    python3 -m venv .venv-llamacpp
    .venv-llamacpp/bin/pip install torch==2.13.0 transformers==5.19.0 sentencepiece==0.2.3
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz && mv llama_cpp_python-0.3.36/vendor/llama.cpp .venv-llamacpp/
    cmake -S .venv-llamacpp/llama.cpp -B .venv-llamacpp/llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build .venv-llamacpp/llama.cpp/build --target llama-server llama-quantize -j

Where a processor has AMX, llama.cpp's own use of it ends with an illegal instruction on weights of four bits: add
"-DCMAKE_C_FLAGS=-mno-amx-int8 -mno-amx-tile -mno-amx-bf16" and the same as -DCMAKE_CXX_FLAGS to the first cmake for --bits 4.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).resolve().parent / "peers"))       # what stands there is no package: this file has its name

import torch
from crew import AUTO, Arm, Broken, Crew, Peer, Timed, converted, engine_of, request
from inflate import Shape
from memory import Memory
from pages import put
from pair import SHAPES, TARGETS, built, long_prompts, pass_bytes, read_prompts, turned_head
from provenance import digest, provenance
from ratios import BRACKETS, paired, shown
from transformers import AutoTokenizer

from draftproof.bench.cells import percentile
from draftproof.commands.console import counted
from draftproof.models.load import WEIGHTS

HERE = Path(__file__).resolve().parent
OURS = "ours"
NODES = 11          # of a tree: with the root as many rows as share a reading of the weights
TREE_DEPTH = 6      # levels cost a head a tenth of a millisecond each, and 4 would hold its greedy texts back
MOST_NODES = 23     # where the engine chooses how many are worth their rows
OFF_GOAL, LIMIT_GOAL, ON_GOAL, BEST_GOAL, SAMPLED_GOAL = 0.95, 0.85, 1.15, 1.35, 2.0


def peer(script: str, environment: str = "", **more: Any) -> Peer:
    program = HERE.parent / environment / "bin" / "python" if environment else Path(sys.executable)
    return Peer(HERE / "peers" / script, program, **more)


def ours(drafter: str, *, plain: bool = False, **more: Any) -> Peer:
    """An arm of our own; one worker serves them all but those that are split."""
    return peer("with_draftproof.py", plain=plain, drafter=drafter, bits=(16, 8, 4), **more)


PEERS = {
    OURS: ours("model", plain=True),
    "ours+bytes": ours("model", plain=True, guesses=False, split="arm", cache_bits=8),
    "ours+ngram": ours("ngram+model"),
    "ours+block": ours("ngram+model", rule="block"),
    "ours+eagle3": ours("eagle3"),
    "ours+eagle3+block": ours("eagle3", rule="block"),
    "ours+eagle3+tree": ours("eagle3", tree=NODES, depth=TREE_DEPTH),
    "ours+eagle3+auto": ours("eagle3", tree=MOST_NODES, depth=AUTO),
    "ours+ngram+eagle3": ours("ngram+eagle3"),
    "ours+ngram+eagle3+tree": ours("ngram+eagle3", tree=NODES),
    "ours+ngram+eagle3+auto": ours("ngram+eagle3", tree=MOST_NODES, depth=AUTO),
    "ours+ngram+eagle3+block": ours("ngram+eagle3", rule="block"),
    "transformers": peer("with_transformers.py"),
    "vllm": peer("with_vllm.py", ".venv-vllm", split="depth"),
    "vllm+lookup": peer("with_vllm.py", ".venv-vllm", split="depth", plain=False, drafter="lookup"),
    "openvino": peer("with_openvino.py", ".venv-openvino", split="arm", converts=True, bits=(16, 8, 4)),
    "openvino+lookup": peer("with_openvino.py", ".venv-openvino", split="arm", converts=True, plain=False, drafter="lookup",
                            bits=(16, 8, 4)),
    "llamacpp": peer("with_llamacpp.py", ".venv-llamacpp", split="depth", converts=True, bits=(16, 4)),
    "onnx": peer("with_onnx.py", ".venv-onnx", converts=True, guesses=False),
}

T = TypeVar("T")

OWN = tuple(name for name in PEERS if engine_of(name) == OURS)

Key = tuple[float, Arm]                                # temperature and arm
Runs = dict[Key, list[list[Timed]]]                    # → prompt → repeats
Rates = list[list[float]]                              # prompt → repeats
Limits = dict[Key, Rates]                              # of each run


# The run.

def measure(crew: Crew, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], repeats: int, tokens: int, seed: int,
            memory: Memory) -> tuple[Runs, Limits]:
    """Every arm on every prompt, `repeats` times, in a new order each time; with what the memory gave around each run, GB/s."""
    def attempt(arm: Arm, act: Callable[[], T]) -> T | None:
        try:
            return None if arm in crew.broken else act()
        except Broken as error:
            tell(f"{arm}: {error}")
            return None

    for arm in crew.arms:
        tell(f"warming up {arm}")
        attempt(arm, partial(crew.meet, arm))
    cases = [(t, arm) for t in temperatures for arm in crew.arms]
    runs: Runs = {case: [[] for _ in prompts] for case in cases}
    reads: Limits = {case: [[] for _ in prompts] for case in cases}
    dice = random.Random(seed)
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            dice.shuffle(cases)
            gave = memory.read()
            for t, arm in cases:
                asked = request(arm, prompt, tokens, t, 1 + i + len(prompts) * repeat)
                run, before = attempt(arm, partial(crew.answer, arm, asked, Timed.of)), gave
                if run:
                    gave = memory.read()
                    runs[t, arm][i].append(run)
                    reads[t, arm][i].append(harmonic_mean([before, gave]))      # half of the bytes at each speed
            tell(f"repeat {repeat + 1}/{repeats}, prompt {i + 1}/{len(prompts)}, {gave:.0f} GB/s")
    there = [case for case in cases if case[1] not in crew.broken]
    return {case: runs[case] for case in there}, {case: reads[case] for case in there}


# What it says.

def rates(by_prompt: Sequence[Sequence[Timed]]) -> Rates:
    return [[run.rate for run in each] for each in by_prompt]


def firsts(by_prompt: Sequence[Sequence[Timed]]) -> Rates:
    """Seconds until the first tokens."""
    return [[run.first_s for run in each] for each in by_prompt]


def fastest(runs: Runs, temperature: float, arms: Sequence[Arm]) -> Arm | None:
    there = [arm for arm in arms if (temperature, arm) in runs]
    return max(there, key=lambda arm: median(run.rate for each in runs[temperature, arm] for run in each), default=None)


def same(a: Sequence[Sequence[Timed]], b: Sequence[Sequence[Timed]] | None) -> str | None:
    """How many texts are equal, of how many."""
    if b is None:
        return None
    equal = [x.ids == y.ids for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)]
    return f"{sum(equal)}/{len(equal)}"


def cell(runs: Runs, key: Key, limits: Limits) -> dict[str, Any]:
    (t, arm), flat = key, [run for each in runs[key] for run in each]
    values, off, own = sorted(run.rate for run in flat), runs.get((t, Arm(OURS, 0))), runs.get((t, Arm(arm.peer, 0)))
    stood = [run.accepted for run in flat if run.accepted is not None] if arm.depth else []
    tokens = sum(len(run.ids) for run in flat)
    return {"temperature": t, "peer": arm.peer, "depth": arm.depth, "ms_per_token": 1e3 / median(values),
            "tokens_per_s": {"median": median(values), "low": percentile(values, 0.1), "high": percentile(values, 0.9)},
            "first_ms": 1e3 * median(run.first_s for run in flat),
            "first_over_off": paired(firsts(runs[key]), firsts(off)) if off else None,
            "whole_tokens_per_s": median(len(run.ids) / run.seconds for run in flat), "of_limit": paired(rates(runs[key]), limits[key]),
            "over_off": paired(rates(runs[key]), rates(off)) if off else None,
            "over_own_plain": paired(rates(runs[key]), rates(own)) if own else None,
            "tokens_per_pass": tokens / max(1, tokens - sum(stood)) if stood else None,
            "same_as_own_plain": same(runs[key], own), "same_as_ours_off": same(runs[key], off)}


def limits_of(reads: Limits, size: int) -> Limits:
    """Plain tokens per second, were reading the weights, of so many bytes, all; reads: GB/s."""
    return {key: [[1e9 * read / size for read in each] for each in by_prompt] for key, by_prompt in reads.items()}


def goals(runs: Runs, limits: Limits, bits: int = 16) -> list[dict[str, Any]]:
    """Every goal with what was found; "met" is None where an arm is missing. Of rounded weights fewer."""
    found = []

    def goal(name: str, bound: float, over: Key | None, under: Key | Rates | None) -> None:
        a, b = (side if isinstance(side, list) else rates(runs[side]) if side in runs else None for side in (over, under))
        value = paired(a, b) if a and b else None
        against = None if under is None or isinstance(under, list) else str(under[1])
        found.append({"goal": name, "bound": bound, "over": str(over[1]) if over else None, "against": against, "found": value,
                      "met": value["median"] >= bound if value else None})

    def key(t: float, arm: Arm | None) -> Key | None:
        return (t, arm) if arm else None

    for t in dict.fromkeys(t for t, _ in runs):
        here = [arm for temperature, arm in runs if temperature == t]
        off, on = (t, Arm(OURS, 0)), key(t, fastest(runs, t, [a for a in here if a.peer == OURS and a.depth]))
        best_on = key(t, fastest(runs, t, [a for a in here if a.peer in OWN and a.depth]))
        others = [a for a in here if a.peer not in OWN]
        guessing, plain = [a for a in others if a.depth], fastest(runs, t, [a for a in others if not a.depth])
        if t == 0 and bits != 16:
            goal("off ÷ the best peer's plain decoding", 1.0, off, key(t, plain))
            goal("on at its best depth ÷ off", 1.0, on, off)
        elif t == 0:
            goal("off ÷ the best peer's plain decoding", OFF_GOAL, off, key(t, plain))
            goal("off ÷ what the memory allows", LIMIT_GOAL, off, limits.get(off))
            rival = key(t, fastest(runs, t, [a for a in guessing if "+" not in a.peer]))
            goal("on at its best depth ÷ the best peer's guessing at its best depth, the same draft model", ON_GOAL, on, rival)
            goal("on with its best drafter ÷ the best peer's guessing, any drafter", BEST_GOAL, best_on, key(t, fastest(runs, t, guessing)))
        elif bits == 16:
            for way, arms in (("guessing, best depths", guessing), ("plain decoding", [a for a in others if not a.depth])):
                for name in dict.fromkeys(a.peer for a in arms):
                    best = fastest(runs, t, [a for a in arms if a.peer == name])
                    goal(f"on with its best drafter ÷ {name}'s {way}, temperature {t:g}", SAMPLED_GOAL, best_on, key(t, best))
    return found


def page(result: Mapping[str, Any]) -> str:
    memory = result["read_gb_per_s"]
    lines = [f"Made by `{result['command']}` on {result['machine']['cpu']}, {result['threads']} threads, {result['date']}, revision "
             f"{result['versions']['revision']}: {counted(len(result['prompt_tokens']), 'prompt')}, "
             f"{counted(result['repeats'], 'repeat')}, {result['tokens']} tokens. The memory gave {memory['median']:.1f} GB/s "
             f"({memory['low']:.1f}–{memory['high']:.1f}), a plain pass of the "
             f"target, {result['bits']} bits a weight, reads {result['pass_bytes'] / 1e9:.3f} GB: at least {result['floor_ms']:.2f} ms, "
             f"the limit below. Ratios are paired medians {BRACKETS}.", "",
             "| T | engine | tokens/s (10th–90th) | ms a token | ÷ limit | ÷ ours off | ÷ own plain | ms to the first token | ÷ ours off "
             "| tokens/pass | same ids as own plain | as ours off |", "|---" * 12 + "|"]
    for row in result["cells"]:
        rate, each = row["tokens_per_s"], row["tokens_per_pass"]
        words = [f"{row['temperature']:g}", str(Arm(row["peer"], row["depth"])),
                 f"{rate['median']:.1f} ({rate['low']:.1f}–{rate['high']:.1f})", f"{row['ms_per_token']:.1f}",
                 *(shown(row[name]) for name in ("of_limit", "over_off", "over_own_plain")),
                 f"{row['first_ms']:.0f}", shown(row["first_over_off"]),
                 f"{each:.2f}" if each else "–", row["same_as_own_plain"] or "–", row["same_as_ours_off"] or "–"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, *ending(result)])


def ending(result: Mapping[str, Any]) -> list[str]:
    """The lines behind a table of arms: what did not run, and the goals."""
    reached = {True: "yes", False: "NO", None: "not measured"}
    return [*(f"\n{name}: not run: {why}" for name, why in result["not_run"].items()),
            "", "| goal | at least | found | against | reached |", "|---|---|---|---|---|",
            *(f"| {goal['goal']} | {goal['bound']} | {shown(goal['found'])} | {goal['against'] or '–'} | {reached[goal['met']]} |"
              for goal in result["goals"])]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run needs of models and engines. sources: the pair and the head as published; models: by engine, as it reads them; missing:
    why an engine is not there."""

    sources: dict[str, Path]
    prompts: list[list[int]]
    peers: dict[str, Peer]
    models: dict[str, dict[str, Path]]
    missing: dict[str, str]

    def arms(self, depths: Sequence[int]) -> list[Arm]:
        def those(peer: Peer) -> list[int]:
            own = [peer.depth] if peer.depth else depths
            return [*([0] if peer.plain else []), *(own if peer.guesses else [])]

        return [Arm(name, depth) for name in self.models for depth in those(self.peers[name])]

    def crew(self, args: argparse.Namespace, arms: Sequence[Arm], work: Path, users: int = 1) -> Crew:
        return Crew(arms, self.peers, self.models, self.prompts[0], work, args.threads, args.together, args.patience, args.bits,
                    users)


def shapes_of(args: argparse.Namespace) -> dict[str, Shape]:
    return {**SHAPES, "target": TARGETS[args.shape]}


def prepared(args: argparse.Namespace, work: Path) -> Prepared:
    """The pair inflated, the head turned, and both as each engine reads them; what work already holds is taken."""
    sources = {role: getattr(args, role).absolute() for role in ("target", "draft", "head")}
    if not args.as_is:
        shapes = shapes_of(args)
        turned = turned_head(sources["head"], sources["target"], shapes["target"], work / "head", args.seed)
        sources = {**{role: built(sources[role], work / role, shape, args.seed) for role, shape in shapes.items()}, "head": turned}
    return converted_for_each(args, sources, work, {name: PEERS[name] for name in args.peers})


def converted_for_each(args: argparse.Namespace, sources: dict[str, Path], work: Path, peers: dict[str, Peer]) -> Prepared:
    """These models as each engine reads them, and prompts for them."""
    words = AutoTokenizer.from_pretrained(sources["target"])
    prompts = (long_prompts(words, args.prompts, args.long) if args.long else
               read_prompts(args.prompts_file, words, args.prompts, args.shortest, args.longest))
    found = Prepared(sources, prompts, peers, {}, {})
    for engine, program in args.env:
        for name in (name for name in found.peers if engine_of(name) == engine_of(engine)):
            found.peers[name] = replace(found.peers[name], program=program)
    for name, peer in found.peers.items():
        try:
            found.models[name] = converted(name, peer, sources, digest, work, args.bits)
        except Broken as error:
            found.missing[name] = str(error)
            tell(f"{name}: {error}")
    return found


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    facts, there = provenance(), prepared(args, work)
    memory, size = Memory(), pass_bytes(there.sources["target"]) * args.bits // 16
    with there.crew(args, there.arms(args.depths), work) as crew:
        runs, reads = measure(crew, there.prompts, args.temperatures, args.repeats, args.tokens, args.seed, memory)
    limits = limits_of(reads, size)
    flat = sorted(read for by_prompt in reads.values() for each in by_prompt for read in each) or [memory.read()]
    order = sorted(runs, key=lambda key: (key[0], list(there.peers).index(key[1].peer), key[1].depth))
    return {**facts, "threads": args.threads, "prompt_tokens": [len(p) for p in there.prompts], "tokens": args.tokens,
            "repeats": args.repeats,
            "pair": {role: "as it is" if args.as_is else str(shape) for role, shape in shapes_of(args).items()}, "pass_bytes": size,
            "read_gb_per_s": {"median": median(flat), "low": percentile(flat, 0.1), "high": percentile(flat, 0.9)},
            "floor_ms": size / median(flat) / 1e6, "peers": crew.versions, "load_s": crew.load_s,
            "not_run": {**there.missing, **{str(arm): why for arm, why in sorted(crew.broken.items())}},
            "bits": args.bits,
            "cells": [cell(runs, key, limits) for key in order], "goals": goals(runs, limits, args.bits)}


def verdict(result: Mapping[str, Any]) -> int:
    if not any(row["peer"] == OURS for row in result["cells"]):
        return 1
    return 3 if any(goal["met"] is False for goal in result["goals"]) else 0


def of_shape(name: str, args: argparse.Namespace) -> str:
    """The marks of tables about targets of this shape."""
    return name if args.shape == "dense" else f"{name}-{args.shape}"


def carry_out(args: argparse.Namespace, name: str, run: Callable[[argparse.Namespace, Path], Mapping[str, Any]],
              page: Callable[[Mapping[str, Any]], str], verdict: Callable[[Mapping[str, Any]], int]) -> int:
    """Run in the folder --work, or in one of its own; print the page, and put it between the marks `name` where --write says; the JSON as
    the last line and where --json says. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))          # so that stopped workers are not left behind
    with tempfile.TemporaryDirectory(prefix="draftproof-peers-") if args.work is None else contextlib.nullcontext(args.work) as folder:
        work = Path(folder).absolute()
        work.mkdir(parents=True, exist_ok=True)
        result = run(args, work)
    text = page(result)
    print(text)
    if args.write:
        put(args.write, name, text)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result))
    return verdict(result)


def main() -> int:
    args = arguments()
    return carry_out(args, of_shape("measured", args), run, page, verdict)


def listed(kind: Any) -> Any:
    return lambda text: [kind(word) for word in text.split(",") if word]


def shared_options(parser: argparse.ArgumentParser, prompts: int, tokens: int) -> None:
    """Of every program that asks the engines; the numbers are its defaults."""
    def known(name: str) -> str:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected one of {', '.join(PEERS)}")
        return name

    def environment(text: str) -> tuple[str, Path]:
        name, _, program = text.partition("=")
        return known(name), Path(program).absolute()

    parser.add_argument("--peers", type=listed(known), default=list(PEERS), help=",".join(PEERS))
    parser.add_argument("--env", type=environment, action="append", default=[], metavar="NAME=PYTHON", help="an engine's own python")
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--tokens", type=int, default=tokens, help="new tokens of each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--together", type=int, default=0, help="workers alive at once, if memory is short; 0: all")
    parser.add_argument("--patience", type=float, default=300, help="seconds for an answer; three times as long for a start")
    parser.add_argument("--bits", type=int, default=16, choices=(16, 8, 4), help="of the target's weights; a draft model keeps its own")
    parser.add_argument("--prompts-file", type=Path, default=WEIGHTS / "prompts.jsonl", help='lines of {"class", "prompt"}')
    parser.add_argument("--shortest", type=int, default=120, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=300)
    parser.add_argument("--long", type=int, metavar="N", help="prompts of N tokens of Python's standard library in place of those")
    parser.add_argument("--seed", type=int, default=0, help="of the inflated weights and of the order")
    parser.add_argument("--work", type=Path, help="keep the models and the workers' logs here (10 GB)")
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this page")
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")


def pair_options(parser: argparse.ArgumentParser, depths: Sequence[int]) -> None:
    """Of those in which the engines guess."""
    parser.add_argument("--depths", type=listed(int), default=list(depths), help="of guessing, for every engine (%(default)s)")
    parser.add_argument("--target", type=Path, default=WEIGHTS / "target", help="the small target; default: the built-in one")
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "draft")
    parser.add_argument("--head", type=Path, default=WEIGHTS / "eagle3", help="an EAGLE-3 head of the small target")
    parser.add_argument("--shape", choices=TARGETS, default="dense", help="of the inflated target: dense, or a mixture of experts")
    parser.add_argument("--as-is", action="store_true", help="take this pair, without inflating it")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared_options(parser, prompts=8, tokens=96)
    pair_options(parser, depths=(2, 4, 6))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperatures", type=listed(float), default=[0.0, 0.8], help="(0,0.8)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
