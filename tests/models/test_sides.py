"""Gemma 4's blocks, fused: what stands beside rows for each layer, layers that read the keys and values of another, and experts beside an
MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from test_fused import play, several
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof import llama, native
from draftproof.config import LoadConfig
from draftproof.models.known import can_fuse
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.types import Draft

NEED = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
SIX = {"head_dim": 16, "sliding_window": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200,
       "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
MIXED = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40}
CASES: dict[str, dict[str, Any]] = {
    "small": SIX,
    "wide": {**SIX, "use_double_wide_mlp": True, "num_kv_shared_layers": 3},
    "all keys": {**SIX, "num_kv_shared_layers": 0},
    "nothing beside": {**SIX, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "keys are values": {**SIX, "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts": {**SIX, **MIXED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                "num_global_key_value_heads": 1},
    "experts and all else": {**SIX, **MIXED, "use_double_wide_mlp": True},
}


def model_of(case: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", **{**families.COMMON, **CASES[case]})
    model = families.calm(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with torch.no_grad():
        for name, held in model.named_buffers():
            if name.endswith("layer_scalar"):
                held.copy_(torch.rand(1) * 0.5 + 0.6)
    return model.bfloat16().to(dtype).eval()


def target_of(case: str, dtype: torch.dtype = torch.float32, **more: Any) -> PagedTarget:
    return families.fused_target(model_of(case, dtype), **more)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    model.save_pretrained(tmp_path)
    config = LoadConfig(page_tokens=16, self_test=False, threads=torch.get_num_threads())
    fused, plain = load_target(tmp_path, config), load_target(tmp_path, config, fused=False)
    assert isinstance(fused, PagedTarget) and isinstance(plain, PagedTarget) and fused.fused is not None and plain.fused is None
    for ours, theirs in zip(play(fused), play(plain), strict=True):
        for a, b in [(ours.logits, theirs.logits), *((ours.taps[i], theirs.taps[i]) for i in (0, 2))]:
            assert a.shape == b.shape and float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())


@NEED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_pass_in_one_call_has_the_bits_of_its_parts(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target, layers, one = target_of(case, dtype), target_of(case, dtype), target_of(case, dtype)
    assert target.fused is not None and target.fused.rows_alone()
    monkeypatch.setattr(layers.fused, "_kernels", lambda pool: None)
    monkeypatch.setattr(one.fused, "_model", lambda pool: None)
    for taps in ([], [1], [0, 5]):
        for found, *others in zip(*(several(each, taps) for each in (target, layers, one)), strict=True):
            for other in others:
                assert torch.equal(found.logits, other.logits)
                assert all(torch.equal(found.taps[layer], other.taps[layer]) for layer in taps)


@NEED
def test_rows_that_nobody_asks_for_leave_where_no_layer_has_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's, but for its last one; with the same bits, and not where a later layer is tapped."""
    text, (target, twin) = torch.arange(60) * 37 % 199 + 1, (target_of("wide", torch.bfloat16) for _ in range(2))
    assert target.fused is not None and target.fused.lent == 3
    monkeypatch.setattr(twin.fused, "_rest", lambda *_: None)
    found: list[int | None] = []
    forward = llama.forward

    def watched(*about: Any) -> Any:
        found.append(None if about[6] is None else about[6].rows)
        return forward(*about)

    monkeypatch.setattr(llama, "forward", watched)

    def read(each: PagedTarget, taps: list[int]) -> list[Tensor]:
        each.set_taps(taps)
        slots = [each.open(text.tolist()) for _ in range(2)]
        rows = [each.extend(slots, [text[:20], text[:7]]), each.extend(slots[:1], [text[20:50]]), each.extend(slots[:1], [text[50:51]]),
                each.score(slots[:1], text[51:52], [Draft.chain(text[52:55])])]
        return [part for one in rows for part in (one.logits, *one.taps.values())]

    for taps, trimmed in (([], [2, 1, None, None]), ([2], [2, 1, None, None]), ([1, 4], [None] * 4)):
        found.clear()
        ours = read(target, taps)
        assert found == trimmed, taps
        assert all(map(torch.equal, ours, read(twin, taps)))


def test_lent_keys_are_kept_once() -> None:
    target = target_of("wide")
    target.extend([target.open([1, 2, 3])], [torch.tensor([1, 2, 3])])
    assert set(target.pool.keys) == {0, 1, 2} == set(target.pool.values)
    assert target.facts.cache_bytes_per_token == 4 * sum(
        rows[0].numel() for store in (target.pool.keys, target.pool.values) for rows in store.values())


@pytest.mark.parametrize("case", ["small", "experts"])
def test_speculation_is_invisible(case: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        facts = target_of(case, dtype, self_test=True).facts
        assert facts.invisible, facts.invisible_reason


@NEED
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_experts_beside_an_mlp_have_the_bits_of_their_parts_in_a_team_of_any_size(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"quantization": f"int{bits}"} if bits < 16 else {}
    target, twin = (target_of("experts", torch.bfloat16, **more) for _ in range(2))
    assert target.fused is not None and target.fused.rows_alone()
    assert all(layer.routed.router.bits > 8 for layer in target.fused.layers if layer.routed is not None)
    monkeypatch.setattr(twin.fused, "_kernels", lambda pool: None)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for found, want in zip(several(target, [0, 5]), several(twin, [0, 5]), strict=True):
                assert torch.equal(found.logits, want.logits), f"{threads} threads"
                assert all(torch.equal(found.taps[layer], want.taps[layer]) for layer in (0, 5)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@NEED
def test_a_second_table_of_layers_leaves_the_first_what_it_reads() -> None:
    """Drafts by the first layers alone run beside the model's passes."""
    for case in ("small", "experts"):
        target = target_of(case)
        assert target.fused is not None
        tables = [target.fused.layers[0].kernel(target.pool) for _ in range(2)]
        assert tables[0].side == tables[1].side and tables[0].abreast == tables[1].abreast
        assert bool(tables[0].side) == (case == "small") and bool(tables[0].abreast) == (case == "experts")


def test_experts_behind_another_router_are_not_fused() -> None:
    model = model_of("experts")
    type_of, layer = type(model.model.layers[1].router), model.model.layers[1]
    layer.router.__class__ = type("AnotherRouter", (type_of,), {})
    able, why = can_fuse(model)
    assert not able and "layers of other classes" in why
