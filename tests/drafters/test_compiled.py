"""Drafts made by one call of the kernels are those of the lines in Python: same tokens, same trees, same margins, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened, speculate
from torch import nn

from draftproof import Engine, Sampling, native
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.drafters.grow import CANDIDATES, Margins
from draftproof.models.fake import TableTarget
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.types import Budget, Commit, Draft, Signals

V = 300
compiled = pytest.mark.skipif(not native.available()[0], reason="no compiler")


def drafters(dtype: torch.dtype, ids: torch.Tensor | None, huge: float = 0.0,
             **more: Any) -> tuple[TableTarget, Eagle3Drafter, Eagle3Drafter]:
    """Two with one head, whose norms and laws are not flat; the second one without the kernels. huge: all that the output's weights are,
    in their first column."""
    made = []
    target = TableTarget(V, order=1, seed=1)
    for _ in range(2):
        torch.manual_seed(3)
        head = Eagle3Head.fresh(target.parts, ids, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48, **more)
        for name, parameter in head.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, 1.0, 0.3)
            elif "lm_head" in name:
                parameter.data.mul_(0 if huge else 20)
                parameter.data[:, 0] += huge
            parameter.data = parameter.data.bfloat16()                           # what our kernels stream
        made.append(Eagle3Drafter(head.to(dtype), V))
        take = made[-1]._take                                                    # the table's features are in float32
        made[-1]._take = lambda state, signals, take=take: take(                 # type: ignore[method-assign, misc]
            state, replace(signals, taps={layer: rows.to(dtype) for layer, rows in signals.taps.items()}))
    assert made[0].compiled is not None, "the kernels know this head"
    made[1].compiled = None
    return target, made[0], made[1]


def same(a: Draft, b: Draft) -> bool:
    return (a.tokens.tolist(), a.parents, a.reason) == (b.tokens.tolist(), b.parents, b.reason) and \
        (a.score is b.score is None or torch.equal(a.score, b.score))            # type: ignore[arg-type]


def left(state: Any) -> tuple[Any, ...]:
    """What a state remembers of its text."""
    entries = state.cache.room(0)[:, :, :state.window.held].tolist()
    last = None if state.last is None else state.last.tolist()
    window = state.window
    waiting = [len(rows) for rows in window.waiting]
    return window.first, window.held, window.ahead, waiting, state.cache.length >= window.held, last, entries


def no_feeding(drafter: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(states: Sequence[Any]) -> None:
        raise AssertionError("the call itself feeds what waits")

    monkeypatch.setattr(drafter, "_feed", feed)


def text(length: int, temperature: float, seed: int, **filters: Any) -> Text:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, V, (length,), generator=random).tolist()
    return Text.of(tokens, Sampling(**{"temperature": temperature, "top_p": 1.0, "max_tokens": 40, **filters}), seed=seed)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("some", "layers", "normed"), [(False, 1, False), (True, 1, True), (True, 2, False)])
def test_one_call_drafts_what_the_lines_draft(dtype: torch.dtype, some: bool, layers: int, normed: bool) -> None:
    """Chains, chains with siblings under a rule that keeps none, trees of every size; greedy, near it and hot; texts that end."""
    ids = torch.arange(0, V, 3) if some else None
    target, one, twin = drafters(dtype, ids, layers=layers, norm_output=normed)
    ended = grown = spared = 0
    for seed in range(30):
        for temperature in (0.0, 0.3, 1.0):
            texts = text(5 + 3 * seed, temperature, seed)
            if seed % 3 == 0:                                                    # every other token ends the text
                texts.end_ids = frozenset(range(0, V, 2))
            for depth, nodes in ((1, 1), (4, 4), (4, 7), (5, 11), (3, 20), (6, 40)):
                prices = tuple(accumulate(0.05 + 0.1 * (n % 4) for n in range(nodes))) if seed % 2 else ()
                budget = [Budget(depth, nodes, "", "", prices)]
                states = [opened(target, each, [texts])[0] for each in (one, twin)]
                drafts = [each.propose(state, budget, SharedNoise())[0] for each, state in zip((one, twin), states, strict=True)]
                assert same(*drafts), (seed, temperature, depth, nodes, drafts)
                assert left(states[0][0]) == left(states[1][0])
                ended += drafts[0].reason != ""
                grown += not drafts[0].is_chain
                spared += bool(prices) and depth < len(drafts[0]) < nodes
    assert ended and grown and spared, "texts ended, trees grew, and some nodes were not worth their price"


@compiled
@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"top_k": 3}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.999}], ids=str)
@pytest.mark.parametrize("some", [False, True])
def test_filters_are_those_of_the_lines(filters: dict[str, Any], some: bool) -> None:
    """Tokens and trees; margins but for their last bits, as the laws that filters leave are summed in another order."""
    target, one, twin = drafters(torch.float32, torch.arange(0, V, 3) if some else None)
    narrow = 0
    for seed in range(20):
        for depth, nodes in ((4, 4), (4, 7), (5, 11), (6, 40)):
            states = [opened(target, each, [text(5 + seed, 0.9, seed, **filters)])[0] for each in (one, twin)]
            drafts = [each.propose(state, [Budget(depth, nodes, "", "")], SharedNoise())[0]
                      for each, state in zip((one, twin), states, strict=True)]
            free = one.propose(opened(target, one, [text(5 + seed, 0.9, seed)])[0], [Budget(depth, nodes, "", "")], SharedNoise())[0]
            assert (drafts[0].tokens.tolist(), drafts[0].parents) == (drafts[1].tokens.tolist(), drafts[1].parents), (seed, depth, nodes)
            assert drafts[0].score is not None and drafts[1].score is not None
            assert torch.allclose(drafts[0].score, drafts[1].score, rtol=1e-4, atol=1e-4)
            narrow += drafts[0].tokens.tolist() != free.tokens.tolist()
    assert narrow, "filters change what is guessed"


@compiled
@pytest.mark.parametrize(("depth", "nodes"), [(4, 4), (4, 12)])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_that_slides_does_so_however_it_is_run(layers: int, depth: int, nodes: int) -> None:
    """The call knows no windows: it drafts while a text fits them, and to the end of what it drafts."""
    target, one, twin = drafters(torch.float32, None, layers=layers)
    _, free, _ = drafters(torch.float32, None, layers=layers)
    for drafter in (one, twin):
        drafter.head.layers.windows = (20,) * layers  # type: ignore[attr-defined]
    off = 0
    for length in (5, 12, 15, 16, 17, 18, 19, 20, 21, 22, 60):
        states = [opened(target, each, [text(length, 0.0, length)])[0] for each in (one, twin, free)]
        drafts = [each.propose(state, [Budget(depth, nodes, "", "")], SharedNoise())[0]
                  for each, state in zip((one, twin, free), states, strict=True)]
        assert same(*drafts[:2]), (length, drafts)
        assert same(drafts[0], drafts[2]) or length > 21 - depth, length
        off += not same(drafts[0], drafts[2])
    assert off


HEADS = [(torch.float32, False, {}), (torch.bfloat16, True, {"layers": 2, "norms": "fc_norm"}),
         (torch.float32, True, {"norms": "input_norm", "norm_output": True}), (torch.bfloat16, False, {"norm_before_residual": True})]


@compiled
@pytest.mark.parametrize(("dtype", "some", "more"), HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_call_feeds_what_the_target_left(dtype: torch.dtype, some: bool, more: dict[str, Any], temperature: float,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, then round after round what stood of chains and trees, and twice that after a round without a draft; what is remembered
    and what was learnt from the trees is the same, too."""
    target, *both = drafters(dtype, torch.arange(0, V, 3) if some else None, **more)
    no_feeding(both[0], monkeypatch)
    fed, seen = [], []
    draft = both[0].compiled.draft                                               # type: ignore[union-attr]
    monkeypatch.setattr(both[0].compiled, "draft", lambda wish, *rest: fed.append(len(wish.text)) or draft(wish, *rest))
    for drafter in both:
        states: list[Any] = []
        texts = [text(40, temperature, 2)]
        log = speculate(target, drafter, texts, lambda i, n: ((4, 4), (4, 11), (0, 0), (3, 20), (3, 5))[n % 5],
                        after=lambda now, states=states: states.extend(map(left, now)))    # type: ignore[misc]
        seen.append((texts[0].tokens, log, states, drafter.margins))
    (tokens, log, states, margins), (expected, other, remembered, learnt) = seen
    assert tokens == expected and states == remembered and all(map(same, log.drafts, other.drafts)) and len(log.drafts) > 10
    assert (margins.hits == learnt.hits).all() and (margins.seen == learnt.seen).all() and margins.seen.sum() > Margins().seen.sum()
    assert max(fed[1:]) > 1 and fed[0] == 39, "several rows waited"


