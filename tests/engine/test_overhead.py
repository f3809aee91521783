"""What a round costs outside the two models, in seconds of this thread's CPU, so that a busy machine does not matter much."""

from __future__ import annotations

from time import thread_time

import pytest
import torch

from draftproof import Engine, EngineConfig, Sampling
from draftproof.config import TraceLevel
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.engine.records import Recorder
from draftproof.models.fake import TableTarget
from draftproof.types import Scores

VOCABULARY, DEPTH, TOKENS = 4096, 5, 300


class Flat(TableTarget):
    """Hands out prepared logits: a pass takes no time to speak of."""

    def __init__(self) -> None:
        super().__init__(vocab_size=4, order=1)
        self.vocab_size = VOCABULARY
        self.rows = torch.randn(32, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3

    def law(self, text):  # type: ignore[no-untyped-def]
        return self.rows[0]

    def extend(self, slots, tokens):  # type: ignore[no-untyped-def]
        super().extend(slots, tokens)
        return Scores(self.rows[: len(slots)], tuple(range(len(slots) + 1)))

    def score(self, slots, roots, drafts):  # type: ignore[no-untyped-def]
        scores = super().score(slots, roots, drafts)
        return Scores(self.rows[: scores.starts[-1]], scores.starts)


@pytest.fixture(autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seconds_per_round(level: TraceLevel, sampling: Sampling) -> float:
    with Engine(target=Flat(), drafter=AlwaysWrong(VOCABULARY), depth=DEPTH, config=EngineConfig(trace=level)) as engine:
        engine.generate([1, 2, 3], sampling)
        best = float("inf")
        for _ in range(3):
            start = thread_time()
            rounds = engine.generate([1, 2, 3], sampling).metrics["rounds"]
            best = min(best, (thread_time() - start) / rounds)
    return best


def test_a_round_costs_less_than_a_millisecond_and_a_half() -> None:
    assert seconds_per_round("summary", Sampling(temperature=0.8, seed=1, max_tokens=TOKENS)) < 1.5e-3


def test_a_round_with_every_option_costs_less_than_three_milliseconds() -> None:
    options = Sampling(
        temperature=0.8,
        top_p=0.95,
        top_k=50,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={1: 0.5},
        bad_word_ids=((3, 4),),
        min_tokens=5,
        logprobs=3,
        seed=1,
        max_tokens=TOKENS,
    )
    assert seconds_per_round("summary", options) < 3e-3


def test_summary_records_cost_less_than_a_hundredth_of_a_short_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on the records alone, against a round of 5 ms: two small models on a CPU."""
    spent, plain = [0.0, 0], Recorder.rounds

    def timed(self, *arguments):  # type: ignore[no-untyped-def]
        start = thread_time()
        plain(self, *arguments)
        spent[0] += thread_time() - start
        spent[1] += 1

    monkeypatch.setattr(Recorder, "rounds", timed)
    seconds_per_round("summary", Sampling(temperature=0.8, seed=1, max_tokens=TOKENS))
    assert spent[0] / spent[1] < 0.01 * 5e-3
