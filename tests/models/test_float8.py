"""Eight-bit floats, by torch's own products on a CPU: the same kernels' interface as on a GPU, not the same kernels."""

from __future__ import annotations

import pytest
import torch

from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models.float8 import Float8Linear, linear, rounded
from draftproof.models.load import WEIGHTS, load_target
from draftproof.models.tiled import TiledLinear


def layer(bias: bool) -> tuple[Float8Linear, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(3)
    weight, b = (torch.randn(96, 160) * torch.rand(96, 1)).bfloat16(), torch.randn(96).bfloat16() if bias else None
    return Float8Linear(weight, b), weight, b


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_the_rounded_numbers(bias: bool) -> None:
    made, weight, b = layer(bias)
    x = torch.randn(70, 160).bfloat16()
    (w8, ws), (x8, xs) = rounded(weight), rounded(x)
    exact = (x8.double() * xs.double()) @ (w8.double() * ws.double()).T + (0 if b is None else b.double())
    assert ((made(x).double() - exact).abs() <= 2 ** -7 * (exact.abs() + 1)).all(), "but for rounding to bfloat16"
    plain = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert 0 < (exact - plain).abs().max() < 0.1 * plain.abs().max(), "rounded, and close"
    assert made.weight_bytes == 96 * 160 + 4 * 96


def test_rounding_keeps_the_largest_and_zeros() -> None:
    x = torch.tensor([[3.0, -6.0, 0.0], [0.0, 0.0, 0.0], [1e-30, 0.0, 0.0]])
    eight, steps = rounded(x)
    back = eight.float() * steps
    assert torch.allclose(back[:, :2], x[:, :2], rtol=0.07) and back[0, 1] == -6 and not back[1].any()


def test_a_row_stands_alone() -> None:
    made, _, _ = layer(True)
    x = torch.randn(130, 160).bfloat16()
    whole = made(x)
    for count in (1, 2, 5, 63, 64, 65, 130):
        assert torch.equal(made(x[:count]), whole[:count])
    assert torch.equal(made(x.view(2, 65, 160)).view(130, 96), whole)


def test_sizes_that_no_hardware_multiplies_are_not_rounded() -> None:
    assert isinstance(linear(torch.randn(96, 150), None), TiledLinear) and isinstance(linear(torch.randn(96, 160), None), Float8Linear)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(LoadError, match="quantization=fp8: the model is on cpu; expected a GPU"):
        load_target(WEIGHTS / "target", LoadConfig(quantization="fp8", device="cpu"))
