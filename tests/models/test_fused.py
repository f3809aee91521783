"""The slim forward pass against its plain twin, the transformers forward; the attention call of one chain against the general one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import test_states
import torch
from test_states import hold_against

from draftproof import llama, native
from draftproof.config import LoadConfig
from draftproof.models import forms, passes
from draftproof.models.between import rms_norm
from draftproof.models.fused import FusedLayer
from draftproof.models.known import can_fuse
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.passes import Pass, chain_items, general_items
from draftproof.types import Draft, Scores

LATENTS = ("youtu without a latent of queries", "deepseek_v2 with yarn", "deepseek_v2 by groups", "deepseek_v3 by groups")
BASES = {"embedding_multiplier": 3.0, "layer_rope_theta": [10000.0, 0, 500000.0]}
OTHERS: dict[str, dict[str, Any]] = {      # beside those of families.py
    "afmoe": {"head_dim": 16, **families.MOE, **families.MIXED, "num_shared_experts": 2, "num_dense_layers": 1,
              "route_scale": 1.5, "mup_enabled": True},
    "apertus": {},
    "aria_text": {**families.MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 48},
    "axk1": {**families.LATENT, **families.MOE, **families.SHARED, "rope_parameters": families.YARN},
    "cohere2_moe": {"head_dim": 16, **families.MOE, **families.MIXED, "intermediate_size": 48, "num_shared_experts": 2,
                    "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96},
    "cohere_compass_text": {"head_dim": 16, **families.MIXED, "rope_parameters": {
        "full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}},
    "flint": {"head_dim": 16, **families.MOE, **families.MIXED, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]},
    "granite_swa": {**families.MIXED, **BASES, "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "granitemoe_swa": {**families.MOE, **families.MIXED, **BASES, "shared_intermediate_size": 96},
    "biogpt": {},
    "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "granitemoeshared": {**families.MOE, "shared_intermediate_size": 192},
    "hunyuan_v1_moe": {"head_dim": 16, **families.MOE, "moe_topk": 2, "intermediate_size": 48},
    "hyperclovax": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.5, "attention_multiplier": 0.2},
    "jais2": {},
    "kolibri1": {"head_dim": 16, **families.MOE, **families.MIXED, "shared_expert_intermediate_size": 48, "intermediate_size": None},
    "laguna": {"head_dim": 16, **families.MOE, **families.MIXED, "shared_expert_intermediate_size": 96, "moe_routed_scaling_factor": 1.5,
               "num_attention_heads_per_layer": [2, 4, 6], "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "mellum": {"head_dim": 16, **families.MOE, **families.MIXED},
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 8, **families.MOE, **families.MIXED, "n_group": 1, "topk_group": 1,
                      "num_key_value_heads": 1, "attention_value_scale": 0.7, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "minicpm3": {**families.LATENT, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 32},
    "mistral4": {**families.LATENT, **families.MOE, **families.SHARED, "rope_parameters": families.STRETCHED},
    "nanochat": {},
    "nemotron": {"head_dim": 16},
    "opt": {"ffn_dim": 96},
    "persimmon": {},
    "phimoe": {**families.MOE, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    "stablelm": {"use_parallel_residual": True},
    "vaultgemma": {"head_dim": 16, **families.MIXED, "query_pre_attn_scalar": 16},
}
FALCON = {"alibi": False, "num_attention_heads": 4, "num_key_value_heads": None}
ALONE: dict[str, dict[str, Any]] = {    # whose attention takes no function from outside
    "falcon": FALCON,
    "gpt_neo": {"num_layers": 3, "num_heads": 4, "window_size": 24, "attention_types": [[["local", "global", "local"], 1]]},
    "gpt_neox_japanese": {"num_key_value_heads": None},
    "xglm": families.FAMILIES["xglm"],
}
ALIASES = {"exaone": {}, "internlm3": {"head_dim": 16}, "iquestcoder": {"head_dim": 16}, "sarvam_mla": families.FAMILIES["deepseek_v2"],
           "sarvam_moe": families.FAMILIES["glm4_moe"]}       # whose classes are another family's
FUSED = ("llama", "mistral", "qwen2", "qwen3", "ministral", "biased llama", "qwen3_moe", "mixtral", "cwm", "dots1", "ernie4_5",
         "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "helium",
         "minimax_m2", "olmo2", "olmo3", "olmoe", "phi3", "half phi3", "qwen2_moe", "seed_oss", "smollm3",
         "exaone_moe", "hy_v3", "solar_open", "arcee", "cohere", "normed cohere", "cohere2", "gemma2", "granitemoe", "hunyuan_v1_dense",
         "gpt_neox", "gpt_neox in turn", "gpt2", "gptj", "ministral3", "normed stablelm", "stablelm in turn",
         *ALONE, "falcon in turn", "falcon with two norms", "falcon with a norm", "falcon with many key heads",
         "laguna with a gate of each number", "gpt_bigcode with many key heads", "opt behind its sums", *OTHERS,
         "olmo", "phi", "normed phi", "starcoder2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", *LATENTS)
FUSED = tuple(family for family in FUSED if family not in families.TIER_2)
TEXT = 45
GROUPS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
OPTIONS = {
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "ministral": ("ministral", {"head_dim": 16, "sliding_window": 24}),
    "cohere2": ("cohere2", families.MIXED),
    "granitemoe": ("granitemoe", families.MOE),
    "granitemoe, all experts": ("granitemoe", {**families.MOE, "num_experts_per_tok": 4}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "gpt_neox in turn": ("gpt_neox", {**families.FAMILIES["gpt_neox"], "use_parallel_residual": False}),
    "falcon in turn": ("falcon", {**FALCON, "parallel_attn": False, "bias": True}),
    "falcon with two norms": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with a norm": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon with many key heads": ("falcon", {**FALCON, "multi_query": False}),
    "gpt_bigcode with many key heads": ("gpt_bigcode", {**OTHERS["gpt_bigcode"], "multi_query": False}),
    "opt behind its sums": ("opt", {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "stablelm in turn": ("stablelm", {"use_qkv_bias": True}),
    "normed stablelm": ("stablelm", {"qk_layernorm": True}),
    "laguna with a gate of each number": ("laguna", {**OTHERS["laguna"], "gating": "per-element"}),
    "normed cohere": ("cohere", {"use_qk_norm": True}),
    "normed phi": ("phi", {"qk_layernorm": True}),
    "youtu without a latent of queries": ("youtu", {**families.LATENT, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2 with yarn": ("deepseek_v2", {**families.FAMILIES["deepseek_v2"], "q_lora_rank": 24, "rope_parameters": families.YARN}),
    "deepseek_v2 by groups": ("deepseek_v2", {**families.FAMILIES["deepseek_v2"], **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3 by groups": ("deepseek_v3", {**families.FAMILIES["deepseek_v3"], **GROUPS}),
    "half phi3": ("phi3", {**families.FAMILIES["phi3"], "partial_rotary_factor": 0.5}),
    **{f"{family}, all experts": (family, {**more, "num_experts_per_tok": 4, "moe_k": 4, "moe_topk": 4})
       for family, more in {**families.FAMILIES, **OTHERS}.items() if "num_experts" in more and family != "phimoe"},
    **{family: (family, more) for family, more in {**OTHERS, **ALIASES, **ALONE}.items()},
}
EVERY = tuple(f"{family}, all experts" if f"{family}, all experts" in OPTIONS else family for family in FUSED  # no choice sits on an edge
              if OPTIONS.get(family, (family,))[0] not in ALONE)


def save(family: str, folder: Path, values: torch.dtype = torch.float32) -> None:
    """values: what every weight is rounded to."""
    base, more = OPTIONS.get(family, (family, families.FAMILIES.get(family, {})))
    before = families.FAMILIES.get(base)
    families.FAMILIES[base] = more  # type: ignore[assignment]
    try:
        model = families.build(base)
    finally:
        if before is None:
            del families.FAMILIES[base]
        else:
            families.FAMILIES[base] = before
    with torch.no_grad():  # norms and biases that differ from their initial ones and zeros
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(values).float().save_pretrained(folder)


def loaded(folder: Path, dtype: str, fused: bool = True, **more: object) -> PagedTarget:
    config = LoadConfig(dtype=dtype, device="cpu", page_tokens=16, self_test=False, threads=torch.get_num_threads(), **more)  # type: ignore[arg-type]
    found = load_target(folder, config, fused)
    assert isinstance(found, PagedTarget) and (found.fused is not None) == fused, found.facts.reasons
    return found


def pair(folder: Path, dtype: str, **more: object) -> tuple[PagedTarget, PagedTarget]:
    """(fused, plain twin)."""
    return loaded(folder, dtype, **more), loaded(folder, dtype, False, **more)


def play(target: PagedTarget, tenant: str = "") -> list[Scores]:
    """A prefill in chunks, a chain, a tree, a plain pass, and a batch of three; a tenant's first texts find nothing that was kept."""
    text = torch.arange(TEXT) * 37 % 199 + 1
    target.set_taps([0, 2])
    slot = target.open(text.tolist(), tenant, room=40)
    found = [target.extend([slot], [text[:30]]), target.extend([slot], [text[30:31]]), target.extend([slot], [text[31:]])]
    root = text[:1]
    found.append(target.score([slot], root, [Draft.chain([5, 6, 7, 8])]))  # crosses the page edge at 48
    target.rewind(slot, (0, 1))
    found.append(target.score([slot], root, [Draft(torch.tensor([9, 8, 7, 6]), (-1, -1, 1, 0))]))
    target.rewind(slot, (1, 2))
    found.append(target.score([slot], root, [Draft.empty()]))
    target.rewind(slot, ())
    others = [target.open([1, 2], tenant, room=40) for _ in range(2)]
    found.append(target.extend(others, [text[:3], text[:20]]))
    drafts = [Draft.chain([3]), Draft.empty(), Draft.chain([4, 5])]
    found.append(target.score([slot, *others], text[:3], drafts))
    for each in (slot, *others):
        target.rewind(each, ())
        target.close(each)
    target.check()
    return found


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 0.04)])
@pytest.mark.parametrize("family", EVERY)
def test_fused_pass_agrees_with_the_transformers_forward(family: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    save(family, tmp_path)
    fused, plain = pair(tmp_path, dtype)
    assert all(isinstance(layer, FusedLayer) for layer in fused.parts.layers)
    rows = [30, 1, 14, 5, 5, 1, 23, 6]
    for count, ours, theirs in zip(rows, play(fused), play(plain), strict=True):
        assert ours.taps[0].shape == (count, 64)
        assert ours.starts == theirs.starts and ours.logits.shape == theirs.logits.shape
        assert set(ours.taps) == set(theirs.taps) == {0, 2}
        for a, b in [(ours.logits, theirs.logits), *((ours.taps[i], theirs.taps[i]) for i in (0, 2))]:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert float((a.float() - b.float()).abs().max()) <= tolerance * float(b.float().abs().max())


@pytest.mark.parametrize("family", ALIASES)
def test_a_family_of_anothers_classes_is_fused_as_that(family: str, tmp_path: Path) -> None:
    test_fused_pass_agrees_with_the_transformers_forward(family, "float32", 2e-5, tmp_path)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 0.04)])
