"""Keys and values in eight bits: near what they were, the same bits whatever was guessed, and half the memory."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import test_sides
import test_states
import torch
from test_fused import loaded, play, save
from test_recurrent import ahead
from transformers import AutoModelForCausalLM

from draftproof import Engine, native
from draftproof.config import LoadConfig
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.ngram import NgramDrafter
from draftproof.errors import LoadError, OptionError
from draftproof.models.key_levels import opened, rounded
from draftproof.models.load import as_target, builtin, load_target
from draftproof.models.paged import PagedTarget
from draftproof.types import Draft

NEED = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
# With windows, sinks, a cap, keys of latents, values of another width, heads that are normed
FUSED = ("llama", "gpt_oss, all experts", "gemma2", "deepseek_v3, all experts", "youtu", "mimo_v2_flash, all experts", "gemma3_text",
         "qwen3")
STATES = ("qwen3_5_text", "falcon_h1", "kimi_linear", "lfm2")


def test_levels_are_the_nearest_and_steps_the_heads_own() -> None:
    torch.manual_seed(0)
    heads = (torch.randn(50, 3, 24) * torch.logspace(-9, 9, 50)[:, None, None]).bfloat16()
    heads[3, 1], heads[4, 0, :] = 0, 0
    heads[4, 0, 7] = -2.5
    kept = rounded(heads)
    assert kept.dtype == torch.int8 and kept.shape == (50, 3, 28)
    step = kept[..., 24:].contiguous().view(torch.float32)[..., 0].double()
    error = (kept[..., :24].double() * step[..., None] - heads.double()).abs().amax(-1)
    assert bool((error <= step * 0.5001).all()) and bool((kept[..., :24].abs().amax(-1) == 127)[heads.abs().amax(-1) > 0].all())
    assert torch.equal(opened(kept)[3, 1], torch.zeros(24).bfloat16()) and float(opened(kept)[4, 0, 7]) == -2.5
    for wrong in (float("nan"), float("inf"), -float("inf")):
        heads[5, 2, 9] = wrong
        there = opened(rounded(heads)).isnan()
        assert there[5, 2].any() and int(there.any(-1).sum()) == 1
    assert opened(heads) is heads


def are_twins(target: PagedTarget, twin: PagedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call writes is what the plain twin makes of the same heads, byte by byte."""
    assert target.fused is not None and target.fused.compiled() and target.pool.in_levels
    monkeypatch.setattr(twin.fused, "_kernels", lambda pool: None)
    for one, other in zip(play(target), play(twin), strict=True):
        assert torch.equal(one.logits, other.logits)
    for stores, others in ((target.pool.keys, twin.pool.keys), (target.pool.values, twin.pool.values)):
        assert stores.keys() == others.keys() and all(torch.equal(stores[layer], others[layer]) for layer in stores)
        assert {store.dtype for store in stores.values()} == {torch.int8}


@NEED
@pytest.mark.parametrize("family", FUSED)
def test_the_pass_in_one_call_has_the_bits_of_its_parts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(family, tmp_path, torch.bfloat16)
    target, twin = (loaded(tmp_path, "bfloat16", cache_bits=8) for _ in range(2))
    are_twins(target, twin, monkeypatch)


@NEED
@pytest.mark.parametrize("case", ["small", "keys are values"])
def test_so_it_has_where_layers_read_the_keys_of_others(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, twin = (test_sides.target_of(case, torch.bfloat16, cache_bits=8) for _ in range(2))
    are_twins(target, twin, monkeypatch)


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("compiler", [pytest.param(True, marks=NEED), False])
def test_logits_are_near_those_of_keys_as_they_are(family: str, compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiler:
        monkeypatch.setattr(native, "available", lambda: (False, "the test wants none"))
    save(family, tmp_path, torch.bfloat16)
    found = [play(loaded(tmp_path, "bfloat16", cache_bits=bits)) for bits in (8, 16)]
    apart = 0.0
    for one, other in zip(*found, strict=True):
        top = float(other.logits.float().abs().max())
        apart = max(apart, float((one.logits.float() - other.logits.float()).abs().max()) / top)
    assert 0 < apart <= 0.06, apart


@NEED
@pytest.mark.parametrize("family", STATES)
def test_beside_recurrent_states_no_bit_depends_on_what_was_guessed(family: str) -> None:
    target = test_states.target_of(family, torch.bfloat16, cache_bits=8)
    assert target.pool.in_levels
    test_states.plays(target, 5)


@NEED
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_speculation_is_invisible_to_the_bit(family: str, tmp_path: Path) -> None:
    save(family, tmp_path, torch.bfloat16)
    target = load_target(tmp_path, LoadConfig(cache_bits=8, page_tokens=16, threads=torch.get_num_threads(), dtype="bfloat16"))
    assert isinstance(target, PagedTarget) and target.facts.invisible, target.facts.invisible_reason
    prompt = (torch.arange(50) * 37 % 199 + 1).tolist() * 2
    with Engine(target=target) as engine:
        want = engine.generate(prompt, temperature=0.8, seed=3, max_tokens=60, ignore_eos=True).token_ids
    wrong = AlwaysWrong(target.vocab_size, ahead([torch.tensor(prompt)], [list(want)]))
    for drafter, tree in ((wrong, None), (wrong, 6), (NgramDrafter(1, 3), None), ("layer-skip:exit=2", 6)):
        with Engine(target=target, drafter=drafter, depth=4, tree=tree) as engine:
            out = engine.generate(prompt, temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
        assert out.token_ids == want and out.metrics["drafted"] > 0, drafter
    target.check()


@NEED
def test_a_text_takes_half_the_memory_and_hardly_another_course() -> None:
    """On the built-in model: of its tokens' probabilities, and of the likeliest token."""
    text = torch.tensor(load_target(builtin("target")).tokenizer.encode(Path(families.__file__).read_text())[:400])  # type: ignore[union-attr]
    targets = [load_target(builtin("target"), LoadConfig(cache_bits=bits, dtype="bfloat16", self_test=False)) for bits in (16, 8)]
    laws: list[torch.Tensor] = []
    stock, small = (target.facts.cache_bytes_per_token for target in targets)
    for target in targets:
        assert isinstance(target, PagedTarget)
        slot = target.open(text.tolist())
        laws.append(torch.log_softmax(target.score([slot], text[:1], [Draft.chain(text[1:])]).logits.float(), -1))
        target.rewind(slot, ())
        assert sum(rows[0].nbytes for store in (target.pool.keys, target.pool.values) for rows in store.values()) \
            == target.facts.cache_bytes_per_token
        target.close(slot)
    assert small == stock * (64 + native.BEHIND) // 128
    lost = (laws[0].exp() * (laws[0] - laws[1])).sum(-1)
    assert float(lost.mean()) < 1e-3 and float((laws[0].argmax(-1) == laws[1].argmax(-1)).float().mean()) > 0.97


def test_where_they_cannot_be_had_the_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cache_bits=4: expected 16"):
        LoadConfig(cache_bits=4)
    with pytest.raises(LoadError, match="its numbers are float32.*leave the option out"):
        load_target(builtin("target"), LoadConfig(cache_bits=8, dtype="float32"))
    with pytest.raises(LoadError, match="not run by our own pass"):
        load_target(builtin("target"), LoadConfig(cache_bits=8, dtype="bfloat16"), fused=False)
    model = AutoModelForCausalLM.from_config(families.config_of("llama", **{**families.COMMON, "head_dim": 514})).bfloat16()
    with pytest.raises(LoadError, match="heads have 514 numbers"):
        as_target(model, LoadConfig(cache_bits=8))
