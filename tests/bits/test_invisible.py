"""Invisible to the bit, on the trained pair in bfloat16: the ids do not depend on speculation, batch, pages, or a switch.

`DRAFTPROOF_BITS=full` runs 32 prompts × 256 tokens for every cell; otherwise a sample drawn by DRAFTPROOF_BITS_SEED. The
reference is plain decoding, one sequence at a time. Every prompt has a depth of its own, 1…12; max_tokens differ, so that in
batches of four sequences join and leave at any round; prompts of up to 300 tokens and 256 more cross page edges.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from draftproof.config import EngineConfig, LoadConfig
from draftproof.drafters import build
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.engine.engine import Engine
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.models.target import Target
from draftproof.types import Sampling

pytestmark = pytest.mark.bits

FULL = os.environ.get("DRAFTPROOF_BITS") == "full"
SEED = int(os.environ.get("DRAFTPROOF_BITS_SEED", "0"))
PROMPTS, TOKENS = (32, 256) if FULL else (4, 96)
DEPTHS = range(1, 13)
NODES = 24


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


def sampling(i: int, temperature: float) -> Sampling:
    return Sampling(temperature=temperature, seed=100 + i, max_tokens=TOKENS - 7 * (i % 4), ignore_eos=True)


@cache
def plain(temperature: float) -> list[tuple[int, ...]]:
    with Engine(target(), config=EngineConfig(max_batch=1, trace="none")) as engine:
        return [engine.generate(p, sampling(i, temperature)).token_ids for i, p in enumerate(prompts())]


def oracle(temperature: float, decoys: int) -> Oracle:
    """Knows the reference; wrong at every fifth position, so that rewinds follow full acceptances of any length."""
    texts = [list(p) + list(out) for p, out in zip(prompts(), plain(temperature), strict=True)]

    def next_token(text: Sequence[int]) -> int:
        known = next((t for t in texts if t[: len(text)] == list(text)), None)
        return known[len(text)] if known is not None and len(known) > len(text) else 0

    return Oracle(next_token, decoys=decoys, wrong_at=lambda position: position % 5 == 4)


def drafters(temperature: float) -> Iterator[tuple[str, Drafter | str, bool]]:
    """(name, drafter, whether it is given a tree)."""
    yield "none", "none", False
    yield "ngram", build("ngram", target(), "match", LoadConfig()), False
    yield "model", build("model", target(), "match", LoadConfig()), False
    yield "model tree", build("model", target(), "match", LoadConfig()), True
    yield "always wrong", AlwaysWrong(target().vocab_size), False
    yield "oracle behind decoys", oracle(temperature, decoys=2), True


def depth_of(prompt: int) -> int:
    """Neighbours in a batch get depths far apart; 12 prompts get them all."""
    return DEPTHS[(5 * prompt + SEED) % len(DEPTHS)]


def run(drafter: Drafter | str, tree: bool, temperature: float, batch: int, switch: bool) -> tuple[int, int, int]:
    """(equal tokens, all tokens, accepted drafts), over all prompts, each at its own depth, `batch` of them at a time."""
    want, equal, total, accepted = plain(temperature), 0, 0, 0
    guessing = drafter != "none"
    with Engine(
        target(),
        drafter,
        max(DEPTHS) if guessing else "auto",
        tree=NODES if tree else None,
        config=EngineConfig(max_batch=batch, trace="none"),
    ) as engine:
        handles = [
            engine.submit(prompt, sampling(i, temperature), speculation={"depth": depth_of(i)} if guessing else None)[0]
            for i, prompt in enumerate(prompts())
        ]
        steps = 0
        while not all(handle.done for handle in handles):
            if switch and steps % 16 == 8:
                engine.set_speculation(enabled=steps % 32 == 24)
            engine.step()
            steps += 1
        for ids, handle in zip(want, handles, strict=True):
            got = handle.completion()
            assert got.error is None and len(got.token_ids) == len(ids)
            equal += sum(a == b for a, b in zip(got.token_ids, ids, strict=True))
            total += len(ids)
            accepted += got.metrics["accepted"]
    target().check()  # type: ignore[attr-defined]
    return equal, total, accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 4])
def test_ids_do_not_depend_on_speculation(batch: int, temperature: float, capsys: pytest.CaptureFixture[str]) -> None:
    failures = []
    for name, drafter, tree in drafters(temperature):
        for switch in (False, True) if name in ("model", "oracle behind decoys") else (False,):
            equal, total, accepted = run(drafter, tree, temperature, batch, switch)
            with capsys.disabled():
                print(
                    f"\n  {name}{', switched off and on' if switch else ''}, batch {batch}, temperature {temperature}: "
                    f"{equal} of {total} tokens equal, {accepted} drafts accepted",
                    end="",
                    flush=True,
                )
            if equal != total:
                failures.append(f"{name}: {equal} of {total}")
            if name == "oracle behind decoys":
                assert accepted > total / 3, "the oracle was not believed; trees were not tested"
            if name == "none":
                assert accepted == 0
    assert not failures, failures
