"""Publish only what pays: a trained drafter replaces another only if it is accepted more when *served* on held-out prompts.

Validation accuracy does not predict this (rotary base, taps, templates: everything that differs between training and
serving is invisible to the loss), so the engine itself judges, at one depth for both sides, on the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..drafters.base import Drafter
from ..engine.engine import Engine
from ..models.target import Target
from ..types import Sampling
from .corpus import Text


@dataclass(frozen=True, slots=True)
class Served:
    """Acceptance on held-out prompts: emitted tokens per round, and its counts."""

    length: float
    rounds: int
    drafted: int
    accepted: int


def serve(target: Target, drafter: str | Drafter, texts: Sequence[Text], depth: int, tokens: int, seed: int,
          temperatures: Sequence[float] = (0.0, 1.0)) -> Served:
    """Let the engine answer the held-out prompts with this drafter at a fixed depth, at each temperature."""
    drafted, accepted, rounds, emitted = 0, 0, 0, 0
    with Engine(target, drafter, depth) as engine:
        prompts = [text.ids[:text.answer_from or max(4, len(text.ids) // 2)] for text in texts]
        for temperature in temperatures:
            for done in engine.generate_batch(prompts, Sampling(temperature=temperature, top_p=1.0, max_tokens=tokens, seed=seed)):
                metrics = done.metrics
                drafted, accepted, rounds = drafted + metrics["drafted"], accepted + metrics["accepted"], rounds + metrics["rounds"]
                emitted += done.completion_tokens - 1
    return Served(emitted / rounds if rounds else 0.0, rounds, drafted, accepted)


@dataclass(frozen=True, slots=True)
class Verdict:
    publish: bool
    reason: str


def judge(new: Served, old: Served | None, name: str) -> Verdict:
    """Whether the new drafter may take the place of `name` (old None: nothing stands there, and it must guess right at all)."""
    if old is None:
        return Verdict(new.accepted > 0, f"acceptance length {new.length:.3f} over {new.rounds} rounds, and nothing to replace"
                       if new.accepted else "not one of its guesses was accepted")
    figures = f"acceptance length {new.length:.3f} ({new.rounds} rounds) against {old.length:.3f} of {name}"
    return Verdict(new.length > old.length, figures)
