"""Medusa, Hydra and MLP drafters: what they propose, by hand; laws; and that overfitting one text shows when the head is served."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened, plain, rows_of, speculate
from contract.vector_heads import VECTOR_HEADS, network
from models import families
from torch import Tensor

from draftproof import Engine, LoadConfig, Sampling
from draftproof.core.probs import distribution
from draftproof.core.tree import depths, path
from draftproof.drafters.base import Ranking
from draftproof.drafters.grow import CANDIDATES
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.models.heads.files import read_files
from draftproof.models.heads.medusa import MedusaHead
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.base import Features
from draftproof.train.depths import DepthTask, cross_entropy, token_loss
from draftproof.train.hydra import HydraTask
from draftproof.train.medusa import MedusaTask
from draftproof.train.mlp import MlpTask
from draftproof.types import Budget, Commit, Signals

V = 13


def make_text(temperature: float = 1.0, **more: Any) -> Text:
    options = {"temperature": temperature, "top_p": 1.0, "max_tokens": 40, **more}
    return Text.of([1, 2, 4, 1, 2, 9, 7], Sampling(**options), seed=5)


def once(drafter: Any, target: TableTarget, text: Text, depth: int, nodes: int, noise: SharedNoise | None = None) -> Any:
    draft, = drafter.propose(opened(target, drafter, [text])[0], [Budget(depth, nodes, "", "")], noise or SharedNoise())
    return draft


def logits_after(drafter: Any, target: TableTarget, text: Text, drafted: list[int]) -> Tensor:
    """What the head says [V] after the text and these tokens, step by step, over the target's ids."""
    tokens, head = text.tokens, drafter.head
    rows = torch.stack([target.hidden(tokens[:n]) for n in range(1, len(tokens))])
    if getattr(head, "prefix_embeding_layer", None) is not None:
        from draftproof.train.hydra import _causal

        hidden = head.prefix_embeding_layer(rows, torch.arange(len(rows)), _causal)[-1:]
    else:
        hidden = rows[-1:]
    with torch.no_grad():
        if isinstance(head, MedusaHead):
            found = head(hidden)[:, len(drafted)]
        else:
            state = head.start(hidden)
            for level, token in enumerate([tokens[-1], *drafted]):
                found, state = head.step(level, state, torch.tensor([token]))
    wide = torch.full((V,), -math.inf)
    wide[torch.arange(V) if head.ids is None else head.ids] = found[0]
    return wide


