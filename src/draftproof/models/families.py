"""Families of transformers whose blocks are Llama's, and in what they differ from it: what a fused layer (fused.py) has to know.

    x ← x + share · norm(o(attention(turn(norm(qkv(norm(x)))))))        x ← x + share · norm(mlp(norm(x)))

Any of the norms may be missing. Everything that a module tells itself is read from it: sizes, windows, sinks, whether heads are normed
one by one or as one, how much of a head is turned, the share of what a block adds. Here stands the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..mixtures import Routing
from .between import signed
from .levels import LevelWeight
from .routed import comes_apart, router_of
from .shares import bare

GELU = (type(ACT2FN["gelu_pytorch_tanh"]),)
MOVING_ROPE = {"dynamic", "longrope"}  # their angles depend on the longest row of the pass, so there is no table of them
ON_ANY_DEVICE = {"llama", "mistral", "ministral", "qwen2", "qwen3"}     # others have kernels of ours on a CPU alone


class Norms(NamedTuple):
    """Names of a layer's norms: before attention, of what it adds, before the MLP, of what that adds; None: there is none."""

    before: str | None = "input_layernorm"
    of_attention: str | None = None
    after: str | None = "post_attention_layernorm"
    of_mlp: str | None = None


BEHIND = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AROUND_IN_GLM = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _by_softmax(block: Any) -> Routing:
    return Routing(normed=block.gate.norm_topk_prob, kept=True)


def _by_sigmoid(block: Any) -> Routing:
    return Routing(by_sigmoid=True, wide=True, normed=block.gate.norm_topk_prob, factor=block.gate.routed_scaling_factor)


def _always(attention: Any) -> bool:
    return True


def _in_windows(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


class Family(NamedTuple):
    """prefix: of its classes' names; home: its module below transformers.models, None: that of its own name. late: norms are rounded
    once, behind their weights; from_one: these count from one. adjoining: rotary positions turn adjoining numbers of a head, not those half
    of it apart. turns: whether a layer's heads are turned at all. window_of_config: attention reads its window there. routing: how rows
    choose experts, of a block that has them."""

    prefix: str
    norms: Norms = Norms()
    home: str | None = None
    late: bool = False
    from_one: bool = False
    adjoining: bool = False
    turns: Callable[[Any], bool] = _always
    window_of_config: bool = False
    routing: Callable[[Any], Routing] = _by_softmax

    def window(self, attention: Any) -> int | None:
        """How many keys a row sees, itself included; None: all."""
        if not getattr(attention, "is_sliding", True):
            return None
        found: int | None = getattr(attention.config if self.window_of_config else attention, "sliding_window", None)
        return found


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window_of_config=True),
    "ministral": Family("Ministral"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "mixtral": Family("Mixtral", window_of_config=True, routing=lambda block: Routing()),
    "qwen3_moe": Family("Qwen3Moe"),
    "cwm": Family("Cwm"),
    "dots1": Family("Dots1", routing=_by_sigmoid),
    "ernie4_5": Family("Ernie4_5", adjoining=True),
    "ernie4_5_moe": Family("Ernie4_5_Moe", adjoining=True, routing=lambda block: Routing(wide=True, kept=True)),
    "exaone4": Family("Exaone4", BEHIND, turns=_in_windows),
    "exaone_moe": Family("ExaoneMoe", turns=_in_windows, routing=_by_sigmoid),
    "flex_olmo": Family("FlexOlmo", BEHIND, late=True),
    "gemma": Family("Gemma", late=True, from_one=True),
    "gemma3_text": Family("Gemma3", AROUND, "gemma3", late=True, from_one=True),
    "glm": Family("Glm", adjoining=True),
    "glm4": Family("Glm4", AROUND_IN_GLM, adjoining=True),
    "glm4_moe": Family("Glm4Moe", routing=_by_sigmoid),
    "gpt_oss": Family("GptOss", late=True, routing=lambda block: Routing(kept=True)),
    "granite": Family("Granite"),
    "helium": Family("Helium", late=True, adjoining=True),
    "hy_v3": Family("HYV3", routing=lambda block: Routing(by_sigmoid=True, wide=True, factor=block.gate.router_scaling_factor)),
    "minimax_m2": Family("MiniMaxM2", routing=lambda block: Routing(by_sigmoid=True)),
    "olmo2": Family("Olmo2", BEHIND, late=True),
    "olmo3": Family("Olmo3", BEHIND, late=True),
    "olmoe": Family("Olmoe", window_of_config=True),
    "phi3": Family("Phi3", window_of_config=True),
    "qwen2_moe": Family("Qwen2Moe"),
    "seed_oss": Family("SeedOss"),
    "smollm3": Family("SmolLM3", turns=lambda attention: bool(attention.use_rope)),
    "solar_open": Family("SolarOpen", routing=_by_sigmoid),
}


