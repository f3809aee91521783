"""Four bits in groups of 32 and 16, whole numbers and floats, as checkpoints have them: by our kernels, against float64."""

from __future__ import annotations

import pytest
import torch
from threads import threads_move_no_bit

from draftproof import native
from draftproof.models.fours import StreamedFoursLinear, takes
from draftproof.models.levels import E2M1, Levels, LevelWeight

ours = pytest.mark.skipif(not native.available()[0] or not native.takes_narrow(native.FOUR_BY_32), reason="no kernel for them here")
kinds = pytest.mark.parametrize("floats", [True, False])


def published(out: int, group: int, groups: int, floats: bool) -> LevelWeight:
    random = torch.Generator().manual_seed(out)
    q = torch.randint(0, 16, (out, group * groups), generator=random).to(torch.uint8)
    scale = (torch.rand(out, groups, generator=random) * 0.01 + 0.001).half()
    zero = None if floats else torch.randint(0, 17, (out, groups), generator=random)
    levels = Levels(4, group * groups, scale, zero, lambda: q)
    assert takes(levels)
    return LevelWeight([levels], torch.float32, torch.device("cpu"))


def test_the_numbers_of_four_bits() -> None:
    """A sign, two bits of exponent and one of what is behind the point."""
    for code, value in enumerate(E2M1.tolist()):
        sign, exponent, last = code >> 3, code >> 1 & 3, code & 1
        assert value == (-1) ** sign * (last / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + last / 2))


@ours
@kinds
@pytest.mark.parametrize("group", [32, 16])
def test_every_level_is_what_it_stands_for(floats: bool, group: int) -> None:
    q = torch.stack([torch.arange(64).roll(turn) % 16 for turn in range(16)]).to(torch.uint8)
    scale = torch.rand(16, 64 // group, generator=torch.Generator().manual_seed(0)).bfloat16()
    zero = None if floats else torch.arange(16)[:, None].repeat(1, 64 // group)
    weight = LevelWeight([Levels(4, 64, scale, zero, lambda: q)], torch.float32, torch.device("cpu"))
    made = StreamedFoursLinear(weight, None)
    for rows in (1, 5, 64):
        got = torch.cat([made(x) for x in torch.eye(64).split(rows)])
        assert torch.allclose(got, weight.values().t(), rtol=1e-6, atol=1e-6 * float(scale.max())), f"{rows} rows"


@ours
@kinds
@pytest.mark.parametrize(("out", "group", "groups"), [(33, 32, 3), (97, 16, 40), (5, 16, 1), (300, 32, 12), (40, 96, 20), (37, 48, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_kernels_multiply_small_groups(out: int, group: int, groups: int, floats: bool, dtype: torch.dtype) -> None:
    """Activations of eight bits with a sign lose nothing; a row has the bits that it has alone."""
    random, weight = torch.Generator().manual_seed(2), published(out, group, groups, floats)
    bias, exact = torch.randn(out, generator=random), weight.values().double()
    made = StreamedFoursLinear(weight, bias)
    x = torch.randint(-128, 129, (150, group * groups), generator=random).to(dtype)
    got, want = made(x), x.double() @ exact.T + bias
    noise = 1e-6 * (x.double().abs() @ (exact.abs() + exact.abs().amax()).T + 1)
    assert ((got.double() - want).abs() <= noise + (want.abs() * 2**-8 if dtype == torch.bfloat16 else 0)).all()
    for rows in (1, 2, 4, 5, 6, 7, 12, 13, 17, 25, 33, 64, 65):
        assert torch.equal(made(x[150 - rows:]), got[150 - rows:]), f"{rows} rows"
    rough = torch.randn(150, group * groups, generator=random).to(dtype)
    halves = rough.double().abs() @ exact.abs().T * 2**-9 + (rough.double() @ exact.T).abs() * 2**-8
    assert ((made(rough).double() - rough.double() @ exact.T - bias).abs() <= halves + noise + 2**-8 * bias.abs()).all()
    spoilt = x[:9].clone()
    spoilt[4] = torch.inf
    assert torch.equal(made(spoilt)[[0, 3, 5, 8]], got[[0, 3, 5, 8]]) and made(spoilt)[4].isnan().all()
    threads_move_no_bit(made, x, got)


@kinds
def test_other_kernels_multiply_small_groups(floats: bool, other_kernels: None) -> None:
    if not native.takes_narrow(native.FOUR_BY_32):
        pytest.skip("vectors of halves have no kernel for them")
    for group in (32, 16):
        test_every_level_is_what_it_stands_for(floats, group)
    for shape in ((33, 32, 3), (97, 16, 40)):
        test_our_kernels_multiply_small_groups(*shape, floats, torch.bfloat16)


@ours
@pytest.mark.parametrize(("group", "bits"), [(32, 5), (16, 6), (96, 5)])
def test_bytes_of_small_groups(group: int, bits: int) -> None:
    made = StreamedFoursLinear(published(64, group, 64, True), None)
    heads = 64 * (64 // native.loaded().wide())  # a line for each panel
    assert made.weight_bytes == bits * 64 * 64 * group // 8 + heads


def test_zeros_that_a_word_does_not_hold() -> None:
    for zero in (-1.0, 32.0, 7.5):
        assert not takes(Levels(4, 64, torch.ones(1, 2), torch.tensor([[8.0, zero]]), lambda: torch.zeros(1, 64)))
