"""What rounds cost here: the engine itself, timed for some rounds with and without each drafter, taking turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch

from ..bench.cells import Spread
from ..bench.profile import CHUNK, FREE, Plan, Point, curve, free_rows
from ..config import EngineConfig, LoadConfig
from ..core.budget import Memory, memory
from ..engine.engine import Engine
from ..engine.setup import draft_bytes
from ..models.target import Target
from ..trace.events import PrefillDone, RoundDone
from ..trace.sinks import Memory as Sink
from ..types import Sampling
from .predict import OFF, Cost

TURNS = 4               # how often the arms take turns
PREFILLS = 9            # prompts whose reading is timed


Rounds = list[tuple[float, float]]
"""(seconds, drafted tokens per sequence) of each round."""


def measure(target: Target, arms: Sequence[tuple[str, int]], prompts: Sequence[Sequence[int]], batches: Sequence[int], sampling: Sampling,
            rounds: int = 48, load: LoadConfig | None = None, progress: Callable[[str], None] | None = None,
            clock: Callable[[], float] = time.perf_counter) -> tuple[list[Cost], dict[str, int]]:
    """Costs of a plain round and of each (spec, depth) at each batch, and the bytes of every drafter's weights.

    prompts: ids to go on from; they are used over and over. rounds: timed per arm and batch, at least a few.
    """
    config = EngineConfig(max_batch=max(batches))
    timed: dict[tuple[str, int, int], Rounds] = {}
    prefill_s = prefill_seconds(target, prompts, clock)
    with ExitStack() as stack:
        engines = {(OFF, 0): stack.enter_context(Engine(target, config=config, load=load))}
        for spec, depth in arms:
            engines[spec, depth] = stack.enter_context(Engine(target, spec, depth, config=config, load=load))
        weights = {spec: draft_bytes(engine.speculation.drafter) for (spec, _), engine in engines.items()}
        order = list(engines)
        for batch in batches:
            if progress:
                progress(f"timing rounds at {batch} concurrent")
            for turn in range(TURNS + 1):
                for place in range(len(order)):
                    key = order[(turn + place) % len(order)]
                    into = timed.setdefault((*key, batch), []) if turn else Rounds()          # the first turn warms up
                    drafter = engines[key].speculation.drafter
                    target.set_taps(drafter.needs.taps if drafter is not None else ())
                    _run(engines[key], prompts, batch, sampling, -(-rounds // TURNS) if turn else 3, turn, into, clock)
    target.set_taps(())
    context = min(int(median(map(len, prompts))), target.context // 2)
    deepest = max((depth for _, depth in arms), default=0)
    free = {batch: _free_rows(target, context, batch, deepest + 1, clock) for batch in batches}
    return [replace(_cost(*key, found, prefill_s), free_rows=free[key[2]]) for key, found in timed.items() if found], weights


def _free_rows(target: Target, context: int, batch: int, widest: int, clock: Callable[[], float]) -> int | None:
    """Rows of a pass over `batch` texts up to which it costs at most a quarter more; None if every width that is needed is free."""
    widths = tuple(range(1, widest + 1))
    points = list(curve(target, Plan(widths, (context,), (batch,), repeats=5), clock=clock))
    free = free_rows(points, context, batch)
    return None if free is None or free == max(p.rows for p in points) else free * batch


def _run(engine: Engine, prompts: Sequence[Sequence[int]], batch: int, sampling: Sampling, rounds: int, turn: int, into: Rounds,
         clock: Callable[[], float]) -> None:
    """Time `rounds` rounds in which all of a batch took part and nothing was prefilled."""
    heard = Sink()
    stop = engine.events(heard)
    wanted, at, tries = len(into) + rounds, turn * batch, 0
    try:
        while len(into) < wanted and tries < 8:
            tries += 1
            handles = [engine.submit(prompts[(at + i) % len(prompts)], sampling)[0] for i in range(batch)]
            at += batch
            while not all(handle.done for handle in handles) and len(into) < wanted:
                heard.events.clear()
                before = clock()
                engine.step()
                seconds = clock() - before
                done = [event for event in heard.events if isinstance(event, RoundDone)]
                if len(done) == batch and not any(isinstance(event, PrefillDone) for event in heard.events):
                    into.append((seconds, sum(len(event.nodes) for event in done) / batch))
            for handle in handles:
                engine.cancel(handle.id)
    finally:
        stop()


def prefill_seconds(target: Target, prompts: Sequence[Sequence[int]], clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds to read a prompt, none of it cached."""
    times = []
    with torch.inference_mode():
        for number, prompt in enumerate(prompts[:PREFILLS]):
            ids = torch.tensor(prompt, device=target.device)
            before = clock()
            slot = target.open(prompt, f"advise {number}")
            for start in range(0, len(prompt), CHUNK):
                logits = target.extend([slot], [ids[start:start + CHUNK]]).logits
            logits.max().item()
            times.append(clock() - before)
            target.close(slot)
    return median(times) if times else 0.0


