"""`pick` over the frontiers of trees: the rows of one sequence share their noise, and get the bits they would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, rows_of
from torch import Tensor

from draftproof.core import choice
from draftproof.drafters.base import Ranking, pick
from draftproof.errors import Failure
from draftproof.types import Sampling

V = 600
OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 1.0, "top_k": 20},
    "nucleus": {"temperature": 1.2, "top_p": 0.95},
    "looks back": {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": {3: 4.0}},
    "some still": {"temperature": 0.8},
}


def asked(options: str, counts: Sequence[int]) -> tuple[list[Text], list[Any]]:
    texts = [Text.of([5, 6, i], Sampling(**{"top_p": 1.0, **OPTIONS[options]}), seed=40 + i) for i in range(len(counts))]
    if options == "some still":
        texts[1].sampling = replace(texts[1].sampling, temperature=0.0)
    groups = [replace(rows_of(text, [(i,) for i in range(count)]), sampling=Ranking(text).sampling)
              for text, count in zip(texts, counts, strict=True)]
    return texts, groups


@pytest.mark.parametrize("ids", [None, torch.arange(0, V, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("dense", [0, 16_384], ids=["pruned", "dense"])
@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 5, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_get_the_bits_they_get_alone(options: str, counts: tuple[int, ...], dense: int, ids: Tensor | None,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_DENSE", dense)
    if dense:
        monkeypatch.setattr(choice, "compiled", lambda rows: False)
    texts, groups = asked(options, counts)
    width = V if ids is None else ids.shape[0]
    logits = 3 * torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(1))
    positions = [len(text.tokens) + 1 for text in texts]
    together = pick(logits, groups, texts, positions, SharedNoise(), 8, ids, V)
    row = 0
    for text, group, at in zip(texts, groups, positions, strict=True):
        for path in group.paths:
            alone = pick(logits[row:row + 1], [replace(group, paths=(path,))], [text], [at], SharedNoise(), 8, ids, V)
            assert torch.equal(together.tokens[row], alone.tokens[0])
            if not text.sampling.greedy:            # alone, their rows stay raw logits
                assert torch.equal(together.values[row], alone.values[0])
            row += 1


def test_the_noise_of_a_sequence_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    right = choice.gumbel

    def counted(keys: Tensor, tokens: Tensor) -> Tensor:
        drawn.append(keys.shape[0])
        return right(keys, tokens)

    monkeypatch.setattr(choice, "gumbel", counted)
    monkeypatch.setattr(choice, "compiled", lambda rows: False)
    texts, groups = asked("sampled", (4, 4, 4))
    pick(torch.randn(12, V), groups, texts, [3, 3, 3], SharedNoise(), 8)
    assert drawn == [3]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("options", ["sampled", "filtered", "some still"])
def test_a_dead_end_has_no_token_and_moves_no_other_row(options: str, shares: bool) -> None:
    texts, groups = asked(options, (3, 3))
    groups = [replace(g, sampling=replace(g.sampling, bad_word_ids=tuple((1, token) for token in range(V)))) for g in groups]
    logits = 3 * torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    together = pick(logits, groups, texts, [4, 4], SharedNoise(), 8, shares=shares)
    assert (together.values[[1, 4]] == -torch.inf).all(), "the paths (1,) of both"
    for row in (0, 2, 3, 5):
        text, group = texts[row // 3], groups[row // 3]
        group = replace(group, paths=group.paths[row % 3:row % 3 + 1])
        alone = pick(logits[row:row + 1], [group], [text], [4], SharedNoise(), 8, shares=shares)
        assert torch.equal(together.tokens[row], alone.tokens[0]) and torch.equal(together.values[row], alone.values[0])


def test_a_drafter_that_overflowed_is_none_whose_options_leave_nothing() -> None:
    texts, groups = asked("looks back", (2,))
    logits = torch.zeros(2, V)
    logits[1] = torch.nan
    with pytest.raises(Failure, match="the largest logit is nan"):
        pick(logits, groups, texts, [4], SharedNoise(), 8)


def test_a_small_vocabulary_has_as_many_candidates_whatever_the_options() -> None:
    """Levels of a draft, some with texts whose options name tokens, stand one under the other."""
    ids, logits = torch.tensor([0, 3, 5]), torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    shapes = set()
    for options in ("sampled", "looks back"):
        texts, groups = asked(options, (1, 1))
        picks = pick(logits, groups, texts, [4, 4], SharedNoise(), 8, ids, V)
        shapes.add(tuple(picks.tokens.shape))
        assert set(picks.tokens.flatten().tolist()) == set(ids.tolist()) and (picks.values > -torch.inf).all()
    assert shapes == {(2, 3)}
