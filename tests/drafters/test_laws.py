"""A head with a reduced vocabulary in a batch whose options name ids for one sequence only: laws of all levels fit together."""

from __future__ import annotations

import pytest
import torch
from contract.eagle_heads import EAGLE_HEADS
from contract.table_rounds import SharedNoise, Text
from contract.vector_heads import VECTOR_HEADS

from draftproof.models.fake import TableTarget
from draftproof.types import Budget, Sampling, Signals

V = 13
REDUCED = {name: make for name, make in {**EAGLE_HEADS, **VECTOR_HEADS}.items() if name in ("eagle3", "medusa-cut", "medusa")}


@pytest.mark.parametrize("name", REDUCED)
def test_laws_are_as_wide_as_the_widest_level(name: str) -> None:
    target = TableTarget(V, order=2, seed=1)
    drafter = REDUCED[name](target, None)
    plain, biased = Sampling(temperature=1.0, top_p=1.0), Sampling(temperature=1.0, top_p=1.0, logit_bias={3: 1.0})
    texts = [Text.of([1, 2, 3, 4], plain, seed=1, id="a"), Text.of([4, 3, 2, 1], biased, seed=2, id="b")]
    target.set_taps(drafter.needs.taps)
    states = []
    for text in texts:
        slot = target.open(text.tokens)
        scores = target.extend([slot], [torch.tensor(text.tokens[:-1])])
        states.append(drafter.open(text, Signals(0, scores.taps)))
    budgets = [Budget(3, 3, name, ""), Budget(1, 1, name, "")]        # the second level holds no sequence with a bias
    drafts = drafter.propose(states, budgets, SharedNoise(keep_law=True))
    for draft in drafts:
        assert draft.law is not None and len(draft)
        columns = draft.law.ids.tolist() if draft.law.ids is not None else list(range(V))
        assert draft.law.logq.shape[1] == len(columns)
        for token, row in zip(draft.tokens.tolist(), draft.law.row, strict=True):
            law = draft.law.logq[row].exp()
            assert law.sum().item() == pytest.approx(1, abs=1e-5) and law[columns.index(token)] > 0
