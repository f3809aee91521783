"""Published multi-token prediction heads in small: exact key names and shapes, and what they compute, written down once more.

Nothing of ours is imported here. Decoder layers with latent attention or experts are the transformers classes with the tensors put
in by hand and transformers' own attention; norms, concatenation and recursion, and the plain layers, are plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

H, V, L, E, INNER, M = 32, 64, 2, 4, 48, 16       # hidden, vocabulary, layers, experts, width of a dense MLP, of an expert's

BASE: dict[str, Any] = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 2,
                        "intermediate_size": INNER, "max_position_embeddings": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
                        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**BASE, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                    "v_head_dim": 6, "n_routed_experts": E, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                    "moe_intermediate_size": M, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4_moe": {**BASE, "head_dim": 8, "n_routed_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": M,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "partial_rotary_factor": 0.5},
    "qwen3_next": {**BASE, **LINEAR, "head_dim": 8, "num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": M,
                   "shared_expert_intermediate_size": M},
    "qwen3_5_text": {**BASE, **LINEAR, "head_dim": 16},
    "qwen2": BASE,
    "qwen3": {**BASE, "head_dim": 16},
    "ernie4_5_moe": {**BASE, "moe_num_experts": E, "moe_k": 2, "moe_intermediate_size": M, "moe_num_shared_experts": 1,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "exaone_moe": {**BASE, "head_dim": 8, "num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": M, "sliding_window": 4},
    "mellum": {**BASE, "head_dim": 8, "num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": M, "sliding_window": 4,
               "layer_types": ["full_attention", "sliding_attention"]},
}

MLP = {"mlp.gate_proj.weight": (INNER, H), "mlp.up_proj.weight": (INNER, H), "mlp.down_proj.weight": (H, INNER)}
NORMS = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
EXPERTS = {f"mlp.experts.{i}.{name}": shape for i in range(E)
           for name, shape in (("gate_proj.weight", (M, H)), ("up_proj.weight", (M, H)), ("down_proj.weight", (H, M)))}
SHARED = {f"mlp.{{}}.{name}.weight": shape for name, shape in (("gate_proj", (M, H)), ("up_proj", (M, H)), ("down_proj", (H, M)))}
ROUTED = {"mlp.gate.weight": (E, H), "mlp.gate.e_score_correction_bias": (E,), **EXPERTS,
          **{name.format("shared_experts"): shape for name, shape in SHARED.items()}}
LATENT = {"self_attn.q_a_proj.weight": (12, H), "self_attn.q_a_layernorm.weight": (12,), "self_attn.q_b_proj.weight": (48, 12),
          "self_attn.kv_a_proj_with_mqa.weight": (24, H), "self_attn.kv_a_layernorm.weight": (20,),
          "self_attn.kv_b_proj.weight": (56, 20), "self_attn.o_proj.weight": (H, 24)}


def attention(dim: int, gate: int = 1, norms: bool = False, biases: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (4 * dim * gate, H), "self_attn.k_proj.weight": (2 * dim, H),
                                          "self_attn.v_proj.weight": (2 * dim, H), "self_attn.o_proj.weight": (H, 4 * dim)}
    if norms:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if biases:
        shapes |= {"self_attn.q_proj.bias": (4 * dim,), "self_attn.k_proj.bias": (2 * dim,), "self_attn.v_proj.bias": (2 * dim,)}
    return shapes


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "deepseek_v3": {**LATENT, **ROUTED, **NORMS},
    "glm4_moe": {**attention(8, biases=False), **ROUTED, **NORMS},
    "qwen3_next": {**attention(8, gate=2, norms=True), "mlp.gate.weight": (E, H), **EXPERTS, **NORMS,
                   "mlp.shared_expert_gate.weight": (1, H), **{name.format("shared_expert"): shape for name, shape in SHARED.items()}},
    "qwen3_5_text": {**attention(16, gate=2, norms=True), **MLP, **NORMS},
    "qwen2": {**attention(8, biases=True), **MLP, **NORMS},
    "qwen3": {**attention(16, norms=True), **MLP, **NORMS},
    "ernie4_5_moe": {**attention(8), **MLP, **NORMS},
    "exaone_moe": {**attention(8, norms=True), **MLP, **NORMS},
    "mellum": {**attention(8, norms=True), "mlp.gate.weight": (E, H), **EXPERTS, **NORMS},
}
NAMES = {"token": "enorm", "hidden": "hnorm", "proj": "eh_proj", "last": "shared_head.norm"}
QWEN = {"token": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "proj": "fc", "last": "norm"}
MIMO = {"token": "token_layernorm", "hidden": "hidden_layernorm", "proj": "input_proj", "last": "final_layernorm"}
ERNIE = {"token": "mtp_emb_norm.0", "hidden": "mtp_hidden_norm.0", "proj": "mtp_linear_proj.0"}


@dataclass(frozen=True)
class Case:
    """One published head: its target's family, how its names begin and end, and what is peculiar to it."""

    family: str
    prefix: str
    names: Mapping[str, str]
    block: str                                  # prefix of the decoder layer's names
    own: tuple[str, ...] = ()                   # "embed_tokens", "shared_head.head"
    hidden_first: bool = False
    normed: bool = True
    blank_first: bool = False
    centred: bool = False                       # norms multiply by 1 + weight
    like: int = 1                               # the target's layer that is made as the head's
    window: int | None = None                   # how many keys a row sees, its own among them
    settings: Mapping[str, Any] = field(default_factory=dict)      # changes to config.json

    def keys(self) -> dict[str, tuple[int, ...]]:
        """Every published key and its shape."""
        parts: dict[str, tuple[int, ...]] = {"token": (H,), "hidden": (H,), "proj": (H, 2 * H), "last": (H,)}
        return {**{f"{self.prefix}{self.names[part]}.weight": shape for part, shape in parts.items() if part in self.names},
                **{f"{self.prefix}{name}.weight": (V, H) for name in self.own},
                **{f"{self.block}{name}": shape for name, shape in SHAPES[self.family].items()}}


