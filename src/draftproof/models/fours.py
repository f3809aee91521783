"""Linear layers whose weights others have rounded to sixteen numbers in groups of 32 or 16 inputs, by our kernels on a CPU: five or six
bits a weight, with the steps.

    w = (q − zero) · s             q whole, AWQ's, GPTQ's and compressed-tensors' small groups
    w = v · s                      v of E2M1, a sign and 0 ½ 1 1½ 2 3 4 6 (MXFP4: OCP Microscaling Formats, 2023; NVFP4)

Twice a number of E2M1 is whole, and a kernel looks up what a level stands for, so both are multiplied alike (kernels/integers.c): the
inputs of a group become integers below 2¹¹ in size, times a power of two, and what a group adds up to has no order. Steps keep nineteen
bits: those of a bfloat16 or a half lose nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from .levels import E2M1, Levels, LevelWeight
from .packed import StreamedLinear

ZEROS = 32  # that the last five bits of a step can be


class StreamedFoursLinear(StreamedLinear):
    """y = x Wᵀ + b, of a weight of levels that `takes` lets in."""

    def _arrange(self, weight: Tensor) -> tuple[Tensor, int]:
        assert isinstance(weight, LevelWeight), type(weight)
        q, scale, zero = weight.grid()
        group = weight.parts[0].group
        size = 16 if group % 32 else 32
        self.bits = native.FOUR_BY_16 if group % 32 else native.FOUR_BY_32
        table = torch.arange(16.0)
        if zero is None:
            scale, table = scale / 2, 2 * E2M1 + 2 * E2M1.max()
            zero = torch.full_like(scale, float(2 * E2M1.max()))
        words = scale.contiguous().view(torch.int32) + ZEROS // 2 & ~(ZEROS - 1) | zero.int()
        panels = native.arrange_four(q, words.repeat_interleave(group // size, 1), table.to(torch.uint8))
        return panels, panels.nbytes


def takes(levels: Levels) -> bool:
    """Whether our kernels on a CPU multiply these levels of four bits."""
    whole = levels.zero is None or bool(((levels.zero >= 0) & (levels.zero < ZEROS) & (levels.zero % 1 == 0)).all())
    return whole and levels.group % 16 == 0 and native.available()[0] and native.takes_narrow(native.FOUR_BY_32)
