"""Tiny random models of the families whose ids must equal `transformers.generate`. Weights are enlarged, so that texts vary."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GPTJModel, PreTrainedModel

from draftproof.config import LoadConfig
from draftproof.models.folder import make_known
from draftproof.models.load import as_target
from draftproof.models.paged import PagedTarget

COMMON = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {"shared_expert_intermediate_size": 96, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
          "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
        "mscale_all_dim": 0.9}
STRETCHED = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
MIXED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **MOE},
    "mixtral": {**MOE, "sliding_window": None},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "olmo3": MIXED,
    "exaone4": {"head_dim": 16, **MIXED},
    "cwm": {"head_dim": 16, **MIXED, "bos_token_id": 1, "eos_token_id": 2},
    "seed_oss": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "olmoe": MOE,
    "flex_olmo": MOE,
    "qwen2_moe": {**MOE, **SHARED},
    "glm4_moe": {"head_dim": 16, **MOE, **SHARED, "use_qk_norm": True},
    "dots1": {"head_dim": 16, **MOE, **SHARED},
    "minimax_m2": {"head_dim": 16, **MOE},
    "exaone_moe": {"head_dim": 16, **MOE, **SHARED, **MIXED, "num_shared_experts": 2},
    "hy_v3": {"head_dim": 16, **MOE, "num_shared_experts": 2},
    "solar_open": {"head_dim": 16, **MOE, **SHARED},
    "ernie4_5_moe": {**MOE, **ERNIE},
    "deepseek_v2": {**LATENT, **MOE, **SHARED, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, **MOE, **SHARED, "rope_parameters": YARN, "attention_bias": True},
    "glm4_moe_lite": {**LATENT, **MOE, **SHARED},
    "youtu": {**LATENT, "rope_interleave": False},
    "ministral3": {"head_dim": 16, "rope_parameters": STRETCHED},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "starcoder2": {"sliding_window": 24},
    "cohere": {},
    "gpt_oss": {"head_dim": 16, "sliding_window": 24, **MOE},
    "bloom": {"n_layer": 3, "n_head": 4},
    "xglm": {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
}
TIER_2 = {"bloom"}  # its attention takes no function from outside, and adds what we do not know
if not GPTJModel._supports_attention_backend:
    TIER_2 |= {"gptj", "codegen"}   # before transformers 5.24


def config_of(family: str, **options: object) -> Any:
    """Skips a test of a family that the installed transformers lacks."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return AutoConfig.for_model(family, **deepcopy(options))       # some write into what they are told


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights of a size that makes its next token depend on the text."""
    torch.manual_seed(seed)
    options = {k: v for k, v in {**COMMON, **FAMILIES[family]}.items() if v is not None or k.endswith("token_id")}
    config = config_of(family, **options)
    make_known(config)
    if getattr(config, "attn_logit_softcapping", None):     # before transformers 5.24 its default left them out
        config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * (2.0 if "embed" in name else 1.3) / parameter.shape[-1] ** 0.5)
            elif "sinks" in name:
                parameter.copy_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.generation_config.eos_token_id = None
    return model.eval()


def save(family: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    model = build(family, seed)
    model.save_pretrained(folder)
    return model


def chosen(model: Any, prompt: torch.Tensor, ids: list[int]) -> list[int]:
    """The likeliest token after a prompt [n] and after each of these but the last, by one pass of transformers: to `generate` as many
    takes as long as all else of a test."""
    with torch.inference_mode():
        rows = model(input_ids=torch.cat([prompt, torch.tensor(ids[:-1])])[None], use_cache=False).logits[0, len(prompt) - 1 :]
    found: list[int] = rows.argmax(-1).tolist()
    return found


def calm(model: PreTrainedModel) -> PreTrainedModel:
    """With random weights of the usual size, and norms that are not 1 and make no sharp law of scores: that would be chaos."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2).mul_(0.3 if "q_norm" in name else 1)
    return model


def fused_target(model: PreTrainedModel, **more: Any) -> PagedTarget:
    """more: of the configuration of a load."""
    config = LoadConfig(**{"page_tokens": 16, "self_test": False, "threads": torch.get_num_threads(), **more})
    target = as_target(model, config)
    assert isinstance(target, PagedTarget) and target.fused is not None, target.facts.reasons
    return target
