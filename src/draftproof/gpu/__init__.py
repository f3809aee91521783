"""Kernels for a GPU, in Triton, which torch's builds for CUDA bring along: what a pass over few rows spends its time on.

    kernels.py   product, norm, rotation and cache, attention over pages, as Triton compiles them
    calls.py     the same as functions of tensors, with the sizes of their blocks

Nothing outside `models` calls them, and nothing imports Triton before it is asked for. Their plain twins are the ways of torch there.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import first_line

BLOCK = 64  # keys of a page are a multiple of it
QUERIES = 32  # of a tile of attention: rows times the query heads of a key head; one size, below that of other matrix instructions
LEAST = (8, 0)  # compute capability: products of bfloat16


class Tiles(NamedTuple):
    """How the rows of a pass attend. position [rows]: of each; take [paths · tiles · seats]: the rows in the seats of each path's tiles,
    −1 where one is empty; table [paths, most]: the pages of each path from its text's beginning on; tiles: of each path."""

    position: Tensor
    take: Tensor
    table: Tensor
    tiles: int


def seats(group: int) -> int:
    """Rows of one path that a tile of attention holds."""
    return QUERIES // group


@cache
def available(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether the kernels run on this device with this type, and why or why not."""
    if device.type != "cuda":
        return False, f"the model is on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return False, f"{dtype} has no tensor cores"
    if torch.cuda.get_device_capability(device) < LEAST:
        return False, f"the GPU has compute capability {torch.cuda.get_device_capability(device)[0]}.x"
    try:
        from .calls import norm

        norm(torch.ones(1, BLOCK, dtype=dtype, device=device), torch.ones(BLOCK, dtype=dtype, device=device), 1e-5)
    except Exception as error:  # no Triton, no C compiler for what it launches with, or a GPU that it does not know
        return False, f"Triton does not run here ({first_line(error)})"
    return True, "ours, in Triton"
