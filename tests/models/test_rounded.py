"""Rounded weights, eight bits and four: rows keep their bits, and speculation changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_int4 import dense
from test_native import compiled

from draftproof import Engine, LoadConfig, Sampling, native
from draftproof.errors import LoadError, OptionError
from draftproof.models import int4, int8
from draftproof.models.forms import ROUNDED, form_of
from draftproof.models.load import load_target
from draftproof.models.packed import PackedLinear

Pair = tuple[Path, Path]
OURS = {name: forms["cpu"][:2] for name, forms in ROUNDED.items() if "cpu" in forms}
forms = pytest.mark.parametrize("name", OURS)
CLASSES = {"int8": (int8.StreamedInt8Linear, int8.Int8Linear), "int4": (int4.StreamedInt4Linear, int4.Int4Linear)}


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through our kernels, or as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: (False, "the test wants none"))
        if not all(able()[0] for _, able in OURS.values()):
            pytest.skip("torch has no product with rounded weights here")
    elif not native.available()[0]:
        pytest.skip(native.available()[1])
    return str(request.param)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_its_neighbours(way: str, name: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    made = OURS[name][0](torch.randn(384, 384, generator=random).to(dtype), None)
    x = torch.randn(70, 384, generator=random)
    x[1::4] *= 1e-6
    x[3::4] = 0.0
    x[5, 3] = 1e30                                     # a neighbour that any shared scale would follow
    x = x.to(dtype)
    alone = torch.cat([made(row[None]) for row in x])
    assert alone.dtype == dtype
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, stop in ((0, 2), (0, 5), (3, 20), (0, 70)):
            assert torch.equal(made(x[start:stop]), alone[start:stop])
            assert torch.equal(made(x[None, start:stop])[0], alone[start:stop])
    torch.set_num_threads(1)


@forms
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rounded_target_is_a_target(way: str, tiny_pair: Pair, name: str, temperature: float) -> None:
    load = LoadConfig(quantization=name, dtype="float32")
    target = load_target(tiny_pair[0], load)
    assert target.facts.invisible and target.facts.reasons["linear layers"].startswith(f"{name}: ")
    full = load_target(tiny_pair[0], LoadConfig(dtype="float32", self_test=False))
    assert target.facts.weight_bytes < 0.6 * full.facts.weight_bytes
    sampling = Sampling(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
    texts = []
    for spec in ("none", "ngram", f"model:{tiny_pair[1]}"):
        with Engine(target, spec, load=load) as engine:
            texts.append(engine.generate([5, 9, 5, 9, 5], sampling).token_ids)
    assert texts[0] == texts[1] == texts[2]


@forms
def test_every_linear_layer_is_rounded(way: str, tiny_pair: Pair, name: str) -> None:
    target = load_target(tiny_pair[0], LoadConfig(quantization=name, self_test=False))
    form = CLASSES[name][way == "torch"]
    known = {type(module) for layer in target.parts.layers for module in layer.modules()} & {form, PackedLinear, torch.nn.Linear}
    assert known == {form} and type(target.parts.output) is form


SIZES = {"int8": (14, 512), "int4": (11, int4.GROUP)}  # bits of an activation's size, and the columns that share a step


def in_whole(x: torch.Tensor, name: str) -> torch.Tensor:
    """What our kernels make of rows: whole numbers below 2^size times a power of two, in float64."""
    (size, columns), count = SIZES[name], x.shape[1]
    grouped = torch.nn.functional.pad(x.double(), (0, -count % columns)).view(x.shape[0], -1, columns)
    power = torch.frexp(grouped.abs().amax(-1, keepdim=True).clamp_min(2.0**-100))[1]
    step = torch.ldexp(torch.ones_like(grouped), power - size)
    return ((grouped / step).round().clamp_max(2**size - 1) * step).flatten(1)[:, :count]


def kept(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weights that are left of these, in float64."""
    if name == "int8":
        whole, step = int8.rounded(weight)
        return whole.double() * step.double()[:, None]
    return dense(*int4.rounded(weight, torch.bfloat16))[:weight.shape[0], :weight.shape[1]]