class Rope(NamedTuple):
    """Rotary positions of some layers: how many numbers of a head are turned; which of the model's they are; what its module is told, if
    there are several; and whether angles depend on the text."""

    numbers: int
    number: int = 0
    kind: tuple[str, ...] = ()
    moves: bool = False

    def angles(self, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, 2, numbers] of a module's cos and sin [1, rows, n]: sin with its first half negated. gpt-oss's are of one half."""
        cos, sin = (part[0] if part.shape[-1] == self.numbers else torch.cat([part[0]] * 2, -1) for part in (cos, sin))
        return torch.stack([cos, signed(sin)], 1)


def rope_of(body: Any, layer: int) -> Rope:
    """Of a layer of a model."""
    rotary = body.rotary_emb
    if not isinstance(rotary.rope_type, dict):
        return Rope(2 * len(rotary.inv_freq), moves=rotary.rope_type in MOVING_ROPE)
    kinds, kind = rotary.rope_type, body.config.layer_types[layer]
    return Rope(2 * len(getattr(rotary, f"{kind}_inv_freq")), list(kinds).index(kind), (kind,), kinds[kind] in MOVING_ROPE)


def norm_of(norm: Any, family: Family) -> tuple[Tensor, float]:
    """A norm's weight, float32 if it is rounded once behind it, and eps."""
    weight = norm.weight.detach()
    weight = weight.float() if family.late else weight
    return (1 + weight if family.from_one else weight), getattr(norm, "variance_epsilon", None) or norm.eps


def scaled(embed: Any) -> float | None:
    """By what an embedding of Gemma's multiplies; None of any other."""
    if type(embed).__name__.endswith("TextScaledWordEmbedding") and type(embed).__module__.startswith("transformers.models.gemma"):
        return float(embed.embed_scale.to(embed.weight.dtype))
    return None


def can_fuse(model: Any) -> tuple[bool, str]:
    """Whether every layer is a block as we know it, and why or why not."""
    name = str(model.config.model_type)
    if name not in FAMILIES:
        return False, f"{type(model).__name__} is not one of the families whose block is known ({', '.join(FAMILIES)})"
    if model.device.type != "cpu" and name not in ON_ANY_DEVICE:
        return False, f"blocks of {name} have kernels of ours on a CPU alone"
    strange = next(_strange(model, FAMILIES[name], name), None)
    if strange:
        return False, f"{type(model).__name__} has {strange}"
    return True, "one product for q, k and v, one for gate and up, and few operations between them"


def _there(module: Any, *names: str) -> list[Any]:
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _strange(model: Any, family: Family, name: str) -> Iterator[str]:
    """What is not as transformers ships it, or not as a fused layer has it."""
    home = f"transformers.models.{family.home or name}.modeling_{family.home or name}"

    def exact(module: Any, *endings: str) -> bool:
        return type(module).__module__ == home and type(module).__name__ in {family.prefix + ending for ending in endings}

    body: Any = getattr(model, "model", None)
    others = f"layers of other classes than {home} ships"
    if not (exact(model, "ForCausalLM") and exact(body, "Model", "TextModel") and exact(body.norm, "RMSNorm")
            and exact(body.rotary_emb, "RotaryEmbedding")):
        yield others
        return
    for number, layer in enumerate(body.layers):
        if not exact(layer, "DecoderLayer") or not exact(layer.self_attn, "Attention"):
            yield others
            return
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(layer, norm, None) for norm in family.norms if norm] + _there(attention, "q_norm", "k_norm")
        linears = [*_there(attention, "q_proj", "k_proj", "v_proj", "qkv_proj"), bare(attention.o_proj)]
        if hasattr(mlp, "experts"):
            router = router_of(mlp)
            if not (exact(mlp, "SparseMoeBlock", "SparseMoEBlock", "MoE", "MLP") and exact(router, "TopKRouter", "TopkRouter")
                    and exact(mlp.experts, "Experts")):
                yield others
            if getattr(router, "num_group", 1) != getattr(router, "topk_group", 1):
                yield "experts that are chosen by groups"
            if not comes_apart(mlp):
                yield "an expert for all rows that is no multiple of the others"
        else:
            linears += [*_there(mlp, "gate_proj", "up_proj", "gate_up_proj"), bare(mlp.down_proj)]
            if not exact(mlp, "MLP"):
                yield others
        if not all(exact(norm, "RMSNorm") for norm in norms) or not all(type(linear) is nn.Linear for linear in linears):
            yield others
        if hasattr(attention, "k_proj") and attention.k_proj.out_features != attention.v_proj.out_features:
            yield "keys and values of different sizes"
        if getattr(attention.config, "clip_qkv", None) is not None:
            yield "queries, keys and values that are clipped"
        if family.adjoining and any(isinstance(part.weight, LevelWeight) for part in linears[:2]):
            yield "levels of queries and keys in another order"
        if rope_of(body, number).numbers > attention.head_dim:
            yield "rotary positions of more than a head"
