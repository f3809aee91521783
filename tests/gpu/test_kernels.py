"""Our kernels for a GPU in Triton's interpreter, against torch in float32. What its compiler makes of them each load compares by itself."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("rows", [17, 33, 64, 70, 130, 200])
@pytest.mark.parametrize("eight", [False, True])
def test_tiles_of_many_rows(rows: int, eight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, added and gated, of weights of sixteen or eight bits, in larger tiles, the last of which is not full, and in small ones."""
    x, weight, bias = some(rows, 136).half(), (some(72, 136) / 8).half(), some(72).half()
    onto, steps = some(rows, 72, seed=1).half(), some(72).abs()[:, None] if eight else None
    matrix = weight.to(torch.float8_e4m3fn) if eight else weight
    wanted = torch.nn.functional.linear(x.float(), matrix.float() * (1 if steps is None else steps))
    near = (2 if eight else 1) * NEAR[torch.float16]
    for large in (True, False):
        monkeypatch.setattr(calls, "large", lambda device, large=large: large)
        tiles = {calls.fitting(x.device, rows, 72, 136, matrix.element_size(), gated).rows for gated in (False, True)}
        assert tiles <= ({64, 128} if large and not eight else {32})
        both = wanted + bias.float()
        gate = torch.nn.functional.silu(both[:, :36]) * both[:, 36:]
        for found, right in ((calls.product(x, matrix, bias, steps), both), (calls.product(x, matrix, bias, steps, gated=True), gate),
                             (calls.product(x, matrix, None, steps, onto=onto.clone()), onto.float() + wanted)):
            assert off(found, right) < near


def test_tiles_take_as_few_turns_of_all_processors_as_can_be() -> None:
    """The 8B shape's q k v, o and down, and gate with up, on the 132 processors of an H200."""
    assert [calls.blocks(rows, 6144, 4096, 2, False)[:2] for rows in (16, 17, 64, 65, 128, 320, 576)] == \
        [(16, 64), *[(64, 64)] * 2, *[(64, 128)] * 2, (64, 256), (128, 256)]
    assert [calls.blocks(rows, 4096, 14336, 2, False)[:2] for rows in (16, 17, 128, 192, 320, 576)] == \
        [(16, 32), *[(64, 64)] * 2, (64, 128), (64, 256), (128, 256)]
    assert [calls.blocks(rows, 14336, 4096, 2, True)[:2] for rows in (16, 64, 128, 320, 576)] == \
        [(16, 64), (64, 128), (128, 128), (64, 64), (64, 128)]
    for rows in (17, 64, 320):
        assert calls.blocks(rows, 4096, 4096, 2, False, large=False).rows == calls.blocks(rows, 4096, 4096, 1, False).rows == 32


