"""Requests, timed one at a time, arm against arm: interleaved, in an order that turns, so that drift of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..engine.port import Port
from ..errors import Failure
from ..types import Sampling
from .cells import Run


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_class: str
    text: str


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate: "off", or a drafter with a depth ("auto" or a number)."""

    name: str
    engine: Port
    drafter: str
    depth: str


def measure(arms: Sequence[Arm], prompts: Sequence[Prompt], temperatures: Sequence[float], repeats: int, tokens: int, seed: int,
            clock: Callable[[], float] = time.perf_counter) -> Iterator[Run]:
    """Every arm on every prompt, temperature and repeat, with the same seed in all arms. The arms of one pair follow each other."""
    for turn, (repeat, (index, prompt), temperature) in enumerate(product(range(repeats), enumerate(prompts), temperatures)):
        sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=tokens, seed=seed + index)
        for place in range(len(arms)):
            yield timed(arms[(turn + place) % len(arms)], index, prompt, sampling, repeat, clock)


def timed(arm: Arm, index: int, prompt: Prompt, sampling: Sampling, repeat: int, clock: Callable[[], float] = time.perf_counter) -> Run:
    """One request from submission to its last token. Raises Failure if it did not end well."""
    # A tenant of its own: no arm, temperature or repeat finds the prompt, or the answer, of another in a cache or a store.
    tenant = f"{arm.name}-{sampling.temperature}-{repeat}"
    before = clock()
    handle = arm.engine.submit(prompt.text, sampling, prompt_class=prompt.prompt_class, tenant=tenant)[0]
    while not handle.done:
        arm.engine.step()
    seconds = clock() - before
    done = handle.completion()
    if done.error:
        raise Failure(f"{arm.name} on prompt {index} ({prompt.prompt_class}): {done.error}")
    assert sampling.temperature is not None
    return Run(arm.name, arm.drafter, arm.depth, index, prompt.prompt_class, sampling.temperature, repeat, seconds,
               done.token_ids, done.metrics)


def by_class(records: Sequence[Mapping[str, str]], each: int) -> list[Prompt]:
    """The first `each` prompts of every class, in the order of the file. Raises Failure on a record without class or prompt."""
    chosen: dict[str, list[Prompt]] = {}
    for number, record in enumerate(records, 1):
        if not record.get("class") or not record.get("prompt"):
            raise Failure(f"prompt {number}: found the keys {', '.join(record)}, expected \"class\" and \"prompt\"")
        group = chosen.setdefault(record["class"], [])
        if len(group) < each:
            group.append(Prompt(record["class"], record["prompt"]))
    return [prompt for group in chosen.values() for prompt in group]
