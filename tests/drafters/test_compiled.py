"""Drafts made by one call of the kernels are those of the lines in Python: same tokens, same trees, same margins, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened
from torch import nn

from draftproof import Engine, Sampling, native
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.models.fake import TableTarget
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.types import Budget, Draft

V = 300
compiled = pytest.mark.skipif(not native.available()[0], reason="no compiler")


def drafters(dtype: torch.dtype, ids: torch.Tensor | None, **more: Any) -> tuple[TableTarget, Eagle3Drafter, Eagle3Drafter]:
    """Two with one head, whose norms and laws are not flat; the second one without the kernels."""
    made = []
    target = TableTarget(V, order=1, seed=1)
    for _ in range(2):
        torch.manual_seed(3)
        head = Eagle3Head.fresh(target.parts, ids, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48, **more)
        for name, parameter in head.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, 1.0, 0.3)
            elif "lm_head" in name:
                parameter.data.mul_(20)
            parameter.data = parameter.data.bfloat16()                           # what our kernels stream
        made.append(Eagle3Drafter(head.to(dtype), V))
        fuse = made[-1].head.fuse                                                # the table's features are in float32
        made[-1].head.fuse = lambda features, fuse=fuse: fuse(features.to(dtype))   # type: ignore[method-assign, misc]
    assert made[0].compiled is not None, "the kernels know this head"
    made[1].compiled = None
    return target, made[0], made[1]


def same(a: Draft, b: Draft) -> bool:
    return (a.tokens.tolist(), a.parents, a.reason) == (b.tokens.tolist(), b.parents, b.reason) and \
        (a.score is b.score is None or torch.equal(a.score, b.score))            # type: ignore[arg-type]


def text(length: int, temperature: float, seed: int) -> Text:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, V, (length,), generator=random).tolist()
    return Text.of(tokens, Sampling(temperature=temperature, top_p=1.0, max_tokens=40), seed=seed)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("some", "layers", "normed"), [(False, 1, False), (True, 1, True), (True, 2, False)])
def test_one_call_drafts_what_the_lines_draft(dtype: torch.dtype, some: bool, layers: int, normed: bool) -> None:
    """Chains, chains with siblings under a rule that keeps none, trees of every size; greedy, near it and hot; texts that end."""
    ids = torch.arange(0, V, 3) if some else None
    target, one, twin = drafters(dtype, ids, layers=layers, norm_output=normed)
    ended = grown = 0
    for seed in range(30):
        for temperature in (0.0, 0.3, 1.0):
            texts = text(5 + 3 * seed, temperature, seed)
            if seed % 3 == 0:                                                    # every other token ends the text
                texts.end_ids = frozenset(range(0, V, 2))
            for depth, nodes in ((1, 1), (4, 4), (4, 7), (5, 11), (3, 20), (6, 40)):
                budget = [Budget(depth, nodes, "", "")]
                drafts = [each.propose(opened(target, each, [texts])[0], budget, SharedNoise())[0] for each in (one, twin)]
                assert same(*drafts), (seed, temperature, depth, nodes, drafts)
                ended += drafts[0].reason != ""
                grown += not drafts[0].is_chain
    assert ended and grown, "texts ended, and trees grew"


@compiled
def test_a_logit_that_is_no_number_is_the_twins_affair() -> None:
    target, one, twin = drafters(torch.float32, None)
    for each in (one, twin):
        each.head.norm.weight[3] = float("nan")                                  # type: ignore[attr-defined, index]
    said = []
    for each in (one, twin):
        with pytest.raises(Exception, match="largest logit") as error:
            each.propose(opened(target, each, [text(9, 1.0, 1)])[0], [Budget(4, 8, "", "")], SharedNoise())
        said.append(str(error.value))
    assert said[0] == said[1]


@compiled
@pytest.mark.parametrize(("tree", "temperature"), [(None, 0.8), (9, 0.0), (9, 0.8)])
def test_in_an_engine_both_propose_the_same_at_every_round(tree: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in head, learning from what its trees became."""
    def rounds(kernels: bool) -> list[tuple[list[int], Sequence[int]]]:
        engine, seen = Engine(drafter="eagle3", depth=4, tree=tree), []
        drafter = engine.speculation.drafter
        assert isinstance(drafter, Eagle3Drafter) and drafter.compiled is not None
        if not kernels:
            drafter.compiled = None
        propose = drafter.propose
        monkeypatch.setattr(drafter, "propose", lambda *args: [seen.append((d.tokens.tolist(), d.parents)) or d for d in propose(*args)])
        engine.generate("class Stack:\n", Sampling(temperature=temperature, seed=3, max_tokens=40))
        return seen

    found = rounds(True)
    assert found == rounds(False) and len(found) > 5
