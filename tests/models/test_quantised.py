"""Checkpoints that others have quantised: read as they are published, multiplied as they are where a kernel takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import packings
import pytest
import torch
from families import COMMON, config_of
from packings import Packed, publish
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM

from draftproof import Engine, LoadConfig, Sampling, native
from draftproof.errors import LoadError
from draftproof.models import int8
from draftproof.models.float8 import StreamedFloat8Linear
from draftproof.models.fours import StreamedFoursLinear
from draftproof.models.int4 import Int4Linear, StreamedInt4Linear
from draftproof.models.int8 import Int8Linear, StreamedInt8Linear
from draftproof.models.levels import Levels, LevelWeight, StandIns, level_weights, put
from draftproof.models.load import load_target
from draftproof.models.tier import pages_agree

Form = Callable[[torch.Tensor], Packed]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEPT: dict[str, tuple[dict[str, Any], Form, int]] = {       # the last: bits of its layers
    "awq": (AWQ, packings.awq, 4),
    "gptq": (GPTQ, packings.gptq, 4),
    "gptq symmetric": (GPTQ, partial(packings.gptq, symmetric=True), 4),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(packings.gptq, less=0), 4),
    "gptq 8": ({**GPTQ, "bits": 8}, lambda w: packings.gptq(w, 8, w.shape[1], True), 8),
    "packed": (COMPRESSED, packings.packed, 4),
    "packed asymmetric": (COMPRESSED, partial(packings.packed, symmetric=False), 4),
    "packed 8": (COMPRESSED, lambda w: packings.packed(w, 8, w.shape[1]), 8),
    "whole numbers": (COMPRESSED, packings.whole, 8),
}
OPENED: dict[str, tuple[dict[str, Any], Form]] = {
    "gptq shuffled": ({**GPTQ, "desc_act": True}, partial(packings.gptq, shuffled=True)),
    "gptq 8 in groups": ({**GPTQ, "bits": 8}, partial(packings.gptq, bits=8)),
    "packed 8 asymmetric": (COMPRESSED, lambda w: packings.packed(w, 8, w.shape[1], False)),
    "small blocks": (FP8, partial(packings.floats, sides=(32, 16))),
    "mxfp8": (COMPRESSED, packings.mxfp8),
}
STREAMED: dict[str, tuple[dict[str, Any], Form]] = {        # kept where our kernels multiply them
    "blocks": (FP8, packings.floats),
    "groups": (COMPRESSED, partial(packings.floats, sides=(1, 128), name="weight_scale")),
    "floats of outputs": (COMPRESSED, lambda w: packings.floats(w, (1, w.shape[1]), "weight_scale")),
    "floats of one scale": ({"quant_method": "modelopt"}, lambda w: packings.floats(w, tuple(w.shape), "weight_scale")),
    "awq 32": ({**AWQ, "group_size": 32}, partial(packings.awq, group=32)),
    "packed 32": (COMPRESSED, partial(packings.packed, group=32)),
    "packed 16": (COMPRESSED, partial(packings.packed, group=16, symmetric=False)),
    "nvfp4": (COMPRESSED, partial(packings.nvfp4, dividing=True)),
    "mxfp4": (COMPRESSED, packings.mxfp4),
    "nvfp4 of modelopt": ({"quant_method": "modelopt"}, partial(packings.nvfp4, dividing=False)),
}
ALL = {**{name: found[:2] for name, found in KEPT.items()}, **OPENED, **STREAMED}


def llama(folder: Path, dtype: str = "bfloat16", **more: Any) -> Path:
    torch.manual_seed(5)
    config = AutoConfig.for_model("llama", **{**COMMON, "hidden_size": 128, "intermediate_size": 256, **more}, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.data *= 4
    model.save_pretrained(folder)
    return folder


def ordinary(source: Path, to: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The model that a packed one stands for, in float32."""
    to.mkdir()
    told = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**told, "dtype": "float32"}))
    save_file({name: weight.float().contiguous() for name, weight in weights.items()}, to / "model.safetensors", {"format": "pt"})
    return to