def _cost(drafter: str, depth: int, batch: int, found: Rounds, prefill_s: float) -> Cost:
    """Medians of rounds with and without a draft, weighted by how many there are: a pause of the machine is in neither.

    The interval is that of a median, 1.2533 times as wide as a mean's, with the deviation read off absolute residuals.
    """
    groups = [[one for one in found if bool(one[1]) is drafted] for drafted in (False, True)]
    middles = [median(seconds for seconds, _ in group) if group else 0.0 for group in groups]
    middle, centre = sum(len(g) * m for g, m in zip(groups, middles, strict=True)) / len(found), mean(nodes for _, nodes in found)
    clipped = [(min(seconds, 2 * middles[bool(nodes)]), nodes) for seconds, nodes in found]
    residual = median(abs(seconds - middles[bool(nodes)]) for seconds, nodes in found)
    half = min(1.96 * 1.2533 * 1.4826 * residual / math.sqrt(len(found)), 0.5 * middle)
    spread = sum((nodes - centre) ** 2 for _, nodes in clipped)
    rise = sum((nodes - centre) * (seconds - middle) for seconds, nodes in clipped)
    return Cost(drafter, depth, batch, Spread(middle, middle - half, middle + half), centre, max(0.0, rise / spread) if spread else 0.0,
                prefill_s)


def from_curve(points: Sequence[Point], cells: Sequence[dict[str, Any]], context: int, draft_cost: float) -> list[Cost]:
    """Costs read off a target's curve, where no engine was timed: T(1) plain, T(1 + drafted) + depth · draft_cost · T(1) with guesses.

    context: the nearest measured one is taken. draft_cost: seconds to draft a token in plain passes.
    """
    near = min({p.context for p in points}, key=lambda c: abs(c - context))
    costs: list[Cost] = []
    for batch in sorted({p.batch for p in points if p.context == near}):
        mine = sorted((p for p in points if (p.context, p.batch) == (near, batch)), key=lambda p: p.rows)
        if mine[0].rows != 1:
            continue
        plain = mine[0].seconds
        free = max((p.rows for p in mine if p.seconds.median <= FREE * plain.median), default=1) * batch
        costs.append(Cost(OFF, 0, batch, plain, free_rows=free))
        for spec, depth in dict.fromkeys((c["drafter"], c["depth"]) for c in cells if c["rounds"] and isinstance(c["depth"], int)):
            whole = [c for c in cells if (c["drafter"], c["depth"]) == (spec, depth)]
            nodes = sum(c["drafted"] for c in whole) / sum(c["rounds"] for c in whole)
            seconds, slope = _read(mine, 1 + nodes)
            seconds += depth * draft_cost * plain.median
            width = plain.high / plain.median
            costs.append(Cost(spec, depth, batch, Spread(seconds, seconds / width, seconds * width), nodes, slope))
    return costs


def _read(points: Sequence[Point], rows: float) -> tuple[float, float]:
    """(seconds at `rows`, slope there), linear between measured widths and beyond the last."""
    if len(points) == 1:
        return points[0].seconds.median, 0.0
    after = next((i for i, p in enumerate(points) if p.rows >= rows and i), len(points) - 1)
    low, high = points[after - 1], points[after]
    slope = (high.seconds.median - low.seconds.median) / (high.rows - low.rows)
    return low.seconds.median + slope * (rows - low.rows), slope


def memory_plan(target: Target, weight_bytes: int, depth: int, batch: int, context: int, draft_bytes_per_token: int = 0) -> Memory:
    """What a recommended setting takes, and how many tokens of the target's cache it displaces."""
    return memory(depth, batch, context, target.vocab_size, weight_bytes, draft_bytes_per_token, target.facts.cache_bytes_per_token)
