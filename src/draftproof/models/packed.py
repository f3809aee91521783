"""Linear layers with weights in the CPU's own blocked layouts.

A pass over few rows is limited by how fast weights stream from memory; a blocked layout reads them about twice as fast as the stock
layer, and a row's bits do not depend on the number of rows from two rows on (docs/log.md has the figures). The forms, first choice first:

* Ours (native.py), of bfloat16 weights, in float32 or in the processor's bfloat16 instructions, those of tiles (AMX) among them: where a C
  compiler is found. With AVX512 weights take twelve bits each, without loss (kernels/narrow.c).
* FBGEMM's, of half-precision weights under float32 products: for float32 weights that are all halves times one power of two, as those
  of a half-precision checkpoint nearly always are. The same numbers are multiplied, and half the bytes are read.
* oneDNN's, of the weight's own type.

On a processor without bfloat16 instructions a bfloat16 product is taken in float32 and rounded back once: torch's emulation is many times
slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import cache
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from .. import native
from .levels import level_weights
from .placeholder import Placeholder

Linear = Callable[[Tensor, Tensor | None], nn.Module]  # makes a layer of a weight [out, in] and a bias
PACK_ROWS = 8  # the row count that oneDNN's layout is chosen for
HALF_TOP = 15  # weights are scaled to below 2 ** HALF_TOP, so that small ones stay clear of the subnormal halves
BASE, PROBED = 6, 16  # rows of FBGEMM's slice that others are compared with; how many numbers of rows are tried
MOST_SPARE = 0.1  # of narrow panels' bytes, that blocks beside them may have
BY_HAND = {"dt_proj"}  # layers of state-space models whose weight the model multiplies by itself, though not in every pass


class HeldLinear(nn.Linear):
    """An ordinary linear layer around a weight [out, in] and a bias: keeps these tensors, not copies."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)


