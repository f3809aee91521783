"""`mtp` served and trained: what a head learnt by heart it guesses to the full depth, from its own folder and out of the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof import Completion, Engine, LoadConfig, Sampling
from draftproof.drafters.mtp import MtpDrafter
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.models.heads.cache import HeadCache, HeadPass
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.heads.mtp_files import stitch
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.base import Features
from draftproof.train.mtp import MtpTask, cross_entropy, step_weights
from draftproof.types import Budget, Commit, Signals

LENGTH = 40
PROMPT = [1, 2, 3]
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, seed=1)


def table(sharpness: float = 4.0) -> TableTarget:
    return TableTarget(13, order=2, seed=1, sharpness=sharpness)


def generate(target: Any, sampling: Sampling = GREEDY, **more: Any) -> Completion:
    with Engine(target=target, **more) as engine:
        return engine.generate(PROMPT, sampling)


def features(target: Target, tokens: Sequence[int], layer: int) -> Features:
    ids = torch.tensor(tokens)
    target.set_taps((layer,))
    slot = target.open(tokens, tenant="reading")
    rows = target.extend([slot], [ids]).taps[layer].clone()
    target.close(slot)
    target.set_taps(())
    return Features(ids, torch.arange(len(ids)) >= len(PROMPT), {layer: rows})


def learn(task: MtpTask, text: Features, steps: int, lr: float = 3e-3) -> float:
    optimizer = torch.optim.AdamW([p for p in task.module.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        loss, _ = task.loss([text])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_a_text_learnt_by_heart_is_accepted_to_the_full_depth() -> None:
    target = table()
    plain = generate(target)
    torch.manual_seed(0)
    head = MtpHead.fresh(target.parts)
    text = features(target, [*PROMPT, *plain.token_ids], 7)
    learn(MtpTask(head, steps=4, soft=False), text, 60)
    for tree in (None, 9):
        out = generate(target, drafter=MtpDrafter(head, 13), depth=4, tree=tree)
        assert out.token_ids == plain.token_ids
        assert out.metrics["acceptance_length"] > 4.5, out.metrics
    sampled = Sampling(temperature=0.8, max_tokens=LENGTH, seed=3)
    assert generate(target, sampled, drafter=MtpDrafter(head, 13), depth=4, tree=9).token_ids == generate(target, sampled).token_ids


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=None,
                         bos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def test_a_head_is_trained_stitched_in_and_served_out_of_the_targets_own_checkpoint(tiny: Path, tmp_path: Path) -> None:
    load = LoadConfig(device="cpu", self_test=False)
    plain = generate(str(tiny), load=load)
    trainer = load_target(tiny, LoadConfig(device="cpu", self_test=False, packed=False))
    torch.manual_seed(0)
    task = MtpTask(MtpHead.fresh(trainer.parts), steps=3)
    learn(task, features(trainer, [*PROMPT, *plain.token_ids], 1), 80)
    task.save(tmp_path / "head")
    assert "mtp.fc.weight" in stitch(tmp_path / "head", tiny, tmp_path / "whole")
    for target, drafter in ((tiny, f"mtp:{tmp_path / 'head'}"), (tmp_path / "whole", "mtp")):
        out = generate(str(target), drafter=drafter, depth=3, load=load)
        assert out.token_ids == plain.token_ids and out.metrics["acceptance_length"] > 3.5, out.metrics
    with pytest.raises(LoadError, match="no multi-token prediction weights"):
        generate(str(tiny), drafter="mtp", depth=3, load=load)


def test_a_packed_target_has_no_gradient_to_train_by(tiny: Path) -> None:
    packed = load_target(tiny, LoadConfig(device="cpu", self_test=False))
    if "packed" not in packed.facts.reasons["linear layers"].split(":")[0]:
        pytest.skip("this machine packs nothing")
    with pytest.raises(LoadError, match="packing off"):
        MtpTask(MtpHead.fresh(packed.parts))


# What training unrolls is what is served


@torch.no_grad()
@pytest.mark.parametrize("settings", [None, {"model_type": "ernie4_5_moe"}, {"model_type": "mellum", "sliding_window": 3},
                                      {"model_type": "exaone_moe", "sliding_window": 4}], ids=str)
def test_every_step_of_the_unrolled_text_is_the_served_one(settings: dict[str, Any] | None) -> None:
    """Also of a layer that slides, and where the target's final norm stands before the output."""
    target = table()
    torch.manual_seed(1)
    size = target.parts.config.hidden_size
    norm = torch.nn.RMSNorm(size)
    norm.weight.uniform_(0.5, 2.0)
    target.parts = replace(target.parts, norm=norm)
    few = {"hidden_size": size, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
           "num_experts": 4, "num_experts_per_tok": 2}
    head = MtpHead.fresh(target.parts, settings=settings and {**few, **settings})
    tokens = torch.randint(13, (9,)).tolist()
    text = features(target, tokens, 7)
    task, fused = MtpTask(head, steps=3, soft=False), head.fuse(text.taps[7])
    losses = [losses for losses, *_ in task._one(text)]
    for row in range(len(PROMPT), 5):
        cache, hidden = HeadCache(head.depth, head.kv_heads, head.head_dim, torch.float32, "cpu"), fused[:row + 1]
        for step in range(3):
            ids = text.ids[1:row + 2] if step == 0 else text.ids[row + 1 + step][None]
            attend = HeadPass([cache], [len(ids)])
            hidden = head.step(ids, hidden, torch.arange(cache.length, cache.length + len(ids)), attend)[-1:]
            attend.done()
            assert head.whole(cache.length) == (head.window is None or cache.length <= head.window)
            asked = row + 2 + step                   # the token that this row of this step is asked for
            expected = -head.logits(hidden)[0].log_softmax(-1)[text.ids[asked]]
            torch.testing.assert_close(losses[step][asked - max(2 + step, len(PROMPT))], expected, atol=1e-5, rtol=1e-4)


