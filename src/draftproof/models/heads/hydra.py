"""Hydra heads (Ankner et al., arXiv 2402.05109): Medusa's, but head i also reads the i + 1 tokens after the hidden state.

    x = [h, embed(token 1), …, embed(token i + 1)]
    x ← res(x) + silu(linear(x));  then x ← x + silu(linear(x)) for each further block;  logits = lm_head(x)

`grounded_heads: false` leaves the tokens (and `res`) out. Hydra++ (`prefix-mlp`) first passes all hidden states through one
decoder layer of the target's shape and its norm, so it keeps keys of the text. Published keys, `mlp`:
`hydra_mlp.{i}.{l}.linear.*`, `hydra_mlp.{i}.0.res_connection.*`, `hydra_lm_head.{i}.*`; `prefix-mlp`, where dropout takes every
other number: `hydra_mlp.{i}.{2l + 1}.*`, `hydra_lm_head.{i}.1.*`, and `prefix_embeding_layer.*` (their spelling).
`hidden_state_offset` k > 0 reads the output of the k-th layer before the last, without the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import LoadError, VocabularyMismatch
from ..target import TargetParts
from .blocks import RMSNorm, Rope
from .eagle import rope_fields, settle, text_config
from .files import HeadFiles, fill, write_files
from .layers import Attend, HeadLayer, HeadLayers, Shape
from .medusa import rows_of

DEPTH = 4                                        # of a fresh head
LAYER = "prefix_embeding_layer.layers.0."
UNREAD = ("prefix_embeding_layer.embed_tokens.weight", f"{LAYER}self_attn.rotary_emb.inv_freq")    # it is given embeddings; computed here


class ResBlock(nn.Module):
    """res(x) + silu(linear(x)); res is the identity where the widths are equal."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.res_connection = nn.Linear(width, hidden) if width != hidden else None

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.res_connection is None else self.res_connection(x)) + functional.silu(self.linear(x))


class Prefix(nn.Module):
    """The decoder layer of Hydra++ and the norm behind it."""

    def __init__(self, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.shape = shape
        self.layers = HeadLayers([HeadLayer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.rope = Rope(config, shape.head_dim)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [R, H] at positions [R] → [R, H]."""
        return self.norm(self.layers(hidden, self.rope, positions, attend))      # type: ignore[no-any-return]


class HydraHead(nn.Module):
    """`depth` heads. One step reads a token and everything before it, and gives logits for the next token."""

    def __init__(self, parts: TargetParts, depth: int, layers: int, vocab_size: int, grounded: bool = True, prefix: Shape | None = None,
                 offset: int = 0, bias: bool = True) -> None:
        """prefix: the sizes of Hydra++'s decoder layer. offset: `hidden_state_offset`."""
        super().__init__()
        config = text_config(parts)
        hidden, top = int(config.hidden_size), int(config.num_hidden_layers) - 1
        assert parts.embed is not None and layers > 0
        self.depth, self.layers, self.grounded, self.offset = depth, layers, grounded, offset
        self.ids: Tensor | None = None      # the target's whole vocabulary
        self.taps = (top - offset,)
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList(ResBlock(hidden * (i + 2) if grounded and not layer else hidden, hidden) for layer in range(layers))
            for i in range(depth))
        self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden, vocab_size, bias=bias) for _ in range(depth))
        self.prefix_embeding_layer = Prefix(prefix, rope_fields(parts)) if prefix is not None else None

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published head; its sizes come from the tensors. Raises LoadError where tensors are missing, unread, of other
        sizes, or of another vocabulary, and for the architectures that keep a tree in their caches."""
        source, config = files.path, files.config
        kind = config.get("hydra_head_arch")
        if kind not in (None, "mlp", "prefix-mlp"):
            raise LoadError(f"{source}: hydra_head_arch is {kind!r}; expected mlp or prefix-mlp, the two that were published with weights")
        tensors = {name.removeprefix("hydra_head."): tensor for name, tensor in files.tensors.items()}
        prefixed = any(name.startswith("prefix_embeding_layer.") for name in tensors)
        if kind is not None and prefixed != (kind == "prefix-mlp"):
            raise LoadError(f"{source}: hydra_head_arch is {kind}, and prefix_embeding_layer is {'there' if prefixed else 'missing'}; "
                            "expected it for prefix-mlp and for nothing else")
        named = {_numbered(name, prefixed): tensor for name, tensor in tensors.items()}
        places = [(int(i), int(layer)) for i, layer in re.findall(r"^hydra_mlp\.(\d+)\.(\d+)\.linear\.weight$", "\n".join(named), re.M)]
        if not places:
            raise LoadError(f"{source} has no hydra_mlp (found: {', '.join(sorted(files.tensors)[:6])} …); "
                            "expected `hydra_mlp.0.0.linear.weight`")
        depth, layers = 1 + max(i for i, _ in places), 1 + max(layer for _, layer in places)
        claimed = int(config.get("hydra_num_heads") or depth)
        if claimed > depth:
            raise LoadError(f"{source}: config.json speaks of {claimed} heads, the tensors hold {depth}; "
                            "expected all of them, fetch it again")
        layers = max(layers, int(config.get("hydra_num_layers") or 1))
        grounded = "hydra_mlp.0.0.res_connection.weight" in named
        _repeat_blocks(named, depth, layers, grounded)
        _require_sizes(named, int(text_config(parts).hidden_size), vocab_size, source)
        offset = int(config.get("hidden_state_offset") or 0)
        if not 0 <= offset < int(text_config(parts).num_hidden_layers):
            raise LoadError(f"{source}: hidden_state_offset is {offset}; "
                            "expected 0 (the last hidden state) to the layers of the target less one")
        head = cls(parts, depth, layers, vocab_size, grounded, _prefix_shape(named, parts, source) if prefixed else None, offset,
                   "hydra_lm_head.0.bias" in named)
        fill(head, named, source, unused=UNREAD)
        return settle(head, parts)

    @classmethod
    def fresh(cls, parts: TargetParts, depth: int = DEPTH, layers: int = 1, grounded: bool = True, prefix: bool = False,
              **sizes: Any) -> Self:
        """New heads: zero blocks and the target's own output matrix, as Hydra begins. prefix: Hydra++; sizes of its decoder layer:
        inner, heads, kv_heads, head_dim, the target's where not given."""
        assert parts.output is not None
        rows = parts.output.weight
        head = cls(parts, depth, layers, rows_of(parts.output), grounded, Shape.like(parts, **sizes) if prefix else None)
        for name, parameter in head.named_parameters():
            if name.startswith("hydra_mlp.") and ".linear." in name or name.startswith("hydra_lm_head.") and name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith("hydra_lm_head.") and isinstance(rows, Tensor) and not rows.is_meta:
                parameter.data.copy_(rows.detach())
        return settle(head, parts)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """The published layout, as safetensors. dtype: of the file, the parameters' own unless given."""
        prefixed = self.prefix_embeding_layer is not None
        tensors = {_dropped_out(name) if prefixed else name: tensor.to(dtype or tensor.dtype)
                   for name, tensor in self.state_dict().items()}
        config = {"hydra_num_heads": self.depth, "hydra_num_layers": self.layers, "hydra_head_arch": "prefix-mlp" if prefixed else "mlp",
                  "grounded_heads": self.grounded, "hidden_state_offset": self.offset}
        write_files(folder, config, tensors)

    def read_target(self, tap: Tensor) -> Tensor:
        """What the heads call hidden states [R, H], from the output of the tapped layer."""
        norm = self._parts[0].norm
        assert norm is not None
        return tap if self.offset else norm(tap)

    def start(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, H] (behind the prefix layer, where there is one) → what the first step reads."""
        return hidden

    def step(self, level: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All that was read [B, (level + 1)·H] and the token after it [B] → logits [B, V] for the next, and all with the token."""
        if self.grounded:
            table = self._parts[0].table
            assert table is not None, "checked at construction"
            with torch.no_grad():
                rows = table(tokens)
            state = torch.cat((state, rows.to(state.dtype)), -1)
        x = state
        for block in self.hydra_mlp[level].children():
            x = block(x)
        return self.hydra_lm_head[level](x), state