def heights(drafter: Any, target: TableTarget, text: Text, drafted: list[int]) -> Tensor:
    """log q + g [V] of the next token."""
    logits = logits_after(drafter, target, text, drafted)[None]
    logq = distribution(logits, [replace(rows_of(text, [drafted]), sampling=Ranking(text).sampling)])
    noise = SharedNoise()([text], [len(text.tokens) + len(drafted)], None, V)
    return (logq + noise)[0]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9},
                                     {"temperature": 0.9, "repetition_penalty": 1.4, "top_k": 6}], ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_a_chain_is_the_heads_perturbed_best_step_by_step(name: str, options: dict[str, Any]) -> None:
    target = TableTarget(V, order=1, seed=1)
    drafter, text, drafted = VECTOR_HEADS[name](target, None), make_text(**options), []
    for _ in range(4):
        drafted.append(int(heights(drafter, target, text, drafted).argmax()))
    draft = once(drafter, target, text, 6, 6)
    assert draft.is_chain and draft.tokens.tolist() == drafted and "4 tokens ahead" in draft.reason
    best = heights(drafter, target, text, drafted[:2]).topk(2).values
    assert float(draft.score[2]) == pytest.approx(min(float(best[0] - best[1]), 64.0), abs=1e-3)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "repetition_penalty": 1.4}],
                         ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_children_in_a_tree_are_of_the_perturbed_best_after_their_own_path(name: str, options: dict[str, Any]) -> None:
    target = TableTarget(V, order=1, seed=1)
    drafter, text = VECTOR_HEADS[name](target, None), make_text(**options)
    tree = once(drafter, target, text, 3, 24)
    ids = tree.tokens.tolist()
    assert len(tree) == 24 and 2 <= max(depths(tree.parents)) <= 3
    for node in {-1, *tree.parents}:
        children = [ids[i] for i, parent in enumerate(tree.parents) if parent == node]
        drafted = [ids[i] for i in path(tree.parents, node)]
        order = heights(drafter, target, text, drafted).argsort(descending=True).tolist()
        ranks = [order.index(child) for child in children]
        assert ranks == sorted(set(ranks)) and max(ranks, default=0) < CANDIDATES, "the worthiest of the best, in their order"


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_the_state_follows_the_text(name: str) -> None:
    """A state that heard the text round by round drafts what a state opened on the whole of it does."""
    target = TableTarget(V, order=1, seed=1)
    drafter, texts = VECTOR_HEADS[name](target, None), [make_text(0.8), make_text(0.0)]
    compared = 0

    def check(states: list[Any]) -> None:
        nonlocal compared
        for state in states:
            one, two = (drafter.propose([s], [Budget(3, 3, "", "")], SharedNoise())[0].tokens.tolist()
                        for s in (state, opened(target, drafter, [state.seq])[0][0]))
            assert one == two and len(one) == 3
            compared += 1

    speculate(target, drafter, texts, lambda i, round_: (3, 3 + 4 * (round_ % 2)), after=check)
    assert compared > 20


@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_without_the_last_hidden_state_a_head_is_silent_and_says_why(name: str) -> None:
    target = TableTarget(V, order=1, seed=1)
    drafter, text = VECTOR_HEADS[name](target, None), make_text()
    state = drafter.open(text, None)
    draft, = drafter.propose([state], [Budget(3, 3, "", "")], SharedNoise())
    assert not len(draft) and "hidden state" in draft.reason
    layer, = drafter.needs.taps
    row = target.hidden(text.tokens)[None]
    text.tokens.append(3)
    drafter.observe([state], [Commit(7, (3,), ("plain",), ())], [Signals(6, {layer: row})])
    draft, = drafter.propose([state], [Budget(3, 3, "", "")], SharedNoise())
    assert len(draft) == 3
    text.tokens.append(3)
    draft, = drafter.propose([state], [Budget(3, 3, "", "")], SharedNoise())
    assert not len(draft), "the text went on and nobody said what the target saw"


@pytest.mark.parametrize("nodes", [3, 8])
@pytest.mark.parametrize("name", VECTOR_HEADS)
def test_the_law_is_what_the_draft_was_drawn_from(name: str, nodes: int) -> None:
    target = TableTarget(V, order=1, seed=1)
    drafter, text = VECTOR_HEADS[name](target, None), make_text(0.8, top_k=9, repetition_penalty=1.2)
    drafts = [once(drafter, target, text, 3, nodes, SharedNoise(True, attempt)) for attempt in range(6)]
    assert len({tuple(draft.tokens.tolist()) for draft in drafts}) > 1, "another attempt, another draft"
    assert len({draft.parents for draft in drafts}) == 1, "the shape may not follow from what was drawn"
    draft = drafts[0]
    assert [draft.parents.count(parent) for parent in dict.fromkeys(draft.parents)] == ([1, 1, 1] if nodes == 3 else [3, 3, 2])
    for node, row in enumerate(draft.law.row):
        above = [draft.tokens.tolist()[i] for i in path(draft.parents, node)][:-1]
        expected = distribution(logits_after(drafter, target, text, above)[None], [rows_of(text, [above])])[0]
        mine = torch.full((V,), -math.inf)
        mine[torch.arange(V) if draft.law.ids is None else draft.law.ids] = draft.law.logq[row]
        assert torch.allclose(mine.exp(), expected.exp(), atol=1e-5)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_joint_rule_takes_their_drafts(rule: Any) -> None:
    target = TableTarget(V, order=1, seed=1)
    for name in ("medusa", "medusa-cut", "hydra", "mlp"):
        with Engine(target, VECTOR_HEADS[name](target, None), 3, rule=rule, tree=7 if rule == "ratio" else None) as engine:
            done = engine.generate([1, 2, 3], Sampling(temperature=1.0, top_p=1.0, max_tokens=60, seed=3))
        assert done.metrics["drafted"] > 60 and engine.speculation.state[0] == "on", engine.speculation.failure


