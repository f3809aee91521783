"""Keys and values kept in eight bits (`cache_bits=8`, `--cache-bits 8`): of each head a level a number, and their step.

A head [n] is stored as n levels, int8, and behind them the step, float32, four bytes more: a number is near level · step. The step is the
head's own, so what a text is told depends on its tokens alone, and guesses stay invisible. kernels/attention.c rounds and reads heads
so; a query meets their levels as whole numbers, whose sums are exact. What stands here is its plain twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError
from ..native import BEHIND

LEAST = 2.0**-100  # of far less there is no inverse
MOST = 512  # numbers of a head (kernels/lanes.h, SPAN)


def rounded(heads: Tensor) -> Tensor:
    """heads [..., n] → int8 [..., n + 4]. A head with a number that is not finite has a step that is none, either."""
    wide = heads.float()
    greatest = wide.abs().amax(-1, keepdim=True)
    inverse = torch.div(torch.tensor(127.0), greatest.clamp_min(LEAST))
    inverse = inverse.view(torch.int32).bitwise_and(~255).view(torch.float32)  # its product with a number is exact
    step = torch.where(greatest < float("inf"), 1 / inverse, float("nan"))
    levels = (wide * inverse).round().nan_to_num(0).to(torch.int8)
    return torch.cat([levels, step.view(torch.int8)], -1)


def opened(kept: Tensor) -> Tensor:
    """int8 [..., n + 4] → bfloat16 [..., n]; what is not of int8 stays as it is."""
    if kept.dtype != torch.int8:
        return kept
    step = kept[..., -BEHIND:].contiguous().view(torch.float32)
    return (kept[..., :-BEHIND].float() * step).bfloat16()


def head_bytes(numbers: int, dtype: torch.dtype, in_levels: bool) -> int:
    """Of a head of keys or values, as it is kept."""
    return numbers + BEHIND if in_levels else numbers * dtype.itemsize


def require_levels(layers: Sequence[Any] | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises LoadError where keys and values cannot be kept so. layers: those of a fused pass; None: the model has none."""
    dims = {dim for layer in layers or () if layer.kv_heads for dim in (layer.head_dim, layer.value_dim)}
    if device.type != "cpu":
        why = f"the model is on {device}"
    elif layers is None:
        why = "its layers are not run by our own pass (see \"forward pass\")"
    elif dtype != torch.bfloat16:
        why = f"its numbers are {str(dtype).removeprefix('torch.')}"
    elif any(dim % 2 or dim > MOST for dim in dims):
        why = f"its heads have {' and '.join(map(str, sorted(dims)))} numbers"
    elif not dims:
        why = "no layer of it keeps keys"
    else:
        return
    raise LoadError(f"cache_bits=8: {why}; expected a bfloat16 model of a family that is fused, on a CPU, whose heads have an even number "
                    f"of numbers, at most {MOST}: leave the option out")
