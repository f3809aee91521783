"""Linear layers with weights in the CPU's own blocked layout (oneDNN).

A pass over few rows is limited by how fast weights stream from memory; the blocked layout reads them about twice as fast
as the stock layer, and a row's bits do not depend on the number of rows from two rows on (docs/log.md has the figures).
A processor without bfloat16 instructions multiplies bfloat16 weights in float32 and rounds each product back, five times as fast
at five rows as the emulation that torch falls back to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PACK_ROWS = 8  # the row count that the blocked layout is chosen for
BY_HAND = {"dt_proj"}  # layers of state-space models whose weight the model multiplies by itself


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] packed. Built from a linear layer (or GPT-2's transposed one); keeps no other copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty_like(weight, device="meta")  # its dtype and shape, which some models ask for; no values
        self.widened = weight.dtype == torch.bfloat16 and not multiplies_bfloat16()
        kept = weight.detach().float() if self.widened else weight.detach()
        self.weight_bytes = kept.numel() * kept.element_size()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(kept.contiguous(), PACK_ROWS)
        self.bias = None if bias is None else bias.detach().to(kept.dtype, copy=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.widened else x
        out: Tensor = torch.ops.mkldnn._linear_pointwise(wide, self.packed, self.bias, "none", [], "")
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 instructions that oneDNN uses."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(dtype: torch.dtype) -> tuple[bool, str]:
    """Whether this machine packs this dtype, and why or why not."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False, "this build of torch has no oneDNN"
    if dtype not in (torch.bfloat16, torch.float32):
        return False, f"{dtype} is not packed on a CPU"
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return True, "the processor has no bfloat16 instructions: weights are held and multiplied as float32, products rounded to bfloat16"
    return True, "few-row passes read packed weights about twice as fast, with the same bits at any number of rows"


def widened_bytes(module: nn.Module) -> int:
    """What the packed layers below `module` hold beyond the size of their weights' own type."""
    return sum(layer.weight_bytes // 2 for layer in module.modules() if isinstance(layer, PackedLinear) and layer.widened)


def pack(module: nn.Module) -> None:
    """Replace every linear layer below `module` by its packed form, in place."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and name not in BY_HAND:
            packed = PackedLinear(child.weight, child.bias)
        elif isinstance(child, Conv1D):
            packed = PackedLinear(child.weight.data.t(), child.bias.data)
        else:
            pack(child)
            continue
        setattr(module, name, packed)
