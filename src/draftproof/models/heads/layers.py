"""The decoder layers of heads that are made of Llama's block, and EAGLE-3's first, which reads two things side by side.

    y = x + attention(norm(x))              y = r + attention([norm(beside), norm(x)]),  r = x, or norm(x)      (EAGLE-3's first)
    y = y + mlp(norm(y))

To serve, all layers of a step run in one call of the compiled kernels (../../llama.py): their weights are read in less time than
twenty operations take to be found and called. The lines of torch are the twin; with them heads are trained.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ... import llama, native
from ...errors import LoadError
from ..packed import HeldLinear, StreamedLinear, joined
from ..target import TargetParts
from .blocks import GatedMlp, RMSNorm, Rope, rotate, served
from .cache import HeadPass
from .files import needed

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""layer, q [R, heads, D], k and v [R, kv, D] → [R, heads · D]; q and k are rotated."""


class Runs(ABC):
    """What runs whole layers, where an `Attend` would be called by each."""

    @abstractmethod
    def run(self, layers: HeadLayers, x: Tensor, beside: Tensor | None) -> Tensor: ...


HEADS, EPS = 32, 1e-6       # what a Llama config means where it is silent


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder layer. qk_norm: queries and keys are normed per head (Qwen3)."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = EPS
    qk_norm: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str | Path) -> Self:
        """From the tensors of `layers.0.`; the config is asked for what no tensor shows: the head count and the norm's epsilon."""
        latent = next((name for name in tensors if ".kv_a_proj" in name), None)
        if latent is not None:
            raise LoadError(f"{source}: its layers have latent attention (tensor {latent}), as heads for Kimi have; expected layers "
                            "with q_proj, k_proj and v_proj: no others are read here")
        q, k, o, up = (needed(tensors, f"layers.0.{name}.weight", source)
                       for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"))
        q_norm = tensors.get("layers.0.self_attn.q_norm.weight")
        rows = q.shape[0]
        dim = int(config.get("head_dim") or 0) or rows // int(config.get("num_attention_heads") or HEADS)
        dim = dim if q_norm is None else q_norm.shape[0]
        if dim < 2 or dim % 2 or rows % dim or k.shape[0] % dim or rows % max(k.shape[0], 1):
            raise LoadError(f"{source}: queries of {rows} rows and keys of {k.shape[0]} do not divide into heads of {dim}; "
                            "expected head_dim and num_attention_heads in config.json to fit the tensors")
        activation = config.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise LoadError(f"{source}: hidden_act is {activation!r}; expected silu, with which draft heads are published")
        eps = float(config.get("rms_norm_eps") or EPS)
        return cls(o.shape[0], up.shape[0], rows // dim, k.shape[0] // dim, dim, eps, q_norm is not None)

    @classmethod
    def like(cls, parts: TargetParts, **sizes: Any) -> Self:
        """The target's own sizes, but for those given."""
        config = parts.config.get_text_config()
        heads = int(sizes.get("heads") or getattr(config, "num_attention_heads", 0) or max(1, config.hidden_size // 64))
        hidden = int(sizes.get("hidden") or config.hidden_size)
        return cls(hidden, int(sizes.get("inner") or getattr(config, "intermediate_size", 0) or 3 * hidden), heads,
                   int(sizes.get("kv_heads") or getattr(config, "num_key_value_heads", 0) or heads),
                   int(sizes.get("head_dim") or getattr(config, "head_dim", 0) or hidden // heads),
                   float(getattr(config, "rms_norm_eps", None) or EPS), bool(sizes.get("qk_norm")))

    def config(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden, "intermediate_size": self.inner, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "rms_norm_eps": self.eps, "hidden_act": "silu"}


class HeadAttention(nn.Module):
    """Rotary self-attention whose inputs may be wider than its output."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.qkv: nn.Module | None = None

    def join(self) -> None:
        if self.qkv is None:
            self.qkv = HeldLinear(*joined([self.q_proj, self.k_proj, self.v_proj]))
            del self.q_proj, self.k_proj, self.v_proj

    @cached_property
    def norms(self) -> Tensor | None:
        """[heads + kv_heads, D] as kernels read the norms of heads, made when it is first asked for; None if there are none."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return torch.cat([self.q_norm.weight.expand(self.shape.heads, -1), self.k_norm.weight.expand(self.shape.kv_heads, -1)])

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, layer: int) -> Tensor:
        rows, dim, heads, kv_heads = x.shape[0], self.shape.head_dim, self.shape.heads, self.shape.kv_heads
        if self.qkv is None:
            q, k, v = (project(x).view(rows, -1, dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        else:
            q, k, v = self.qkv(x).view(rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        turned = rotate(torch.cat((q, k), 1), *turn)
        out: Tensor = self.o_proj(attend(layer, turned[:, :heads], turned[:, heads:], v))
        return out


class HeadLayer(nn.Module):
    """A Llama decoder layer; without `input_norm`, as the first layer of EAGLE-1, its input goes into attention as it is."""

    def __init__(self, shape: Shape, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps) if input_norm else None
        self.self_attn = HeadAttention(shape, shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMlp(shape.hidden, shape.inner)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, layer: int, beside: Tensor | None = None) -> Tensor:
        y = x + self.self_attn(x if self.input_layernorm is None else self.input_layernorm(x), turn, attend, layer)
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


class FirstLayer(nn.Module):
    """Attention over embedding (beside) and hidden state (x) side by side; the residual is the hidden state's."""

    def __init__(self, shape: Shape, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = HeadAttention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMlp(shape.hidden, shape.inner)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, layer: int, beside: Tensor | None = None) -> Tensor:
        assert beside is not None, "the embedding"
        normed = self.hidden_norm(x)
        y = self.self_attn(torch.cat((self.input_layernorm(beside), normed), -1), turn, attend, layer)
        y = y + (normed if self.norm_before_residual else x)
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


class HeadLayers(nn.ModuleList):
    """A head's layers, one after the other. Parameters are named as in a list. windows: how far each sees, if any slides; a `HeadPass` is
    told so here, recordings are for texts that fit them (`whole`), and training looks at them itself."""

    windows: Sequence[int | None] = ()
    _table: ctypes.Array[llama.Layer] | None = None

    def forward(self, x: Tensor, rope: Rope, positions: Tensor, attend: Attend | Runs, beside: Tensor | None = None) -> Tensor:
        """x, beside [R, H], entries at positions [R] → [R, H]."""
        if isinstance(attend, Runs):
            return attend.run(self, x, beside)
        passes = [attend.within(window) for window in self.windows or (None,)] if isinstance(attend, HeadPass) else []
        table = self.table() if served(x) and passes and rope.whole and len(set(self.windows)) < 2 else None
        if table is not None:
            cos, sin = rope.angles(positions, x.dtype)
            x = x.clone(memory_format=torch.contiguous_format)
            llama.blocks(table, 0, len(self), x, cos, sin, passes[0].courses(), beside)
            return x
        turn = rope(positions)
        for number, layer in enumerate(self):
            x = layer(x, turn, passes[number] if len(passes) > 1 else passes[0] if passes else attend, number, beside)
        return x

    def whole(self, entries: int) -> bool:
        """Whether every layer sees all of so many entries."""
        return all(window is None or entries <= window for window in self.windows)

    def table(self) -> ctypes.Array[llama.Layer] | None:
        """The layers for the kernels; None unless every product of every layer is one of ours."""
        if self._table is None and all(isinstance(part, StreamedLinear) for layer in self for part in _products(layer)):
            self._table = (llama.Layer * len(self))(*(self._kernel(layer) for layer in self))
        return self._table

    def _kernel(self, layer: Any) -> llama.Layer:
        """A layer for `llama.blocks`; keys and values are the courses' own."""
        shape, first, after = layer.self_attn.shape, isinstance(layer, FirstLayer), layer.post_attention_layernorm.weight
        before, of_stream = (norm and norm.weight for norm in (layer.input_layernorm, layer.hidden_norm if first else None))
        scales = (native.Scale.of(weight, shape.eps, after.dtype)
                  for weight in (before, after, None, None, layer.self_attn.norms, of_stream))
        return llama.Layer(
            *(part.product for part in _products(layer)), *scales, shape.head_dim ** -0.5, 1.0, shape.heads, shape.kv_heads, shape.head_dim,
            shape.head_dim, normed=first and layer.norm_before_residual, value_dim=shape.head_dim)


def _products(layer: Any) -> list[Any]:
    """A layer's products as it serves, in `llama.Layer`'s order."""
    return [layer.self_attn.qkv, layer.self_attn.o_proj, layer.mlp.gate_up, layer.mlp.down_proj]
