"""What torch.compile joins between products, compiled here for a CPU, against its plain twins; law 2 in tiles; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from test_fused import play, save

from draftproof import Engine, LoadConfig, LoadError, OptionError, Sampling
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.models import between
from draftproof.models.between import Between, compare, joined, rms_norm
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget

LOAD = LoadConfig(dtype="float32", device="cpu", page_tokens=16, self_test=False, compile=True, threads=1)


@pytest.fixture(autouse=True)
def compiles_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(between, "COMPILES", {"cpu"})
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        yield                                                   # scalar code: to look for the best takes a compiler a quarter of a minute
    torch.compiler.reset()


def first_layer(target: PagedTarget) -> object:
    assert target.fused is not None
    return target.fused.layers[0]


@pytest.mark.parametrize(("family", "reproducible"), [("llama", True), ("qwen3", False)])
def test_a_joined_model_is_the_plain_one(family: str, reproducible: bool, tmp_path: Path) -> None:
    """Within rounding of transformers' own in every pass, none waits for a compiler; guesses, always wrong ones too, change nothing."""
    save(family, tmp_path)
    config = replace(LOAD, reproducible=reproducible)
    made, twin = load_target(tmp_path, config), load_target(tmp_path, replace(config, compile=False), fused=False)
    assert isinstance(made, PagedTarget) and isinstance(twin, PagedTarget)
    assert "torch.compile" in made.facts.reasons["between products"] and made.fused is not None
    assert (made.fused.layers[0]._weigh is None) is reproducible
    texts = []
    with torch.compiler.set_stance("fail_on_recompile"):
        for ours, theirs in zip(play(made), play(twin), strict=True):
            assert torch.allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        for spec in ("none", "ngram", AlwaysWrong(made.vocab_size)):
            with Engine(made, spec, 0 if spec == "none" else 3, load=config) as engine:
                options = Sampling(temperature=0.8, max_tokens=16, seed=2, ignore_eos=True)
                texts.append(engine.generate([5, 9, 5, 9, 5], options).token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_tiles_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    found = joined(tiled=True)
    x, weight = torch.randn(70, 96).to(dtype), torch.randn(96).to(dtype)
    whole = found.norm(x, weight, 1e-5)
    assert (whole.float() - rms_norm(x, weight, 1e-5).float()).abs().max() <= between.TOLERANCE[dtype] * whole.float().abs().max()
    for rows in (*range(1, 10), 64, 65):
        assert torch.equal(found.norm(x[:rows], weight, 1e-5), whole[:rows]), rows
        assert torch.equal(found.norm(x[-rows:], weight, 1e-5), whole[-rows:]), rows


def test_a_wrong_kernel_and_one_that_does_not_compile_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    target = load_target(tmp_path, replace(LOAD, compile=False))
    assert isinstance(target, PagedTarget)
    plain = Between(rms_norm, between.turn)
    compare(plain, first_layer(target), 16)
    with pytest.raises(LoadError, match="the joined rotation is off by .*leave it out"):
        compare(replace(plain, turn=lambda x, cos, sin: between.turn(x, cos, -sin)), first_layer(target), 16)

    def broken(*given: object) -> torch.Tensor:
        raise RuntimeError("no Triton here\nand more")

    with pytest.raises(LoadError, match=r"the gate did not compile \(no Triton here\)"):
        compare(replace(plain, gate=broken), first_layer(target), 16)


def test_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    with pytest.raises(OptionError, match="leave one of them out"):
        LoadConfig(compile=True, packed=False)
    with pytest.raises(LoadError, match="whose blocks are fused"):
        between.compiled_between(False, "GPT-2 is not one of the families", torch.device("cpu"), True, {})
    monkeypatch.setattr(between, "COMPILES", {"cuda"})
    with pytest.raises(LoadError, match="compile=True: the model is on cpu.*expected a GPU"):
        load_target(tmp_path, LOAD)
    draft = LoadConfig(device="cuda", compile=True).of_draft()
    assert draft.compile and not replace(draft, draft_device="cpu").of_draft().compile
