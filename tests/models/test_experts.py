"""Experts by our own products against transformers' and against their own steps; rows that feel nobody; routers; and what a load says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof import native
from draftproof.config import LoadConfig
from draftproof.mixtures import route
from draftproof.models import int4, int8
from draftproof.models.experts import Experts, RouterWeight, are_experts, routers, take_experts
from draftproof.models.families import FAMILIES
from draftproof.models.load import load_target
from draftproof.models.packed import HeldLinear, PackedLinear, StreamedLinear, pack, packed
from draftproof.models.paged import PagedTarget
from draftproof.models.routed import Routed, bias_of
from draftproof.models.tiled import TiledLinear

compiled = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
HIDDEN, INNER, COUNT, EACH = 96, 72, 8, 3
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_local_experts": COUNT,
         "num_experts": COUNT, "n_routed_experts": COUNT, "num_experts_per_tok": EACH, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": None}
KINDS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_text", "nemotron_h")    # silu gates; limits, biases, turned weights; gelu; no gate
PLACES = {"gemma4_text": {"enable_moe_block": True, "top_k_experts": EACH, "head_dim": 32, "hidden_size_per_layer_input": 0},
          "nemotron_h": {"layers_block_type": ["moe"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}}


def experts(kind: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """transformers' experts with random weights that are all bfloat16 numbers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **PLACES.get(kind, {})), dtype=dtype)
    found = next(module for module in model.modules() if are_experts(module))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 0.1).copy_(parameter.bfloat16())
    return found.requires_grad_(False)


def asked(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(COUNT, generator=random)[:EACH] for _ in range(rows)])
    return torch.randn(rows, HIDDEN, generator=random).to(dtype), chosen, torch.rand(rows, EACH, generator=random).to(dtype)


@pytest.mark.parametrize("form", [HeldLinear, packed, int8.linear, int4.linear, TiledLinear], ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_transformers(kind: str, dtype: torch.dtype, tolerance: float, form: Any) -> None:
    """Rounded weights are those that a linear layer of the form has, too."""
    theirs = experts(kind, dtype)
    ours = Experts(copy.deepcopy(theirs), form)
    if form in (int8.linear, int4.linear):
        tolerance = 0.08 if form is int8.linear else 0.4
    for rows in (1, 2, 7, 40, 150):
        x, chosen, weights = asked(rows, dtype)
        want, found = theirs(x, chosen, weights).float(), ours(x, chosen, weights).float()
        assert found.shape == want.shape and float((found - want).abs().max()) <= tolerance * float(want.abs().max()), rows


@compiled
@pytest.mark.parametrize("form", [packed, int8.linear, int4.linear], ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", native.TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_its_steps_and_a_row_does_not_feel_the_others(kind: str, dtype: torch.dtype, form: Any, other_kernels: None) -> None:
    ours = Experts(experts(kind, dtype), form)
    assert ours.compiled
    for rows in (1, 2, 5, 33, 150):
        x, chosen, weights = asked(rows, dtype, rows)
        found = ours(x, chosen, weights)
        near = 1e-5 if dtype == torch.float32 and form is packed else 0.01          # inner numbers are rounded, some on an edge
        assert torch.allclose(found.float(), ours.steps(x, chosen, weights).float(), rtol=near, atol=near)
        assert torch.equal(found, torch.cat([ours(x[i:i + 1], chosen[i:i + 1], weights[i:i + 1]) for i in range(rows)]))
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(found[order], ours(x[order], chosen[order], weights[order]))


@pytest.mark.parametrize("form", [HeldLinear, packed], ids=lambda form: form.__name__)
def test_experts_need_not_say_whether_a_norm_stands_behind_each(form: Any) -> None:
    """Those of transformers 5.17 do not."""
    theirs = experts("qwen3_moe", torch.float32)
    x, chosen, weights = asked(5, torch.float32)
    want = theirs(x, chosen, weights)
    vars(theirs).pop("has_post_expert_norm", None)
    ours = Experts(theirs, form)
    assert torch.allclose(ours(x, chosen, weights), want, atol=1e-5) and torch.allclose(ours.steps(x, chosen, weights), want, atol=1e-5)


@compiled
@pytest.mark.parametrize("inner", [12, 72])
def test_limits_of_a_gate_are_kept_and_what_is_no_number_stays_so(inner: int) -> None:
    theirs = experts("gpt_oss", torch.float32)
    for name, size in (("gate_up_proj", 2 * inner), ("gate_up_proj_bias", 2 * inner)):
        setattr(theirs, name, nn.Parameter(getattr(theirs, name)[..., :size] * 32, requires_grad=False))
    theirs.down_proj = nn.Parameter(theirs.down_proj[:, :inner], requires_grad=False)
    ours = Experts(copy.deepcopy(theirs), packed)
    assert ours.compiled
    x, chosen, weights = asked(40, torch.float32)
    assert torch.allclose(ours(x, chosen, weights), theirs(x, chosen, weights), rtol=1e-4, atol=1e-4)
    x[3, 0] = torch.nan
    assert ours(x, chosen, weights).isnan().any(-1).tolist() == [row == 3 for row in range(40)]


@compiled
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_moves_no_bit(threads: int) -> None:
    ours, before = Experts(experts("qwen3_moe", torch.bfloat16), packed), torch.get_num_threads()
    found = {}
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found[count] = [ours(*asked(rows, torch.bfloat16, rows)) for rows in (1, 3, 20, 200)]
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found[1], found[threads]))


