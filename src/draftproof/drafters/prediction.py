"""`prediction`: the request brings a text that its output will resemble, such as the file that is to be edited (OpenAI's
Predicted Outputs). Guesses follow it for as long as the output does, and find the place again after a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..types import Budget, Draft, SequenceView
from .base import Needs, PerSequence, Plain
from .occurrences import TextIndex, gram_levels

LEVELS = gram_levels(32)
LONGEST = 32          # agreement, in tokens, beyond which a place is no better
SURE = 8              # agreement that needs no better place
NEAR = 32             # how far behind the old place a single agreeing token is believed
PLACES = 64           # occurrences of one gram that are looked at
TRUST = 1.5           # tokens of agreement that are worth one even bet


@dataclass(slots=True)
class PredictionState:
    """at: the place in the prediction that comes next. agreed: output tokens in a row that the prediction had right."""

    seq: SequenceView
    predicted: Sequence[int]
    index: TextIndex
    read: int                 # tokens of the text that were compared
    at: int = 0
    agreed: int = 0
    begun: bool = False       # a difference was seen: no longer at the beginning


class PredictionDrafter(Plain, PerSequence[PredictionState]):
    """Follows the request's `prediction`, from its beginning, to the full depth while the output agrees with it; chains.

    After a difference the place is found again by the last tokens of the output: the longest agreement anywhere in the
    prediction, the nearest one among equals; a single agreeing token counts only within `NEAR` tokens. Until something
    agrees, the differing token is taken for a replacement. A place that was found again is followed for one token more than
    agrees with it. score: the chance of agreement, a / (a + 1.5) after a agreeing tokens, multiplied along the draft.
    """

    name = "prediction"
    needs = Needs(prediction=True)

    def start(self, seq: SequenceView) -> PredictionState:
        predicted = seq.sampling.prediction
        assert not isinstance(predicted, str), "resolved options hold token ids"
        index = TextIndex(LEVELS)
        index.extend([*predicted, 0] if predicted else [])      # a gram is known once something follows it
        return PredictionState(seq, predicted, index, seq.prompt_tokens)

    def guess(self, state: PredictionState, budget: Budget) -> Draft:
        if not state.predicted:
            return Draft.empty(self.name, "the request brought no prediction")
        self._follow(state)
        if state.at >= len(state.predicted):
            return Draft.empty(self.name, "the prediction ends here")
        reach = min(budget.depth, state.agreed + 1) if state.begun else budget.depth
        tokens = list(state.predicted[state.at:state.at + reach])
        agreed = max(state.agreed, 0 if state.begun else 4)
        stands, scores = 1.0, []
        for level in range(len(tokens)):
            stands *= (agreed + level + 1) / (agreed + level + 1 + TRUST)
            scores.append(stands)
        reason = "" if len(tokens) == budget.depth else f"{state.agreed} tokens agree" if reach < budget.depth else "the prediction ends"
        return Draft.chain(tokens, score=torch.tensor(scores), drafter=self.name, reason=reason)

    def _follow(self, state: PredictionState) -> None:
        """Compare what the text has gained with the prediction."""
        text, predicted = state.seq.tokens, state.predicted
        for position in range(state.read, len(text)):
            if state.at < len(predicted) and predicted[state.at] == text[position]:
                state.at += 1
                state.agreed += 1
                continue
            state.begun, state.agreed = True, 0
            state.at = min(state.at + 1, len(predicted))
        if state.begun and state.read < len(text) and state.agreed < SURE:
            self._find(state, text)
        state.read = len(text)

    def _find(self, state: PredictionState, text: Sequence[int]) -> None:
        """Take the place that agrees longest with the output's end, if it agrees longer than the present one."""
        first = state.seq.prompt_tokens
        best, found, grams = (state.agreed, 0), state.at, TextIndex(LEVELS)
        grams.extend(text[max(first, len(text) - LONGEST):])
        for level in range(state.index.known(grams.grams) - 1, -1, -1):
            for end in state.index.places(level, grams.grams[level], PLACES):
                agree, most = 0, min(LONGEST, end, len(text) - first)
                while agree < most and state.predicted[end - 1 - agree] == text[-1 - agree]:
                    agree += 1
                distance = end - state.at
                if (agree > 1 or 0 <= distance <= NEAR) and (agree, -abs(distance)) > best:
                    best, found = (agree, -abs(distance)), end
            if best[0] > state.agreed:
                state.at, state.agreed = found, best[0]
                return
