"""Drafters without a guess of their own: `none`, and the two that tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..types import Budget, Draft, SequenceView
from .base import Needs, PerSequence, Plain

NextToken = Callable[[Sequence[int]], int]
"""Text → the token that the target will choose after it."""


@dataclass(slots=True)
class TextState:
    """Nothing but the text."""

    seq: SequenceView


class NoDrafter(Plain, PerSequence[TextState]):
    """Never guesses; plain decoding."""

    name = "none"

    def start(self, seq: SequenceView) -> TextState:
        return TextState(seq)

    def guess(self, state: TextState, budget: Budget) -> Draft:
        return Draft.empty(self.name)


def _others(token: int, count: int) -> list[int]:
    """`count` ids that are not `token`, the nearest below first; none is above max(token, count)."""
    return [*range(token - 1, -1, -1), *range(token + 1, token + 1 + count)][:count]


class AlwaysWrong(PerSequence[TextState]):
    """Fills the whole budget with junk: a chain of the full depth, and every spare node as a further child, root first.

    With `next_token` no child of the root is what the target will choose, so nothing is ever accepted; without it the
    junk is fixed, and right only by accident. A node never has two children of the same token.
    """

    name = "always-wrong"
    needs = Needs(tree=True)

    def __init__(self, vocab_size: int, next_token: NextToken | None = None) -> None:
        assert vocab_size >= 2, "with one token nothing can be wrong"
        self.vocab_size, self.next_token = vocab_size, next_token

    def start(self, seq: SequenceView) -> TextState:
        return TextState(seq)

    def guess(self, state: TextState, budget: Budget) -> Draft:
        position = len(state.seq.tokens)
        truth = self.next_token(state.seq.tokens) if self.next_token else (7919 * position) % self.vocab_size
        tokens: list[int] = []
        parents: list[int] = []
        levels: list[int] = []
        children: dict[int, int] = {}

        def add(parent: int) -> None:
            level = levels[parent] + 1 if parent >= 0 else 0
            used = children.get(parent, 0)
            base = truth if parent < 0 else truth + position + level     # below the root anything is wrong
            tokens.append((base + 1 + used) % self.vocab_size)
            parents.append(parent)
            levels.append(level)
            children[parent] = used + 1

        for i in range(budget.depth):
            add(i - 1)
        parent = -1
        while len(tokens) < budget.nodes and parent < len(tokens):
            above = levels[parent] if parent >= 0 else -1
            if above + 1 < budget.depth and children.get(parent, 0) < self.vocab_size - 1:
                add(parent)
            else:
                parent += 1
        return Draft(torch.tensor(tokens, dtype=torch.int64), tuple(parents), drafter=self.name)


class Oracle(PerSequence[TextState]):
    """Proposes what the target will choose, with `decoys` wrong children in front of it at every depth where nodes allow.

    wrong_at(position) → True makes the guess for that position wrong (and the guesses behind it are for a text that
    will not be). Needs more than `decoys` + 1 token ids.
    """

    name = "oracle"
    needs = Needs(tree=True)

    def __init__(self, next_tokens: NextToken, decoys: int = 0, wrong_at: Callable[[int], bool] | None = None) -> None:
        self.next_tokens, self.decoys, self.wrong_at = next_tokens, decoys, wrong_at

    def start(self, seq: SequenceView) -> TextState:
        return TextState(seq)

    def guess(self, state: TextState, budget: Budget) -> Draft:
        text = list(state.seq.tokens)
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for level in range(budget.depth):
            decoys = min(self.decoys, budget.nodes - len(tokens) - (budget.depth - level))
            truth = self.next_tokens(text)
            *wrong, spare = _others(truth, decoys + 1)
            choice = spare if self.wrong_at and self.wrong_at(len(text)) else truth
            tokens += [*wrong, choice]
            parents += [parent] * (decoys + 1)
            parent = len(tokens) - 1
            text.append(choice)
        return Draft(torch.tensor(tokens, dtype=torch.int64), tuple(parents), drafter=self.name)
