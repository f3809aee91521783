"""EAGLE heads with random weights for the contract tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftproof.drafters.eagle import Eagle2Drafter, EagleDrafter
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.drafters.peagle import PEagleDrafter
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.peagle import PEagleHead

SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 16, "inner": 48}
SOME = torch.tensor([0, 1, 2, 4, 5, 7, 9, 12])


def eagle(kind: type[EagleDrafter]) -> Callable[[Any, Any], Any]:
    def build(target: Any, truth: Any) -> Any:
        torch.manual_seed(0)
        return kind(EagleHead.fresh(target.parts, **SIZES), target.vocab_size)

    return build


def eagle3(reduced: bool, **more: Any) -> Callable[[Any, Any], Any]:
    def build(target: Any, truth: Any) -> Any:
        torch.manual_seed(0)
        return Eagle3Drafter(Eagle3Head.fresh(target.parts, SOME if reduced else None, hidden=32, **SIZES, **more), target.vocab_size)

    return build


def peagle(target: Any, truth: Any = None, **more: Any) -> PEagleDrafter:
    torch.manual_seed(0)
    return PEagleDrafter(PEagleHead.fresh(target.parts, SOME, hidden=32, layers=2, **SIZES, **more), target.vocab_size)


EAGLE_HEADS: dict[str, Callable[[Any, Any], Any]] = {
    "eagle": eagle(EagleDrafter),
    "eagle2": eagle(Eagle2Drafter),
    "eagle3": eagle3(reduced=True, layers=2, norms="fc_norm", norm_output=True),
    "eagle3-whole-vocabulary": eagle3(reduced=False, context=24),
    "peagle": peagle,
    "peagle-short-context": lambda target, truth: peagle(target, context=24),
}
