"""Recurrent states beside pages: the logits of transformers, and the same bits whatever was guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import chosen
from test_recurrent import DELTA, HYBRID, MOE, SSD, ahead, build, engine_ids, text
from torch import Tensor

from draftproof import Engine, Sampling, native
from draftproof.config import LoadConfig
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.drafters.model import ModelDrafter
from draftproof.errors import OptionError
from draftproof.models import states
from draftproof.models.families import part_of
from draftproof.models.known import can_fuse
from draftproof.models.load import as_target, load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.state_layers import SpaceLayer
from draftproof.models.states import HELD
from draftproof.trace.events import RequestStarted
from draftproof.train.base import logits_after, require_laws
from draftproof.types import Draft

NEED = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
SIZES = {**DELTA, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "layer_types": HYBRID}
ALL = {**MOE, "num_experts_per_tok": 4}  # no choice of experts sits on an edge
SPACES = {**SSD, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32}
GRANITE = {**SPACES, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_groups": 2, "embedding_multiplier": 3.0,
           "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.2}
NEMOTRON = {"mamba_num_heads": 4, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 32, "head_dim": 16, "time_step_min": 0.1,
            "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 96, "n_group": 2, "routed_scaling_factor": 1.5}
FALCON = {**SPACES, "mamba_d_ssm": 128, "mamba_n_groups": 2, "head_dim": 16, "mamba_norm_before_gate": False,
          "embedding_multiplier": 1.3, "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.4,
          "ssm_out_multiplier": 0.6, "key_multiplier": 0.9, "mlp_multipliers": [0.85, 0.75],
          "lm_head_multiplier": 0.5, "ssm_multipliers": [0.75, 1.25, 0.5, 1.125, 0.875]}
KIMI = {**families.LATENT, **ALL, "linear_num_heads": 3, "linear_head_dim": 32, "layer_types": HYBRID, "q_lora_rank": None,
        "num_shared_experts": 1, "routed_scaling_factor": 1.5}
LING = {**families.LATENT, **ALL, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "layer_types": HYBRID,
        "mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 1, "num_expert_group": 2, "topk_group": 2}
YARN = {**families.YARN, "rope_theta": 1e4}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SIZES,
    "qwen3_next": {**SIZES, **ALL},
    "qwen3_5_moe_text": {**SIZES, **ALL, "linear_num_value_heads": 8, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3},
    "lara_mini": {**SIZES, **ALL, "head_dim": 16, "sliding_window": 24, "shared_expert_intermediate_size": 96,
                  "layer_types": ["linear_attention", "full_attention", "sliding_attention"], "intermediate_size": None},
    "bailing_hybrid": {**LING, "q_lora_rank": None},
    "bailing_hybrid, plain": {**LING, "kda_safe_gate": False, "mlp_layer_types": ["dense", "dense", "dense"], "rope_parameters": YARN},
    "bamba": {**SPACES, "attn_layer_indices": [1]},
    "bamba, limited": {**SPACES, "attn_layer_indices": [1], "time_step_limit": (0.2, 1.5)},
    "kimi_linear": {**KIMI, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "kimi_linear, low": {**KIMI, "q_lora_rank": 24, "mlp_layer_types": ["dense", "dense", "dense"], "attention_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96, "conv_L_cache": 3, "conv_bias": True},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 24, "head_dim": 16,
             "num_attention_heads": 20, "use_attention_gate": True, "use_sandwich_norm": True},
    "lfm3, plain": {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 24, "use_attention_gate": False,
                    "use_sandwich_norm": False},
    "lfm2_moe": {**ALL, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "use_expert_bias": True,
                 "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "falcon_h1": FALCON,
    "falcon_h1, normed": {**FALCON, "mamba_rms_norm": True, "attention_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
                          "mlp_bias": True},
    "olmo_hybrid": {**SIZES, "linear_key_head_dim": 48},
    "olmo_hybrid, turned": {**SIZES, "linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "nemotron_h": {**NEMOTRON, **ALL, "n_routed_experts": 4, "topk_group": 2, "mamba_head_dim": 48,
                   "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"]},
    "nemotron_h, dense": {**NEMOTRON, "mamba_head_dim": 32, "layers_block_type": ["linear_attention", "mlp", "full_attention"],
                          "use_conv_bias": False},
    "granitemoehybrid": {**GRANITE, **ALL, "shared_intermediate_size": 96, "mamba_proj_bias": True},
    "granitemoehybrid, dense": {**GRANITE, "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope"},
}
TEXT = text(90, 8)


def model_of(family: str, dtype: torch.dtype = torch.float32, rounded: bool = True, **more: Any) -> Any:
    model = build(family.partition(",")[0], {**CASES[family], **more})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = (model.bfloat16() if rounded else model).to(dtype).eval()
    exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in model.named_parameters():
        if any(part in name for part in exact):
            parameter.data = parameter.data.float()
    return model


def target_of(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> PagedTarget:
    more = {"self_test": False, "page_tokens": 16, "threads": torch.get_num_threads(), **more}
    target = as_target(model_of(family, dtype), LoadConfig(**more))
    assert isinstance(target, PagedTarget) and target.states is not None, target.facts.reasons
    return target


def play(target: PagedTarget) -> list[tuple[list[list[int]], Tensor]]:
    """(texts that end where a row does, the rows' logits): a prefill in chunks, chains and trees of which some stands, a batch."""
    ids, found = TEXT.tolist(), []

    def paths(base: list[int], draft: Draft) -> list[list[int]]:
        ends = [list(base)]
        for node, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
            ends.append([*ends[parent + 1], node])
        return ends

    slot = target.open(ids, room=40)
    for start, end in ((0, 3), (3, 47), (47, 48), (48, 50)):  # more than the states hold back, and less
        found.append(([ids[:end]], target.extend([slot], [TEXT[start:end]]).logits))
    now = ids[:50]
    drafts = [Draft.chain([5, 6, 7, 8, 9, 10]), Draft(torch.tensor([9, 8, 7, 6, 5]), (-1, -1, 1, 0, 2)), Draft.empty(), Draft.chain([3])]
    for root, (draft, kept) in enumerate(zip(drafts, [(0, 1), (1, 2, 4), (), (0,)], strict=True), 60):
        now = [*now, ids[root]]
        found.append((paths(now, draft), target.score([slot], TEXT[root : root + 1], [draft]).logits))
        target.rewind(slot, kept)
        now += draft.tokens[list(kept)].tolist()
    others = [target.open(ids[:2], room=80) for _ in range(2)]     # too few to share a page
    found.append(([ids[:2], ids[:40]], target.extend(others, [TEXT[:2], TEXT[:40]]).logits))
    drafts = [drafts[1], Draft.chain([4, 5]), drafts[2]]
    ends = [end for base, draft in zip((now, ids[:2], ids[:40]), drafts, strict=True) for end in paths([*base, 11], draft)]
    found.append((ends, target.score([slot, *others], torch.tensor([11, 11, 11]), drafts).logits))
    for each in (slot, *others):
        target.rewind(each, ())
        target.close(each)
    target.check()
    return found


def hold_against(model: Any, found: list[tuple[list[list[int]], Tensor]], tolerance: float) -> None:
    """Logits against transformers', of which a pass over a text has those of all texts that it begins with."""
    passes: dict[tuple[int, ...], Tensor] = {}

    def row(end: tuple[int, ...]) -> Tensor:
        if not any(text[: len(end)] == end for text in passes):
            with torch.inference_mode():
                passes[end] = model(input_ids=torch.tensor([end]), use_cache=False).logits[0].float()
        return next(rows[len(end) - 1] for text, rows in passes.items() if text[: len(end)] == end)

    for ends, logits in sorted(found, key=lambda one: -max(map(len, one[0]))):
        rows = {end: row(end) for end in sorted(map(tuple, ends), key=len, reverse=True)}
        want = torch.stack([rows[tuple(end)] for end in ends])
        assert float((logits.float() - want).abs().max()) <= tolerance * float(want.abs().max()), ends


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model, target = model_of(family, dtype), target_of(family, dtype)
    assert target.facts.tier == 1 and target.trees and target.facts.reasons["forward pass"].startswith("fused")
    hold_against(model, play(target), tolerance)


@NEED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CASES)
def test_the_pass_in_one_call_has_the_bits_of_its_parts(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target, twin = target_of(family, dtype), target_of(family, dtype)
    assert target.fused is not None and target.fused.rows_alone() and not target.whole_tiles
    monkeypatch.setattr(twin.fused, "_kernels", lambda pool: None)
    for (_, one), (_, other) in zip(play(target), play(twin), strict=True):
        assert torch.equal(one, other)


@NEED
def test_a_router_of_float32_is_three_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no other is one call made of the whole pass."""
    def model() -> Any:
        made = model_of("nemotron_h", torch.bfloat16)
        weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) / 8
        made.model.layers[-1].mixer.gate.weight = torch.nn.Parameter(weight)
        return made

    target, twin = (as_target(model(), LoadConfig(self_test=False, page_tokens=16)) for _ in range(2))
    assert isinstance(target, PagedTarget) and isinstance(twin, PagedTarget) and target.fused is not None and target.fused.compiled()
    router = target.fused.layers[-1].routed.router
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(router(x).double(), x.double() @ model().model.layers[-1].mixer.gate.weight.double().T, atol=1e-6, rtol=0)
    monkeypatch.setattr(twin.fused, "_kernels", lambda pool: None)
    found = play(target)
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, play(twin), strict=True))
    hold_against(model(), found, 0.04)


def beside_its_plain_twin(family: str, dtype: torch.dtype) -> None:
    target, twin = target_of(family, dtype), target_of(family, dtype)
    fused: Any = twin.fused
    fused._kernels = lambda pool: None
    for layer in fused.layers:
        (layer.state or layer).ours &= layer.state is None
    close = 1e-4 if dtype == torch.float32 else 0.05
    slots = [each.open(TEXT.tolist(), room=40) for each in (target, twin)]
    drafts = [Draft.chain(TEXT[:40]), Draft.chain([5, 6, 7]), Draft(torch.tensor([9, 8, 7, 6]), (-1, -1, 1, 0)), Draft.empty()]

    def agree() -> None:
        mine, other = (slot.state for slot in slots)
        assert mine is not None and other is not None
        assert (mine.taken, mine.owed, mine.flight) == (other.taken, other.owed, other.flight)
        kept = mine.of.reach + len(mine.owed)
        for a, b in ((mine.memory, other.memory), (mine.history[:, :kept], other.history[:, :kept])):
            assert not a.numel() or float((a.float() - b.float()).abs().max()) <= close * max(1.0, float(b.float().abs().max()))

    for start, end in ((0, 2), (2, 45), (45, 60)):
        rows = [each.extend([slot], [TEXT[start:end]]).logits for each, slot in zip((target, twin), slots, strict=True)]
        assert float((rows[0] - rows[1]).abs().max()) <= close * float(rows[1].abs().max())
        agree()
    for draft, kept in zip(drafts, [(), (0,), (1, 2), ()], strict=True):
        rows = [each.score([slot], TEXT[:1], [draft]).logits for each, slot in zip((target, twin), slots, strict=True)]
        assert float((rows[0] - rows[1]).abs().max()) <= close * float(rows[1].abs().max())
        for each, slot in zip((target, twin), slots, strict=True):
            each.rewind(slot, kept)
        agree()


@NEED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CASES)
def test_the_kernel_leaves_what_its_plain_twin_leaves(family: str, dtype: torch.dtype) -> None:
    beside_its_plain_twin(family, dtype)


def look_back(target: PagedTarget, layer: Any) -> tuple[Tensor, Tensor]:
    """What the first rows of a text see in the first layer, which has a state, and what they leave in its history."""
    slot = target.open([])
    assert slot.state is not None
    p = target._plan([slot], [Draft.chain(TEXT[1:40])], TEXT[:1], [40])
    with torch.inference_mode():
        entered = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
        return layer.state._look_back(entered, layer.qkv(entered), torch.empty(0), p, target.pool), slot.state.history[0]


@NEED
@pytest.mark.parametrize("family", CASES)
def test_numbers_are_rounded_where_the_plain_twin_rounds_them(family: str) -> None:
    """Sums that add up in another order end elsewhere now and then; a number that is not rounded, or is rounded twice, ends there often."""
    target = target_of(family, torch.bfloat16)
    layer: Any = target.fused and target.fused.layers[0]
    found = []
    for layer.state.ours in (True, False):
        found.append(look_back(target, layer)[0])
    assert float((found[0] == found[1]).float().mean()) > 0.995


@NEED
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "kimi_linear", "bamba", "lfm2"])
def test_shares_of_a_large_team_are_bits_of_the_whole(family: str) -> None:
    """Some have nothing but how much is written and kept."""
    target, before, found = target_of(family, torch.bfloat16), torch.get_num_threads(), []
    try:
        for threads in (1, 32):
            torch.set_num_threads(threads)
            found.append(look_back(target, target.fused and target.fused.layers[0]))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear, low", "nemotron_h", "falcon_h1, normed"])
def test_the_same_in_forms_of_other_processors(family: str, other_kernels: None) -> None:
    beside_its_plain_twin(family, torch.bfloat16)
    plays(target_of(family, torch.bfloat16), 3)


def plays(target: PagedTarget, seed: int, steps: int = 60) -> None:
    """Steps at random over one text, some of them beside another: every row of it has the bits of decoding row by row."""
    random, ids = torch.Generator().manual_seed(seed), TEXT.tolist()

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=random))

    alone = target.open(ids)
    want = [target.extend([alone], [TEXT[:1]]).logits[0]]
    for at in range(1, len(ids)):
        want.append(target.score([alone], TEXT[at : at + 1], [Draft.empty()]).logits[0])
        target.rewind(alone, ())
    target.close(alone)
    slot, other = target.open(ids), target.open(ids[:9], room=2000)

    def check(logits: Tensor, *at: int) -> None:
        assert torch.equal(logits, torch.stack([want[position] for position in at])), (seed, at)

    for _ in range(steps):
        at = slot.length
        what = below(7)
        if what == 0 or at == 0:
            count = 1 + below(min(40, len(ids) - at)) if at < len(ids) else 0
            if count:
                check(target.extend([slot], [TEXT[at : at + count]]).logits, at + count - 1)
        elif what == 1:
            target.truncate(slot, max(0, at - below(HELD if below(4) else at + 1)))
        elif at < len(ids):
            room = len(ids) - at - 1
            right = below(min(6, room) + 1)
            guess = [*ids[at + 1 : at + 1 + right], *([(ids[at + 1 + right] + 1) % 199] if right < room and below(2) else [])]
            draft = Draft.chain(guess)
            if what > 4 and right:  # a tree: what is wrong before what is right
                draft = Draft(torch.tensor([(ids[at + 1] + 1) % 199, *ids[at + 1 : at + 1 + right]]), (-1, -1, *range(1, right)))
            tree = not draft.is_chain
            slots, drafts, roots = [slot], [draft], [ids[at]]
            if what == 2:  # a plain pass that is begun before anybody has read its root, and may be given up
                begun = target.begin([slot], torch.tensor([ids[at]]))
                if begun is not None:
                    check(begun.logits, at)
                    if below(2):
                        target.settle([slot], torch.tensor([ids[at]]))
                        target.rewind(slot, ())
                        continue
            if what == 3:
                slots, drafts, roots = [other, slot], [Draft.chain([5, 6, 7]), draft], [3, ids[at]]
            logits = target.score(slots, torch.tensor(roots), drafts).logits[4 if what == 3 else 0 :]
            rows = [0, *range(2, 2 + right)] if tree else list(range(1 + right))
            check(logits[rows], *range(at, at + 1 + right))
            kept = below(right + 1)
            target.rewind(slot, tuple(node + tree for node in range(kept)))
            if what == 3:
                target.rewind(other, (0,))
    target.close(slot)
    target.close(other)
    target.check()


@pytest.mark.parametrize("family", CASES)
def test_parts_that_are_not_streamed_have_the_logits_of_transformers(family: str) -> None:
    """Of float32 weights that are no halves."""
    target = as_target(model_of(family, torch.float32, rounded=False), LoadConfig(self_test=False, page_tokens=16))
    model = model_of(family, torch.float32, rounded=False)
    assert isinstance(target, PagedTarget) and target.fused is not None and not target.fused.compiled()
    hold_against(model, play(target), 1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear, low", "bamba", "lfm2", "nemotron_h, dense", "falcon_h1"])
def test_without_a_compiler_steps_of_torch_have_the_logits_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: (False, "the test wants none"))
    more = {"layer_types": ["linear_attention"] * 3} if "kimi" in family else {}  # torch's attention through a latent feels other rows
    model = model_of(family, **more)
    target = as_target(model_of(family, **more), LoadConfig(page_tokens=16, threads=torch.get_num_threads()))
    assert isinstance(target, PagedTarget) and target.facts.invisible, target.facts.invisible_reason
    hold_against(model, play(target), 1e-4)


@NEED
@pytest.mark.parametrize("family,dtype", [*((family, torch.bfloat16) for family in CASES), ("qwen3_next", torch.float32),
                                          ("kimi_linear", torch.float32), ("bamba", torch.float32),
                                          ("lfm3", torch.float32)])
def test_no_bit_depends_on_what_was_guessed(family: str, dtype: torch.dtype) -> None:
    plays(target_of(family, dtype), len(family))


@NEED
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_no_bit_depends_on_what_was_guessed_where_weights_are_rounded(family: str) -> None:
    plays(target_of(family, torch.bfloat16, quantization="int8"), 7)


@NEED
@pytest.mark.parametrize("family, teams", [("qwen3_5_moe_text", (1, 2, 3, 5)), ("kimi_linear", (1, 3)), ("bailing_hybrid", (1, 3))])
def test_a_team_of_any_size_writes_the_bits_of_one(family: str, teams: tuple[int, ...]) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in teams:
            torch.set_num_threads(threads)
            found.append([logits for _, logits in play(target_of(family, torch.bfloat16))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_text_goes_on_where_another_that_begins_alike_was_kept() -> None:
    target = target_of("qwen3_5_text", torch.bfloat16)
    ids = TEXT.tolist()

    def logits(tokens: Tensor, cached: int, tenant: str = "") -> Tensor:
        slot = target.open(tokens.tolist(), tenant)
        assert slot.length == cached, (slot.length, cached)
        first = target.extend([slot], [tokens[cached:70]]).logits if cached < 70 else None
        rows = [] if first is None else [first]
        for at in range(slot.length, len(tokens)):
            rows.append(target.score([slot], tokens[at : at + 1], [Draft.chain([3, 4])]).logits[:1])
            target.rewind(slot, ())
        target.close(slot)
        target.check()
        return torch.cat(rows)

    want = logits(TEXT, 0)  # it left 64 tokens behind as it was read, and 80 as it went on
    assert torch.equal(logits(TEXT, 80), want[-10:])
    assert torch.equal(logits(TEXT, 0, "another tenant"), want)
    assert torch.equal(logits(TEXT[:80], 64), want[:11]), "never all of it"
    other = torch.tensor([*ids[:70], *ids[:20]])
    assert torch.equal(logits(other, 64)[:1], want[:1])
    slot = target.open(ids)  # what is cut below what others may read is read again, elsewhere
    assert slot.length == slot.shared * 16 == 80
    target.truncate(slot, 20)
    assert torch.equal(target.extend([slot], [TEXT[20:70]]).logits, want[:1])
    target.close(slot)
    assert torch.equal(logits(TEXT, 80), want[-10:])
    target.pool.most_marks = 1
    logits(torch.flip(TEXT, [0]), 0)
    assert len(target.pool.marks) == 1
    assert torch.equal(logits(TEXT, 0), want), "pages without a state are of no use"


@pytest.mark.parametrize("chunk", [512, 100])
def test_texts_with_a_beginning_in_common_read_it_twice_and_no_more(chunk: int) -> None:
    """The first one leaves a state further on; the second stops where they part."""
    target, ids, cached = target_of("qwen3_5_text", torch.bfloat16), TEXT.tolist(), []
    prompts = [[*ids[:70], *text(80, seed).tolist()] for seed in range(4)] + [[*ids[:40], 3]]
    with Engine(target=target, load=LoadConfig(prefill_chunk=chunk)) as engine:
        for prompt in prompts:
            out, alone = (engine.generate(prompt, max_tokens=4, temperature=0, tenant=tenant) for tenant in ("", str(prompt)))
            assert out.token_ids == alone.token_ids
            cached += [event.cached_tokens for event in out.trace if isinstance(event, RequestStarted)]
    assert cached == [0, 0, 64, 64, 0]
    target.check()


def test_a_slot_keeps_what_it_began_with_when_the_mark_is_gone() -> None:
    target = target_of("qwen3_5_text", torch.bfloat16)
    slot, early = target.open(TEXT.tolist()), target.open(TEXT.tolist())
    want = target.extend([slot], [TEXT[:70]]).logits
    target.close(slot)
    first, second = target.open(TEXT.tolist()), target.open(TEXT.tolist())
    assert early.length == 0 and first.length == second.length == 64
    target.adopt(early, TEXT.tolist())
    target.adopt(second, TEXT.tolist())
    target.pool.marks.clear()
    target.adopt(first, TEXT.tolist())
    for each in (first, second, early):
        assert each.state is not None and each.state.length == each.length == 64 == each.shared * 16
        assert torch.equal(target.extend([each], [TEXT[64:70]]).logits, want)
        target.close(each)
    target.check()


def test_a_text_leaves_a_mark_at_the_end_of_every_page() -> None:
    """However many guesses stand in a pass that comes by."""
    target = target_of("lfm2")
    for right in range(4):
        slot, left = target.open(TEXT.tolist()), set[int]()
        assert slot.state is not None
        target.extend([slot], [TEXT[:3]])
        while slot.length + right < len(TEXT):
            at = slot.length
            target.score([slot], TEXT[at : at + 1], [Draft.chain(TEXT[at + 1 : at + 1 + right])])
            target.rewind(slot, range(right))
            left |= set(slot.state.marks)
        assert left == set(range(16, slot.state.taken + 1, 16)) != set(), right
        target.truncate(slot, 0)


def test_marks_go_with_their_pages() -> None:
    target = target_of("qwen3_5_text", cache_tokens=96)
    for text_of in (TEXT, torch.flip(TEXT, [0])):
        slot = target.open(text_of[:80].tolist())
        target.extend([slot], [text_of[:80]])
        target.close(slot)
        target.check()
        assert set(target.pool.marks) <= set(target.pool.prefix_of)
    assert len(target.pool.marks) == 1


def test_what_is_cut_far_back_is_read_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And from then on the states stay as far behind as the cut of a draft went."""
    target = target_of("qwen3_5_text")
    slot = target.open(TEXT.tolist())
    rows: list[int] = []
    run: Callable[..., Tensor] = target._pass
    monkeypatch.setattr(states, "AGAIN", 32)
    monkeypatch.setattr(target, "_pass", lambda p, keep: rows.append(len(p.position_list)) or run(p, keep))
    target.extend([slot], [TEXT[:40]])
    target.truncate(slot, 40 - HELD)
    target.extend([slot], [TEXT[40 - HELD : 80]])
    want = target.extend([slot], [TEXT[80:81]]).logits
    target.truncate(slot, 0)  # further than any draft
    target.extend([slot], [TEXT[:80]])
    assert torch.equal(target.extend([slot], [TEXT[80:81]]).logits, want)
    for _ in range(3):
        target.truncate(slot, 80 - 2 * HELD)
        target.extend([slot], [TEXT[80 - 2 * HELD : 80]])
        assert torch.equal(target.extend([slot], [TEXT[80:81]]).logits, want)
    assert rows == [40, 40 + HELD, 1, *[80, 1], *[32, 80 - 2 * HELD - 32, 2 * HELD, 1], *[2 * HELD, 1] * 2], rows
    assert target.states is not None and target.states.held == 2 * (2 * HELD + 1)


def test_a_text_that_is_cut_to_nothing_makes_no_others_states_larger() -> None:
    target = target_of("lfm2")
    slot = target.open([], room=240)
    target.extend([slot], [text(240)])
    target.truncate(slot, 0)
    assert target.states is not None and target.states.held == HELD


def test_a_history_that_one_pass_made_long_does_not_stay_so() -> None:
    """A prompt whose tokens' log-probabilities are wanted is scored like a draft that stands."""
    target, ids = target_of("qwen3_5_text", torch.bfloat16), text(200)
    slots = [target.open([], room=220) for _ in range(2)]
    target.score(slots[:1], ids[:1], [Draft.chain(ids[1:])])
    target.rewind(slots[0], range(199))
    target.extend(slots[1:], [ids])
    for at in range(3):
        one, other = (target.score([slot], ids[at : at + 1], [Draft.chain([5, 6])]).logits for slot in slots)
        assert torch.equal(one, other)
        for slot in slots:
            target.rewind(slot, (0,))
    first, second = (slot.state for slot in slots)
    assert first is not None and second is not None and first.history.shape == second.history.shape


def test_a_failing_pass_leaves_the_texts_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("qwen3_next")
    slots = [target.open(TEXT.tolist()) for _ in range(2)]
    target.extend(slots, [TEXT[:30], TEXT[10:60]])
    want = target.score(slots, TEXT[30:31].repeat(2), [Draft.chain([4, 5])] * 2).logits
    for slot, length in zip(slots, (30, 50), strict=True):
        target.rewind(slot, ())
        target.truncate(slot, length)
    fused: Any = target.fused
    run = type(fused).__call__

    def failing(self: Any, *about: Any) -> Tensor:
        run(self, *about)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(fused), "__call__", failing)
    free, tree = target.pool.available(), Draft(torch.tensor([7, 8]), (-1, -1))
    for _ in range(2):  # the second fails as the text is read again
        with pytest.raises(RuntimeError, match="memory"):
            target.score(slots, TEXT[30:31].repeat(2), [tree] * 2)
        assert [slot.tokens for slot in slots] == [TEXT[:30].tolist(), TEXT[10:60].tolist()] and target.pool.available() == free
    monkeypatch.undo()
    assert torch.equal(target.score(slots, TEXT[30:31].repeat(2), [Draft.chain([4, 5])] * 2).logits, want)
    for slot in slots:
        target.rewind(slot, ())
    target.score(slots, TEXT[31:32].repeat(2), [tree] * 2)
    for slot in (*slots, *slots):  # in flight, and again
        target.close(slot)
    target.check()


