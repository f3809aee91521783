"""What one request's speculation did, in the shapes that clients of vLLM and llama.cpp read. Absent, not zero, when it was off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.tally import ratio
from ..engine.port import Completion
from ..trace.events import PrefillDone, RequestStarted, RoundDone
from .translate import Order


def usage(order: Order, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """OpenAI's `usage`; groups: the samples of each prompt. A prompt counts once, however many samples it has."""
    prompt = sum(group[0].prompt_tokens for group in groups)
    written = sum(done.completion_tokens for group in groups for done in group)
    cached = sum(cached_tokens(group[0]) for group in groups)
    out: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
                           "prompt_tokens_details": {"cached_tokens": cached}}
    predicted = len(order.sampling.prediction)
    if predicted and groups[0][0].speculation["drafter"] == "prediction":
        # With prediction alone every accepted draft token came from it; in a chain nobody could say which did.
        accepted = sum(done.metrics["accepted"] for group in groups for done in group)
        drafted = sum(done.metrics["drafted"] for group in groups for done in group)
        out["completion_tokens_details"] = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
                                            "reasoning_tokens": 0}
    return out


def cached_tokens(done: Completion) -> int:
    return next((event.cached_tokens for event in done.trace if isinstance(event, RequestStarted)), 0)


def speculative(done: Completion) -> dict[str, Any] | None:
    """vLLM's `metrics.speculative_decoding` of one sample: rounds without a draft are not counted; the bonus token is, in the
    mean length. `num_spec_tokens` is the deepest draft. None if nothing could be guessed."""
    metrics = done.metrics
    if done.speculation["state"] != "on" and not metrics["drafted"]:
        return None
    rounds = [event for event in done.trace if isinstance(event, RoundDone) and event.nodes]
    accepted = [sum(node.fate == "accepted" for node in event.nodes) for event in rounds]
    deepest = max((event.depth for event in rounds), default=0)
    return {
        "mean_acceptance_length": ratio(len(rounds) + sum(accepted), len(rounds)),
        "draft_acceptance_rate": ratio(metrics["accepted"], metrics["drafted"]),
        "acceptance_histogram": [accepted.count(length) for length in range(deepest + 1)],
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": metrics["accepted"],
        "num_draft_tokens": metrics["drafted"],
        "num_spec_tokens": deepest,
    }


def timings(done: Completion) -> dict[str, Any]:
    """llama.cpp's `timings` of one sample, with `draft_n` and `draft_n_accepted` only where drafts could be made."""
    metrics = done.metrics
    prefill = next((event.seconds for event in done.trace if isinstance(event, PrefillDone)), None)
    cached = cached_tokens(done)
    tpot, written = metrics["tpot_s"], done.completion_tokens
    out: dict[str, Any] = {
        "cache_n": cached,
        "prompt_n": done.prompt_tokens - cached,
        "prompt_ms": None if prefill is None else 1000 * prefill,
        "predicted_n": written,
        "predicted_ms": None if tpot is None else 1000 * tpot * (written - 1),
        "predicted_per_second": None if not tpot else 1 / tpot,
    }
    if speculative(done) is not None:
        out.update(draft_n=metrics["drafted"], draft_n_accepted=metrics["accepted"])
    return out


def extras(order: Order, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """The fields beside OpenAI's own: speculation as it was, and, for a single text, its numbers."""
    first = groups[0][0]
    out: dict[str, Any] = {"speculation": first.speculation, "seed": first.seed}
    if "restarted" in first.speculation:                     # a remote engine's replica died, and another one went on
        out["restarted"] = first.speculation["restarted"]
    if order.choices == 1:
        found = speculative(first)
        if found is not None:
            out["metrics"] = {"speculative_decoding": found}
        out["timings"] = timings(first)
    return out
