"""The passes that are timed before serving are such as serving has, for a mixture of experts too."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from draftproof.core.budget import distinct_experts
from draftproof.engine import profile
from draftproof.engine.costs import PassCosts
from draftproof.models.fake import TableTarget

EXPERTS, CHOSEN, LAYERS, VOCAB = 32, 4, 40, 1024


@pytest.mark.parametrize("router", ["tokens", "neighbours"])
def test_rows_of_a_profile_read_as_many_experts_as_independent_rows(router: str) -> None:
    """Routers that look at a row's token alone. Those of one kind send tokens whose ids lie near each other to the same experts, as ids of
    letters and digits do. Several copies of one text would read no more experts than one of them."""
    kind = 1 if router == "tokens" else 8
    chosen = [{(layer, expert) for layer in range(LAYERS)
               for expert in Random(token // kind * LAYERS + layer).sample(range(EXPERTS), CHOSEN)} for token in range(VOCAB)]
    target, found = TableTarget(vocab_size=VOCAB), dict[int, list[float]]()
    right = target.score

    def score(slots: Any, roots: Any, drafts: Any) -> Any:
        ids = roots.tolist() + [token for draft in drafts for token in draft.tokens.tolist()]
        found.setdefault(len(ids), []).append(len(set[tuple[int, int]]().union(*(chosen[token] for token in ids))) / LAYERS)
        return right(slots, roots, drafts)

    target.score = score  # type: ignore[method-assign]
    assert profile.profile(target, PassCosts(), 16, 100.0) > 20
    assert {1, 4, 16, 144} <= found.keys()
    for rows, experts in found.items():
        assert sum(experts) / len(experts) == pytest.approx(distinct_experts(EXPERTS, CHOSEN, rows), rel=0.1), rows
