"""Recurrent and hybrid targets: the text of `transformers.generate` whatever is guessed, and refusals where a family cannot be scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftproof import Engine, Sampling
from draftproof.config import LoadConfig
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.errors import LoadError, OptionError
from draftproof.models import recurrent
from draftproof.models.load import load_target
from draftproof.models.own import CACHES, cache_name
from draftproof.models.recurrent import REPLAY, RecurrentTarget
from draftproof.types import Draft

NEW = 64
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "head_dim": 16}
SSD = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32}
MOE = {**families.MOE, "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48}

NAMED: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **MOE, "layer_types": HYBRID},
    "qwen3_5_text": {**DELTA, "layer_types": HYBRID},
    "nemotron_h": {
        **MOE, "layers_block_type": ["mamba", "attention", "mamba", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 16,
        "mamba_head_dim": 8,
        "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32, "head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 48,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 32},
    "falcon_h1": {**SSD, "mamba_d_ssm": 64, "mamba_n_heads": 8, "head_dim": 16},
}  # fmt: skip
SERVED = {
    **NAMED,
    "bamba": {**SSD, "attn_layer_indices": [1]},
    "granitemoehybrid": {**SSD, **MOE, "layer_types": ["mamba", "attention", "mamba"]},
    "zamba2": {
        "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 32, "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "adapter_rank": 8, "attention_head_dim": 32,
        "num_key_value_heads": 4, "attention_hidden_size": 128,
    },
    "olmo_hybrid": {**DELTA, "layer_types": HYBRID},
    "rwkv": {"attention_hidden_size": 64},
}  # fmt: skip
REFUSED = {
    "mamba": ({"state_size": 8}, "scoring several tokens"),
    "falcon_mamba": ({"state_size": 8}, "scoring several tokens"),
    "jamba": (
        {**families.MOE, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
         "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        "scoring several tokens",
    ),
    "minimax": (
        {**families.MOE, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 32, "head_dim": 16},
        "scoring several tokens",
    ),
    "recurrent_gemma": (
        {"lru_width": 64, "attention_window_size": 24, "block_types": ["recurrent", "recurrent", "attention"], "head_dim": 16},
        "expected its cache in the output",
    ),
}  # fmt: skip


def build(family: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Random weights that make the next token depend on the text; states and short convolutions keep their family's own start."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(families.config_of(family, **{**families.COMMON, **options}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not any(word in name for word in ("conv", "A_log", "time_")):
                parameter.copy_(torch.randn_like(parameter) * (2.0 if "embed" in name else 1.3) / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    return model.eval()


def load(family: str, folder: Path, seed: int = 0, **more: Any) -> tuple[PreTrainedModel, RecurrentTarget]:
    model = build(family, SERVED[family], seed)
    model.save_pretrained(folder)
    more = {"self_test": False, "threads": torch.get_num_threads(), **more}
    target = load_target(folder, LoadConfig(page_tokens=64, **more))
    assert isinstance(target, RecurrentTarget)
    return model, target


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> RecurrentTarget:
    return load("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))[1]


def text(length: int, seed: int = 5) -> Tensor:
    return torch.randint(1, 200, (length,), generator=torch.Generator().manual_seed(seed))


def references(model: Any, texts: list[Tensor]) -> list[list[int]]:
    out = []
    for ids in texts:
        ones = torch.ones(1, len(ids), dtype=torch.int64)
        made = model.generate(ids[None], attention_mask=ones, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
        out.append(made[0, len(ids) :].tolist())
    assert len(set(out[0])) > 10, "the text must vary, or the test shows nothing"
    return out


def engine_ids(target: Any, texts: list[Tensor], drafter: Drafter | str) -> tuple[list[list[int]], int, int]:
    """Greedy ids of a batch, tokens drafted, tokens accepted."""
    with Engine(target=target, drafter=drafter, depth="auto" if drafter == "none" else 4) as engine:
        outs = engine.generate_batch([t.tolist() for t in texts], [Sampling(temperature=0, max_tokens=NEW, seed=1)] * len(texts))
    assert not target.slots
    drafted, accepted = (sum(out.metrics[key] for out in outs) for key in ("drafted", "accepted"))
    return [list(out.token_ids) for out in outs], drafted, accepted


def ahead(texts: list[Tensor], want: list[list[int]]) -> Any:
    whole = [t.tolist() + w for t, w in zip(texts, want, strict=True)]

    def next_token(now: Any) -> int:
        found = next((t for t in whole if list(now) == t[: len(now)] and len(t) > len(now)), None)
        return 0 if found is None else found[len(now)]

    return next_token


@pytest.mark.parametrize("family", SERVED)
def test_greedy_ids_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    model, target = load(family, tmp_path)
    texts = [text(40, 1), text(7, 2)]
    want, drafted, accepted = engine_ids(target, texts, "none")
    assert drafted == accepted == 0 and want[:1] == references(model, texts[:1])
    assert families.chosen(model, texts[1], want[1]) == want[1] and len(want[1]) == NEW
    assert target.facts.tier == 3 and not target.trees
    assert target.facts.reasons["tier"].startswith("3") and "several tokens" in target.facts.reasons["recurrent state"]
    found, drafted, accepted = engine_ids(target, texts, Oracle(ahead(texts, want), wrong_at=lambda position: position % 3 == 0))
    assert found == want and 0 < accepted < drafted


@pytest.mark.parametrize("family", NAMED)
def test_no_drafter_changes_the_text(family: str, tmp_path: Path) -> None:
    model, target = load(family, tmp_path)
    _, other = load(family, tmp_path / "draft", seed=1)
    texts = [text(19, 3)]
    want, _, _ = engine_ids(target, texts, NgramDrafter(1, 2))
    assert families.chosen(model, texts[0], want[0]) == want[0] and len(want[0]) == NEW and len(set(want[0])) > 10
    found, drafted, accepted = engine_ids(target, texts, AlwaysWrong(target.vocab_size, ahead(texts, want)))
    assert found == want and drafted > 0 and accepted == 0
    found, drafted, _ = engine_ids(target, texts, ModelDrafter(other))
    assert found == want and drafted > 0 and not other.slots
    found, drafted, accepted = engine_ids(target, texts, ModelDrafter(target))
    assert found == want and accepted == drafted > 0


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_cached_passes_are_wrong_is_refused_with_what_was_measured(family: str, tmp_path: Path) -> None:
    options, found = REFUSED[family]
    build(family, options).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=found) as error:
        load_target(tmp_path, LoadConfig(self_test=False, threads=torch.get_num_threads()))
    assert family in str(error.value) and "transformers" in str(error.value)


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_goes_by_the_name_that_the_model_has_for_it(name: str) -> None:
    forward = {}
    exec(f"def forward(self, input_ids, {name}=None, use_cache=None, **more): ...", forward)
    assert cache_name(type("Model", (torch.nn.Module,), {"forward": forward["forward"]})()) == name
    assert cache_name(torch.nn.Linear(1, 1)) is None


def test_the_check_at_load_sees_a_rejection_that_leaves_a_trace(hybrid: RecurrentTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rejection" in hybrid.check()
    monkeypatch.setattr(recurrent, "restored", lambda cache, to: cache)
    with pytest.raises(LoadError, match="a pass after a rejected guess"):
        hybrid.check()
    assert not hybrid.slots


def test_rejections_cost_rows_and_seldom_a_pass(hybrid: RecurrentTarget) -> None:
    passes: list[int] = []
    hook = hybrid.model.register_forward_pre_hook(lambda _m, _a, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    ids = text(120)
    slot = hybrid.open([])
    hybrid.extend([slot], [ids[:40]])
    passes.clear()
    for at in range(40, 120):
        hybrid.score([slot], ids[at : at + 1], [Draft.chain(ids[:3])])
        hybrid.rewind(slot, ())
    assert len(passes) <= 80 * (1 + 1 / REPLAY) + 1 and max(passes) <= REPLAY + 5
    passes.clear()
    for at in range(0, 80, 4):  # all stands: nothing is fed twice
        hybrid.score([slot], ids[at : at + 1], [Draft.chain(ids[at + 1 : at + 4])])
        hybrid.rewind(slot, (0, 1, 2))
    hook.remove()
    hybrid.close(slot)
    assert sum(passes) - REPLAY <= 80 and len(passes) <= 21


@pytest.mark.parametrize("length", [59, 50, 43, 30, 1, 0])
def test_a_shorter_text_is_as_if_the_rest_had_never_been(hybrid: RecurrentTarget, length: int) -> None:
    ids, after = text(60), text(7, seed=6)
    slot, fresh = hybrid.open([]), hybrid.open([])
    hybrid.extend([slot], [ids[:30]])
    for at in range(30, 60):
        hybrid.score([slot], ids[at : at + 1], [Draft.empty()])
        hybrid.rewind(slot, ())
    hybrid.truncate(slot, length)
    if length:
        hybrid.extend([fresh], [ids[:length]])
    assert slot.length == length
    found, want = (hybrid.extend([s], [after]).logits for s in (slot, fresh))
    assert torch.allclose(found, want, atol=1e-4)
    hybrid.close(slot)
    hybrid.close(fresh)


def test_taps_are_the_rows_of_the_new_tokens_only(hybrid: RecurrentTarget) -> None:
    ids = text(40)
    hybrid.set_taps([0, 2])
    whole = hybrid.open([])
    want = hybrid.extend([whole], [ids]).taps
    slot = hybrid.open([])
    hybrid.extend([slot], [ids[:25]])
    hybrid.score([slot], ids[25:26], [Draft.chain(ids[:4])])
    hybrid.rewind(slot, ())
    scores = hybrid.score([slot, slot][:1], ids[26:27], [Draft.chain(ids[27:30])])  # begins with the token that is owed
    hybrid.rewind(slot, (0, 1, 2))
    hybrid.set_taps([])
    for layer in (0, 2):
        assert scores.taps[layer].shape[0] == scores.logits.shape[0] == 4
        assert torch.allclose(scores.taps[layer], want[layer][26:30], atol=1e-4)
    hybrid.close(slot)
    hybrid.close(whole)


def test_a_failing_pass_leaves_the_texts_as_they_were(hybrid: RecurrentTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(50)
    slots = [hybrid.open([]), hybrid.open([])]
    hybrid.extend(slots, [ids[:30], ids[10:30]])
    forward, calls = hybrid._forward, []

    def failing(slot: Any, new: Tensor, keep: int) -> Tensor:
        logits = forward(slot, new, keep)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(hybrid, "_forward", failing)
    with pytest.raises(RuntimeError, match="memory"):
        hybrid.score(slots, ids[30:31].repeat(2), [Draft.chain(ids[:3])] * 2)
    assert [s.length for s in slots] == [30, 20]
    monkeypatch.undo()
    found = hybrid.score(slots, ids[30:31].repeat(2), [Draft.empty()] * 2).logits
    fresh = hybrid.open([])
    want = hybrid.extend([fresh], [ids[:31]]).logits
    assert torch.allclose(found[:1], want, atol=1e-4)
    for slot in (*slots, fresh):
        hybrid.close(slot)


def test_invisible_to_the_bit_is_claimed_only_where_the_state_agrees_too(tmp_path: Path) -> None:
    _, sequential = load("rwkv", tmp_path / "rwkv", self_test=True)  # its torch path goes token by token, whatever the width
    assert sequential.facts.invisible and sequential.whole_tiles
    _, chunked = load("mamba2", tmp_path / "mamba2", self_test=True, dtype="bfloat16")  # bfloat16 rounds most differences away
    assert not chunked.facts.invisible and not chunked.whole_tiles
    assert chunked.facts.invisible_reason.startswith("no:") and "state" in chunked.facts.invisible_reason
    ids = text(100)
    plain, wide = (sequential._logits(ids, 20, width, guess=guess) for width, guess in ((1, None), (4, (ids + 1) % 200)))
    assert torch.equal(plain, wide)


def test_trees_are_refused_with_the_reason(hybrid: RecurrentTarget) -> None:
    with pytest.raises(OptionError, match="recurrent state"):
        Engine(target=hybrid, drafter=ModelDrafter(hybrid), depth=2, tree=4)


def test_bytes_are_those_of_the_cache(hybrid: RecurrentTarget) -> None:
    assert hybrid.facts.cache_bytes_per_token == 1 * 2 * 2 * 16 * 4  # one attention layer: keys and values of two heads of 16 floats
    assert hybrid.facts.reasons["recurrent state"].startswith("7,168 bytes a sequence")


def test_short_convolutions_alone_need_no_copies(tmp_path: Path) -> None:
    model = build("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96, "conv_L_cache": 3})
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, threads=torch.get_num_threads()), fused=False)
    assert target.facts.tier == 2, "their past can be cropped"
    texts = [text(20)]
    want = references(model, texts)
    assert engine_ids(target, texts, Oracle(ahead(texts, want), wrong_at=lambda position: position % 3 == 0))[0] == want
