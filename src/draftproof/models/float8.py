"""Linear layers whose weights are floats of eight bits (E4M3: Micikevicius et al., arXiv 2209.05433): half the bytes of half precision.

On a CPU with AVX2, AVX-512 or ARM's vectors, but without tiles, our kernels multiply the weights of checkpoints that were published so,
with scales of outputs or of groups of inputs, opened without loss, with activations as they are (kernels/narrow.c).

GPUs that multiply them take activations of eight bits, too: w ≈ s · q with q in E4M3 and one s per output, and every row of x likewise,
by its own largest magnitude; products are added in float32 and rounded to bfloat16. Rows are multiplied in tiles (tiled.py), so a row's
bits do not depend on its neighbours. The tests run torch's product of such numbers on a CPU. Our own kernels for GPUs multiply the same
weights with activations of half precision (rows.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from .levels import Levels, LevelWeight
from .packed import MOST_SPARE, KeptLinear, StreamedLinear, packed
from .tiled import InTiles, TiledLinear, by_tiles

TOP = 448.0     # the largest E4M3
SOME = 4096     # outputs that are rounded at a time
STEP = 16       # sizes that the hardware multiplies are multiples of it
LEAST = (8, 9)  # compute capability


class StreamedFloat8Linear(StreamedLinear):
    """y = x Wᵀ + b by our kernels, of a weight of levels that `takes` lets in."""

    bits = native.EIGHT_FLOATS
    spare: native.Spare

    def _arrange(self, weight: Tensor) -> tuple[Tensor, int]:
        assert isinstance(weight, LevelWeight), type(weight)
        eight, scale, _ = weight.grid()
        groups = -(-weight.shape[1] // native.ALIKE)
        steps = scale.repeat_interleave(max(1, groups // scale.shape[1]), 1)
        panels, self.spare = native.arrange_narrow(eight.bfloat16(), steps)
        return panels, panels.nbytes + sum(part.nbytes for part in self.spare)


def takes(levels: Levels) -> bool:
    """Whether our kernels on a CPU multiply these floats: scales are of all inputs or of multiples of ALIKE."""
    return (native.available()[0] and native.takes_narrow(native.EIGHT_FLOATS)
            and (levels.group == levels.inputs or levels.group % native.ALIKE == 0))


def streamed(weight: LevelWeight, bias: Tensor | None) -> KeptLinear:
    """An ordinary layer where too many of the weights would stand beside the panels."""
    made = StreamedFloat8Linear(weight, bias)
    return made if made.spare.words.nbytes <= MOST_SPARE * made.panels.nbytes else packed(weight.values(), bias)


class Float8Linear(KeptLinear, InTiles):
    """y = x Wᵀ + b. Built from a linear layer's tensors; keeps no other copy of them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else bias.detach()
        found = [rounded(some) for some in torch.split(weight.detach(), SOME)]  # a large one in float32 would take as much as four
        self.eight, self.steps = (torch.cat(parts) for parts in zip(*found, strict=True))
        self.weight_bytes = self.eight.numel() + 4 * self.steps.numel()

    def forward(self, x: Tensor) -> Tensor:
        out = by_tiles(self._product, x.reshape(-1, self.in_features)).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        eight, steps = rounded(rows)
        return torch._scaled_mm(eight, self.eight.t(), scale_a=steps, scale_b=self.steps.t(), out_dtype=torch.bfloat16)


def linear(weight: Tensor, bias: Tensor | None) -> KeptLinear | TiledLinear:
    """Of sizes that the hardware does not multiply, a layer that is not rounded."""
    return Float8Linear(weight, bias) if multiplies(weight) else TiledLinear(weight, bias)


def multiplies(weight: Tensor) -> bool:
    """Whether the hardware does."""
    return not any(size % STEP for size in weight.shape)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N, n] as E4M3 [N, n] times a float32 [N, 1] each."""
    wide = x.float()
    steps = wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * TOP) / TOP
    return (wide / steps).to(torch.float8_e4m3fn), steps


def can_round() -> tuple[bool, str]:
    """Whether torch's GPU multiplies such numbers, and why or why not."""
    found = torch.cuda.get_device_capability()
    if found < LEAST:
        return False, f"the GPU has compute capability {found[0]}.{found[1]}"
    return True, "weights and activations are floats of eight bits, with a factor per output and row"
