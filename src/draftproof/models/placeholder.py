"""What stands where a model has a weight that is kept in another form: transformers' modules, and our own, ask it for type and shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

TOLD = ("__get__", "__len__", "size", "dim", "numel", "element_size", "is_floating_point")     # functions that need no values
KEPT = "this layer's weight is kept in another form and has no values to compute with; load with packed=False and without quantization"


class Placeholder(Tensor):
    """Tells type, shape and device of a weight; any other function is given `values()` in its place."""

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    def values(self) -> Tensor:
        """An ordinary weight. Raises RuntimeError where there is none: an empty one might well be computed with unseen."""
        raise RuntimeError(KEPT)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return function(*_with_values(args), **_with_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return function(*_with_values(args), **_with_values(kwargs or {}))          # of what a property makes, as `.T` does


def mapped(found: Any, kind: type[Any], how: Callable[[Any], Tensor]) -> Any:
    """Arguments of a function, those of this kind replaced."""
    if isinstance(found, dict):
        return {key: mapped(value, kind, how) for key, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(mapped(value, kind, how) for value in found)
    return how(found) if isinstance(found, kind) else found


def _with_values(found: Any) -> Any:
    return mapped(found, Placeholder, lambda one: one.values())
