"""`grammar`: the tokens that a schema forces anyway (a key's name, quotes, brackets) need no model to be guessed.

Guesses are point masses. A forced token is certain to stand, for no other has any probability there; where only its bytes are
forced, the tokenizer's own way of writing them is guessed.
"""

from __future__ import annotations

from typing import ClassVar

from ..types import Budget, Draft, SequenceView
from .base import PerSequence, Plain
from .fixed import TextState


class GrammarDrafter(Plain, PerSequence[TextState]):
    """Proposes the tokens that the request's grammar forces next; silent where it leaves a choice, or without a grammar."""

    name = "grammar"
    unseen: ClassVar[str] = "the grammar of a request"           # in a replay

    def start(self, seq: SequenceView) -> TextState:
        return TextState(seq)

    def guess(self, state: TextState, budget: Budget) -> Draft:
        if state.seq.grammar is None:
            return Draft.empty(self.name, "the request has no grammar")
        forced = state.seq.grammar.forced(budget.depth)
        return Draft.chain(forced, drafter=self.name) if forced else Draft.empty(self.name, "the grammar leaves a choice")