@compiled
def test_rows_wait_behind_a_gap_and_beyond_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that does not begin with the text; a target that is ahead of the text by more than a pass takes."""
    monkeypatch.setattr("draftproof.drafters.recurrent.CHUNK", 8)
    target, one, twin = drafters(torch.float32, None, layers=2)
    drafts, states = [], []
    for drafter in (one, twin):
        whole, seq = text(60, 0.8, 4), text(60, 0.8, 4)
        target.set_taps(drafter.needs.taps)
        rows = target.extend([target.open(whole.tokens)], [torch.tensor(whole.tokens)]).taps
        seq.tokens = whole.tokens[:20]
        state = drafter.open(seq, Signals(0, {layer: r[:19] for layer, r in rows.items()}))
        drafts += drafter.propose([state], [Budget(4, 9, "", "")], SharedNoise())
        states.append(left(state))
        for start, ahead in ((30, 38), (38, 55)):
            drafter.observe([state], [Commit(start, (1,), ("plain",), ())], [Signals(start, {n: r[start:ahead] for n, r in rows.items()})])
        assert (state.window.first, state.window.held, state.window.ahead) == (30, 0, 25), "nothing of it is of the text yet"
        for end in (37, 52):
            seq.tokens = whole.tokens[:end]
            drafts += drafter.propose([state], [Budget(4, 9, "", "")], SharedNoise())
            states.append(left(state))
            assert state.window.held == end - 31
    assert all(map(same, drafts[:3], drafts[3:])) and states[:3] == states[3:]


def test_what_is_learnt_is_in_the_table_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, the table is what it would be if it were made anew; a copy on another device is."""
    monkeypatch.setattr("draftproof.drafters.grow.MEMORY", 40.0)
    margins, random, host, other = Margins(), torch.Generator().manual_seed(0), torch.device("cpu"), torch.device("meta")
    before, copy = margins.table(host).chances.clone(), margins.table(other)
    assert margins.table(other) is copy
    for n in range(600):
        gaps, shares = 9 * torch.rand(CANDIDATES, generator=random), -7 * torch.rand(CANDIDATES, generator=random)
        margins.learn(n % 2 == 0, gaps.tolist(), (shares if n % 3 else shares / 9).tolist(), n % 5 or None)
    table = margins.table(host).chances
    anew = [math.log(min(max(chance, 1e-4), 0.999)) for chance in (margins.hits / margins.seen).flat]
    assert torch.equal(table.flatten(), torch.tensor(anew)) and (table != before).sum() > 100
    assert all(torch.equal(margins.odds(greedy).chances, table[int(greedy)]) for greedy in (False, True))
    assert (margins.seen > 20).any() and margins.seen.max() <= 41 and margins.table(other) is not copy


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
def test_logits_of_nothing_are_the_twins_affair() -> None:
    """A greedy chain of a head that calls every token impossible."""
    for huge in (3e38, -3e38):                                                   # of one sign the first logits are -inf
        target, one, twin = drafters(torch.float32, None, huge)
        for each in (one, twin):
            each.head.norm.weight[0] = 100.0                                     # type: ignore[attr-defined, index]
        states = [opened(target, each, [text(9, 0.0, 1)])[0] for each in (one, twin)]
        drafts = [each.propose(state, [Budget(1, 1, "", "")], SharedNoise())[0] for each, state in zip((one, twin), states, strict=True)]
        assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist() and drafts[0].parents == drafts[1].parents == (-1,)


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
