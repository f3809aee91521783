"""What rounds cost here: the engine itself, timed for some rounds with and without each drafter, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from random import Random
from statistics import mean, median
from typing import Any

from ..audition.run import COPIERS
from ..bench.cells import Spread
from ..bench.profile import FREE, Plan, Point, curve, most_free
from ..config import EngineConfig, LoadConfig
from ..core.budget import Memory, memory
from ..drafters import parse_spec
from ..engine.engine import Engine
from ..engine.port import Handle
from ..engine.setup import draft_bytes, draft_cache_bytes
from ..errors import Failure
from ..models.target import Target
from ..trace.events import PrefillDone, RoundDone
from ..trace.sinks import Memory as Sink
from ..types import Sampling
from .predict import OFF, Cost, read

STARTS, STARTS_S = 24, 20.0     # texts whose beginning is timed, and seconds after which no further one is
ALONG = 3               # rounds are timed at the beginning of answers, and after one and two thirds of them
RUN = 12                # rounds of one group of texts
WARM = 4                # rounds that belong to a text's beginning: reading it left other things in the processor's caches
FEW = 3                 # rounds of a kind below which their median is not believed
Clock = Callable[[], float]
Ids = Sequence[int]

Rounds = list[tuple[float, float, float]]
"""(seconds, drafted tokens per sequence, tokens of the text before it per sequence) of each round."""

Steps = Generator[tuple[float, list[RoundDone]], None, None]


def measure(target: Target, arms: Sequence[tuple[str, int]], texts: Sequence[tuple[Ids, Ids]], batches: Sequence[int], sampling: Sampling,
            rounds: int = 48, load: LoadConfig | None = None, progress: Callable[[str], None] | None = None,
            clock: Clock = time.perf_counter) -> tuple[list[Cost], dict[str, tuple[int, int]]]:
    """Costs of a plain round and of each (spec, depth) at each batch, and the bytes of every drafter's weights and of a token in its cache.

    texts: prompts and their answers, from which rounds go on; they are used over and over. rounds: timed per arm and batch, at
    least a few. An arm of which no round could be timed has no cost. Raises Failure if there is none at all.
    """
    config = EngineConfig(max_batch=max(batches))
    timed: dict[tuple[str, int, int], Rounds] = {}
    places = along(texts, target.context - sampling.max_tokens - 1)
    with ExitStack() as stack:
        engines = {(OFF, 0): stack.enter_context(Engine(target, config=config, load=load))}
        for spec, depth in arms:
            engines[spec, depth] = stack.enter_context(Engine(target, spec, depth, config=config, load=load))
        drafters = {spec: engine.speculation.drafter for (spec, _), engine in engines.items()}
        bytes_of = {spec: (draft_bytes(drafter), draft_cache_bytes(drafter)) for spec, drafter in drafters.items()}
        for batch in batches:
            if progress:
                progress(f"timing rounds at {batch} concurrent")
            _side_by_side(engines, places, batch, sampling, FEW, clock)                       # warms up
            for key, found in _side_by_side(engines, places, batch, sampling, rounds, clock).items():
                timed[*key, batch] = found
                if not found and progress:
                    progress(f"no round of {key[0]} at depth {key[1]} could be timed at {batch} concurrent")
        if not any(timed[OFF, 0, batch] for batch in batches):
            raise Failure(f"no round could be timed: the texts that the target goes on with end within {WARM} rounds; expected a log of "
                          "longer answers, of the model that is timed")
        if progress:
            progress("timing beginnings")
        firsts = dict(reversed(engines))                                                   # of each drafter, the depth named first
        begun = beginnings({spec: engines[spec, depth] for spec, depth in firsts.items()}, _mixed([prompt for prompt, _ in texts]),
                           sampling, clock)
    target.set_taps(())
    costs = [cost for batch in batches for cost in _costs({key[:2]: found for key, found in timed.items() if key[2] == batch}, batch)]
    begins = sorted(costs, key=lambda cost: (cost.batch == min(batches), cost.depth == firsts[cost.drafter]))       # how it began last
    round_s = {cost.drafter: cost.seconds.median for cost in begins}
    experts = None if target.facts.experts is None else (target.facts.experts.count, target.facts.experts.chosen)
    passes = _passes(target, int(median(map(len, places))), batches, max((depth for _, depth in arms), default=0) + 1, clock)
    starts = {spec: _line([(length, seconds - rounds * round_s[spec]) for length, seconds, rounds in each]) for spec, each in begun.items()
              if spec in round_s}
    return [replace(cost, free_rows=_free_rows(passes[cost.batch], cost.batch), passes=passes[cost.batch] if cost.drafter == OFF else (),
                    experts=experts,
                    start_s=start, token_s=token)
            for cost in costs for start, token in [starts[cost.drafter]]], bytes_of


def along(texts: Sequence[tuple[Ids, Ids]], longest: int) -> list[Ids]:
    """Each text up to where rounds are timed: some at the beginning of their answers, some further on."""
    places = [[*prompt, *answer[:len(answer) * (i % ALONG) // ALONG]] for i, (prompt, answer) in enumerate(texts)]
    return [place[-max(1, longest):] for place in _mixed(places)]


def _mixed(texts: Sequence[Ids]) -> list[Ids]:
    """In an order that has nothing to do with the log's, as a log may be sorted."""
    return Random(0).sample(texts, len(texts))


