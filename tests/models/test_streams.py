"""Gemma 3n's blocks, fused: streams beside each other, a product beside attention, and gates of which most are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from test_fused import play, several
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof import native
from draftproof.config import LoadConfig
from draftproof.models.between import row_norm
from draftproof.models.known import can_fuse
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.shallow import shallow
from draftproof.models.sides import Sides
from draftproof.models.streams import StreamsLayer
from draftproof.types import Scores

NEED = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
SIX = {"hidden_size": 72, "head_dim": 16, "sliding_window": 24, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200,
       "num_hidden_layers": 6, "num_kv_shared_layers": 2, "laurel_rank": 12, "intermediate_size": [100, 96, 96, 40, 96, 100],
       "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
       "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.9, 0.0, 0.0]}
CASES: dict[str, dict[str, Any]] = {
    "small": SIX,
    "even": {**SIX, "hidden_size": 64, "hidden_size_per_layer_input": 32, "laurel_rank": 16, "intermediate_size": 96},  # as torch's own
    "all keys": {**SIX, "num_kv_shared_layers": 0, "altup_correct_scale": False},
}


def model_of(case: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3n_text", **{**families.COMMON, **CASES[case], **more})
    model = families.calm(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router_norm" in name:
                parameter.mul_(config.hidden_size ** 0.5)       # or the router sees next to nothing
            parameter.copy_(parameter.bfloat16())
    return model.to(dtype).eval()


def target_of(case: str, dtype: torch.dtype = torch.float32, **more: Any) -> PagedTarget:
    return families.fused_target(model_of(case, dtype), **more)


def compare(found: list[Scores], want: list[Scores], tolerance: float) -> None:
    for ours, theirs in zip(found, want, strict=True):
        assert set(ours.taps) == set(theirs.taps)
        for a, b in [(ours.logits, theirs.logits), *((ours.taps[layer], theirs.taps[layer]) for layer in theirs.taps)]:
            assert a.shape == b.shape and float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """And what taps hold: of the streams the first."""
    model_of("small").save_pretrained(tmp_path)
    config = LoadConfig(page_tokens=16, self_test=False, threads=torch.get_num_threads())
    fused, plain = load_target(tmp_path, config), load_target(tmp_path, config, fused=False)
    assert isinstance(fused, PagedTarget) and isinstance(plain, PagedTarget) and fused.fused is not None and plain.fused is None
    compare(play(fused), play(plain), 1e-4)


@NEED
@pytest.mark.parametrize("bits, tolerance", [(16, 1e-4), (4, 1e-2)])     # whole numbers that lie on an edge are rounded either way
def test_the_pass_in_one_call_is_that_of_its_parts(bits: int, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    more, count = ({}, 2) if bits == 16 else ({"quantization": f"int{bits}"}, 1)
    target, *others = (target_of("small", **more) for _ in range(count + 1))
    assert target.fused is not None and target.fused.rows_alone()
    assert all(isinstance(layer, StreamsLayer) and layer.left.bits == bits for layer in target.fused.layers)
    monkeypatch.setattr(others[0].fused, "_kernels", lambda pool: None)
    monkeypatch.setattr(others[-1].fused, "_model", lambda pool: None)
    found = several(target, [0, 5])
    for other in others:
        compare(found, several(other, [0, 5]), tolerance)


@NEED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_bits_of_itself_alone_in_a_team_of_any_size(dtype: torch.dtype) -> None:
    """Rows that nobody asks for leave where no later layer has keys, or in the last layer."""
    target, text, before = target_of("small", dtype), torch.arange(40) * 37 % 199 + 1, torch.get_num_threads()
    assert target.fused is not None and target.fused.lent == 4

    def read(parts: list[int], taps: list[int]) -> Tensor:
        target.set_taps(taps)
        slot = target.open([])
        found = [target.extend([slot], [part]) for part in torch.split(text, parts)]
        target.close(slot)
        return found[-1].logits

    try:
        want = read([1] * 40, [])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for parts, taps in (([40], []), ([40], [0, 5]), ([9, 30, 1], []), ([33, 7], [4])):
                assert torch.equal(read(parts, taps), want), f"{threads} threads, {parts}"
    finally:
        torch.set_num_threads(before)


def test_speculation_is_invisible() -> None:
    facts = target_of("even", self_test=True).facts
    assert facts.invisible, facts.invisible_reason


def test_drafts_by_the_first_layers_are_those_of_a_model_of_these_alone() -> None:
    text, model, target = torch.arange(30) * 37 % 199 + 1, model_of("all keys"), target_of("all keys")
    model.model.layers = model.model.layers[:2]
    want = model(input_ids=text[None], use_cache=False).logits[0, -1].detach()
    slot = target.open(text.tolist(), room=1)
    target.extend([slot], [text[:-1]])
    first = shallow(target, 2)
    found = first.extend([first.join(slot)], [text[-1:]]).logits[0]
    assert float((found - want).abs().max()) <= 1e-4 * float(want.abs().max())


def test_ids_beyond_the_embeddings_of_each_layers_own_count_as_the_first() -> None:
    body, ids = model_of("small", vocab_size_per_layer_input=150).model, torch.tensor([3, 149, 150, 199])
    sides = Sides(body)
    found, want = (sides(each, body.embed_tokens(ids), row_norm) for each in (ids, torch.tensor([3, 149, 0, 0])))
    assert torch.equal(found, want)


def test_other_streams_than_ours_are_not_fused() -> None:
    for more, said in (({"altup_num_inputs": 3}, "3 streams, of which layers compute with number 0"),
                       ({"altup_active_idx": 1}, "4 streams, of which layers compute with number 1")):
        able, why = can_fuse(model_of("small", **more))
        assert not able and said in why