class NoValues(Placeholder):
    """Stands where some models ask for the weight of a `KeptLinear`."""

    def __new__(cls, like: Tensor) -> Self:
        return super().__new__(cls, like.shape, like.dtype, torch.device("meta"))

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class KeptLinear(nn.Module):
    """Stands for a linear layer whose weight [out, in] is kept in another form, of `weight_bytes`."""

    weight_bytes: int
    bias: Tensor | None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = NoValues(weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class StreamedLinear(KeptLinear):
    """y = x Wᵀ + b by our kernels, in float32, and x, y in the weight's own type. The values of W [out, in] are all bfloat16 here, whole
    numbers in int8.py and int4.py. Keeps no other copy."""

    bits = 16
    steps: Tensor | None = None  # of each output
    spare: native.Spare | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else bias.detach().float()
        self.panels, self.weight_bytes = self._arrange(weight.detach())
        self.product = native.product(self.panels, self.bias, self.steps, self.out_features, self.in_features, self.bits, self.spare)

    def _arrange(self, weight: Tensor) -> tuple[Tensor, int]:
        """The panels, and how many bytes of them are weights."""
        if weight.dtype == torch.bfloat16 and native.takes_narrow():
            panels, spare = native.arrange_narrow(weight)
            if spare.words.nbytes <= MOST_SPARE * panels.nbytes:
                self.bits, self.spare = 12, spare
                return panels, panels.nbytes + sum(part.nbytes for part in spare)
        return native.arrange(weight.bfloat16()), 2 * weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        return native.multiply(x, self.product)

    def take_times(self, by: Tensor) -> None:
        """From now on y = (x Wᵀ + b) · by, float32 [out]."""
        self.steps = by if self.steps is None else self.steps * by
        self.bias = None if self.bias is None else self.bias * by
        self.product = native.product(self.panels, self.bias, self.steps, self.out_features, self.in_features, self.bits, self.spare)


class Times(nn.Module):
    """y = (x Wᵀ + b) · by, of a layer that rounds what it makes first; by float32 [out]."""

    def __init__(self, part: nn.Module, by: Tensor) -> None:
        super().__init__()
        self.part, self.by = part, by

    def forward(self, x: Tensor) -> Tensor:
        return (self.part(x) * self.by).to(x.dtype)         # type: ignore[no-any-return]


class PackedLinear(KeptLinear):
    """y = x Wᵀ + b with W [out, in] packed by one of torch's libraries. Built from a linear layer; keeps no other copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.widened = weight.dtype == torch.bfloat16 and not multiplies_bfloat16()
        kept = weight.detach().float() if self.widened else weight.detach()
        self.bias = None if bias is None else bias.detach().to(kept.dtype, copy=True)
        self.scale = scale_to_halves(kept) if kept.dtype == torch.float32 and has_half_products() else None
        if self.scale is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(kept.contiguous(), PACK_ROWS)
        else:
            self.packed = torch.ops.quantized.linear_prepack_fp16(kept * self.scale, None)
        self.weight_bytes = kept.numel() * (kept.element_size() if self.scale is None else 2)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.widened else x
        if self.scale is not None:
            return self._halves(wide, self.scale).to(x.dtype)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(wide, self.packed, self.bias, "none", [], "")
        return out.to(x.dtype)

    def _halves(self, x: Tensor, scale: float) -> Tensor:
        """Rows are filled up to a number whose bits do not depend on it (`whole_rows`)."""
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        filled = whole_rows(count)
        if filled != count:
            rows = nn.functional.pad(rows, (0, 0, 0, filled - count))
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self.packed)
        out = out[:count].view(*x.shape[:-1], self.out_features)
        return out.mul_(1 / scale) if self.bias is None else torch.add(self.bias, out, alpha=1 / scale)


def packed(weight: Tensor, bias: Tensor | None) -> KeptLinear:
    """The fastest of the forms above that multiplies the very same numbers."""
    ours = weight.dtype in native.TYPES and native.available()[0] and holds_bfloat16(weight)
    return (StreamedLinear if ours else PackedLinear)(weight, bias)


def times(layer: nn.Module, by: Tensor) -> nn.Module:
    """A layer that was just made, whose outputs are taken times `by`, float32 [out]: no weight is rounded for it."""
    if bool((by == 1).all()):
        return layer
    if not isinstance(layer, StreamedLinear):
        return Times(layer, by)
    layer.take_times(by)
    return layer


def holds_bfloat16(weight: Tensor) -> bool:
    """Whether every value of a weight [out, in] is a bfloat16."""
    return weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().to(weight.dtype), weight)


def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 instructions that oneDNN uses."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_half_products() -> bool:
    """Whether torch was built with FBGEMM, this processor runs it (it needs AVX2), and its kernels give rows the same bits."""
    if "fbgemm" not in torch.backends.quantized.supported_engines or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False
    return all(_first_whole(count) is not None for count in (*range(1, 33), 100, 257, 512))


def whole_rows(count: int) -> int:
    """The least number of rows, `count` or more, for which FBGEMM takes only kernels that give a row the same bits.

    It cuts a product into slices of a few rows (up to six on AVX2), and those of one or two rows add in another order. Which numbers of
    rows leave such a slice is asked of the kernels themselves, once a process, with a small matrix: it depends on nothing else.
    """
    found = _first_whole(count)
    assert found is not None, f"no number of rows from {count} on has the bits of {BASE} rows: `has_half_products` saw others that do"
    return found


@cache
def _first_whole(count: int) -> int | None:
    packed, x, bits = _probe(1 << (count + PROBED).bit_length())
    for rows in range(max(1, count), count + PROBED):
        if torch.equal(torch.ops.quantized.linear_dynamic_fp16(x[:rows], packed), bits[:rows]):
            return rows
    return None


@cache
def _probe(rows: int) -> tuple[Any, Tensor, Tensor]:
    """A packed matrix [16, 64], x [rows, 64] and the rows' products, taken BASE at a time."""
    random = torch.Generator().manual_seed(0)
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(16, 64, generator=random).bfloat16().float(), None)
    x = torch.randn(-(-rows // BASE) * BASE, 64, generator=random)
    return packed, x, torch.cat([torch.ops.quantized.linear_dynamic_fp16(part, packed) for part in torch.split(x, BASE)])


def scale_to_halves(weight: Tensor) -> float | None:
    """The power of two by which every float32 weight [out, in] becomes a half exactly; None if there is none."""
    top = float(weight.abs().max()) if weight.numel() else 0.0
    if not math.isfinite(top):
        return None
    scale = 2.0 ** min(40, HALF_TOP - math.frexp(top)[1])  # beyond, products could leave float32
    scaled = weight * scale
    return scale if torch.equal(scaled.half().float(), scaled) else None


def can_pack(dtype: torch.dtype) -> tuple[bool, str]:
    """Whether this machine packs this dtype, and why or why not."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False, "this build of torch has no oneDNN"
    if dtype not in (torch.bfloat16, torch.float32):
        return False, f"{dtype} is not packed on a CPU"
    why = "few-row passes read packed weights about twice as fast, with the same bits at any number of rows"
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        why = "the processor has no bfloat16 instructions: weights are multiplied in float32, products rounded to bfloat16"
    there, how = native.available()
    narrow = ", in twelve bits each, without loss" if there and dtype == torch.bfloat16 and native.takes_narrow() else ""
    return True, f"{why}; bfloat16 weights: {how}{narrow}"


def widened_bytes(module: nn.Module) -> int:
    """What the packed layers below `module` hold beyond the size of their weights' own type; below zero if they hold less."""
    layers = [layer for layer in module.modules() if isinstance(layer, KeptLinear)]
    return sum(layer.weight_bytes - layer.weight.numel() * layer.weight.element_size() for layer in layers)


def joined(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of products of one input, one below the other, and their biases (zeros where only some have one)."""
    weight = torch.cat([part.weight.detach() for part in parts])
    if all(part.bias is None for part in parts):
        return weight, None
    return weight, torch.cat([weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts])


def sizes(module: nn.Module) -> tuple[int, int]:
    """(bytes, count) of the parameters of a module that is not packed yet, levels in their own type; tied ones count once."""
    parameters = [*{p.data_ptr() or id(p): p for p in module.parameters()}.values(), *level_weights(module)]
    return sum(p.numel() * p.element_size() for p in parameters), sum(p.numel() for p in parameters)


def pack(module: nn.Module, form: Linear = packed, spared: Set[nn.Module] = frozenset()) -> None:
    """Replace every linear layer below `module` by its packed form, in place, but for those `spared`."""
    for name, child in list(module.named_children()):
        if name in BY_HAND or child in spared or not _packable(child):
            pack(child, form, spared)
        elif isinstance(child, Conv1D):
            setattr(module, name, form(child.weight.data.t(), child.bias.data))
        else:
            setattr(module, name, form(child.weight, child.bias))  # type: ignore[arg-type]


def straighten(module: nn.Module) -> None:
    """Put ordinary linear layers around the weights below `module` that lie [in, out] (GPT-2's)."""
    for name, child in module.named_children():
        if isinstance(child, Conv1D):
            setattr(module, name, HeldLinear(child.weight.data.t(), child.bias.data))
        else:
            straighten(child)


def _packable(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, HeldLinear) or isinstance(layer, Conv1D)


class HandReads(TorchFunctionMode):
    """While a model runs in this context, notes in `layers` the linear ones whose weight is read by others than the layer itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers: set[nn.Module] = set()
        self._running: set[nn.Module] = set()
        self._owners: dict[int, list[nn.Module]] = {id(layer.weight): [] for layer in model.modules() if _packable(layer)}
        self._hooks: list[Any] = []
        for module in model.modules():  # an embedding may read the output's weight: it keeps the tensor
            if id(getattr(module, "weight", None)) in self._owners:
                self._owners[id(module.weight)].append(module)
                self._hooks += (module.register_forward_pre_hook(lambda module, _: self._running.add(module)),
                                module.register_forward_hook(lambda module, *_: self._running.discard(module)))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            values = [*args, *(kwargs or {}).values()]
            for value in chain(values, *(parts for parts in values if isinstance(parts, list | tuple))):
                owners = self._owners.get(id(value), ())
                if found is not value and not self._running.intersection(owners):  # it may be changed in place, before it is packed
                    self.layers.update(filter(_packable, owners))
        return found

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()


@torch.inference_mode()
def read_by_hand(model: Any) -> Set[nn.Module]:
    """The linear layers that must stay as they are, because something else in the model computes with their weights; found by a pass over
    two tokens. Of a model that cannot run so nothing is known."""
    reads = HandReads(model)
    try:
        with reads:
            model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
    except Exception:
        return frozenset()
    return reads.layers