@pytest.mark.parametrize("family", [family for family in FUSED if OPTIONS.get(family, (family,))[0] in ALONE])
def test_a_fused_pass_stands_for_attention_that_takes_no_function(family: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """Which would leave such a model to its own cache: logits are held against those of transformers' whole texts."""
    save(family, tmp_path)
    target, config = loaded(tmp_path, dtype), LoadConfig(dtype=dtype, device="cpu", self_test=False, threads=torch.get_num_threads())
    plain = load_target(tmp_path, config, fused=False)
    assert (target.facts.tier, plain.facts.tier) == (1, 2) and target.facts.reasons["tier"].endswith("run as ours")
    hold_against(plain.model, test_states.play(target), tolerance)
    held = [rows[0].nbytes for store in (target.pool.keys, target.pool.values) for rows in store.values()]
    assert target.facts.cache_bytes_per_token == sum(held)


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FUSED)
def test_the_block_in_one_call_has_the_bits_of_its_parts(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(family, tmp_path, torch.bfloat16)
    target = loaded(tmp_path, dtype)
    assert target.fused is not None and target.fused.rows_alone() and not target.whole_tiles
    found = play(target)
    monkeypatch.setattr(target.fused, "_kernels", lambda pool: None)
    for one, other in zip(found, play(target, "twin"), strict=True):
        assert torch.equal(one.logits, other.logits)
        assert all(torch.equal(one.taps[i], other.taps[i]) for i in (0, 2))


def several(target: PagedTarget, taps: list[int]) -> list[Scores]:
    """Chains of 1 to 12 rows, one of them over the page edge at 48, trees, and rows of three sequences of which some are kept."""
    text = torch.arange(TEXT) * 37 % 199 + 1
    target.set_taps(taps)
    slot = target.open(text.tolist(), room=40)
    found, root = [target.extend([slot], [text])], text[:1]
    guesses = torch.arange(11) * 17 % 199 + 1
    drafts = [Draft.chain(guesses[:count]) for count in range(12)]
    drafts += [Draft(guesses[:4], (-1, -1, 1, 0)), Draft(guesses[:11], (-1, -1, 0, 0, 1, 2, 3, 4, 5, -1, 9))]
    for number, draft in enumerate(drafts):
        found.append(target.score([slot], root, [draft]))
        target.rewind(slot, range(number % 2 if len(draft) else 0))
        target.truncate(slot, TEXT)
    others = [target.open([1, 2], room=40) for _ in range(2)]
    found += [target.extend(others, [text[:3], text[:20]]), target.score([slot, *others], text[:3], [drafts[3], drafts[0], drafts[13]])]
    return found


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
@pytest.mark.parametrize(
    "bits, dtype", [(16, "float32"), (16, "bfloat16"), (12, "bfloat16"), (8, "float32"), (8, "bfloat16"), (4, "float32"), (4, "bfloat16")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_pass_in_one_call_has_the_bits_of_its_twin(
        tied: bool, bits: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if bits == 12 and not native.takes_narrow():
        pytest.skip("no products with weights in twelve bits here")
    if bits == 16:
        monkeypatch.setattr(native, "takes_narrow", lambda: False)
    monkeypatch.setitem(families.FAMILIES, "llama", {"tie_word_embeddings": tied})
    save("llama", tmp_path, torch.bfloat16)
    more = {"quantization": f"int{bits}"} if bits < 12 else {}
    target, twin = (loaded(tmp_path, dtype, **more) for _ in range(2))
    assert target.fused is not None and twin.fused is not None and target.fused.output.bits == bits
    monkeypatch.setattr(twin.fused, "_model", lambda pool: None)
    called: list[int] = []
    forward = llama.forward

    def counted(model: llama.Model, course: native.Course, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(course.rows)
        return forward(model, course, *rest)

    monkeypatch.setattr(llama, "forward", counted)
    for taps in ([], [1], [0, 2]):
        ours, count = several(target, taps), len(called)
        for one, other in zip(ours, several(twin, taps), strict=True):
            assert torch.equal(one.logits, other.logits) and set(one.taps) == set(other.taps) == set(taps)
            assert all(torch.equal(one.taps[layer], other.taps[layer]) for layer in taps)
        assert len(called) == count, "the twin runs without it"
        assert called[-count:] == [TEXT, *range(1, 13), 5, 12, 23, 17]
        called.clear()


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
@pytest.mark.parametrize("bits, dtype", [(16, "float32"), (16, "bfloat16"), (8, "bfloat16"), (4, "float32")])
def test_a_team_of_any_size_writes_the_bits_of_one(bits: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads of keys, which two threads cannot share equally, and more threads than processors."""
    shape = {"hidden_size": 192, "intermediate_size": 416, "num_attention_heads": 6, "num_key_value_heads": 3}
    monkeypatch.setitem(families.FAMILIES, "llama", shape)
    save("llama", tmp_path, torch.bfloat16)
    more, found, before = {"quantization": f"int{bits}"} if bits < 12 else {}, [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(several(loaded(tmp_path, dtype, **more), [0, 2]))
    finally:
        torch.set_num_threads(before)
    for threads, scores in zip((2, 3, 5), found[1:], strict=True):
        for one, other in zip(found[0], scores, strict=True):
            assert torch.equal(one.logits, other.logits), f"{threads} threads"
            assert all(torch.equal(one.taps[layer], other.taps[layer]) for layer in (0, 2)), f"{threads} threads"


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("family", ["deepseek_v3 by groups", "youtu without a latent of queries"])
def test_a_latent_has_the_bits_of_its_parts_in_a_team_of_any_size(
        family: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over the same layers, one over the first of them alone."""
    save(family, tmp_path, torch.bfloat16)
    target, twin = (loaded(tmp_path, "bfloat16", **{"quantization": "int8"} if bits == 8 else {}) for _ in range(2))
    whole, before = target.fused, torch.get_num_threads()
    assert whole is not None and whole.compiled() and whole._kernels(target.pool) is not None
    monkeypatch.setattr(twin.fused, "_kernels", lambda pool: None)
    first = whole.first(1)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert first._kernels(target.pool) is not None
            for one, other in zip(several(target, [0, 2]), several(twin, [0, 2]), strict=True):
                assert torch.equal(one.logits, other.logits), f"{threads} threads"
                assert all(torch.equal(one.taps[layer], other.taps[layer]) for layer in (0, 2)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
def test_a_model_with_a_part_of_other_kinds_is_not_run_in_one_call(tmp_path: Path) -> None:
    save("llama", tmp_path, torch.bfloat16)
    target = loaded(tmp_path, "float32")
    fused, pool = target.fused, target.pool
    assert fused is not None and fused.angles is None
    target.extend([target.open([1])], [torch.tensor([1])])
    assert fused._model(pool) is not None and fused._model(pool) is fused._model(pool)
    output, embed, angles = fused.output, fused.embed, fused.angles
    scaled, renormed = type("Scaled", (torch.nn.Embedding,), {})(200, 64), torch.nn.Embedding(200, 64, max_norm=1.0)
    for name, own, other in [("output", output, torch.nn.Linear(64, 200)), ("angles", angles, None), ("embed", embed, scaled),
                             ("embed", embed, renormed), ("embed", embed, torch.nn.Embedding(200, 64, dtype=torch.bfloat16))]:
        setattr(fused, name, other)
        assert fused._model(pool) is None, name
        setattr(fused, name, own)
    assert fused._model(pool) is not None


@pytest.mark.parametrize("wrong", [-1, 200, 1 << 40])
def test_an_id_that_the_embedding_lacks_is_refused(wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pass in one call as by its twin, and the sequence stays as it was."""
    save("llama", tmp_path, torch.bfloat16)
    target = loaded(tmp_path, "float32")
    slot = target.open([1, 2, 3], room=8)
    before = target.extend([slot], [torch.tensor([1, 2, 3])]).logits
    for _ in range(2):
        with pytest.raises(IndexError):
            target.score([slot], torch.tensor([4]), [Draft.chain([5, wrong])])
        assert slot.length == 3 and slot.nodes is None
        monkeypatch.setattr(target.fused, "_model", lambda pool: None)
    target.truncate(slot, 2)
    assert torch.equal(target.extend([slot], [torch.tensor([3])]).logits, before)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_lie_the_other_way_are_rounded_alike(bits: int, tmp_path: Path) -> None:
    """GPT-2's, whether its block is ours or transformers'."""
    save("gpt2", tmp_path)
    for ours, theirs in zip(*map(play, pair(tmp_path, "float32", quantization=f"int{bits}")), strict=True):
        assert float((ours.logits - theirs.logits).abs().max()) <= 2e-4 * float(theirs.logits.abs().max())


@pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
def test_a_row_behind_the_last_position_reads_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call as in its twin; nobody reads such a row."""
    save("gpt2", tmp_path, torch.bfloat16)
    target, twin = (loaded(tmp_path, "float32") for _ in range(2))
    monkeypatch.setattr(twin.fused, "_model", lambda pool: None)
    found = []
    for each in (target, twin):
        assert each.context == 256
        text = torch.arange(255) % 199 + 1
        slot = each.open(text.tolist(), room=8)
        each.extend([slot], [text])
        found.append(each.score([slot], text[:1], [Draft.chain([5, 6, 7])]).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("packed", [True, False])
def test_fused_layers_take_the_place_of_the_models_own(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers model, called as ever, runs through the fused layers; its weights are not held twice."""
    monkeypatch.setattr(forms, "can_pack", lambda dtype: (packed, "as the test wants"))
    save("qwen3", tmp_path)
    fused, plain = pair(tmp_path, "float32")
    for number, layer in enumerate(fused.parts.layers):
        held = {name for name, _ in layer.named_children()}
        assert held == {"qkv", "o", "gate_up", "down", "act", "input_norm", "mlp_norm"}, number
    text = torch.arange(12) + 3
    want = plain.extend([plain.open([3])], [text]).logits
    one = Pass(text[None], torch.arange(12)[None], list(range(12)), slice(16, 28), None, [passes.Path([1], range(12))], 16, 4)
    got = fused.model(
        input_ids=one.ids, position_ids=one.positions, use_cache=False, draftproof_pass=one, draftproof_pool=fused.pool
    ).logits[0, -1:]
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_rounded_where_transformers_rounds() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        norm = LlamaRMSNorm(96).to(dtype)
        norm.weight.data += torch.randn(96, generator=generator).to(dtype)
        x = torch.randn(400, 96, generator=generator).to(dtype)
        before = x.clone()
        got, want = rms_norm(x, norm.weight, norm.variance_epsilon), norm(x)
        assert torch.equal(x, before), "the input is the residual and must stay"
        assert torch.allclose(got, want, rtol=1e-6 if dtype == torch.float32 else 1e-2)
        assert dtype == torch.float32 or float((got != want).float().mean()) < 1e-3


@pytest.mark.parametrize("rows, start, group", [(1, 0, 1), (2, 5, 2), (5, 63, 2), (8, 100, 7), (3, 250, 3), (4, 256, 1), (6, 700, 2)])
def test_one_chain_is_asked_for_as_the_general_call_asks(rows: int, start: int, group: int) -> None:
    at, pages = list(range(start, start + rows)), [3, 4, 9]
    p = Pass(torch.zeros(1, rows), torch.tensor([at]), at, slice(0, rows), None, [passes.Path(pages, range(rows))], 256, 4)
    quick, general = chain_items(p, group, torch.float32), general_items(p, None, group, torch.float32)
    last, whole = quick.calls[-1].bias[-1:], torch.cat([call.bias for call in general.calls])
    read = last.shape[-1]
    assert read & (read - 1) == 0 and read >= 64 and read > at[-1] % 256
    assert torch.equal(last, whole[-1:, ..., :read]) and bool((whole[-1:, ..., read:] == -torch.inf).all())
    before = [page for call in quick.calls for page in call.bias][:-1]
    assert len(before) == len(whole) - 1 and all(map(torch.equal, before, whole))
    places = torch.arange(1 * quick.width)
    assert (quick.paths, quick.width, quick.dead, general.dead) == (1, general.width, None, None)
    for a, b in ((quick.take, general.take), (quick.back, general.back)):
        assert torch.equal(places[slice(None) if a is None else a], places[slice(None) if b is None else b])
    storage = torch.arange(12)
    read_pages, all_pages = (torch.cat([storage[call.pages] for call in items.calls]) for items in (quick, general))
    assert torch.equal(read_pages, all_pages)
    assert (quick.grid is None) == (general.grid is None) and (quick.grid is None or torch.equal(quick.grid, general.grid))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_many_keys_of_a_page_are_read(dtype: torch.dtype) -> None:
    """Why a chain may read half a page: a power of two of keys gives every query the bits that the whole page gives."""
    from draftproof.models.attention import flash_page

    generator = torch.Generator().manual_seed(4)
    for trial in range(12):
        dim, queries, last = (16, 64, 128)[trial % 3], (4, 8, 36)[trial % 3], (20, 63, 64, 100)[trial % 4]
        query, key, value = (torch.randn(1, 3, n, dim, generator=generator).to(dtype) for n in (queries, 256, 256))
        seen = torch.randint(0, last + 1, (queries, 1), generator=generator)
        bias = torch.zeros(1, 1, queries, 256, dtype=dtype).masked_fill_(torch.arange(256) > seen, -torch.inf)
        keys = passes._keys_read(last, 256)
        assert last < keys <= max(64, 2 * last)
        assert passes._keys_read(last, 100) == 100 and passes._keys_read(last, 512) == 512 and passes._keys_read(300, 512) == 512
        want = flash_page(query, key, value, bias, 0.1)
        got = flash_page(query, key[:, :, :keys], value[:, :, :keys], bias[..., :keys], 0.1)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_strangers_run_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is not known, and a known one with a layer replaced by a subclass, or of another choice, keep the transformers
    forward."""
    fits, why = can_fuse(families.build("bloom"))
    assert not fits and "Bloom" in why
    model = families.build("llama")
    assert can_fuse(model)[0]
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Patched", (type(mlp),), {})
    assert not can_fuse(model)[0]
    monkeypatch.setitem(families.FAMILIES, "deepseek_v3", {**OPTIONS["deepseek_v3 by groups"][1], "num_experts_per_tok": 5})
    renamed = families.build("gpt2")
    assert can_fuse(renamed)[0]
    renamed.transformer.last = renamed.transformer.ln_f
    del renamed.transformer.ln_f
    assert not can_fuse(renamed)[0], "a last norm by another name is not for none"
    fits, why = can_fuse(families.build("deepseek_v3"))
    assert not fits and why.endswith("groups that have fewer experts than a row chooses")
    monkeypatch.setitem(families.FAMILIES, "falcon", {**FALCON, "alibi": True})
    fits, why = can_fuse(families.build("falcon"))
    assert not fits and why.endswith("(ALiBi)")
    for family, expected in (("llama", "fused: "), ("bloom", "as transformers runs it: ")):
        families.save(family, tmp_path)
        target = load_target(tmp_path, LoadConfig(self_test=False, threads=torch.get_num_threads()))
        assert target.facts.reasons["forward pass"].startswith(expected)


def test_self_test_passes_on_fused_models(tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):
        save(family, tmp_path)
        for dtype in ("float32", "bfloat16"):
            facts = load_target(tmp_path, LoadConfig(dtype=dtype, page_tokens=64, threads=torch.get_num_threads())).facts
            assert facts.invisible, (family, dtype, facts.invisible_reason)
