"""Multi-token prediction heads (DeepSeek-V3, arXiv 2412.19437; FastMTP, arXiv 2509.18362).

    row t:   x = proj([norm(embedding of token t+1), norm(h_t)])     y = norm(layer(x))     logits of token t+2 = output(y)
    deeper:  the same layer again (or layer `step % n`), one token further, y in the place of h_t

One row per text token. The rotary position of a row is the position of the token it embeds, minus one. What differs:

    layout      order                   h_t, the target's             embedding at row 0   output and embedding
    deepseek    [embedding, hidden]     after its final norm          zero                 its own, or the target's if left out (GLM-5)
    qwen        [embedding, hidden]     after its final norm          as it is             the target's
    mimo        [hidden, embedding]     before its final norm         zero                 the target's
    ernie       [embedding, hidden]     before its final norm         as it is             the target's, behind its final norm

y, after the head's last norm, is what the next step reads, in every family; Ernie's head has no norm, and its y is the layer's
output. These are the conventions of the engines that serve the published heads: vLLM's `deepseek_mtp`, `glm4_moe_mtp`,
`exaone_moe_mtp` and `qwen3_next_mtp` read what the target's final norm returns, and so does transformers' `MtpModel`, from which
Mellum's are taken; vLLM's MiMo target returns the residual stream; pull requests 45895 and 47448 there made the normed output what
is fed back. Ernie 4.5's are those of the code that taught it (PaddlePaddle/ERNIE, `modeling_moe.py`), for engines disagree about its
norms. A wrong choice still drafts, only worse, and nothing else shows it. `speculators` folders hold Qwen's head under other names.

Decoder layers are the transformers classes of the target's family with this file's attention, so that several sequences share
a pass. DeepSeek-V3.2 and GLM-5 select keys with an indexer; here every key is read, which is the same up to `index_topk` tokens.
K-EXAONE's and Mellum's heads slide, as their configs say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoConfig

from ...errors import LoadError
from ..folder import context_of
from ..ropes import spots_of
from ..target import TargetParts
from .cache import HeadPass
from .files import HeadFiles, converted, fill, write_files
from .mtp_files import LAYOUTS, Layout, Weights, understand

NAME = "draftproof_rows"

# model_type → transformers' package, class prefix, and what stands before RotaryEmbedding
FAMILIES: Mapping[str, tuple[str, str, str]] = {
    **{kind: ("deepseek_v3", "DeepseekV3", "DeepseekV3") for kind in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")},
    "glm4_moe": ("glm4_moe", "Glm4Moe", "Glm4Moe"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", "Glm4MoeLite"),
    "qwen3_next": ("qwen3_next", "Qwen3Next", "Qwen3Next"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5", "Qwen3_5Text"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeText"),
    "mimo": ("qwen2", "Qwen2", "Qwen2"),
    "qwen2": ("qwen2", "Qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3", "Qwen3"),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", "Qwen3Moe"),
    "llama": ("llama", "Llama", "Llama"),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_Moe", "Ernie4_5_Moe"),
    "exaone_moe": ("exaone_moe", "ExaoneMoe", "ExaoneMoe"),
    "mellum": ("mellum", "Mellum", "Mellum"),
}
NAMES = {"mimo": "mimo", "ernie4_5_moe": "ernie",
         **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite"), "deepseek")}
"""The layout in which a family publishes its heads, where it is not Qwen's: what its engines look for."""
ALSO = {"mimo": "qwen2", "deepseek_v32": "deepseek_v3", "glm_moe_dsa": "deepseek_v3"}     # whose configuration class reads theirs
SLIDING = "sliding_attention"
SLIDE = ("exaone_moe", "mellum")             # families whose heads slide unless their configs say otherwise
DENSE = ("exaone_moe", "ernie4_5_moe")       # families with experts whose heads have none

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""layer, q [R, heads, D], k and v [R, kv, D] → [R, heads · D]; q and k are rotated, scores are q · k / √D."""


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *, scaling: float,
               draftproof_rows: Attend, **_: Any) -> tuple[Tensor, None]:
    """The function registered with transformers: query [1, heads, R, D], key and value [1, kv, R, D or less] → [1, R, heads, Dv].
    Values narrower than keys (MLA) are widened by zeros, and another scale is put into the queries, so that `Attend` is plain."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    dim, width = k.shape[-1], v.shape[-1]
    if scaling != dim**-0.5:
        q = q * (scaling * dim**0.5)
    out = draftproof_rows(layer, q, k, v if width == dim else pad(v, (0, dim - width)))
    return out.view(1, q.shape[0], q.shape[1], dim)[..., :width], None


