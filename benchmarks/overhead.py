"""Where a round's time goes besides the two models' forward passes.

A `Stopwatch` times every pass of a target and of a draft model; what is left of the wall clock, divided by the rounds, is
the engine's and the drafter's own time. `ConstantTarget` is a model that costs nothing and has any vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from draftproof import Engine, Sampling
from draftproof.drafters.model import ModelDrafter
from draftproof.models.target import LoadFacts, Target, TargetParts
from draftproof.models.tokenizer import Tokenizer
from draftproof.types import Draft, Scores

EVERY_OPTION: dict[str, Any] = dict(
    temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logit_bias={7: 0.5, 11: -1.0}, bad_word_ids=((5, 6), (9,)), min_tokens=8)


@dataclass(slots=True)
class LengthSlot:
    length: int = 0
    scored: bool = False


class ConstantTarget:
    """The same logits [V] after every text. Likely tokens fall off as a power law, the rest is a Gaussian bulk of logits:
    about 90 tokens hold 0.95, much for a language model. `flat`: a power law all the way down, where 0.95 takes a
    large part of the vocabulary. Two seeds agree as well as a good drafter does with its target."""

    def __init__(self, vocab_size: int, seed: int = 0, flat: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(0)
        rank = torch.randperm(vocab_size, generator=generator).float() + 1
        bulk = 2.5 * torch.randn(vocab_size, generator=generator)
        logits = -1.2 * rank.log() if flat else torch.where(rank <= 1000, 20 - 1.6 * rank.log(), bulk)
        self.row = (logits + 0.3 * torch.randn(vocab_size, generator=generator.manual_seed(seed))).to(dtype)
        self.vocab_size, self.context, self.device, self.trees = vocab_size, 1 << 20, torch.device("cpu"), True
        self.parts, self.defaults, self.eos_ids = TargetParts(), dict[str, float](), tuple[int, ...]()
        self.tokenizer: Tokenizer | None = None
        self.facts = LoadFacts(name=f"constant-{vocab_size}", device="cpu", dtype=str(dtype), tier=0, threads=torch.get_num_threads(),
                               weight_bytes=0, cache_bytes_per_token=0, invisible=True, invisible_reason="yes: all rows are equal")

    def set_taps(self, layers: Sequence[int]) -> None:
        """It has no layers, and no drafter here asks for any."""

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> LengthSlot:
        return LengthSlot()

    def extend(self, slots: Sequence[LengthSlot], tokens: Sequence[Tensor]) -> Scores:
        for slot, ids in zip(slots, tokens, strict=True):
            slot.length += len(ids)
        return Scores(self.row.repeat(len(slots), 1), tuple(range(len(slots) + 1)))

    def score(self, slots: Sequence[LengthSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        starts = [0]
        for slot, draft in zip(slots, drafts, strict=True):
            slot.length, slot.scored = slot.length + 1, True
            starts.append(starts[-1] + 1 + len(draft))
        return Scores(self.row.repeat(starts[-1], 1), tuple(starts))

    def rewind(self, slot: LengthSlot, kept: Sequence[int]) -> None:
        if slot.scored:
            slot.length, slot.scored = slot.length + len(kept), False

    def truncate(self, slot: LengthSlot, length: int) -> None:
        slot.length = length

    def close(self, slot: LengthSlot) -> None:
        slot.length = 0

    def fits(self, tokens: int) -> bool:
        return True


class Stopwatch:
    """Seconds spent in the forward passes of the models it watches."""

    def __init__(self, *models: Target) -> None:
        self.seconds = 0.0
        for model in models:
            for name in ("extend", "score"):
                setattr(model, name, self._timed(getattr(model, name)))

    def _timed(self, call: Callable[..., Scores]) -> Callable[..., Scores]:
        def run(*args: Any) -> Scores:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start
        return run


def round_times(engine: Engine, watch: Stopwatch, prompt: Sequence[int], options: dict[str, Any], depth: int,
                tokens: int = 96) -> list[tuple[float, float]]:
    """(seconds outside the passes, seconds inside) of every round of one request after its first token."""
    speculation = {"depth": depth} if depth else {"drafter": "none"}
    sampling = Sampling(**{"temperature": 0.0, "seed": 1, **options, "max_tokens": tokens, "ignore_eos": True})
    handle = engine.submit(prompt, sampling, speculation=speculation)[0]
    while not engine.step():
        pass
    rounds = []
    while not handle.done:
        before, start = watch.seconds, time.perf_counter()
        engine.step()
        passes = watch.seconds - before
        rounds.append((time.perf_counter() - start - passes, passes))
    error = handle.completion().error
    if error:
        raise RuntimeError(error)
    return rounds


def overhead(engine: Engine, watch: Stopwatch, prompts: Sequence[Sequence[int]], options: dict[str, Any], depth: int,
             repeats: int = 3, tokens: int = 96) -> dict[str, float]:
    """Milliseconds per round: the median over all rounds (a pause of the machine is not ours) and the mean, after a warm-up."""
    round_times(engine, watch, prompts[0], options, depth, 16)
    rounds = [r for _ in range(repeats) for p in prompts for r in round_times(engine, watch, p, options, depth, tokens)]
    outside, inside = ([r[i] * 1e3 for r in rounds] for i in (0, 1))
    return {"overhead_ms": round(median(outside), 3), "overhead_mean_ms": round(fmean(outside), 3), "passes_ms": round(median(inside), 3),
            "rounds": len(rounds)}


def constant_overhead(vocab_size: int, options: dict[str, Any], depth: int, repeats: int = 3, flat: bool = False) -> dict[str, float]:
    """The overhead with two constant models of this vocabulary."""
    target: Target = ConstantTarget(vocab_size, 1, flat)
    draft: Target = ConstantTarget(vocab_size, 2, flat)
    watch = Stopwatch(target, draft)
    with Engine(target, ModelDrafter(draft)) as engine:
        prompts = [[(i * 37 + j) % vocab_size for i in range(200)] for j in range(2)]
        return overhead(engine, watch, prompts, options, depth, repeats)


@torch.inference_mode()
def scoring_pass(target: Target, prompt: Sequence[int], rows: Sequence[int] = (1, 2, 5, 9), repeats: int = 30) -> dict[int, float]:
    """Milliseconds of a pass of so many rows (1 is plain decoding's) after `prompt`, medians of interleaved passes."""
    slot = target.open(prompt, "scoring pass", max(rows) + 1)
    target.extend([slot], [torch.tensor(prompt[slot.length:-1], device=target.device)])
    root = torch.tensor([prompt[-1]], device=target.device)
    drafts = {n: Draft.chain(list(prompt[1:n])) for n in rows}
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 3):
        for n in rows:
            start = time.perf_counter()
            target.score([slot], root, [drafts[n]])
            spent = time.perf_counter() - start
            target.rewind(slot, ())
            target.truncate(slot, len(prompt) - 1)
            if repeat >= 3:                                      # the first few warm up
                times[n].append(spent * 1e3)
    target.close(slot)
    return {n: median(values) for n, values in times.items()}
