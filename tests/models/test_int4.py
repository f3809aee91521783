"""Four-bit weights: products are those of the levels kept, and these are near the weights."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftproof.models import int4
from draftproof.models.int4 import GROUP, INNER, ROWS, SPANS, STEPS, Int4Linear, TensorCoreInt4Linear, plain, rounded

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), reason="this torch has no product with four-bit weights")


def dense(levels: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The weights that levels and steps stand for, in float64, filled up as they are."""
    step, zero = (steps[..., i].transpose(0, 1).double()[..., None] for i in (0, 1))
    return ((levels.view(levels.shape[0], -1, GROUP).double() - 8) * step + zero).view(levels.shape)


def weights(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=random) * torch.rand(outputs, 1, generator=random) + 0.1


@pytest.mark.parametrize("outputs,inputs", [(16, 64), (61, 200), (96, 2), (4096, 384)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_weights(outputs: int, inputs: int, bias: bool) -> None:
    weight, b = weights(outputs, inputs), torch.randn(outputs) if bias else None
    made, x = Int4Linear(weight, b), torch.randn(2, 5, inputs, generator=torch.Generator().manual_seed(1))
    exact = dense(*rounded(weight, torch.float32))[:outputs, :inputs]
    want = x.double() @ exact.T + (0 if b is None else b.double())
    allowed = 1e-6 * (x.abs().double() @ exact.abs().T + 1)
    assert ((made(x).double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_lost_is_less_than_by_the_whole_span(dtype: torch.dtype) -> None:
    """Never worse than levels spread evenly over each group's span, and a group of few values keeps them."""
    weight = weights(64, 512)
    error = (dense(*rounded(weight, dtype))[:64] - weight).square().view(64, -1, GROUP).sum(-1)
    grouped = weight.view(64, -1, GROUP)
    step = (grouped.amax(-1) - grouped.amin(-1)) * (SPANS[0] / STEPS)
    assert (error <= GROUP * (step / 2 * (1.05 if dtype == torch.bfloat16 else 1.001)).square()).all()
    even = (grouped - grouped.amin(-1, keepdim=True)) / step[..., None]
    naive = ((even.round() - even) * step[..., None]).square().sum()
    assert error.sum() < naive
    two = torch.where(weight > 0, 0.5, -0.25)
    assert torch.allclose(dense(*rounded(two, torch.float32))[:64].float(), two, atol=1e-6)


def test_constant_groups_and_zeros_are_kept() -> None:
    weight = torch.zeros(16, 128)
    weight[3], weight[4, :64] = 0.75, -2.0
    assert torch.equal(dense(*rounded(weight, torch.float32)).float(), weight)


def test_bytes_are_counted_as_they_are() -> None:
    made = Int4Linear(weights(256, 512), None)
    assert made.weight_bytes == 256 * 512 // 2 + 256 * (512 // GROUP) * 8


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU's product, by the plain one; how many rows each call had."""
    calls: list[int] = []

    def multiply(rows: torch.Tensor, packed: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        calls.append(rows.shape[0])
        return plain(rows, packed, steps).bfloat16()

    monkeypatch.setattr(int4, "pack_tiles", lambda levels: levels)
    monkeypatch.setattr(int4, "multiply_tiles", multiply)
    return calls


@pytest.mark.parametrize("outputs,inputs", [(16, 64), (61, 200)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gpus_product_goes_in_tiles_of_the_same_weights(pretended: list[int], outputs: int, inputs: int, bias: bool) -> None:
    weight, b = weights(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16() if bias else None
    made, x = TensorCoreInt4Linear(weight, b), torch.randn(70, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = dense(*rounded(weight, torch.bfloat16))[:outputs, :inputs]
    want = x.double() @ exact.T + (0 if b is None else b.double())
    assert ((made(x).double() - want).abs() <= 2**-7 * (x.abs().double() @ exact.abs().T + 1)).all()
    for count in (1, 5, ROWS, ROWS + 1, 70):
        assert torch.equal(made(x[:count]), made(x)[:count])
    assert torch.equal(made(x.view(2, 35, inputs)).view(70, outputs), made(x)) and set(pretended) == {ROWS}


def test_a_gpus_product_is_compared_before_it_is_used(pretended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert int4.multiplies_as_packed("cpu")[0]
    monkeypatch.setattr(int4, "pack_tiles", lambda levels: levels.view(64, -1, 2).flip(2).reshape(64, -1))
    able, why = int4.multiplies_as_packed("cpu")
    assert not able and "another order" in why
    monkeypatch.undo()
    able, why = int4.multiplies_as_packed("cpu")
    assert not able and "this torch has no product" in why, "a CPU has none of a GPU's"


def test_torch_takes_what_its_gpu_product_is_given() -> None:
    """Shapes and types, by torch's own checks, on tensors without numbers."""
    with FakeTensorMode():
        levels, steps = rounded(torch.empty(61, 200), torch.bfloat16)
        packed = int4.pack_tiles(levels)
        assert packed.shape == (64 // 8, 256 // (INNER * 16), 32, INNER // 2)
        assert int4.multiply_tiles(torch.empty(ROWS, 256, dtype=torch.bfloat16), packed, steps).shape == (ROWS, 64)