# Training


def test_losses_are_their_definitions() -> None:
    torch.manual_seed(0)
    logits, truth, tokens = torch.randn(4, 6), torch.randn(4, 6), torch.tensor([0, 5, 2, 2])
    for row in range(4):
        q, p = torch.softmax(logits[row], 0), torch.softmax(truth[row], 0)
        assert float(cross_entropy(logits, truth.softmax(-1))[row]) == pytest.approx(float(-(p * q.log()).sum()), abs=1e-5)
        assert float(token_loss(logits, tokens)[row]) == pytest.approx(float(-q[tokens[row]].log()), abs=1e-5)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("name", ["medusa", "medusa-cut", "mlp", "mlp-tables", "hydra", "hydra-prefix"])
def test_the_loss_looks_where_the_drafter_guesses(name: str, soft: bool) -> None:
    """Depth by depth and position by position, against the served drafter's own view of the head."""
    target = TableTarget(V, order=1, seed=1)
    drafter = VECTOR_HEADS[name](target, None)
    kind = {"medusa": MedusaTask, "mlp": MlpTask, "hydra": HydraTask}[name.partition("-")[0]]
    text = make_text().tokens + [3, 8, 12]
    ids, mask = torch.tensor(text), torch.arange(len(text)) >= 4
    rows = torch.stack([target.hidden(text[:n + 1]) for n in range(len(text))])
    task = kind(target.parts, decay=0.5, soft=soft, head=network(name, target))
    loss, figures = task.loss([Features(ids, mask, dict.fromkeys(task.taps, rows))])
    total = weight = 0.0
    known = set(range(V)) if drafter.head.ids is None else set(drafter.head.ids.tolist())
    for i in range(4):
        for t in range(len(text) - 2 - i):
            at = t + 2 + i
            if not mask[at] or (not soft and text[at] not in known):
                continue
            logits = logits_after(drafter, target, Text.of(text[:t + 2], Sampling()), text[t + 2:at])
            logq = logits.log_softmax(-1)
            if soft:
                p = target.law(text[:at]).float().masked_fill(~logits.isfinite(), -math.inf).softmax(-1)
                value = float(-(p * logq)[p > 0].sum())
            else:
                value = float(-logq[text[at]])
            total, weight = total + value * 0.5**i, weight + 0.5**i
    assert loss.item() == pytest.approx(total / weight, rel=1e-3) and set(figures) == {f"accuracy_{i}" for i in range(1, 5)}
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in task.module.parameters())
    assert all(p.grad is None for part in (target.parts.embed, target.parts.output) for p in part.parameters())    # type: ignore[union-attr]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    families.build("llama").save_pretrained(folder)
    return folder


