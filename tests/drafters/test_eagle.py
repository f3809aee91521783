"""EAGLE drafters: trees against chains, reduced vocabularies, gaps in what the target leaves, training that is felt when served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened, plain, rows_of, speculate
from models import families
from torch import Tensor, nn

from draftproof import Engine, LoadConfig, Sampling
from draftproof.core.probs import distribution
from draftproof.core.tree import depths, path
from draftproof.drafters.base import Ranking, pick
from draftproof.drafters.eagle import Eagle2Drafter, EagleDrafter
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.drafters.grow import CANDIDATES, Growth, Margins, affordable, worthiest
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.models.heads.blocks import join
from draftproof.models.heads.cache import HeadCache, HeadPass
from draftproof.models.heads.eagle import EagleHead, give_biases
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.base import Features
from draftproof.train.eagle import EagleTask, hidden_loss
from draftproof.train.eagle3 import Eagle3Task, draft_vocabulary, labels, soft_cross_entropy
from draftproof.train.mtp import Unrolled, step_weights, weighted_mean
from draftproof.types import Budget, Commit, Signals

V = 13
SOME = torch.tensor([0, 1, 2, 4, 5, 7, 9, 11])
SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 16, "inner": 48}


def eagle3(target: Target, ids: Tensor | None = SOME, **more: Any) -> Eagle3Drafter:
    torch.manual_seed(3)
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, ids, hidden=32, **SIZES, **more), target.vocab_size)


def eagle1(target: Target, kind: type[EagleDrafter] = EagleDrafter) -> EagleDrafter:
    torch.manual_seed(3)
    return kind(EagleHead.fresh(target.parts, **SIZES), target.vocab_size)


def text(temperature: float = 1.0, tokens: Sequence[int] = (1, 2, 4, 1, 2, 9, 7), **more: Any) -> Text:
    return Text.of(tokens, Sampling(**{"temperature": temperature, "top_p": 1.0, "max_tokens": 40, **more}), seed=5)


def once(drafter: Any, target: TableTarget, one: Text, depth: int, nodes: int, noise: SharedNoise | None = None) -> Any:
    states, _ = opened(target, drafter, [one])
    draft, = drafter.propose(states, [Budget(depth, nodes, "", "")], noise or SharedNoise())
    return draft


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_head_that_serves_says_what_it_was_trained_to_say(dtype: torch.dtype, near: float) -> None:
    """Joined products and compiled small operations against torch's lines, with biases that not every part has."""
    torch.manual_seed(3)
    head = Eagle3Head.fresh(TableTarget(V, order=1, seed=1).parts, SOME, hidden=32, layers=2, **SIZES)
    give_biases(head, ["layers.0.self_attn.k_proj.bias", "layers.1.mlp.up_proj.bias", "layers.1.mlp.down_proj.bias"])
    for name, parameter in head.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    head.to(dtype)
    tokens, hidden = torch.tensor([1, 2, 4, 9]), torch.randn(4, 32, dtype=dtype)

    def says() -> tuple[Tensor, Tensor]:
        attend = HeadPass([HeadCache(2, head.kv_heads, head.head_dim, dtype, "cpu")], [4])
        out = head.step(tokens, hidden, torch.arange(4), attend)
        return out, head.logits(out)

    with torch.no_grad():
        trained = says()
    join(head)
    join(head)
    assert not any("q_proj" in name or "gate_proj" in name for name, _ in head.named_parameters())
    with torch.inference_mode():
        served = says()
    for a, b in zip(trained, served, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=near, atol=near * float(a.abs().max())), float((a - b).abs().max())


