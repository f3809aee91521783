"""Drafters without weights, and chains of all kinds, for the contract; some with a part that is always wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from contract.eagle_heads import EAGLE_HEADS
from contract.vector_heads import VECTOR_HEADS

from draftproof.drafters.chain import chained
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.prediction import PredictionDrafter, PredictionState
from draftproof.drafters.recycle import RecycleDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.models.fake import TableTarget
from draftproof.types import SequenceView

NextToken = Callable[[Sequence[int]], int]
V = 13


class Foretold(PredictionDrafter):
    """Every request predicts what the target will say, but for every fifth token, and with two tokens missing."""

    def __init__(self, truth: NextToken) -> None:
        self.truth = truth

    def start(self, seq: SequenceView) -> PredictionState:
        from dataclasses import replace

        text = list(seq.tokens[:seq.prompt_tokens])
        for _ in range(20):
            text.append(self.truth(text))
        told = tuple((token + 1) % V if at % 5 == 4 else token for at, token in enumerate(text[seq.prompt_tokens:]) if at not in (7, 8))
        whole = seq.sampling
        seq.sampling = replace(whole, prediction=told)          # type: ignore[misc]
        state = super().start(seq)
        seq.sampling = whole                                    # type: ignore[misc]
        return state


def small() -> ModelDrafter:
    return ModelDrafter(TableTarget(V, order=1, seed=9), V, prefill_chunk=3)


CHAINS: dict[str, Callable[[TableTarget, NextToken], Any]] = {
    "suffix": lambda target, truth: SuffixDrafter(),
    "suffix-tiny": lambda target, truth: SuffixDrafter(max=2, tokens=24),
    "suffix-forgetful": lambda target, truth: SuffixDrafter(max=5, tokens=0),
    "recycle": lambda target, truth: RecycleDrafter(),
    "recycle-tiny": lambda target, truth: RecycleDrafter(rows=7),
    "recycle+model": lambda target, truth: chained([RecycleDrafter(), small()]),
    "wrong+recycle": lambda target, truth: chained([AlwaysWrong(V, truth), RecycleDrafter()]),
    "prediction-without": lambda target, truth: PredictionDrafter(),
    "prediction": lambda target, truth: Foretold(truth),
    "suffix+model": lambda target, truth: chained([SuffixDrafter(), small()]),
    "prediction+ngram+model": lambda target, truth: chained([Foretold(truth), NgramDrafter(), small()]),
    "wrong+oracle": lambda target, truth: chained([AlwaysWrong(V, truth), Oracle(truth)]),
    "model+wrong": lambda target, truth: chained([small(), AlwaysWrong(V, truth)]),
    "model-short+model-itself": lambda target, truth: chained([
        ModelDrafter(TableTarget(V, order=1, seed=9, context=14), V), ModelDrafter(target, V)]),
    "suffix+eagle3": lambda target, truth: chained([SuffixDrafter(), EAGLE_HEADS["eagle3"](target, truth)]),
    "wrong+medusa+ngram": lambda target, truth: chained([AlwaysWrong(V), VECTOR_HEADS["medusa"](target, truth), NgramDrafter()]),
}
