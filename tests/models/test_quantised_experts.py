"""Experts of quantised checkpoints: their levels stay, or all of them become ordinary weights, joined as transformers joins them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import packings
import pytest
import torch
from families import COMMON, MOE
from packings import publish
from safetensors.torch import load_file, save_file
from test_quantised import ALL, AWQ, logits, off, ordinary
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof import Engine, LoadConfig, Sampling, native
from draftproof.models.experts import Experts
from draftproof.models.load import load_target
from draftproof.models.routed import Routed

WIDE = {**COMMON, **MOE, "hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16},
    "mixtral": {"sliding_window": None},
    "deepseek_v3": {"n_routed_experts": 32, "num_experts": 32, "num_local_experts": 32, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 16,
                    "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 32,
                   "n_groups": 2, "ssm_state_size": 32, "head_dim": 32, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 128},
}
TOGETHER = ("gemma4_text",)                                 # whose experts transformers reads in one tensor alone
NAMES = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
BUT_ROUTERS = tuple(f".{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down"))
compiled = pytest.mark.skipif(not native.available()[0] or not native.takes_narrow(native.EIGHT_FLOATS), reason="no kernels for it here")


def source(folder: Path, family: str) -> Path:
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**WIDE, **FAMILIES[family]}, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.data *= 4
    model.save_pretrained(folder)
    if family in TOGETHER:
        save_file(taken_apart(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def taken_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as layers of their own, as those who quantise them have them."""
    held = dict(weights)
    for name in weights:
        place, dot, kind = name.rpartition("experts.")
        for number, one in enumerate(held.pop(name) if dot else ()):
            parts = {"gate_proj": one.chunk(2)[0], "up_proj": one.chunk(2)[1]} if kind == "gate_up_proj" else {kind: one}
            held |= {f"{place}experts.{number}.{part}.weight": weight.contiguous() for part, weight in parts.items()}
    return held


