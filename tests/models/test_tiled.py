"""Products and sums of one shape: the numbers of the ordinary layer, and bits that do not depend on how many rows there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_fused import save

from draftproof.config import LoadConfig
from draftproof.models import float8, int4, load
from draftproof.models.between import rms_norm, tiled_norm
from draftproof.models.forms import form_of
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.tiled import TILE_ROWS, TiledLinear, by_tiles

ROWS = 130  # two whole tiles and a bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_tiled_layer_is_the_linear_layer_whatever_the_number_of_rows(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(96, 160, bias=bias).to(dtype), torch.randn(ROWS, 96).to(dtype)
    tiled = TiledLinear(layer.weight, layer.bias)
    assert tiled.weight.data_ptr() == layer.weight.data_ptr(), "no second copy"
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        whole = tiled(x)
        near = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert whole.dtype == dtype and ((whole.double() - exact).abs() <= exact.abs() * near + 1e-5).all()
        for rows in range(1, ROWS + 1):
            assert torch.equal(tiled(x[:rows]), whole[:rows]), f"{rows} rows"
        assert torch.equal(tiled(x.view(2, 65, 96)), whole.view(2, 65, 160)) and tiled(x[:1, None]).shape == (1, 1, 160)


@pytest.mark.parametrize("shape", [(96,), (6, 16)])
def test_a_tiled_norm_is_the_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(ROWS, *shape), torch.randn(shape)
    whole = tiled_norm(x, weight, 1e-5)
    torch.testing.assert_close(whole, rms_norm(x, weight, 1e-5))
    for rows in (1, 2, 63, 64, 65, 128):
        assert torch.equal(tiled_norm(x[:rows], weight, 1e-5), whole[:rows])


def test_every_call_has_the_one_shape_and_the_rows_in_order() -> None:
    shapes = []

    def double(tile: torch.Tensor) -> torch.Tensor:
        shapes.append((tile.shape, tile.stride()))
        return tile * 2

    for rows in (1, 5, TILE_ROWS, TILE_ROWS + 1, ROWS):
        x = torch.randn(rows, 3, 4)
        assert torch.equal(by_tiles(double, x), x * 2)
        assert torch.equal(by_tiles(double, x.transpose(1, 2)), x.transpose(1, 2) * 2)
    assert {shape for shape, _ in shapes} == {(TILE_ROWS, 3, 4), (TILE_ROWS, 4, 3)}
    assert {stride for _, stride in shapes} == {(12, 4, 1), (12, 3, 1)}


def test_a_device_takes_tiles_unless_it_shall_be_fast_or_train() -> None:
    for config, form, said in (
        (LoadConfig(), TiledLinear, "tiled: rows are multiplied 64 at a time"),
        (LoadConfig(reproducible=False), None, "stock: asked to be fast"),
        (LoadConfig(packed=False), None, "stock: packing is off"),
    ):
        reasons: dict[str, str] = {}
        assert form_of(config, torch.device("cuda"), torch.bfloat16, reasons, False) is form
        assert reasons["linear layers"].startswith(said)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "ministral"])
def test_a_target_of_tiles_is_invisible_and_its_rows_stand_alone(family: str, dtype: str, tmp_path: Path, as_on_a_device: None) -> None:
    save(family, tmp_path)
    target = load_target(tmp_path, LoadConfig(dtype=dtype, page_tokens=64, threads=torch.get_num_threads()))
    assert isinstance(target, PagedTarget) and target.fused is not None
    assert target.fused.rows_alone() and not target.whole_tiles and target.query_tile == 4
    assert target.facts.invisible, target.facts.invisible_reason
    kinds = {type(module) for module in target.model.modules() if isinstance(module, torch.nn.Linear)}
    assert kinds == {TiledLinear}


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_target_of_rounded_weights_is_tiled_too(form: str, tmp_path: Path, as_on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    monkeypatch.setattr(int4, "pack_tiles", lambda levels: levels)
    monkeypatch.setattr(int4, "multiply_tiles", lambda *given: int4.plain(*given).bfloat16())
    made, kind, tile = {"fp8": (float8.linear, float8.Float8Linear, TILE_ROWS),
                        "int4": (int4.TensorCoreInt4Linear, int4.TensorCoreInt4Linear, int4.ROWS)}[form]
    monkeypatch.setattr(load, "form_of", lambda *_: made)
    target = load_target(tmp_path, LoadConfig(dtype="bfloat16", page_tokens=64, threads=torch.get_num_threads()))
    assert isinstance(target, PagedTarget) and target.fused is not None
    assert target.fused.rows_alone() and [layer.tile() for layer in target.fused.layers] == [tile] * len(target.fused.layers)
    assert type(target.fused.layers[0].qkv) is kind and target.facts.invisible, target.facts.invisible_reason


def test_a_family_that_is_not_fused_is_tiled_too(tmp_path: Path, as_on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import families

    monkeypatch.setitem(families.FAMILIES, "bitnet", {})
    families.save("bitnet", tmp_path)
    target = load_target(tmp_path, LoadConfig(page_tokens=64, threads=torch.get_num_threads()))
    assert isinstance(target, PagedTarget) and target.fused is None and target.whole_tiles
    assert target.facts.invisible and type(target.parts.output) is TiledLinear