DEEPSEEK = f"model.layers.{L}."
CASES: dict[str, Case] = {
    "deepseek": Case("deepseek_v3", DEEPSEEK, NAMES, DEEPSEEK, ("embed_tokens", "shared_head.head"), blank_first=True),
    "glm": Case("glm4_moe", DEEPSEEK, NAMES, DEEPSEEK, ("embed_tokens", "shared_head.head"), blank_first=True),
    "glm-without-head": Case("glm4_moe", DEEPSEEK, NAMES, DEEPSEEK, ("embed_tokens",), blank_first=True),
    "qwen3-next": Case("qwen3_next", "mtp.", QWEN, "mtp.layers.0.", centred=True),
    "qwen3.5": Case("qwen3_5_text", "mtp.", QWEN, "mtp.layers.0.", centred=True),
    "mimo": Case("qwen2", "model.mtp_layers.0.", MIMO, "model.mtp_layers.0.", hidden_first=True, normed=False, blank_first=True,
                 settings={"model_type": "mimo", "num_nextn_predict_layers": 1}),
    "speculators": Case("qwen3", "mtp_layers.0.", MIMO, "mtp_layers.0."),
    "ernie": Case("ernie4_5_moe", "model.", ERNIE, "model.mtp_block.0.", normed=False, like=0, settings={"num_nextn_predict_layers": 1}),
    "exaone": Case("exaone_moe", "mtp.", QWEN, "mtp.layers.0.", like=0, window=4, settings={"num_nextn_predict_layers": 1}),
    "mellum": Case("mellum", "mtp.", QWEN, "mtp.layers.0.", window=4, settings={"num_nextn_predict_layers": 1}),
}