def put_together(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    held = {name: weight for name, weight in weights.items() if "experts." not in name}
    for name in [name for name in weights if "experts.0.down_proj" in name]:
        place = name.removesuffix("0.down_proj.weight")
        each = [{part: weights[f"{place}{number}.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")} for number in range(4)]
        held[f"{place}gate_up_proj"] = torch.stack([torch.cat([one["gate_proj"], one["up_proj"]]) for one in each])
        held[f"{place}down_proj"] = torch.stack([one["down_proj"] for one in each])
    return held


def experts_of(model: torch.nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


@compiled
@pytest.mark.parametrize("family, name", [(family, name) for name in ("awq", "packed 8", "blocks", "mxfp4", "packed 16")
                                          for family in FAMILIES if family != "nemotron_h" or name in ("awq", "mxfp4")])
def test_experts_stay_as_they_were_published(tmp_path: Path, family: str, name: str) -> None:
    config, form = ALL[name]
    weights = publish(source(tmp_path / "source", family), tmp_path / "packed", config, form, BUT_ROUTERS if family in TOGETHER else NAMES)
    assert any(".experts.0." in found for found in weights)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32"))
    assert "ordinary" not in target.facts.reasons["checkpoint"], target.facts.reasons["checkpoint"]
    assert target.facts.tier == 1 and target.facts.invisible, (target.facts.reasons["tier"], target.facts.invisible_reason)
    held = experts_of(target.model)
    assert len(held) == (1 if family in ("deepseek_v3", "nemotron_h") else 2)
    layers = [layer for one in held for layer in (*one.first, *one.down)]
    assert all(layer.weight_bytes < 1.2 * layer.weight.numel() for layer in layers)
    plain = ordinary(tmp_path / "source", tmp_path / "ordinary", put_together(weights) if family in TOGETHER else weights)
    near = 1e-4 if name == "blocks" else 0.08
    found, expected = logits(target), logits(plain, packed=False)
    apart = [off(one, other) for one, other in zip(found, expected, strict=True)]
    assert sorted(apart)[-2] < near, "all rows but one, whose router may sit on an edge"
    whole = load_target(plain, LoadConfig(self_test=False)).facts
    assert target.facts.parameters == whole.parameters and target.facts.weight_bytes < 0.6 * whole.weight_bytes
    assert target.facts.experts is not None and whole.experts is not None
    assert target.facts.experts.parameters == whole.experts.parameters and target.facts.experts.bytes < 0.6 * whole.experts.bytes


def published_as_gpt_oss(source: Path, to: Path) -> dict[str, torch.Tensor]:
    """Its experts' weights in MXFP4, which lie together; returns what they stand for."""
    to.mkdir()
    told, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    (to / "config.json").write_text(json.dumps({**told, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}))
    held = dict(weights)
    for name in list(weights):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            each = [packings.mxfp4(one.t().contiguous()) for one in held.pop(name)]
            blocks = torch.stack([tensors["weight_packed"] for tensors, _ in each])
            held[f"{name}_blocks"] = blocks.view(*blocks.shape[:2], -1, 16).contiguous()
            held[f"{name}_scales"] = torch.stack([tensors["weight_scale"] for tensors, _ in each])
            weights[name] = torch.stack([stands.t() for _, stands in each])
    save_file(held, to / "model.safetensors", {"format": "pt"})
    return weights


@pytest.mark.parametrize("kept", [pytest.param(True, marks=compiled), False])
def test_experts_of_gpt_oss(tmp_path: Path, kept: bool) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model("gpt_oss", **{**WIDE, "head_dim": 16, "sliding_window": 24}, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= 4
    model.save_pretrained(tmp_path / "source")
    weights = published_as_gpt_oss(tmp_path / "source", tmp_path / "packed")
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32", packed=kept, self_test=False))
    told = target.facts.reasons["checkpoint"]
    assert told == ("mxfp4: 16 layers are multiplied as they were published" if kept else
                    "mxfp4: 0 layers are multiplied as they were published, 16 made ordinary weights (floats)")
    found = logits(target)
    expected = logits(ordinary(tmp_path / "source", tmp_path / "ordinary", weights), packed=False)
    apart = sorted(off(one, other) for one, other in zip(found, expected, strict=True))
    assert apart[-2] < (0.08 if kept else 1e-4) and (kept or apart[-1] < 1e-4)
    if kept:
        assert all(layer.routed.compiled for layer in target.parts.layers)


@compiled
@pytest.mark.parametrize("name", ["awq", "blocks"])
def test_guessing_changes_nothing(tmp_path: Path, name: str) -> None:
    config, form = ALL[name]
    publish(source(tmp_path / "source", "qwen3_moe"), tmp_path / "packed", config, form)
    target, texts = load_target(tmp_path / "packed"), []
    assert all(isinstance(layer.routed, Routed) for layer in target.parts.layers)
    for spec in ("none", "ngram", f"model:{tmp_path / 'packed'}"):
        with Engine(target, spec) as engine:
            texts.append(engine.generate([5, 9, 5, 9, 5], Sampling(temperature=0.8, max_tokens=40, seed=3, ignore_eos=True)).token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("names", [("experts.0.down_proj.weight", "experts.1.down_proj.weight", "q_proj.weight"),
                                   tuple(f"experts.{number}.up_proj.weight" for number in range(4))], ids=["two", "up alone"])
def test_experts_of_which_some_are_whole_are_ordinary(tmp_path: Path, names: tuple[str, ...]) -> None:
    weights = publish(source(tmp_path / "source", "qwen3_moe"), tmp_path / "packed", AWQ, packings.awq, names)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32", self_test=False))
    assert "made ordinary weights" in target.facts.reasons["checkpoint"]
    expected = logits(ordinary(tmp_path / "source", tmp_path / "ordinary", weights), packed=False)
    assert off(logits(tmp_path / "packed", packed=False), expected) < 1e-4 and off(logits(target), expected) < 0.08


def test_without_packing_they_are_joined_as_transformers_joins_them(tmp_path: Path) -> None:
    weights = publish(source(tmp_path / "source", "mixtral"), tmp_path / "packed", AWQ, packings.awq, NAMES)
    expected = logits(ordinary(tmp_path / "source", tmp_path / "ordinary", weights), packed=False)
    assert off(logits(tmp_path / "packed", packed=False), expected) < 1e-4


@pytest.mark.parametrize("place", ["experts", "moe.experts", "of one that sees"])
def test_experts_that_transformers_does_not_join(tmp_path: Path, place: str) -> None:
    """Those of Gemma 4 are published one by one, some below a name that its model has not; without kernels they were missing."""
    weights = publish(source(tmp_path / "source", "gemma4_text"), tmp_path / "packed", AWQ, packings.awq, BUT_ROUTERS)
    file, old, new = tmp_path / "packed" / "config.json", "experts", place
    if place == "of one that sees":
        text, (old, new) = json.loads(file.read_text()), ("model.", "model.language_model.")
        file.write_text(json.dumps({"model_type": "gemma4", "quantization_config": text.pop("quantization_config"), "text_config": text}))
    held = {name.replace(old, new): weight for name, weight in load_file(tmp_path / "packed" / "model.safetensors").items()}
    save_file(held, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    expected = logits(ordinary(tmp_path / "source", tmp_path / "ordinary", put_together(weights)), packed=False)
    assert off(logits(tmp_path / "packed", packed=False), expected) < 1e-4
    if native.available()[0]:
        facts = load_target(tmp_path / "packed", LoadConfig(dtype="float32", self_test=False)).facts
        assert "ordinary" not in facts.reasons["checkpoint"] and facts.reasons["forward pass"].startswith("fused"), facts.reasons