def test_the_loss_is_the_weighted_mean_over_guesses_that_count() -> None:
    target = table()
    torch.manual_seed(1)
    head = MtpHead.fresh(target.parts)
    texts = [features(target, torch.randint(13, (n,)).tolist(), 7) for n in (12, 5, 8)]
    for soft in (False, True):
        task = MtpTask(head, steps=3, decay=0.5, soft=soft)
        loss, figures = task.loss(texts)
        rows = [[losses for losses, *_ in task._one(text)] for text in texts]
        means = [torch.cat([text[step] for text in rows]).mean() for step in range(3)]
        torch.testing.assert_close(loss, (means[0] * 4 + means[1] * 2 + means[2]) / 7)
        assert set(figures) == {"accuracy 1", "accuracy 2", "accuracy 3"}
    assert step_weights(3, 0.6) == pytest.approx([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])
    logits, wanted = torch.randn(4, 5), torch.rand(4, 5).softmax(-1)
    plain = torch.stack([-sum(w * (z - zs.exp().sum().log()) for w, z in zip(ws, zs, strict=True))
                         for ws, zs in zip(wanted, logits, strict=True)])
    torch.testing.assert_close(cross_entropy(logits, wanted), plain)
    assert float(task.loss([features(target, PROMPT, 7)])[0].detach()) == 0.0, "no guess counts"


# Several layers


@torch.no_grad()
def test_two_layers_take_turns() -> None:
    """Guess 1 by layer 0 over true rows, guess 2 by layer 1 over what layer 0 said one token earlier, whole text each time."""
    target = table(1.0)
    torch.manual_seed(2)
    head = MtpHead.fresh(target.parts, layers=2, layout="deepseek")
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.mul_(5)
    tokens = torch.randint(13, (11,)).tolist()
    text = Text.of(tokens, Sampling(temperature=0, top_p=1.0))

    def whole(layer: int, ids: Tensor, hidden: Tensor, first: int) -> Tensor:
        cache = HeadCache(head.depth, head.kv_heads, head.head_dim, torch.float32, "cpu")
        return head.step(ids, hidden, torch.arange(first, first + len(ids)), HeadPass([cache], [len(ids)]), layer)

    hidden = head.fuse(features(target, tokens, 7).taps[7][:-1])
    ids = torch.tensor(tokens)
    zero = whole(0, ids[1:], hidden, 0)
    first = head.logits(zero[-1:], 0).argmax(-1)
    one = whole(1, torch.cat((ids[2:], first)), zero, 1)
    second = head.logits(one[-1:], 1).argmax(-1)

    drafter = MtpDrafter(head, 13)
    for pieces in ((len(tokens) - 1,), (4, 1, 5), (1, 1, 8)):           # the text arrives at once, or over several rounds
        state = drafter.open(Text.of(tokens[:pieces[0] + 1], text.sampling), None)
        at = 0
        for piece in pieces:
            state.seq.tokens[:] = tokens[:at + piece + 1]               # type: ignore[index]
            rows = torch.stack([target.hidden(tokens[:i + 1]) for i in range(at, at + piece)])
            commit = Commit(at + 1, tuple(tokens[at + 1:at + piece + 1]), ("accepted",) * piece, ())
            drafter.observe([state], [commit], [Signals(at, {7: rows})])
            at += piece
            draft, = drafter.propose([state], [Budget(3, 3, "", "")], SharedNoise())
        assert draft.tokens[:2].tolist() == [int(first), int(second)]


def test_a_drafter_that_joins_late_begins_with_the_window_it_gets() -> None:
    target = table()
    torch.manual_seed(0)
    drafter = MtpDrafter(MtpHead.fresh(target.parts), 13)
    text = Text.of([1, 2, 3, 4, 5, 6], Sampling(temperature=0, top_p=1.0))
    state, budget = drafter.open(text, None), Budget(2, 2, "", "")
    draft, = drafter.propose([state], [budget], SharedNoise())
    assert not len(draft) and "hidden states" in draft.reason
    text.tokens += [7, 8]
    rows = torch.stack([target.hidden(text.tokens[:i + 1]) for i in (5, 6)])
    drafter.observe([state], [Commit(6, (7, 8), ("accepted", "bonus"), (0,))], [Signals(5, {7: rows})])
    draft, = drafter.propose([state], [budget], SharedNoise())
    whole, = drafter.propose(opened(target, drafter, [text])[0], [budget], SharedNoise())
    assert len(draft) == len(whole) == 2 and state.window.first == 5