AttentionInterface.register(NAME, _attention)


class Fusion(nn.Module):
    """proj of the two norms side by side."""

    def __init__(self, norm: type[nn.Module], hidden: int, eps: float, hidden_first: bool) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.proj, self.hidden_first = nn.Linear(2 * hidden, hidden, bias=False), hidden_first

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        sides = (self.token_norm(tokens), self.hidden_norm(hidden))
        out: Tensor = self.proj(torch.cat(sides[::-1] if self.hidden_first else sides, -1))
        return out


class MtpHead(nn.Module):
    """A head of one or more layers. `own`: which of "embed" and "heads" it brings along; the rest is borrowed from `parts`."""

    def __init__(self, layout: Layout, settings: Mapping[str, Any], config: Any, layers: int, parts: TargetParts,
                 own: Sequence[str] = ()) -> None:
        super().__init__()
        self.layout, self.settings, self.layers, self.parts = layout, dict(settings), layers, parts
        self.base, self.split, self.size = 0, True, int(config.hidden_size)
        self.ids: Tensor | None = None          # the target's whole vocabulary
        package, prefix, rotary = FAMILIES[settings["model_type"]]
        module = import_module(f"transformers.models.{package}.modeling_{package}")
        norm, size, eps = getattr(module, f"{prefix}RMSNorm"), config.hidden_size, config.rms_norm_eps
        shared = 1 if layout.shared else layers
        self.fusions = nn.ModuleList(Fusion(norm, size, eps, layout.hidden_first) for _ in range(shared))
        self.blocks = nn.ModuleList(getattr(module, f"{prefix}DecoderLayer")(config, i) for i in range(layers))
        self.norms = nn.ModuleList(norm(size, eps=eps) for _ in range(0 if layout.borrowed_norm else shared))
        self.rotary = getattr(module, f"{rotary}RotaryEmbedding")(config)
        self._kind = config.layer_types[:1] if hasattr(self.rotary, "layer_types") else ()      # angles may be a kind of layer's own
        self.window: int | None = getattr(config, "head_window", None)      # how many keys a row sees; None: all
        embed = _embedding(parts)
        self.embed = nn.Embedding(embed.num_embeddings, size) if "embed" in own else None
        self.heads = nn.ModuleList(nn.Linear(size, embed.num_embeddings, bias=False) for _ in range(layers)) if "heads" in own else None
        self.taps = (int(parts.config.get_text_config().num_hidden_layers) - 1,)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.depth, self.kv_heads, self.head_dim = layers, *_keys(config)
        self._place(embed.weight.dtype, embed.weight.device)

    def _place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Parameters in the target's dtype; buffers (rotary frequencies, the router's correction) stay float32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        self.to(device)

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """From a folder with only the head, or the tensors of a target's checkpoint. Raises LoadError saying what does not fit."""
        settings = _settings(files.config, parts, files.path)         # a family that is not known is named before its tensors are judged
        weights = understand(files)
        _check(weights, parts, vocab_size, files.path)
        own = [name for name in ("embed", "heads") if any(tensor.startswith(f"{name}.") for tensor in weights.tensors)]
        try:
            head = cls(weights.layout, settings, _config(settings, weights), weights.layers, parts, own)
        except Exception as error:           # a configuration can be wrong in as many ways as transformers has checks
            raise LoadError(f"{files.path}: its configuration builds no {settings['model_type']} layer ({error}); "
                            "expected config.json as published") from error
        names = {name: weights.layout.theirs(name, weights.base) for name in (*head.state_dict(), *weights.tensors)}
        missing = sorted(names[name] for name in head.state_dict() if name not in weights.tensors)
        if missing:
            surplus = sorted(names[name] for name in weights.tensors if name not in head.state_dict())
            raise LoadError(f"{files.path}: missing tensors: {', '.join(missing[:8])}; tensors that nothing reads: "
                            f"{', '.join(surplus[:8]) or 'none'}; expected a complete head in its original precision (repacks often drop "
                            "parts of it)")
        ours = {there: here for here, there in names.items()}
        fill(head, {names[name]: tensor for name, tensor in weights.tensors.items()}, files.path, ours.__getitem__,
             unused=[name for name in weights.tensors if ".self_attn.indexer." in name])
        head.base, head.split = weights.base, weights.split
        return head.eval()

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 1, inner: int | None = None, settings: Mapping[str, Any] | None = None,
              layout: str | None = None) -> Self:
        """Random weights. The decoder layer is the target's own kind, unless `settings` (a config) says otherwise or the target's
        family is not known here: then Llama's. inner: width of a dense MLP; layout: by default its family's."""
        if settings is None:
            text = parts.config.get_text_config()
            settings = json.loads(text.to_json_string()) if getattr(text, "model_type", None) in FAMILIES else _llama(text)
        settings = {**settings, **({} if inner is None else {"intermediate_size": inner})}
        config = _config(settings, None, layers)
        layout = layout or NAMES.get(settings["model_type"], "qwen")
        head = cls(LAYOUTS[layout], settings, config, layers, parts)
        head.base = int(parts.config.get_text_config().num_hidden_layers) if layout == "deepseek" else 0
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02)
                elif name.endswith(".bias"):
                    parameter.zero_()
        return head

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write the head alone, as its family names it (a fresh one, and a `speculators` one, as Qwen's): `read` gives equal tensors.
        dtype: of the weights in the file; None keeps it."""
        layout = LAYOUTS["qwen"] if self.layout.name == "speculators" and self.layers == 1 else self.layout
        weights = Weights(self.layout, self.base, self.split, {**self.state_dict(), **converted(dict(self.named_parameters()), dtype)})
        write_files(folder, self.settings, weights.published(layout, self.base, self.split))

    def fuse(self, features: Tensor) -> Tensor:
        """What the first step reads, from the output [R, H] of the target's last layer."""
        if not self.layout.normed or self.parts.norm is None:
            return features
        normed: Tensor = self.parts.norm(features)
        return normed

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, at: int = 0) -> Tensor:
        """Step `at` of the recursion: tokens [R] and the hidden states before them [R, H] → [R, H], normed, for `logits` and for the
        next step. positions [R]: the tokens' own, minus one."""
        place = at % self.layers
        fusion = self.fusions[place % len(self.fusions)]
        embedded = (self.embed or _embedding(self.parts))(tokens)
        if self.layout.blank_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        dtype = fusion.token_norm.weight.dtype  # type: ignore[union-attr]
        x = fusion(embedded.to(dtype), hidden.to(dtype))[None]  # type: ignore[arg-type]
        spots = positions[None]
        turn = self.rotary(x, spots_of(self.rotary, spots), *self._kind)
        if isinstance(attend, HeadPass):
            attend = attend.within(self.window)
        x = self.blocks[place](x, position_embeddings=turn, position_ids=spots, attention_mask=None, draftproof_rows=attend)
        out: Tensor = (x[0] if isinstance(x, tuple) else x)[0]
        return self.norms[place % len(self.norms)](out) if self.norms else out

    def whole(self, entries: int) -> bool:
        """Whether a row sees all of so many entries."""
        return self.window is None or entries <= self.window

    def ready(self, hidden: Tensor) -> Tensor:
        """What `step` returned, as an output matrix reads it."""
        return self.parts.norm(hidden) if self.layout.borrowed_norm and self.parts.norm is not None else hidden

    def logits(self, hidden: Tensor, at: int = 0) -> Tensor:
        """[R, V] over the target's ids, of what step `at` returned."""
        hidden = self.ready(hidden)
        if self.heads is None:
            assert self.parts.output is not None, "refused at construction"
            return self.parts.finished(self.parts.output(hidden.to(_embedding(self.parts).weight.dtype)))
        logits: Tensor = self.heads[at % self.layers](hidden)
        return logits


