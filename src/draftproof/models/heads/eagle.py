"""EAGLE-1 and EAGLE-2 heads (Li et al., arXiv 2401.15077 and 2406.16858).

    entry t:  x = fc([embed(token t+1), h_t])    y = layer(x)    logits for token t+2 = output(y)    next entry reads y for h

h_t is what the target feeds to its output matrix after reading token t; embedding and output matrix are the target's.
EAGLE-2 is the same network under a dynamic tree. Published keys: `fc.weight [H, 2H]`, `fc.bias`, `layers.0.self_attn.*`,
`layers.0.mlp.*`, `layers.0.post_attention_layernorm.weight`, usually `embed_tokens.weight`; layer 0 has no input norm.
A head has one *entry* per text token; `attend(layer, q, k, v)` is given by whoever runs it, to serve or to train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ...errors import LoadError
from ..target import TargetParts
from .blocks import RMSNorm, Rope
from .files import HeadFiles, converted, fill, needed, write_files
from .layers import Attend, HeadLayer, HeadLayers, Runs, Shape

H = TypeVar("H", bound=nn.Module)


class EagleHead(nn.Module):
    """See the head of this file. `kv_heads`, `head_dim`, `depth` (layers), `taps`, `context` and `ids` are what a drafter asks."""

    ids: Tensor | None = None           # the target's whole vocabulary

    def __init__(self, parts: TargetParts, shape: Shape, layers: int, config: Mapping[str, Any], own_embed: bool = False,
                 fc_bias: bool = True, first_norm: bool = False, input_norms: bool = False) -> None:
        """config: rotary fields and max_position_embeddings. input_norms: embedding and hidden state are normed before fc (HASS)."""
        super().__init__()
        target = text_config(parts)
        if parts.embed is None or parts.output is None or parts.norm is None or shape.hidden != target.hidden_size:
            raise LoadError(f"an EAGLE head of width {shape.hidden} reads the target's embedding, final norm and output matrix; "
                            f"expected a target that has them, of width {shape.hidden} (its own is {target.hidden_size})")
        self.shape, self.config, self.depth = shape, kept(config), layers
        self.taps: tuple[int, ...] = (int(target.num_hidden_layers) - 1,)
        self.context: int | None = self.config.get("max_position_embeddings")
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=fc_bias)
        self.layers = HeadLayers(HeadLayer(shape, input_norm=i > 0 or first_norm) for i in range(layers))
        self.embed_tokens = nn.Embedding(target.vocab_size, shape.hidden) if own_embed else None
        self.embedding_layernorm = RMSNorm(shape.hidden, shape.eps) if input_norms else None
        self.hidden_states_layernorm = RMSNorm(shape.hidden, shape.eps) if input_norms else None
        self.rope = Rope(config, shape.head_dim)

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published head. Raises LoadError where tensors are missing, unread, of other sizes, or of another vocabulary."""
        source, tensors = files.path, {eagle_name(name): tensor for name, tensor in files.tensors.items()}
        if len(tensors) != len(files.tensors):
            raise LoadError(f"{source}: two tensors have the same place (fc. and fusion_fc.?); expected one layout")
        inner = (files.config.get(name) for name in ("model", "transformer_layer_config"))
        config = next((found for found in inner if isinstance(found, dict)), files.config)
        fc = needed(tensors, "fc.weight", source)
        if fc.ndim != 2 or fc.shape[1] != 2 * fc.shape[0]:
            raise LoadError(f"{source}: fc.weight is {list(fc.shape)}; expected [H, 2H], embedding and one hidden state: "
                            "a head that reads several layers is eagle3")
        require_vocabulary(tensors, config, vocab_size, source)
        shape = Shape.of(tensors, config, source)
        head = cls(parts, shape, count_layers(tensors), config, "embed_tokens.weight" in tensors, "fc.bias" in tensors,
                   "layers.0.input_layernorm.weight" in tensors, "embedding_layernorm.weight" in tensors)
        give_biases(head, tensors)
        fill(head, tensors, source, unused=ROTARY)
        return settle(head, parts)

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 1, context: int | None = None, **sizes: Any) -> Self:
        """Random weights, fc without a bias, which vLLM's has not. sizes: hidden, inner, heads, kv_heads, head_dim; the target's own where
        not given."""
        return settle(cls(parts, Shape.like(parts, **sizes), layers, rope_fields(parts, context), fc_bias=False), parts)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """The official layout; config.json is a Llama config of so many layers, as EAGLE publishes it. dtype: None keeps it."""
        target = text_config(self._parts[0])
        write_files(folder, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **self.config, **self.shape.config(),
                             "num_hidden_layers": self.depth, "vocab_size": int(target.vocab_size), "bias": self.fc.bias is not None},
                    converted(self.state_dict(), dtype))

    @property
    def kv_heads(self) -> int:
        return self.shape.kv_heads

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim

    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden states [R, H], one row per token of the text, as `step` reads them."""
        norm = self._parts[0].norm
        assert norm is not None, "refused at construction"
        fused: Tensor = norm(features)
        return fused

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend | Runs) -> Tensor:
        """tokens [R] and the hidden states before them [R, H] → hidden states [R, H]: for `logits`, and for the next step."""
        embedded = embedding(self._parts[0], self.embed_tokens)(tokens)
        if self.embedding_layernorm is not None and self.hidden_states_layernorm is not None:
            embedded, hidden = self.embedding_layernorm(embedded), self.hidden_states_layernorm(hidden)
        x = self.fc(torch.cat((embedded, hidden), -1))
        out: Tensor = self.layers(x, self.rope, positions, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] for the token after the one that `step` read."""
        parts = self._parts[0]
        assert parts.output is not None, "refused at construction"
        return parts.finished(parts.output(hidden))