@torch.inference_mode()
def logits(of: Any, **load: Any) -> torch.Tensor:
    """Of every fourth token of a text, [n, V], by a target or a folder's model."""
    target = load_target(of, LoadConfig(**{"dtype": "float32", "self_test": False, **load})) if isinstance(of, Path) else of
    slot, ids = target.open([]), torch.randint(1, 200, (40,), generator=torch.Generator().manual_seed(0))
    found = [target.extend([slot], [part]).logits[-1] for part in ids.split(4)]
    target.close(slot)
    return torch.stack(found)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the spread of logits."""
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", ALL)
def test_what_is_read_is_what_was_packed(tmp_path: Path, name: str) -> None:
    """In float32, with plain layers: the same weights up to the order of a product and a sum."""
    config, form = ALL[name]
    source = llama(tmp_path / "source")
    weights = publish(source, tmp_path / "packed", config, form)
    found = load_target(tmp_path / "packed", LoadConfig(dtype="float32", packed=False, self_test=False), fused=False)
    assert not any(isinstance(getattr(layer, "weight", None), LevelWeight) for layer in found.parts.layers[0].modules())
    layer = found.parts.layers[1]
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        weight = layer.get_submodule(part).weight
        assert torch.allclose(weight.double(), weights[f"model.layers.1.{part}.weight"], rtol=1e-6, atol=1e-9), part
    rough = load_file(source / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
    assert 0 < off(layer.mlp.up_proj.weight.detach(), rough) < 1.5          # it was rounded, and of this very layer


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: (False, "the test wants none"))


@pytest.mark.parametrize("name,ours", [*((name, True) for name in KEPT), ("awq", False), ("whole numbers", False)])
def test_levels_are_multiplied_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ours: bool) -> None:
    """ours: through our kernels; else as on a machine without a compiler."""
    if not ours:
        without_compiler(monkeypatch)
    elif not native.available()[0]:
        pytest.skip(native.available()[1])
    config, form, bits = KEPT[name]
    source = llama(tmp_path / "source")
    weights = publish(source, tmp_path / "packed", config, form)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32"))
    assert target.facts.invisible, target.facts.invisible_reason
    assert target.facts.reasons["checkpoint"] == f"{config['quant_method']}: 21 layers are multiplied as they were published"
    kinds = {4: (Int4Linear, StreamedInt4Linear), 8: (Int8Linear, StreamedInt8Linear)}[bits]
    layer = target.parts.layers[0]
    assert {type(part) for part in (layer.qkv, layer.o, layer.gate_up, layer.down)} == {kinds[ours]}
    assert type(target.parts.output) not in kinds                    # which was not quantised
    plain = ordinary(source, tmp_path / "ordinary", weights)
    most = 0.08 if bits == 4 else 0.005                              # what weights of bfloat16 lose, or less
    assert 0 < off(logits(target), logits(plain, packed=False)) < most
    assert target.facts.parameters == load_target(plain, LoadConfig(self_test=False)).facts.parameters


@pytest.mark.parametrize("name", OPENED)
def test_other_forms_become_ordinary_weights(tmp_path: Path, name: str) -> None:
    config, form = OPENED[name]
    source = llama(tmp_path / "source")
    weights = publish(source, tmp_path / "packed", config, form)
    expected = logits(ordinary(source, tmp_path / "ordinary", weights), packed=False)
    assert off(logits(tmp_path / "packed"), expected) < 1e-4
    told = load_target(tmp_path / "packed", LoadConfig(self_test=False)).facts.reasons["checkpoint"]
    kind = {"gptq 8 in groups": "8 bits in groups of 64", "packed 8 asymmetric": "8 bits in groups of ",
            "gptq shuffled": "inputs in an order of their own"}.get(name, "floats")
    start = f"{config['quant_method']}: 0 layers are multiplied as they were published"
    assert told.startswith(start) and f" made ordinary weights ({kind}" in told
    assert sum(map(int, re.findall(r", (\d+) made", told))) == 21


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", STREAMED)
def test_floats_and_small_groups_are_multiplied_as_they_are_where_there_is_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                                     name: str, ours: bool) -> None:
    """Eight bits without a loss: activations in float32 stay what they are; beside four bits they become whole numbers, which loses a
    fraction of what bfloat16 would (0.03). Layers that are multiplied together may have scales of their own."""
    if not ours:
        without_compiler(monkeypatch)
    elif not native.available()[0] or not native.takes_narrow(native.EIGHT_FLOATS):
        pytest.skip("no kernel for them here")
    config, form = STREAMED[name]
    source = llama(tmp_path / "source")
    weights = publish(source, tmp_path / "packed", config, form)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32"))
    assert target.facts.invisible, target.facts.invisible_reason
    told = f"{config['quant_method']}: {21 if ours else 0} layers are multiplied as they were published"
    kind = f"4 bits in groups of {name[-2:]}" if name in ("awq 32", "packed 32", "packed 16") else "floats"
    assert target.facts.reasons["checkpoint"] == told + ("" if ours else f", 21 made ordinary weights ({kind})")
    layer = target.parts.layers[0]
    eight = "blocks" in name or "floats" in name or name == "groups"
    form_of = StreamedFloat8Linear if eight else StreamedFoursLinear
    assert {type(part) is form_of for part in (layer.qkv, layer.o, layer.gate_up, layer.down)} == {ours}
    plain = ordinary(source, tmp_path / "ordinary", weights)
    assert off(logits(target), logits(plain, packed=False)) < (1e-4 if eight or not ours else 0.015)
    whole = load_target(plain, LoadConfig(self_test=False)).facts
    assert target.facts.parameters == whole.parameters and (not ours or target.facts.weight_bytes < 0.6 * whole.weight_bytes)


@pytest.mark.parametrize("name", ["awq", "gptq 8", "blocks", "mxfp4"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guessing_changes_nothing(tmp_path: Path, name: str, temperature: float) -> None:
    config, form = ALL[name]
    publish(llama(tmp_path / "source"), tmp_path / "packed", config, form)
    target = load_target(tmp_path / "packed")
    texts = []
    for spec in ("none", "ngram", f"model:{tmp_path / 'packed'}"):
        with Engine(target, spec) as engine:
            sampling = Sampling(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
            texts.append(engine.generate([5, 9, 5, 9, 5], sampling).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_a_layer_that_was_left_whole_stays_whole(tmp_path: Path) -> None:
    """One of three that are multiplied together: all three are ordinary then."""
    source = llama(tmp_path / "source")
    weights = publish(source, tmp_path / "packed", AWQ, packings.awq, ("q_proj.weight", "v_proj.weight", "down_proj.weight"))
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32", self_test=False))
    kinds = (StreamedInt4Linear, Int4Linear)
    layer = target.parts.layers[0]
    assert isinstance(layer.down, kinds) and not isinstance(layer.qkv, kinds) and not isinstance(layer.gate_up, kinds)
    assert off(logits(target), logits(ordinary(source, tmp_path / "ordinary", weights), packed=False)) < 0.08


DELTA = {"head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 8,
         "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
REORDERED: dict[str, dict[str, Any]] = {    # whose products have their outputs in another order than they are published in
    "glm4": {"head_dim": 32},
    "youtu": {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
              "v_head_dim": 32},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 256,
                         "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1},
    "falcon_h1": {"head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_norm_before_gate": False,
                  "ssm_out_multiplier": 0.5, "mlp_multipliers": [0.8, 0.7]},
}


LATENT = {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
          "qk_rope_head_dim": 32, "v_head_dim": 32, "mlp_layer_types": ["dense"] * 3, "layer_types": DELTA["layer_types"]}
RENAMED: dict[str, dict[str, Any]] = {"kimi_linear": {"linear_num_heads": 8, "linear_head_dim": 64}, "bailing_hybrid": {"head_dim": 64}}


@pytest.mark.parametrize("family, form", [(family, form) for form in ("gptq", "packed asymmetric", "whole numbers", "nvfp4")
                                          for family in REORDERED if (family, form) != ("falcon_h1", "whole numbers")])
def test_outputs_in_another_order_stay_levels(tmp_path: Path, family: str, form: str) -> None:
    stay_levels(tmp_path, family, form, REORDERED[family])


@pytest.mark.parametrize("family", RENAMED)
def test_layers_that_files_call_otherwise_stay_levels(tmp_path: Path, family: str) -> None:
    stay_levels(tmp_path, family, "gptq", {**LATENT, **RENAMED[family]})


def stay_levels(tmp_path: Path, family: str, form: str, options: dict[str, Any]) -> None:
    if not native.available()[0]:
        pytest.skip(native.available()[1])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config_of(family, **{**COMMON, "hidden_size": 128, "intermediate_size": 256, **options}))
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 3
    model.save_pretrained(tmp_path / "source")
    with safe_open(tmp_path / "source" / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]    # noqa: SIM118 (not a mapping)
    linears = tuple(name for name in names if not name.startswith(("lm_head", "model.embed", "model.word_embed")))
    weights = publish(tmp_path / "source", tmp_path / "packed", *ALL[form], linears)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32"))
    assert target.facts.invisible and target.facts.reasons["forward pass"].startswith("fused"), target.facts.reasons
    assert f"{len(linears)} layers are multiplied as they were published" in target.facts.reasons["checkpoint"]
    kinds = (StreamedInt4Linear, StreamedInt8Linear, StreamedFloat8Linear, StreamedFoursLinear)
    assert all(isinstance(part, kinds) for layer in target.parts.layers for part in layer.streamed()) and target.parts.layers[0].streamed()
    plain = ordinary(tmp_path / "source", tmp_path / "ordinary", weights)
    assert 0 < off(logits(target), logits(plain, packed=False)) < (0.08 if form in ("gptq", "packed asymmetric") else 0.02)


def test_how_much_a_state_takes_is_no_level_where_all_else_is(tmp_path: Path) -> None:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **{**COMMON, "hidden_size": 128, "intermediate_size": 256,
                                                                            **DELTA})).bfloat16().save_pretrained(tmp_path / "source")
    publish(tmp_path / "source", tmp_path / "packed", *ALL["gptq"], ("in_proj_qkv.weight", "in_proj_z.weight"))
    for folder, more in ((tmp_path / "packed", {}), (tmp_path / "source", {"quantization": "int4"})):
        target = load_target(folder, LoadConfig(dtype="float32", **more))
        layer = target.parts.layers[0]
        assert isinstance(layer.qkv, (StreamedInt4Linear, Int4Linear))
        assert not isinstance(layer.written_kept, (StreamedInt4Linear, Int4Linear))
        assert target.facts.tier == 1 and target.facts.invisible, target.facts.reasons


def test_models_that_are_not_fused(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model("gemma2", **{**COMMON, "head_dim": 16, "query_pre_attn_scalar": 16, "intermediate_size": 192})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    weights = publish(tmp_path / "source", tmp_path / "packed", GPTQ, packings.gptq)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32"), fused=False)
    assert target.facts.invisible and isinstance(target.parts.layers[0].mlp.down_proj, (StreamedInt4Linear, Int4Linear))
    assert off(logits(tmp_path / "packed"), logits(ordinary(tmp_path / "source", tmp_path / "ordinary", weights), packed=False)) < 0.08


def test_asking_for_other_bits_rounds_anew(tmp_path: Path) -> None:
    publish(llama(tmp_path / "source"), tmp_path / "packed", AWQ, packings.awq)
    target = load_target(tmp_path / "packed", LoadConfig(quantization="int8", self_test=False))
    assert isinstance(target.parts.layers[0].qkv, (StreamedInt8Linear, Int8Linear))
    same = load_target(tmp_path / "packed", LoadConfig(quantization="int4", self_test=False))
    assert isinstance(same.parts.layers[0].qkv, (StreamedInt4Linear, Int4Linear))
    assert same.facts.reasons["checkpoint"].startswith("awq: 21 ")


@pytest.mark.parametrize("ours", [True, False])
def test_the_lowest_of_eight_bits(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """A level of -128, which rounding of our own never gives."""
    if not ours:
        without_compiler(monkeypatch)
    q = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    q[:, :2] = 0
    levels = Levels(8, 64, torch.rand(32, 1) + 0.5, torch.full((32, 1), 128.0), lambda: q)
    weight = LevelWeight([levels], torch.float32, torch.device("cpu"))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.values().double().t()
    assert ((int8.linear(weight, None)(x) - expected).abs().max() / expected.std()).item() < 1e-3


@pytest.mark.parametrize("config,form,said", [
    ({**AWQ, "version": "gemv"}, packings.awq, "version is 'gemv'"),
    ({**GPTQ, "checkpoint_format": "marlin"}, packings.gptq, "checkpoint_format is 'marlin'"),
    ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, packings.packed, "transform_config"),
    ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, packings.packed, "sparsity_config"),
    (GPTQ, lambda w: ({"qweight": packings.gptq(w)[0]["qweight"]}, w), "it lacks scales: found qweight int32"),
    (GPTQ, lambda w: packings.gptq(w, 2), "2 bits"),
    ({**GPTQ, "desc_act": True}, lambda w: ({**packings.gptq(w)[0], "g_idx": torch.full(w.shape[1:], 99)}, w), "99"),
    (COMPRESSED, lambda w: ({"weight_packed": torch.zeros(4, 4), "weight_scale": torch.ones(4, 1)}, w), "weight_packed float32 [4, 4]"),
    (COMPRESSED, lambda w: ({**packings.mxfp4(w)[0], "weight_scale": torch.full((len(w), 4), 255, dtype=torch.uint8)}, w), "no numbers"),
    (FP8, lambda w: ({**packings.floats(w)[0], "weight": torch.full(w.shape, torch.nan).to(torch.float8_e4m3fn)}, w), "are no numbers"),
])
def test_what_is_not_read_is_told(tmp_path: Path, config: dict[str, Any], form: Form, said: str) -> None:
    publish(llama(tmp_path / "source"), tmp_path / "packed", config, form)
    with pytest.raises(LoadError, match="load the model that it was made of, or serve --engine vllm") as told:
        load_target(tmp_path / "packed")
    assert said in str(told.value)


def test_a_load_unpacks_levels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To compute values for passes that only compare attention took nine tenths of the load of an 8B model."""
    calls: list[str] = []
    for name in ("grid", "values"):
        whole = getattr(LevelWeight, name)
        monkeypatch.setattr(LevelWeight, name, lambda weight, name=name, whole=whole: (calls.append(name), whole(weight))[1])
    publish(llama(tmp_path / "source"), tmp_path / "packed", AWQ, packings.awq)
    assert load_target(tmp_path / "packed", LoadConfig(self_test=False)).facts.tier == 1
    assert calls == ["grid"] * 12                                     # of three layers: qkv, o, gate and up, down


