"""Draft models with another vocabulary, for the contract: thirteen letters, of which the drafter has nine, in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafters.tongues import letters, spelling

from draftproof.drafters.string_level import StringLevel
from draftproof.drafters.translate import TokenLevel, TranslatedLm
from draftproof.models.fake import TableTarget

TARGET, OWN = letters("abcdefghijklm"), letters("wxyzmlkjedcba")


def _lm(**more: Any) -> TableTarget:
    return TableTarget(13, order=1, seed=9, tokenizer=OWN, **more)


FOREIGN: dict[str, Callable[[Any, Any], Any]] = {
    "model-token-level": lambda target, truth: TokenLevel(TranslatedLm(_lm(), spelling(TARGET), spelling(OWN)), prefill_chunk=3),
    "model-token-level-short-context": lambda target, truth: TokenLevel(TranslatedLm(_lm(context=20), spelling(TARGET), spelling(OWN))),
    "model-string-level": lambda target, truth: StringLevel(_lm(), spelling(TARGET), prefill_chunk=3),
}