@compiled
def test_experts_whose_weights_do_not_fit_twelve_bits_stand_beside_others() -> None:
    theirs = experts("qwen3_moe", torch.bfloat16)
    spread = torch.randn(INNER, HIDDEN, generator=torch.Generator().manual_seed(1)).mul(12).exp2()
    theirs.gate_up_proj[2, :INNER] = (theirs.gate_up_proj[2, :INNER].float() * spread).bfloat16()
    ours = Experts(copy.deepcopy(theirs), packed)
    if native.takes_narrow():
        assert {layer.bits for layer in ours.first} == {12, 16}
    for rows in (1, 6, 30, 120):
        x, chosen, weights = asked(rows, torch.bfloat16, 2)
        want, found = theirs(x, chosen, weights).float(), ours(x, chosen, weights)
        assert float((found.float() - want).abs().max()) <= 0.01 * float(want.abs().max())
        assert torch.equal(found, torch.cat([ours(x[i:i + 1], chosen[i:i + 1], weights[i:i + 1]) for i in range(rows)]))


@pytest.mark.parametrize("form", [HeldLinear, packed], ids=lambda form: form.__name__)
def test_an_expert_that_there_is_not_adds_nothing(form: Any) -> None:
    ours = Experts(experts("qwen3_moe", torch.float32), form)
    x, chosen, weights = asked(6, torch.float32)
    none, without = chosen.clone(), weights.clone()
    none[1, 0] = none[4, 2] = none[5] = COUNT
    without[1, 0] = without[4, 2] = without[5] = 0
    assert torch.allclose(ours(x, none, weights), ours(x, chosen, without), atol=1e-6)
    assert not ours(x, none, weights)[5].any()
    assert not ours(x, torch.full_like(chosen, COUNT), weights).any() and ours(x[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)


ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {}, "mixtral": {}, "olmoe": {}, "minimax_m2": {}, "gpt_oss": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 3 * INNER},
    "glm4_moe": {"n_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    "deepseek_v2": {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": COUNT, "moe_k": EACH, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    "gemma4_text": PLACES["gemma4_text"],
    "phimoe": {"num_experts_per_tok": 2, "router_jitter_noise": 0.25},
    "kolibri1": {"shared_expert_intermediate_size": INNER}, "cohere2_moe": {"num_shared_experts": 2},
    "llama4_text": {"intermediate_size_mlp": INNER, "interleave_moe_layer_step": 1},
}


