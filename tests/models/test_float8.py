"""Eight-bit floats, by torch's own products on a CPU: the same kernels' interface as on a GPU, not the same kernels; and a checkpoint's by
ours, on the CPU that they are for."""

from __future__ import annotations

import pytest
import torch
from threads import threads_move_no_bit

from draftproof import native
from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models.float8 import Float8Linear, StreamedFloat8Linear, linear, rounded, streamed, takes
from draftproof.models.levels import Levels, LevelWeight
from draftproof.models.load import WEIGHTS, load_target
from draftproof.models.packed import PackedLinear
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


ours = pytest.mark.skipif(not native.available()[0] or not native.takes_narrow(native.EIGHT_FLOATS), reason="no kernel for them here")
CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8).view(torch.float8_e4m3fn)


def published(eight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> LevelWeight:
    levels = Levels(8, eight.shape[1], scale, None, lambda: eight)
    assert takes(levels)
    return LevelWeight([levels], dtype, torch.device("cpu"))


def normal(out: int, columns: int, groups: int) -> LevelWeight:
    """Weights as they are, the largest near E4M3's."""
    random = torch.Generator().manual_seed(out)
    eight = (torch.randn(out, columns, generator=random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return published(eight, torch.rand(out, groups, generator=random) * 0.01 + 0.001)


@ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float_of_eight_bits_is_what_it_is(dtype: torch.dtype) -> None:
    """Subnormal ones too, wherever in a panel they lie; and times a step, rounded once."""
    eight = torch.stack([CODES.view(torch.uint8).roll(turn) for turn in range(0, 254, 7)]).view(torch.float8_e4m3fn)
    scale = torch.rand(len(eight), 1, generator=torch.Generator().manual_seed(0)) + 0.5
    scale[::2] = 1.0
    made = StreamedFloat8Linear(published(eight, scale, dtype), None)
    for rows in (1, 5, 254):
        got = torch.cat([made(x) for x in torch.eye(254, dtype=dtype).split(rows)])
        assert torch.equal(got, (eight.float() * scale).t().to(dtype)), f"{rows} rows"


@ours
@pytest.mark.parametrize(("out", "columns", "groups"),
                         [(33, 70, 1), (97, 1664, 13), (5, 3, 1), (300, 384, 3), (40, 1536, 2), (37, 6272, 49)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_kernels_multiply_a_checkpoints_floats(out: int, columns: int, groups: int, dtype: torch.dtype) -> None:
    """As good as with the ordinary weights, whatever the number of rows, and each row as if it were alone."""
    weight, bias = normal(out, columns, groups), torch.randn(out, generator=torch.Generator().manual_seed(1))
    made, exact = StreamedFloat8Linear(weight, bias), weight.values().double()
    x = torch.randn(300, columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    got, want = made(x), x.double() @ exact.T + bias
    noise = 1e-6 * (x.double().abs() @ exact.abs().T + 1)
    assert ((got.double() - want).abs() <= noise + (want.abs() * 2**-8 if dtype == torch.bfloat16 else 0)).all()
    for rows in (1, 2, 4, 5, 6, 7, 12, 13, 17, 25, 33, 64, 65):
        assert torch.equal(made(x[300 - rows:]), got[300 - rows:]), f"{rows} rows"
    spoilt = x[:9].clone()
    spoilt[4] = torch.inf
    assert torch.equal(made(spoilt)[[0, 3, 5, 8]], got[[0, 3, 5, 8]])
    threads_move_no_bit(made, x, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_multiply_a_checkpoints_floats(dtype: torch.dtype, other_kernels: None) -> None:
    if not native.takes_narrow(native.EIGHT_FLOATS):
        pytest.skip("vectors of halves have no kernel for them")
    test_every_float_of_eight_bits_is_what_it_is(dtype)
    for shape in ((33, 70, 1), (300, 384, 3), (97, 1664, 13)):
        test_our_kernels_multiply_a_checkpoints_floats(*shape, dtype)


@ours
def test_bytes_of_a_checkpoints_floats() -> None:
    """A byte each, a thirty-second of that for steps, and hardly anything beside the panels."""
    made = streamed(normal(512, 1024, 8), None)
    assert isinstance(made, StreamedFloat8Linear) and 1.03 * 512 * 1024 < made.weight_bytes < 1.06 * 512 * 1024


@ours
def test_floats_that_panels_do_not_hold_become_an_ordinary_layer() -> None:
    """As many of every size as there are of any other: three upper bytes of nineteen would stand beside the panels."""
    eight = CODES[torch.randint(0, 254, (64, 256), generator=torch.Generator().manual_seed(0))]
    weight = published(eight, torch.full((64, 1), 0.3))
    made = streamed(weight, None)
    assert isinstance(made, PackedLinear)
    assert torch.allclose(made(torch.eye(256)), weight.values().t(), rtol=1e-3)