# Chains and trees


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_tree_holds_the_chain_and_a_level_its_perturbed_best(temperature: float) -> None:
    """With room for every candidate of a narrow frontier, the first children are the chain, for as deep as they were extended."""
    target = TableTarget(V, order=1, seed=1)
    drafter, one = eagle3(target, layers=2), text(temperature)
    chain = once(drafter, target, one, 4, 4)
    tree = once(drafter, target, one, 4, 60)
    assert chain.is_chain and len(chain) == 4 and len(tree) == 60
    ids, spine, at = tree.tokens.tolist(), [], -1
    while (child := next((i for i, parent in enumerate(tree.parents) if parent == at), None)) is not None:
        spine.append(ids[child])
        at = child
    assert spine[:2] == chain.tokens.tolist()[:2] and spine == chain.tokens.tolist()[:len(spine)]
    roots = [ids[i] for i, parent in enumerate(tree.parents) if parent < 0]
    state = opened(target, drafter, [one])[0][0]
    drafter.propose([state], [Budget(1, 1, "", "")], SharedNoise())
    logits = torch.full((1, V), -math.inf)
    logits[:, SOME] = drafter.head.logits(state.last[None])
    height = logits if not temperature else distribution(logits / 1, [rows_of(one, [()])]) + SharedNoise()([one], [7], None, V)
    assert roots == height[0].argsort(descending=True).tolist()[:len(roots)]


def test_every_branch_is_what_the_head_says_after_its_own_path() -> None:
    """The candidates below a node come from a pass that saw its ancestors and no other branch: the chain down to it says the same."""
    target = TableTarget(V, order=1, seed=1)
    drafter, one = eagle3(target), text(0.0)
    tree = once(drafter, target, one, 3, 40)
    ids = tree.tokens.tolist()
    for node in [i for i in range(len(ids)) if i in tree.parents and tree.parents[i] >= 0][:6]:
        states, _ = opened(target, drafter, [one])
        drafter.propose(states, [Budget(1, 1, "", "")], SharedNoise())
        state, hidden = states[0], states[0].last[None]
        for level, token in enumerate(ids[i] for i in path(tree.parents, node)):
            attend = HeadPass([state.cache], [1])
            with torch.inference_mode():
                hidden = drafter.head.step(torch.tensor([token]), hidden, torch.tensor([6 + level]), attend)
            attend.done()
        order = SOME[drafter.head.logits(hidden)[0].argsort(descending=True)].tolist()
        children = [ids[i] for i, parent in enumerate(tree.parents) if parent == node]
        assert children == order[:len(children)]


@pytest.mark.parametrize("build", [eagle3, eagle1, lambda target: eagle1(target, Eagle2Drafter)], ids=["eagle3", "eagle", "eagle2"])
def test_the_state_follows_the_text(build: Any) -> None:
    """Drafting along a text that grew round by round equals drafting from a state opened on the whole of it."""
    target, drafter = TableTarget(V, order=1, seed=1), None
    drafter = build(target)
    texts = [text(0.8), text(0.8, [3]), text(0.0, range(12))]
    truth = [plain(target, one) for one in texts]

    def check(states: list[Any]) -> None:
        for state in states:
            if not state.seq.room:
                continue
            fresh, _ = opened(target, drafter, [state.seq])
            a, b = (drafter.propose([s], [Budget(3, 3, "", "")], SharedNoise())[0] for s in (state, fresh[0]))
            if state.window.first == 0 and len(state.seq.tokens) > 1:
                assert a.tokens.tolist() == b.tokens.tolist() and len(a), a.reason
            assert state.cache.length >= state.window.held == len(state.seq.tokens) - 1 - state.window.first

    log = speculate(target, drafter, texts, lambda i, round_: ((4, 4), (3, 9), (0, 0), (2, 2))[(i + round_) % 4], after=check)
    assert [one.tokens for one in texts] == truth and len(log.drafts) > 20


