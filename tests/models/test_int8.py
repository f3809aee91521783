"""Eight-bit weights: sums are the integers they claim to be."""

from __future__ import annotations

import pytest
import torch

from draftproof.models.int8 import HIGH, LOW, Int8Linear, rounded, split

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="no FBGEMM here")


def layer(outputs: int = 96, inputs: int = 200, bias: bool = True, seed: int = 0) -> tuple[Int8Linear, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(seed)
    weight, b = torch.randn(outputs, inputs) * torch.rand(outputs, 1), torch.randn(outputs) if bias else None
    return Int8Linear(weight, b), weight, b


def hard_rows(count: int, inputs: int = 200) -> torch.Tensor:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    x[1::4] *= 1e-6
    x[2::4, 7] = 300.0                                 # one input far above the others
    x[3::4] = 0.0
    return x


@pytest.mark.parametrize("inputs", [2, 63, 64, 200, 4096])
def test_sums_are_integers_taken_exactly(inputs: int) -> None:
    """FBGEMM's products against integer arithmetic, at the largest magnitudes too."""
    made, weight, _ = layer(inputs=inputs, bias=False)
    whole, scale = rounded(weight)
    x = torch.cat((hard_rows(9, inputs) if inputs > 7 else torch.randn(9, inputs), torch.tensor([[2.0], [-2.0]]).expand(2, inputs)))
    high, low, peak = split(x)
    assert high.abs().max() <= HIGH and low.abs().max() <= HIGH
    sums = [(part.long() @ whole.long().T).float() * scale for part in (high, low)]
    assert torch.equal(made(x), torch.add(sums[0], sums[1], alpha=1 / LOW) * (peak / HIGH))


def test_what_is_lost_is_the_weights_precision() -> None:
    made, weight, bias = layer(512, 1024)
    x = hard_rows(32, 1024)
    whole, scale = rounded(weight)
    near = (x.double() @ (whole.double() * scale[:, None].double()).T) + bias.double()
    assert ((weight - whole * scale[:, None]).abs() <= scale[:, None] * 0.5001).all()
    allowed = x.abs().amax(1, keepdim=True) / (2 * HIGH * LOW) * (weight.abs().sum(1) + scale * 512)
    assert ((made(x).double() - near).abs() <= allowed.double() + 1e-4).all()


def test_numbers_that_are_none_stay_none() -> None:
    made, _, _ = layer()
    x = torch.ones(3, 200)
    x[1, 4], x[2, 4] = torch.nan, torch.inf
    out = made(x)
    assert out[0].isfinite().all() and out[1].isnan().all() and not out[2].isfinite().any()


def test_other_types_come_back_as_they_were() -> None:
    made, _, _ = layer()
    x = torch.randn(3, 200).bfloat16()
    assert made(x).dtype == torch.bfloat16 and torch.equal(made(x), made(x.float()).bfloat16())
