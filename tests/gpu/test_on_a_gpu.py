"""Our kernels on a GPU: what an interpreter and a compiler alone cannot show."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROWS = (5, 16, 17, 40, 64, 100, 128, 200, 320, 600)


@pytest.mark.parametrize("outputs, inputs", [(4096, 4096), (6144, 1024), (1000, 2048), (512, 14336)])
@pytest.mark.parametrize("eight", [False, True])
def test_a_row_has_the_bits_that_it_has_alone(outputs: int, inputs: int, eight: bool) -> None:
    """In tiles of every size, which other instructions multiply; plain, added and gated; rows of very different sizes, so that sums would
    show another order."""
    from draftproof.gpu import calls

    dice = torch.Generator("cuda").manual_seed(outputs)
    sizes = torch.randn(max(ROWS), inputs, generator=dice, device="cuda").mul_(2).exp_()
    x = (torch.randn(max(ROWS), inputs, generator=dice, device="cuda") * sizes).clamp(-1e4, 1e4)
    x = x.to(torch.float16 if eight else torch.bfloat16)
    weight, steps = torch.randn(outputs, inputs, generator=dice, device="cuda"), None
    if eight:
        steps = weight.abs().amax(1, keepdim=True) / 448
        weight = (weight / steps).to(torch.float8_e4m3fn)
    else:
        weight = weight.bfloat16()
    onto = torch.randn(max(ROWS), outputs, generator=dice, device="cuda").bfloat16()

    def three(rows: slice) -> list[Tensor]:
        ours = partial(calls.product, x[rows], weight, None, steps)
        return [ours(kind=torch.bfloat16), ours(onto=onto[rows].clone()), ours(gated=True, kind=torch.bfloat16)]

    alone = [torch.cat(each) for each in zip(*(three(slice(i, i + 1)) for i in range(max(ROWS))), strict=True)]
    for rows in ROWS:
        for found, right in zip(three(slice(0, rows)), alone, strict=True):
            assert torch.equal(found, right[:rows]), f"{rows} rows"


@pytest.mark.parametrize("heads, kv, dim, inputs", [(32, 8, 128, 4096), (9, 3, 64, 576), (8, 2, 96, 1000)])
@pytest.mark.parametrize("eight", [False, True])
def test_heads_in_one_kernel_are_the_product_turned(heads: int, kv: int, dim: int, inputs: int, eight: bool) -> None:
    """Queries, keys and values have the bits that two kernels give; a row without a place writes nothing."""
    from draftproof.gpu import calls

    dice = torch.Generator("cuda").manual_seed(dim)
    outputs, kind = (heads + 2 * kv) * dim, torch.float16 if eight else torch.bfloat16
    weight, steps = torch.randn(outputs, inputs, generator=dice, device="cuda"), None
    if eight:
        steps = weight.abs().amax(1, keepdim=True) / 448
        matrix = (weight / steps).to(torch.float8_e4m3fn)
    else:
        matrix = weight.bfloat16()
    for rows in range(1, calls.FEW + 1):
        x = torch.randn(rows, inputs, generator=dice, device="cuda").mul_(2).exp_().clamp_(max=1e3).to(kind)
        angles = torch.randn(rows, 2, dim, generator=dice, device="cuda").bfloat16()
        to = torch.randperm(100, generator=dice, device="cuda")[:rows]
        to[rows // 2] = -1 if rows > 1 else to[0]
        stores = [[torch.zeros(100, kv, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(2)]
        wanted = calls.product(x, matrix, None, steps, kind=torch.bfloat16)
        calls.turn(wanted, angles, None, 0.0, to, torch.arange(rows, device="cuda"), *stores[0])
        found = calls.heads(x, matrix, None, steps, angles, to, *stores[1], torch.bfloat16)
        assert torch.equal(found[:, :heads * dim], wanted[:, :heads * dim]) and all(map(torch.equal, *stores)), f"{rows} rows"
