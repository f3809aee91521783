"""What Gemma 3n and 4 add to Llama's block: an embedding of each layer's own, layers that read the keys and values of another, and experts
beside an MLP.

    side = (norm(project(x₀) · H^−½) + table(ids)) · 2^−½        [rows, layers, n], of the embedded rows x₀
    x ← x + norm(last(act(gate(x)) · side)), the last thing that a layer adds

    x ← x + norm(norm(mlp(norm(x))) + norm(experts(norm(x)))), chosen by a router that reads norm(x) · H^−½

See `Gemma4TextModel.project_per_layer_inputs` and `Gemma4TextDecoderLayer` in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import llama, native
from .families import ABREAST, FAMILIES, Family, norm_of, part_of
from .routed import Routed


class Sides:
    def __init__(self, body: Any) -> None:
        self._body, self.layers, self.size = body, len(body.layers), int(body.hidden_size_per_layer_input)
        self.norm = norm_of(body.per_layer_projection_norm, FAMILIES["gemma4_text"])
        scales = part_of(body, ("per_layer_model_projection_scale", "per_layer_projection_scale")), body.per_layer_input_scale
        like = body.embed_tokens.weight
        self.scales = [scale.to(like.dtype) if isinstance(scale, Tensor) else scale for scale in scales]     # Gemma 3n's are tensors
        known: int = body.embed_tokens_per_layer.num_embeddings
        self.known = known if known < len(like) else None       # ids beyond count as the first

    def __call__(self, ids: Tensor, x: Tensor, norm: Any) -> Tensor:
        """Of ids [rows] and their embedded rows x [rows, hidden]; norm: the pass's own."""
        body = self._body
        projected = body.per_layer_model_projection(x) * self.scales[0]
        own: Tensor = body.embed_tokens_per_layer(ids if self.known is None else ids * (ids < self.known))
        normed: Tensor = norm(projected.view(-1, self.size), *self.norm).view_as(own)
        found: Tensor = (normed + own) * self.scales[1]
        return found.view(len(ids), self.layers, self.size)


class Abreast:
    """Norms of a layer whose MLP stands beside its experts."""

    def __init__(self, layer: Any, family: Family) -> None:
        self.before, self.of_experts, self.of_mlp = (norm_of(getattr(layer, name), family) for name in ABREAST)
        self.of_router, self.share = (layer.router.scale.detach(), layer.router.eps), float(layer.router.scalar_root_size)

    def __call__(self, x: Tensor, made: Tensor, experts: Routed, norm: Any) -> Tensor:
        """What both make [rows, hidden]. x: the stream; made: by the MLP; norm: the pass's own."""
        found = experts(norm(x, *self.before), norm(x, *self.of_router) * self.share)
        both: Tensor = norm(found, *self.of_experts) + norm(made, *self.of_mlp)
        return both

    def struct(self, dtype: torch.dtype) -> llama.Abreast:
        """For kernels/block.c; its parts are this object's."""
        norms = (self.of_router, self.before, self.of_experts, self.of_mlp)
        return llama.Abreast(*(native.Scale.of(norm[0], norm[1], dtype) for norm in norms), self.share)


def lender_of(attention: Any) -> int:
    """The layer whose keys and values a layer without its own reads: the last one of its kind that makes some."""
    config = attention.config
    makes = config.num_hidden_layers - config.num_kv_shared_layers
    return max(layer for layer in range(makes) if config.layer_types[layer] == attention.layer_type)
