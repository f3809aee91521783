"""Linear layers whose weights are four-bit integers: between a quarter and a third of the bytes of half precision.

Weights: w = (q − 8) · s + z with q in 0 … 15 and one s and z per output and group of inputs (Lin et al., arXiv 2306.00978, use the same
form). Of a few spans per group, the full one and narrower ones that cut the extremes off, the one with the least squared error is kept.
Our kernels multiply where a C compiler is found (native.py): of the inputs that share a step a row's become integers below 2¹¹ in size,
times a power of two, which loses a thirtieth of what bfloat16 loses beside it (docs/log.md), so that what a group adds up to is an integer
and has no order. Elsewhere activations stay what they are, and torch's product adds them in an order that does not depend on how many
rows there are. On a GPU torch's product for tensor cores takes the same weights, in
tiles of rows (tiled.py); written without a GPU: `can_round_on_gpu` compares it with the plain one before it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import native
from .levels import LevelWeight
from .packed import KeptLinear, StreamedLinear, multiplies_bfloat16
from .tiled import InTiles, by_tiles

GROUP = 64                                  # inputs that share a step
OUTPUTS = 16                                # the kernel takes multiples of so many
STEPS = 15
SPANS = (1.0, 0.93, 0.86, 0.79)             # of a group's own
INNER, ROWS = 4, 16                         # of the GPU's product: 16 columns of which so many lie together, and rows of its own tile
LEAST = (8, 0)                              # compute capability


class StreamedInt4Linear(StreamedLinear):
    """y = x Wᵀ + b with W [out, in] rounded to sixteen levels, by our kernels."""

    bits = 4

    def _arrange(self, weight: Tensor) -> tuple[Tensor, int]:
        levels, steps = rounded(weight, torch.bfloat16)
        panels = native.arrange_four(levels, steps.transpose(0, 1))
        return panels, levels.numel() // 2 + 2 * steps.numel()


class Int4Linear(KeptLinear):
    """y = x Wᵀ + b with W [out, in] rounded to sixteen levels, by torch's product on a CPU. Built from a linear layer's tensors; keeps no
    other copy of them."""

    steps: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        levels, steps = rounded(weight, self._precision(weight.dtype))
        self.bias = None if bias is None else bias.detach().to(steps.dtype, copy=True)
        self.packed = self._pack(levels)
        self.register_buffer("steps", steps, persistent=False)
        self.weight_bytes = self.packed.nbytes + steps.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(self.steps.dtype)
        missing = self.steps.shape[0] * GROUP - self.in_features
        if missing:
            rows = nn.functional.pad(rows, (0, missing))
        out = self._product(rows)[:, : self.out_features]
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def _precision(self, dtype: torch.dtype) -> torch.dtype:
        """Of steps and products."""
        return torch.bfloat16 if dtype == torch.bfloat16 and multiplies_bfloat16() else torch.float32

    def _pack(self, levels: Tensor) -> Tensor:
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        return packed

    def _product(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.steps)
        return out


class TensorCoreInt4Linear(Int4Linear, InTiles):
    """The same in bfloat16, by torch's product on a GPU."""

    tile = ROWS

    def _precision(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def _pack(self, levels: Tensor) -> Tensor:
        return pack_tiles(levels)

    def _product(self, rows: Tensor) -> Tensor:
        return by_tiles(lambda tile: multiply_tiles(tile, self.packed, self.steps), rows, ROWS)


def pack_tiles(levels: Tensor) -> Tensor:
    """Levels uint8 [out, in] in the order of the GPU's product: of two columns the first in the upper half of a byte."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], INNER)
    return packed


def multiply_tiles(rows: Tensor, packed: Tensor, steps: Tensor) -> Tensor:
    """rows bfloat16 [n, in] → bfloat16 [n, out]."""
    out: Tensor = torch.ops.aten._weight_int4pack_mm(rows, packed, GROUP, steps)
    return out


def plain(rows: Tensor, levels: Tensor, steps: Tensor) -> Tensor:
    """The product [n, out] in float32 of rows [n, in] with the weights that levels [out, in] and steps [groups, out, 2] stand for."""
    step, zero = steps.float().transpose(0, 1)[..., None].unbind(2)
    weight = (levels.view(levels.shape[0], -1, GROUP).float() - 8) * step + zero
    return rows.float() @ weight.view(levels.shape).t()


def linear(weight: Tensor, bias: Tensor | None) -> KeptLinear:
    return (StreamedInt4Linear if native.available()[0] else Int4Linear)(weight, bias)


def rounded(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Levels uint8 [outputs, inputs], filled up with zeros to what the kernel takes, and steps `dtype` [groups, outputs, 2]: s and z. A
    weight that is levels already keeps them."""
    if isinstance(weight, LevelWeight):
        return _given(weight, dtype)
    outputs, inputs = weight.shape
    wide = nn.functional.pad(weight.detach().float(), (0, -inputs % GROUP, 0, -outputs % OUTPUTS))
    grouped = wide.view(wide.shape[0], -1, GROUP)
    top, low = grouped.amax(-1, keepdim=True), grouped.amin(-1, keepdim=True)
    levels, steps = torch.zeros_like(grouped), grouped.new_zeros(*grouped.shape[:2], 2)
    least = torch.full_like(top, torch.inf)
    for span in SPANS:
        step = ((top - low) * (span / STEPS)).to(dtype).float()
        zero = ((top + low + step) / 2).to(dtype).float()          # of level 8: the levels lie around the middle
        asked = ((grouped - zero) / step.masked_fill(step == 0, 1)).round_().clamp_(-8, 7)
        error = (asked * step + zero - grouped).square_().sum(-1, keepdim=True)
        better = error < least
        levels, least = torch.where(better, asked, levels), torch.where(better, error, least)
        steps = torch.where(better, torch.cat((step, zero), -1), steps)
    return (levels.view(wide.shape) + 8).to(torch.uint8), steps.transpose(0, 1).to(dtype).contiguous()


def _given(weight: LevelWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, scale, zero = weight.grid()
    assert zero is not None, "whole numbers"
    step = scale.to(dtype).float()
    steps = torch.stack((step, (8 - zero) * step), -1).to(dtype).repeat_interleave(q.shape[1] // scale.shape[1] // GROUP, 1)
    more = -q.shape[0] % OUTPUTS
    if more:
        q, steps = nn.functional.pad(q, (0, 0, 0, more)), nn.functional.pad(steps, (0, 0, 0, 0, 0, more))
    return q, steps.transpose(0, 1).contiguous()


def can_round() -> tuple[bool, str]:
    """Whether this build of torch multiplies such weights, and why or why not."""
    if not native.available()[0] and not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return False, f"this torch has no product with four-bit weights on a CPU, and {native.available()[1]}"
    ours = native.available()[0]
    return True, f"weights are four-bit integers, {GROUP} to a step; activations " + ("twelve bits" if ours else "stay as they are")


def can_round_on_gpu() -> tuple[bool, str]:
    """The same of its GPU, and whether its product is that of the levels as they are packed here."""
    found = torch.cuda.get_device_capability()
    if found < LEAST:
        return False, f"the GPU has compute capability {found[0]}.{found[1]}"
    return multiplies_as_packed("cuda")


def multiplies_as_packed(device: str) -> tuple[bool, str]:
    """Whether `multiply_tiles` of a small matrix is `plain` up to the rounding of bfloat16."""
    random = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(64, 4 * GROUP, generator=random).to(device), torch.randn(ROWS, 4 * GROUP, generator=random).to(device)
    levels, steps = rounded(weight, torch.bfloat16)
    rows = rows.bfloat16()
    try:
        found, wanted = multiply_tiles(rows, pack_tiles(levels), steps).float(), plain(rows, levels, steps)
    except (RuntimeError, AttributeError) as error:  # no such operation, or none for this device
        return False, f"this torch has no product with four-bit weights on a GPU ({str(error).splitlines()[0]})"
    if not torch.allclose(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max())):
        return False, "this torch's product with four-bit weights reads them in another order than they are packed in here"
    return True, f"weights are four-bit integers, {GROUP} to a step, multiplied by tensor cores (not measured on a GPU)"
