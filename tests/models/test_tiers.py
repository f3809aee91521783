"""Families that are easily taken for what they are not: every pass behind a prefix gives the logits of transformers' one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftproof import Engine
from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models.folder import read_config
from draftproof.models.load import load_target
from draftproof.models.packed import KeptLinear, PackedLinear
from draftproof.types import Draft

WINDOW, LENGTH = 32, 90
MOE = {**families.MOE, "shared_expert_intermediate_size": 48}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LONGCAT = {**LATENT, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1,
           "head_dim": 16}

# why they are not tier 1 → tier: options
TWICE = {"diffllama": {}, "hrm_text": {"num_hidden_layers": 1}}  # two attention calls under one number
MASKED = {  # windows that only the mask knows
    "qwen2_moe": {**MOE, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "phimoe": {**MOE, "sliding_window": WINDOW},
    "doge": {"sliding_window": WINDOW, "keep_window_size": 512},
}


def saved(family: str, options: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As families.build."""
    torch.manual_seed(0)
    common = {name: value for name, value in families.COMMON.items() if family != "xlnet" or name != "max_position_embeddings"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**common, **options}), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * (2.0 if "embed" in name else 1.3) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def off(model: PreTrainedModel, target: Any) -> float:
    """The largest relative difference of rows that stand behind a prefix, scored several at a time and after wrong guesses."""
    text = torch.randint(1, 200, (LENGTH,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        want = model(input_ids=text[None], use_cache=False).logits[0]
    slot = target.open(text[:2].tolist(), room=LENGTH + 20)
    target.extend([slot], [text[:20]])
    target.extend([slot], [text[20:21]])
    rows, places, at = [], [], 21
    for width in (3, 25, 4, 1, 20):
        target.score([slot], text[at : at + 1], [Draft.chain((text[at + 1 : at + 1 + width] + 1) % 200)])
        target.rewind(slot, ())
        rows.append(target.score([slot], text[at + 1 : at + 2], [Draft.chain(text[at + 2 : at + 2 + width])]).logits)
        target.rewind(slot, tuple(range(width)))
        places += range(at + 1, at + width + 2)
        at += width + 2
    got, want = torch.cat(rows), want[places]
    return float(((got - want).norm(dim=-1) / (want - want.mean(-1, keepdim=True)).norm(dim=-1)).max())


@pytest.mark.parametrize(("family", "options", "why"), [
    *((family, options, "under one number") for family, options in TWICE.items()),
    *((family, options, "a mask") for family, options in MASKED.items()),
])
def test_what_one_short_pass_does_not_show_keeps_its_own_cache(family: str, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    if family == "doge" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("its own pass over a prefix and that over the whole differ in this version")
    model = saved(family, options, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert off(model, target) < 1e-3
    assert target.facts.tier == 2 and why in target.facts.reasons["tier"], target.facts.reasons["tier"]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_that_reaches_attention_is_no_hindrance(family: str, tmp_path: Path) -> None:
    model = families.save(family, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert target.facts.tier == 1 and off(model, target) < 1e-3


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_layers_that_hand_nothing_on_to_attention_are_no_hindrance(family: str, tmp_path: Path) -> None:
    model = saved(family, {"head_dim": 16}, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16), fused=False)
    assert target.facts.tier == 1 and off(model, target) < 1e-3, target.facts.reasons["tier"]


@pytest.mark.parametrize(("family", "seed"), [("mixtral", 0), ("mixtral", 6), ("qwen3_moe", 6)])
def test_what_bfloat16_loses_does_not_reach_the_choice_of_experts(family: str, seed: int, tmp_path: Path) -> None:
    """Other rounding before a router lets it choose other experts, which was taken for another mask."""
    families.build(family, seed).bfloat16().save_pretrained(tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, dtype="bfloat16", packed=False))
    assert target.facts.tier == 1, target.facts.reasons["tier"]
    assert {layer.mlp.experts.config._experts_implementation for layer in target.model.model.layers} == {"grouped_mm"}


def test_a_model_that_does_not_run_is_refused(tmp_path: Path) -> None:
    """It ended in a traceback of its own code."""
    saved("qwen3_moe", {**families.MOE, "head_dim": 16, "num_experts_per_tok": 5}, tmp_path)
    with pytest.raises(LoadError, match=r"Qwen3MoeForCausalLM cannot read a text of 24 tokens .*: correct config.json"):
        load_target(tmp_path)


def longcat(folder: Path) -> PreTrainedModel:
    """Its router multiplies by its layer's weight itself, and its two sublayers count their keys apart."""
    return saved("longcat_flash", {**LONGCAT, "num_layers": 2}, folder)


def test_a_layer_whose_weight_the_model_reads_by_hand_stays_as_it_is(tmp_path: Path) -> None:
    model = longcat(tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert off(model, target) < 1e-3
    kinds = {name: type(layer) for name, layer in target.model.named_modules() if name.endswith(("classifier", "o_proj", "lm_head"))}
    assert {kind is torch.nn.Linear for name, kind in kinds.items() if name.endswith("classifier")} == {True}
    assert torch.nn.Linear not in {kind for name, kind in kinds.items() if not name.endswith("classifier")}


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_that_attend_twice_are_one_each(layers: int, tmp_path: Path) -> None:
    """Drafters found none of two, and of one the two attentions in it."""
    saved("longcat_flash", {**LONGCAT, "num_hidden_layers": 2 * layers, "num_layers": layers}, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False))
    assert list(target.parts.layers) == list(target.model.model.layers)
    engine = Engine(target, "layer-skip:exit=1", 2)
    out = engine.generate([3, 1, 4, 1, 5], max_tokens=8, temperature=0)
    assert out.speculation["state"] == "on" and len(out.token_ids) == 8


def test_weights_that_the_first_pass_changes_are_packed_behind_it(tmp_path: Path) -> None:
    model = saved("rwkv", {"attention_hidden_size": 64, "context_length": 256, "rescale_every": 1}, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False))
    assert target.facts.tier == 3 and off(model, target) < 1e-3
    assert isinstance(target.model.rwkv.blocks[2].attention.output, KeptLinear)


def test_a_tied_output_is_not_read_by_hand(tmp_path: Path) -> None:
    saved("llama", {"tie_word_embeddings": True}, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False))
    assert isinstance(target.parts.output, KeptLinear)


def test_the_weight_of_a_packed_layer_has_no_values() -> None:
    weight = PackedLinear(torch.randn(8, 4), None).weight
    assert (tuple(weight.shape), weight.dtype, weight.device.type, weight.numel(), weight.element_size()) == (
        (8, 4), torch.float32, "meta", 32, 4)
    x = torch.randn(2, 4)
    for read in (lambda: torch.nn.functional.linear(x, weight), lambda: x @ weight.t(), lambda: weight.to(x), lambda: x.to(weight),
                 lambda: torch.cat([x, weight])):
        with pytest.raises((RuntimeError, AttributeError), match="packed=False"):
            read()


SHAPES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"head_dim": 16, "sliding_window": WINDOW, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": 200, "num_kv_shared_layers": 0,
                    "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "deepseek_v3": {**families.MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
                    "q_lora_rank": None, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", SHAPES)
def test_a_token_takes_what_its_keys_and_values_take_in_pages(family: str, tmp_path: Path) -> None:
    """Of layers of several shapes, and of latent attention, whose configuration calls a part of a key its size."""
    model = saved(family, SHAPES[family], tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert target.facts.tier == 1 and off(model, target) < 1e-3
    stored = sum(rows[0].numel() for store in (target.pool.keys, target.pool.values) for rows in store.values())
    assert target.facts.cache_bytes_per_token == 4 * stored
    if family == "deepseek_v3":
        assert stored == 3 * 4 * (24 + 8 + 20)


@pytest.mark.parametrize(("family", "options", "numbers"), [
    ("falcon", {"multi_query": True, "new_decoder_architecture": False}, 3 * 2 * 16),      # three layers of one key head
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, 1 * 2 * 2 * 16),         # convolutions keep no keys
])
def test_a_token_takes_what_its_keys_and_values_take_in_the_models_own_cache(
        family: str, options: dict[str, Any], numbers: int, tmp_path: Path) -> None:
    saved(family, options, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False), fused=False)
    assert target.facts.tier == 2 and target.facts.cache_bytes_per_token == 4 * numbers