@compiled
@forms
@pytest.mark.parametrize("shape", [(16, 64), (61, 200), (96, 2), (300, 384), (5, 1), (40, 1100)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_kernels_multiply_the_weights_that_are_kept(name: str, shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    """Against float64, whatever the number of rows."""
    random = torch.Generator().manual_seed(1)
    weight, x = torch.randn(*shape, generator=random) + 0.1, torch.randn(40, shape[1], generator=random).to(dtype)
    b = torch.randn(shape[0], generator=random) if bias else None
    made = CLASSES[name][0](weight, b)
    exact = kept(name, weight)
    want = in_whole(x, name) @ exact.T + (0 if b is None else b.double())
    noise = 1e-6 * (8 * x.abs().double() @ exact.abs().T + 1) + (want.abs() * 2**-8 if dtype == torch.bfloat16 else 0)
    for rows in (1, 2, 5, 6, 8, 9, 13, 17, 40):
        got = made(x[:rows])
        assert got.shape == (rows, shape[0]) and got.dtype == dtype
        assert ((got.double() - want[:rows]).abs() <= noise[:rows]).all()


@compiled
@forms
@pytest.mark.parametrize("rows", [1, 3, 12, 40])
def test_numbers_near_the_largest_lose_nothing_and_what_is_not_finite_spreads_no_further(name: str, rows: int) -> None:
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(70, 1100, generator=random)
    x = (torch.rand(rows, 1100, generator=random) * 0.87 + 0.13) * torch.randn(rows, 1, generator=random).exp()
    x[:, ::3] *= -1
    x = x.bfloat16().float()
    made, exact = CLASSES[name][0](weight, None), kept(name, weight)
    assert ((made(x).double() - x.double() @ exact.T).abs() <= 1e-6 * (8 * x.abs().double() @ exact.abs().T + 1)).all()
    spoilt = x.clone()
    spoilt[0, 700], spoilt[-1, 1099] = torch.inf, torch.nan
    got = made(spoilt)
    assert got[[0, -1]].isnan().all() and torch.equal(got[1:-1], made(x)[1:-1])


@compiled
@forms
def test_the_greatest_sums_fit(name: str) -> None:
    """Every level and every number as large as they come, 1,100 columns of them."""
    for sign in (1.0, -1.0):
        weight = torch.full((33, 1100), 3.0)
        weight[:, ::2] = 3.0 if name == "int8" else -3.0    # four bits: levels 15 and 0
        x = torch.full((9, 1100), sign * 1.9921875)         # bfloat16's last before a power of two
        x[:, ::2] *= 1.0 if name == "int8" else -1.0
        made, exact = CLASSES[name][0](weight, None), kept(name, weight)
        for rows in (1, 2, 9):
            assert torch.allclose(made(x[:rows]).double(), x[:rows].double() @ exact.T, rtol=1e-6)
    nearly = x[:2].sign() * (2.0 - 2.0**-23)                # what would be rounded up to 2^size
    assert torch.allclose(made(nearly).double(), in_whole(nearly, name) @ exact.T, rtol=1e-6)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_multiply_them_too(name: str, dtype: torch.dtype, other_kernels: None) -> None:
    for shape in ((61, 200), (300, 384), (40, 1100)):
        test_our_kernels_multiply_the_weights_that_are_kept(name, shape, True, dtype)
    test_numbers_near_the_largest_lose_nothing_and_what_is_not_finite_spreads_no_further(name, 12)
    test_the_greatest_sums_fit(name)


@compiled
@forms
def test_bytes_of_our_panels_are_counted(name: str) -> None:
    made = CLASSES[name][0](torch.randn(256, 512), None)
    assert made.weight_bytes == (256 * 512 + 256 * 4 if name == "int8" else 256 * 512 // 2 + 256 * 8 * 4)
    assert made.panels.numel() * 4 == (256 * 512 if name == "int8" else made.weight_bytes)


@forms
def test_what_cannot_be_rounded_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="rounded weights cannot be trained"):
        LoadConfig(quantization=name, packed=False)
    with pytest.raises(LoadError, match=f"quantization={name}: the model is on mps; expected a CPU with a C compiler or AVX2"):
        form_of(LoadConfig(quantization=name), torch.device("mps"), torch.bfloat16, {}, False)


def test_four_bits_on_a_gpu_need_a_product_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    config, reasons, capability = LoadConfig(quantization="int4"), dict[str, str](), [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])
    wanted = "a CPU with a C compiler or AVX2 or a GPU of compute capability 8.0 or more"
    with pytest.raises(LoadError, match=f"has compute capability 7.5; expected {wanted}"):
        form_of(config, torch.device("cuda"), torch.bfloat16, reasons, False)
    capability[0] = (9, 0)
    monkeypatch.setattr(int4, "multiplies_as_packed", lambda device: (device == "cuda", "as the test says"))
    assert form_of(config, torch.device("cuda"), torch.bfloat16, reasons, False) is int4.TensorCoreInt4Linear
    assert reasons["linear layers"] == "int4: as the test says"


def test_names_and_machines_are_checked(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="quantization='int3': expected int8, int4 or fp8"):
        LoadConfig(quantization="int3")
    monkeypatch.setattr(native, "available", lambda: (False, "the test wants none"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not int8.can_round()[0]
    with pytest.raises(LoadError, match="has no FBGEMM"):
        load_target(tiny_pair[0], LoadConfig(quantization="int8"))