def test_a_head_that_comes_late_begins_with_its_window() -> None:
    target = TableTarget(V, order=1, seed=1)
    drafter, one = eagle3(target), text(0.0)
    target.set_taps(drafter.needs.taps)
    slot = target.open(one.tokens)
    rows = target.extend([slot], [torch.tensor(one.tokens)]).taps
    state = drafter.open(one, None)
    draft, = drafter.propose([state], [Budget(2, 2, "", "")], SharedNoise())
    assert not len(draft) and "not here yet" in draft.reason
    one.tokens += [4, 5]
    late = Signals(5, {layer: torch.cat((r[5:], r[:1])) for layer, r in rows.items()})
    drafter.observe([state], [Commit(7, (4, 5), ("accepted", "bonus"), (0,))], [late])
    draft, = drafter.propose([state], [Budget(2, 2, "", "")], SharedNoise())
    assert len(draft) == 2 and (state.window.first, state.window.held) == (5, 3)
    one.tokens += [1, 1, 1]                       # two rounds that nobody told it of
    draft, = drafter.propose([state], [Budget(2, 2, "", "")], SharedNoise())
    assert not len(draft) and "not here yet" in draft.reason
    drafter.observe([state], [Commit(11, (1,), ("plain",), ())], [Signals(10, {layer: r[:1] for layer, r in rows.items()})])
    draft, = drafter.propose([state], [Budget(2, 2, "", "")], SharedNoise())
    assert len(draft) == 2 and (state.window.first, state.window.held) == (10, 1), "after a gap the window begins anew"


def test_a_long_prompt_is_fed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    target, one = TableTarget(V, order=1, seed=1), text(0.0, [i % 7 for i in range(40)])
    whole = once(eagle3(target), target, one, 3, 3)
    monkeypatch.setattr("draftproof.drafters.recurrent.CHUNK", 8)
    drafter = eagle3(target)
    states, _ = opened(target, drafter, [one])
    assert states[0].window.held == 32 and states[0].window.ahead == 7
    assert drafter.propose(states, [Budget(3, 3, "", "")], SharedNoise())[0].tokens.tolist() == whole.tokens.tolist()


# Laws and reduced vocabularies


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7, "temperature": 0.6},
                                     {"repetition_penalty": 1.4, "logit_bias": {4: 2.0, 3: 5.0}}])
def test_pick_over_a_reduced_vocabulary_is_pick_over_the_whole(options: dict[str, Any]) -> None:
    texts = [Text.of([1, 2, 4], Sampling(**{"temperature": 1.0, "top_p": 1.0, **options}), seed=s) for s in range(3)]
    paths = [[(), (4,)], [()], [(1,), (2,), (2, 5)]]
    groups = [ranked(one, p) for one, p in zip(texts, paths, strict=True)]
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    wide = torch.full((6, V), -math.inf)
    wide[:, SOME] = logits
    noise = SharedNoise(keep_law=True)
    narrow, full = pick(logits, groups, texts, [4, 5, 6], noise, 3, SOME, V), pick(wide, groups, texts, [4, 5, 6], noise, 3)
    assert torch.equal(narrow.tokens, full.tokens) and torch.allclose(narrow.values, full.values, atol=1e-5)
    assert narrow.logq is not None and full.logq is not None
    dense = narrow.logq.exp() if narrow.ids is None else torch.zeros(6, V).index_add_(1, narrow.ids, narrow.logq.exp())
    assert torch.allclose(dense, full.logq.exp(), atol=1e-6)
    single = pick(wide[:1], [ranked(texts[0], [()])], texts[:1], [4], noise, 3)
    assert torch.equal(single.tokens, full.tokens[:1]), "a row of several is the row alone"


def ranked(one: Text, paths: Sequence[Sequence[int]]) -> Any:
    return replace(rows_of(one, paths), sampling=Ranking(one).sampling)


def test_options_that_leave_none_of_the_drafters_tokens_end_the_draft() -> None:
    target = TableTarget(V, order=1, seed=1)
    one = text(1.0, logit_bias={int(i): -math.inf for i in SOME})
    for depth, nodes in ((3, 3), (3, 9)):
        draft = once(eagle3(target), target, one, depth, nodes)
        assert not len(draft) and "none of the drafter's tokens" in draft.reason