@pytest.mark.parametrize(("family", "options", "why"), [
    ("bert", {}, "as an encoder's do"),
    ("electra", {"embedding_size": 64}, "as an encoder's do"),
    ("roformer", {"embedding_size": 64}, "as an encoder's do"),
    ("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, "leaves nothing in the cache"),
    ("xlnet", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96}, "leaves nothing in the cache"),
    ("blenderbot", {"d_model": 64, "encoder_layers": 1, "num_hidden_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 4,
                    "decoder_ffn_dim": 96}, "cannot decode from a cached prefix"),
])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_no_decoder_with_a_cache_is_refused(family: str, options: dict[str, Any], why: str, dtype: str, tmp_path: Path) -> None:
    if (family, dtype) == ("xlnet", "bfloat16"):
        pytest.skip("its own code mixes types")
    saved(family, options, tmp_path)
    with pytest.raises(LoadError, match=why):
        load_target(tmp_path, LoadConfig(self_test=False, dtype=dtype))


def test_capped_scores_are_computed_where_they_are_capped(tmp_path: Path) -> None:
    """torch's own attention has no soft caps; what a load compares with, and tier 2 runs, has."""
    families.save("gemma2", tmp_path)
    assert read_config(tmp_path, LoadConfig())._attn_implementation == "eager"
