"""Quantised checkpoints as their makers publish them, packed number by number, and the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]        # of a layer: its tensors, and its weight float64 [out, in]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned numbers [rows, n] → int32 [rows, n · bits / 32]: number `order[k]` of those of a word at bit k · bits."""
    each = 32 // bits
    order = order or tuple(range(each))
    more = -numbers.shape[1] % each
    rows = torch.nn.functional.pad(numbers.long(), (0, more)).view(numbers.shape[0], -1, each)
    total = sum(rows[..., order[k]] << bits * k for k in range(each))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int().contiguous()


def grid(weight: torch.Tensor, bits: int, group: int, symmetric: bool, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q [out, in], scale of `kind` and zero [out, groups], rounded to nearest."""
    top = (1 << bits) - 1
    groups = weight.float().view(weight.shape[0], -1, group)
    if symmetric:
        scale = (groups.abs().amax(-1) / (top / 2)).to(kind)
        zero = torch.full(scale.shape, 1 << bits - 1)
    else:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = ((high - low) / top).to(kind)
        zero = (-low / scale.float()).round().long().clamp(1, top)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, top).long()
    return q.view(weight.shape), scale, zero


def stands_for(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    of = torch.arange(q.shape[1]) // (q.shape[1] // scale.shape[1]) if of is None else of
    return (q.double() - zero.double()[:, of]) * scale.double()[:, of]


def awq(weight: torch.Tensor, group: int = 64) -> Packed:
    q, scale, zero = grid(weight, 4, group, False, torch.float16)
    tensors = {"qweight": words(q.t(), 4, AWQ_ORDER), "qzeros": words(zero.t(), 4, AWQ_ORDER), "scales": scale.t().contiguous()}
    return tensors, stands_for(q, scale, zero)


def gptq(weight: torch.Tensor, bits: int = 4, group: int = 64, symmetric: bool = False, less: int = 1, shuffled: bool = False) -> Packed:
    """less: what zeros are stored smaller by. shuffled: groups are not of adjoining inputs (`desc_act`)."""
    of = torch.arange(weight.shape[1]) // group
    if shuffled:
        of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(1))]
    order = of.argsort(stable=True)
    q, scale, zero = grid(weight[:, order], bits, group, symmetric, torch.float16)
    q = q[:, order.argsort()]
    tensors = {"qweight": words(q, bits).t().contiguous(), "qzeros": words((zero - less).t(), bits), "scales": scale.t().contiguous(),
               "g_idx": of.int()}
    return tensors, stands_for(q, scale, zero, of)


def packed(weight: torch.Tensor, bits: int = 4, group: int = 64, symmetric: bool = True) -> Packed:
    q, scale, zero = grid(weight, bits, group, symmetric, torch.bfloat16)
    tensors = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    return tensors, stands_for(q, scale, zero)


def whole(weight: torch.Tensor) -> Packed:
    """Eight bits, a scale per output."""
    q, scale, zero = grid(weight, 8, weight.shape[1], True, torch.bfloat16)
    return {"weight": (q - 128).to(torch.int8), "weight_scale": scale}, stands_for(q, scale, zero)


def floats(weight: torch.Tensor, sides: tuple[int, int] = (128, 128), name: str = "weight_scale_inv") -> Packed:
    """E4M3 with a scale for each block of these sides."""
    out, inputs = weight.shape
    of, by = torch.arange(out) // sides[0], torch.arange(inputs) // sides[1]
    scale = torch.zeros(int(of[-1]) + 1, int(by[-1]) + 1)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = weight[of == i][:, by == j].abs().max() / 448
    q = (weight.float() / scale[of][:, by]).to(torch.float8_e4m3fn)
    return {"weight": q, name: scale}, q.double() * scale.double()[of][:, by]


def nvfp4(weight: torch.Tensor, dividing: bool) -> Packed:
    """dividing: as compressed-tensors has it; else as modelopt."""
    whole = weight.float().abs().max() / (448 * 6)
    groups = weight.float().view(weight.shape[0], -1, 16)
    scale = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    step = (scale.float() * whole)[..., None]
    q = ((groups / step.clamp_min(1e-12))[..., None] - E2M1.float()).abs().argmin(-1).view(weight.shape)
    bytes_of = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    if dividing:
        tensors = {"weight_packed": bytes_of, "weight_global_scale": (1 / whole).view(1)}
        whole = 1 / tensors["weight_global_scale"]
    else:
        tensors = {"weight": bytes_of, "weight_scale_2": whole}
    value = E2M1[q].view(weight.shape[0], -1, 16) * (scale.double() * whole.double())[..., None]
    return {**tensors, "weight_scale": scale}, value.view(weight.shape)


def mxfp4(weight: torch.Tensor) -> Packed:
    groups = weight.float().view(weight.shape[0], -1, 32)
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().long()
    step = torch.exp2(exponent.double())[..., None]
    q = ((groups / step.float())[..., None] - E2M1.float()).abs().argmin(-1).view(weight.shape)
    tensors = {"weight_packed": (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8), "weight_scale": (exponent + 127).to(torch.uint8)}
    return tensors, (E2M1[q].view(groups.shape) * step).view(weight.shape)


def mxfp8(weight: torch.Tensor) -> Packed:
    groups = weight.float().view(weight.shape[0], -1, 32)
    exponent = (groups.abs().amax(-1) / 448).log2().ceil().long()
    step = torch.exp2(exponent.double())[..., None]
    q = (groups / step.float()).to(torch.float8_e4m3fn)
    return {"weight": q.view(weight.shape), "weight_scale": (exponent + 127).to(torch.uint8)}, (q.double() * step).view(weight.shape)


def publish(source: Path, to: Path, config: dict[str, Any], form: Callable[[torch.Tensor], Packed],
            names: str | tuple[str, ...] = "proj.weight") -> Tensors:
    """The checkpoint at `source` with layers of these names packed; returns its weights as float64."""
    to.mkdir()
    weights: Tensors = {}
    for file in source.glob("*.safetensors"):
        weights |= load_file(file)
    told = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    for file in source.iterdir():
        if file.suffix == ".json" and file.name not in ("config.json", "model.safetensors.index.json"):
            (to / file.name).write_bytes(file.read_bytes())
    held: Tensors = {}
    for name, weight in weights.items():
        if name.endswith(names):
            tensors, weights[name] = form(weight)
            held |= {name.removesuffix("weight") + kind: tensor.contiguous() for kind, tensor in tensors.items()}
        else:
            held[name] = weight
    save_file(held, to / "model.safetensors", {"format": "pt"})
    return weights
