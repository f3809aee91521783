"""What Gemma 4 adds to Llama's block: an embedding of each layer's own, and layers that read the keys and values of another.

    side = (norm(project(x₀) · H^−½) + table(ids)) · 2^−½        [rows, layers, n], of the embedded rows x₀
    x ← x + norm(last(act(gate(x)) · side)), the last thing that a layer adds

See `Gemma4TextModel.project_per_layer_inputs` in transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .families import FAMILIES, norm_of


class Sides:
    def __init__(self, body: Any) -> None:
        self._body, self.layers, self.size = body, len(body.layers), int(body.hidden_size_per_layer_input)
        self.norm = norm_of(body.per_layer_projection_norm, FAMILIES["gemma4_text"])

    def __call__(self, ids: Tensor, x: Tensor, norm: Any) -> Tensor:
        """Of ids [rows] and their embedded rows x [rows, hidden]; norm: the pass's own."""
        body = self._body
        projected = body.per_layer_model_projection(x) * body.per_layer_model_projection_scale
        own: Tensor = body.embed_tokens_per_layer(ids)
        normed: Tensor = norm(projected.view(-1, self.size), *self.norm).view_as(own)
        found: Tensor = (normed + own) * body.per_layer_input_scale
        return found.view(len(ids), self.layers, self.size)


def lender_of(attention: Any) -> int:
    """The layer whose keys and values a layer without its own reads: the last one of its kind that makes some."""
    config = attention.config
    makes = config.num_hidden_layers - config.num_kv_shared_layers
    return max(layer for layer in range(makes) if config.layer_types[layer] == attention.layer_type)


def borrowed_bytes(layer: Any) -> int:
    """Of a token's keys and values that a fused layer reads and does not keep."""
    size: int = layer.dtype.itemsize
    return 0 if layer.borrowed is None else layer.kv_heads * (layer.head_dim + layer.value_dim) * size
