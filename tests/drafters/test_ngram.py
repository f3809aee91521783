"""The n-gram drafter's trees where nodes have prices: what is worth its row is drafted, by chances that are counted."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from contract.table_rounds import SharedNoise, Text

from draftproof import Sampling
from draftproof.drafters.ngram import NgramDrafter
from draftproof.types import Budget, Commit, Draft

GREEDY, SAMPLED = Sampling(temperature=0.0, top_p=1.0), Sampling(temperature=1.0, top_p=1.0)
DEPTH, NODES = 4, 12


def priced(each: float, nodes: int = NODES) -> Budget:
    return Budget(DEPTH, nodes, "", "", tuple(accumulate([each] * nodes)))


def guess(drafter: NgramDrafter, text: Text, budget: Budget) -> Draft:
    return drafter.propose([drafter.open(text, None)], [budget], SharedNoise())[0]


def texts(seed: int) -> Text:
    return Text.of(torch.randint(0, 3, (80,), generator=torch.Generator().manual_seed(seed)).tolist(), GREEDY)


@pytest.mark.parametrize("seed", range(20))
def test_a_priced_tree_is_a_part_of_the_whole_one(seed: int) -> None:
    """Every node's parent is kept; what costs nothing is the whole tree, what costs more than it can bring is nothing."""
    drafter, text, sizes = NgramDrafter(), texts(seed), []
    whole = guess(drafter, text, Budget(DEPTH, NODES, "", ""))
    for each in (0.0, 0.05, 0.2, 0.5, 1.0):
        draft = guess(drafter, text, priced(each))
        ways = [set(paths(some)) for some in (draft, whole)]
        assert ways[0] <= ways[1] and len(draft) == len(ways[0])
        sizes.append(len(draft))
    assert sizes[0] == len(whole) and sizes[-1] == 0 and sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2
    assert guess(drafter, text, priced(1.0)).reason == "no copied token is worth its row"


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


@pytest.mark.parametrize("stands", [True, False])
def test_chances_are_counted_in_sampled_and_greedy_texts_apart(stands: bool) -> None:
    """Texts in which what followed a token follows it again, always or never, while a row costs 0.4 tokens."""
    drafter, kinds = NgramDrafter(1, 1), (GREEDY, SAMPLED)
    before = [len(guess(drafter, Text.of([1, 2, 3, 4, 9, 1], kind), priced(0.4))) for kind in kinds]
    for _ in range(100):
        text = Text.of([1, 2, 3, 4, 9, 1], SAMPLED)
        state = drafter.open(text, None)
        drafter.propose([state], [priced(0.4)], SharedNoise())
        commit = Commit(len(text.tokens), (2, 3) if stands else (7, 8), ("bonus", "bonus"), ())
        text.tokens += commit.tokens
        drafter.observe([state], [commit], [None])
        drafter.observe([state], [commit], [None])             # of another round: nothing is counted
    after = [len(guess(drafter, Text.of([1, 2, 3, 4, 9, 1], kind), priced(0.4))) for kind in kinds]
    assert after[0] == before[0] and (after[1] > before[1] if stands else after[1] == 0)
