"""A head that is begun beside a target turns its keys as the target's own layers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import families
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof.models.heads.dflash import DFlash
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.files import read_files
from draftproof.models.load import _parts

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "yarn": ("qwen3", {"rope_parameters": {"rope_theta": 5e5, **YARN}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "dynamic", "factor": 4.0}}),
    "longrope": ("phi3", {"rope_parameters": {"rope_theta": 1e4, **LONG}, "original_max_position_embeddings": 64}),
    "yarn of gpt-oss": ("gpt_oss", {}),
    "two kinds of layers": ("gemma3_text", {"num_hidden_layers": 6, "rope_parameters": {
        "full_attention": {"rope_theta": 7e5, "rope_type": "linear", "factor": 2.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_turns_as_the_target_does(kind: str, tmp_path: Path) -> None:
    family, more = KINDS[kind]
    options = {**families.COMMON, **families.FAMILIES[family], **more}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=torch.float32)
    rotary = model.model.rotary_emb
    kinds = {name.removesuffix("inv_freq"): found for name, found in rotary.named_buffers() if name.endswith("inv_freq")}
    own = next(name for name in kinds if name in ("", "full_attention_"))
    parts = _parts(model, torch.float32)
    for make in (EagleHead, DFlash):
        head: Any = make.fresh(parts)
        head.save(tmp_path / make.__name__)
        for each in (head, make.read(read_files(tmp_path / make.__name__), parts, 200)):
            assert torch.equal(each.rope.inv_freq, kinds[own])
            assert each.rope.scale == pytest.approx(getattr(rotary, f"{own}attention_scaling"))
