"""Whether every block of a model is one that families.py knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .. import native
from ..mixtures import Routing
from .families import (
    ABREAST,
    DOWN,
    FAMILIES,
    GATED_NORM,
    GATES,
    LAST_NORM,
    LATENT_NORMS,
    LAYERS,
    LINEARS,
    LOOKING_BACK,
    ON_ANY_DEVICE,
    OUT,
    POSITIONS,
    PROJECTIONS,
    REMEMBERING,
    ROUTERS,
    SIDES,
    STATE_LINEARS,
    UP,
    Family,
    base_of,
    body_of,
    has_latent,
    head_dim_of,
    layers_of,
    looking_back,
    part_of,
    state_of,
)
from .ropes import rope_of, rotaries_of
from .routed import chosen_by, comes_apart, router_of, scoring
from .shares import bare

MIXTURES = ("SparseMoeBlock", "SparseMoEBlock", "MoE", "Moe", "TextMoe", "TextMoELayer", "MLP")      # endings of classes' names
NORMS = ("RMSNorm", "TextRMSNorm", "TextL2Norm", "LayerNorm", "LayerNorm1P", "LayerNormPerHead")
TABLES = ("LearnedPositionalEmbedding", "SinusoidalPositionalEmbedding")    # endings of classes' names
OLDER_GATED = "transformers.models.zamba2.modeling_zamba2.Zamba2RMSNormGated"     # what Nemotron-H has in transformers 5.17


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
    found = (getattr(module, name, None) for name in names)
    return [module for module in found if module is not None]


def _strange(model: Any, family: Family, name: str) -> Iterator[str]:
    """What is not as transformers ships it, or not as a fused layer has it."""
    home = f"transformers.models.{family.home or name}.modeling_{family.home or name}"

    def exact(module: Any, *endings: str) -> bool:
        return type(module).__module__ == home and type(module).__name__ in {family.prefix + ending for ending in endings}

    body: Any = body_of(model)
    others = f"layers of other classes than {home} ships"

    def known(norm: Any) -> bool:
        return type(norm) is nn.LayerNorm or exact(norm, *NORMS)

    last, table, base = part_of(body, LAST_NORM), part_of(body, POSITIONS), base_of(model)
    if not (exact(model, "ForCausalLM", "TextForCausalLM", "LMHeadModel") and exact(base, "Model", "TextModel")
            and (body is base or exact(body, "Decoder"))
            and (known(last) if last is not None else any(hasattr(body, name) for name in LAST_NORM))
            and (table is None or type(table) is nn.Embedding or exact(table, *TABLES))
            and all(type(part) is nn.Linear for part in _there(body, *PROJECTIONS))
            and all(exact(rotary, "RotaryEmbedding", "TextRotaryEmbedding") for rotary in rotaries_of(body))):
        yield others
        return
    if getattr(model.config, "alibi", False):
        yield "scores that fall with the distance of keys (ALiBi)"
    if getattr(model.config, "clip_qkv", None) is not None:
        yield "queries, keys and values that are clipped"
    for number, layer in enumerate(layers_of(model)):
        attention, state, mlp = looking_back(layer), state_of(layer), family.mlp_of(layer)
        looking = {part for part in (attention, state) if part is not None}
        if not (exact(layer, *LAYERS) and all(exact(part, *(REMEMBERING if part is state else LOOKING_BACK)) for part in looking)):
            yield others
            return
        norms = [norm for norm, name in zip(family.norms_of(layer), family.names_of(layer), strict=True)
                 if name and not isinstance(getattr(layer, name, None), nn.Identity)]
        norms += _there(attention, *family.head_norms, "v_norm", *LATENT_NORMS)
        looking |= {*_there(state, "forget_gate")}
        linears = [bare(linear) for part in looking for linear in _there(part, *LINEARS, *STATE_LINEARS, *OUT)]
        linears += _there(layer, *SIDES[:2])
        norms += _there(layer, *SIDES[2:], *ABREAST)
        if (block := family.mixture_of(layer)) is not None:
            yield from _strange_mixture(block, layer, family, exact)
        if block is not mlp:
            linears += [*_there(mlp, *GATES, *UP), bare(part_of(mlp, DOWN))]
            if mlp is not layer and not exact(mlp, "MLP", "TextMLP"):
                yield others
        if not all(map(known, norms)) or not all(type(linear) in (nn.Linear, Conv1D) or exact(linear, "Linear") for linear in linears):
            yield others
        if attention is not state and getattr(attention, "v_proj", None) is not None and not _are_pairs(attention, family):
            yield "keys and values of different sizes"
        if hasattr(attention, "embed_positions"):   # GPT-J's and CodeGen's before transformers 5.24
            yield "rotary positions of attention's own"
        if state is not None:
            yield from _strange_state(state, exact)
        if hasattr(layer, "altup"):
            yield from _strange_streams(layer, exact)
        if attention not in (None, state) and rope_of(body, number).numbers > (
                attention.qk_rope_head_dim if has_latent(attention) else head_dim_of(attention)):
            yield "rotary positions of more than a head"


def _strange_streams(layer: Any, exact: Callable[..., bool]) -> Iterator[str]:
    """Of a layer that has several."""
    altup, laurel = layer.altup, layer.laurel
    linears = laurel.linear_left, laurel.linear_right, altup.modality_router, altup.prediction_coefs, altup.correction_coefs
    if not (exact(altup, "TextAltUp") and exact(laurel, "TextLaurelBlock") and all(type(linear) is nn.Linear for linear in linears)
            and exact(altup.router_norm, "RMSNorm") and exact(laurel.post_laurel_norm, "RMSNorm")):
        yield f"layers of other classes than {type(layer).__module__} ships"
    count, first = altup.config.altup_num_inputs, altup.config.altup_active_idx
    if (count, first) != (native.STREAMS, 0):
        yield f"{count} streams, of which layers compute with number {first}, where kernels of ours take {native.STREAMS} and number 0"


def _strange_mixture(block: Any, layer: Any, family: Family, exact: Callable[..., bool]) -> Iterator[str]:
    """Of what `Family.mixture_of` finds."""
    router, beside = router_of(block), block is layer
    kinds = ("DecoderLayer", "TextDecoderLayer") if beside else MIXTURES
    if not (exact(block, *kinds) and exact(router, *ROUTERS)
            and exact(block.experts, "Experts", "TextExperts") and (scoring(router) is router or type(scoring(router)) is nn.Linear)):
        yield f"layers of other classes than {type(layer).__module__} ships"
    if getattr(router, "router_logit_softcapping", 0):
        yield "a router whose logits are capped"
    how = family.routing(block)
    if how.near and chosen_by(router) != 2:
        yield "sparse mixing of other than two experts"
    if not _are_enough(how, router):
        yield "groups that have fewer experts than a row chooses"
    if not comes_apart(block, layer):
        yield "an expert for all rows that is no multiple of the others"
    if type(getattr(block, "fc1_latent_proj", None)) is nn.Linear:
        yield "experts of a latent"


def _strange_state(part: Any, exact: Callable[..., bool]) -> Iterator[str]:
    """Of a part of a layer that has a recurrent state."""
    if hasattr(part, "conv"):
        if type(part.conv) is not nn.Conv1d:
            yield "layers of other classes than transformers ships"
        if part.conv.in_channels % native.STRIPE:
            yield f"a convolution of {part.conv.in_channels} numbers, where kernels of ours take multiples of {native.STRIPE}"
        return
    norm = part_of(part, GATED_NORM)
    plain = isinstance(norm, nn.Identity)
    gated = exact(norm, "RMSNormGated") or f"{type(norm).__module__}.{type(norm).__name__}" == OLDER_GATED
    if (not (plain or gated) or type(part.conv1d) is not nn.Conv1d
            or not all(exact(gate, "ForgetGate") for gate in _there(part, "forget_gate"))):
        yield "layers of other classes than transformers ships"
    if part.activation not in ("silu", "swish"):
        yield f"a convolution behind which stands {part.activation}"
    if getattr(norm, "norm_before_gate", False):
        yield "a norm before its gates"
    delta = not hasattr(part, "ssm_state_size")
    rows, columns = (part_of(part, names) for names in (("ssm_state_size", "head_k_dim", "head_dim"), ("head_v_dim", "head_dim")))
    if delta and part.conv1d.bias is not None:
        yield "a convolution with a bias"
    least = native.STRIPE // 2
    if rows % native.LEAST_VECTOR or columns % least:
        yield (f"states of {rows} by {columns} numbers, where kernels of ours take multiples of {native.LEAST_VECTOR} by {least}")


def _are_pairs(attention: Any, family: Family) -> bool:
    """Whether there are as many heads of values as of keys, of their own size, if they have one and heads stand as they come."""
    keys, values, dim = attention.k_proj.out_features, attention.v_proj.out_features, head_dim_of(attention)
    return bool(keys * getattr(attention, "v_head_dim", dim) == values * dim and (keys == values or not family.adjoining))


def _are_enough(how: Routing, router: Any) -> bool:
    """Whether the groups that a row chooses hold as many experts as it does."""
    each, rest = divmod(len(scoring(router).weight), how.groups)
    return how.within >= how.groups or rest == 0 and each >= how.leading and each * how.within >= chosen_by(router)
