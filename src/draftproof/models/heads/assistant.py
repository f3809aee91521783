"""Gemma 4's assistants: small decoders without keys of their own, which read those that the target has left for the text.

    x = pre_projection([embed(token), h])              embed: the target's, with its scale; h: what the target feeds to its output matrix
    y = x + norm(o_proj(attend(q_norm(q_proj(norm(x))))))                  attend: to keys and values of the target's last layer of the
    x = layer_scalar · (y + norm(down(gelu(gate(norm(y))) · up(norm(y)))))               same kind (full or sliding) that makes its own
    h = post_projection(norm(x)) for the next step; logits = lm_head(norm(x))

Every guess of a round is asked from the same place, the last one that the target has read: no step writes a key. Scores are not scaled (the
norms of queries and keys do it). With `use_ordered_embeddings` tokens lie in clusters, `token_ordering` by cluster; the tokens of the few
whose centroids are likeliest are scored, no others. Format: transformers' `Gemma4AssistantForCausalLM` and its like for Gemma 4 unified.
The place is the one that vLLM 0.33 and SGLang 0.5.23 ask from; transformers 5.24 turns queries by one position more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

from ...errors import LoadError
from ..target import TargetParts
from .blocks import RMSNorm, rotate
from .eagle import settle, text_config
from .files import HeadFiles, fill

REACH = 64              # guesses of a round: no limit of the network's, which asks the same place again and again
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Keys:
    """Of several texts, keys and values of one layer [B, kv, n, D], and which of them a text has [B, 1, 1, n]; None: all."""

    key: Tensor
    value: Tensor
    there: Tensor | None

    def of(self, rows: Tensor) -> Keys:
        """Those of the texts [b]."""
        return Keys(self.key[rows], self.value[rows], None if self.there is None else self.there[rows])


@dataclass(frozen=True, slots=True)
class View:
    """What a round asks from: for each kind of layer the keys, and the turn (cosines, sines [B, 1, D]) of the place it is asked from."""

    keys: Mapping[str, Keys]
    turns: Mapping[str, tuple[Tensor, Tensor]]

    def of(self, rows: Tensor) -> View:
        """Of the texts [b]."""
        turns = {kind: (cos[rows], sin[rows]) for kind, (cos, sin) in self.turns.items()}
        return View({kind: keys.of(rows) for kind, keys in self.keys.items()}, turns)


class QueryAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.o_proj = nn.Linear(hidden, heads * dim, bias=bias), nn.Linear(heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, eps)

    def forward(self, x: Tensor, keys: Keys, turn: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, F, H] → [B, F, H]."""
        q = rotate(self.q_norm(self.q_proj(x).view(*x.shape[:2], self.heads, -1)), *turn).transpose(1, 2)
        # Heads that read the same keys as rows of one: on a CPU torch copies the keys for each head otherwise, for 14 times as long.
        rows = q.reshape(q.shape[0], keys.key.shape[1], -1, q.shape[-1])
        seen = functional.scaled_dot_product_attention(rows, keys.key, keys.value, keys.there, scale=1.0).view(q.shape)
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out


class GeluMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return out


class QueryLayer(nn.Module):
    """A Gemma 4 layer that shares its keys. kind: of its attention."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.kind: str = config.layer_types[index]
        self.self_attn = QueryAttention(hidden, config.num_attention_heads, _dim(config, index), eps, bool(config.attention_bias))
        self.mlp = GeluMlp(hidden, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, view: View) -> Tensor:
        y = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), view.keys[self.kind], view.turns[self.kind]))
        y = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        out: Tensor = self.layer_scalar * y
        return out


class Clusters(nn.Module):
    """token_ordering [V]: tokens, those of the first cluster first."""

    token_ordering: Tensor

    def __init__(self, hidden: int, clusters: int, likeliest: int, vocab_size: int) -> None:
        super().__init__()
        self.count, self.likeliest = clusters, likeliest
        self.centroids = nn.Linear(hidden, clusters, bias=False)
        self.register_buffer("token_ordering", torch.zeros(vocab_size, dtype=torch.int64))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [R, H] and the output matrix [V, H] → logits [R, V], −inf outside the likeliest clusters."""
        near = self.token_ordering.view(self.count, -1)[self.centroids(x).topk(self.likeliest, -1).indices].flatten(1)
        scores = (table[near] @ x[..., None]).squeeze(-1)
        return scores.new_full((x.shape[0], table.shape[0]), -math.inf).scatter_(-1, near, scores)


