"""`model` with another vocabulary than the target's: the draft model reads the same text in its own tokens.

*Token level*: it draws only from the tokens that both have, compared by content, so that its guesses, its law and the shared
noise are in the target's ids; every rule stays exact, because q, renormalised over these tokens, is the law that was really
drawn from. *String level* (string_level.py): it writes on in its own tokens, and the target's tokenizer reads what it wrote;
a guess without a law. Both: Timor et al., arXiv 2502.05202 (algorithms "token-level intersection" and "string-level exact match").

Which one: token level, if on a sample text the shared tokens carry at least SHARE of the drafter's probability. What they do
not carry it never guesses; the string level loses trees and the shared noise, worth about twice the accepted guesses at
temperature 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..core.upload import uploaded
from ..models.target import Slot, Target
from ..types import Draft, Scores
from .model import FULL, ModelDrafter, ModelState
from .string_level import StringLevel
from .vocabulary import Check, Spelling, Words, compare, counterpart, foreign, require_same, shared

SHARE = 0.7
SLACK = 1.25        # room taken for the growth of a text, in what its tokens have needed so far
SAMPLE = """The committee met on Tuesday, 14 March, to discuss the results. "We didn't expect it," she said, "but the new
method costs less than half as much."

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)  # O(n)

Die Brücke wurde 1998 gebaut; elle est fermée depuis l'été dernier. 东京是日本的首都。
"""
SAMPLED = 256       # tokens of it at most


def pair(target: Target, lm: Target, chunk: int = 512) -> ModelDrafter | StringLevel:
    """The drafter that lets `lm` guess for `target`, its `checks` saying how. Raises VocabularyMismatch if none can."""
    words, own = Words.of(target), Words.of(lm)
    if not foreign(words, own):
        drafter = ModelDrafter(lm, target.vocab_size, chunk)
        drafter.checks = require_same(words, own)
        return drafter
    spelling, theirs = Spelling.of(words), Spelling.of(own)
    if spelling is None:          # nothing is known of the target's bytes, so that no guess could be put into its tokens
        require_same(words, own)
        raise AssertionError("foreign vocabularies are not the same")
    token_level, reason = _choose(lm, spelling, theirs)
    found: ModelDrafter | StringLevel
    if token_level and theirs is not None:
        found = TokenLevel(TranslatedLm(lm, spelling, theirs), chunk)
    else:
        found = StringLevel(lm, spelling, chunk)
    differences = [Check(c.name, c.ok, c.detail, fatal=False) for c in compare(words, own) if c.name != "vocabulary"]
    found.checks = [Check("vocabulary", True, reason), *differences]
    return found


def _choose(lm: Target, target: Spelling, own: Spelling | None) -> tuple[bool, str]:
    """Whether at token level, and why."""
    if own is None:
        return False, "another one than the target's, whose tokens do not say which bytes they are: guesses are strings"
    pairs = shared(target, own)
    mass = _mass(lm, own, [column for _, column in pairs]) if pairs else 0.0
    found = (f"another one than the target's; {len(pairs)} of its {len(own.contents)} tokens are the target's too, "
             f"with {mass:.0%} of its probability on a sample text")
    if mass >= SHARE:
        return True, f"{found}: it guesses with these (at least {SHARE:.0%})"
    return False, f"{found}: too little to guess token by token (at least {SHARE:.0%}), so guesses are strings"


def _mass(lm: Target, own: Spelling, columns: Sequence[int]) -> float:
    """The probability of these tokens, averaged over the places of the sample text."""
    assert own.words.tokenizer is not None
    ids = [*own.words.front, *own.words.tokenizer.encode_plain(SAMPLE)][:min(SAMPLED, lm.context)]
    slot = lm.open(ids, tenant="sample text")
    rest = torch.tensor(ids[slot.length:], device=lm.device)
    scores = lm.score([slot], rest[:1], [Draft.chain(rest[1:])])
    lm.rewind(slot, ())
    lm.close(slot)
    mass: Tensor = scores.logits.float().softmax(-1)[:, list(columns)].sum(-1).mean()
    return float(mass)


@dataclass(slots=True, eq=False)
class TranslatedSlot:
    """own: the text in the drafter's ids; ends[i]: how many of them stand for its first i tokens, the front included.
    The inner slot holds a prefix of `own`; limit: how many there is room for."""

    inner: Slot
    own: list[int]
    ends: list[int]
    limit: int

    @property
    def length(self) -> int:
        return len(self.ends) - 1


class TranslatedLm:
    """A draft model that takes the target's ids and answers in them: what `ModelDrafter` asks of a `Target`.

    A token that both have is read as itself, any other one is spelled in the drafter's tokens, a special one as the drafter's
    of the same role. Logits are −inf but for the shared tokens.
    """

    def __init__(self, lm: Target, target: Spelling, own: Spelling) -> None:
        self.lm, self.facts, self.device, self.context = lm, lm.facts, lm.device, lm.context
        self.vocab_size = target.words.vocab_size
        self._target, self._own = target, own
        self.ids, self.columns = (torch.tensor(side, device=lm.device) for side in zip(*shared(target, own), strict=True))
        self._readings: dict[int, tuple[int, ...]] = {}

    def read(self, token: int) -> tuple[int, ...]:
        """One or more own ids for a token of the target."""
        found = self._readings.get(token)
        if found is None:
            content = self._target.contents.get(token, b"")
            if isinstance(content, str) and content not in self._own.ids:
                content = counterpart(content, self._target.words, self._own.words)
            if content in self._own.ids:
                found = (self._own.ids[content],)
            else:
                found = (self._own.spell(content) if isinstance(content, bytes) else None) or (self._unknown(),)
            self._readings[token] = found
        return found

    def _unknown(self) -> int:
        """Stands for what cannot be written."""
        hf = self._own.words.tokenizer.hf if self._own.words.tokenizer else None
        return next((i for i in (getattr(hf, role, None) for role in ("unk_token_id", "bos_token_id", "eos_token_id")) if i is not None), 0)

    def measure(self, tokens: Sequence[int]) -> int:
        """How many own ids stand for `tokens`."""
        return sum(len(self.read(token)) for token in tokens)

    def whole(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """The own ids of a text from its beginning, and their `ends`."""
        own: list[int] = []
        ends = [0]
        for token in tokens:
            own += self.read(token)
            ends.append(len(own))
        front = self._own.words.front
        if own[:len(front)] == front:
            return own, ends
        return [*front, *own], [end + len(front) for end in ends]

    def fits(self, tokens: int) -> bool:
        return self.lm.fits(min(self.context, math.ceil(SLACK * tokens)))

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> TranslatedSlot:
        own, ends = self.whole(tokens)
        limit = max(len(own), min(self.context, len(own) + math.ceil(SLACK * room * len(own) / max(1, len(tokens))) + 1))
        inner = self.lm.open(own, tenant, limit - len(own))
        held = min(max(0, bisect_right(ends, inner.length) - 1), len(tokens) - 1)   # tokens that a cached prefix holds whole
        if inner.length > ends[held]:
            self.lm.truncate(inner, ends[held])
        return TranslatedSlot(inner, own[:ends[held]], ends[:held + 1], limit)

    def close(self, slot: TranslatedSlot) -> None:
        self.lm.close(slot.inner)

    def truncate(self, slot: TranslatedSlot, length: int) -> None:
        del slot.ends[length + 1:]
        del slot.own[slot.ends[-1]:]
        if slot.inner.length > len(slot.own):
            self.lm.truncate(slot.inner, len(slot.own))

    def extend(self, slots: Sequence[TranslatedSlot], tokens: Sequence[Tensor]) -> Scores:
        for slot, ids in zip(slots, tokens, strict=True):
            for token in ids.tolist():
                slot.own += self.read(token)
                slot.ends.append(len(slot.own))
        missing = [uploaded(slot.own[slot.inner.length:], self.device) for slot in slots]
        scores = self.lm.extend([slot.inner for slot in slots], missing)
        logits = scores.logits.new_full((len(slots), self.vocab_size), -math.inf)
        return Scores(logits.index_copy_(1, self.ids, scores.logits[:, self.columns]), scores.starts)


class TokenLevel(ModelDrafter):
    """`model` through a `TranslatedLm`. Its context and its cache count its own tokens, which may be more than the text's."""

    nothing: ClassVar[str] = "the options leave none of the tokens that both models have"

    def __init__(self, lm: TranslatedLm, prefill_chunk: int = 512) -> None:
        super().__init__(cast(Target, lm), lm.vocab_size, prefill_chunk)
        self.translated = lm

    def _seat(self, state: ModelState) -> None:
        own, context = len(self.translated.whole(state.seq.tokens)[0]), self.lm.context
        if own > context:
            state.silent, state.lasting = f"the text, {own} of the drafter's tokens, is longer than its context of {context}", True
        else:
            super()._seat(state)

    def _grant(self, state: ModelState, depth: int) -> tuple[int, str]:
        granted, reason = super()._grant(state, depth)
        if not granted:
            return granted, reason
        slot, text, lm = cast(TranslatedSlot, state.slot), state.seq.tokens, self.translated
        own = len(slot.own) + lm.measure(text[slot.length:])
        room = lm.context - own + 1                                # the last drafted token is never fed
        if room < 1:
            self.close(state)
            state.silent = f"the text, {own} of the drafter's tokens, is longer than its context of {lm.context}"
            return 0, state.silent
        if own + granted > slot.limit:                             # more tokens than foreseen
            if not lm.fits(own + granted - slot.limit):
                return 0, FULL
            slot.limit = own + granted
        return (room, f"the drafter's context ends at {lm.context} of its tokens") if room < granted else (granted, reason)