RENAMED = {"fusion_fc.weight": "fc.weight", "fusion_fc.bias": "fc.bias"}       # speculators, first generation
ROTARY = frozenset(f"layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(8))    # written by old transformers, computed here
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def eagle_name(name: str) -> str:
    """Our name of a published tensor: NeMo Automodel writes `model.` before it, the first speculators called the layer `transformer`."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('transformer.')}" if name.startswith("transformer.") else RENAMED.get(name, name)


def kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a head's config that its tensors do not show."""
    return {name: config[name] for name in (*ROPE, "layer_types", "sliding_window", "use_sliding_window") if config.get(name) is not None}


def text_config(parts: TargetParts) -> Any:
    return parts.config.get_text_config()


def require_vocabulary(tensors: Mapping[str, Tensor], config: Mapping[str, Any], vocab_size: int, source: str | Path) -> None:
    """Raises LoadError unless embedding, `t2d` and config speak of the target's vocabulary."""
    sizes = {f"{name} has {tensors[name].shape[0]} rows": tensors[name].shape[0]
             for name in ("embed_tokens.weight", "t2d") if name in tensors}
    if config.get("vocab_size"):
        sizes[f"vocab_size is {config['vocab_size']}"] = int(config["vocab_size"])
    for what, size in sizes.items():
        if size != vocab_size:
            raise LoadError(f"{source}: {what}, the target has {vocab_size} tokens; expected a head of this target's vocabulary")


def count_layers(tensors: Iterable[str]) -> int:
    return 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and name.split(".")[1].isdigit()), default=0)


def give_biases(module: nn.Module, names: Iterable[str]) -> None:
    """Room for every bias that the file has and a linear layer of ours lacks."""
    for name in names:
        place, _, kind = name.rpartition(".")
        linear = dict(module.named_modules()).get(place) if kind == "bias" else None
        if isinstance(linear, nn.Linear) and linear.bias is None:
            linear.bias = nn.Parameter(torch.zeros(linear.out_features))


def embedding(parts: TargetParts, own: nn.Embedding | None) -> nn.Module:
    table = own if own is not None else parts.table
    assert table is not None, "refused at construction"
    return table


def settle(head: H, parts: TargetParts) -> H:
    """The head where the target is and with parameters in its precision; rotary frequencies stay in float32."""
    assert parts.embed is not None, "refused at construction"
    weight = next(iter(parts.embed.parameters()))
    for parameter in head.parameters():
        parameter.data = parameter.data.to(weight.dtype)
    return head.to(weight.device)


def rope_fields(parts: TargetParts, context: int | None = None) -> dict[str, Any]:
    """The rotary fields of the target's config, for a new head: where they differ by kind of layer, those of layers that see all of a
    text, as the head's do."""
    config = text_config(parts)
    found = {name: getattr(config, name, None) for name in ROPE}
    rope = found.pop("rope_parameters") or found["rope_scaling"] or {}
    rope = dict(rope.get("full_attention") or rope)
    found |= {"rope_theta": rope.get("rope_theta") or found["rope_theta"] or 10000.0, "rope_scaling": rope or None}
    if context is not None:
        found["max_position_embeddings"] = context
    return {name: value for name, value in found.items() if value is not None}
