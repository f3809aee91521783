"""Large shapes on one GPU: off and every drafter by batch, reproducible and fast, beside transformers as it is and compiled.

    python benchmarks/gpu.py --json gpu.json                                 # one GPU of 141 GB, eight minutes; what time cuts off is named
    python benchmarks/gpu.py --shapes 8B --batches 1,4 --seconds 200
    python benchmarks/gpu.py --device cpu --shapes tiny --batches 1,2 --tokens 16       # the same path without a GPU: no measurement

The demo pair is inflated in the device's memory (inflate.py): a target of each shape, a draft model of a 1B shape, and the demo target's
EAGLE-3 head turned to fit, which stays as small as it is and drafts chains and trees. 8B and 32B are bfloat16, 70B is rounded to floats
of eight bits, 8B4 to integers of four. First speed: batch by batch every arm in an order drawn anew, `--repeats` times; rates are of
decoding while the batch is full (from when every text has its first token until one has ended: a server would have others to go on with),
ratios paired. Beyond one text at a time only the drafters that are asked for there are measured, at the first depth and at automatic
depth. Then, in reproducible mode, the texts: greedy and at temperature 0.8, depths 0 to 8, sequences that join and leave, against each
text alone without a guess. Bandwidth: what a plain pass reads (weights, and the keys and values of half-written texts), over its time,
against a copy within the device's memory measured in the same run, before the shapes and behind each, the fastest.
What fails is named and ends there: an engine that cannot be made, an arm, a drafter that went out of service or was paused. The file of
--json is written anew with every batch. The last line of standard output is one JSON
document; exit code 3 says that a goal was missed, or could not be measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from gpu_goals import AUTO, CHECKED, DEPTHS_CHECKED, OFF, TEMPERATURES, goals, page
from inflate import Shape, build_inflated
from lent import Clock, copy_bandwidth, finished, forget, tell
from pair import read_prompts, turned_head
from provenance import provenance
from ratios import paired
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftproof import Engine, LoadConfig, Sampling
from draftproof.config import EngineConfig
from draftproof.drafters.base import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.memory import free_share
from draftproof.models.between import COMPILES
from draftproof.models.load import WEIGHTS, as_target
from draftproof.models.target import Target

TREE, NODES = "eagle3+tree", 15              # which fill a tile of sixteen rows with the last token
DRAFTERS = ("model", "eagle3", TREE, "ngram")
ALONE = 3                                   # texts that are measured one by one
AT_ONCE = 16                                # texts of the check for bits
LEARNING = 2                                # runs before the first that counts where depth is automatic
MODES = {"reproducible": {"reproducible": True}, "fast": {"reproducible": False}, "compiled": {"reproducible": False, "compile": True},
         "torch": {"reproducible": False, "kernels": False}}
SPARE = 0.3                                 # share of the memory that stays free where all pages are made before anything is timed


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, the numbers its weights are kept in, and the shape of its draft model."""

    shape: Shape
    quantization: str | None = None
    draft: Shape = Shape(2048, 16, 32, 8, 8192)


MODELS = {
    "8B": Model(Shape(4096, 32, 32, 8, 14336, head_dim=128)),
    "32B": Model(Shape(5120, 64, 40, 8, 27648, head_dim=128)),
    "70B": Model(Shape(8192, 80, 64, 8, 28672, head_dim=128), "fp8"),
    "8B4": Model(Shape(4096, 32, 32, 8, 14336, head_dim=128), "int4"),
    "tiny": Model(Shape(448, 11, 8, 4, 1200), draft=Shape(320, 4, 8, 4, 900)),
}

Rates = dict[str, list[float]]                                      # arm → tokens per second, repeat by repeat


# The engines

def build(source: Path, shape: Shape, device: torch.device, seed: int) -> Any:
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return build_inflated(small.to(device), shape, device, torch.bfloat16, seed)


def drafter(spec: str, name: str, target: Target, work: Path, device: torch.device, load: LoadConfig, seed: int) -> str | Drafter:
    """Of a shape's target."""
    if spec == "model":
        return ModelDrafter(as_target(build(WEIGHTS / "draft", MODELS[name].draft, device, seed), load.of_draft(), "draft"))
    if spec in ("eagle3", TREE):
        head = work / f"head-{name}"
        if not (head / "config.json").exists():                     # as wide a rotation is drawn once for all engines and modes
            turned_head(WEIGHTS / "eagle3", WEIGHTS / "target", MODELS[name].shape, head, seed, device)
        return f"eagle3:{head}"
    return spec