TASKS: dict[str, Callable[[Target], DepthTask]] = {
    "medusa": lambda target: MedusaTask(target.parts, 4, 2, soft=False),
    "medusa-own": lambda target: MedusaTask(target.parts, 4, 1, "own"),
    "mlp": lambda target: MlpTask(target.parts, 4, soft=False),
    "mlp-tables": lambda target: MlpTask(target.parts, 4, tables=True, soft=False),
    "hydra": lambda target: HydraTask(target.parts, 4),
    "hydra-prefix": lambda target: HydraTask(target.parts, 4, prefix=True),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_head_that_learned_one_text_accepts_nearly_all_of_its_depth_when_served(name: str, llama: Path, tmp_path: Path) -> None:
    load = LoadConfig(dtype="float32", self_test=False, packed=False)
    target, prompt = load_target(llama, load), [5, 17, 101, 33]
    greedy = Sampling(temperature=0.0, top_p=1.0, max_tokens=49, ignore_eos=True)
    with Engine(target) as engine:
        answer = engine.generate(prompt, greedy).token_ids
    ids = torch.tensor([*prompt, *answer])
    torch.manual_seed(0)
    task = TASKS[name](target)
    target.set_taps(task.taps)
    slot = target.open(ids.tolist(), "training")
    taps = {layer: rows.clone() for layer, rows in target.extend([slot], [ids]).taps.items()}
    target.close(slot)
    features = Features(ids, torch.arange(len(ids)) >= 4, taps)
    optimizer = torch.optim.AdamW(task.module.parameters(), 1e-2, weight_decay=0.0)
    for _ in range(120):
        loss, figures = task.loss([features])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert figures["accuracy_1"] > 0.95
    task.save(tmp_path)
    with Engine(load_target(llama, LoadConfig(dtype="float32", self_test=False)), f"{name.partition('-')[0]}:{tmp_path}", 4) as engine:
        done = engine.generate(prompt, greedy)
        assert done.token_ids == answer
        assert done.metrics["acceptance_length"] > 4.4, done.metrics


def test_a_head_for_another_drafter_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    target = load_target(llama, LoadConfig(dtype="float32", self_test=False))
    MedusaHead.fresh(target.parts).save(tmp_path)
    with pytest.raises(LoadError, match="head for drafter medusa; expected one for mlp: write medusa:"):
        Engine(target, f"mlp:{tmp_path}")


@pytest.mark.parametrize("kind", [MedusaTask, MlpTask, HydraTask])
def test_a_head_learns_in_float32_and_is_saved_in_the_targets_precision(kind: Any, tmp_path: Path) -> None:
    parts = TableTarget(V, order=1, seed=1).parts
    for module in (parts.embed, parts.output):
        module.bfloat16()       # type: ignore[union-attr]
    task = kind(parts, 2)
    loss, _ = task.loss([Features(torch.arange(9), torch.ones(9).bool(), dict.fromkeys(task.taps, torch.randn(9, V + 1).bfloat16()))])
    loss.backward()
    assert {p.dtype for p in task.module.parameters()} == {p.grad.dtype for p in task.module.parameters()} == {torch.float32}
    task.save(tmp_path)
    assert {tensor.dtype for tensor in read_files(tmp_path).tensors.values()} == {torch.bfloat16}


def test_a_text_of_two_tokens_teaches_nothing_and_breaks_nothing() -> None:
    target = TableTarget(V, order=1, seed=1)
    for task in (MedusaTask(target.parts), MlpTask(target.parts), HydraTask(target.parts)):
        for n in (1, 2, 3, 5):
            ids = torch.arange(n)
            rows = torch.stack([target.hidden(list(range(m + 1))) for m in range(n)])
            loss, figures = task.loss([Features(ids, torch.ones(n, dtype=torch.bool), dict.fromkeys(task.taps, rows))])
            assert math.isfinite(loss.item()) and len(figures) == max(0, min(4, n - 2))


def test_one_text_is_the_same_beside_others() -> None:
    """Plain decoding and the contract's texts agree whatever the width of the batch; counted here for margins that learn."""
    target = TableTarget(V, order=1, seed=1)
    drafter, texts = VECTOR_HEADS["mlp"](target, None), [make_text(0.9), make_text(0.0), make_text(0.5)]
    expected = [plain(target, text) for text in texts]
    before = drafter.margins.seen[0].copy()
    speculate(target, drafter, texts, lambda i, round_: (3, 9))
    assert [text.tokens for text in texts] == expected and (drafter.margins.seen[0] != before).any()
