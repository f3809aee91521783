"""Inflating keeps the function and leaves nothing to merge: float32 on every layout, and each kind of growth on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_module import benchmark
from safetensors.torch import load_file
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

inflate = benchmark("inflate")
SMALL = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
             max_position_embeddings=256)
PROMPT = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(5))


def small_model(family: str, biases: bool = True) -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=8, tie_word_embeddings=True, attention_bias=biases, mlp_bias=biases))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**SMALL, head_dim=8, sliding_window=12))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=10, max_window_layers=1))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:                      # large enough that attention and neurons matter and texts do not repeat
                p.normal_(0, 1.0 if "embed" in name else 2 / p.shape[1] ** 0.5)
            else:
                p.uniform_(0.5, 1.5)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


SHAPES = {
    "all": inflate.Shape(64, 5, 8, 4, 160),
    "head_dim": inflate.Shape(128, 4, 16, 4, 320, head_dim=16),
    "odd": inflate.Shape(96, 3, 12, 4, 201),
    "groups": inflate.Shape(64, 3, 12, 3, 128),
    "same": inflate.Shape(32, 2, 4, 2, 48),
}


@pytest.mark.parametrize("family", inflate.FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_function_and_nothing_to_merge(family: str, shape: str) -> None:
    small = small_model(family)
    large = inflate.build_inflated(small, SHAPES[shape], "cpu", torch.float32, seed=3)
    result = inflate.compare(small, large, PROMPT)
    assert result["logits"] < 1e-5 and result["same_text"], result
    assert inflate.degenerate(large) == []
    embed, output = large.get_input_embeddings().weight, large.get_output_embeddings().weight
    assert embed.data_ptr() != output.data_ptr() and not large.config.tie_word_embeddings


MIXTURES = {
    "experts": inflate.Shape(64, 2, 8, 4, 96, experts=4, chosen=2),
    "extra layers": inflate.Shape(64, 5, 8, 4, 160, experts=3, chosen=1),
    "head_dim": inflate.Shape(128, 4, 16, 4, 320, head_dim=16, experts=3, chosen=3),
}


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("shape", MIXTURES)
def test_a_mixture_computes_the_same_whichever_experts_are_chosen(family: str, shape: str) -> None:
    small = small_model(family, biases=False)
    large = inflate.build_inflated(small, MIXTURES[shape], "cpu", torch.float32, seed=3)
    assert large.config.model_type == "mixtral" and inflate.degenerate(large) == []
    for _ in range(2):
        result = inflate.compare(small, large, PROMPT)
        assert result["logits"] < 1e-5 and result["same_text"], result
        for layer in large.model.layers:
            layer.mlp.gate.weight.data.neg_()               # the least likely experts in place of the likeliest


def test_every_expert_is_chosen_and_none_by_all() -> None:
    large: Any = inflate.build_inflated(small_model("llama", biases=False), MIXTURES["experts"], "cpu", torch.float32, seed=3)
    chosen: list[torch.Tensor] = []
    for layer in large.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, _, out: chosen.append(out[2]))
    with torch.no_grad():
        large(torch.randint(96, (1, 200), generator=torch.Generator().manual_seed(6)))
    counts = [torch.bincount(each.flatten(), minlength=4) for each in chosen]
    assert len(counts) == 2 and all(30 < count.min() and count.max() < 180 for count in counts), counts


def test_a_mixture_is_saved_as_published_ones_are(tmp_path: Path) -> None:
    large: Any = inflate.build_inflated(small_model("llama", biases=False), MIXTURES["experts"], "cpu", torch.bfloat16, seed=3)
    large.save_pretrained(tmp_path)
    tensors, layer = load_file(tmp_path / "model.safetensors"), large.model.layers[1].mlp
    expert = "model.layers.1.block_sparse_moe.experts.2."
    assert torch.equal(torch.cat((tensors[expert + "w1.weight"], tensors[expert + "w3.weight"])), layer.experts.gate_up_proj[2])
    assert torch.equal(tensors[expert + "w2.weight"], layer.experts.down_proj[2])
    read = sum(p.nbytes for p in large.parameters()) - large.model.embed_tokens.weight.nbytes
    idle = sum(each.mlp.experts.gate_up_proj.nbytes + each.mlp.experts.down_proj.nbytes for each in large.model.layers) // 2
    assert benchmark("pair").pass_bytes(tmp_path) == read - idle, "two of four experts"


def test_more_kv_heads_than_groups_need() -> None:
    """Grouped heads become plain multi-head attention; the function holds where full rank cannot."""
    small = small_model("qwen3")
    large = inflate.build_inflated(small, inflate.Shape(64, 3, 8, 8, 128), "cpu", torch.float32, seed=3)
    assert inflate.compare(small, large, PROMPT)["logits"] < 1e-5


def test_bfloat16_is_no_worse_than_the_small_model_in_bfloat16() -> None:
    exact = small_model("llama")
    large = inflate.build_inflated(exact, SHAPES["all"], "cpu", torch.bfloat16, seed=3)
    rounded = small_model("llama").to(torch.bfloat16)
    ids = torch.randint(0, 96, (1, 200), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        goal, mine, base = (m(ids).logits[0].float() for m in (exact, large, rounded))
    assert (mine - goal).std() < 1.5 * (base - goal).std()
    assert (mine.argmax(-1) == goal.argmax(-1)).float().mean() > 0.9


def test_the_seed_decides_the_weights() -> None:
    small = small_model("llama")
    a, b, c = (inflate.build_inflated(small, SHAPES["all"], "cpu", torch.bfloat16, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not any(torch.equal(a[k], c[k]) for k in a if a[k].ndim == 2)


def test_a_saved_copy_is_the_same_model(tmp_path: Path) -> None:
    small = small_model("qwen2")
    large = inflate.build_inflated(small, SHAPES["head_dim"], "cpu", torch.float32, seed=3)
    large.save_pretrained(tmp_path)
    again = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(PROMPT).logits, large(PROMPT).logits)


@pytest.mark.parametrize("damage", ["zero row", "repeated row", "repeated column in another layer", "rank"])
def test_the_check_finds(damage: str) -> None:
    large = inflate.build_inflated(small_model("llama"), SHAPES["all"], "cpu", torch.float32, seed=3)
    first, last = large.model.layers[0], large.model.layers[-1]
    with torch.no_grad():
        if damage == "zero row":
            first.mlp.up_proj.weight[3] = 0
        elif damage == "repeated row":
            first.mlp.up_proj.weight[3] = first.mlp.up_proj.weight[4]
        elif damage == "rank":
            first.mlp.up_proj.weight[:, 0] = first.mlp.up_proj.weight[:, 1:].mean(1)
        else:
            last.mlp.down_proj.weight[:, 9] = first.mlp.down_proj.weight[:, 2]
    assert len(inflate.degenerate(large)) == 1


@pytest.mark.parametrize("damage", ["row of another expert", "rank of an expert"])
def test_the_check_looks_into_experts(damage: str) -> None:
    large: Any = inflate.build_inflated(small_model("llama", biases=False), MIXTURES["experts"], "cpu", torch.float32, seed=3)
    rows = large.model.layers[0].mlp.experts.gate_up_proj
    with torch.no_grad():
        if damage == "rank of an expert":
            rows[1, :, 0] = rows[1, :, 1:].mean(1)
        else:
            rows[1, 3] = rows[2, 4]
    assert len(inflate.degenerate(large)) == 1


@pytest.mark.parametrize(("shape", "says"), [
    (inflate.Shape(16, 5, 8, 4, 160), "hidden=16"),
    (inflate.Shape(64, 1, 8, 4, 160), "layers=1"),
    (inflate.Shape(64, 5, 9, 4, 160), "heads=9"),
    (inflate.Shape(64, 5, 8, 1, 160), "kv heads"),
    (inflate.Shape(64, 5, 8, 4, 160, head_dim=12), "head_dim=12"),
    (inflate.Shape(32, 5, 8, 4, 160), "hidden=32"),
])
def test_a_shape_that_does_not_fit_is_refused(shape: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        inflate.build_inflated(small_model("llama"), shape)


@pytest.mark.parametrize(("family", "shape", "says"), [
    ("llama", inflate.Shape(64, 2, 8, 4, 95, experts=4, chosen=2), "intermediate=95: expected at least twice"),
    ("llama", inflate.Shape(64, 2, 8, 4, 96, experts=4), "chosen=0: expected 1 to 4"),
    ("llama", inflate.Shape(64, 2, 8, 4, 96, experts=4, chosen=5), "chosen=5: expected 1 to 4"),
    ("llama", inflate.Shape(64, 2, 8, 4, 96, chosen=2), "chosen=2: expected no chosen experts"),
    ("llama", inflate.Shape(32, 2, 4, 2, 96, experts=4, chosen=2), "hidden=32"),
    ("qwen3", inflate.Shape(64, 2, 8, 4, 96, experts=4, chosen=2), "'qwen3' with experts"),
    ("biases", inflate.Shape(64, 2, 8, 4, 96, experts=4, chosen=2), "biases"),
])
def test_a_mixture_that_does_not_fit_is_refused(family: str, shape: Any, says: str) -> None:
    small = small_model("llama") if family == "biases" else small_model(family, biases=False)
    with pytest.raises(ValueError, match=says):
        inflate.build_inflated(small, shape)