@pytest.mark.parametrize("width", [96, 1500])
def test_gate(width: int) -> None:
    both = some(3, 2 * width).half()
    wanted = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    torch.testing.assert_close(calls.gate(both), wanted, rtol=2e-3, atol=1e-4)
    large = calls.gate(both.float().abs() * 1e3, torch.float16)
    assert large.dtype == torch.float16 and bool(large.isfinite().all()) and float(large.abs().max()) == 65504


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
    to, source = torch.tensor([9, 30, 11, 4, -1]), torch.tensor([0, 1, 2, 1, 0])      # row 1 lies on two paths; the last one is no write
    before, parts, rest = keys.clone(), whole.clone().view(rows, -1, dim), [i for i in range(40) if i not in to.tolist()]
    turned = parts[:, :heads + kv]
    if normed:
        wide = turned.float()
        turned = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).half() * factors
    wanted = (turned * angles[:, :1]).add_(turned.roll(dim // 2, -1).mul_(angles[:, 1:]))
    calls.turn(whole, angles, factors if normed else None, 1e-5, to, source, keys, values)
    to, source = to[:-1], source[:-1]
    assert torch.equal(whole.view(rows, -1, dim)[:, :heads], wanted[:, :heads]) and torch.equal(keys[to], wanted[source, heads:])
    assert torch.equal(values[to], parts[source, heads + kv:]) and torch.equal(keys[rest], before[rest])


@pytest.mark.parametrize("dim, eight", [(32, False), (64, False), (96, False), (32, True)])
def test_heads_are_the_product_turned_and_put_in_place(dim: int, eight: bool) -> None:
    """To the bit, where sums are exact; the last row writes nothing."""
    rows, heads, kv, inputs = 5, 3, 2, 136
    outputs = (heads + 2 * kv) * dim
    x, weight, bias = some(rows, inputs).round().half(), (2 * some(outputs, inputs)).round().half(), some(outputs).half()
    steps = some(outputs).abs()[:, None] if eight else None
    matrix, angles, to = weight.to(torch.float8_e4m3fn) if eight else weight, some(rows, 2, dim).half(), torch.tensor([9, 30, 11, 4, -1])
    stores = [[some(40, kv, dim, seed=seed).half() for seed in (1, 2)] for _ in range(2)]
    wanted = calls.product(x, matrix, bias, steps, kind=torch.float16)
    calls.turn(wanted, angles, None, 0.0, to, torch.arange(rows), *stores[0])
    found = calls.heads(x, matrix, bias, steps, angles, to, *stores[1], torch.float16)
    assert torch.equal(found[:, :heads * dim], wanted[:, :heads * dim])
    assert all(map(torch.equal, *stores)) and not torch.equal(stores[0][0][4], some(40, kv, dim, seed=1).half()[4])


def test_half_a_head_is_a_multiple_of_what_a_program_takes() -> None:
    assert [calls.halves(dim) for dim in (16, 32, 64, 80, 96, 128)] == [0, 16, 32, 0, 16, 32]


@pytest.mark.parametrize("heads, kv, page, window", [(8, 2, 64, None), (5, 1, 128, None), (6, 2, 128, 50), (8, 2, 64, 50), (4, 2, 64, 130)])
def test_attention_along_pages(heads: int, kv: int, page: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    take = torch.tensor([*range(rows), *[-1] * (tiles * seats - rows)])
    attended = [calls.attend(whole, *stored, gpu.Tiles(at, seated, pages_of, tiles), dim**-0.5, window, page).view(rows, heads, dim)
                for seated, pages_of in ((take, table), (torch.cat((take, torch.full_like(take, -1))), torch.cat((table, 0 * table))))]
    assert torch.equal(*attended), "a path on which nobody sits changes nothing"
    found = attended[0]
    with monkeypatch.context() as patch:
        patch.setattr(calls, "ROOM", 1)
        parts, launch = [], calls._launch
        patch.setattr(calls, "_launch", lambda kernel, grid, *given, **more: (parts.append(grid[1]), launch(kernel, grid, *given, **more)))
        one = calls.attend(whole, *stored, gpu.Tiles(at, take, table, tiles), dim**-0.5, window, page).view(rows, heads, dim)
    assert torch.equal(one, found) and parts == [1, heads // kv] * kv, "one key head after the other, where parts would take much room"
    for row, position in enumerate(at.tolist()):
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            query = whole.view(rows, -1, dim)[row, head].float()
            weights = torch.softmax(keys[first:position + 1, head * kv // heads].float() @ query / math.sqrt(dim), 0)
            assert off(found[row, head], weights @ values[first:position + 1, head * kv // heads].float()) < 4e-3


def test_a_window_may_begin_behind_all_parts_that_are_joined_first() -> None:
    """Of a text as long as many parts: none of the first ones is seen."""
    dim, page, window = 16, 128, 40
    text = calls.PART * calls.SOME_PARTS + 2 * window
    whole, keys, values = some(1, 3 * dim).half(), some(text, 1, dim).half(), some(text, 1, dim, seed=1).half()
    pages, take = torch.arange(-(-text // page))[None], torch.tensor([0] + [-1] * (gpu.seats(1) - 1))
    stored = [torch.cat((store, store.new_zeros(pages.numel() * page - text, 1, dim))) for store in (keys, values)]
    found = calls.attend(whole, *stored, gpu.Tiles(torch.tensor([text - 1]), take, pages, 1), dim**-0.5, window, page)
    weights = torch.softmax(keys[-window:, 0].float() @ whole[0, :dim].float() / math.sqrt(dim), 0)
    assert off(found[0], weights @ values[-window:, 0].float()) < 4e-3


def test_a_kernel_is_launched_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks the current device, which may be another GPU."""
    current: list[torch.device] = []
    launched = []

    class Here:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *given, **more: launched.append((grid, list(current), given, more))

    monkeypatch.setattr(torch.cuda, "device", Here)
    monkeypatch.setattr(calls, "linked", lambda device: device.index == 1)
    second, fused = torch.device("cuda:1"), {"enable_fp_fusion": True}
    calls._launch(Kernel(), (2, 3), second, 5, num_warps=4)
    calls._launch(Kernel(), (1,), torch.device("cpu"), 6)
    assert launched == [((2, 3), [second], (5,), {**fused, "num_warps": 4, "launch_pdl": True, "LINKED": True}),
                        ((1,), [], (6,), {**fused, "LINKED": False})]


def test_rows_see_what_their_bits_say_behind_them() -> None:
    """As trees of a draft head do: rows at one position, guesses behind it, some of the 128 bits of each in either word."""
    heads, kv, dim, page, text = 4, 2, 32, 128, 100
    whole, keys, values = some(6, (heads + 2 * kv) * dim).half(), some(3 * page, kv, dim).half(), some(3 * page, kv, dim, seed=1).half()
    guesses = [[], [0], [0, 5], [63], [64, 127], [1, 62, 63, 64, 90]]
    sight = torch.zeros(6, 2, dtype=torch.int64)
    for row, seen in enumerate(guesses):
        for guess in seen:
            sight[row, guess // 64] |= torch.tensor(1) << guess % 64
    at, seats = torch.full((6,), text - 1), gpu.seats(heads // kv)
    take = torch.tensor([*range(6), *[-1] * (seats - 6)])
    tiles = gpu.Tiles(at, take, torch.arange(3)[None], 1)
    found = calls.attend(whole, keys, values, tiles, dim**-0.5, None, page, sight=sight).view(6, heads, dim)
    for row, seen in enumerate(guesses):
        own = [*range(text), *(text + guess for guess in seen)]
        for head in range(heads):
            weights = torch.softmax(keys[own, head // 2].float() @ whole.view(6, -1, dim)[row, head].float() / math.sqrt(dim), 0)
            assert off(found[row, head], weights @ values[own, head // 2].float()) < 4e-3
    assert torch.equal(calls.attend(whole, keys, values, tiles, dim**-0.5, None, page, sight=0 * sight),
                       calls.attend(whole, keys, values, tiles, dim**-0.5, None, page)), "no bit is no sight"


@pytest.mark.parametrize("moves", [[(5, 20)], [(3, 30), (4, 31), (5, 32), (3, 12), (9, 0), (8, 39)]])
def test_rows_move_within_every_store(moves: list[tuple[int, int]]) -> None:
    stores = [some(40, 2, 12, seed=i).bfloat16() for i in range(3)]
    wanted = [store.clone() for store in stores]
    source, target = torch.tensor(moves).t().contiguous()
    for store in wanted:
        store[target] = store[source]
    calls.move(torch.tensor([store.data_ptr() for store in stores]), stores[0], source, target)
    assert all(map(torch.equal, stores, wanted))
