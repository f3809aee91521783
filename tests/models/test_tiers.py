"""Families that are easily taken for what they are not: every pass behind a prefix gives the logits of transformers' one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftproof.config import LoadConfig
from draftproof.models.load import load_target
from draftproof.types import Draft

WINDOW, LENGTH = 32, 90
MOE = {**families.MOE, "shared_expert_intermediate_size": 48}

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
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**families.COMMON, **options}), dtype=dtype).eval()
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
    model = saved(family, options, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert off(model, target) < 1e-3
    assert target.facts.tier == 2 and why in target.facts.reasons["tier"], target.facts.reasons["tier"]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_that_reaches_attention_is_no_hindrance(family: str, tmp_path: Path) -> None:
    model = families.save(family, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert target.facts.tier == 1 and off(model, target) < 1e-3


def test_layers_of_different_shapes(tmp_path: Path) -> None:
    model = saved("gemma4_text", {"head_dim": 16, "sliding_window": WINDOW, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
                                  "vocab_size_per_layer_input": 200, "num_kv_shared_layers": 0,
                                  "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, page_tokens=16))
    assert target.facts.tier == 1 and off(model, target) < 1e-3
    stored = sum(rows[0].numel() for store in (target.pool.keys, target.pool.values) for rows in store.values())
    assert target.facts.cache_bytes_per_token == 4 * stored