class Body(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(QueryLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Assistant(nn.Module):
    """See the head of this file. layers: kind of attention → the target's layer whose keys are read, and how many of the last ones (None:
    all)."""

    ids: Tensor | None = None
    depth = REACH

    def __init__(self, config: Any, parts: TargetParts, source: object) -> None:
        """config: an assistant's of transformers. Raises LoadError for one of another target."""
        # A model's own file, which commands without a Gemma need not read.
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

        super().__init__()
        own, target = config.get_text_config(), text_config(parts)
        self.layers = _layers(own, target, int(config.backbone_hidden_size), source)
        self.taps = (int(target.num_hidden_layers) - 1,)
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        hidden, backbone = own.hidden_size, int(config.backbone_hidden_size)
        self.model = Body(own)
        self.pre_projection, self.post_projection = nn.Linear(2 * backbone, hidden, bias=False), nn.Linear(hidden, backbone, bias=False)
        clusters = (config.num_centroids, config.centroid_intermediate_top_k) if config.use_ordered_embeddings else None
        self.masked_embedding = Clusters(hidden, *clusters, own.vocab_size) if clusters else None
        self.lm_head = nn.Embedding(own.vocab_size, hidden) if clusters else nn.Linear(hidden, own.vocab_size, bias=False)
        self._rope = (Gemma4TextRotaryEmbedding(own),)      # its frequencies stay in float32

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published assistant. Raises LoadError where tensors are missing, unread or of other sizes, or for another target."""
        try:
            config = AutoConfig.for_model(**files.config)
        except (TypeError, ValueError, KeyError) as error:
            raise LoadError(f"{files.path}: transformers cannot read its config.json ({error}); expected a Gemma 4 assistant's") from None
        size = int(config.get_text_config().vocab_size)
        if size != vocab_size:
            raise LoadError(f"{files.path} has {size} tokens, the target {vocab_size}; expected an assistant of this target")
        head = cls(config, parts, files.path)
        tensors, tied = dict(files.tensors), files.tensors.get("model.embed_tokens.weight")
        if tied is not None:
            tensors.setdefault("lm_head.weight", tied)              # what it embeds with is the target's
        fill(head, tensors, files.path, unused={"model.embed_tokens.weight"})
        head = settle(head, parts)
        head._rope[0].to(head.model.norm.weight.device)
        return head

    def turns(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """positions [B] → for each kind of layer, cosines and sines [B, 1, D], in the weights' precision."""
        return {kind: self._rope[0](self.model.norm.weight, positions[:, None], kind) for kind in self.layers}

    def step(self, hidden: Tensor, tokens: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """hidden [B · F, backbone] and the tokens behind it [B · F] → logits [B · F, V], and the hidden states of the next step."""
        embed = self._parts[0].embed
        assert embed is not None, "of a target that embeds"
        count = next(iter(view.keys.values())).key.shape[0]
        x = self.pre_projection(torch.cat((embed(tokens).to(hidden.dtype), hidden), -1)).view(count, tokens.shape[0] // count, -1)
        for layer in self.model.layers:
            x = layer(x, view)
        x = self.model.norm(x).flatten(0, 1)
        logits = self.lm_head(x) if self.masked_embedding is None else self.masked_embedding(x, self.lm_head.weight)
        return logits, self.post_projection(x)


def _dim(config: Any, index: int) -> int:
    return int(config.per_layer_config[index].head_dim)


def _layers(own: Any, target: Any, backbone: int, source: object) -> dict[str, tuple[int, int | None]]:
    """`Assistant.layers`."""
    kinds: Sequence[str] = getattr(target, "layer_types", None) or ()
    if not hasattr(target, "per_layer_config") or backbone != int(target.hidden_size):
        raise LoadError(f"{source} is an assistant of a Gemma 4 of width {backbone}; this target is a {target.model_type} of width "
                        f"{target.hidden_size}; expected an assistant of this target")
    makes = len(kinds) - int(getattr(target, "num_kv_shared_layers", 0) or 0)
    found: dict[str, tuple[int, int | None]] = {}
    for index, kind in enumerate(own.layer_types):
        last = max((layer for layer in range(makes) if kinds[layer] == kind), default=None)
        if last is None or _dim(target, last) != _dim(own, index):
            keys = "no keys" if last is None else f"keys of {_dim(target, last)}"
            raise LoadError(f"{source} asks layers of kind {kind} with queries of {_dim(own, index)}, and the target has {keys} there; "
                            "expected an assistant of this target")
        found[kind] = last, int(target.sliding_window) if kind == SLIDING else None
    return found
