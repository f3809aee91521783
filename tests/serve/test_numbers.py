"""The numbers beside a text, as clients of OpenAI, vLLM and llama.cpp read them, of texts whose rounds are known."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof import Sampling
from draftproof.engine.port import Completion
from draftproof.serve.numbers import extras, speculative, timings, usage
from draftproof.serve.reply import finish_of
from draftproof.serve.translate import Order
from draftproof.trace.events import Event, NodeRecord, PrefillDone, RequestStarted, RoundDone, Times, TokenRecord

ROUNDS = ((3, 2), (0, 0), (3, 0))           # guessed, and of these stood


def completion(rounds: tuple[tuple[int, int], ...] = ROUNDS, state: str = "on", tpot_s: float | None = 0.5, **told: Any) -> Completion:
    """A prompt of eight tokens, six of them found in the cache and two read in a quarter of a second; a token, and those of the rounds."""
    events: list[Event] = [RequestStarted("r", 0.0, 8, 6, {}, 1, 0), PrefillDone("r", 0.25, 0.25, 1, TokenRecord(0, "prefill"), "")]
    for number, (guessed, stood) in enumerate(rounds):
        nodes = tuple(NodeRecord(i, i - 1, "accepted" if i < stood else "rejected") for i in range(guessed))
        events.append(RoundDone("r", number, 1.0, 1, 9, guessed, "ngram", "", "", nodes, (TokenRecord(0, "correction"),) * (stood + 1), "",
                                Times(0.0, 0.0, 0.0, 0.0)))
    metrics = {"drafted": sum(guessed for guessed, _ in rounds), "accepted": sum(stood for _, stood in rounds), "tpot_s": tpot_s}
    written = 1 + sum(stood + 1 for _, stood in rounds)
    return Completion("", (0,) * written, 8, "length", 1, 0, metrics, {"state": state, "drafter": "ngram"}, trace=tuple(events), **told)


def order(prompts: int = 1, **options: Any) -> Order:
    return Order(((1, 2),) * prompts, Sampling(**options), None, None, False)


def test_timings_are_llama_cpp_s() -> None:
    assert timings(completion()) == {"cache_n": 6, "prompt_n": 2, "prompt_ms": 250.0, "predicted_n": 6, "predicted_ms": 2500.0,
                                     "predicted_per_second": 2.0, "draft_n": 6, "draft_n_accepted": 2}
    assert timings(completion((), "off", None)) == {"cache_n": 6, "prompt_n": 2, "prompt_ms": 250.0, "predicted_n": 1, "predicted_ms": None,
                                                    "predicted_per_second": None}
    untraced = Completion("", (0,), 8, "length", 1, 0, completion((), "none", None).metrics, {"state": "none"})
    assert (timings(untraced)["cache_n"], timings(untraced)["prompt_n"], timings(untraced)["prompt_ms"]) == (0, 8, None)


def test_speculation_is_told_as_vllm_tells_it() -> None:
    assert speculative(completion()) == {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": 2 / 6, "acceptance_histogram": [1, 0, 1, 0], "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2, "num_draft_tokens": 6, "num_spec_tokens": 3}
    assert speculative(completion(state="off")) == speculative(completion()), "switched off behind its last guess"
    assert speculative(completion(((0, 0),))) == {
        "mean_acceptance_length": None, "draft_acceptance_rate": None, "acceptance_histogram": [0], "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0, "num_draft_tokens": 0, "num_spec_tokens": 0}, "on, and nothing was guessed"
    assert speculative(completion(((0, 0),), "off")) is None


def test_a_prompt_counts_once_however_many_samples_it_has() -> None:
    one, other = completion(), completion(((0, 0),))
    assert usage(order(2, n=2), [[one, other], [one, one]]) == {
        "prompt_tokens": 16, "completion_tokens": 3 * 6 + 2, "total_tokens": 36, "prompt_tokens_details": {"cached_tokens": 12}}


def test_a_prediction_is_accounted_for_where_nothing_else_guessed() -> None:
    predicted = completion()
    predicted.speculation["drafter"] = "prediction"
    assert usage(order(prediction=(1, 2)), [[predicted, predicted]])["completion_tokens_details"] == {
        "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8, "reasoning_tokens": 0}
    for asked, done in ((order(), predicted), (order(prediction=(1, 2)), completion())):
        assert "completion_tokens_details" not in usage(asked, [[done]])


@pytest.mark.parametrize(("prompts", "samples"), [(1, 1), (2, 1), (1, 2)])
def test_a_single_text_has_numbers_of_its_own(prompts: int, samples: int) -> None:
    found = extras(order(prompts, n=samples), [[completion()] * samples] * prompts)
    assert (found["seed"], found["speculation"]["state"], "restarted" in found) == (1, "on", False)
    assert ("timings" in found, "metrics" in found) == ((prompts, samples) == (1, 1),) * 2
    off = extras(order(), [[completion((), "off", None)]])
    assert "timings" in off and "metrics" not in off


def test_ends_are_the_two_that_clients_know() -> None:
    assert [finish_of(finish) for finish in ("stop", "length", "cancelled", "error", None)] == ["stop", "length", "length", "length", None]