@pytest.mark.parametrize("nodes", [3, 8])
def test_the_law_is_what_the_draft_was_drawn_from(nodes: int) -> None:
    target, one = TableTarget(V, order=1, seed=1), text(0.8)
    draft = once(eagle3(target), target, one, 3, nodes, SharedNoise(keep_law=True))
    assert draft.law is not None and draft.law.ids is not None and torch.equal(draft.law.ids, SOME)
    assert torch.allclose(draft.law.logq.exp().sum(-1), torch.ones(3), atol=1e-5) and max(depths(draft.parents)) == 3
    widths = [draft.parents.count(parent) for parent in dict.fromkeys(draft.parents)]
    assert widths == ([1, 1, 1] if nodes == 3 else [3, 3, 2]), "siblings are fixed before the draw, and even"


# The worth of a node


def test_margins_learn_what_happens() -> None:
    margins, generator = Margins(), torch.Generator().manual_seed(0)
    before = margins.table(torch.device("cpu"))[0].exp()
    guesses = torch.from_numpy(margins.hits / margins.seen)                      # as they are before they are held within bounds
    assert bool((guesses[:, 0].diff(dim=1) > 0).all()) and bool((guesses[:, 1:].diff(dim=2) < 0).all()), "a larger gap favours the first"
    assert bool((guesses.diff(dim=3) > 0).all()), "what q itself makes likely stands sooner than what noise lifts"
    for _ in range(3000):
        gap = float(torch.rand(1, generator=generator)) * 2
        right = float(torch.rand(1, generator=generator)) < 0.3 + 0.3 * (gap > 1)
        margins.learn(False, [gap, gap, math.inf], [-0.9, -2.5, -math.inf], 0 if right else 1)
    after = margins.table(torch.device("cpu"))[0].exp()
    assert after[0, 0, 1, 5] == pytest.approx(0.3, abs=0.06) and after[0, 0, 4, 5] == pytest.approx(0.6, abs=0.06)
    assert after[0, 1, 4, 3] == pytest.approx(0.4, abs=0.06)
    after[0, 0, :, 5] = before[0, 0, :, 5]
    after[0, 1, :, 3] = before[0, 1, :, 3]
    assert torch.equal(after, before), "what was not seen stays a guess"


@pytest.mark.parametrize(("committed", "judged"), [
    ((7, 4, 6, 9), [(0, 0), (4, 1), (6, 1)]), ((7, 4, 9), [(0, 0), (4, 1), (6, None)]), ((8, 1, 5), [(0, 1), (2, 0)]),
    ((9, 1), [(0, None)])])