def routed(kind: str, dtype: torch.dtype, form: Any = packed) -> tuple[Routed, Any]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **ROUTED[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
    block = next(module for module in model.modules() if hasattr(module, "experts"))
    for parameter in block.parameters():
        parameter.normal_(0, 0.3).copy_(parameter.bfloat16())
    if (bias := bias_of(block)) is not None:
        bias.normal_(0, 0.2)
    return Routed(copy.deepcopy(block), form, FAMILIES[kind].routing(block)), block


@compiled
@pytest.mark.parametrize("dtype", native.TYPES, ids=str)
@pytest.mark.parametrize("kind", ROUTED)
def test_a_router_takes_the_worthiest_and_of_equals_the_first(kind: str, dtype: torch.dtype, other_kernels: None) -> None:
    ours, theirs = routed(kind, dtype)
    assert ours.compiled and ours._mixture is not None
    columns, of_logits = ours.router.out_features, torch.float32 if ours.routing.wide else dtype
    logits = torch.randn(200, columns, generator=torch.Generator().manual_seed(3)).mul(2).round().to(of_logits)    # many of them are equal
    chosen, weights = route(ours._mixture, logits, dtype)
    plain, law = ours.choose(logits, dtype)
    assert torch.equal(chosen, plain) and torch.allclose(weights, law.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert sum(len(set(row)) < COUNT for row in logits.tolist()) > 100
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    if kind == "gemma4_text":                                                   # its router has a norm of its own
        _, law, of = theirs.router(x)
        asked = theirs.router.norm(x) * theirs.router.scale * theirs.router.scalar_root_size
        want, found = theirs.experts(x, of, law), ours(x, asked).float()
    else:
        want, found = theirs(x[None]), ours(x).float()
    want = (want[0] if isinstance(want, tuple) else want).view(30, HIDDEN).float()
    apart = (want - found).abs().amax(-1) > (0.02 if dtype == torch.bfloat16 else 1e-5) * want.abs().max()
    assert int(apart.sum()) <= (2 if dtype == torch.bfloat16 else 0)            # rows whose router sits on an edge


@compiled
def test_what_is_no_number_reaches_its_own_row_alone() -> None:
    ours, _ = routed("qwen3_moe", torch.bfloat16)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    want = ours(x)
    x[2, 7] = torch.nan
    found = ours(x)
    assert found[2].isnan().all() and all(torch.equal(found[i], want[i]) for i in (0, 1, 3, 4))


@compiled
@pytest.mark.parametrize("widened", [None, lambda x: x.float(), lambda x: x.type(torch.float32), lambda x: x.to(torch.float32)])
def test_a_routers_weight_is_multiplied_by_rows_that_do_not_feel_each_other(widened: Callable[[Tensor], Tensor] | None) -> None:
    weight = torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(6)).bfloat16()
    held = RouterWeight(packed(weight, None), weight, weight.dtype)             # type: ignore[arg-type]
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(widened(x), widened(weight)) if widened else functional.linear(x, weight)

    found, want = logits(x, held), logits(x, weight)
    assert not widened or isinstance(widened(held), RouterWeight), "the product is ours in float32, too"
    assert found.dtype == want.dtype and torch.allclose(found, want, rtol=0.01, atol=0.05)
    assert torch.equal(found, torch.cat([logits(x[i:i + 1], held) for i in range(9)]))
    bias = torch.randn(COUNT, generator=torch.Generator().manual_seed(8)).bfloat16()
    assert torch.equal(functional.linear(x, held, bias), functional.linear(x, held) + bias)
    assert torch.equal(x @ held.t(), x @ weight.t()) and held.shape == weight.shape and held.float().dtype == torch.float32
    assert torch.equal(held.float() * 2, weight.float() * 2) and torch.equal(torch.cat([held, held]), torch.cat([weight, weight]))


@compiled
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "deepseek_v3"])
def test_speculation_is_invisible_with_experts_in_bfloat16(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router on the edge chose other experts for a rounding's sake: our attention seemed another, and rows felt each other."""
    more = {**families.MOE, "head_dim": 16, "n_routed_experts": 4, "moe_num_experts": 4, "moe_k": 2, "n_group": 1, "topk_group": 1,
            "shared_expert_intermediate_size": 48, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_hidden_layers": 4,
            **({"num_key_value_heads": 4} if family == "deepseek_v3" else {})}
    monkeypatch.setitem(families.FAMILIES, family, more)
    families.build(family).bfloat16().save_pretrained(tmp_path)
    target = load_target(tmp_path, LoadConfig(device="cpu", dtype="bfloat16", page_tokens=16))
    assert isinstance(target, PagedTarget), target.facts.reasons
    assert target.facts.invisible, target.facts.invisible_reason


def test_routers_are_not_rounded_with_other_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.gate, self.shared = experts("qwen3_moe", torch.bfloat16), nn.Linear(HIDDEN, COUNT), nn.Linear(HIDDEN, HIDDEN)

    block = Block().requires_grad_(False)
    for layer in (block.gate, block.shared):
        layer.weight.copy_(layer.weight.bfloat16())
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(9))
    want = block.gate(x)
    take_experts(block, int4.linear)
    pack(block, int4.linear)
    assert torch.allclose(block.gate(x), want, atol=1e-4) and type(block.shared) not in (nn.Linear, type(block.gate))


