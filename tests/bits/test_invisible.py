"""Invisible to the bit, on the trained pair in bfloat16: the ids do not depend on speculation, batch, pages, or a switch.

`DRAFTPROOF_BITS=full` runs 32 prompts × 256 tokens: the foundation's drafters, chains and trees, batches of 1 and 4, temperature 0
and 0.8, switched off and on in the middle at 0.8. `each` takes every drafter, as a chain and as a tree, in one of these ways, dealt by
DRAFTPROOF_BITS_SEED, which takes two hours on 2 cores; `all` every way, which takes a day; otherwise a sample of drafters, and of
ways to run each, is drawn by that seed. The reference is plain decoding, one sequence at a time.
Every prompt has a depth of its own, 1…12; max_tokens differ, so that in batches of four sequences join and leave at any
round; prompts of up to 300 tokens and 256 more cross page edges.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest
from bits.lineup import CHAINS_ONLY, FORCED, LINEUP

from draftproof.config import EngineConfig, LoadConfig
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import Oracle
from draftproof.engine.engine import Engine
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.models.target import Target
from draftproof.types import Sampling

pytestmark = pytest.mark.bits

MODE = os.environ.get("DRAFTPROOF_BITS", "sample")
FOUNDATION = ("none", "ngram", "model", "always wrong")
SEED = int(os.environ.get("DRAFTPROOF_BITS_SEED", "0"))
PROMPTS, TOKENS = (32, 256) if MODE in ("full", "each", "all") else (4, 48)
SAMPLED = 12                                        # drafters, chains and trees counted apart, in a sample
DEPTHS = range(1, 13)
NODES = 24
ORACLE = "oracle behind decoys"
GRAMMAR = {"lark": r'start: (/[a-zA-Z ,]{1,30};/ "\n    # and so it goes on: ")+'}      # a few free words, many forced ones


class Cell(NamedTuple):
    """One way to run one drafter."""

    drafter: str
    tree: bool
    batch: int
    temperature: float
    switch: bool

    def __str__(self) -> str:
        return (f"{self.drafter}{' tree' if self.tree else ''}{', switched off and on' if self.switch else ''}, batch {self.batch}, "
                f"temperature {self.temperature}")


def cells() -> list[Cell]:
    """All of them; or, of a sample, one for the oracle in a tree, and one of each of some others."""
    shapes = [(name, tree) for name in LINEUP for tree in (False, True) if not (tree and name in CHAINS_ONLY)]
    if MODE == "full":
        chosen = [shape for shape in shapes if shape[0] in FOUNDATION] + [(ORACLE, True)]
        return [Cell(*shape, batch, temperature, temperature > 0 and shape[0] != "none") for shape in chosen
                for batch in (1, 4) for temperature in (0.0, 0.8)]
    if MODE == "all":
        shapes.append((ORACLE, True))
        return [Cell(*shape, batch, temperature, switch) for shape in shapes for batch in (1, 4) for temperature in (0.0, 0.8)
                for switch in ((False, True) if temperature and shape[0] != "none" else (False,))]
    rng = random.Random(SEED)
    return [Cell(*shape, rng.choice((1, 4)), rng.choice((0.0, 0.8)), shape[0] != "none" and rng.random() < 0.3)
            for shape in [(ORACLE, True), *(shapes if MODE == "each" else rng.sample(shapes, SAMPLED))]]


@cache
def target() -> Target:
    found = load_target(builtin("target"), LoadConfig(dtype="bfloat16"))
    if not found.facts.invisible:
        pytest.skip(f"this machine does not give it, and the load says so: {found.facts.invisible_reason}")
    return found


@cache
def prompts() -> list[list[int]]:
    """Distinct held-out prompts of several classes, some long enough to end just before a page edge."""
    tokenizer = target().tokenizer
    assert tokenizer is not None
    lines = [json.loads(line) for line in (WEIGHTS / "prompts.jsonl").read_text("utf-8").splitlines()]
    ids = [tokenizer.encode(line["prompt"])[:300] for line in lines]
    random.Random(SEED).shuffle(ids)
    chosen = list({tuple(i[:24]): i for i in ids}.values())[:PROMPTS]
    page = LoadConfig().page_tokens
    for i in range(0, len(chosen), 4):  # the edge falls into the first rounds
        chosen[i] = (chosen[i] * page)[: page - 3 - i % 5]
    return chosen


def sampling(i: int, temperature: float, forced: bool, predicted: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature=temperature, seed=100 + i, max_tokens=TOKENS - 7 * (i % 4), ignore_eos=not forced, prediction=predicted,
                    grammar=GRAMMAR if forced else None)


@cache
def plain(temperature: float, forced: bool) -> list[tuple[int, ...]]:
    with Engine(target(), config=EngineConfig(max_batch=1, trace="none")) as engine:
        return [engine.generate(p, sampling(i, temperature, forced)).token_ids for i, p in enumerate(prompts())]


def predicted(text: Sequence[int]) -> tuple[int, ...]:
    """What will be said, but for a wrong token in every eleven and two that are missing."""
    return tuple((token + 1) % target().vocab_size if at % 11 == 7 else token for at, token in enumerate(text) if at not in (17, 18))


def oracle(temperature: float, decoys: int) -> Oracle:
    """Knows the reference; wrong at every fifth position, so that rewinds follow full acceptances of any length."""
    texts = [list(p) + list(out) for p, out in zip(prompts(), plain(temperature, False), strict=True)]

    def next_token(text: Sequence[int]) -> int:
        known = next((t for t in texts if t[: len(text)] == list(text)), None)
        return known[len(text)] if known is not None and len(known) > len(text) else 0

    return Oracle(next_token, decoys=decoys, wrong_at=lambda position: position % 5 == 4)


def made(cell: Cell) -> Drafter | str:
    return oracle(cell.temperature, decoys=2) if cell.drafter == ORACLE else LINEUP[cell.drafter](target())


def depth_of(prompt: int) -> int:
    """Neighbours in a batch get depths far apart; 12 prompts get them all."""
    return DEPTHS[(5 * prompt + SEED) % len(DEPTHS)]


def run(cell: Cell) -> tuple[int, int, int]:
    """(equal tokens, all tokens, accepted drafts), over all prompts, each at its own depth, `batch` of them at a time."""
    forced = cell.drafter in FORCED
    drafter, want, equal, total, accepted = made(cell), plain(cell.temperature, forced), 0, 0, 0
    guessing = drafter != "none"
    reads = not isinstance(drafter, str) and drafter.needs.prediction
    with Engine(
        target(),
        drafter,
        max(DEPTHS) if guessing else "auto",
        tree=NODES if cell.tree else None,
        config=EngineConfig(max_batch=cell.batch, trace="none"),
    ) as engine:
        handles = [
            engine.submit(prompt, sampling(i, cell.temperature, forced, predicted(want[i]) if reads else ()),
                          speculation={"depth": depth_of(i)} if guessing else None)[0]
            for i, prompt in enumerate(prompts())
        ]
        steps = 0
        while not all(handle.done for handle in handles):
            if cell.switch and steps % 16 == 8:
                engine.set_speculation(enabled=steps % 32 == 24)
            engine.step()
            steps += 1
        assert not engine.speculation.failure, engine.speculation.failure
        for ids, handle in zip(want, handles, strict=True):
            got = handle.completion()
            assert got.error is None and len(got.token_ids) == len(ids)
            equal += sum(a == b for a, b in zip(got.token_ids, ids, strict=True))
            total += len(ids)
            accepted += got.metrics["accepted"]
    target().check()  # type: ignore[attr-defined]
    return equal, total, accepted


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_ids_do_not_depend_on_speculation(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    if cell.drafter in FORCED and importlib.util.find_spec("llguidance") is None:
        pytest.skip("grammars need the extra `structured`")
    equal, total, accepted = run(cell)
    with capsys.disabled():
        print(f"\n  {cell}: {equal} of {total} tokens equal, {accepted} drafts accepted", end="", flush=True)
    assert equal == total
    if cell.drafter == ORACLE:
        assert accepted > total / (6 if cell.switch else 3), "the oracle was not believed; trees were not tested"
    if cell.drafter == "none":
        assert accepted == 0
