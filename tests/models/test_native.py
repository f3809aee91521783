"""The compiled kernels: what torch computes, with bits that depend on nothing but the row; and what happens without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftproof.models import native
from draftproof.models.attention import plain_page
from draftproof.models.fused import rms_norm, turn
from draftproof.models.packed import PackedLinear, StreamedLinear, holds_bfloat16, packed

ROWS = 29
compiled = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a new process with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    yield tmp_path / "draftproof"
    native._library.cache_clear()


@pytest.fixture(scope="module")
def other_width(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The kernels with vectors of the width that this processor does not take; outputs of a panel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
        native._library.cache_clear()
        stock = native.arrange(torch.zeros(1, 2).bfloat16()).shape[2] // 2
        patch.setattr(native, "FLAGS", [*native.FLAGS, f"-DLANES={24 - stock}"])
        native._library.cache_clear()
        yield 2 * (24 - stock)
    native._library.cache_clear()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "columns"), [(80, 48), (81, 47), (5, 3), (1, 1), (256, 1000), (33, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_linear_layer_and_a_row_does_not_feel_the_others(out: int, columns: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(out)
    layer = torch.nn.Linear(columns, out, bias=bias).bfloat16().to(dtype)
    streamed, x = StreamedLinear(layer.weight, layer.bias), torch.randn(ROWS, columns).to(dtype)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    got = streamed(x)
    assert got.dtype == dtype and got.shape == (ROWS, out) and streamed.weight_bytes == 2 * out * columns
    near = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((got.double() - exact).abs() <= exact.abs() * near + 2e-6).all(), "half a unit of the last place, and float32's noise"
    for count in range(1, ROWS):
        for start in range(0, ROWS - count, 5):
            assert torch.equal(streamed(x[start:start + count]), got[start:start + count]), f"{count} rows from {start}"
    assert streamed(x.view(1, ROWS, 1, columns)).shape == (1, ROWS, 1, out) and streamed(x[:0]).shape == (0, out)


@compiled
def test_the_number_of_threads_moves_no_bit() -> None:
    torch.manual_seed(2)
    streamed, x, threads = StreamedLinear(torch.randn(700, 300).bfloat16(), None), torch.randn(7, 300), torch.get_num_threads()
    try:
        products = [(torch.set_num_threads(count), streamed(x))[1] for count in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(product, products[0]) for product in products)


@compiled
def test_sums_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    torch.manual_seed(3)
    x = torch.cat([torch.randn(4000, 2), torch.randn(4000, 2) * 2.0**-130, torch.randn(4000, 2) * 2.0**126,
                   torch.tensor([[float("inf"), 1.0], [float("inf"), float("-inf")], [float("nan"), 0.0], [-0.0, -0.0]])]).bfloat16()
    got = StreamedLinear(torch.ones(1, 2).bfloat16(), None)(x)[:, 0]
    wanted = (x[:, 0].float() + x[:, 1].float()).bfloat16()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
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


GROUP = 2  # query heads of a key head


def pages_and_queries(dtype: torch.dtype, page: int, heads: int, dim: int, deep: int, width: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of five pages, queries of three items, and a mask [3, 1, W, page] under which every query sees its first key."""
    torch.manual_seed(page + dim)
    keys, values = torch.randn(5, page, heads, dim).to(dtype), torch.randn(5, page, heads, deep).to(dtype)
    mask = torch.zeros(3, 1, width, page).masked_fill_(torch.rand(3, 1, width, page) < 0.3, float("-inf"))
    mask[..., 0] = 0
    return torch.randn(3, width, heads * GROUP, dim).to(dtype) * 3, keys, values, mask


SHAPES = [(256, 2, 64, 64, 3), (64, 1, 80, 48, 50), (16, 3, 20, 20, 1), (33, 1, 128, 128, 7), (1024, 1, 16, 16, 100)]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_the_plain_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, keys, values, mask = pages_and_queries(dtype, *shape)
    numbers = torch.tensor([4, 0, 2])
    out, lse = native.attend(query, keys, values, numbers, mask, 0.3)
    key, value = (pages[numbers].transpose(1, 2).double() for pages in (keys, values))
    for head in range(query.shape[2]):
        one = slice(head // GROUP, head // GROUP + 1)
        plain, plain_lse = plain_page(query[:, None, :, head].double(), key[:, one], value[:, one], mask, 0.3)
        torch.testing.assert_close(out[:, :, head], plain[:, 0].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, :, head], plain_lse[:, 0].float(), rtol=1e-5, atol=1e-5)
    assert out.dtype == lse.dtype == torch.float32


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_attention_item_does_not_feel_the_others(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, keys, values, mask = pages_and_queries(dtype, *shape)
    seen = shape[0] // 2 + 1
    mask[..., seen:] = float("-inf")
    numbers = torch.tensor([4, 0, 2])
    whole = native.attend(query, keys, values, numbers, mask, 0.3)

    def same(what: str, wanted: tuple[torch.Tensor, ...], *arguments: torch.Tensor) -> None:
        got = native.attend(*arguments, 0.3)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), what

    for i in range(3):
        alone = slice(i, i + 1)
        same("alone", (whole[0][alone], whole[1][alone]), query[alone], keys, values, numbers[alone], mask[alone])
    same("a shorter mask", whole, query, keys, values, numbers, mask[..., :seen])
    same("pages elsewhere", whole, query, keys[[2, 4, 0]], values[[2, 4, 0]], torch.tensor([1, 2, 0]), mask)
    same("a mask with more rows", whole, query, keys, values, numbers, torch.cat([mask, mask.flip(2)], 2))
    for count in range(1, min(query.shape[1], 9)):
        part = slice(query.shape[1] - count, None)
        same(f"{count} rows", (whole[0][:, part], whole[1][:, part]), query[:, part], keys, values, numbers, mask[:, :, part])
    first = query[:1].expand(3, -1, -1, -1).contiguous()
    same("one query for all", native.attend(first, keys, values, numbers, mask, 0.3), query[:1], keys, values, numbers, mask)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads % 2 + 1)
        same("another number of threads", whole, query, keys, values, numbers, mask)
    finally:
        torch.set_num_threads(threads)


