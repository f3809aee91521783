"""Muon (Jordan et al. 2024): momentum whose matrix is made orthogonal before it is applied.

torch has it as `torch.optim.Muon`, which orthogonalises in bfloat16 whatever the weights are; a processor without bfloat16
instructions spends more time there than in the model. This one computes in the weights' own precision; a test holds it to torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)      # of the quintic that drives singular values towards 1
STEPS = 5


class Muon(torch.optim.Optimizer):
    """For matrices [out, in]. The update's size is AdamW's (0.2 · √max(out, in) · orthogonal), so that a learning rate serves both."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.01, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._one(matrix, matrix.grad, group)

    def _one(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(torch.lerp(gradient, state["momentum_buffer"], group["momentum"]))
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearly orthogonal matrix [m, n] of the same singular vectors: singular values between about 0.7 and 1.2, by Newton–Schulz."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    turned: Tensor = x.T if matrix.shape[0] > matrix.shape[1] else x
    return turned
