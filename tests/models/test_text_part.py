"""Checkpoints of models that read images or sounds, too: the language model inside of them is the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_sides import MIXED, SIX
from test_streams import model_of
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from draftproof.config import LoadConfig
from draftproof.models import load
from draftproof.models.load import as_target, load_target
from draftproof.models.paged import PagedTarget

SEEING = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
          "intermediate_size": 64}
UNIFIED = {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}
INSIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}, SEEING),
    "gemma4": ("gemma4", SIX, SEEING),
    "gemma4 with experts": ("gemma4", {**SIX, **MIXED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, SEEING),
    "gemma4_unified": ("gemma4_unified", {"head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "attention_k_eq_v": True,
                                          "num_global_key_value_heads": 1}, UNIFIED),
    "internvl": ("internvl", {"model_type": "qwen3", "head_dim": 16}, {**SEEING, "image_size": [28, 28], "patch_size": [14, 14]}),
    "llava": ("llava", {"model_type": "llama"}, {**SEEING, "model_type": "clip_vision_model"}),
    "mistral3": ("mistral3", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}, SEEING),
    "mistral3 around Mistral 4": ("mistral3", {"model_type": "mistral4", **families.LATENT, **families.MOE, **families.SHARED,
                                               "num_experts_per_tok": 4, "rope_parameters": families.STRETCHED}, SEEING),
}
CONFIG = LoadConfig(dtype="float32", page_tokens=16, self_test=False)


def whole(case: str) -> Any:
    family, text, beside = INSIDE[case]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    config = type(AutoConfig.for_model(family))(text_config={**families.COMMON, **text}, vision_config=beside)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("case", INSIDE)
def test_the_language_model_inside_is_taken_and_fused(case: str, tmp_path: Path) -> None:
    model, ids = whole(case), torch.arange(40) * 37 % 190 + 1
    model.save_pretrained(tmp_path)
    want = model(input_ids=ids[None], use_cache=False).logits[0, -1].detach()
    for target in (load_target(tmp_path, CONFIG), as_target(model, CONFIG)):
        assert isinstance(target, PagedTarget) and target.fused is not None, target.facts.reasons
        assert type(model).__name__ in target.facts.reasons["language model"]
        found = target.extend([target.open(ids.tolist())], [ids]).logits[0]
        assert float((found - want).abs().max()) <= 1e-4 * float(want.abs().max())
        assert not any("vision" in name for name, _ in target.model.named_modules()), "the rest is let go"


def test_one_whose_other_parts_ask_for_more_packages_is_read_without_them(tmp_path: Path) -> None:
    """Gemma 3n's, which look through a model of timm's."""
    alone, ids = model_of("small"), torch.arange(40) * 37 % 190 + 1
    alone.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file({**inside, "model.vision_tower.first.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    type(AutoConfig.for_model("gemma3n"))(text_config=alone.config.to_dict()).save_pretrained(tmp_path)
    target = load_target(tmp_path, CONFIG)
    assert isinstance(target, PagedTarget) and target.fused is not None, target.facts.reasons
    assert "gemma3n" in target.facts.reasons["language model"]
    want = alone(input_ids=ids[None], use_cache=False).logits[0, -1].detach()
    found = target.extend([target.open(ids.tolist())], [ids]).logits[0]
    assert float((found - want).abs().max()) <= 1e-4 * float(want.abs().max())


def test_one_whose_block_is_not_known_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(load.FAMILIES, "gemma3_text")
    target = as_target(whole("gemma3"), CONFIG)
    assert "language model" not in target.facts.reasons and type(target.model).__name__ == "Gemma3ForConditionalGeneration"
