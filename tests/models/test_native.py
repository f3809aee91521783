"""The compiled kernels: what torch computes, with bits that depend on nothing but the row; and what happens without a compiler."""

from __future__ import annotations

import ctypes
import math
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.activations import XIELUActivation

from draftproof import choices, compiler, native
from draftproof.core import host
from draftproof.models.between import bends_of, rms_norm, row_norm, turn
from draftproof.models.int4 import StreamedInt4Linear
from draftproof.models.int8 import StreamedInt8Linear
from draftproof.models.key_levels import rounded
from draftproof.models.packed import PackedLinear, StreamedLinear, holds_bfloat16, packed

ROWS = 29
TINY = 2.0**-126  # below, bfloat16 instructions take and give zeros
compiled = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a new process with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    yield tmp_path / "draftproof"
    native._library.cache_clear()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "columns"), [(80, 48), (81, 47), (5, 3), (1, 1), (256, 1000), (33, 2), (40, 1538), (33, 4609)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_linear_layer_and_a_row_does_not_feel_the_others(out: int, columns: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(out)
    layer = torch.nn.Linear(columns, out, bias=bias).bfloat16().to(dtype)
    streamed, x = StreamedLinear(layer.weight, layer.bias), torch.randn(ROWS, columns).to(dtype)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    got = streamed(x)
    assert got.dtype == dtype and got.shape == (ROWS, out)
    assert streamed.bits == 12 or streamed.weight_bytes == 2 * out * columns
    near = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((got.double() - exact).abs() <= exact.abs() * near + 2e-6).all(), "half a unit of the last place, and float32's noise"
    for count in range(1, ROWS):
        for start in range(0, ROWS - count, 5):
            assert torch.equal(streamed(x[start:start + count]), got[start:start + count]), f"{count} rows from {start}"
    assert streamed(x.view(1, ROWS, 1, columns)).shape == (1, ROWS, 1, out) and streamed(x[:0]).shape == (0, out)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_that_help_each_other_out_make_no_panel_twice_and_leave_none(dtype: torch.dtype) -> None:
    """Of a large product the last panels are whoever's is there: their number is no multiple of anything, and threads may be many."""
    random, before = torch.Generator().manual_seed(1), torch.get_num_threads()
    weight = torch.randn(1037, 1100, generator=random).bfloat16().to(dtype)
    assert weight.numel() > 1 << 20, "linear.c's LARGE"
    streamed, x = StreamedLinear(weight, None), torch.randn(9, 1100, generator=random).to(dtype)
    try:
        torch.set_num_threads(1)
        alone = [streamed(x[:rows]) for rows in (1, 2, 5, 9)]
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert all(torch.equal(streamed(x[:len(y)]), y) for y in alone for _ in range(3)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)
    exact = x.double() @ weight.double().T
    assert float((alone[-1].double() - exact).abs().max()) <= float(exact.abs().max()) * (2**-8 if dtype == torch.bfloat16 else 1e-5)


narrow = pytest.mark.skipif(not native.available()[0] or not native.takes_narrow(), reason="no products with weights in twelve bits here")


@narrow
@pytest.mark.parametrize(("out", "columns"), [(80, 48), (81, 47), (5, 3), (1, 1), (256, 1000), (40, 1538), (33, 4609)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_twelve_bits_hold_every_weight_and_no_product_tells(out: int, columns: int, spread: float) -> None:
    """Weights of a normal law and of ever wider ones, with infinities, numbers that are none, and zeros of both signs."""
    random = torch.Generator().manual_seed(columns)
    weight = torch.randn(out, columns, generator=random) * torch.exp(spread * torch.randn(out, columns, generator=random))
    weight[out // 2], weight[-1] = 0.0, -0.0
    weight[0, 0], weight[0, columns // 2], weight[0, -1] = float("inf"), 2.0**-126, float("nan")
    weight = weight.bfloat16()
    wide = native.product(panels := native.arrange(weight), None, None, out, columns, 16)
    held, spare = native.arrange_narrow(weight)
    product = native.product(held, None, None, out, columns, 12, spare)
    assert len(spare.at) == len(spare.words) + held.shape[0] and (spread < 4 or columns < 40 or len(spare.words) > 0)
    for rows in (1, 2, 6, 7, 12, 13, 29):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(rows, columns, generator=random).to(dtype)
            got, wanted = native.multiply(x, product), native.multiply(x, wide)
            assert torch.equal(got[:, 0].isnan(), wanted[:, 0].isnan()) and torch.equal(got[:, 1:], wanted[:, 1:]), f"{rows} rows, {dtype}"
    assert panels.numel() and held.nbytes <= 0.75 * panels.nbytes + 64 * held.shape[0] + 96 * native.loaded().wide()


@narrow
def test_a_layer_keeps_twelve_bits_where_they_hold_nearly_all() -> None:
    random = torch.Generator().manual_seed(3)
    normal = torch.randn(512, 512, generator=random)
    kept = packed(normal.bfloat16(), None)
    assert isinstance(kept, StreamedLinear) and kept.bits == 12 and kept.weight_bytes < 0.8 * 2 * normal.numel()
    wild = packed((normal * torch.exp(4 * torch.randn(512, 512, generator=random))).bfloat16(), None)
    assert isinstance(wild, StreamedLinear) and wild.bits == 16 and wild.weight_bytes == 2 * normal.numel()
    single = packed(normal.bfloat16().float(), None)
    assert isinstance(single, StreamedLinear) and single.bits == 16, "float32 rows meet the words themselves"


@compiled
@pytest.mark.parametrize("bits", [16, 12, 8, 4])
@pytest.mark.parametrize(("out", "columns"), [(33, 70), (97, 1600), (320, 64)])
def test_as_many_rows_as_share_a_reading_and_one_more(out: int, columns: int, bits: int) -> None:
    """Whatever a processor's kernels take at a time, 6 to 32 rows of one panel or two."""
    random, spare, steps = torch.Generator().manual_seed(out), None, None
    if bits == 12 and not native.takes_narrow():
        pytest.skip("no products with weights in twelve bits here")
    wide = -(-columns // 64) * 64 if bits == 4 else columns
    levels = torch.randint(0, 16, (out, wide), generator=random) if bits == 4 else torch.randint(-127, 128, (out, wide), generator=random)
    scale = torch.rand(out, wide // 64, 2, generator=random).bfloat16() if bits == 4 else torch.rand(out, generator=random)
    if bits == 4:
        weight = (levels - 8).view(out, -1, 64) * scale[..., :1].double() + scale[..., 1:].double()
        weight, panels = weight.view(out, wide)[:, :columns], native.arrange_four(levels.to(torch.uint8), scale)
    elif bits == 8:
        weight, panels, steps = levels * scale.double()[:, None], native.arrange_eight(levels.to(torch.int8)), scale
    else:
        held = (levels * scale[:, None]).bfloat16()
        panels, spare = native.arrange_narrow(held) if bits == 12 else (native.arrange(held), None)
        weight = held.double()
    product = native.product(panels, None, steps, out, columns, bits, spare)
    x = torch.randn(70, columns, generator=random).bfloat16()
    x[-1] *= 2.0**-126  # some of these count as zeros in tiles
    got, exact = native.multiply(x, product), x.double() @ weight.T
    assert float((got.double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
    for rows in (1, 6, 7, 12, 13, 15, 16, 17, 31, 32, 33, 64, 65):
        assert torch.equal(native.multiply(x[70 - rows:], product), got[70 - rows:]), f"{rows} rows"


@compiled
@pytest.mark.parametrize("form", [16, 12, 8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(230, 6200), (300, 2049), (129, 8192), (97, 31)])
def test_rows_that_do_not_fit_a_cache_together_are_multiplied_part_by_part(rows: int, columns: int, form: int) -> None:
    """Parts of 33 to 160 rows, whose panels are opened in one to four pieces; the last rows are few, or many."""
    random, steps, out = torch.Generator().manual_seed(rows), None, 37
    if form == 12 and not native.takes_narrow():
        pytest.skip("no products with weights in twelve bits here")
    weight, spare = torch.randn(out, columns, generator=random).bfloat16(), None
    if form == 8:
        levels, steps = torch.randint(-127, 128, (out, columns), generator=random), torch.rand(out, generator=random)
        weight, panels = levels * steps.double()[:, None], native.arrange_eight(levels.to(torch.int8))
    elif form == 4:
        groups = -(-columns // 64)
        levels, scale = torch.randint(0, 16, (out, groups, 64), generator=random), torch.rand(out, groups, 2, generator=random).bfloat16()
        weight = ((levels - 8) * scale[..., :1].double() + scale[..., 1:].double()).view(out, -1)[:, :columns]
        panels = native.arrange_four(levels.to(torch.uint8).view(out, -1), scale)
    else:
        weight[::5, ::7] *= 2.0**40  # blocks that twelve bits do not hold
        panels, spare = native.arrange_narrow(weight) if form == 12 else (native.arrange(weight), None)
    bias = torch.randn(out, generator=random)
    product = native.product(panels, bias, steps, out, columns, form, spare)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns, generator=random).to(dtype)
        got, exact = native.multiply(x, product), x.double() @ weight.double().T + bias
        assert ((got.double() - exact).abs().amax(0) <= 2**-8 * exact.abs().amax(0)).all()
        for start in (0, 64, 96, 115, 127, 128, rows - 9, rows - 1):
            assert torch.equal(native.multiply(x[start:start + 9], product), got[start:start + 9]), f"rows from {start}, {dtype}"


@compiled
@pytest.mark.parametrize("rows", [7, 60])
@pytest.mark.parametrize("form", [StreamedLinear, StreamedInt8Linear, StreamedInt4Linear])
def test_the_number_of_threads_moves_no_bit(form: type[torch.nn.Module], rows: int) -> None:
    torch.manual_seed(2)
    streamed, x, threads = form(torch.randn(700, 300).bfloat16(), None), torch.randn(rows, 300), torch.get_num_threads()
    try:
        products = [(torch.set_num_threads(count), streamed(x))[1] for count in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(product, products[0]) for product in products)


@compiled
@pytest.mark.parametrize("bits", [16, 12])
@pytest.mark.parametrize("rows", [1, 60])
def test_a_matrix_without_columns_leaves_the_bias(rows: int, bits: int) -> None:
    if bits == 12 and not native.takes_narrow():
        pytest.skip("no products with weights in twelve bits here")
    held, bias, spare = torch.zeros(40, 0).bfloat16(), torch.randn(40), None
    panels, spare = native.arrange_narrow(held) if bits == 12 else (native.arrange(held), None)
    for dtype in (torch.float32, torch.bfloat16):
        got = native.multiply(torch.zeros(rows, 0, dtype=dtype), native.product(panels, bias, None, 40, 0, bits, spare))
        assert torch.equal(got, bias.to(dtype).expand(rows, 40))


@compiled
def test_sums_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    torch.manual_seed(3)
    x = torch.cat([torch.randn(4000, 2), torch.randn(4000, 2) * 2.0**-130, torch.randn(4000, 2) * 2.0**126,
                   torch.tensor([[float("inf"), 1.0], [float("inf"), float("-inf")], [float("nan"), 0.0], [-0.0, -0.0]])]).bfloat16()
    got = StreamedLinear(torch.ones(1, 2).bfloat16(), None)(x)[:, 0]
    wanted = (x[:, 0].float() + x[:, 1].float()).bfloat16()
    same = (got == wanted) | (got.isnan() & wanted.isnan()) | (got == 0) & (wanted.abs() < TINY)
    assert same.all(), f"{x[~same][:3]} became {got[~same][:3]}, expected {wanted[~same][:3]}"


@compiled
@pytest.mark.parametrize("columns", [8, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_infinities_stays_alone(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    streamed, x = StreamedLinear(torch.randn(20, columns).bfloat16(), None), torch.randn(6, columns).to(dtype)
    calm = streamed(x)
    x[3] = float("inf")
    assert torch.equal(streamed(x)[[0, 1, 2, 4, 5]], calm[[0, 1, 2, 4, 5]])


@compiled
def test_only_weights_that_are_bfloat16_are_read_as_such() -> None:
    torch.manual_seed(5)
    weight = torch.randn(8, 8)
    assert isinstance(packed(weight.bfloat16().float(), None), StreamedLinear) and isinstance(packed(weight, None), PackedLinear)
    assert holds_bfloat16(weight.bfloat16()) and not holds_bfloat16(weight) and not holds_bfloat16(torch.full((1, 1), float("nan")))


FUNCTIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (native.SILU, torch.nn.functional.silu), "gelu": (native.GELU, torch.nn.functional.gelu),
    "gelu by tanh": (native.GELU_BY_TANH, partial(torch.nn.functional.gelu, approximate="tanh")),
    "relu squared": (native.RELU_SQUARED, lambda x: torch.nn.functional.relu(x).square()),
    "relu": (native.RELU, torch.nn.functional.relu),
    "softplus": (native.SOFTPLUS, torch.nn.functional.softplus)}
GROUP, PAGES = 2, 9  # query heads of a key head; pages of the storage
SHAPES = [(256, 2, 64, 64, 3), (64, 1, 80, 48, 50), (16, 3, 20, 20, 1), (33, 1, 128, 128, 7), (1024, 1, 16, 16, 100)]


LEVELS = torch.int8  # keys and values in eight bits, of bfloat16 queries
KINDS = [torch.float32, torch.bfloat16, LEVELS]


def asked(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == LEVELS else dtype


def doubled(store: torch.Tensor) -> torch.Tensor:
    """Keys or values, in double precision."""
    if store.dtype != LEVELS:
        return store.double()
    return store[..., :-native.BEHIND].double() * store[..., -native.BEHIND:].contiguous().view(torch.float32).double()


@dataclass
class Play:
    """A pass over three paths: rows at the end of two and a half pages, rows within one page, and rows across an edge."""

    page: int
    heads: int
    dim: int
    deep: int
    width: int
    dtype: torch.dtype
    window: int | None = None
    sinks: torch.Tensor | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.page + self.dim)
        stores = [torch.randn(PAGES * self.page, self.heads, n) for n in (self.dim, self.deep)]
        self.keys, self.values = (rounded(store.bfloat16()) if self.dtype == LEVELS else store.to(self.dtype) for store in stores)
        starts = (2 * self.page + self.page // 2, 1, self.page - self.width // 2 - 1)
        self.positions = [start + i for start in starts for i in range(self.width)]
        self.rows = [range(path * self.width, (path + 1) * self.width) for path in range(3)]
        self.pages = [[4, 0, 7, 8], [2, 6], [5, 1, 3]]
        self.query = torch.randn(len(self.positions), self.heads * GROUP, self.dim).to(asked(self.dtype)) * 3

    def attend(self, rows: Sequence[int] | None = None, places: Sequence[int] | None = None) -> torch.Tensor:
        """Of these rows alone; with the storage's page i moved to places[i]."""
        chosen = list(range(len(self.positions))) if rows is None else list(rows)
        places = list(range(PAGES)) if places is None else places
        paths = [([places[i] for i in pages], [chosen.index(r) for r in mine if r in chosen], 0)
                 for pages, mine in zip(self.pages, self.rows, strict=True)]
        course = native.Course([self.positions[r] for r in chosen], paths, [], [], self.page)
        keys, values = torch.empty_like(self.keys), torch.empty_like(self.values)
        for moved, still in ((keys, self.keys), (values, self.values)):
            moved.view(PAGES, self.page, -1)[list(places)] = still.view(PAGES, self.page, -1)
        return native.attend(course, self.query[chosen], keys, values, 0.3, self.window, self.sinks, self.cap)

    def plain(self) -> torch.Tensor:
        """One softmax over the keys that a row sees, in double precision."""
        out = torch.empty(len(self.positions), self.heads * GROUP, self.deep, dtype=torch.float64)
        keys, values = (doubled(store) for store in (self.keys, self.values))
        for pages, mine in zip(self.pages, self.rows, strict=True):
            places = torch.tensor([page * self.page + i for page in pages for i in range(self.page)])
            for row in mine:
                at = self.positions[row]
                part = at - at % abs(self.window) if self.window else 0
                seen = places[max(0, at + 1 - self.window) if self.window and self.window > 0 else part:at + 1]
                for head in range(self.heads * GROUP):
                    scores = keys[seen, head // GROUP] @ self.query[row, head].double() * 0.3
                    if self.cap is not None:
                        scores = self.cap * torch.tanh(scores / self.cap)
                    if self.sinks is not None:
                        scores = torch.cat([scores, self.sinks[head:head + 1].double()])
                    out[row, head] = scores.softmax(0)[:len(seen)] @ values[seen, head // GROUP]
        return out


def plays(shape: tuple[int, ...], dtype: torch.dtype) -> list[Play]:
    """With every key seen, with a window, with sinks, and with both; with soft caps that most scores do not feel, and that all feel; and
    with those of a part of the text seen."""
    sinks, window = torch.linspace(-3, 30, shape[1] * GROUP), shape[0] + 5
    found = [Play(*shape, dtype, seen, more) for seen in (None, window) for more in (None, sinks)]
    return [*found, Play(*shape, dtype, None, None, 50.0), Play(*shape, dtype, window, sinks, 2.0), Play(*shape, dtype, -window, sinks)]


@compiled
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_one_softmax_over_the_keys_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for play in plays(shape, dtype):
        got, near = play.attend(), 1e-5 if dtype == torch.float32 else 2**-8
        assert got.dtype == asked(dtype)
        torch.testing.assert_close(got.double(), play.plain(), rtol=near, atol=5e-4 if dtype == LEVELS else 1e-5)  # a query's fifteen bits


@compiled
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_feel_the_others_nor_where_its_pages_lie(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for play in plays(shape, dtype):
        whole, count = play.attend(), len(play.positions)
        for rows in ([0], [count - 1], range(0, count, 2), range(1, count), range(play.width, 2 * play.width), range(count // 2)):
            assert torch.equal(play.attend(rows), whole[list(rows)]), f"rows {rows} of {count}"
        assert torch.equal(play.attend(None, [3, 8, 0, 5, 1, 7, 2, 4, 6]), whole), "pages elsewhere"
        threads = torch.get_num_threads()
        try:
            for other in (threads % 2 + 1, 5):
                torch.set_num_threads(other)
                assert torch.equal(play.attend(), whole), f"{other} threads"
        finally:
            torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("page", "heads", "dim", "deep", "root"), [(256, 2, 64, 64, 300), (64, 1, 80, 48, 126), (32, 3, 20, 20, 71),
                                                                    (48, 2, 128, 128, 5)])
def test_paths_read_a_common_beginning_in_the_first_ones_pages(page: int, heads: int, dim: int, deep: int, root: int,
                                                               dtype: torch.dtype) -> None:
    """Three paths through pages of their own, which hold the same keys before the root: or nothing there, and are told that they share
    it. Between them and behind them stand rows of other texts."""
    random = torch.Generator().manual_seed(page)
    whole = root // page
    first, second, third = ([*range(whole), whole + 3 * i, whole + 3 * i + 1] for i in range(3))
    other = [3 * whole + 20, 3 * whole + 21]
    paths = [(other, [0, 1]), (first, [2, 3, 4]), (second, [5, 6]), (third, [7]), (other, [8, 9])]
    positions = [3, page + 1, root, root + 1, root + 2, root + 2, root + 3, root + 1, 0, page]
    storage = (3 * whole + 22) * page
    stores = [torch.randn(storage, heads, n, generator=random).to(asked(dtype)) for n in (dim, deep)]
    keys, values = (rounded(store) if dtype == LEVELS else store for store in stores)
    query = torch.randn(len(positions), heads * GROUP, dim, generator=random).to(asked(dtype)) * 3
    start, common = whole * page, root // native.CHUNK * native.CHUNK if page % native.CHUNK == 0 else 0
    for store in (keys, values):
        for pages in (second, third):
            store[pages[whole] * page:pages[whole] * page + root - start] = store[first[whole] * page:first[whole] * page + root - start]
    bare = [store.clone() for store in (keys, values)]
    for store in bare:
        for pages in (second, third):
            store[pages[whole] * page:pages[whole] * page + common - start] = -1 if dtype == LEVELS else float("nan")     # a step's bits
    for window in (None, 40):
        for sinks in (None, torch.linspace(-3, 30, heads * GROUP)):
            apart = native.Course(positions, [(*path, 0) for path in paths], [], [], page)
            shared = native.Course(positions, [(*path, common if path[0] in (second, third) else 0) for path in paths], [], [], page)
            wanted = native.attend(apart, query, keys, values, 0.3, window, sinks)
            assert torch.equal(native.attend(shared, query, *bare, 0.3, window, sinks), wanted)
            alone = native.Course([positions[7]], [(first, [], 0), (third, [0], common)], [], [], page)
            assert torch.equal(native.attend(alone, query[7:8], *bare, 0.3, window, sinks), wanted[7:8]), "none of the first one's rows"


@compiled
@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_no_number_is_never_hidden_and_stays_alone(dtype: torch.dtype) -> None:
    play = Play(16, 1, 8, 8, 3, dtype)
    calm = play.attend()
    play.query[2, 0, 3] = float("nan")
    got = play.attend()
    assert got[2, 0].isnan().all() and got.isnan().sum() == play.deep
    others = ~got.isnan()
    assert torch.equal(got[others], calm[others])
    play.query[2, 0, 3] = float("inf")
    assert play.attend()[2, 0].isnan().all()


@compiled
def test_what_lies_behind_the_last_key_seen_is_not_read() -> None:
    """Stale keys of refused drafts, whatever they are, weigh nothing."""
    for dtype, great in ((torch.bfloat16, 1e30), (LEVELS, 113)):         # four bytes of 113 are a step of 1.2e30
        play = Play(64, 2, 32, 32, 2, dtype)
        calm = play.attend()
        for pages, mine in zip(play.pages, play.rows, strict=True):
            last = play.positions[mine[-1]]
            play.keys[pages[last // 64] * 64 + last % 64 + 1:(pages[last // 64] + 1) * 64] = great
        assert torch.equal(play.attend(), calm)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 20), (5, 6)])
def test_the_small_operations_of_a_block_are_their_twins(heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    rows, every = 7, torch.randn(7, heads + 2, dim).to(dtype) * 3
    x, flat, weight = every[:, :heads], torch.randn(rows, heads * dim).to(dtype), torch.randn(heads, dim).to(dtype)
    cos, sin = torch.randn(rows, 2, dim).to(dtype).split(1, 1)
    wide, sharp, end = weight.float() + 1e-3, (cos.float() + 1e-3, sin.float() + 1e-3), dim // 4 * 2
    part = cos[..., :end], sin[..., :end]
    both, gelu = torch.cat([flat, flat.flip(0) * 9], 1), partial(torch.nn.functional.gelu, approximate="tanh")
    pairs = {
        "norm": (native.norm(flat, weight.view(-1), 1e-5), rms_norm(flat, weight.view(-1), 1e-5)),
        "norm of heads": (native.norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5)),
        "norm that is rounded once": (native.norm(x, wide, 1e-5), rms_norm(x, wide, 1e-5)),
        "turn": (native.turn(x, cos, sin), turn(x, cos, sin)),
        "turn that is rounded once": (native.turn(x, *sharp), turn(x, *sharp)),
        "turn of a part": (native.turn(x, *part), turn(x, *part)),
        "gate": (native.gate(both), torch.nn.functional.silu(flat) * (flat.flip(0) * 9)),
        "gate by gelu": (native.gate(both, native.GELU_BY_TANH), gelu(flat.double()).to(dtype) * (flat.flip(0) * 9)),
    }
    assert torch.equal(pairs["turn of a part"][0][..., end:], x[..., end:])
    for name, (got, want) in pairs.items():
        assert got.dtype == dtype and got.shape == want.shape, name
        torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6, msg=name)
    for start, count in ((0, 1), (2, 3), (5, 2)):
        some = slice(start, start + count)
        assert torch.equal(native.norm(flat[some], weight.view(-1), 1e-5), pairs["norm"][0][some])
        assert torch.equal(native.norm(x[some], weight, 1e-5), pairs["norm of heads"][0][some])
        assert torch.equal(native.turn(x[some], cos[some], sin[some]), pairs["turn"][0][some])
        assert torch.equal(native.gate(both[some]), pairs["gate"][0][some])


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 20), (5, 6)])
def test_centred_norms_and_functions_of_no_gate_are_their_twins(heads: int, dim: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(dim)
    every = torch.randn(7, heads + 2, dim, generator=random).to(dtype) * 3 + 1
    x, flat = every[:, :heads], every[:, :heads].flatten(1)
    weight, bias = torch.randn(2, heads, dim, generator=random)
    calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "norm": (lambda x: native.norm(x, weight.view(-1), 1e-5, bias.view(-1)),
                 lambda x: torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight.view(-1), bias.view(-1), 1e-5), flat),
        "norm of heads": (lambda x: native.norm(x, weight, 1e-5, bias), lambda x: row_norm(x, weight, 1e-5, bias), x)}
    for name, (act, plain) in FUNCTIONS.items():
        calls[name] = (partial(native.gate, act=act, alone=True), lambda x, plain=plain: plain(x.double()), flat)  # type: ignore[misc]
        calls[f"gated {name}"] = (partial(native.gate, act=act),
                                  lambda x, plain=plain: plain(x.chunk(2, 1)[0].double()).to(dtype) * x.chunk(2, 1)[1],  # type: ignore[misc]
                                  torch.cat([flat, flat.flip(0)], 1))
    for name, (ours, twin, given) in calls.items():
        whole = ours(given)
        assert whole.dtype == dtype, name
        torch.testing.assert_close(whole, twin(given).to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=2e-6, msg=name)
        assert torch.equal(torch.cat([ours(given[:1]), ours(given[1:4]), ours(given[4:])]), whole), name


@compiled
def test_functions_far_from_zero_neither_overflow_nor_hide_what_is_no_number() -> None:
    x = torch.tensor([[-1e30, -200.0, -12.0, -5.0, -1e-30, 0.0, 1e-30, 1e9, float("inf"), float("nan")]])
    for name, (act, plain) in FUNCTIONS.items():
        got, want = native.gate(x, act, alone=True), plain(x.double()).float()
        torch.testing.assert_close(got[:, :-2], want[:, :-2], rtol=1e-5, atol=2e-6, msg=name)
        assert got[0, -2] == float("inf") and got[0, -1].isnan(), name
    assert native.gate(torch.tensor([[float("-inf")]]), native.RELU_SQUARED, alone=True) == 0


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xielu_bends_as_torch_does(dtype: torch.dtype) -> None:
    act = XIELUActivation(0.7, 1.1, dtype=dtype)
    x = torch.cat([torch.randn(3, 77) * 4, torch.randn(3, 77) * 0.3, torch.tensor([-90.0, -1e-7, 0.0, 1e-7]).expand(3, -1)], 1).to(dtype)
    got, bends = native.bend(x, bends_of(act)), bends_of(act)
    torch.testing.assert_close(got, act(x).detach(), rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert torch.equal(torch.cat([native.bend(x[:1], bends), native.bend(x[1:], bends)]), got)
    assert native.bend(torch.tensor([[float("nan")]]), bends).isnan().all()


@compiled
def test_a_soft_cap_holds_what_is_too_large_and_hides_nothing() -> None:
    play = Play(64, 2, 32, 32, 2, torch.float32, cap=30.0)
    calm, seen = play.attend(), play.pages[0][0] * 64
    play.keys[seen] = torch.sign(play.keys[seen]) * float("inf")        # a score of +-inf is one of +-cap
    play.query = play.query.abs()
    play.keys[seen] = float("inf")
    assert play.attend().isfinite().all()
    play.keys[seen] = float("nan")
    got = play.attend()
    assert got[list(play.rows[0])].isnan().all() and got[list(play.rows[1])].isfinite().all() and calm.isfinite().all()


@compiled
def test_gates_far_from_zero_neither_overflow_nor_hide_what_is_no_number() -> None:
    x = torch.tensor([[-200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, float("nan"), float("inf")]])
    got = native.gate(torch.cat([x, torch.ones_like(x)], 1))
    torch.testing.assert_close(got[:, :8], torch.nn.functional.silu(x)[:, :8], rtol=1e-5, atol=1e-30, equal_nan=True)
    assert got[0, 8] == float("inf")


@compiled
@pytest.mark.parametrize("out", [40, 1700])
def test_matrices_lie_in_huge_pages_and_multiply_the_same(out: int) -> None:
    torch.manual_seed(6)
    weight = torch.randn(out, 900).bfloat16()
    x, layer = torch.randn(2, 900), StreamedLinear(weight, None)
    torch.testing.assert_close(layer(x), x @ weight.float().T, rtol=1e-4, atol=1e-4)
    if Path("/proc/self/smaps").exists() and Path("/sys/kernel/mm/transparent_hugepage").exists():
        rights, flags = mapping(layer.panels.data_ptr())
        assert "hg" in flags, "nobody asked"
        assert rights.endswith("p"), "most systems give shared memory small pages whatever is asked"


def mapping(address: int) -> tuple[str, list[str]]:
    """The rights and the flags of the memory that an address lies in."""
    rights, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            low, _, high = name.partition("-")
            rights, inside = rest[0], int(low, 16) <= address < int(high, 16)
        elif inside and name == "VmFlags:":
            return rights, rest
    raise AssertionError("an address without a mapping")


@compiled
def test_what_does_not_lie_in_order_is_copied_for_as_long_as_it_is_read() -> None:
    """Large enough that memory given back is no longer there."""
    random = torch.Generator().manual_seed(7)
    weight, x = torch.randn(3000, 2000, generator=random).bfloat16(), torch.randn(3, 3000, generator=random)
    assert torch.equal(native.arrange(weight.t()), native.arrange(weight.t().contiguous()))
    levels = (weight * 10).to(torch.int8)
    assert torch.equal(native.arrange_eight(levels.t()), native.arrange_eight(levels.t().contiguous()))
    wide = torch.randn(4000, 600, generator=random)
    assert torch.equal(native.gate(wide.t()), native.gate(wide.t().contiguous()))
    made, plain = StreamedLinear(weight.t(), None), StreamedLinear(weight.t().contiguous(), None)
    assert torch.equal(made(x.t().contiguous().t()), plain(x))


@compiled
def test_rows_are_copied_in_every_store() -> None:
    random = torch.Generator().manual_seed(9)
    for count, rows in ((1, 1), (3, 5), (9, 64)):
        kinds = [(torch.float32, torch.bfloat16)[i % 2] for i in range(count)]
        stores = [torch.randn(200, 1 + i % 3, 40 + i, generator=random).to(kind) for i, kind in enumerate(kinds)]
        wanted = [store.clone() for store in stores]
        for store in wanted:
            store[100:100 + rows] = store[7:7 + rows].clone()
            store[:2] = store[100:102].clone()
        native.copy_rows(stores, [(7, 100, rows), (100, 0, 2)])
        assert all(torch.equal(a, b) for a, b in zip(stores, wanted, strict=True))


def all_scored(x: torch.Tensor, keys: torch.Tensor | None, names: torch.Tensor | None, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of every row with everybody's noise computed: scores and columns."""
    tokens = np.arange(x.shape[1]) if names is None else names.numpy()
    scores = x.numpy() if keys is None else x.numpy() + host.gumbel(keys.numpy().view(np.uint32), tokens)
    columns = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, columns, 1), columns


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4096), (2, 4099), (40, 600), (3, 70_001)])
@pytest.mark.parametrize("noisy", [True, False])
def test_the_best_are_the_best_of_all(shape: tuple[int, int], noisy: bool) -> None:
    """Flat rows and steep ones, of many ties, with few possible tokens and with names of their own."""
    rows, size = shape
    random = torch.Generator().manual_seed(size)
    keys = torch.randint(-2**31, 2**31, (rows, 2), generator=random, dtype=torch.int64).int() if noisy else None
    names = torch.randperm(3 * size, generator=random)[:size]
    for scale in (0.0, 0.1, 1.0, 30.0, 1e6):
        x = (scale * torch.randn(rows, size, generator=random)).round(decimals=2).log_softmax(-1)
        excluded = torch.rand(rows, size, generator=random) < 0.5
        excluded[:, 0] = False
        for given in (x, x.masked_fill(excluded, -math.inf)):
            for k in {1, min(2, size), min(17, size)}:
                for named in (None, names):
                    scores, columns = choices.best(given, keys, named, k)
                    wanted, places = all_scored(given, keys, named, k)
                    possible = wanted > -math.inf
                    assert np.array_equal(scores.numpy(), wanted), "to the bit"
                    assert np.array_equal(columns.numpy()[possible], places[possible]), "ties go to the lowest"
                    assert all(len(set(row)) == k and 0 <= min(row) <= max(row) < size for row in columns.tolist())


@compiled
def test_a_choice_is_its_twins() -> None:
    """Over as many rows as a long text has choices."""
    random = torch.Generator().manual_seed(8)
    x = (2 * torch.randn(3000, 1500, generator=random)).log_softmax(-1)
    keys = torch.randint(-2**31, 2**31, (3000, 2), generator=random, dtype=torch.int64).int()
    drawn = keys.numpy().view(np.uint32)
    values, columns = host.best_of_row(x.numpy(), host.bound(drawn, None, 1500), drawn, None, 2)
    scores, places = choices.best(x, keys, None, 2)
    assert np.array_equal(scores.numpy(), values) and np.array_equal(places.numpy(), columns)


@compiled
@pytest.mark.parametrize("dtype", KINDS)
def test_other_kernels_compute_the_same(dtype: torch.dtype, other_kernels: None) -> None:
    for shape in SHAPES:
        test_attention_is_one_softmax_over_the_keys_seen(shape, dtype)
        test_a_row_does_not_feel_the_others_nor_where_its_pages_lie(shape, dtype)
    if dtype == LEVELS:
        return
    for out, columns in ((81, 47), (5, 3), (256, 1000)):
        test_the_product_is_the_linear_layer_and_a_row_does_not_feel_the_others(out, columns, True, dtype)
    for heads, dim in ((3, 64), (1, 20), (5, 6)):
        test_the_small_operations_of_a_block_are_their_twins(heads, dim, dtype)
    for noisy in (True, False):
        test_the_best_are_the_best_of_all((3, 4099), noisy)
    test_a_law_is_the_log_softmax_at_its_temperature(70_001)
    if dtype in (torch.float32, torch.bfloat16):
        test_what_filters_leave_is_what_their_twin_leaves(4099, dtype)
        test_the_first_of_the_largest(4099, dtype)


@compiled
@pytest.mark.parametrize("size", [1, 7, 64, 300, 4099, 70_001])
def test_a_law_is_the_log_softmax_at_its_temperature(size: int) -> None:
    """Flat and steep rows, some without most of their tokens, each as if it were alone."""
    random = torch.Generator().manual_seed(size)
    for scale in (0.0, 1.0, 30.0, 1e4):
        x = scale * torch.randn(5, size, generator=random)
        x[2, 1:] = -math.inf
        x[3, torch.rand(size, generator=random) < 0.5] = -math.inf
        x[3, 0] = 1.0
        for temperature in (1e-30, 0.3, 0.8, 1.0, 2.0):
            found = choices.law(x, temperature)
            assert found is not None
            wanted = ((x.double() - x.double().amax(1, keepdim=True)) / temperature).log_softmax(1)
            assert torch.equal(found == -math.inf, wanted.float() == -math.inf)
            close = torch.isclose(found.double(), wanted, rtol=1e-5, atol=2e-6) | (wanted < -3e38)
            assert bool(close.all()), float((found - wanted)[~close].abs().max())
            assert torch.equal(found[1:2], choices.law(x[1:2], temperature))  # type: ignore[arg-type]
            assert torch.equal(choices.law(x.bfloat16(), temperature), choices.law(x.bfloat16().float(), temperature))  # type: ignore[arg-type]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [40, 1030, 4099, 70_001, 300_001])
def test_what_filters_leave_is_what_their_twin_leaves(size: int, dtype: torch.dtype) -> None:
    """Steep and flat rows, ties, one with few possible tokens, and one whose large numbers stand behind all tiles."""
    random = torch.Generator().manual_seed(size)
    x = torch.randn(5, size, generator=random) * torch.tensor([[9.0], [1.0], [0.0], [3.0], [3.0]])
    x[3, torch.rand(size, generator=random) < 0.999] = -math.inf
    x[3, size // 2] = 1.0
    x[4, -30:] += 20
    x, told = x.to(dtype), 0
    for options in ((0.7, 0, 0.9, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 200, 0.8, 0.0), (1.0, 0, 1.0, 0.1)):
        f = host.Filters(*options)
        law = choices.law(x, f.temperature)
        assert law is not None
        for k, fall, room in ((1, 0.0, 1024), (8, 0.0, 1024), (300, 0.0, size), (size, 0.0, size), (0, 5.0, 64), (0, 5.0, size)):
            found = choices.filtered(x, choices.Filters.of(*f), k, fall, room)
            alone = choices.filtered(x[1:2], choices.Filters.of(*f), k, fall, room)
            assert found is not None and alone is not None and all(map(np.array_equal, found[1], alone[0]))
            for row, logp, (columns, logs) in zip(x.float().numpy(), law.numpy(), found, strict=True):
                total = None if f.top_k or f.top_p == 1 else float(np.exp(-logp.max().astype(np.float64)))
                wanted, expected = host.filtered(row, float(row.max()), total, f)
                assert not len(columns) or np.array_equal(columns, wanted) and np.allclose(logs, expected, rtol=1e-12, atol=1e-14)
                told += len(columns) > 0
                assert len(columns) or k != size, "who looks at all can tell"
    assert told > 40


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16, 300, 4099, 70_001])
def test_the_first_of_the_largest(size: int, dtype: torch.dtype) -> None:
    """Few values, so that there are many ties; zeros of both signs are one value."""
    random = torch.Generator().manual_seed(size)
    for lowest, highest in ((-3, 3), (-3, 0), (-9, -5)):
        x = torch.randint(lowest, highest + 1, (5, size), generator=random).to(dtype)
        x[torch.rand(x.shape, generator=random) < 0.3] *= -1 if highest == 0 and size > 7 else 1
        x[1, : size // 2] = -math.inf
        found = choices.first(x)
        assert found is not None and np.array_equal(found.numpy(), x.float().numpy().argmax(1, keepdims=True))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 40, 4099])
def test_a_row_without_a_finite_largest_is_said(size: int, dtype: torch.dtype) -> None:
    some = choices.Filters.of(0.7, 0, 0.9, 0.0)
    for place in {0, size // 2, size - 1}:
        for value in (math.nan, math.inf, -math.inf):
            x = torch.randn(3, size).to(dtype)
            x[1, place if value != -math.inf else slice(None)] = value
            assert choices.first(x) is None and choices.law(x, 0.7) is None and choices.filtered(x, some, 1, 0.0, 8) is None
            x[1] = 0.0
            assert choices.first(x) is not None and choices.law(x, 0.7) is not None and choices.filtered(x, some, 1, 0.0, 8) is not None


@compiled
def test_it_is_compiled_once_and_found_again(forgotten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FLAGS", [*compiler.FLAGS, "-O0"])    # nothing of it is run: half of -O1's time
    assert native.available()[0]
    first = [(path, path.stat().st_mtime_ns) for path in forgotten.iterdir()]
    native._library.cache_clear()
    assert native.available()[0]
    assert [(path, path.stat().st_mtime_ns) for path in forgotten.iterdir()] == first and len(first) == 1


@compiled
def test_what_a_compiler_is_told_beside_makes_another_library(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "told.c").write_text("int told(void) { return TOLD; }\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path / "kernels")
    for number in (1, 2, 1):
        monkeypatch.setenv("CC", f"{shlex.join(compiler._compiler()[:1])} -DTOLD={number}")
        assert ctypes.CDLL(str(compiler.built())).told() == number
    assert len(list(forgotten.iterdir())) == 2


def compiler_for(machine: str) -> list[str]:
    """This machine's own, or one that makes programs for the other kind; skips without."""
    if platform.machine() == machine:
        return compiler._compiler()
    if not shutil.which(cross := f"{machine.replace('_', '-')}-linux-gnu-gcc"):
        pytest.skip(f"no {cross} here")
    return [cross]


@compiled
@pytest.mark.parametrize(("machine", "processor"), [
    ("x86_64", "x86-64"), ("x86_64", "haswell"), ("x86_64", "skylake-avx512"), ("x86_64", "sapphirerapids"),
    ("aarch64", "armv8-a"), ("aarch64", "armv8.2-a+dotprod"), ("aarch64", "neoverse-v1")])
def test_they_compile_for_other_processors(machine: str, processor: str, tmp_path: Path) -> None:
    """Of Intel's kind without AVX, with AVX2, with AVX-512, and with tiles; of ARM's without products of bytes, with them, and with SVE."""
    told = f"-mcpu={processor}" if processor.startswith("neoverse") else f"-march={processor}"
    flags = ["-fsyntax-only", told, *(flag for flag in compiler.FLAGS if not flag.startswith("-march"))]
    sources = [str(path) for path in sorted(compiler.KERNELS.glob("*.c"))]
    made = subprocess.run([*compiler_for(machine), *flags, *sources], capture_output=True, text=True, cwd=tmp_path)
    if any(word in made.stderr for word in ("bad value", "unknown value", "unrecognized")) and told.split("=")[0] in made.stderr:
        pytest.skip(f"this compiler does not know {processor}")
    assert not made.returncode, made.stderr


@compiled
def test_files_call_their_own_functions_whoever_else_has_the_name(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """libc has a `getpid`, too, and was there first."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "own.c").write_text("int getpid(void) { return 7; }\n")
    (tmp_path / "kernels" / "told.c").write_text("int getpid(void);\nint told(void) { return getpid(); }\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path / "kernels")
    assert ctypes.CDLL(str(compiler.built())).told() == 7


@pytest.mark.parametrize(("asked", "said"), [("no-such-compiler", "no-such-compiler"), ("false", "returned non-zero")])
def test_without_a_working_compiler_torchs_own_layouts_are_taken(
        asked: str, said: str, forgotten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", asked)
    able, why = native.available()
    assert not able and said in why and not forgotten.exists()
    assert isinstance(packed(torch.randn(8, 8).bfloat16().float(), None), PackedLinear)


def test_a_source_that_does_not_compile_says_where(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "wrong.c").write_text("int wide(void) { return }\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path / "kernels")
    able, why = native.available()
    assert not able and (("stopped with 1" in why and "wrong.c" in why) or "no C compiler" in why)


def test_no_compiler_at_all(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    able, why = native.available()
    assert not able and "no C compiler found" in why


@compiled
def test_a_compiler_that_is_none_of_gccs_is_named(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho Debian clang version 14.0.6\n")
    (tmp_path / "cc").chmod(0o700)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    able, why = native.available()
    assert not able and f"{tmp_path}/cc is clang; expected GCC" in why


def test_a_system_other_than_linux_is_named(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    able, why = native.available()
    assert not able and "made on Linux, this is Darwin" in why and "container" in why


@compiled
def test_processors_that_share_a_home_have_libraries_of_their_own(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ARM's may have the same features, and only numbers tell the one kind, for which the compiler may know more, from the other."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "told.c").write_text("int told(void) { return 1; }\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(compiler, "CPUINFO", tmp_path / "cpuinfo")
    found = set()
    for part, megahertz in (("0xd0c", 1), ("0xd40", 1), ("0xd40", 2)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nBogoMIPS\t: {megahertz}\nFeatures\t: fp asimd asimddp\n"
                                          f"CPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: {part}\n")
        found.add(compiler.built())
    assert len(found) == 2


@compiled
@pytest.mark.parametrize("given", ["a file", "nothing, and the user has no home"])
def test_where_no_folder_can_keep_the_library_the_reason_says_how_to_name_one(
        given: str, forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    if given == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    able, why = native.available()
    assert not able and "in the variable XDG_CACHE_HOME" in why
