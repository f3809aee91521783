"""Llama 4, whose layers with positions read their own part of a text, and others all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from test_fused import play
from test_text_part import CONFIG, SEEING
from test_tiers import off
from transformers import AutoConfig, AutoModelForImageTextToText

from draftproof import native
from draftproof.config import LoadConfig
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget

SCOUT: dict[str, Any] = {
    **families.MOE, "head_dim": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 112, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32, "no_rope_layers": [1, 1, 0], "floor_scale": 16, "attn_scale": 0.3}
MAVERICK: dict[str, Any] = {**SCOUT, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "use_qk_norm": False,
                            "attn_temperature_tuning": False}


@pytest.mark.parametrize("options", [SCOUT, MAVERICK], ids=["Scout", "Maverick"])
def test_texts_of_several_parts_are_those_of_transformers(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "llama4_text", options)
    model = families.build("llama4_text")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, LoadConfig(page_tokens=16, threads=torch.get_num_threads()))
    assert target.facts.tier == 1 and target.facts.invisible, target.facts.reasons
    assert off(model, target) < 1e-4


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_has_the_bits_of_its_parts(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "llama4_text", SCOUT)
    families.build("llama4_text").bfloat16().save_pretrained(tmp_path)
    target, twin = (load_target(tmp_path, LoadConfig(dtype=dtype, page_tokens=16, self_test=False)) for _ in range(2))
    assert isinstance(target, PagedTarget) and isinstance(twin, PagedTarget) and target.fused is not None and target.fused.rows_alone()
    monkeypatch.setattr(twin.fused, "_kernels", lambda pool: None)
    for one, other in zip(play(target), play(twin), strict=True):
        assert torch.equal(one.logits, other.logits) and all(torch.equal(one.taps[i], other.taps[i]) for i in (0, 2))


def test_the_language_model_inside_of_one_that_sees_is_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 28, "patch_size": 14}
    config = type(AutoConfig.for_model("llama4"))(text_config={**families.COMMON, **SCOUT}, vision_config={**SEEING, **sizes})
    model, ids = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval(), torch.arange(40) * 37 % 190 + 1
    model.save_pretrained(tmp_path)
    want = model.language_model(input_ids=ids[None], use_cache=False).logits[0, -1].detach()
    target = load_target(tmp_path, CONFIG)
    assert isinstance(target, PagedTarget) and target.fused is not None, target.facts.reasons
    found = target.extend([target.open(ids.tolist())], [ids]).logits[0]
    assert float((found - want).abs().max()) <= 1e-4 * float(want.abs().max())
    assert not any("vision" in name for name, _ in target.model.named_modules())