def _passes(target: Target, context: int, batches: Sequence[int], widest: int, clock: Clock) -> dict[int, tuple[tuple[int, float], ...]]:
    """(rows per text, seconds) of passes over each number of texts. A wider pass does all that a narrower one does: where the narrower
    one took longer, the machine was busy with something else."""
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for batch in batches:
        points = curve(target, Plan(tuple(range(1, widest + 1)), (min(context, target.context // 2),), (batch,), repeats=5), clock=clock)
        times = {p.rows: p.seconds.median for p in points}
        found[batch] = tuple((rows, min(s for wide, s in times.items() if wide >= rows)) for rows in times)
    return found


def _free_rows(passes: Sequence[tuple[int, float]], batch: int) -> int | None:
    """Rows of a pass up to which it costs at most a quarter more than one of one row per text; None if every width is free."""
    free = most_free(dict(passes)) if passes else None
    return None if free is None or free == passes[-1][0] else free * batch


def _side_by_side(engines: Mapping[tuple[str, int], Engine], places: Sequence[Ids], batch: int, sampling: Sampling, rounds: int,
                  clock: Clock) -> dict[tuple[str, int], Rounds]:
    """Time `rounds` rounds of each engine in which all of a batch took part and nothing was prefilled, after the first ones of each
    text, which are timed elsewhere. The engines do a step each in turn, over the same texts: what changes in the machine meets all."""
    found: dict[tuple[str, int], Rounds] = {key: [] for key in engines}
    groups = -(-rounds // RUN)
    for number in range(4 * groups):                     # texts may end early, or never be all of them in a round
        group = [places[(number * batch + i) % len(places)] for i in range(batch)]
        with ExitStack() as stack:
            runs = {key: _whole(stack.enter_context(closing(_steps(engine, group, sampling, "advise", clock))), batch)
                    for key, engine in engines.items() if len(found[key]) < rounds}
            while runs:
                for key in Random(number).sample(list(runs), len(runs)):
                    step = next(runs[key], None)
                    found[key] += step or []
                    if step is None or len(found[key]) == rounds:
                        del runs[key]
        if all(len(each) == rounds for each in found.values()):
            break
    return found


def _whole(steps: Steps, batch: int) -> Iterator[Rounds]:
    """Step by step: the round that it was, or nothing if that does not count."""
    seen = 0
    for seconds, done in steps:
        whole = len(done) == batch
        seen += whole
        counts = whole and seen > WARM
        yield [(seconds, sum(len(one.nodes) for one in done) / batch, sum(one.position for one in done) / batch)] if counts else []
        if seen == WARM + RUN:
            return


def _steps(engine: Engine, group: Sequence[Ids], sampling: Sampling, tenant: str, clock: Clock) -> Steps:
    """(seconds, rounds that it did; none where something was prefilled) of each step until the texts end or nobody asks."""
    heard, handles = Sink(), list[Handle]()
    stop = engine.events(heard)
    try:
        handles += [engine.submit(text, sampling, tenant=tenant)[0] for text in group]
        while not all(handle.done for handle in handles):
            heard.events.clear()
            before = clock()
            engine.step()
            seconds = clock() - before
            reading = any(isinstance(event, PrefillDone) for event in heard.events)
            yield seconds, [] if reading else [event for event in heard.events if isinstance(event, RoundDone)]
    finally:
        for handle in handles:
            engine.cancel(handle.id)
        stop()


def beginnings(engines: Mapping[str, Engine], prompts: Sequence[Ids], sampling: Sampling,
               clock: Clock = time.perf_counter) -> dict[str, list[tuple[int, float, int]]]:
    """Per drafter: length of a prompt that nobody has read, seconds from there to the end of the first few rounds, and how many these
    were. The drafter reads, too."""
    found: dict[str, list[tuple[int, float, int]]] = {spec: [] for spec in engines}
    began, number = clock(), count()
    for prompt in prompts[:STARTS]:
        for spec, engine in engines.items():
            text = prompt[-max(1, engine.target.context - sampling.max_tokens - 1):]
            with closing(_steps(engine, [text], sampling, f"advise {next(number)}", clock)) as steps:
                found[spec].append((len(text), *_first_rounds(steps)))
        if clock() - began > STARTS_S and len(found[OFF]) >= FEW:
            break
    return found


def _rise(points: Iterable[tuple[float, float]]) -> float:
    """What y gains with every x, at least 0: by medians of the half with the smaller x and of the other."""
    ordered = sorted(points)
    half = (len(ordered) + 1) // 2
    low, high = ([median(side) for side in zip(*group, strict=True)] for group in (ordered[:half], ordered[-half:]))
    return max(0.0, (high[1] - low[1]) / (high[0] - low[0])) if high[0] > low[0] else 0.0


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds at 0 tokens, seconds per token) of points (tokens, seconds); both at least 0."""
    middle_x, middle_y = (median(side) for side in zip(*points, strict=True))
    slope = min(_rise(points), max(0.0, middle_y) / middle_x)
    return max(0.0, middle_y - slope * middle_x), slope


def _first_rounds(steps: Iterable[tuple[float, list[RoundDone]]]) -> tuple[float, int]:
    spent, rounds = 0.0, 0
    for seconds, done in steps:
        spent += seconds
        rounds += bool(done)
        if rounds == WARM:
            break
    return spent, rounds


def _plane(found: Rounds, plain: float) -> tuple[float, float, float]:
    """(seconds of a round without a draft, seconds per drafted token, weight of the latter) by medians of the rounds with a draft and of
    those without; plain stands in where nearly all have one, and then what drafting costs at all is in the seconds per token, too.

    The weight is one over the variance, in units of a round's; 0 where plain stood in.
    """
    without, drafted = ([one[:2] for one in found if bool(one[1]) is kind] for kind in (False, True))
    own = len(without) >= FEW
    zero = median(seconds for seconds, _ in without) if own else plain
    if not drafted:
        return zero, 0.0, 0.0
    typical, each = (median(side) for side in zip(*drafted, strict=True))
    return zero, (typical - zero) / each, each * each / (1 / len(drafted) + 1 / len(without)) if own else 0.0


def _slopes(planes: Mapping[tuple[str, int], tuple[float, float, float]], deviations: Mapping[tuple[str, int], float],
            counts: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], tuple[float, float]]:
    """(seconds per drafted token, at least 0, half its 95 % interval) of each engine.

    Drafters that copy guess for nothing: a further token costs a row of the target's pass, which is the same for all of them, and one
    mean of theirs says it. Its error is that of the rounds, or of the slopes around it if these differ by more.
    """
    found = {}
    for key, (_, slope, weight) in planes.items():
        error = 1.96 * deviations[key] / math.sqrt(weight) if weight else 0.0
        found[key] = max(0.0, slope), error
    alike = [key for key, (*_, weight) in planes.items() if weight and parse_spec(key[0]).name in COPIERS]
    if len(alike) > 1:
        total = sum(planes[key][2] for key in alike)
        slope = sum(planes[key][2] * planes[key][1] for key in alike) / total
        apart = sum(planes[key][2] * (planes[key][1] - slope) ** 2 for key in alike) / (len(alike) - 1)
        within = sum(counts[key] * deviations[key] ** 2 for key in alike) / sum(counts[key] for key in alike)
        found |= dict.fromkeys(alike, (max(0.0, slope), 1.96 * math.sqrt(max(apart, within) / total)))
    return found


def _costs(timed: Mapping[tuple[str, int], Rounds], batch: int) -> list[Cost]:
    """Each engine's round at the drafted tokens and the length of text of all of its rounds, on the plane through those without and with
    a draft, over short and over long texts: by medians, so that a pause of the machine is in none.

    What a longer text costs is the same for all engines, as the target's attention is, and read off all of them: the machine may become
    slower between a short text and a long one, and each engine would make another rise of that.
    What a longer draft costs is the same for all drafters that copy (`_slopes`).
    The interval is that of a median, 1.2533 times as wide as a mean's, with the deviation read off absolute residuals.
    """
    timed = {key: found for key, found in timed.items() if found}
    if (OFF, 0) not in timed:
        return []
    plain = median(seconds for seconds, *_ in timed[OFF, 0])
    planes = {key: _plane(found, plain) for key, found in timed.items()}
    rise = _rise((length, seconds - planes[key][0] - planes[key][1] * drafted)
                 for key, found in timed.items() for seconds, drafted, length in found)
    costs, levels, deviations = list[Cost](), {}, {}
    for key, found in timed.items():
        context = mean(length for *_, length in found)
        level = [(seconds - rise * (length - context), drafted, length) for seconds, drafted, length in found]
        zero, slope, _ = levels[key] = _plane(level, plain)
        deviations[key] = 1.2533 * 1.4826 * median(abs(seconds - zero - slope * n) for seconds, n, _ in level)
    slopes = _slopes(levels, deviations, {key: len(found) for key, found in timed.items()})
    for key, found in timed.items():
        nodes, context = (mean(one[side] for one in found) for side in (1, 2))
        middle = levels[key][0] + levels[key][1] * nodes
        half = min(1.96 * deviations[key] / math.sqrt(len(found)), 0.5 * middle)
        costs.append(Cost(*key, batch, Spread(middle, middle - half, middle + half), nodes, *slopes[key], context, rise))
    return costs


def from_curve(points: Sequence[Point], cells: Sequence[dict[str, Any]], context: int, draft_cost: float,
               experts: tuple[int, int] | None = None) -> list[Cost]:
    """Costs read off a target's curve, where no engine was timed: T(1) plain, T(1 + drafted) + depth · draft_cost · T(1) with guesses.

    context: the nearest measured one is taken. draft_cost: seconds to draft a token in plain passes. experts: as in `Cost`.
    Raises Failure if there is no point, or none of one row.
    """
    if not points:
        raise Failure("the cost curve has no point; expected the document that draftproof profile --json prints")
    near = min({p.context for p in points}, key=lambda c: abs(c - context))
    costs: list[Cost] = []
    for batch in sorted({p.batch for p in points if p.context == near}):
        mine = sorted((p for p in points if (p.context, p.batch) == (near, batch)), key=lambda p: p.rows)
        if mine[0].rows != 1:
            continue
        plain = mine[0].seconds
        free = max((p.rows for p in mine if p.seconds.median <= FREE * plain.median), default=1) * batch
        passes = tuple((p.rows, p.seconds.median) for p in mine)
        costs.append(Cost(OFF, 0, batch, plain, free_rows=free, passes=passes, experts=experts))
        for spec, depth in dict.fromkeys((c["drafter"], c["depth"]) for c in cells if c["rounds"] and isinstance(c["depth"], int)):
            whole = [c for c in cells if (c["drafter"], c["depth"]) == (spec, depth)]
            nodes = sum(c["drafted"] for c in whole) / sum(c["rounds"] for c in whole)
            seconds, slope = read(passes, 1 + nodes)
            seconds += depth * draft_cost * plain.median
            width = plain.high / plain.median
            costs.append(Cost(spec, depth, batch, Spread(seconds, seconds / width, seconds * width), nodes, slope))
    if not costs:
        raise Failure(f"the cost curve has no pass of one row at context {near}, which plain decoding takes; measure it with draftproof "
                      "profile --rows 1,…")
    return costs


def memory_plan(target: Target, weight_bytes: int, draft_bytes_per_token: int, depth: int, batch: int, context: int) -> Memory:
    """What a recommended setting takes, and how many tokens of the target's cache it displaces."""
    return memory(depth, batch, context, target.vocab_size, weight_bytes, draft_bytes_per_token, target.facts.cache_bytes_per_token)