def _embedding(parts: TargetParts) -> nn.Embedding:
    if not isinstance(parts.table, nn.Embedding) or parts.output is None:
        raise LoadError("the target's embedding and output matrix cannot be borrowed; a multi-token prediction head needs both")
    return parts.table


def _settings(config: Mapping[str, Any], parts: TargetParts, source: Path) -> dict[str, Any]:
    """The decoder layer's configuration: the file's own, or the target's where it names no family."""
    found = dict(config.get("transformer_layer_config") or config.get("text_config") or config)
    if "model_type" not in found:
        text = parts.config.get_text_config()
        found = {**json.loads(text.to_json_string()), **found, "model_type": text.model_type}
    if found["model_type"] not in FAMILIES:
        raise LoadError(f"{source}: its decoder layer is of family {found['model_type']!r}; "
                        f"multi-token prediction is known for: {', '.join(FAMILIES)}")
    return found


def _llama(text: Any) -> dict[str, Any]:
    """A layer for a target of a family that is not known here."""
    size = int(text.hidden_size)
    heads = next(count for count in range(max(1, size // 64), 0, -1) if size % count == 0)
    return {"model_type": "llama", "hidden_size": size, "intermediate_size": 2 * size, "head_dim": 64, "num_attention_heads": heads,
            "num_key_value_heads": heads, "max_position_embeddings": context_of(text)}


def _config(settings: Mapping[str, Any], weights: Weights | None, layers: int = 1) -> Any:
    """The same as a transformers config of `layers` layers of the head's kind, sizes as the tensors have them."""
    kind = settings["model_type"]
    apart = ("model_type", "architectures", "auto_map", "quantization_config")
    kept = {name: value for name, value in settings.items() if name not in apart}
    config = AutoConfig.for_model(ALSO.get(kind, kind), **kept)
    sparse = kind not in DENSE and bool(getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0))
    if weights is not None:
        layers, tensors = weights.layers, weights.tensors
        sparse = "blocks.0.mlp.gate.weight" in tensors
        config.hidden_size = tensors["fusions.0.proj.weight"].shape[0]
        if "blocks.0.mlp.gate_proj.weight" in tensors:
            config.intermediate_size = tensors["blocks.0.mlp.gate_proj.weight"].shape[0]
        if "blocks.0.mlp.experts.down_proj" in tensors:
            config.moe_intermediate_size = tensors["blocks.0.mlp.experts.down_proj"].shape[2]
    sees = (getattr(config, "mtp_layer_types", None) or [SLIDING if kind in SLIDE else "full_attention"])[0]
    config.head_window = config.sliding_window if kind in SLIDE and sees == SLIDING else None
    if kind == "exaone_moe":
        sees = SLIDING              # its layers turn queries and keys only where they slide, its head always
    changes = {"num_hidden_layers": layers, "layer_types": [sees] * layers, "decoder_sparse_step": 1,
               "moe_layer_interval": 1, "moe_layer_start_index": 0 if sparse else layers, "moe_layer_end_index": layers - 1,
               "mlp_layer_types": ["sparse" if sparse else "dense"] * layers, "first_k_dense_replace": 0 if sparse else layers,
               "mlp_only_layers": [] if sparse else list(range(layers))}
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._attn_implementation, config._experts_implementation = NAME, "eager"
    return config


def _keys(config: Any) -> tuple[int, int]:
    """(key heads, width of a key): of the keys that attention sees, so MLA's are expanded."""
    if getattr(config, "kv_lora_rank", None):
        return config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    return config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(weights: Weights, parts: TargetParts, vocab_size: int, source: Path) -> None:
    """What `fill` could not say as well."""
    embed = _embedding(parts)
    proj, size = weights.tensors.get("fusions.0.proj.weight"), embed.embedding_dim
    if proj is None or not weights.layers:
        raise LoadError(f"{source}: the head has no {'input projection' if proj is None else 'decoder layer'}; expected a complete one "
                        "(quantised repacks often drop parts of it)")
    if tuple(proj.shape) != (size, 2 * size):
        raise LoadError(f"{source}: its input projection is {list(proj.shape)}, the head of a model with hidden size {proj.shape[0]}; "
                        f"expected {[size, 2 * size]} for this target")
    for name, tensor in weights.tensors.items():
        if name.startswith(("embed.", "heads.")) and tensor.shape[0] != embed.num_embeddings:
            raise LoadError(f"{source}: {name} has {tensor.shape[0]} rows for a target of {vocab_size} tokens; "
                            "expected the target's own vocabulary")