def test_opened_weights_wait_in_the_type_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 they took four times as much as their file."""
    publish(llama(tmp_path / "source"), tmp_path / "packed", *OPENED["mxfp8"])
    found: set[torch.dtype] = set()
    whole = LlamaForCausalLM.from_pretrained

    def watched(*args: Any, state_dict: dict[str, torch.Tensor], **more: Any) -> Any:
        found.update(weight.dtype for weight in state_dict.values())
        return whole(*args, state_dict=state_dict, **more)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", watched)
    load_target(tmp_path / "packed", LoadConfig(dtype="bfloat16", self_test=False))
    assert found == {torch.bfloat16}


@pytest.mark.parametrize("family,more", [
    ("gemma3", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
    ("mistral3", {"model_type": "mistral", "head_dim": 32, "sliding_window": None}),
    ("qwen3_5", {"head_dim": 32, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_value_heads": 4,
                 "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}),
])
def test_language_models_inside_others(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    """Their layers have other names in the file than in the model; Qwen3.5's ended in a traceback, Gemma 3's became ordinary weights."""
    torch.manual_seed(5)
    seeing = {"hidden_size": 32, "depth": 1, "num_hidden_layers": 1, "num_heads": 2, "num_attention_heads": 2, "intermediate_size": 64,
              "out_hidden_size": 128}
    config = type(AutoConfig.for_model(family))(
        text_config={**COMMON, "hidden_size": 128, "intermediate_size": 256, **more}, vision_config=seeing)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "source")
    names = tuple(filter(re.compile(r".*language_model.*_proj\.weight").match, load_file(tmp_path / "source" / "model.safetensors")))
    weights = publish(tmp_path / "source", tmp_path / "packed", AWQ, packings.awq, names)
    target = load_target(tmp_path / "packed", LoadConfig(dtype="float32", self_test=False))
    assert target.facts.reasons["checkpoint"] == f"awq: {len(names)} layers are multiplied as they were published"
    assert len(names) > 10
    expected = logits(ordinary(tmp_path / "source", tmp_path / "ordinary", weights), packed=False)
    assert 0 < off(logits(target), expected) < 0.08


@pytest.mark.parametrize("kind", ["exl2", "marlin", "higgs"])
def test_other_ways_to_quantise_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """transformers loads what it can of those that it does not know: weights were missing, and nothing told why."""
    publish(llama(tmp_path / "source"), tmp_path / "packed", {"quant_method": kind, "bits": 4}, packings.gptq)
    with pytest.raises(LoadError, match=f"quantised by {kind}: load the model that it was made of, or serve --engine vllm"):
        load_target(tmp_path / "packed")


def hollow(kind: str, layers: int, seed: int, **more: Any) -> Any:
    """A model whose levels nobody can read."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **sizes, **more})).bfloat16().eval()
    for layer in model.model.modules():
        if type(layer) is torch.nn.Linear:
            ones = torch.ones(layer.out_features, 1)
            made = LevelWeight([Levels(4, layer.in_features, ones, ones, lambda: torch.empty(0))], torch.bfloat16, torch.device("cpu"))
            put(layer, "weight", made)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
def test_many_layers_of_random_numbers_are_no_other_attention(seed: int) -> None:
    """What stands in for levels while attention is compared must not enlarge what bfloat16 loses, however deep the model."""
    model = hollow("llama", 100, seed)
    with StandIns(level_weights(model)):
        found = pages_agree(model, 256)
    assert not isinstance(found, str), found


@torch.inference_mode()
@pytest.mark.parametrize("layers", [3, 32])
def test_another_mask_shows_through_random_numbers(layers: int) -> None:
    """By far more than what is allowed for roundings."""
    ids, found = (torch.arange(64) * 7919 % 200)[None], []
    for window in (24, None):
        model = hollow("mistral", layers, 0, sliding_window=window)
        with StandIns(level_weights(model)):
            found.append(model(input_ids=ids, use_cache=False).logits.float())
    assert (found[0] - found[1]).abs().max() > 0.3 * found[1].abs().max()
