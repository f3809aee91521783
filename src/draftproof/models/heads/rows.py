"""A head's layers on a GPU by our own kernels (../../gpu/): ten kernels a layer, each begun while the one before ends, in place of fifty.

What a step of a head reads is little, so that finding and starting operations is what it takes. The lines of torch in layers.py are the
twin; with them heads are trained, and what has no kernel here goes through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import gpu
from ..between import signed
from ..packed import pack
from ..rows import Plan, linear, turned
from .blocks import RMSNorm
from .layers import FirstLayer, HeadLayers, Runs, Shape

SIGHT = 128                 # entries behind a row's position that it may be told to see
PAGE = 2 * gpu.BLOCK        # entries of a slot that attention counts as a page: pools have room for whole ones
ACT = nn.SiLU()


def by_rows(head: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Give its products to our kernels, in place, where they run and know its layers; whether they do."""
    if not (knows(head) and gpu.available(device, dtype)[0]):
        return False
    pack(head, linear(False))
    return True


def knows(head: Any) -> bool:
    layers = getattr(head, "layers", None)
    if not isinstance(layers, HeadLayers) or not head.rope.whole:
        return False
    return gpu.QUERIES >= group(head)


def group(head: Any) -> int:
    """Query heads of a key head."""
    shape: Shape = head.shape
    return shape.heads // shape.kv_heads


def angles_of(head: Any, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, 2, D] of positions [n], as `gpu.calls.turn` takes them."""
    cos, sin = head.rope(positions)
    return torch.stack((cos, signed(sin)), 1).to(dtype)


class LinePass(Runs):
    """Over slots of a pool [layers, 2, slots, room, kv, D]. angles [rows, 2, D] · plan: where entries go, counted over all slots,
    and how rows attend · sight: as of `gpu.calls.attend`."""

    def __init__(self, store: Tensor, angles: Tensor, plan: Plan, sight: Tensor | None = None) -> None:
        assert all(x.is_contiguous() for x in (store, angles, plan.write_to, *plan.tiles[:3])), "kernels read numbers as they lie"
        self.store, self.angles, self.plan, self.sight = store.flatten(2, 3), angles, plan, sight

    def run(self, layers: HeadLayers, x: Tensor, beside: Tensor | None) -> Tensor:
        for layer, store in zip(layers, self.store, strict=True):
            x = self._layer(layer, store, x, beside)
        return x

    def _layer(self, layer: Any, store: Tensor, x: Tensor, beside: Tensor | None) -> Tensor:
        from ...gpu.calls import attend

        attention, before, (keys, values) = layer.self_attn, layer.input_layernorm, store
        if isinstance(layer, FirstLayer):
            assert beside is not None and before is not None, "the embedding"
            normed = _norm(layer.hidden_norm, x)
            h, y = torch.cat((_norm(before, beside), normed), -1), normed if layer.norm_before_residual else x.clone()
        else:
            h, y = x if before is None else _norm(before, x), x.clone()
        norms, shape = None, attention.shape
        if attention.q_norm is not None:
            norms = torch.cat([attention.q_norm.weight.expand(shape.heads, -1), attention.k_norm.weight.expand(shape.kv_heads, -1)])
        heads = turned(attention.qkv, h, self.angles, norms, shape.eps, self.plan, keys, values)
        y = attention.o_proj.onto(y, attend(heads, keys, values, self.plan.tiles, shape.head_dim ** -0.5, None, PAGE, sight=self.sight))
        out: Tensor = layer.mlp.down_proj.onto(y, layer.mlp.gate_up.gated(ACT, _norm(layer.post_attention_layernorm, y), x.dtype))
        return out


def _norm(module: RMSNorm, x: Tensor) -> Tensor:
    from ...gpu.calls import norm

    return norm(x.contiguous(), module.weight, module.eps)