INSIDE: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 0, "num_shared_experts": 1}, "hunyuan_v1_moe": {"moe_topk": EACH, "head_dim": 32},
    "gemma4_text": PLACES["gemma4_text"],
    "zaya": {"num_experts_per_tok": 1, "head_dim": 32},
}


@compiled
@pytest.mark.parametrize("kind", INSIDE)
def test_nor_are_linear_layers_inside_of_routers(kind: str) -> None:
    """A router of four bits chooses other experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **INSIDE[kind]}), dtype=torch.bfloat16)
    model.requires_grad_(False)
    inside = {name for name, layer in model.named_modules() if layer in routers(model) and type(layer) is nn.Linear}
    assert inside and all("router" in name or "gate" in name for name in inside)
    take_experts(model, int4.linear)
    pack(model, int4.linear)
    rounded = {name for name, layer in model.named_modules() if isinstance(layer, StreamedLinear) and layer.bits == 4}
    assert any("experts" in name for name in rounded) and any("proj" in name for name in rounded) and not inside & rounded


def test_experts_are_taken_wherever_they_stand_and_routers_beside_them() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **{**SIZES, "num_hidden_layers": 2}), dtype=torch.bfloat16)
    model.requires_grad_(False)
    want = model(input_ids=torch.tensor([[1, 2, 3]])).logits.float()
    take_experts(model, packed)
    found = [module for module in model.modules() if isinstance(module, Experts)]
    assert len(found) == 2 and not any(are_experts(module) for module in model.modules())
    if native.available()[0]:
        assert all(isinstance(layer.mlp.gate.weight, RouterWeight) for layer in model.model.layers)
    assert float((model(input_ids=torch.tensor([[1, 2, 3]])).logits.float() - want).abs().max()) <= 0.05 * float(want.abs().max())
    assert not [name for name, parameter in model.named_parameters() if isinstance(parameter, nn.Parameter) and parameter.dim() == 3]


def test_no_product_of_an_expert_sees_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN adds up 2048 numbers of one row in another order. Plain decoding runs a row twice, of a wider pass an expert may get one."""
    monkeypatch.setitem(SIZES, "hidden_size", 2048)
    theirs = experts("qwen3_moe", torch.float32)
    theirs.gate_up_proj.normal_(0, 0.1)                     # what is no bfloat16
    ours = Experts(theirs, PackedLinear)
    x, apart = torch.randn(COUNT, 2048), list(range(COUNT + 1))
    found = ours._multiplied(0, x, apart)
    for expert in range(COUNT):
        twice = ours._multiplied(0, x[[expert, expert]], [0] * (expert + 1) + [2] * (COUNT - expert))
        assert torch.equal(found[expert], twice[0]) and torch.equal(found[expert], twice[1])