def reserve(target: Target) -> None:
    """Make all pages now, if memory allows it: recordings point at them, and are made anew where they move."""
    pool, device = target.pool, target.device
    while pool.allocated < pool.capacity and (free_share(device) or 0.0) > SPARE:
        pool.grow()
    forget(device)


Answers = list[tuple[int, ...]]
Depth = int | str                                                   # how many tokens, or "auto"


def wished(depth: Depth) -> dict[str, Any]:
    return {"depth": depth} if depth else {"drafter": "none"}


def answer(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], depth: int, run: Iterator[int]) -> Answers:
    own = f"run {next(run)}"                                        # no prefix is reused
    done = engine.generate_batch(prompts, sampling, speculation=wished(depth), tenant=own)
    return [tuple(one.token_ids) for one in done]


def differing(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, run: Iterator[int], clock: Clock) -> Iterator[dict[str, int]]:
    """How many texts of how many differ from the same text alone without a guess, depth by depth. Lengths differ, and the engine takes
    fewer texts at a time than there are, so that sequences join and leave."""
    found = {"texts": 0, "different": 0}
    for temperature in TEMPERATURES:
        asked = [Sampling(temperature=temperature, seed=i, max_tokens=tokens * (2 + i % 3) // 4, ignore_eos=True)
                 for i in range(len(prompts))]
        if not clock.allows(f"texts alone, temperature {temperature:g}"):
            return
        alone = [answer(engine, [prompt], [sampling], 0, run)[0] for prompt, sampling in zip(prompts, asked, strict=True)]
        for depth in DEPTHS_CHECKED:
            if clock.allows(f"texts at depth {depth}, temperature {temperature:g}"):
                there = answer(engine, prompts, asked, depth, run)
                found["texts"] += len(there)
                found["different"] += sum(a != b for a, b in zip(alone, there, strict=True))
                yield found


# The clock

def decoding(engine: Engine, groups: Sequence[Sequence[Sequence[int]]], tokens: int, wish: dict[str, Any], run: Iterator[int]) -> float:
    """Tokens per second of groups of texts, one group after the other, from when every text has its first token until one has ended."""
    found = [_decoded(engine, prompts, tokens, wish, f"run {next(run)}") for prompts in groups]
    return sum(count for count, _ in found) / sum(seconds for _, seconds in found)


def _decoded(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, wish: dict[str, Any], tenant: str) -> tuple[int, float]:
    """Tokens and seconds of one group."""
    device, sampling = engine.target.device, Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    handles = [handle for prompt in prompts for handle in engine.submit(prompt, sampling, tenant=tenant, speculation=wish)]
    there, count = set(), 0

    def events() -> list[Any]:
        found = engine.step()
        for handle in handles:
            if handle.error is not None:
                raise handle.error
        return found

    try:
        while len(there) < len(handles):
            there |= {event.request for event in events()}
        start = finished(device)
        while not any(handle.done for handle in handles):
            count += len(events())
        return count, finished(device) - start
    finally:
        for handle in handles:
            engine.cancel(handle.id)


def interleaved(arms: Mapping[str, Callable[[int], float]], batch: int, tokens: int, repeats: int, where: str, clock: Clock) -> Rates:
    """arms: each decodes so many tokens of every text, and returns its rate. One that fails is out from then on."""
    rates: Rates = {}
    for name, decode in arms.items():
        with clock.spared(f"{where}, {name}"):
            for _ in range(LEARNING if name.endswith(f"@{AUTO}") else 1):
                decode(tokens)                                      # graphs are recorded for all lengths, kernels chosen, costs learnt
            rates[name] = []
    order, rng = list(rates), random.Random(batch)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in [name for name in order if name in rates]:
            found = None
            with clock.spared(f"{where}, {name}"):
                found = arms[name](tokens)
            if found is None:
                del rates[name]
            else:
                rates[name].append(found)
    return rates


def by_run(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """`paired`, its spread over runs: all are of the same texts."""
    return paired([[one] for one in over], [[one] for one in under])


def stock_rates(model: Any, prompt: Sequence[int], tokens: int, repeats: int, clock: Clock) -> Rates:
    """Of transformers over one text, with its growing cache and, on a GPU, with a static one, for which it compiles the pass: tokens after
    the first, over the time less that of a run of one token."""
    ids, rates = torch.tensor([list(prompt)], device=model.device), {}
    for arm, more in (("transformers", {}), ("transformers compiled", {"cache_implementation": "static"})):
        if more and (model.device.type != "cuda" or not clock.allows(arm)):
            continue
        seconds = []
        for count in (tokens, *[1, tokens] * repeats):              # the first run warms up
            start = finished(model.device)
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                               pad_token_id=0, **more)
            seconds.append(finished(model.device) - start)
        rates[arm] = [(tokens - 1) / max(long - short, 1e-9) for short, long in zip(seconds[1::2], seconds[2::2], strict=True)]
    return rates


def measure(name: str, args: argparse.Namespace, work: Path, clock: Clock) -> Iterator[list[dict[str, Any]]]:
    """The cells of one shape, batch by batch."""
    device, model = torch.device(args.device), MODELS[name]
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "target")
    count = max(*args.batches, CHECKED)
    prompts = read_prompts(WEIGHTS / "prompts.jsonl", tokenizer, count, 60, 300)
    prompts = [prompts[i % len(prompts)] for i in range(count)]
    for mode in args.modes:
        if MODES[mode].get("compile") and device.type not in COMPILES:
            clock.left_out.append(f"{name} {mode}: torch.compile joins operations on a GPU alone")
        elif clock.allows(f"{name} {mode}"):
            rounding = model.quantization if device.type == "cuda" else None
            load = LoadConfig(device=args.device, quantization=rounding, **MODES[mode])
            with clock.spared(f"{name} {mode}"):
                yield from of_mode(name, mode, as_target(build(WEIGHTS / "target", model.shape, device, args.seed), load, name), load,
                                   prompts, args, work, clock)
            forget(device)


