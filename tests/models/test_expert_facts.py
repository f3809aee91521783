"""What is known of a mixture's experts: against what is published of five of them, and in small models that are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import COMMON, MOE, build
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof.config import LoadConfig
from draftproof.core.budget import distinct_experts
from draftproof.models.experts import experts_of
from draftproof.models.load import as_target
from draftproof.models.packed import sizes
from draftproof.models.target import ExpertFacts, LoadFacts

PUBLISHED: dict[str, tuple[str, dict[str, int], float, float]] = {   # family, configuration, 10⁹ weights, active ones
    "Qwen3-30B-A3B": ("qwen3_moe", dict(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8), 30.5, 3.3),
    "gpt-oss-20b": ("gpt_oss", dict(
        vocab_size=201088, hidden_size=2880, num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4), 20.9, 3.6 + 0.58),    # its card counts no embeddings here
    "Mixtral-8x7B": ("mixtral", dict(
        vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2), 46.7, 12.9),
    "Gemma 4 26B-A4B": ("gemma4_text", dict(
        vocab_size=262144, hidden_size=2816, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0, intermediate_size=2112,
        enable_moe_block=True, moe_intermediate_size=704, num_experts=128, top_k_experts=8), 25.2, 3.8),
    "DeepSeek-V3": ("deepseek_v3", dict(
        vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
        first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128), 671, 37.5),
}


def facts_of(model: Any) -> LoadFacts:
    weight_bytes, parameters = sizes(model)
    return LoadFacts("", "", "", 1, 1, weight_bytes, 0, True, "", {}, parameters, experts_of(model))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mixtures(name: str) -> None:
    *_, all_of_them, active = PUBLISHED[name]
    facts = published(name)
    assert facts.parameters / 1e9 == pytest.approx(all_of_them, rel=0.005)
    assert facts.weight_bytes == pytest.approx(2 * facts.parameters, rel=1e-3), "some routers are in float32"
    assert facts.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert facts.pass_bytes(1) == pytest.approx(2 * facts.active_parameters, rel=0.005)
    assert facts.pass_bytes(1e6) == pytest.approx(facts.weight_bytes)
    experts = facts.experts
    assert experts is not None and experts.bytes == 2 * experts.parameters
    more = [(distinct_experts(experts.count, experts.chosen, t) - experts.chosen) / experts.count * experts.bytes for t in (2, 9)]
    assert [facts.pass_bytes(t) - facts.pass_bytes(1) for t in (2, 9)] == pytest.approx(more)


def published(name: str) -> LoadFacts:
    family, settings, *_ = PUBLISHED[name]
    with torch.device("meta"):
        return facts_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.bfloat16))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_the_documentation(name: str) -> None:
    facts = published(name)
    if name == "DeepSeek-V3" and facts.weight_bytes == 2 * facts.parameters:
        pytest.skip("this transformers keeps its routers in bfloat16, the documentation counts them in float32")
    shapes = (1, 2), (1, 5), (1, 9), (8, 2), (8, 5), (64, 2), (64, 5)
    cells = [f"{facts.pass_bytes(batch * rows) / facts.pass_bytes(batch):.2f}" for batch, rows in shapes]
    row = " | ".join([name, f"{facts.parameters / 1e9:.1f} B, {facts.active_parameters / 1e9:.1f} B", *cells])
    assert f"| {row} |" in (Path(__file__).parents[2] / "docs" / "advice.md").read_text(encoding="utf-8"), row


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe"])
def test_a_load_tells_of_experts(family: str) -> None:
    model = build(family)
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    facts = as_target(model, LoadConfig(self_test=False)).facts
    assert facts.experts == ExpertFacts(4, 2, 4 * held, held)
    assert facts.active_parameters == facts.parameters - held // 2


def test_experts_that_every_row_goes_through_are_no_experts_here() -> None:
    """Nor are the dense layers in front."""
    config = AutoConfig.for_model("deepseek_v3", **{**COMMON, **MOE}, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1,
                                  n_group=2, topk_group=1, q_lora_rank=16,
                                  kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = experts_of(model)
    assert found is not None and (found.count, found.chosen) == (4, 2)
    assert found.parameters == (COMMON["num_hidden_layers"] - 1) * 4 * 3 * COMMON["hidden_size"] * MOE["moe_intermediate_size"]


def test_a_model_without_experts_has_none() -> None:
    facts = facts_of(build("qwen3"))
    assert facts.experts is None and facts.active_parameters == facts.parameters and facts.pass_bytes(1) == facts.weight_bytes
