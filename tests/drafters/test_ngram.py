"""The n-gram drafter where rows have prices: what is worth its row is drafted, by chances that are counted."""

from __future__ import annotations

import itertools
import random
from itertools import accumulate

import pytest
import torch
from contract.table_rounds import SharedNoise, Text

from draftproof import Sampling
from draftproof.drafters.grow import affordable
from draftproof.drafters.ngram import Chances, NgramDrafter, _Line
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


@pytest.mark.parametrize("seed", range(20))
def test_a_priced_chain_is_the_beginning_of_the_whole_one(seed: int) -> None:
    """Of what follows the place that a chain without prices copies; what costs nothing is followed to the full depth."""
    drafter, text = NgramDrafter(), texts(seed)
    whole, sizes = guess(drafter, text, Budget(DEPTH, DEPTH, "", "")).tokens.tolist(), []
    for each in (0.0, 0.05, 0.2, 0.5, 1.0):
        draft = guess(drafter, text, priced(each, DEPTH))
        tokens = draft.tokens.tolist()
        count = min(len(tokens), len(whole))
        assert draft.is_chain and tokens[:count] == whole[:count]
        assert not tokens or (f": {len(tokens)} copied, further ones" in draft.reason) == (len(tokens) < DEPTH)
        sizes.append(len(tokens))
    assert sizes[0] == DEPTH and sizes[-1] == 0 and sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2
    assert guess(drafter, text, priced(1.0, DEPTH)).reason == "no copied token is worth its row"
    assert guess(drafter, Text.of([1, 2, 3], GREEDY), priced(0.0, DEPTH)).reason == "no earlier occurrence of the last 1 tokens"


@pytest.mark.parametrize("at_least", [0, 1, 3])
def test_what_is_affordable_brings_most_beyond_its_price(at_least: int) -> None:
    """Against every number of nodes, where prices jump, and without any."""
    dice = random.Random(at_least)
    for _ in range(500):
        chances = sorted((dice.random() for _ in range(dice.randrange(9))), reverse=True)
        prices = [*accumulate(dice.choice((0.0, 0.1, 0.3, 1.5)) for _ in range(8))]
        gains = {n: sum(chances[:n]) - (prices[n - 1] if n else 0.0) for n in range(min(at_least, len(chances)), len(chances) + 1)}
        assert gains[affordable(chances, prices, at_least)] == pytest.approx(max(gains.values()))
    assert affordable([0.5, 0.1], [], at_least) == 2


ALONE, SECONDED, DENIED = [5, 6, 7, 8, 9, 5], [5, 6, 7, 8, 5, 6, 7, 8, 9, 5], [5, 0, 1, 2, 5, 6, 7, 8, 9, 5]


def test_another_place_says_how_likely_a_copy_is() -> None:
    """All copy 6, 7, 8 behind a 5. Of two places that part further on, the tokens up to there are as likely as if they never did."""
    sizes = [len(guess(NgramDrafter(1, 1), Text.of(text, GREEDY), priced(0.15, DEPTH))) for text in (SECONDED, ALONE, DENIED)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    chances = Chances()
    parting = [chances.along(True, _Line(9, [0] * 6, 3, apart).cells) for apart in (6, 4, 0, -1)]
    assert parting[0][:4] == parting[1][:4] and parting[0][4] > parting[1][4]
    for found in parting:
        assert all(one > other for one, other in itertools.pairwise(found))
    assert [each / before for before, each in itertools.pairwise(parting[2])] == \
        pytest.approx([each / before for before, each in itertools.pairwise(parting[3])]), "behind the place where they part"


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("shape", [ALONE, SECONDED, DENIED])
def test_chains_are_judged_by_what_became_of_their_like(shape: list[int], wrong: bool) -> None:
    """A text goes on as it was copied, or never does; chains of another kind are not judged by it."""
    drafter = NgramDrafter(1, 1)

    def sizes() -> list[int]:
        return [len(guess(drafter, Text.of(text, GREEDY), priced(0.15, DEPTH))) for text in (ALONE, SECONDED, DENIED)]

    before = sizes()
    for _ in range(100):
        text = Text.of(shape, GREEDY)
        state = drafter.open(text, None)
        drafter.propose([state], [priced(0.15, DEPTH)], SharedNoise())
        commit = Commit(len(text.tokens), (3, 3) if wrong else (6, 7, 8), ("bonus",) * (2 if wrong else 3), ())
        text.tokens += commit.tokens
        drafter.observe([state], [commit], [None])
    after = sizes()
    mine = (ALONE, SECONDED, DENIED).index(shape)
    assert after[mine] == 0 if wrong else after[mine] > before[mine] or after[mine] == DEPTH
    assert after[1] == before[1] or mine == 1
    assert not wrong or after[:mine] + after[mine + 1:] == before[:mine] + before[mine + 1:]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


@pytest.mark.parametrize("came", [(2, 3), (2, 9), (4, 5, 1), (4,), (9, 2)])
def test_of_a_tree_the_guesses_on_the_way_of_the_text_are_counted(came: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a 1 stood 4 5 and, before that, 2 3: siblings of what the text went on with did not stand, and of what hangs from them
    nothing is known."""
    drafter, text, learnt = NgramDrafter(1, 1), Text.of([1, 2, 3, 1, 4, 5, 1], GREEDY), list[tuple[int, bool]]()
    state = drafter.open(text, None)
    draft, = drafter.propose([state], [priced(0.0)], SharedNoise())
    assert state.out is not None and {(4,), (4, 5), (2,), (2, 3)} == set(paths(draft))
    cells = state.out.cells
    monkeypatch.setattr(drafter.chances, "learn", lambda greedy, cell, stands: learnt.append((cell, stands)))
    drafter.observe([state], [Commit(len(text.tokens), came, ("accepted",) * len(came), ())], [None])
    assert learnt == [(cell, way == came[:len(way)]) for cell, way in zip(cells, paths(draft), strict=True)
                      if len(way) <= len(came) and way[:-1] == came[:len(way) - 1]]


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