def of_mode(name: str, mode: str, target: Target, load: LoadConfig, prompts: Sequence[Sequence[int]], args: argparse.Namespace, work: Path,
            clock: Clock) -> Iterator[list[dict[str, Any]]]:
    run = iter(range(1 << 30))
    reserve(target)
    settings, engines = EngineConfig(max_batch=max(args.batches), trace="none"), {}
    for spec in dict.fromkeys(["none", *(args.alone or DRAFTERS), *args.wide]):
        with clock.spared(f"{name} {mode}, {spec}"):
            guessing = drafter(spec, name, target, work, torch.device(args.device), load, args.seed)
            engines[spec] = Engine(target, guessing, tree=NODES if spec == TREE else None, load=load, config=settings)
    if "none" not in engines:
        return
    bits = {"texts": 0, "different": 0} if load.reproducible else None
    weights = target.facts.weight_bytes - target.parts.embed.weight.nbytes          # which is looked up, not read
    for batch in (batch for batch in args.batches if clock.allows(f"{name} {mode}, batch {batch}")):
        texts = prompts[:ALONE if batch == 1 else batch]
        groups = [[prompt] for prompt in texts] if batch == 1 else [texts]

        def decode(spec: str, depth: Depth, groups: Sequence[Sequence[Sequence[int]]] = groups) -> Callable[[int], float]:
            return lambda tokens: decoding(engines[spec], groups, tokens, wished(depth), run)

        asked = [(spec, depth) for spec in args.alone or DRAFTERS for depth in args.depths] if batch == 1 else \
            [(spec, depth) for spec in args.wide for depth in args.depths if depth in (args.depths[0], AUTO)]
        asked = [(spec, depth) for spec, depth in asked if spec in engines]
        arms = {OFF: decode("none", 0), **{f"{spec}@{depth}": decode(spec, depth) for spec, depth in asked}}
        rates = interleaved(arms, batch, args.tokens, args.repeats, f"{name} {mode}, batch {batch}", clock)
        if OFF not in rates:
            continue                                                # nothing to hold the others against
        ended = {spec: why for spec, engine in engines.items() if (why := out_of_service(engine))}
        clock.left_out += [f"{name} {mode}, batch {batch}, {spec}: {why}" for spec, why in ended.items()]
        rates = {arm: values for arm, values in rates.items() if arm.partition("@")[0] not in ended}
        read = weights + batch * (fmean(map(len, texts)) + args.tokens / 2) * target.facts.cache_bytes_per_token
        cells = []
        for arm, values in rates.items():
            plain = median(values) / batch * read / 1e9
            cells.append({"shape": name, "mode": mode, "batch": batch, "arm": arm, "tokens_per_s": median(values), "runs": values,
                          "over_off": by_run(values, rates[OFF]), "read_gb_per_s": plain if arm == OFF else None, "bits": bits,
                          "facts": target.facts.reasons if arm == OFF else unrecorded(engines[arm.partition("@")[0]])})
        tell(f"{name} {mode} batch {batch}: " + ", ".join(f"{arm} {median(values):.0f}" for arm, values in rates.items()))
        yield cells
    if bits is not None:                                            # last, as large shapes take minutes
        with clock.spared(f"{name} {mode}, texts"):
            guessing = drafter("eagle3", name, target, work, torch.device(args.device), load, args.seed)
            few = Engine(target, guessing, load=load, config=replace(settings, max_batch=AT_ONCE, profile_s=0))
            for found in differing(few, prompts[:CHECKED], args.tokens // 2, run, clock):
                bits.update(found)
                yield []
        tell(f"{name} {mode}: {bits['different']} of {bits['texts']} texts differ")


def out_of_service(engine: Engine) -> str:
    """Why an engine's guesses have stopped, if they have: it would be measured as plain decoding."""
    return engine.speculation.failure or ("guesses are paused: memory is short" if engine.speculation.pressed else "")


def unrecorded(engine: Engine) -> dict[str, str]:
    """Why a head's drafts are not recorded, if they are not."""
    failed = getattr(getattr(engine.speculation.drafter, "recorded", None), "failed", "")
    return {"drafts": failed} if failed else {}


def stock(name: str, args: argparse.Namespace, off: Sequence[float], clock: Clock) -> list[dict[str, Any]]:
    """Cells of transformers on a shape; off: our own rate without guesses, which theirs is held against."""
    device = torch.device(args.device)
    whole = build(WEIGHTS / "target", MODELS[name].shape, device, args.seed).eval()
    prompt = read_prompts(WEIGHTS / "prompts.jsonl", AutoTokenizer.from_pretrained(WEIGHTS / "target"), 1, 60, 300)[0]
    rates = stock_rates(whole, prompt, args.tokens // 2, args.repeats, clock)
    return [{"shape": name, "mode": "as it is", "batch": 1, "arm": arm, "tokens_per_s": median(values), "read_gb_per_s": None, "bits": None,
             "facts": {}, "over_off": by_run(values, list(off) * len(values))} for arm, values in rates.items()]


def main() -> int:
    def listed(kind: Any) -> Any:
        return lambda text: [kind(word) for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", type=listed(str), default=["8B", "70B", "32B"], help=f"of {', '.join(MODELS)}, in this order")
    parser.add_argument("--modes", type=listed(str), default=["fast", "reproducible"], help=",".join(MODES))
    parser.add_argument("--alone", type=listed(str), help="drafters of one text at a time; all where nothing is said")
    parser.add_argument("--wide", type=listed(str), default=["eagle3"], help="drafters of several texts at a time")
    parser.add_argument("--batches", type=listed(int), default=[1, 4, 16, 64])
    parser.add_argument("--depths", type=listed(lambda word: word if word == AUTO else int(word)), default=[4, 6, 8, AUTO])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480, help="after which nothing new begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, known in (("shapes", MODELS), ("modes", MODES)):
        unknown = set(getattr(args, name)) - set(known)
        if unknown:
            parser.error(f"--{name} {sorted(unknown)[0]}: expected some of {', '.join(known)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this torch sees no CUDA device; --device cpu --shapes tiny checks the script without one")
    clock, made_by = Clock(args.seconds), provenance()
    copy = copy_bandwidth(torch.device(args.device))
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
    cells: list[dict[str, Any]] = []

    def kept(more: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What there is by now, also in the file: a run may be cut off."""
        cells.extend(more)
        result = {**made_by, "device": args.device, "gpu": gpu, "copy_gb_per_s": copy, "cells": cells, "goals": goals(cells, copy),
                  "left_out": clock.left_out}
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        return result

    with tempfile.TemporaryDirectory() as work:
        for name in args.shapes:
            for more in measure(name, args, Path(work), clock):
                kept(more)
            copy = max(copy, copy_bandwidth(torch.device(args.device)))
    first = next((c for c in cells if c["arm"] == OFF and c["batch"] == 1 and not MODELS[c["shape"]].quantization), None)
    if first is not None and clock.allows(f"{first['shape']} transformers"):
        with clock.spared(f"{first['shape']} transformers"):
            kept(stock(first["shape"], args, [first["tokens_per_s"]], clock))
    result = kept(())
    print(page(result))
    print(json.dumps(result))
    return 0 if all(goal["met"] for goal in result["goals"]) else 3


if __name__ == "__main__":
    sys.exit(main())
