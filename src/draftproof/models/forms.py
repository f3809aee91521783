"""In which form linear layers keep their weights, and how a load decides. docs/design.md, section 10, sets the forms side by side.

    ordinary weights          `form_of`: packed for a CPU; in tiles, or by our own kernels, on a GPU; else as transformers made them
    --quantization            `form_of`: rounded at load, where this machine multiplies such weights (`ROUNDED`)
    levels of a checkpoint    `keeps`, as it is read: which of them stay; `beside_levels`, as layers are packed: in which form
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import native
from ..config import LoadConfig
from ..errors import LoadError
from . import float8, fours, int4, int8, rows
from .levels import Levels, LevelWeight
from .packed import HeldLinear, Linear, can_pack, packed
from .tiled import TILE_ROWS, TiledLinear


class Rounding(NamedTuple):
    """Weights rounded at load, on one kind of device."""

    linear: Linear
    able: Callable[[], tuple[bool, str]]    # whether this machine multiplies them, and why or why not
    wanted: str                             # which machine does


ROUNDED: dict[str, dict[str, Rounding]] = {  # by --quantization and kind of device
    "int8": {"cpu": Rounding(int8.linear, int8.can_round, "a CPU with a C compiler or AVX2")},
    "int4": {"cpu": Rounding(int4.linear, int4.can_round, "a CPU with a C compiler or AVX2"),
             "cuda": Rounding(int4.TensorCoreInt4Linear, int4.can_round_on_gpu, "a GPU of compute capability 8.0 or more")},
    "fp8": {"cuda": Rounding(float8.linear, float8.can_round, "a GPU of compute capability 8.9 or more")},
}


def form_of(config: LoadConfig, device: torch.device, dtype: torch.dtype, reasons: dict[str, str], ours: bool) -> Linear | None:
    """What makes the linear layers; None: they stay as transformers made them. ours: whether blocks run through our kernels on a GPU.
    Raises LoadError where the quantization that is asked for cannot be had."""
    if config.quantization:
        kinds = ROUNDED[config.quantization]
        found = kinds.get(device.type)
        able, why = found.able() if found else (False, f"the model is on {device}")
        if able and device.type == "cpu" and dtype not in native.TYPES:
            raise LoadError(f"quantization={config.quantization} with {str(dtype).removeprefix('torch.')} activations: expected float32 or "
                            "bfloat16 on a CPU; leave dtype out")
        if found is None or not able:
            raise LoadError(f"quantization={config.quantization}: {why}; expected {' or '.join(kind.wanted for kind in kinds.values())}: "
                            "leave the option out, or load a checkpoint that is quantised for this device")
        by_rows = ours and config.quantization == "fp8"
        reasons["linear layers"] = f"{config.quantization}: {rows.EIGHT if by_rows else why}"
        return rows.linear_of_eight(config.reproducible) if by_rows else found.linear
    if ours:
        many = "all of them" if config.reproducible else f"up to {rows.FEW}, torch's libraries more"
        reasons["linear layers"] = f"by rows: our kernels multiply {many}"
        return rows.linear(config.reproducible)
    if device.type != "cpu":
        tiled, stock = config.reproducible and config.packed, "asked to be fast" if config.packed else "packing is off"
        reasons["linear layers"] = (
            f"tiled: rows are multiplied {TILE_ROWS} at a time: no kernel is chosen by their number" if tiled else f"stock: {stock}")
        return TiledLinear if tiled else None
    able, why = can_pack(dtype) if config.packed else (False, "packing is off")
    reasons["linear layers"] = f"{'packed' if able else 'stock'}: {why}"
    return packed if able else None


def keeps(config: LoadConfig, dtype: torch.dtype, device: torch.device) -> Callable[[Levels], bool]:
    """Which levels of a checkpoint are multiplied as they are; all others become ordinary weights."""
    if not config.packed or device.type == "cpu" and dtype not in native.TYPES:
        return lambda _: False
    able = {name for name, kinds in ROUNDED.items()
            if config.quantization in (None, name) and device.type in kinds and kinds[device.type].able()[0]}

    def kept(levels: Levels) -> bool:
        if published := _as_published(levels):
            asked = config.quantization is None or config.quantization == "int4" and levels.zero is not None
            return asked and device.type == "cpu" and published[1](levels)
        return f"int{levels.bits}" in able and (levels.bits == 4 or int8.takes(levels))

    return kept


def beside_levels(form: Linear | None, device: torch.device) -> Linear:
    """The form in which levels stay what they are, and all else is as `form` has it."""
    def made(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if not isinstance(weight, LevelWeight):
            return (form or HeldLinear)(weight, bias)
        published = _as_published(weight.parts[0])
        return (published[0] if published else ROUNDED[f"int{weight.bits}"][device.type].linear)(weight, bias)

    return made


def _as_published(levels: Levels) -> tuple[Callable[[Any, Tensor | None], nn.Module], Callable[[Levels], bool]] | None:
    """Of levels that no `--quantization` makes: their form on a CPU, and whether our kernels there take them."""
    if levels.zero is None and levels.bits == 8:
        return float8.streamed, float8.takes
    if levels.zero is None or levels.bits == 4 and levels.group % int4.GROUP:
        return fours.StreamedFoursLinear, fours.takes
    return None
