"""DFlash heads (arXiv 2602.06036): one pass over a block of masks guesses all of its tokens at once.

    context   c_t = hidden_norm(fc([outputs of the tapped layers at t]))            one row per token before the anchor
    block     x = [embed(anchor), mask, mask, …]; in every layer queries come from the block, keys and values from context and
              block through the same projections; the block sees all of itself and every context row
    logits    output(norm(x)); slot i is the token i places behind the anchor, or i + 1 with `sample_from_anchor`

The anchor is the last token of the text, which has no hidden state yet. Context keys depend on nothing but their own row, so
they are computed once and kept; those of the block never are. Layouts: z-lab (embedding and output matrix are the target's;
`target_layer_ids`: 0 is the first layer's output), DeepSpec (flat config, ships both), speculators (`aux_hidden_state_layer_ids`
= that + 1, perhaps a reduced vocabulary). Keys: `fc`, `hidden_norm`, `norm`, `layers.{i}.*` of Qwen3, `embed_tokens`, `lm_head`,
`d2t`, `t2d`, `mask_embedding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.upload import uploaded
from ...errors import LoadError
from ..target import TargetParts
from .blocks import RMSNorm, Rope, rotate
from .cache import HeadCache, HeadPass
from .eagle import ROTARY, count_layers, give_biases, require_vocabulary, rope_fields, settle, text_config
from .files import HeadFiles, converted, fill, needed, write_files
from .layers import Attend, HeadLayer, Shape
from .layout import Layout, Local, View, body_of, renamed
from .vocabulary import draft_ids, mask, offsets

UNUSED = ROTARY | {"d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"}      # read elsewhere, or the target's own


class DFlash(nn.Module):
    """See the head of this file.

    taps: layers it reads · block: tokens of a block, the anchor among them · reach: tokens it guesses · context: longest text, or
    None · ids: int64 [Vd], the target's id of each of its tokens, None where it has the target's vocabulary
    """

    ids: Tensor | None
    architecture, family = "DFlashDraftModel", "dflash"

    def __init__(self, parts: TargetParts, shape: Shape, layout: Layout, config: Mapping[str, Any], own_embed: bool = False,
                 own_output: int = 0, ids: Tensor | None = None, mask_shape: Sequence[int] | None = None) -> None:
        """config: rotary fields and max_position_embeddings. own_output: rows of an output matrix of its own, 0 for the target's."""
        super().__init__()
        target = text_config(parts)
        if parts.embed is None or parts.output is None or (not own_embed or not own_output) and shape.hidden != target.hidden_size:
            raise LoadError(f"a head of width {shape.hidden} that uses the target's embedding or output matrix; expected a target that has "
                            f"them, of width {shape.hidden} (its own is {target.hidden_size})")
        self.shape, self.layout, self.config, self.depth = shape, layout, dict(config), len(layout.views)
        self.taps, self.block = layout.taps, layout.block
        self.reach = layout.block if layout.from_anchor else layout.block - 1
        self.context: int | None = self.config.get("max_position_embeddings")
        self.vocab_size = int(target.vocab_size)
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        self.fc = nn.Linear(len(layout.taps) * int(target.hidden_size), shape.hidden, bias=False)
        self.hidden_norm, self.norm = RMSNorm(shape.hidden, shape.eps), RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(self.layer() for _ in layout.views)
        self.rope = Rope(self.config, shape.head_dim)
        self.embed_tokens = nn.Embedding(self.vocab_size, shape.hidden) if own_embed else None
        self.lm_head = nn.Linear(shape.hidden, own_output, bias=False) if own_output else None
        self.mask_embedding = None if mask_shape is None else nn.Parameter(torch.randn(*mask_shape) * 0.02)
        self.register_buffer("ids", ids, persistent=False)

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published head. Raises LoadError for tensors that are missing, unread or of other sizes, for layers that the target
        lacks, for a foreign vocabulary, and, by name, for variants of the family that are other networks."""
        source, tensors, body = files.path, renamed(files), body_of(files.config)
        layout = Layout.of(files, tensors, count_layers(tensors), text_config(parts), cls.family)
        require_vocabulary(tensors, body, vocab_size, source)
        shape = Shape.of(tensors, body, source)
        if not shape.qk_norm:
            needed(tensors, "layers.0.self_attn.q_norm.weight", source)
        output = tensors.get("lm_head.weight")
        size = vocab_size if output is None else output.shape[0]
        own_mask = tensors["mask_embedding"].shape if "mask_embedding" in tensors else None
        head = cls(parts, shape, layout, {name: body[name] for name in ROPE if body.get(name) is not None},
                   "embed_tokens.weight" in tensors, 0 if output is None else size, draft_ids(tensors, size, vocab_size, source), own_mask)
        head.give(files, tensors)
        give_biases(head, tensors)
        fill(head, tensors, source, unused=UNUSED)
        return settle(head, parts)

    def give(self, files: HeadFiles, tensors: Mapping[str, Tensor]) -> None:
        """Room for what a descendant of the family adds."""

    def layer(self) -> HeadLayer:
        return HeadLayer(self.shape)

    @classmethod
    def local(cls, hidden: int, vocab_size: int) -> Local | None:
        """Of a fresh head."""
        return None

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 2, block: int = 8, taps: Sequence[int] | None = None, mask_token: int | None = None,
              context: int | None = None, **sizes: Any) -> Self:
        """Random weights, embedding and output matrix borrowed. mask_token: a token that texts do not hold; without one the mask is a
        vector that is learned. sizes: inner, heads, kv_heads, head_dim; the target's own where not given."""
        shape = Shape.like(parts, **{**sizes, "qk_norm": True})
        chosen = tuple(taps) if taps is not None else spread(int(text_config(parts).num_hidden_layers), 3)
        scale, cap = parts.finish
        layout = Layout(block, chosen, mask_token, cls.family == "dspark", (View(),) * layers, output_scale=scale, softcap=cap,
                        local=cls.local(shape.hidden, int(text_config(parts).vocab_size)))
        own_mask = None if mask_token is not None else (shape.hidden,)
        return settle(cls(parts, shape, layout, rope_fields(parts, context), mask_shape=own_mask), parts)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """z-lab's layout, with what the head has of its own beside it. dtype: of the weights in the file."""
        tensors = converted(self.state_dict(), dtype)
        if self.ids is not None:
            tensors |= {"d2t": offsets(self.ids), "t2d": mask(self.ids, self.vocab_size)}
        write_files(folder, self.published(), tensors)

    def published(self) -> dict[str, Any]:
        reduced = {} if self.ids is None else {"draft_vocab_size": self.ids.shape[0]}
        return {"architectures": [self.architecture], "model_type": "qwen3", **self.config, **self.shape.config(),
                "num_hidden_layers": self.depth, "vocab_size": self.vocab_size, "tie_word_embeddings": False,
                "num_target_layers": int(text_config(self.target).num_hidden_layers), **reduced, **self.layout.published()}

    @property
    def target(self) -> TargetParts:
        return self._parts[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """Outputs of the tapped layers side by side [n, taps · H] → context rows [n, H]."""
        fused: Tensor = self.hidden_norm(self.fc(features.to(self.dtype)))
        return fused

    def keys(self, fused: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys (turned) and values [n, kv, D] of context rows, per layer."""
        cos, sin = self.rope(positions)
        found = []
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            attention = layer.self_attn
            assert attention.k_norm is not None
            k, v = (project(fused).view(-1, self.shape.kv_heads, self.shape.head_dim) for project in (attention.k_proj, attention.v_proj))
            found.append((rotate(attention.k_norm(k), cos, sin), v))
        return found

    def hidden(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """anchors [B] (tokens) at positions [B] → [B, reach, H], one row per guessed token, ready for `logits`."""
        return self.rows(anchors, positions, attend)[:, self.block - self.reach:]

    def rows(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The same of the whole block [B, block, H]."""
        count, width = anchors.shape[0], self.shape.hidden
        first = self.embed(anchors)[:, None]
        x = torch.cat((first, self.mask_row().expand(count, self.block - 1, width)), 1).reshape(-1, width)
        turn = self.rope((positions[:, None] + torch.arange(self.block, device=positions.device)).reshape(-1))
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, attend, i)
        out: Tensor = self.norm(x.view(count, self.block, width))
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding matrix as it stands, whatever scale the target's own module would put on it."""
        borrowed = self.target.embed
        assert borrowed is not None and isinstance(borrowed.weight, Tensor)
        weight = borrowed.weight.detach() if self.embed_tokens is None else self.embed_tokens.weight
        return functional.embedding(tokens, weight).to(self.dtype) * self.layout.embed_scale

    def mask_row(self) -> Tensor:
        if self.mask_embedding is not None:
            return self.mask_embedding.view(1, 1, -1)
        assert self.layout.mask_token is not None
        return self.embed(uploaded([[self.layout.mask_token]], self.norm.weight.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, H] → [… , Vd]. The target's output matrix gets no gradient."""
        output = self.lm_head if self.lm_head is not None else self.target.output
        assert output is not None and isinstance(output.weight, Tensor)
        hidden = hidden.to(output.weight.dtype)
        if self.lm_head is None and hidden.requires_grad:
            assert output.weight.device.type != "meta", "train with unpacked layers"
            bias = getattr(output, "bias", None)
            logits = functional.linear(hidden, output.weight.detach(), None if bias is None else bias.detach())
        else:
            logits = output(hidden)
        if self.layout.output_scale != 1:
            logits = logits * self.layout.output_scale
        cap = self.layout.softcap
        return torch.tanh(logits / cap) * cap if cap else logits


ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def spread(layers: int, count: int) -> tuple[int, ...]:
    """Which layers to tap: evenly from the second to the fourth last, as z-lab spreads them; fewer where there are not so many."""
    count = min(count, max(1, layers - 3))
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


class Blocks:
    """The attention of one pass over the blocks of several sequences: `attend` for `DFlash.hidden`. Nothing is kept of it."""

    def __init__(self, head: DFlash, caches: Sequence[HeadCache]) -> None:
        counts = [head.block] * len(caches)
        self.views = head.layout.views
        self.passes = {view: HeadPass(caches, counts, [view.mask(cache.length, head.block, cache.device) for cache in caches])
                       for view in set(self.views)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.passes[self.views[layer]](layer, q, k, v)


class Anchored:
    """`attend` for training: blocks behind `anchors` [A] of one text, over the text's context keys; each sees its own block and the
    context before its anchor."""

    def __init__(self, head: DFlash, context: Sequence[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self.context, self.views = context, head.layout.views
        size, block, device = context[0][0].shape[0], head.block, anchors.device
        at = (anchors[:, None] + torch.arange(block, device=device)).reshape(-1)              # position of every row of every block
        whose = torch.arange(anchors.shape[0], device=device).repeat_interleave(block)
        told = torch.arange(size, device=device)
        before = told < anchors.repeat_interleave(block)[:, None]
        visible = torch.cat((before, whose[:, None] == whose), 1)
        distance = at[:, None] - torch.cat((told, at))
        self.masks = {view: visible & view.sees(distance) for view in set(self.views)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(self.context[layer], (k, v), strict=True))
        out = functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, self.masks[self.views[layer]], enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)
