"""Weights that others have rounded, kept as they were published: whole numbers, a scale and a zero for each output and group of inputs; or
floats without a zero.

    w = (q − zero) · scale         q of four or eight bits
    w = q · scale                  q of E4M3, or the numbers of E2M1

Our kernels (int4.py, int8.py, float8.py, fours.py) multiply such a weight as it is. Whatever else asks for it gets its values, computed
anew each time, or what stands in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
EXPERTS = ("gate_up_proj", "up_proj", "down_proj")      # where those of a collection of experts are (level_experts.py)
SHIFT, SHIFTED = 8160, 1 << 20      # how far apart in one row of numbers two weights' stand-ins begin, and the last of them
SPREAD = 0.18                       # of a stand-in's products: of 0.5, a hundred layers may enlarge what bfloat16 loses until attention
                                    # seems another (0.1 of the logits; now 0.035); of 0.1, a mask that is another is hardly seen


@dataclass(frozen=True)
class Levels:
    """A weight [out, in] of `bits`; scale and zero [out, groups], of in / groups adjoining inputs; `read` unpacks q uint8 [out, in] from
    what the file holds. Floats have no zero: of eight bits q is float8_e4m3fn [out, in], none of them NaN; of four, uint8 below 16."""

    bits: int
    inputs: int
    scale: Tensor
    zero: Tensor | None
    read: Callable[[], Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[0], self.inputs

    @property
    def group(self) -> int:
        return self.inputs // self.scale.shape[1]

    def values(self) -> Tensor:
        """The weight that they stand for, float32."""
        return values(self.read(), self.scale.float(), None if self.zero is None else self.zero.float())


class LevelWeight(Tensor):
    """Levels, one below the other, that stand where a model has the weight [out, in] of a linear layer."""

    parts: Sequence[Levels]

    @staticmethod
    def __new__(cls, parts: Sequence[Levels], dtype: torch.dtype, device: torch.device) -> LevelWeight:
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        made: LevelWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.parts = parts
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LevelWeight({list(self.shape)}, {self.bits} bits{', floats' if self.floats else ''})"

    @property
    def bits(self) -> int:
        return self.parts[0].bits

    @property
    def floats(self) -> bool:
        return self.parts[0].zero is None

    def grid(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, scale and zero of all of it, the last two float32, on this weight's device."""
        zeros = [part.zero for part in self.parts if part.zero is not None]
        q, scale = torch.cat([part.read() for part in self.parts]), torch.cat([part.scale for part in self.parts]).float()
        return q.to(self.device), scale.to(self.device), torch.cat(zeros).float().to(self.device) if zeros else None

    def values(self) -> Tensor:
        """An ordinary weight [out, in]."""
        return values(*self.grid()).to(self.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "size", "dim", "numel", "element_size", "is_floating_point"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if name == "detach":
            return args[0]
        if function is torch.cat and len(args) == 1 and not kwargs and alike(args[0]):
            first = args[0][0]
            return LevelWeight([part for weight in args[0] for part in weight.parts], first.dtype, first.device)
        return function(*with_values(args), **with_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return function(*with_values(args), **with_values(kwargs or {}))


def with_values(found: Any) -> Any:
    """Arguments of a function with ordinary weights instead."""
    return _mapped(found, LevelWeight.values)


def _mapped(found: Any, how: Callable[[LevelWeight], Tensor]) -> Any:
    if isinstance(found, dict):
        return {key: _mapped(value, how) for key, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(_mapped(value, how) for value in found)
    return how(found) if isinstance(found, LevelWeight) else found


class StandIns(TorchFunctionMode):
    """In this context random numbers stand for the levels of a model, in passes at load that are watched, or compared with one another, and
    need no more than some weights of a usual size: to compute their values takes far longer than to multiply by them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = level_weights(model)
        self._at = {id(weight): SHIFT * number % SHIFTED for number, weight in enumerate(found)}
        if found:
            largest = max(found, key=Tensor.numel)
            numbers = torch.randn(largest.numel() + SHIFTED, generator=torch.Generator().manual_seed(0))
            self._numbers: Tensor = (numbers * SPREAD / largest.shape[1] ** 0.5).to(largest.device, largest.dtype)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_mapped(args, self._of), **_mapped(kwargs or {}, self._of))

    def _of(self, weight: LevelWeight) -> Tensor:
        at = self._at[id(weight)]
        return self._numbers[at : at + weight.numel()].view(weight.shape)


def level_weights(module: nn.Module) -> list[LevelWeight]:
    """Of the linear layers below a module, and of its experts."""
    found: list[LevelWeight] = []
    for layer in module.modules():
        held = [getattr(layer, name, None) for name in ("weight", *EXPERTS)]
        found += [weight for one in held for weight in getattr(one, "each", [one]) if isinstance(weight, LevelWeight)]
    return found


def alike(weights: Sequence[Any]) -> bool:
    """Whether these are all levels, of the same form."""
    forms = {(weight.bits, weight.floats, weight.parts[0].group, weight.shape[1]) if isinstance(weight, LevelWeight) else None
             for weight in weights}
    return len(forms) == 1 and None not in forms


def values(q: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The weight float32 [out, in] of q [out, in], scale and zero [out, groups]."""
    of_four = zero is None and q.dtype == torch.uint8
    grouped = (E2M1.to(q.device)[q.int()] if of_four else q.float()).view(*scale.shape, -1)
    if zero is not None:
        grouped.sub_(zero[..., None])
    return grouped.mul_(scale[..., None]).view(q.shape)


def put(layer: nn.Module, weight: LevelWeight) -> None:
    """Let a linear layer have this weight instead of its own."""
    del layer.weight
    layer.weight = weight
