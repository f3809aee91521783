"""The pieces that draft heads are made of: RMSNorm, rotary positions, the gated MLP. Names of parameters are Llama's.

To serve, `join` puts products of one input together, and where there are compiled kernels (../native.py) the small operations between
products run through them: a head's step is so short that finding and calling twenty operations takes longer than its weights. The lines of
torch beside them are their twins, by which heads are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ... import native
from ...errors import LoadError
from ..attention import compiled
from ..between import angles_held, signed
from ..packed import HeldLinear, joined


def served(x: Tensor) -> bool:
    """Whether x passes through a head that serves, where there are compiled kernels for it."""
    return torch.is_inference_mode_enabled() and compiled(x.device, x.dtype)


def join(module: nn.Module) -> None:
    """Join the products below `module` that have one input, in place, to serve: their weights have other names then."""
    for part in list(module.modules()):
        own = getattr(part, "join", None)
        if own is not None:
            own()


class RMSNorm(nn.Module):
    """x / rms(x) · weight, over the last dimension, in float32 inside (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] == self.weight.shape and x.dtype == self.weight.dtype and served(x):
            return native.norm(x.contiguous(), self.weight, self.eps)
        if torch.is_inference_mode_enabled() and not x.is_cpu and x.dtype == self.weight.dtype:
            # one operation in place of eight, of which it rounds the last alone
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.gate_up: nn.Module | None = None

    def join(self) -> None:
        if self.gate_up is None:
            self.gate_up = HeldLinear(*joined([self.gate_proj, self.up_proj]))
            del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up is None:
            inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        else:
            both: Tensor = self.gate_up(x)
            if served(both):
                inner = native.gate(both)
            else:
                gate, up = both.chunk(2, -1)
                inner = functional.silu(gate) * up
        out: Tensor = self.down_proj(inner)
        return out


class Rope(nn.Module):
    """Rotary positions (Su et al., arXiv 2104.09864) from a config's own fields: theta, partial factor and scaling.

    Reads `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling`, `partial_rotary_factor` (before). The base must be
    the one of training, exactly: a wrong one costs the acceptance and nothing says so.
    """

    inv_freq: Tensor

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        super().__init__()
        rope = _rotary(config)
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        kind = "default" if kind == "mrope" else kind       # positions in text, height and width: in a text they are one
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        factor = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
        self.rotary = int(head_dim * factor)
        self.scale = 1.0
        if kind == "default":
            frequencies = 1.0 / theta ** (torch.arange(0, self.rotary, 2, dtype=torch.float64).float() / self.rotary)
        else:
            known = {"hidden_size": head_dim, "num_attention_heads": 1, **config, "head_dim": head_dim, "rope_theta": theta,
                     "partial_rotary_factor": factor, "rope_scaling": {**rope, "rope_type": kind, "rope_theta": theta},
                     "rope_parameters": {**rope, "rope_type": kind, "rope_theta": theta, "partial_rotary_factor": factor}}
            like = SimpleNamespace(**known, standardize_rope_params=lambda: None)
            try:
                frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](like, torch.device("cpu"))
            except (KeyError, AttributeError, TypeError) as error:
                raise LoadError(f"the head's rope is of type {kind!r} with {', '.join(sorted(rope))} (failed at {error}); expected "
                                f"default, mrope or {', '.join(ROPE_INIT_FUNCTIONS)}, and all that it needs, in config.json") from error
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.whole = self.rotary == head_dim
        self._table: Tensor | None = None

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [n, rotary] float32 of positions [n]."""
        angles = positions[:, None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same [n, 1, rotary] of a dtype as `native.turn` takes them, sin negative in its first half, out of a table."""
        found = self.table(int(positions.max()) + 1, dtype)[positions]
        return found[:, :1], found[:, 1:]

    def table(self, count: int, dtype: torch.dtype) -> Tensor:
        """[positions, 2, rotary] of at least so many positions: cos, and sin with its first half negative."""
        if self._table is None or self._table.dtype != dtype or self._table.shape[0] < count:
            cos, sin = self(torch.arange(angles_held(count)))
            self._table = torch.stack((cos, signed(sin)), 1).to(dtype)
        return self._table


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields. Raises LoadError where kinds of layers have their own and the head is of several kinds: it has one rope."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    told = {kind: fields for kind, fields in rope.items() if isinstance(fields, dict)}
    if not told:
        return rope
    mine = [told[kind] for kind in dict.fromkeys(config.get("layer_types") or told) if kind in told]
    if not mine or any(fields != mine[0] for fields in mine):
        raise LoadError(f"the head's rope_parameters has fields for every kind of layer ({', '.join(told)}); expected one rope "
                        "for all layers of the head")
    return dict(mine[0])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, D] turned by cos, sin [n, rotary]; dimensions behind `rotary` stay (half-split layout, as Llama's)."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