def test_learning_follows_the_text_down_its_tree(committed: tuple[int, ...], judged: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as nodes were extended; gaps are given numbers that name the node."""
    levels = [([[7, 8]], [[0.0]], [[]], [0]), ([[1, 2], [3, 4]], [[2.0], [4.0]], [[], []], [1, 0]), ([[5, 6]], [[6.0]], [[]], [3])]
    margins, seen = Margins(), []
    monkeypatch.setattr(margins, "learn", lambda greedy, gaps, shares, chosen: seen.append((gaps[0], chosen)))
    margins.follow(False, committed, levels)
    assert seen == judged


@pytest.mark.parametrize("prices", [(), ((0.3, 0.35, 0.4, 1.9, 1.91, 1.92, 1.93, 3.0, 9.0), (0.01, 0.02, 2.0, 2.0))])
def test_a_grown_tree_is_the_best_of_all_candidates(prices: tuple[tuple[float, ...], ...]) -> None:
    """Against a plain search over every candidate of the same frontiers, and of those as many as are worth their prices."""
    generator, margins = torch.Generator().manual_seed(4), Margins()
    growth = Growth([3, 2], [9, 4], [False, True], [frozenset(), frozenset({5})], margins, [3, 2], prices)
    table, worths, slots = margins.table(torch.device("cpu"))[0], [{}, {}], [{0: (0.0, ())}, {0: (0.0, ())}]
    gaps = torch.tensor([0.15, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0, 4.0, 5.5, 8.0])
    edges = torch.tensor([-6.5, -4.5, -3.0, -2.0, -1.2, -0.7, -0.35, -0.15, -0.05])
    for level in range(3):
        count = len(slots[0])
        values = torch.randn(2, count, CANDIDATES, generator=generator).sort(-1, descending=True).values * 2
        tokens = torch.stack([torch.randperm(V, generator=generator)[:CANDIDATES] for _ in range(2 * count)]).view(2, count, -1)
        shares = -8 * torch.rand(2, count, CANDIDATES, generator=generator)
        front = growth.grow(tokens, values, shares)
        below: list[dict[int, tuple[float, tuple[int, ...]]]] = [{}, {}]
        for b in range(2):
            found = []
            for slot, (reach, way) in slots[b].items():
                for rank in range(CANDIDATES):
                    gap = float(values[b, slot, 0] - values[b, slot, max(rank, 1)])
                    cell = int(torch.bucketize(torch.tensor(gap), gaps)), int(torch.bucketize(shares[b, slot, rank], edges))
                    worth, token = reach + float(table[b, rank, *cell]), int(tokens[b, slot, rank])
                    if level < (3, 2)[b]:
                        worths[b][(*way, token)] = worth
                    if b == 0 or token != 5:
                        found.append((worth, (*way, token)))
            for slot, best in enumerate(sorted(found, reverse=True)[:(3, 2)[b]]):
                below[b][slot] = best
        slots = below
        if front is None:
            break
    for b, draft in enumerate(growth.finish("x")):
        ids = draft.tokens.tolist()
        ways = {tuple(ids[i] for i in path(draft.parents, node)) for node in range(len(draft))}
        expected = sorted(worths[b], key=lambda way: -worths[b][way])[:(9, 4)[b]]
        if prices:
            gains = [sum(math.exp(worths[b][way]) for way in expected[:n]) - prices[b][n - 1] for n in range(1, len(expected) + 1)]
            assert len(draft) < len(expected)
            expected = expected[:gains.index(max(gains)) + 1]
        assert ways == set(expected)


def test_nodes_are_kept_while_they_are_worth_their_rows() -> None:
    """Not until the first that is not: behind a step of the costs rows may be free. Against all numbers of nodes."""
    assert affordable([0.9, 0.5, 0.4, 0.1], []) == 4
    assert affordable([0.9, 0.5, 0.4, 0.1], [0.1, 0.9, 0.95, 1.2]) == 3, "the second alone is not worth 0.8, with the third it is"
    assert affordable([0.2, 0.1], [1.0, 2.0]) == 1 and affordable([0.2, 0.1], [1.0, 2.0], 0) == 0 == affordable([], [1.0], 0)
    budget = Budget(3, 5, "x", "", (1.0, 2.0, 4.0, 8.0, 16.0))
    assert budget.without(2) == Budget(3, 3, "x", "", (2.0, 6.0, 14.0)) and budget.without(0) == budget
    assert replace(budget, prices=()).without(3) == Budget(2, 2, "x", "")


def test_siblings_beside_a_line_are_kept_while_they_are_worth_their_rows() -> None:
    gaps, margins = torch.tensor([[2.0, 0.2, 0.5], [0.1, 0.1, 3.0]]), Margins()
    shares = torch.tensor([[-0.5, -2.0, -2.0], [-1.0, -1.0, -3.0]])
    counts = [sum(worthiest(gaps, shares, 4, False, margins, [price * n for n in range(1, 5)])) for price in (0.0, 0.05, 0.15, 1.0)]
    assert counts[0] == 4 and counts == sorted(counts, reverse=True) and counts[-1] == 0 < counts[1] + counts[2]
    assert sum(worthiest(gaps, shares, 4, False, margins)) == 4


def test_trees_learn_from_commits_and_catch_more_than_chains() -> None:
    target = TableTarget(V, order=1, seed=1)
    caught = {}
    for nodes in (4, 24):
        drafter = eagle3(target, ids=None)
        texts = [text(1.0, [1, i], max_tokens=60) for i in range(4)]
        log = speculate(target, drafter, texts, lambda i, round_, n=nodes: (4, n))
        caught[nodes] = log.accepted / len(log.verdicts)
        assert (drafter.margins.seen[0].sum() > Margins().seen[0].sum() + 100) == (nodes == 24)
    assert caught[24] > caught[4] + 0.3


# Training


def test_ttt_attention_by_hand() -> None:
    """N = 4 rows, 3 steps, keys and queries whose products are known: row t sees true entries ≤ t and its own chain."""
    attend, n = Unrolled(), 4
    k0 = torch.tensor([0.0, 1.0, 2.0, 3.0])
    v0, v1, v2 = (torch.tensor([10.0, 20.0, 30.0, 40.0]) * scale for scale in (1, 10, 100))

    def rows(x: Tensor) -> Tensor:
        return x[:, None, None]

    one = torch.ones(n)
    out = attend(0, rows(one), rows(k0), rows(v0))
    for t in range(n):
        weights = torch.softmax(k0[:t + 1], 0)
        assert out[t, 0] == pytest.approx(float((weights * v0[:t + 1]).sum()), rel=1e-5)
    attend(0, rows(one), rows(one * 0.5), rows(v1))
    out = attend(0, rows(one[:3]), rows(one[:3] * 2), rows(v2[:3]))         # the last row has no label left and is dropped
    for t in range(3):
        weights = torch.softmax(torch.cat((k0[:t + 1], torch.tensor([0.5, 2.0]))), 0)
        values = torch.cat((v0[:t + 1], v1[t:t + 1], v2[t:t + 1]))
        assert out[t, 0] == pytest.approx(float((weights * values).sum()), rel=1e-5)


def test_the_pieces_of_the_loss() -> None:
    logits, laws = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    z = math.log(math.e + math.e**2 + 1)
    assert float(soft_cross_entropy(logits, laws)) == pytest.approx(0.5 * (z - 1) + 0.25 * (z - 2) + 0.25 * z, rel=1e-6)
    assert step_weights(3, 0.8) == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])
    found = weighted_mean([[torch.tensor(2.0), torch.tensor(4.0)], [torch.tensor(9.0)], []], [3, 1, 0], [0.5, 0.25, 0.25])
    assert found is not None and float(found) == pytest.approx(0.5 * 2 + 0.25 * 9)
    assert weighted_mean([[]], [0], [1.0]) is None
    assert float(hidden_loss(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))) == pytest.approx((0.125 + 2.5) / 2)


def test_labels_are_the_targets_laws_over_the_draft_vocabulary() -> None:
    target = TableTarget(V, order=1, seed=1)
    last = torch.stack([target.hidden([t]) for t in range(V)])
    laws, best, known = labels(target.parts, last, SOME)
    for t in range(V):
        p = target.law([t]).exp()
        assert torch.allclose(laws[t].double(), p[SOME] / p[SOME].sum(), atol=1e-6)
        assert bool(known[t]) == (int(p.argmax()) in SOME.tolist()) and int(best[t]) == int(p[SOME].argmax())


def test_the_draft_vocabulary_is_what_was_counted() -> None:
    d2t, t2d = draft_vocabulary(torch.tensor([5, 0, 9, 0, 0, 1, 9, 0]), 5)
    assert t2d.nonzero()[:, 0].tolist() == [0, 1, 2, 5, 6], "padded with the lowest unused id"
    assert (d2t + torch.arange(5)).tolist() == [0, 1, 2, 5, 6]
    with pytest.raises(LoadError, match="from 1 to all"):
        draft_vocabulary(torch.ones(4), 5)


@pytest.mark.parametrize("windows", [(), (3, None), (2, 1)])
def test_a_step_of_training_is_the_head_as_served(windows: tuple[int | None, ...]) -> None:
    """The losses of the unrolled steps, recomputed entry by entry through the serving cache."""
    target, n = TableTarget(V, order=1, seed=1), 7
    torch.manual_seed(3)
    head = Eagle3Head.fresh(target.parts, SOME, hidden=32, layers=2, norms="fc_norm", **SIZES)
    head.layers.windows = windows
    ids = torch.tensor([1, 2, 4, 9, 7, 5, 0])
    hidden = torch.stack([target.hidden([int(t)]) for t in ids])
    task = Eagle3Task(head, target.parts, steps=3)
    text_ = Features(ids, torch.arange(n) >= 3, {tap: hidden for tap in task.taps})
    laws, best, known = labels(target.parts, hidden, SOME)
    expected = []
    with torch.no_grad():
        fused = head.fuse(torch.cat([hidden] * 3, -1))
        for step in range(3):
            losses = []
            for t in range(n - 2 - step):
                cache = HeadCache(2, 1, 16, torch.float32, "cpu")
                attend = HeadPass([cache], [t + 1])
                out = head.step(ids[1:t + 2], fused[:t + 1], torch.arange(t + 1), attend)[-1:]
                attend.done()
                for later in range(step):
                    attend = HeadPass([cache], [1])
                    out = head.step(ids[t + 2 + later:t + 3 + later], out, torch.tensor([t + 1 + later]), attend)
                    attend.done()
                if t + 2 + step >= 3 and known[t + 1 + step]:
                    losses.append(float(soft_cross_entropy(head.logits(out), laws[t + 1 + step][None])))
            expected.append(sum(losses) / len(losses))
    loss, _ = task.loss([text_])
    assert float(loss.detach()) == pytest.approx(sum(w * e for w, e in zip(step_weights(3, 0.8), expected, strict=True)), rel=1e-4)


def small_target(folder: Path) -> Target:
    """Sure of its tokens, so that one text has something to learn."""
    model = families.build("llama")
    model.lm_head.weight.data *= 10
    model.save_pretrained(folder)
    return load_target(folder, LoadConfig(self_test=False, packed=False))


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_overfitting_one_text_is_felt_when_served(kind: str, tmp_path: Path) -> None:
    target = small_target(tmp_path / "target")
    prompt, options = [5, 17, 99, 3], Sampling(temperature=0.0, max_tokens=40)
    with Engine(target) as engine:
        ids = torch.tensor([*prompt, *engine.generate(prompt, options).token_ids])
    torch.manual_seed(0)
    task: Any
    if kind == "eagle3":
        vocabulary = draft_vocabulary(torch.bincount(ids, minlength=target.vocab_size), 64)[1].nonzero()[:, 0]
        task = Eagle3Task(Eagle3Head.fresh(target.parts, vocabulary, taps=(0, 1, 2)), target.parts, steps=4)
    else:
        task = EagleTask(EagleHead.fresh(target.parts), target.parts, steps=4, noise=0.0, law_weight=1.0)
    target.set_taps(task.taps)
    slot = target.open(ids.tolist(), "training")
    taps = {layer: rows.clone() for layer, rows in target.extend([slot], [ids]).taps.items()}
    target.close(slot)
    text_ = Features(ids.clone(), torch.arange(len(ids)) >= len(prompt), taps)
    optimizer = torch.optim.AdamW([p for p in task.module.parameters() if p.requires_grad])
    for step in range(120):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, 2 - step / 60)
        loss, figures = task.loss([text_])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert figures["accuracy 4"] > 0.95
    task.save(tmp_path / "head")
    with Engine(target, f"{kind}:{tmp_path / 'head'}", depth=4) as engine:
        out = engine.generate(prompt, options)
    assert list(out.token_ids) == ids.tolist()[len(prompt):]
    assert out.metrics["acceptance_length"] > 4.2, out.metrics
