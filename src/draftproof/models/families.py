"""Families of transformers whose blocks are Llama's, and in what they differ from it: what a fused layer (fused.py) has to know.

    x ← x + share · norm(o(attention(turn(norm(qkv(norm(x)))))))        x ← x + share · norm(mlp(norm(x)))

Any of the norms may be missing, the MLP may have no gate, latents may stand before queries, keys and values (latent.py), and in place of
attention, or beside it, a recurrent state (state_layers.py); a layer may have one part alone, add what stands beside its rows, read
another's keys, and have experts beside its MLP (sides.py). Everything that a module tells itself is read from it: sizes, windows, sinks,
soft caps, whether norms are centred, whether heads are normed one by one or as one, how much of a head is turned, the share of what a
block adds. Here stands the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import native
from ..mixtures import Routing
from .choosing import (
    as_wide_as_its_gate,
    by_logits_in_cohere,
    by_sigmoid,
    by_sigmoid_in_lfm2,
    by_softmax,
    by_softmax_in_mistral,
    by_sparse_mixing,
    by_wide_softmax,
)

OUT = ("o_proj", "dense", "out_proj", "c_proj")     # what families call these products,
UP = ("up_proj", "c_fc", "fc1", "fc_in", "w3", "dense_h_to_4h")
DOWN = ("down_proj", "c_proj", "fc2", "fc_out", "output_linear", "w2", "dense_4h_to_h")
GATES = ("gate_proj", "gate_up_proj", "input_linear", "w1", "experts")      # and where an MLP has gates
LISTS = ("layers", "h")      # of layers
LAST_NORM = ("norm", "final_layernorm", "embedding_norm", "final_layer_norm", "norm_f", "ln_f", "layer_norm")
POSITIONS = ("wpe", "embed_positions")
PROJECTIONS = ("project_in", "project_out")      # behind an embedding, and before an output matrix, that are narrower
OLMO_EPS = 1e-5     # which its norms do not tell
LINEARS = ("q_proj", "k_proj", "v_proj", "g_proj", "gate_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
           "query_key_value", "c_attn")
ROUTERS = ("TopKRouter", "TopkRouter", "TextTopKRouter", "TokenChoiceRouter", "TextRouter", "Router", "Gate")    # classes' endings
OPENING = ("g_proj", "gate_proj")     # and what makes gates of what attention gives
LOOKING_BACK = ("Attention", "SelfAttention", "TextAttention")   # classes' endings, and of those that have a recurrent state
REMEMBERING = ("GatedDeltaNet", "DeltaAttention", "Mixer", "Mamba2Mixer", "MambaLayer", "ShortConv")
LAYERS = ("DecoderLayer", "TextDecoderLayer", "Layer", "Block", "AttentionDecoderLayer", "LinearAttentionDecoderLayer")
ONLY = "mixer"  # a layer's only part, of either kind, in families whose layers have one each
STATES = ("linear_attn", "mamba", "conv", "self_attn")   # parts of layers that have a recurrent state, if they have a convolution,
STATE_LINEARS = ("in_proj", "in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z", "in_proj_qkvz", "in_proj_ba",    # their products,
                 "a_proj", "b_proj", "g_a_proj", "g_b_proj", "f_proj", "f_a_proj", "f_b_proj")
GATED_NORM = ("norm", "o_norm")     # and the norm of what they give
SIDES = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")      # parts of what a layer adds last
ABREAST = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")  # of experts, of an MLP
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
ON_ANY_DEVICE = {"llama", "mistral", "ministral", "qwen2", "qwen3"}     # others have kernels of ours on a CPU alone


class Norms(NamedTuple):
    """Names of a layer's norms: before attention, of what it adds, before the MLP, of what that adds; None: there is none. Those before
    stand behind the stream's sums in a layer that says so (`settles`)."""

    before: str | None = "input_layernorm"
    of_attention: str | None = None
    after: str | None = "post_attention_layernorm"
    of_mlp: str | None = None


BEHIND = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
IN_GPT2, IN_OPT = Norms("ln_1", None, "ln_2"), Norms("self_attn_layer_norm", None, "final_layer_norm")
AROUND_IN_GLM = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _always(attention: Any) -> bool:
    return True


