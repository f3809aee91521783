"""The experiment: arms interleaved over loads and repeats, until the intervals are narrow or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median

from ..errors import Failure
from .cells import ALL, OFF, Middle, middle
from .load import Answer, Client, Job, Load, play
from .workload import Item, poisson


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate. `comparable`: with the same seed its text should be off's, token for token."""

    name: str
    drafter: str
    depth: str
    client: Client
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. precision: half the 95 % interval of the speed-up, as a share of it, at which repeats end."""

    loads: tuple[Load, ...] = (Load(1),)
    repeats: int = 2                      # at least
    most_repeats: int = 5
    precision: float = 0.05
    budget_s: float = 600.0
    tokens: int = 128                     # most tokens of an answer
    temperature: float = 0.0
    seed: int = 1
    surely: int = 1                       # repeats that are finished, whatever the time


def sweep(arms: Sequence[Arm], items: Sequence[Item], plan: Plan, clock: Callable[[], float] = time.perf_counter, *,
          around: Callable[[Arm, Load], AbstractContextManager[None]] = lambda arm, load: nullcontext()) -> Iterator[Answer]:
    """Every arm under every load, repeat by repeat; within a repeat the arms take turns, in an order that turns.

    With one request at a time arms change after every item, so that drift of the machine hits all alike; under more load a
    block is the whole workload, because filling and draining are part of it. around: entered for every block.
    """
    began = clock()
    found: list[Answer] = []
    block = 0
    for repeat in range(plan.most_repeats):
        for load in plan.loads:
            numbered = list(enumerate(_timed(items, load, plan.seed)))
            pieces = [[one] for one in numbered] if load.concurrency == 1 else [numbered]
            for turn, piece in enumerate(pieces):
                for place in range(len(arms)):
                    if repeat >= plan.surely and clock() - began > plan.budget_s:
                        return
                    arm = arms[(turn + repeat + place) % len(arms)]
                    block += 1
                    jobs = [Job(arm.name, load, repeat, number, item, plan.seed + number, item.max_tokens or plan.tokens, plan.temperature,
                                block) for number, item in piece]
                    with around(arm, load):
                        for answer in play(arm.client, jobs, load, clock):
                            found.append(answer)
                            yield answer
        if repeat + 1 >= plan.repeats and settled(found, arms, plan.precision):
            return


def warm_up(arms: Sequence[Arm], items: Sequence[Item], plan: Plan) -> None:
    """One short request per arm, not counted. Raises Failure if it fails: the measurement would be empty."""
    for arm in arms:
        # At the head of a queue a recorded request may be hours away; warming up does not wait for it.
        item = replace(items[0], arrival_s=None)
        job = Job(arm.name, Load(1), -1, 0, item, plan.seed, min(16, item.max_tokens or plan.tokens), plan.temperature)
        for answer in play(arm.client, [job], Load(1)):
            if answer.error:
                raise Failure(f"{arm.name}: the first request failed: {answer.error}")


def settled(answers: Sequence[Answer], arms: Sequence[Arm], precision: float) -> bool:
    """Whether every arm's speed-up over all classes has an interval of at most ± precision, under every load. So few prompts that there
    is no interval are never settled."""
    spreads = [spread for load in dict.fromkeys(a.job.load for a in answers) for arm in arms if arm.name != OFF
               if (spread := speedup([a for a in answers if a.job.load == load], arm.name)) is not None]
    return bool(spreads) and all(s.low is not None and s.high is not None and (s.high - s.low) / 2 <= precision * s.median for s in spreads)


def speedup(answers: Sequence[Answer], arm: str, prompt_class: str = ALL,
            speed: Callable[[Answer], float | None] = attrgetter("tokens_per_s")) -> Middle | None:
    """Tokens per second and user over off's, same prompt and repeat: the median over prompts of the median over repeats, with a
    95 % interval over prompts. None without off, or without a pair that ended well. speed: of an answer, if it has one."""
    paired: dict[tuple[int, int, int], dict[str, float]] = {}
    for a in answers:
        if a.job.arm in (arm, OFF) and prompt_class in (ALL, a.job.item.prompt_class) and not a.error and a.tokens:
            if (found := speed(a)) is not None:
                paired.setdefault((a.job.number, a.job.turn, a.job.repeat), {})[a.job.arm] = found
    ratios: dict[int, list[float]] = {}
    for (number, _, _), speeds in paired.items():
        if len(speeds) == len({arm, OFF}):
            ratios.setdefault(number, []).append(speeds[arm] / speeds[OFF])
    return middle(median(values) for values in ratios.values()) if ratios else None


def expected(arms: Sequence[Arm], items: Sequence[Item], plan: Plan) -> int:
    """Answers in the fewest repeats; there may be more."""
    return len(arms) * len(plan.loads) * plan.repeats * sum(len(item.turns) for item in items)


def identical(answers: Sequence[Answer], arm: str) -> tuple[bool | None, int]:
    """(whether every answer equals off's for the same prompt, turn and repeat; tokens compared). None: there was nothing to compare."""
    texts: Mapping[tuple[int, int, int, Load], Answer] = {
        (a.job.number, a.job.turn, a.job.repeat, a.job.load): a for a in answers if a.job.arm == OFF and not a.error}
    same, tokens = True, 0
    for a in answers:
        off = texts.get((a.job.number, a.job.turn, a.job.repeat, a.job.load))
        if a.job.arm != arm or a.error or off is None:
            continue
        tokens += off.tokens
        both = a.token_ids is not None and off.token_ids is not None
        same = same and (a.token_ids == off.token_ids if both else a.text == off.text)
    return (same if tokens else None), tokens


def _timed(items: Sequence[Item], load: Load, seed: int) -> Sequence[Item]:
    if load.rate:
        return poisson(items, load.rate, seed)
    if not load.concurrency and items[0].arrival_s is None:
        raise Failure("the workload has no arrival times (arrival_s or timestamp); expected them for recorded traffic: give a rate instead")
    return items