def make(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """The head's tensors, random, of sizes that let every part matter."""
    generator = torch.Generator().manual_seed(seed)
    scales = {1: 0.3, 2: 0.25}
    tensors = {name: torch.randn(shape, generator=generator) * scales[len(shape)] for name, shape in case.keys().items()}
    return {name: 1 + tensor if "norm" in name and not case.centred else tensor for name, tensor in tensors.items()}


def target(case: Case, seed: int = 0) -> PreTrainedModel:
    """A tiny target of the family; its final norm is far from the identity."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **CONFIGS[case.family]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5) + (0.7 if parameter.ndim == 1 else 0.0))
    return model.eval()


def rms(x: Tensor, weight: Tensor, centred: bool, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + 1 if centred else weight)


def reference(case: Case, tensors: Mapping[str, Tensor], model: PreTrainedModel, tokens: Tensor, hidden: Tensor, further: Tensor) -> Tensor:
    """Logits [n + len(further), V]: of every true row (tokens[i], hidden[i] of the target's last layer), then of the recursion over
    `further` tokens, each of which reads the head's output before it."""
    part = {name: tensors[f"{case.prefix}{there}.weight"] for name, there in case.names.items()}
    embed = tensors.get(f"{case.prefix}embed_tokens.weight", model.get_input_embeddings().weight)
    head = tensors.get(f"{case.prefix}shared_head.head.weight", model.get_output_embeddings().weight)
    feature = model.model.norm(hidden) if case.normed else hidden
    layer = decoder(case, tensors)
    inputs, found = torch.empty(0, H), torch.empty(0, H)
    for token, before in [*zip(tokens, feature, strict=True), *((token, None) for token in further)]:
        embedded = embed[token] * (0.0 if case.blank_first and not len(inputs) else 1.0)
        sides = [rms(embedded, part["token"], case.centred), rms(found[-1] if before is None else before, part["hidden"], case.centred)]
        x = torch.cat(sides[::-1] if case.hidden_first else sides) @ part["proj"].T
        inputs = torch.cat((inputs, x[None]))
        out = layer(inputs)[-1:]
        found = torch.cat((found, rms(out, part["last"], case.centred) if "last" in part else out))
    return (found if "last" in part else model.model.norm(found)) @ head.T


def decoder(case: Case, tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The decoder layer over rows 0, 1, …: [n, H] → [n, H]."""
    weights = {name.removeprefix(case.block): tensor for name, tensor in tensors.items() if name.startswith(case.block)}
    if case.family in ("qwen2", "qwen3"):
        return lambda x: plain_layer(x, weights)
    package = case.family.removesuffix("_text")
    module = import_module(f"transformers.models.{package}.modeling_{package}")
    prefix = {"deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5",
              "ernie4_5_moe": "Ernie4_5_Moe", "exaone_moe": "ExaoneMoe", "mellum": "Mellum"}[package]
    config = AutoConfig.for_model(case.family, **CONFIGS[case.family])
    config._attn_implementation = config._experts_implementation = "eager"
    layer = getattr(module, f"{prefix}DecoderLayer")(config, case.like)
    rope = next(cls for name, cls in vars(module).items() if name.endswith("RotaryEmbedding") and "Vision" not in name)(config)
    if "mlp.experts.0.gate_proj.weight" in weights:
        weights["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([weights.pop(f"mlp.experts.{i}.{kind}_proj.weight")
                                                                      for kind in ("gate", "up")]) for i in range(E)])
        weights["mlp.experts.down_proj"] = torch.stack([weights.pop(f"mlp.experts.{i}.down_proj.weight") for i in range(E)])
    layer.load_state_dict({name: tensor for name, tensor in weights.items() if name in layer.state_dict()})
    layer.eval().requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        at = torch.arange(len(x))[None]
        seen = torch.ones(len(x), len(x)).tril().triu(1 - (case.window or len(x)))
        mask = torch.zeros(len(x), len(x)).masked_fill(seen == 0, float("-inf"))[None, None]
        kind = (config.layer_types[case.like],) if "layer_type" in signature(rope.forward).parameters else ()
        turn = rope(x[None], at.expand(3, 1, -1) if hasattr(rope, "mrope_section") else at, *kind)
        out = layer(x[None], position_embeddings=turn, position_ids=at, attention_mask=mask)
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run


def plain_layer(x: Tensor, weights: Mapping[str, Tensor], theta: float = 10000.0) -> Tensor:
    """A Qwen2 or Qwen3 decoder layer by hand."""
    n = len(x)

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    y = rms(x, weights["input_layernorm.weight"], False)
    q, k, v = (linear(f"self_attn.{name}_proj", y).view(n, heads, -1) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    if "self_attn.q_norm.weight" in weights:
        q, k = rms(q, weights["self_attn.q_norm.weight"], False), rms(k, weights["self_attn.k_norm.weight"], False)
    dim = q.shape[-1]
    angle = torch.arange(n)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotated(z: Tensor) -> Tensor:
        spun = torch.complex(z[..., :dim // 2], z[..., dim // 2:]) * turn
        return torch.cat((spun.real, spun.imag), -1)

    q, k = rotated(q), rotated(k)
    heads = []
    for i in range(4):
        scores = q[:, i] @ k[:, i // 2].T / dim**0.5 + torch.full((n, n), float("-inf")).triu(1)
        heads.append(scores.softmax(-1) @ v[:, i // 2])
    x = x + linear("self_attn.o_proj", torch.cat(heads, -1))
    y = rms(x, weights["post_attention_layernorm.weight"], False)
    return x + linear("mlp.down_proj", functional.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y))
