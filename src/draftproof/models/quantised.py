"""Checkpoints whose linear layers others have quantised, read without their libraries, as they are published:

    AWQ (arXiv 2306.00978)    qweight int32 [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; of the eight outputs of
                              a word, lowest bits first: 0 2 4 6 1 3 5 7
    GPTQ (arXiv 2210.17323)   qweight int32 [in · bits / 32, out], qzeros [groups, out · bits / 32], scales [groups, out], g_idx [in]
    compressed-tensors        weight_packed int32 [out, in · bits / 32], weight_scale [out, groups], weight_zero_point, weight_g_idx;
                              a weight of eight bits, whole numbers or E4M3, with a weight_scale of all, an output, a group or a block;
                              NVFP4, MXFP4, MXFP8
    mxfp4                     gpt-oss's experts: …_blocks [experts, out, groups, 16] of MXFP4, …_scales [experts, out, groups]
    fp8, modelopt             a weight of E4M3 with weight_scale_inv of blocks of 128 × 128; with weight_scale; NVFP4

A form that our kernels multiply stays what it is (levels.py): whole numbers in groups of 64, or on most CPUs of 16 and 32, or of outputs;
E4M3 with scales of outputs, or of groups or blocks of 128; E2M1. Every other weight becomes an ordinary one, once, at load. Rounded
activations are not imitated: they stay what they are, which is nearer to the model that was quantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..errors import LoadError, first_line
from .folder import INSTEAD, METHODS, assembled, auto_class, fetched, quantised_by, weight_files
from .level_experts import Gathered, path_of
from .levels import Levels, LevelWeight, level_weights, put
from .placeholder import Placeholder
from .stored import TensorFile

EIGHTS = (torch.int8, torch.float8_e4m3fn)
SCALES = ("weight_scale", "weight_scale_inv")
BESIDE = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
          "weight_g_idx", "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale", "input_zero_point")
ORDER = {"g_idx", "weight_g_idx"}
BLOCKS, EXPONENTS = "_blocks", "_scales"                     # gpt-oss's endings

Keeps = Callable[[Levels], bool]                # whether a layer of these levels is to be multiplied as it is


def method(found: Any) -> dict[str, Any] | None:
    """A `quantization_config` as `load` takes it; None for what is not quantised, or is read by transformers alone. Raises LoadError."""
    name, told = quantised_by(found)
    if name not in METHODS:
        return None
    for key, expected in (("version", ("gemm", None)), ("checkpoint_format", ("gptq", "gptq_v2", None)), ("sparsity_config", (None, {})),
                          ("transform_config", (None, {}))):
        if told.get(key) not in expected and not (isinstance(told.get(key), dict) and told[key].get("format") == "dense"):
            raise LoadError(f"{name}: its {key} is {told[key]!r}, which is not read here; expected {expected[0] or 'none'}: {INSTEAD}")
    return {**told, "quant_method": name}


def load(path: str, config: Any, told: Mapping[str, Any], dtype: torch.dtype, device: torch.device, keeps: Keeps,
         trust_remote_code: bool) -> tuple[Any, Any, str]:
    """(the model, what transformers says of the load, what became of the layers). Raises LoadError."""
    plain = deepcopy(config)
    for part in {id(part): part for part in (plain, plain.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        empty = auto_class(plain).from_config(plain, trust_remote_code=trust_remote_code)
    places = {path_of(name): name for name, layer in empty.named_modules() if type(layer) is nn.Linear}
    experts, folder = Gathered(empty, keeps if device.type == "cpu" else lambda _: False), fetched(path)
    weights: dict[str, Tensor] = {}
    kept: dict[str, Placeholder] = {}                                           # by names in the model
    opened: Counter[str] = Counter()
    for name, found, kind in _layers(folder, told, dtype):
        if not isinstance(found, Levels):
            weights[name] = found
            opened.update([kind] if kind else ())
        elif (place := places.get(path_of(name))) and empty.get_submodule(place).weight.shape == found.shape and keeps(found):
            kept[f"{place}.weight"] = LevelWeight([found], dtype, device)
        elif not experts.take(name, found):                                     # those of an expert wait for all others
            weights[f"{name}.weight"] = found.values().to(dtype)
            opened[kind] += 1
    kept |= experts.whole(dtype, device)
    weights |= {name: torch.zeros(1, dtype=dtype).expand(weight.shape) for name, weight in kept.items()}    # its place, without memory
    for name, weight, all_of_it in experts.others(dtype):
        weights[name] = weight
        opened.update(map(_kind, all_of_it))
    model, info = assembled(type(empty), empty.config, weights, dtype, folder)
    for name, levels in kept.items():
        put(model, name, levels)
    count = sum(len(weight.parts) for weight in level_weights(model))
    others = "".join(f", {count} made ordinary weights ({kind})" for kind, count in opened.items())
    return model, info, f"{told['quant_method']}: {count} layers are multiplied as they were published{others}"


def _kind(levels: Levels) -> str:
    return "floats" if levels.zero is None else f"{levels.bits} bits in groups of {levels.group}"


def _layers(folder: Path, told: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Levels | Tensor, str]]:
    """Of all files: names of layers with their levels, or names of weights; and in which form they were quantised, if they were. Weights of
    such are of this type."""
    files, where = weight_files(folder), dict[str, Path]()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)
    stacks = [name.removesuffix(BLOCKS) for name in where if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + EXPONENTS in where]
    layers, whole = _sorted([name for name in where if name.removesuffix(BLOCKS).removesuffix(EXPONENTS) not in stacks])
    for file in files:
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name), "") for name in whole if where[name] == file)
    read = {file: TensorFile(file) for file in files}
    for layer, kinds in layers.items():
        found = _read(layer, _Stored(layer, {kind: read[where[f"{layer}.{kind}"]] for kind in kinds}), told)
        if isinstance(found, Levels):
            yield layer, found, _kind(found)
        else:
            yield f"{layer}.weight", found.to(dtype), "inputs in an order of their own" if ORDER & set(kinds) else "floats"
    for stack in stacks:
        blocks, exponents = (read[where[stack + part]] for part in (BLOCKS, EXPONENTS))
        yield from ((layer, found, _kind(found)) for layer, found in _stacked(stack, blocks, exponents))


def _stacked(stack: str, blocks: TensorFile, exponents: TensorFile) -> Iterator[tuple[str, Levels]]:
    """The layers of experts that lie together, as layers that stand alone are called."""
    place, _, kind = stack.rpartition(".")
    for number, scale in enumerate(exponents.get(stack + EXPONENTS)):
        def read(number: int = number) -> Tensor:
            return _numbers(blocks.get(stack + BLOCKS, number).flatten(1), 4)

        yield f"{place}.{number}.{kind}", Levels(4, 32 * scale.shape[1], _steps(scale), None, read)


def _sorted(names: Collection[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Layers with the kinds of their tensors, and all other names."""
    layers: dict[str, list[str]] = {}
    whole: list[str] = []
    known = set(names)                                      # there may be a hundred thousand
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind in BESIDE or kind == "weight" and any(f"{layer}.{scale}" in known for scale in SCALES):
            layers.setdefault(layer, []).append(kind)
        else:
            whole.append(name)
    return layers, whole


