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
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .placeholder import Placeholder, mapped

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
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


class LevelWeight(Placeholder):
    """Levels, one below the other, that stand where a model has the weight [out, in] of a linear layer."""

    parts: Sequence[Levels]

    def __new__(cls, parts: Sequence[Levels], dtype: torch.dtype, device: torch.device) -> Self:
        made = super().__new__(cls, (sum(part.shape[0] for part in parts), parts[0].shape[1]), dtype, device)
        made.parts = parts
        return made

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
        return values(*self.grid()).to(self.dtype)

    def rows(self, order: Tensor) -> LevelWeight:
        """Its outputs in this order [n]."""
        parts, first = self.parts, self.parts[0]
        zeros = [part.zero for part in parts if part.zero is not None]
        made = Levels(first.bits, first.inputs, torch.cat([part.scale for part in parts])[order],
                      torch.cat(zeros)[order] if zeros else None, lambda: torch.cat([part.read() for part in parts])[order])
        return LevelWeight([made], self.dtype, self.device)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "detach":
            return args[0]
        if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dim() == 1:
            return args[0].rows(args[1])
        if function is torch.cat and len(args) == 1 and not kwargs and alike(args[0]):
            first = args[0][0]
            return LevelWeight([part for weight in args[0] for part in weight.parts], first.dtype, first.device)
        if function is torch.cat and args[1:] == (1,) and not kwargs and (found := _side_by_side(args[0])) is not None:
            return LevelWeight([found], args[0][0].dtype, args[0][0].device)
        return super().__torch_function__(function, types, args, kwargs)


class LevelExperts(Placeholder):
    """Stands where a model has the weights of all its experts, [experts, …]; each [out, in]. Nothing computes with it: experts.py takes
    them one by one, and until then they are silent."""

    each: Sequence[LevelWeight]

    def __new__(cls, each: Sequence[LevelWeight], shape: torch.Size) -> Self:
        made = super().__new__(cls, shape, each[0].dtype, each[0].device)
        made.each = each
        return made


class StandIns(TorchFunctionMode):
    """In this context random numbers stand for these levels of a model, in passes at load that are watched, or compared with one another,
    and need no more than some weights of a usual size: to compute their values takes far longer than to multiply by them."""

    def __init__(self, found: Sequence[LevelWeight]) -> None:
        super().__init__()
        self._at = {id(weight): SHIFT * number % SHIFTED for number, weight in enumerate(found)}
        if found:
            largest = max(found, key=Tensor.numel)
            numbers = torch.randn(largest.numel() + SHIFTED, generator=torch.Generator().manual_seed(0))
            self._numbers: Tensor = (numbers * SPREAD / largest.shape[1] ** 0.5).to(largest.device, largest.dtype)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*mapped(args, LevelWeight, self._of), **mapped(kwargs or {}, LevelWeight, self._of))

    def _of(self, weight: LevelWeight) -> Tensor:
        at = self._at[id(weight)]
        return self._numbers[at : at + weight.numel()].view(weight.shape)


def level_weights(module: nn.Module) -> list[LevelWeight]:
    """Of the linear layers below a module, and of its experts."""
    held = [one for layer in module.modules() for one in vars(layer).values()]
    return [weight for one in held for weight in (one.each if isinstance(one, LevelExperts) else [one]) if isinstance(weight, LevelWeight)]


def alike(weights: Sequence[Any]) -> bool:
    """Whether these are all levels, of the same form."""
    forms = {(weight.bits, weight.floats, weight.parts[0].group, weight.shape[1]) if isinstance(weight, LevelWeight) else None
             for weight in weights}
    return len(forms) == 1 and None not in forms


def _side_by_side(weights: Sequence[Any]) -> Levels | None:
    """Levels of the same form and outputs in one, of all their inputs; None: they are others."""
    if not all(isinstance(weight, LevelWeight) and len(weight.parts) == 1 for weight in weights):
        return None
    parts = [weight.parts[0] for weight in weights]
    first, zeros = parts[0], [part.zero for part in parts if part.zero is not None]
    forms = {(part.bits, part.zero is None, part.group, part.shape[0]) for part in parts}
    if len(forms) > 1 or any(part.group == part.inputs for part in parts):      # a step of a whole output is another form
        return None
    return Levels(first.bits, sum(part.inputs for part in parts), torch.cat([part.scale for part in parts], 1),
                  torch.cat(zeros, 1) if zeros else None, lambda: torch.cat([part.read() for part in parts], 1))


def values(q: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The weight float32 [out, in] of q [out, in], scale and zero [out, groups]."""
    of_four = zero is None and q.dtype == torch.uint8
    grouped = (E2M1.to(q.device)[q.int()] if of_four else q.float()).view(*scale.shape, -1)
    if zero is not None:
        grouped.sub_(zero[..., None])
    return grouped.mul_(scale[..., None]).view(q.shape)


def put(model: nn.Module, name: str, weight: Placeholder) -> None:
    """Let a model have this weight instead of the one of this name."""
    place, _, kind = name.rpartition(".")
    holder = model.get_submodule(place)
    delattr(holder, kind)
    setattr(holder, kind, weight)