def test_a_pass_that_is_interrupted_at_its_end_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("qwen3_5_text")
    slot = target.open([])
    target.extend([slot], [TEXT[:40]])
    want = target.extend([slot], [TEXT[40:41]]).logits
    target.truncate(slot, 40)

    def interrupted(self: states.State, walk: native.Walk) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(states.State, "passed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.score([slot], TEXT[40:41], [Draft.empty()])
    assert torch.equal(target.score([slot], TEXT[40:41], [Draft.empty()]).logits, want)


def test_a_text_that_could_not_be_read_again_is_offered_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may have been given to others in between."""
    target = target_of("qwen3_5_text", cache_tokens=96)
    slot = target.open([], room=80)
    assert target.pool.available() == 1
    target.extend([slot], [TEXT[:80]])
    offered = dict(target.pool.index)
    assert slot.state is not None and slot.shared == 5 == len(offered)
    slot.state.forget()
    target.pool.marks.clear()
    with monkeypatch.context() as patch:
        patch.setattr(target, "_pass", lambda *_: {}["no room"])
        with pytest.raises(KeyError):
            target.extend([slot], [TEXT[80:81]])
    assert slot.tokens == TEXT[:80].tolist()
    target.close(slot)
    target.check()
    assert target.pool.index.items() < offered.items()


def test_a_pass_that_was_not_begun_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.errors import CacheFull

    target = target_of("qwen3_5_text", cache_tokens=96)
    slot = target.open([], room=60)
    target.extend([slot], [TEXT[:60]])
    assert slot.state is not None
    before = slot.state.length
    with pytest.raises(CacheFull):
        target.score([slot], TEXT[:1], [Draft.chain(TEXT[:50])])
    assert slot.length == before == slot.state.length


@pytest.mark.parametrize("family", CASES)
def test_texts_are_those_that_transformers_chooses(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    config = LoadConfig(page_tokens=64, threads=torch.get_num_threads())
    target = load_target(tmp_path, config)
    assert isinstance(target, PagedTarget) and target.facts.invisible, target.facts.invisible_reason
    texts = [text(40, 1), text(7, 2)]
    want, drafted, _ = engine_ids(target, texts, "none")
    assert drafted == 0 and len(set(want[0])) > 10
    assert all(chosen(model, ids, made) == made for ids, made in zip(texts, want, strict=True))
    found, drafted, accepted = engine_ids(target, texts, Oracle(ahead(texts, want), wrong_at=lambda position: position % 3 == 0))
    assert found == want and 0 < accepted < drafted
    found, drafted, accepted = engine_ids(target, texts, AlwaysWrong(target.vocab_size, ahead(texts, want)))
    assert found == want and drafted > 0 and accepted == 0
    draft = load_target(tmp_path, config)  # a draft model with states: its own guesses are cut again and again
    found, drafted, accepted = engine_ids(target, texts, ModelDrafter(draft))
    assert found == want and accepted == drafted > 0 and not draft.slots


def test_trees_and_noise_change_nothing(tmp_path: Path) -> None:
    target, draft = target_of("qwen3_next"), target_of("qwen3_5_text")
    prompts, options = [text(40, 1).tolist(), text(9, 2).tolist()], [Sampling(temperature=0.8, max_tokens=40, seed=s) for s in (1, 2)]
    found = []
    for drafter, more in (("none", {}), ("ngram", {"depth": 3}), (ModelDrafter(draft), {"depth": 3, "tree": 7}), ("suffix", {"depth": 4})):
        with Engine(target=target, drafter=drafter, **more) as engine:
            found.append([list(out.token_ids) for out in engine.generate_batch(prompts, options)])
    assert found[1:] == found[:1] * 3 and len(set(found[0][0])) > 10


def test_logprobs_of_a_prompt_are_those_of_one_pass() -> None:
    target, prompt = target_of("qwen3_next"), text(150, 4)
    with torch.inference_mode():
        want = model_of("qwen3_next")(input_ids=prompt[None], use_cache=False).logits[0].log_softmax(-1)
    with Engine(target=target, drafter="ngram", depth=3) as engine:
        out = engine.generate(prompt.tolist(), max_tokens=4, temperature=0, prompt_logprobs=0)
    assert out.prompt_logprobs is not None
    found = [one.logprob for one in out.prompt_logprobs if one.logprob is not None]
    assert len(found) == 149
    assert torch.allclose(torch.tensor(found), want[:-1].gather(1, prompt[1:, None])[:, 0], atol=1e-3)


@pytest.mark.parametrize("family", CASES)
def test_heads_are_shown_the_norm_before_the_output(family: str) -> None:
    target = target_of(family)
    last = len(target.parts.layers) - 1
    target.set_taps((last,))
    scores = target.extend([target.open(TEXT.tolist())], [TEXT])
    require_laws(target)
    with torch.inference_mode():
        assert torch.allclose(logits_after(target.parts, scores.taps[last][-1:]), scores.logits, atol=1e-3)


def test_what_a_text_takes_is_told(tmp_path: Path) -> None:
    target = target_of("qwen3_5_text")
    assert target.facts.cache_bytes_per_token == 1 * 2 * 2 * 16 * 4  # one layer of attention: keys and values of two heads of 16 floats
    assert target.states is not None
    row = 2 * 2 * 32 + 4 * (64 + 2)
    assert target.states.bytes == 2 * 4 * 32 * 64 * 4 + 2 * (3 + 2 * HELD) * row * 4
    slot = target.open([])
    target.extend([slot], [TEXT[:80]])
    assert slot.state is not None and slot.state.memory.nbytes + slot.state.history.nbytes == target.states.bytes
    assert target.facts.reasons["recurrent state"].startswith(f"{target.states.bytes:,} bytes a sequence")
    kimi = target_of("kimi_linear")
    assert kimi.facts.cache_bytes_per_token == 1 * 4 * (20 + 10) * 4  # one layer of a latent: of each head a key of 20 and a value of 10
    assert kimi.states is not None and kimi.states.row == 3 * (3 * 32 + 1 + 32)
    slot = kimi.open([])
    kimi.extend([slot], [TEXT[:3]])
    assert kimi.pool.keys[1][0].nbytes + kimi.pool.values[1][0].nbytes == kimi.facts.cache_bytes_per_token


def test_states_that_kernels_do_not_take_stay_in_the_models_own_cache() -> None:
    for more, fused in (({"linear_value_head_dim": 24}, True), ({}, False)):
        model = build("qwen3_5_text", {**SIZES, **more})
        if fused:
            assert as_target(model, LoadConfig(self_test=False)).facts.tier == 3
        else:
            assert as_target(model, LoadConfig(self_test=False, packed=False)).facts.tier == 3


@pytest.mark.parametrize("family", ["olmo_hybrid", "kimi_linear, low"])
def test_three_convolutions_in_place_of_one_are_no_block_of_ours(family: str) -> None:
    """Of OLMo Hybrid transformers 5.5 has three."""
    model = model_of(family)
    part = part_of(model.model.layers[0], ("linear_attn", "self_attn"))
    part.q_conv1d = part.conv1d
    del part.conv1d
    assert not can_fuse(model)[0]


def test_what_older_transformers_tell_and_ask() -> None:
    """5.17: a rotary module that knows pictures wants three positions of a token, and norms of state spaces have no groups."""
    told: list[tuple[int, ...]] = []
    target = target_of("qwen3_5_text")
    assert target.fused is not None
    hook = target.fused.rotary.register_forward_pre_hook(lambda _, about: told.append(about[1].shape))
    target.extend([target.open([])], [TEXT[:3]])
    hook.remove()
    assert [shape[0] for shape in told] == [3]
    model = model_of("granitemoehybrid")
    for layer in model.model.layers:
        if layer.mamba is not None and hasattr(layer.mamba.norm, "group_size"):
            del layer.mamba.norm.group_size
    target = as_target(model, LoadConfig(self_test=False))
    assert isinstance(target, PagedTarget) and target.fused is not None
    assert {layer.groups for layer in target.fused.layers if isinstance(layer, SpaceLayer)} == {1}


def test_layers_that_skip_are_refused_with_the_reason() -> None:
    with pytest.raises(OptionError, match="recurrent states"):
        Engine(target=target_of("qwen3_5_text"), drafter="layer-skip:exit=1")
