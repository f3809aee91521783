"""Linear layers whose weights are eight-bit integers: half the bytes of half precision, so about half the time of a pass of few rows.

Weights: w = s · q with q in −127 … 127 and one s per output, rounded to nearest. Where a C compiler is found (native.py) every 512 columns
of a row become integers below 2¹⁴ in size, times a power of two: bfloat16 numbers that are at least 2⁻⁶ of the largest stay what they are.
Without a compiler FBGEMM multiplies, and every row becomes, by its own largest magnitude, two integers of seven bits,
x ≈ peak / 63 · (high + low / 126): together as fine as fourteen bits. What is lost is the weights' precision, either way. The sums of
products are integers, and integers have no order: a row's bits depend on nothing but the row, whatever its neighbours and
whatever the kernel. Seven bits because FBGEMM adds two products in sixteen (127 · 127 · 2 < 2¹⁵).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .. import native
from .levels import Levels, LevelWeight
from .packed import KeptLinear, StreamedLinear

HIGH, LOW = 63, 126          # steps of the coarse integer up to the peak; steps of the fine one within a coarse step
TOP = 127


class StreamedInt8Linear(StreamedLinear):
    """y = x Wᵀ + b with W [out, in] rounded to integers, by our kernels."""

    bits = 8

    def _arrange(self, weight: Tensor) -> tuple[Tensor, int]:
        whole, self.steps = rounded(weight)
        return native.arrange_eight(whole), whole.numel() + 4 * self.steps.numel()


class Int8Linear(KeptLinear):
    """y = x Wᵀ + b with W [out, in] rounded to integers. Built from a linear layer's tensors; keeps no other copy of them."""

    extremes: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        whole, scale = rounded(weight)
        self.packed = torch.ops.quantized.linear_prepack(_per_output(whole, scale), None)
        self.weight_bytes = whole.numel() + 4 * scale.numel()
        # FBGEMM's step is its inputs' span over 127: with these two in every product it is 1, and our integers stay what they are.
        assert self.in_features > 1, "room for both"
        extremes = torch.zeros(1, self.in_features)
        extremes[0, 0], extremes[0, -1] = -HIGH - 1, HIGH
        self.register_buffer("extremes", extremes, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        high, low, peak = split(x.reshape(-1, self.in_features).float())
        count = high.shape[0]
        sums = torch.ops.quantized.linear_dynamic(torch.cat((high, low, self.extremes)), self.packed, True)
        out = torch.add(sums[:count], sums[count:2 * count], alpha=1 / LOW).mul_(peak / HIGH)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)


def linear(weight: Tensor, bias: Tensor | None) -> KeptLinear:
    return (StreamedInt8Linear if native.available()[0] else Int8Linear)(weight, bias)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The integers int8 [out, in] of a weight, and the step float32 [out] of each output. A weight that is levels already keeps them."""
    if isinstance(weight, LevelWeight):
        q, given, _ = weight.grid()
        return (q ^ 128).view(torch.int8), given[:, 0].contiguous()
    wide = weight.detach().float()
    scale = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny * TOP) / TOP
    return (wide / scale[:, None]).round_().to(torch.int8), scale


def takes(levels: Levels) -> bool:
    """Whether levels of eight bits are such integers: a step per output, and zero in the middle."""
    return levels.group == levels.inputs and levels.zero is not None and bool((levels.zero == 128).all())


def split(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N, in] as high and low [N, in], integers of at most `HIGH`, and peak [N, 1]: rows ≈ peak / HIGH · (high + low / LOW)."""
    peak = rows.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny * HIGH)
    levels = rows * (HIGH / peak)
    high = levels.round()
    return high, levels.sub_(high).mul_(LOW).round_(), peak


def can_round() -> tuple[bool, str]:
    """Whether this machine multiplies such weights, and why or why not."""
    if native.available()[0]:
        return True, "weights are eight-bit integers with a step per output, activations fifteen bits; sums are exact"
    if "fbgemm" not in torch.backends.quantized.supported_engines or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False, f"this torch or this processor has no FBGEMM (it needs AVX2), and {native.available()[1]}"
    return True, "weights are eight-bit integers with a step per output, activations fourteen bits; sums are exact"


def _per_output(whole: Tensor, scale: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)           # torch means to drop such tensors; FBGEMM's packing takes no others
        return torch._make_per_channel_quantized_tensor(whole, scale.double(), torch.zeros(len(scale), dtype=torch.int64), 0)
