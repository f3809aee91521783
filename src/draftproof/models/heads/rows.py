"""A head's layers on a GPU by our own kernels (../../gpu/): ten kernels a layer, each begun while the one before ends, in place of fifty.

What a step of a head reads is little, so that finding and starting operations is what it takes. The lines of torch in layers.py are the
twin; with them heads are trained, and what has no kernel here goes through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import gpu
from ...errors import LoadError
from ..between import signed
from ..packed import pack
from ..rows import TOLERANCE, Plan, linear, turned
from .blocks import RMSNorm
from .cache import SlotPass
from .layers import Attend, FirstLayer, HeadLayers, Runs, Shape

SIGHT = 128                 # entries behind a row's position that it may be told to see
PAGE = 2 * gpu.BLOCK        # entries of a slot that attention counts as a page: pools have room for whole ones
ACT = nn.SiLU()


def by_rows(head: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Give its products to our kernels, in place, where they run and know its layers; whether they do. Raises LoadError where they compute
    something else than the lines of torch."""
    if not (knows(head) and gpu.available(device, dtype)[0]):
        return False
    with torch.inference_mode():
        right, before = _tried(head, device, dtype, False)
        pack(head, linear(False))
        found, _ = _tried(head, device, dtype, True)
        rounding = torch.finfo(dtype).eps * before.abs().max()              # of what is added to that
        off = float(((found - right).abs().max() - rounding) / (right - before).abs().max())
    if not off <= TOLERANCE:
        raise LoadError(f"our kernels and torch's operations differ by {off:.1e} of what a draft head computes; expected at most "
                        f"{TOLERANCE:.0e}: leave them out (--no-kernels), and report this")
    return True


def _tried(head: Any, device: torch.device, dtype: torch.dtype, ours: bool) -> tuple[Tensor, Tensor]:
    """float32 [rows, H]: outputs of a head's layers for five random entries of a text, and for two guesses behind it that do not see each
    other; and what the first layer adds to."""
    rows, dice = torch.arange(7, device=device), torch.Generator(device).manual_seed(0)
    x, beside = (torch.randn(7, head.shape.hidden, generator=dice, device=device).to(dtype) for _ in range(2))
    store = torch.zeros(head.depth, 2, 1, 2 * PAGE, head.kv_heads, head.head_dim, dtype=dtype, device=device)
    table, seats = torch.arange(2, device=device)[None], gpu.seats(group(head))
    found = []
    for start, stop in ((0, 5), (5, 7)):
        own, new = rows[start:stop], rows[:stop - start]
        at = own.clamp(max=4)
        attend: Attend | Runs = SlotPass(store, own, new[None], _sees(own, 2 * PAGE)[None], new)
        if ours:
            take = torch.full((-(-len(own) // seats) * seats,), -1, device=device)
            take[:len(own)] = new
            sight = torch.stack((torch.where(own > 4, 1 << (own - 5).clamp(min=0), 0), 0 * own), 1)
            tiles = gpu.Tiles(at, take, table, len(take) // seats)
            attend = LinePass(store, angles_of(head, own, dtype), Plan(own, new, tiles, True), sight)
        found.append(head.layers(x[start:stop], head.rope, own, attend, beside[start:stop]))
    first = head.layers[0]
    return torch.cat(found).float(), (first.hidden_norm(x) if getattr(first, "norm_before_residual", False) else x).float()


def _sees(own: Tensor, room: int) -> Tensor:
    """[n, room]: the entries up to the fifth and to each one's own place, but for the other guess."""
    entry = torch.arange(room, device=own.device)
    return (entry <= own[:, None].clamp(max=4)) | (entry == own[:, None])


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
        shape = attention.shape
        heads = turned(attention.qkv, h, self.angles, attention.norms, shape.eps, self.plan, keys, values)
        y = attention.o_proj.onto(y, attend(heads, keys, values, self.plan.tiles, shape.head_dim ** -0.5, None, PAGE, sight=self.sight))
        out: Tensor = layer.mlp.down_proj.onto(y, layer.mlp.gate_up.gated(ACT, _norm(layer.post_attention_layernorm, y), x.dtype))
        return out


def _norm(module: RMSNorm, x: Tensor) -> Tensor:
    from ...gpu.calls import norm

    return norm(x.contiguous(), module.weight, module.eps)
