"""Our kernels for a GPU in Triton's interpreter, against torch in float32. What its compiler makes of them each load compares by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles here, and interprets nothing", allow_module_level=True)

from draftproof import gpu  # noqa: E402
from draftproof.gpu import calls  # noqa: E402

NEAR = {torch.float16: 2e-3, torch.float32: 2e-6}


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("rows, outputs, inputs", [(1, 96, 128), (5, 100, 136), (20, 40, 300)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = some(rows, inputs).to(dtype), (some(outputs, inputs) / 8).to(dtype), some(outputs).to(dtype)
    onto = some(rows, outputs, seed=1).to(dtype)
    wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert off(calls.product(x, weight, bias), wanted) < NEAR[dtype]
    first = onto.clone()
    found = calls.product(x, weight, None, onto=onto)
    assert found is onto and off(onto, first.float() + wanted - bias.float()) < NEAR[dtype]
    half = outputs // 2
    assert off(calls.product(x, weight, bias, gated=True), torch.nn.functional.silu(wanted[:, :half]) * wanted[:, half:]) < NEAR[dtype]


def test_weights_of_eight_bits_are_multiplied_as_they_are() -> None:
    x, weight = some(5, 160).half(), some(64, 160)
    steps = weight.abs().amax(1, keepdim=True) / 448
    eight = (weight / steps).to(torch.float8_e4m3fn)
    assert off(calls.product(x, eight, None, steps, kind=torch.float32), x.float() @ (eight.float() * steps).t()) < 1e-3
    large = calls.product(x * 100, eight, None, steps * 1e4, kind=torch.float16)
    assert bool(large.isfinite().all()) and float(large.abs().max()) == 65504, "cut into the range of halves"


def three_of(rows: int, outputs: int, inputs: int, eight: bool) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """A product plain, added and gated, of weights of sixteen or eight bits; and what the first is in float32."""
    x, weight, bias = some(rows, inputs).half(), (some(outputs, inputs) / 8).half(), some(outputs).half()
    steps = some(outputs).abs()[:, None] if eight else None
    matrix = weight.to(torch.float8_e4m3fn) if eight else weight

    def all_of_them() -> list[Tensor]:
        return [calls.product(x, matrix, bias, steps), calls.product(x, matrix, None, steps, onto=some(rows, outputs, seed=1).half()),
                calls.product(x, matrix, bias, steps, gated=True)]

    return all_of_them, torch.nn.functional.linear(x.float(), matrix.float() * (1 if steps is None else steps), bias.float())


@pytest.mark.parametrize("outputs, inputs", [(96, 128), (200, 136), (20, 64)])        # 3 and 7 blocks of 32 for two programs, and 1
@pytest.mark.parametrize("eight", [False, True])
def test_programs_that_take_several_blocks_compute_the_same(outputs: int, inputs: int, eight: bool,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them, _ = three_of(5, outputs, inputs, eight)
    monkeypatch.setattr(calls, "blocks", lambda *_: calls.Blocks(32, 64, 2, 4))
    one_each = all_of_them()
    monkeypatch.setattr(calls, "blocks", lambda *_: calls.Blocks(32, 64, 2, 4, programs=1))
    assert all(map(torch.equal, all_of_them(), one_each))


@pytest.mark.parametrize("rows", [33, 70, 97, 130, 200])
@pytest.mark.parametrize("eight", [False, True])
def test_programs_of_several_tiles_compute_the_same(rows: int, eight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read once for up to four tiles of 32 rows; every row's bits are those of a tile by itself, also one that is not full."""
    all_of_them, wanted = three_of(rows, 72, 136, eight)
    assert off(all_of_them()[0], wanted) < (2 if eight else 1) * NEAR[torch.float16]
    for programs in (0, 1):
        monkeypatch.setattr(calls, "blocks", lambda *_, programs=programs: calls.Blocks(32, 64, 2, 4, programs=programs))
        tiled = all_of_them()
        with monkeypatch.context() as now:
            now.setattr(calls, "MOST_TILES", 1)
            assert calls.tiled(rows) == (32, 1, -(-rows // 32)) and all(map(torch.equal, tiled, all_of_them()))


def test_tiles_of_a_program_hold_all_rows_and_few_more() -> None:
    assert [calls.tiled(rows)[:2] for rows in (1, 16, 17, 32, 33, 64, 80, 97, 128)] == \
        [(16, 1), (16, 1), (32, 1), (32, 1), (32, 2), (32, 2), (32, 3), (32, 4), (32, 4)]
    for rows in range(1, 700):
        tile, tiles, programs = calls.tiled(rows)
        assert 1 <= tiles <= calls.MOST_TILES and programs == -(-rows // (tile * calls.MOST_TILES))
        assert rows <= programs * tile * tiles < rows + tile * programs


def test_norm() -> None:
    x, weight = some(7, 136).half(), some(136).half()
    wanted = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    assert off(calls.norm(x, weight, 1e-5), wanted) < NEAR[torch.float16]
    assert calls.norm(x.float(), weight.float(), 1e-5, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_writes_the_keys_of_every_place(normed: bool) -> None:
    rows, heads, kv, dim = 3, 6, 2, 32
    whole, angles, factors = some(rows, (heads + 2 * kv) * dim).half(), some(rows, 2, dim).half(), some(heads + kv, dim).half()
    keys, values = some(40, kv, dim).half(), some(40, kv, dim).half()
    to, source = torch.tensor([9, 30, 11, 4]), torch.tensor([0, 1, 2, 1])      # row 1 lies on two paths
    before, parts, rest = keys.clone(), whole.clone().view(rows, -1, dim), [i for i in range(40) if i not in to.tolist()]
    turned = parts[:, :heads + kv]
    if normed:
        wide = turned.float()
        turned = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).half() * factors
    wanted = (turned * angles[:, :1]).add_(turned.roll(dim // 2, -1).mul_(angles[:, 1:]))
    calls.turn(whole, angles, factors if normed else None, 1e-5, to, source, keys, values)
    assert torch.equal(whole.view(rows, -1, dim)[:, :heads], wanted[:, :heads]) and torch.equal(keys[to], wanted[source, heads:])
    assert torch.equal(values[to], parts[source, heads + kv:]) and torch.equal(keys[rest], before[rest])


@pytest.mark.parametrize("heads, kv, page, window", [(8, 2, 64, None), (5, 1, 128, None), (6, 2, 128, 50)])
def test_attention_along_pages(heads: int, kv: int, page: int, window: int | None) -> None:
    dim, rows, text = 32, 3, 250                                                # three parts of a text
    whole, keys, values = some(rows, (heads + 2 * kv) * dim).half(), some(text, kv, dim).half(), some(text, kv, dim, seed=1).half()
    pages = torch.randperm(8, generator=torch.Generator().manual_seed(3))[:-(-text // page)] + 1
    stored = [torch.full(((9 * page), kv, dim), 9.0).half() for _ in range(2)]
    for t in range(text):
        place = int(pages[t // page]) * page + t % page
        stored[0][place], stored[1][place] = keys[t], values[t]
    at = torch.tensor([text - 3, text - 2, text - 1])
    seats, table = gpu.seats(heads // kv), torch.zeros(1, len(pages) + 2, dtype=torch.int64)
    table[0, :len(pages)] = pages
    tiles = -(-rows // seats)
    take = torch.tensor([min(i, rows - 1) for i in range(tiles * seats)])
    found = calls.attend(whole, *stored, gpu.Tiles(at, take, table, tiles), dim**-0.5, window, page).view(rows, heads, dim)
    for row, position in enumerate(at.tolist()):
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            query = whole.view(rows, -1, dim)[row, head].float()
            weights = torch.softmax(keys[first:position + 1, head * kv // heads].float() @ query / math.sqrt(dim), 0)
            assert off(found[row, head], weights @ values[first:position + 1, head * kv // heads].float()) < 4e-3