def _numbered(name: str, prefixed: bool) -> str:
    """Our name of a tensor: without the places that dropout takes."""
    if not prefixed:
        return name
    name = re.sub(r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda m: f"{m[1]}.{int(m[2]) // 2}." if int(m[2]) % 2 else m[0] + "even.", name)
    return re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", name)


def _dropped_out(name: str) -> str:
    name = re.sub(r"^(hydra_mlp\.\d+)\.(\d+)\.", lambda m: f"{m[1]}.{2 * int(m[2]) + 1}.", name)
    return re.sub(r"^(hydra_lm_head\.\d+)\.", r"\1.1.", name)


def _repeat_blocks(named: dict[str, Tensor], depth: int, layers: int, grounded: bool) -> None:
    """All blocks behind the first are one repeated block; a file may hold it once."""
    first = 1 if grounded else 0
    for i in range(depth):
        for kind in ("weight", "bias"):
            one = named.get(f"hydra_mlp.{i}.{first}.linear.{kind}")
            repeats = [f"hydra_mlp.{i}.{layer}.linear.{kind}" for layer in range(first + 1, layers)]
            if one is not None and not any(name in named for name in repeats):
                named.update(dict.fromkeys(repeats, one))


def _require_sizes(named: Mapping[str, Tensor], hidden: int, vocab_size: int, source: Path) -> None:
    for name, tensor in named.items():
        if name.startswith("hydra_lm_head.") and tensor.shape[0] != vocab_size:
            raise VocabularyMismatch(f"{source}: {name} has {tensor.shape[0]} rows, the target {vocab_size} tokens; "
                                     "expected a head that was trained for this target's vocabulary")
        if name.startswith("hydra_mlp.") and tensor.shape[0] != hidden:
            raise LoadError(f"{source}: {name} is {list(tensor.shape)}; expected {hidden} rows, the target's hidden size: "
                            "use a head that was trained for it")


def _prefix_shape(named: Mapping[str, Tensor], parts: TargetParts, source: Path) -> Shape:
    """Sizes of the prefix layer; what no tensor shows is the target's, of which the layer is a copy."""
    config = text_config(parts)
    like = Shape.like(parts)
    layer = {name.removeprefix("prefix_embeding_layer."): tensor for name, tensor in named.items()}
    heads = getattr(config, "num_attention_heads", like.heads)
    return Shape.of(layer, {"head_dim": like.head_dim, "rms_norm_eps": like.eps, "num_attention_heads": heads}, source)