def ordinary(tensors: Mapping[str, Tensor], told: Mapping[str, Any] | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors by name, those of quantised layers as weights of this type instead. told: as `method` has it; without it only fp8's blocks,
    whose names belong to no other form, are read, and the rest is left. Raises LoadError."""
    layers, whole = _sorted(tensors)
    found = {name: tensors[name] for name in whole}
    for layer, kinds in layers.items():
        held = {kind: tensors[f"{layer}.{kind}"] for kind in kinds}
        if told is None and "weight_scale_inv" not in held:
            found |= {f"{layer}.{kind}": tensor for kind, tensor in held.items()}
        else:
            read = _read(layer, held, told or {"quant_method": "fp8"})
            found[f"{layer}.weight"] = (read.values() if isinstance(read, Levels) else read).to(dtype)
    return found


class _Stored(Mapping[str, Tensor]):
    """A layer's tensors by kind. Each is read when it is asked for, so that files leave memory as layers are arranged."""

    def __init__(self, layer: str, files: Mapping[str, TensorFile]) -> None:
        self._layer, self._files = layer, files

    def __getitem__(self, kind: str) -> Tensor:
        return self._files[kind].get(f"{self._layer}.{kind}")

    def types(self) -> dict[str, torch.dtype]:
        return {kind: file.type_of(f"{self._layer}.{kind}") for kind, file in self._files.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _read(layer: str, tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> Levels | Tensor:
    """What the tensors of a layer say. Raises LoadError."""
    types = tensors.types() if isinstance(tensors, _Stored) else {kind: tensor.dtype for kind, tensor in tensors.items()}
    four = next((kind for kind in ("weight_packed", "weight") if types.get(kind) == torch.uint8), None)
    try:
        if types.get("qweight") == torch.int32:
            return _awq(tensors) if told["quant_method"] == "awq" else _gptq(tensors, told.get("checkpoint_format") != "gptq_v2")
        if types.get("weight_packed") == torch.int32:
            return _packed(tensors)
        if four is not None:
            return _fours(four, tensors)
        if types.get("weight") in EIGHTS:
            return _eights(tensors)
        why = "it is of another form"
    except KeyError as error:
        why = f"it lacks {error.args[0]}"
    except (RuntimeError, AssertionError, IndexError) as error:
        why = first_line(error)
    found = ", ".join(f"{kind} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for kind, tensor in tensors.items())
    raise LoadError(f"{layer}: {why}: found {found}, expected whole numbers or floats of four or eight bits as {told['quant_method']} "
                    f"packs them; {INSTEAD}")


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] → uint8 [rows, n · 32 / bits], the first in the lowest bits."""
    found = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one column counts as contiguous, with any strides
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(-2)


def _levels(bits: int, inputs: int, scale: Tensor, zero: Tensor, read: Callable[[], Tensor],
            order: Tensor | None = None) -> Levels | Tensor:
    """Levels, or the values of a weight whose inputs lie in groups by `order` [in]."""
    groups = scale.shape[1]
    assert bits in (4, 8) and inputs % groups == 0 and zero.shape == scale.shape, f"{bits} bits, {inputs} inputs in {groups} groups"
    found = Levels(bits, inputs, scale.clone(memory_format=torch.contiguous_format), zero.contiguous(), read)
    if order is None or bool((order < 0).all()) or torch.equal(order.long(), torch.arange(inputs) // found.group):
        return found
    of = order.long()
    return (read().float() - zero.float()[:, of]) * scale.float()[:, of]


def _awq(tensors: Mapping[str, Tensor]) -> Levels | Tensor:
    def outputs(kind: str) -> Tensor:
        inputs, eights = tensors[kind].shape
        octets = tensors[kind].t().flatten().view(torch.uint8).view(eights, inputs, 4).mT.reshape(eights, 2, 2, inputs)
        return torch.stack((octets & 15, octets >> 4), 3).permute(0, 2, 3, 1, 4).reshape(-1, inputs)

    return _levels(4, tensors["qweight"].shape[0], tensors["scales"].t(), outputs("qzeros"), lambda: outputs("qweight"))


def _gptq(tensors: Mapping[str, Tensor], one_less: bool) -> Levels | Tensor:
    """one_less: zeros are stored so."""
    scale, zeros = tensors["scales"].t(), tensors["qzeros"]
    bits = 32 * zeros.shape[1] // scale.shape[0]
    inputs, zero = tensors["qweight"].shape[0] * 32 // bits, _numbers(zeros, bits).t().short() + one_less
    return _levels(bits, inputs, scale, zero, lambda: _numbers(tensors["qweight"].t(), bits), tensors.get("g_idx"))


def _packed(tensors: Mapping[str, Tensor]) -> Levels | Tensor:
    (out, inputs), zeros = map(int, tensors["weight_shape"]), tensors.get("weight_zero_point")
    bits, scale = 32 * tensors["weight_packed"].shape[1] // inputs, _table(tensors["weight_scale"], out)
    zero = torch.full(scale.shape, 1 << bits - 1, dtype=torch.uint8) if zeros is None else _numbers(zeros.t(), bits).t()[:out]
    return _levels(bits, inputs, scale, zero, lambda: _numbers(tensors["weight_packed"], bits)[:, :inputs].contiguous(),
                   tensors.get("weight_g_idx"))


def _eights(tensors: Mapping[str, Tensor]) -> Levels | Tensor:
    """Whole numbers with a scale per output or group are levels, floats are if no block of inputs is cut; all else has values."""
    weight = tensors["weight"]
    (out, inputs), scale = weight.shape, _steps(next(tensors[name] for name in SCALES if name in tensors))
    zeros, table = tensors.get("weight_zero_point"), _table(scale, out)
    if weight.dtype == torch.int8 and table.shape[0] == out:
        zero = torch.zeros_like(table) if zeros is None else _table(zeros.float(), out)
        return _levels(8, inputs, table, zero + 128, lambda: tensors["weight"].view(torch.uint8) ^ 128, tensors.get("weight_g_idx"))
    tall, wide = _side(out, table.shape[0]), _side(inputs, table.shape[1])
    assert table.shape == (-(-out // tall), -(-inputs // wide)), f"a scale {list(scale.shape)} of a weight {[out, inputs]}"
    if weight.dtype == torch.float8_e4m3fn:
        assert not (weight.view(torch.uint8) & 127 == 127).any(), "some of its weights are no numbers"
        if inputs % wide == 0:
            return Levels(8, inputs, table.repeat_interleave(tall, 0)[:out], None, lambda: tensors["weight"])
    return weight.float() * table.repeat_interleave(tall, 0)[:out].repeat_interleave(wide, 1)[:, :inputs]


def _steps(scale: Tensor) -> Tensor:
    """float32; bytes are the exponents of powers of two, and 127 (OCP Microscaling Formats, 2023)."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _table(scale: Tensor, out: int) -> Tensor:
    """A scale of all, of outputs, of groups or of blocks, as [outputs or rows of blocks, groups or columns of blocks]."""
    table = scale.view(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    return table.expand(out, -1) if table.numel() == 1 else table


def _side(size: int, count: int) -> int:
    """Of a block, where `count` of them cover `size`, the last perhaps in part: a power of two, or all."""
    return size if count == 1 else 1 << (-(-size // count) - 1).bit_length()


def _fours(kind: str, tensors: Mapping[str, Tensor]) -> Levels:
    """Of the tensor of this kind: E2M1, the first input in the lower half of a byte; a scale for sixteen of them, of E4M3, and one for all,
    which either divides (compressed-tensors' NVFP4) or multiplies (modelopt's); or a power of two for thirty-two (MXFP4)."""
    steps, (out, halves) = _steps(tensors["weight_scale"]), tensors[kind].shape
    if "weight_global_scale" in tensors:
        steps = steps / tensors["weight_global_scale"].float()
    elif "weight_scale_2" in tensors:
        steps = steps * tensors["weight_scale_2"].float()
    assert steps.shape[0] == out and 2 * halves % steps.shape[1] == 0, f"a scale {list(steps.shape)} of a weight {[out, 2 * halves]}"
    assert steps.isfinite().all(), "some of its scales are no numbers"
    return Levels(4, 2 * halves, steps, None, lambda: _numbers(tensors[kind], 4))