def _in_windows(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


def _where_it_slides(attention: Any) -> bool:
    return attention.sliding_window is not None


def _by_a_base(attention: Any) -> bool:
    return bool(attention.config.layer_rope_theta[attention.layer_idx])


def _by_its_kind(attention: Any) -> bool:
    return attention.config.rope_parameters[attention.config.layer_types[attention.layer_idx]] is not None


def _where_asked(attention: Any) -> bool:
    return bool(attention.use_rope)


class Family(NamedTuple):
    """In what a family's blocks differ from Llama's."""

    prefix: str                                         # of its classes' names
    norms: Norms = Norms()
    home: str | None = None                             # its module below transformers.models; None: that of its own name
    late: bool = False                                  # norms are rounded once, behind their weights, as all that are centred are;
    from_one: bool = False                              # and their weights count from one
    adjoining: bool = False                             # rotary positions turn adjoining numbers of a head, not those half of it apart;
    paired: bool = False                                # their angles stand side by side, too, and turn in float32;
    backward: bool = False                              # heads are turned the other way
    entering: bool = False                              # rows of the embedding are normed, by the last norm
    turns: Callable[[Any], bool] = _always              # whether the heads of a layer's attention are turned at all
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    turned_first: bool = False                          # heads are normed behind the turn
    parallel: bool = False      # the MLP reads the stream as it was before attention, by the norm before that if it has none, unless a
                                # layer says that it does not
    stretched: bool = False                             # queries are taken times what grows with their position
    window_of_config: bool = False                      # attention reads its window there
    gated: bool = False     # what attention gives is taken times sigmoids of what q_proj makes beside each head's queries, as of what
                            # others' `OPENING` makes
    opened_by: int = native.SIGMOID                     # in place of sigmoids
    mlp: str = "mlp"                                    # its name; empty: its products stand in the layer
    routing: Callable[[Any], Routing] = by_softmax      # how rows choose experts, of a block that has them
    or_norms: Norms | None = None                       # of layers that lack the first of `norms`
    unscaled: bool = False                              # scores are

    def window(self, attention: Any) -> int | None:
        """How many keys a row sees, itself included, or of what parts, as passes.py's `seen_from` has it; None: all."""
        kinds = getattr(getattr(attention, "config", None), "layer_types", None)
        if kinds and kinds[attention.layer_idx] == "chunked_attention":
            return -int(attention.config.attention_chunk_size)
        if not getattr(attention, "is_sliding", True):
            return None
        if getattr(attention, "attention_type", None) == "local":
            return int(attention.config.window_size)
        found: int | None = getattr(attention.config if self.window_of_config else attention, "sliding_window", None)
        return found

    def scaling_of(self, attention: Any) -> float:
        """What scores are taken times."""
        found = getattr(attention, "scaling", None)
        return 1.0 if self.unscaled else head_dim_of(attention) ** -0.5 if found is None else float(found)

    def is_parallel(self, layer: Any) -> bool:
        """Whether a layer's MLP reads the stream as it was before attention."""
        told = (getattr(layer, "use_parallel_residual", True), getattr(getattr(layer, "config", None), "parallel_attn", True))
        return self.parallel and all(told)

    def mlp_of(self, layer: Any) -> Any:
        """A layer's, or its experts beside one that all rows go through (Granite 4's); None: it looks back alone."""
        experts = getattr(layer, "block_sparse_moe", None)
        found = (getattr(layer, self.mlp) if self.mlp else layer) if experts is None else experts
        return None if found is looking_back(layer) else found

    def mixture_of(self, layer: Any) -> Any:
        """The part of a layer that has experts: its MLP or, where these stand beside one (Gemma 4's), all of it; None: it has none."""
        return next((part for part in (self.mlp_of(layer), layer) if hasattr(part, "experts")), None)

    def names_of(self, layer: Any) -> Norms:
        """Of a layer's norms, where they stand."""
        norms = self.or_norms if self.or_norms and not hasattr(layer, str(self.norms.before)) else self.norms
        return Norms(None, norms.before, None, norms.after) if settles(layer) else norms

    def norms_of(self, layer: Any) -> list[Any]:
        """A layer's, in the order of `Norms`; None: there is none."""
        found = [name and getattr(layer, name, None) for name in self.names_of(layer)]
        found = [None if isinstance(norm, nn.Identity) else norm for norm in found]
        if self.parallel:
            found[2] = found[2] or found[0]
        found[3] = found[3] or getattr(self.mlp_of(layer), "post_mlp_layernorm", None)      # A.X K1's stands inside
        return found


FAMILIES = {
    "llama": Family("Llama"),
    "ministral3": Family("Ministral3", stretched=True, window_of_config=True),
    "mistral": Family("Mistral", window_of_config=True),
    "ministral": Family("Ministral"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "mixtral": Family("Mixtral", window_of_config=True, routing=lambda block: Routing()),
    "qwen3_moe": Family("Qwen3Moe"),
    "afmoe": Family("Afmoe", Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"), late=True,
                    turns=_where_it_slides, routing=lambda block: Routing(by_sigmoid=True, factor=block.router.route_scale)),
    "apertus": Family("Apertus", Norms("attention_layernorm", None, "feedforward_layernorm")),
    "apertus1p5_text": Family("Apertus1p5Text", Norms("attention_layernorm", None, "feedforward_layernorm"), "apertus1p5"),
    "arcee": Family("Arcee"),
    "aria_text": Family("Aria", home="aria", routing=lambda block: Routing(kept=True)),
    "axk1": Family("AXK1", adjoining=True, routing=by_sigmoid),
    "bailing_hybrid": Family("BailingHybrid", adjoining=True, routing=by_sigmoid),
    "bamba": Family("Bamba", Norms(after="pre_ff_layernorm"), mlp="feed_forward"),
    "biogpt": Family("BioGpt", IN_OPT, mlp=""),
    "codegen": Family("CodeGen", Norms("ln_1", None, None), adjoining=True, parallel=True),
    "cohere": Family("Cohere", adjoining=True, paired=True, parallel=True),
    "cohere2": Family("Cohere2", adjoining=True, paired=True, parallel=True, turns=_where_it_slides),
    "cohere2_moe": Family("Cohere2Moe", adjoining=True, paired=True, parallel=True, routing=by_logits_in_cohere,
                          turns=lambda attention: attention.force_rope or _where_it_slides(attention)),
    "cohere_compass_text": Family("CohereCompass", home="cohere_compass", parallel=True, turns=_by_its_kind),
    "cwm": Family("Cwm"),
    "deepseek_v2": Family("DeepseekV2", adjoining=True, routing=by_wide_softmax),
    "deepseek_v3": Family("DeepseekV3", adjoining=True, routing=by_sigmoid),
    "dots1": Family("Dots1", routing=by_sigmoid),
    "ernie4_5": Family("Ernie4_5", adjoining=True),
    "ernie4_5_moe": Family("Ernie4_5_Moe", adjoining=True, routing=lambda block: Routing(wide=True, kept=True)),
    "exaone": Family("Llama", home="llama"),
    "exaone4": Family("Exaone4", BEHIND, turns=_in_windows),
    "exaone_moe": Family("ExaoneMoe", turns=_in_windows, routing=by_sigmoid),
    "falcon": Family("Falcon", Norms("ln_attn", None, "ln_mlp"), parallel=True, or_norms=Norms()),
    "falcon_h1": Family("FalconH1", Norms(after="pre_ff_layernorm"), mlp="feed_forward"),
    "flex_olmo": Family("FlexOlmo", BEHIND, late=True),
    "flint": Family("Flint", late=True, turns=_where_it_slides,
                    routing=lambda block: Routing(by_sigmoid=True, wide=True, normed=block.gate.norm_topk_prob)),
    "gemma": Family("Gemma", late=True, from_one=True),
    "gemma2": Family("Gemma2", AROUND, late=True, from_one=True),
    "gemma3_text": Family("Gemma3", AROUND, "gemma3", late=True, from_one=True),
    "gemma3n_text": Family("Gemma3n", AROUND, "gemma3n", late=True),
    "gemma4_text": Family("Gemma4", AROUND, "gemma4", late=True, routing=lambda block: Routing()),
    "gemma4_unified_text": Family("Gemma4Unified", AROUND, "gemma4_unified", late=True),
    "glm": Family("Glm", adjoining=True),
    "glm4": Family("Glm4", AROUND_IN_GLM, adjoining=True),
    "glm4_moe": Family("Glm4Moe", routing=by_sigmoid),
    "glm4_moe_lite": Family("Glm4MoeLite", adjoining=True, routing=by_sigmoid),
    "gpt_oss": Family("GptOss", late=True, routing=lambda block: Routing(kept=True)),
    "gpt2": Family("GPT2", IN_GPT2),
    "gpt_bigcode": Family("GPTBigCode", IN_GPT2),
    "gpt_neo": Family("GPTNeo", IN_GPT2, unscaled=True),
    "gpt_neox": Family("GPTNeoX", parallel=True),
    "gpt_neox_japanese": Family("GPTNeoXJapanese"),
    "gptj": Family("GPTJ", Norms("ln_1", None, None), adjoining=True, parallel=True),
    "granite": Family("Granite"),
    "granite_swa": Family("GraniteSWA", turns=_by_a_base),
    "granitemoe": Family("GraniteMoe", mlp="block_sparse_moe", routing=lambda block: Routing(kept=True)),
    "granitemoehybrid": Family("GraniteMoeHybrid", mlp="shared_mlp", routing=lambda block: Routing(kept=True)),
    "granitemoeshared": Family("GraniteMoeShared", mlp="block_sparse_moe", routing=lambda block: Routing(kept=True)),
    "granitemoe_swa": Family("GraniteMoeSWA", mlp="block_sparse_moe", turns=_by_a_base, routing=lambda block: Routing(kept=True)),
    "helium": Family("Helium", late=True, adjoining=True),
    "hy_v3": Family("HYV3", routing=lambda block: Routing(by_sigmoid=True, wide=True, factor=block.gate.router_scaling_factor)),
    "hunyuan_v1_dense": Family("HunYuanDenseV1", head_norms=("query_layernorm", "key_layernorm"), turned_first=True),
    "hunyuan_v1_moe": Family("HunYuanMoEV1", head_norms=("query_layernorm", "key_layernorm"), turned_first=True,
                             routing=as_wide_as_its_gate),
    "hyperclovax": Family("HyperCLOVAX", Norms(of_attention="post_norm1", of_mlp="post_norm2")),
    "internlm3": Family("Llama", home="llama"),
    "iquestcoder": Family("Llama", home="llama"),
    "jais2": Family("Jais2"),
    "kimi_linear": Family("KimiLinear", routing=by_sigmoid),
    "kolibri1": Family("Kolibri1", AROUND_IN_GLM, turns=_in_windows, routing=lambda block: Routing(
        by_sigmoid=True, by_logits=True, wide=True, normed=block.gate.norm_topk_prob)),
    "laguna": Family("Laguna", opened_by=native.SOFTPLUS, routing=lambda block: Routing(by_sigmoid=True, kept=True,
                                                                                        factor=block.routed_scaling_factor)),
    "lara_mini": Family("LaraMini", late=True, turns=_where_it_slides,
                        routing=lambda block: Routing(wide=True, normed=block.gate.norm_topk_prob, kept=True)),
    "lfm2": Family("Lfm2", Norms("operator_norm", None, "ffn_norm"), mlp="feed_forward", head_norms=("q_layernorm", "k_layernorm")),
    "lfm2_moe": Family("Lfm2Moe", Norms("operator_norm", None, "ffn_norm"), mlp="feed_forward",
                       head_norms=("q_layernorm", "k_layernorm"), routing=by_sigmoid_in_lfm2),
    "lfm3": Family("Lfm3", Norms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"), mlp="feed_forward"),
    "llama4_text": Family("Llama4", home="llama4", adjoining=True, turns=_where_asked, head_norms=("qk_norm", "qk_norm"), turned_first=True,
                          stretched=True, mlp="feed_forward",
                          routing=lambda block: Routing(by_sigmoid=True, by_logits=True, normed=False, kept=True, before=True)),
    "mellum": Family("Mellum"),
    "mimo_v2_flash": Family("MiMoV2Flash", routing=by_sigmoid),
    "minicpm3": Family("MiniCPM3"),
    "minimax_m2": Family("MiniMaxM2", routing=lambda block: Routing(by_sigmoid=True)),
    "mistral4": Family("Mistral4", adjoining=True, stretched=True, routing=by_softmax_in_mistral),
    "nanochat": Family("NanoChat", backward=True, entering=True, turned_first=True),
    "nemotron": Family("Nemotron", from_one=True),
    "nemotron_h": Family("NemotronH", Norms("norm", None, "norm"), late=True, mlp=ONLY, routing=by_sigmoid),
    "olmo": Family("Olmo"),
    "olmo2": Family("Olmo2", BEHIND, late=True),
    "olmo3": Family("Olmo3", BEHIND, late=True),
    "olmo_hybrid": Family("OlmoHybrid", late=True, or_norms=BEHIND),
    "olmoe": Family("Olmoe", window_of_config=True),
    "opt": Family("OPT", IN_OPT, mlp=""),
    "persimmon": Family("Persimmon", head_norms=("q_layernorm", "k_layernorm")),
    "phi": Family("Phi", head_norms=("q_layernorm", "k_layernorm"), parallel=True),
    "phi3": Family("Phi3", window_of_config=True),
    "phimoe": Family("Phimoe", routing=by_sparse_mixing),
    "qwen2_moe": Family("Qwen2Moe"),
    "qwen3_5_moe_text": Family("Qwen3_5Moe", home="qwen3_5_moe", late=True, from_one=True, gated=True,
                               routing=lambda block: Routing(kept=True)),
    "qwen3_5_text": Family("Qwen3_5", home="qwen3_5", late=True, from_one=True, gated=True),
    "qwen3_next": Family("Qwen3Next", late=True, from_one=True, gated=True),
    "sarvam_mla": Family("DeepseekV3", home="deepseek_v3", adjoining=True, routing=by_sigmoid),
    "sarvam_moe": Family("Glm4Moe", home="glm4_moe", routing=by_sigmoid),
    "seed_oss": Family("SeedOss"),
    "smollm3": Family("SmolLM3", turns=_where_asked),
    "solar_open": Family("SolarOpen", routing=by_sigmoid),
    "stablelm": Family("StableLm", head_norms=("q_layernorm", "k_layernorm"), parallel=True),
    "starcoder2": Family("Starcoder2", window_of_config=True),
    "vaultgemma": Family("VaultGemma", Norms(after="pre_feedforward_layernorm"), late=True, from_one=True),
    "xglm": Family("XGLM", IN_OPT, mlp=""),
    "youtu": Family("Youtu", adjoining=True),
}


def base_of(model: Any) -> Any:
    """A model but for its output matrix, which Llama 4's names otherwise, as a part of one that sees."""
    found = model.base_model
    return model.model if found is model else found


def body_of(model: Any) -> Any:
    """The part of a model that has its layers."""
    found = base_of(model)
    return getattr(found, "decoder", found)


def layers_of(model: Any) -> Any:
    """A model's own list of them."""
    return part_of(body_of(model), LISTS)


def positions_of(body: Any) -> Tensor | None:
    """What is added to rows by their positions [positions, hidden]; None: nothing is. OPT's stand behind a few that no row reads."""
    table = part_of(body, POSITIONS)
    return None if table is None else part_of(table, ("weight", "weights")).detach()[getattr(table, "offset", 0) :]


def settles(layer: Any) -> bool:
    """Whether its norms are of the stream, what attention and MLP add included (OPT 350M)."""
    return not getattr(layer, "do_layer_norm_before", True)


def has_state(layer: Any) -> bool:
    """Whether it looks back through a recurrent state."""
    return state_of(layer) is not None


def state_of(layer: Any) -> Any:
    """The part of a layer that has a recurrent state; None: it has none."""
    parts = (getattr(layer, name, None) for name in (*STATES, ONLY))
    return next((part for part in parts if part_of(part, ("conv1d", "conv")) is not None), None)


def looking_back(layer: Any) -> Any:
    """The part of a layer that does, attention if it has both; None: it has an MLP alone."""
    found = part_of(layer, ("self_attn", "attention", "attn", "self_attention", *STATES, ONLY))
    found = getattr(found, "attention", found)      # GPT-Neo's stands inside of another
    return None if part_of(found, OUT) is None else found


def has_latent(attention: Any) -> bool:
    """Whether its keys and values are made of a latent (multi-head latent attention, arXiv 2405.04434)."""
    return hasattr(attention, "kv_a_proj_with_mqa")


def part_of(module: Any, names: tuple[str, ...]) -> Any:
    """The first that a module has of these; None: none."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def head_dim_of(attention: Any) -> int:
    """Numbers of a query's and a key's head."""
    found: int = part_of(attention, ("qk_head_dim", "head_dim", "head_size"))
    return found


def norm_of(norm: Any, family: Family, size: int = 0) -> tuple[Any, ...]:
    """A norm's weight, float32 if it is rounded once behind it, and eps; and, if it is centred, a bias, float32. size: of its weight, if
    it has none."""
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", OLMO_EPS)
    if hasattr(norm, "norms"):      # one for each head
        weights, each, biases = zip(*(norm_of(part, family) for part in norm.norms), strict=True)
        return torch.stack(weights), each[0], torch.stack(biases)
    if not type(norm).__name__.endswith(("RMSNorm", "L2Norm")):
        shape = norm.weight.shape if hasattr(norm, "weight") else norm.normalized_shape
        weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
        weight = torch.ones(shape) if weight is None else weight.detach() + 1 if family.from_one else weight.detach()
        bias = torch.zeros(shape) if bias is None else bias.detach()
        return weight.float(), eps, bias.float()
    weight = norm.weight.detach() if hasattr(norm, "weight") else torch.ones(size)
    weight = weight.float() if family.late else weight
    return (1 + weight if family.from_one else weight), eps