@compiled
def test_attention_to_nothing_and_to_what_is_no_number() -> None:
    query, keys, values, mask = pages_and_queries(torch.float32, 16, 1, 8, 8, 3)
    mask[1, 0, 1] = float("-inf")
    query[0, 2, 0, 3] = float("nan")
    out, lse = native.attend(query, keys, values, torch.tensor([4, 0, 2]), mask, 0.3)
    assert (lse[1, 1] == float("-inf")).all() and not out[1, 1].any(), "what a page that a row cannot see weighs"
    assert lse[0, 2, 0].isnan() and out[0, 2, 0].isnan().all(), "never hidden"
    assert out.isnan().sum() == 8 and lse.isnan().sum() == 1


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 20), (5, 6)])
def test_the_small_operations_of_a_block_are_their_twins(heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    rows, wide = 7, heads * dim
    every = torch.randn(rows, heads + 2, dim).to(dtype) * 3
    x, flat, weight = every[:, :heads], torch.randn(rows, wide).to(dtype), torch.randn(heads, dim).to(dtype)
    cos, sin = torch.randn(rows, 2, dim).to(dtype).split(1, 1)
    pairs = {
        "norm": (native.norm(flat, weight.view(-1), 1e-5), rms_norm(flat, weight.view(-1), 1e-5)),
        "norm of heads": (native.norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5)),
        "turn": (native.turn(x, cos, sin), turn(x, cos, sin)),
        "gate": (native.gate(torch.cat([flat, flat.flip(0) * 9], 1)), torch.nn.functional.silu(flat) * (flat.flip(0) * 9)),
    }
    for name, (got, want) in pairs.items():
        assert got.dtype == dtype and got.shape == want.shape, name
        torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6, msg=name)
    for start, count in ((0, 1), (2, 3), (5, 2)):
        part = slice(start, start + count)
        assert torch.equal(native.norm(flat[part], weight.view(-1), 1e-5), pairs["norm"][0][part])
        assert torch.equal(native.norm(x[part], weight, 1e-5), pairs["norm of heads"][0][part])
        assert torch.equal(native.turn(x[part], cos[part], sin[part]), pairs["turn"][0][part])
        assert torch.equal(native.gate(torch.cat([flat, flat.flip(0) * 9], 1)[part]), pairs["gate"][0][part])


@compiled
def test_gates_far_from_zero_neither_overflow_nor_hide_what_is_no_number() -> None:
    x = torch.tensor([[-200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, float("nan"), float("inf")]])
    got = native.gate(torch.cat([x, torch.ones_like(x)], 1))
    torch.testing.assert_close(got[:, :8], torch.nn.functional.silu(x)[:, :8], rtol=1e-5, atol=1e-30, equal_nan=True)
    assert got[0, 8] == float("inf")


@compiled
def test_a_large_matrix_lies_in_huge_pages_and_multiplies_the_same() -> None:
    torch.manual_seed(6)
    weight = torch.randn(1200, 900).bfloat16()
    assert 2 * weight.numel() > native.HUGE
    x = torch.randn(2, 900)
    torch.testing.assert_close(StreamedLinear(weight, None)(x), x @ weight.float().T, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_the_other_width_compute_the_same(dtype: torch.dtype, other_width: int) -> None:
    assert native.available()[0] and native.arrange(torch.zeros(1, 2).bfloat16()).shape[2] == other_width
    for shape in SHAPES:
        test_attention_is_the_plain_products(shape, dtype)
        test_an_attention_item_does_not_feel_the_others(shape, dtype)
    for out, columns in ((81, 47), (5, 3), (256, 1000)):
        test_the_product_is_the_linear_layer_and_a_row_does_not_feel_the_others(out, columns, True, dtype)
    for heads, dim in ((3, 64), (1, 20), (5, 6)):
        test_the_small_operations_of_a_block_are_their_twins(heads, dim, dtype)


@compiled
def test_it_is_compiled_once_and_found_again(forgotten: Path) -> None:
    assert native.available()[0]
    first = [(path, path.stat().st_mtime_ns) for path in forgotten.iterdir()]
    native._library.cache_clear()
    assert native.available()[0]
    assert [(path, path.stat().st_mtime_ns) for path in forgotten.iterdir()] == first and len(first) == 1


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
    monkeypatch.setattr(native, "KERNELS", tmp_path / "kernels")
    able, why = native.available()
    assert not able and (("stopped with 1" in why and "wrong.c" in why) or "no C compiler" in why)


def test_no_compiler_at_all(forgotten: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    able, why = native.available()
    assert not able and "no C compiler found" in why
