"""Blocks by our kernels for a GPU, in Triton's interpreter, against the fused block of torch's operations and against themselves: bits of a
row beside others, recorded and not. What Triton's compiler makes of the kernels is tested where there is a GPU, by the load itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_fused import play, save
from test_graphs import recorded

from draftproof import Engine, Sampling
from draftproof.config import LoadConfig
from draftproof.models import rows
from draftproof.models.float8 import Float8Linear
from draftproof.models.graphs import GraphedPass
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid)")     # rows that fill a recording up hold what nobody reads


@pytest.fixture(autouse=True)
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take our kernels for a GPU."""
    monkeypatch.setattr(rows, "usable", lambda *_: True)


def loaded(folder: Path, **more: object) -> PagedTarget:
    config = LoadConfig(dtype="float32", device="cpu", page_tokens=64, self_test=False, **more)  # type: ignore[arg-type]
    target = load_target(folder, config)
    assert isinstance(target, PagedTarget)
    return target


@pytest.mark.parametrize("family", ["biased llama", "qwen3", "ministral"])
def test_our_kernels_agree_with_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(family, tmp_path)
    ours = loaded(tmp_path)
    assert all(type(layer) is rows.RowsLayer for layer in ours.parts.layers)
    monkeypatch.setattr(rows, "usable", lambda *_: False)
    for one, other in zip(play(ours), play(loaded(tmp_path)), strict=True):
        assert one.starts == other.starts
        for a, b in [(one.logits, other.logits), *((one.taps[i], other.taps[i]) for i in (0, 2))]:
            assert a.dtype == b.dtype and float((a - b).abs().max()) <= 2e-5 * float(b.abs().max())


@pytest.mark.parametrize("family", ["llama", "ministral"])
def test_a_row_has_its_bits_beside_any_others_recorded_or_not(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    plain = loaded(tmp_path)
    assert plain.fused is not None and plain.fused.rows_alone() and not plain.whole_tiles
    with recorded() as recorder:
        target = loaded(tmp_path)
    assert type(target.fused) is GraphedPass
    for one, other in zip(play(target), play(plain), strict=True):
        assert torch.equal(one.logits, other.logits) and all(torch.equal(one.taps[i], other.taps[i]) for i in (0, 2))
    assert recorder.replays >= 6


def test_many_rows_of_a_fast_load_are_torchs(tmp_path: Path) -> None:
    save("llama", tmp_path)
    target, twin = loaded(tmp_path, reproducible=False), loaded(tmp_path)
    text = torch.arange(rows.FEW + 20) % 190
    found = [each.extend([each.open(text.tolist())], [text]).logits for each in (target, twin)]
    assert not target.fused.rows_alone() and float((found[0] - found[1]).abs().max()) <= 2e-5 * float(found[1].abs().max())  # type: ignore[union-attr]


def test_texts_with_guesses_are_those_without(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    with recorded():
        target = loaded(tmp_path)
    sampling, texts = Sampling(temperature=0.8, max_tokens=24, seed=3, ignore_eos=True), []
    for spec in ("none", "ngram"):
        with Engine(target, spec, 0 if spec == "none" else 3) as engine:
            texts.append(engine.generate([5, 9, 5, 9, 5], sampling).token_ids)
    assert texts[0] == texts[1]


def test_weights_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*shape, generator=random) for shape in ((96, 160), (96,), (5, 160)))
    made = rows.linear_of_eight(True)(weight, bias)
    assert isinstance(made, rows.RowsFloat8Linear)
    wide = made.eight.float() * made.steps
    assert torch.equal(made.matrix(), Float8Linear(weight, bias).eight)
    near = {"plain": torch.nn.functional.linear(x, wide, bias), "onto": x[:, :96] + torch.nn.functional.linear(x, wide, bias)}
    for name, found in (("plain", made(x)), ("onto", made.onto(x[:, :96].clone(), x))):
        assert float((found - near[name]).abs().max()) <= 2e-3 * float(near[name].abs().max()), name
    assert isinstance(rows.linear_of_eight(True)(weight[:90], None), rows.RowsLinear)


def test_a_kernel_that_is_wrong_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.errors import LoadError
    from draftproof.gpu import calls

    save("llama", tmp_path)
    right = calls.attend
    monkeypatch.setattr(calls, "attend", lambda *given: right(*given) / 2)
    with pytest.raises(LoadError, match=r"our kernels and torch's operations differ by .*expected at most .*packed=False"):
        loaded(tmp_path)
