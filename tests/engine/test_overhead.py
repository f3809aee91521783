"""What a round costs outside the two models, counted: operations of torch and calls of Python, for which it does not matter what else
the machine does. benchmarks/overhead.py tells the milliseconds."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class Operations(TorchDispatchMode):
    """Counts what reaches torch's kernels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_per_round(level: TraceLevel, sampling: Sampling) -> float:
    config = EngineConfig(trace=level)
    with Engine(target=Flat(), drafter=AlwaysWrong(VOCABULARY), depth=DEPTH, config=config) as engine, Operations() as seen:
        rounds = engine.generate([1, 2, 3], sampling).metrics["rounds"]
    return seen.count / rounds


def test_a_round_is_few_operations() -> None:
    found = operations_per_round("summary", Sampling(temperature=0.8, seed=1, max_tokens=TOKENS))
    print(found)
    assert found < 95


def test_a_round_with_every_option_is_few_operations() -> None:
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
    found = operations_per_round("summary", options)
    print(found)
    assert found < 220


def test_summary_records_are_no_operation_and_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls, runs, seen = Recorder.rounds, [0], [0], Operations()

    def counted(self: Recorder, *arguments: Any) -> None:
        def note(frame: FrameType, event: str, argument: object) -> None:
            calls[0] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            with seen:
                plain(self, *arguments)
        finally:
            sys.setprofile(before)
        runs[0] += 1

    monkeypatch.setattr(Recorder, "rounds", counted)
    with Engine(target=Flat(), drafter=AlwaysWrong(VOCABULARY), depth=DEPTH, config=EngineConfig(trace="summary")) as engine:
        engine.generate([1, 2, 3], Sampling(temperature=0.8, seed=1, max_tokens=TOKENS))
    print(calls[0] / runs[0], seen.count)
    assert runs[0] and not seen.count
    assert calls[0] / runs[0] < 50
