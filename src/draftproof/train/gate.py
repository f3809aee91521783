"""Publish only what pays: a trained drafter replaces another only if it is accepted more when *served* on held-out prompts.

Validation accuracy does not predict this (rotary base, taps, templates: everything that differs between training and
serving is invisible to the loss), so the engine itself judges, at one depth for both sides, on the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..drafters.base import Drafter
from ..engine.engine import Engine
from ..models.target import Target
from ..types import Sampling
from .corpus import Text

FEW = 8             # held-out texts; fewer say little


@dataclass(frozen=True, slots=True)
class Served:
    """Acceptance on held-out prompts: emitted tokens per round, and its counts. each: (emitted tokens, rounds) of every prompt."""

    length: float
    rounds: int
    drafted: int
    accepted: int
    each: tuple[tuple[int, int], ...] = ()


def serve(target: Target, drafter: str | Drafter, texts: Sequence[Text], depth: int, tokens: int, seed: int) -> Served:
    """Let the engine answer the held-out prompts with this drafter at a fixed depth, at temperature 0 and 1."""
    drafted, accepted, each = 0, 0, [(0, 0)] * len(texts)
    with Engine(target, drafter, depth) as engine:
        prompts = [text.ids[:text.answer_from or max(4, len(text.ids) // 2)] for text in texts]
        for temperature in (0.0, 1.0):
            asked = Sampling(temperature=temperature, top_p=1.0, max_tokens=tokens, seed=seed)
            for i, done in enumerate(engine.generate_batch(prompts, asked)):
                drafted, accepted = drafted + done.metrics["drafted"], accepted + done.metrics["accepted"]
                each[i] = each[i][0] + done.completion_tokens - 1, each[i][1] + done.metrics["rounds"]
    emitted, rounds = (sum(counts) for counts in zip(*each, strict=True))
    return Served(emitted / rounds if rounds else 0.0, rounds, drafted, accepted, tuple(each))


def difference(new: Served, old: Served) -> tuple[float, float] | None:
    """95 % interval over prompts of new.length - old.length, paired, by the delta method; None of too few prompts to have one."""
    n = len(new.each)
    if n < 2 or n != len(old.each) or not new.rounds or not old.rounds:
        return None
    off = [n * ((a - new.length * r) / new.rounds - (b - old.length * s) / old.rounds)
           for (a, r), (b, s) in zip(new.each, old.each, strict=True)]
    student = 1.96 + 2.37 / (n - 1) + 2.82 / (n - 1) ** 2              # its quantile, expanded in 1/(n - 1)
    half = student * math.sqrt(sum(x * x for x in off) / (n - 1) / n)
    return new.length - old.length - half, new.length - old.length + half


@dataclass(frozen=True, slots=True)
class Verdict:
    publish: bool
    reason: str
    interval: tuple[float, float] | None = None        # of the difference in acceptance length


def judge(new: Served, old: Served | None, name: str) -> Verdict:
    """Whether the new drafter may take the place of `name` (old None: nothing stands there, and it must guess right at all)."""
    if old is None:
        return Verdict(new.accepted > 0, f"acceptance length {new.length:.3f} over {new.rounds} rounds, and nothing to replace"
                       if new.accepted else "not one of its guesses was accepted")
    figures = f"acceptance length {new.length:.3f} ({new.rounds} rounds) against {old.length:.3f} ({old.rounds}) of {name}"
    interval = difference(new, old)
    if interval is not None:
        figures += f"; difference {interval[0]:+.3f} to {interval[1]:+.3f} (95 % over {len(new.each)} prompts)"
    return Verdict(new.length > old.length, figures, interval)
