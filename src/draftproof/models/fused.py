"""A slim forward pass for models made of Llama's block: one product for q, k and v, one for gate and up, few operations between.

    x ← x + o(attention(rotary(qkv(norm(x)))))        x ← x + down(act(gate(norm(x))) · up(norm(x)))

or, in place of the latter, what a mixture of such experts makes of norm(x) (routed.py); and what families add to that (families.py).

A pass over a few rows is short enough for the interpreter's share to show: transformers' block runs about 60 small operations,
this one about 30. What is computed, and in which order values are rounded, is the same; the models' own forward stays
the plain twin (`load_target(…, fused=False)`), and a test compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import llama, native
from .attention import attend, compiled
from .between import Between, bends_of, row_norm, tiled_norm, turn
from .cache import PagePool
from .experts import ACTS
from .families import (
    DOWN,
    FAMILIES,
    GATES,
    OPENING,
    OUT,
    SIDES,
    Family,
    body_of,
    head_dim_of,
    layers_of,
    looking_back,
    norm_of,
    part_of,
    settles,
)
from .joins import gates_last, mlp_of, qkv_of
from .key_levels import head_bytes
from .packed import HeldLinear, Linear, StreamedLinear, straighten, times
from .passes import Pass
from .ropes import Rope, behind, cos_and_sin, halves_apart, rope_of, stretch_of
from .routed import Routed
from .shares import bare, kept
from .sides import Abreast, lender_of
from .tiled import InTiles


class FusedLayer(nn.Module):
    """One block with its products joined. Stands in the model's own list of layers and can be called as they are."""

    heads = 0  # as all that stands here, of a layer that does not look back
    kv_heads = 0
    head_dim = 0
    value_dim = 0
    window: int | None = None
    turned = 0
    scaling = 1.0
    cap: float | None = None
    sinks: Tensor | None = None
    borrowed: int | None = None  # the layer whose keys and values it reads; None: its own
    values_normed = False  # as heads are
    factor = 1.0  # what the stream leaves with is taken times it
    openings = 0  # gates of what attention gives, which the first product makes behind values,
    opened_by = native.SIGMOID  # and the function that they open by
    stretch: Callable[[Tensor], Tensor] | None = None  # of positions, by what queries there are taken times

    def __init__(self, layer: Any, linear: Linear, between: Between | None = None, family: Family = FAMILIES["llama"],
                 rope: Rope | None = None) -> None:
        """between: what stands for the block's own choice; rope: None for one that turns whole heads."""
        super().__init__()
        attention, mlp = looking_back(layer), family.mlp_of(layer)
        out, down = part_of(attention, OUT), part_of(mlp, DOWN)
        last = out or down
        like: Any = mlp.experts.down_proj if last is None else bare(last).weight
        self.layer_idx = part_of(attention or layer, ("layer_idx", "layer_id"))
        self.share = float(part_of(layer, ("residual_multiplier", "residual_scale")) or 1)
        self.dtype, device, self.hidden = like.dtype, like.device, like.shape[-2]
        self.rope = rope or Rope(0)
        self.qkv: Any = None  # a part that a layer lacks has no products
        self.o: Any = None
        self.gate_up: Any = None
        self.down: Any = None
        if attention is not None:
            self._take(layer, linear, family, rope)
        block = family.mixture_of(layer)
        self.routed = None if block is None else Routed(block, linear, family.routing(block), layer)
        self.abreast = Abreast(layer, family) if block is layer else None
        self.dense = block is not mlp   # it has an MLP, perhaps beside experts
        if self.dense:
            self.gate_up, self.down = mlp_of(mlp, linear)
        named: Any = part_of(mlp, ("act_fn", "activation_fn", "act", "activation"))
        self.act: Any = self.routed.act_fn if self.routed else nn.SiLU() if named is None else named
        inner: Any = self.routed.inner if self.routed else 0 if down is None else bare(down).in_features
        self.inner: int = inner
        self.parallel = family.is_parallel(layer)
        self.turned_first, norms = family.turned_first, family.norms_of(layer)
        self.settles = settles(layer)
        self.input_norm: Any = norms[0]
        self.mlp_norm: Any = norms[2]
        self._take_side(layer, linear, family)
        # bound once: finding and calling a module costs as much as a small operation
        self._products = tuple(part.forward for part in self._parts())
        self.ours = between is None and compiled(device, self.dtype)
        tiled = isinstance(self.qkv, InTiles)
        plain = Between(native.norm, native.turn) if self.ours else Between(tiled_norm if tiled else row_norm, turn, tiled=tiled)
        found = between or plain
        self._norm, self._turn, self._weigh, self._tiled = found.norm, found.turn, found.weigh, found.tiled
        kind, alone = ACTS.get(type(self.act)), part_of(mlp, GATES) is None
        self.bends = bends_of(self.act)
        self.gates, self.kind = self.ours and (kind is not None or self.bends is not None), kind or native.SILU
        plainly = self.act if alone else partial(found.gate, self.act)
        ours = partial(native.gate, act=self.kind, alone=alone) if self.bends is None else partial(native.bend, bends=self.bends)
        self._gate = ours if self.gates else plainly
        self._norms: list[Any] = [norm and norm_of(norm, family, self.hidden) for norm in norms]
        self.head_norm: Tensor | None = None  # [heads + kv_heads, head_dim], Qwen 3's norm of each head
        self.head_bias: list[Tensor] = []     # one, if it is centred
        self.as_one = False                   # or OLMo 2's of all queries and all keys
        if hasattr(attention, family.head_norms[0]):
            parts = [part for name in family.head_norms if (part := getattr(attention, name, None)) is not None]
            told = [norm_of(part, family, self.head_dim) for part in parts]
            self.values_normed = hasattr(attention, "v_norm")
            if self.values_normed:
                told.append((torch.ones(self.head_dim), attention.v_norm.eps))
            self._take_head_norms(told, family.adjoining)

    @property
    def state(self) -> Any:
        """What its recurrent states are told by (state_layers.py); None: it has none."""
        return None

    def _take(self, layer: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        """The part that looks back."""
        attention = looking_back(layer)
        out, bias = part_of(attention, OUT), getattr(attention, "dense_bias", None)    # which GPT-NeoX Japanese has beside the last one
        self.o = kept(out, linear) if bias is None else linear(out.weight, bias)
        self.scaling = family.scaling_of(attention)
        self.head_dim = head_dim_of(attention)
        self.window = family.window(attention)
        self.rope = rope or Rope(self.head_dim)
        self.turned = self.rope.numbers if family.turns(attention) else 0
        self.stretch = stretch_of(attention) if family.stretched else None
        self.cap: float | None = getattr(attention, "attn_logit_softcapping", None)
        sinks = getattr(attention, "sinks", None)
        self.sinks = None if sinks is None else sinks.detach().float().contiguous()
        self._join(attention, linear, family)

    def _join(self, attention: Any, linear: Linear, family: Family) -> None:
        """The product before attention, and how many heads there are."""
        weight, bias = qkv_of(attention)
        sight: Any = bare(part_of(attention, OUT)).in_features
        self.value_dim = getattr(attention, "v_head_dim", self.head_dim)
        self.heads = sight // self.value_dim
        if family.gated:
            order = gates_last(self.heads, self.head_dim, len(weight))
            weight, bias = weight[order], None if bias is None else bias[order]
        opening, self.opened_by = part_of(attention, OPENING), family.opened_by
        self.openings = sight if family.gated else 0 if opening is None else opening.out_features
        self.kv_heads = (len(weight) - self.openings - self.heads * self.head_dim) // (self.head_dim + self.value_dim)
        if getattr(attention, "is_kv_shared_layer", False):
            self.borrowed, self.kv_heads = lender_of(attention), self.heads // attention.num_key_value_groups
        apart = family.adjoining and self._apart(weight.shape[0])
        made = linear(*((weight, bias) if apart is False else (weight[apart], None if bias is None else bias[apart])))
        share, values = getattr(attention, "v_scale", 1), torch.arange(len(weight)) >= len(weight) - self.kv_heads * self.value_dim
        self.qkv = made if share == 1 else times(made, torch.where(values, share, 1.0))

    def _take_head_norms(self, norms: Sequence[tuple[Any, ...]], adjoining: bool) -> None:
        """Those of `norm_of`, of queries, keys and values, as far as they are normed: of a head, of each head, or of all as one."""
        queries = norms[0]
        self.as_one, self.head_eps = queries[0].dim() == 1 and queries[0].numel() > self.head_dim, queries[1]
        order, counts = self._order() if adjoining else slice(None), (self.heads, self.kv_heads, self.kv_heads)
        self.head_norm, *self.head_bias = (
            torch.cat([part.view(-1, self.head_dim).expand(n, -1) for part, n in zip(parts, counts, strict=False)])[:, order].contiguous()
            for parts in zip(*(norm[::2] for norm in norms), strict=True))
        assert not (self.as_one and self.head_bias), "a centred norm of all heads"

    def _take_side(self, layer: Any, linear: Linear, family: Family) -> None:
        """What the layer adds last, of what stands beside its rows, and what the stream leaves with."""
        self.side_norm: tuple[Any, ...] | None = None
        if (gate := getattr(layer, SIDES[0], None)) is not None:
            self.side_gate, self.side_last = linear(gate.weight, None), linear(getattr(layer, SIDES[1]).weight, None)
            self.side_norm = norm_of(getattr(layer, SIDES[2]), family)
        scalar = getattr(layer, "layer_scalar", None)
        self.factor = 1.0 if scalar is None else float(scalar)

    def _order(self) -> Tensor:
        """A head's numbers in `halves_apart`'s order, and those that are not turned."""
        return torch.cat([halves_apart(self.rope.numbers), torch.arange(self.rope.numbers, self.head_dim)])

    def _apart(self, rows: int) -> Tensor:
        """The rows of q, k and v in that order."""
        order = torch.arange(rows).view(-1, self.head_dim)
        order[: self.heads + self.kv_heads] = order[: self.heads + self.kv_heads, self._order()]
        return order.flatten()

    def _parts(self) -> list[Any]:
        """Its products but for those of experts."""
        beside = () if self.side_norm is None else (self.side_gate, self.side_last)
        return [part for part in (self.qkv, self.o, self.gate_up, self.down, *beside) if part is not None]

    def run(self, x: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        """x [rows, hidden], which is overwritten; angles [rows, 2 ropes, n], of each cos, and sin, negative in its first half
        → [rows, hidden]."""
        before, of_attention, after, of_mlp = self._norms
        aside = self._norm(x, *after) if self.parallel else None
        look, mlp = (self._products[:2], self._products[2:]) if self.o is not None else ((), self._products)
        if look:
            to_qkv, to_out = look
            entered = x if before is None else self._norm(x, *before)
            x = self._add(x, to_out(self._look_back(entered, to_qkv(entered), angles, p, pool)), of_attention)
        if self.inner:
            h = aside if aside is not None else x if after is None else self._norm(x, *after)
            made = mlp[1](self._gate(mlp[0](h))) if self.dense else h
            if self.routed is not None:
                made = self.routed(h) if self.abreast is None else self.abreast(x, made, self.routed, self._norm)
            x = self._add(x, made, of_mlp)
        if self.side_norm is not None:
            x = self._add(x, self._of_side(x, p), self.side_norm)
        return x if self.factor == 1 else x.mul_(self.factor)

    def _of_side(self, x: Tensor, p: Pass) -> Tensor:
        """What the layer makes of x and of what stands beside its rows, [rows, hidden]."""
        assert p.sides is not None
        gate = self.side_gate(x)
        gate = native.gate(gate, self.kind, alone=True) if self.ours else self.act(gate)
        return self.side_last(gate * p.sides[:, self.layer_idx])            # type: ignore[no-any-return]

    def _look_back(self, entered: Tensor, made: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        """What rows see, [rows, …], of what the first product read and made [rows, …]."""
        behind = made.shape[1] - self.openings
        q, k, v = self._heads(made[:, :behind], angles)
        source = self.layer_idx if self.borrowed is None else self.borrowed
        out = attend(source, q, k, v, self.scaling, self.window, p, pool, self.cap, self.sinks, self._weigh).reshape(len(made), -1)
        if not self.openings:
            return out
        gate = made[:, behind:].repeat_interleave(out.shape[1] // self.openings, 1)
        if self.ours:
            return native.gate(torch.cat([gate, out], 1), self.opened_by)
        return out * (gate.sigmoid() if self.opened_by == native.SIGMOID else nn.functional.softplus(gate.float()).to(gate.dtype))

    def _heads(self, made: Tensor, angles: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, keys and values [rows, heads, n] of what the first product made [rows, …]; no keys and values if they are borrowed."""
        turned, first = self.heads + (0 if self.borrowed is not None else self.kv_heads), 2 * self.rope.number
        own, kv_heads = turned * self.head_dim, turned - self.heads
        qk, v = made[:, :own].view(len(made), turned, -1), made[:, own:].view(len(made), kv_heads, self.value_dim)
        if self.values_normed and self.head_norm is not None:
            qk, v = torch.split(self._head_normed(made.view(len(made), -1, self.head_dim), self.head_norm), [turned, kv_heads], 1)
        if self.head_norm is not None and not self.turned_first and not self.values_normed:
            qk = self._head_normed(qk, self.head_norm)
        if self.turned:
            qk = self._turn(qk, *(angles[:, i : i + 1, : self.turned] for i in (first, first + 1)))
        if self.stretch is not None:
            qk[:, : self.heads].mul_(angles[:, -1:, :1])
        if self.head_norm is not None and self.turned_first:
            qk = self._head_normed(qk, self.head_norm)
        return (qk, None, None) if self.borrowed is not None else (qk[:, : self.heads], qk[:, self.heads :], v)

    def _head_normed(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Queries and keys [rows, heads + kv_heads, head_dim], normed head by head, or all queries as one, and keys."""
        if not self.as_one:
            return self._norm(qk, weight, self.head_eps, *self.head_bias)
        sizes = [self.heads, self.kv_heads]
        parts = zip(torch.split(qk, sizes, 1), torch.split(weight, sizes), strict=True)
        return torch.cat([self._norm(part.flatten(1), norm.flatten(), self.head_eps).view_as(part) for part, norm in parts], 1)

    def _add(self, x: Tensor, made: Tensor, norm: tuple[Any, ...] | None) -> Tensor:
        """x += what a block made, normed, and its share taken; or all of it, normed."""
        if norm is not None and not self.settles:
            made = self._norm(made, *norm)
        x = x.add_(made if self.share == 1 else made * self.share)
        return self._norm(x, *norm) if norm is not None and self.settles else x

    def placed(self, p: Pass) -> Pass:
        """The pass, ready for `run`."""
        return p.placed()

    def compiled(self) -> bool:
        """Whether the block runs through our kernels alone."""
        behind = (self.gates or not self.dense) and (self.routed is None or self.routed.compiled)
        return self.ours and behind and all(isinstance(part, StreamedLinear) for part in self._parts())

    def streamed(self) -> list[StreamedLinear]:
        """Its products but for those of experts, if it does; else none."""
        return self._parts() if self.compiled() else []

    def tile(self) -> int:
        """The rows of a tile, if every product and sum over a row has one shape (tiled.py); else 0."""
        if self.routed is not None:
            return 0
        tiles = [part.tile for part in map(bare, self._parts()) if isinstance(part, InTiles)]
        return max(tiles) if len(tiles) == 4 and self._tiled else 0

    def kernel(self, pool: PagePool) -> llama.Layer:
        """The block for `llama.blocks`."""
        keys, values = self._storage(pool)
        before, of_attention, after, of_mlp = self._norms
        norms = (before, after, of_attention, of_mlp,
                 self.head_norm is not None and (self.head_norm, self.head_eps, *self.head_bias), None)
        scales = (scale_of(norm, self.dtype) if norm else native.Scale() for norm in norms)
        products = [native.Product() if part is None else part.product for part in (self.qkv, self.o, self.gate_up, self.down)]
        if self.o is None:
            products[1].out = self.hidden
        return llama.Layer(
            *products, *scales, self.scaling, self.share, self.heads, self.kv_heads, self.head_dim, self.turned, self.rope.number,
            self.window or 0, self.as_one, 0, self.kind, native.address_of(self.sinks), keys, values,
            None if self.routed is None else self.routed.address(), None, self.cap or 0, self.turned_first, self.parallel,
            self.stretch is not None, self.opened_by, native.address_of(self.bends), self.openings,
            None if self.state is None else self.state.address(),
            *(None if struct is None else ctypes.addressof(struct) for struct in self._structs), self.factor,
            self.borrowed is not None, self.values_normed, self.settles, value_dim=self.value_dim, rounded=pool.in_levels)

    @cached_property
    def _structs(self) -> tuple[ctypes.Structure | None, ctypes.Structure | None]:
        """What it adds last, and norms of experts beside an MLP. Made once, as every pass over the layers reads them where they lie."""
        side = None if self.side_norm is None else llama.Side(
            self.side_gate.product, self.side_last.product, scale_of(self.side_norm, self.dtype))
        return side, None if self.abreast is None else self.abreast.struct(self.dtype)

    def cache_bytes(self, in_levels: bool) -> int:
        """Of a token's keys and values that it keeps, in eight bits or as they are."""
        each = sum(head_bytes(numbers, self.dtype, in_levels) for numbers in (self.head_dim, self.value_dim))
        return 0 if self.borrowed is not None else self.kv_heads * each

    def _storage(self, pool: PagePool) -> tuple[int, int]:
        """Where its keys and values are, if it has any."""
        if not self.kv_heads:
            return 0, 0
        ones = (torch.empty(0, self.kv_heads, dim, dtype=self.dtype) for dim in (self.head_dim, self.value_dim))
        keys, values = pool.storage(self.layer_idx if self.borrowed is None else self.borrowed, *ones)
        return keys.data_ptr(), values.data_ptr()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        draftproof_pass: Pass,
        draftproof_pool: PagePool,
        **_: Any,
    ) -> Tensor:
        """As a transformers block is called: hidden_states [1, rows, hidden] and (cos, sin) [1, rows, n] of the model's rotary."""
        angles = self.rope.angles(*cos_and_sin(position_embeddings)).repeat(1, self.rope.number + 1, 1)
        if self.stretch is not None:
            angles = behind(angles, self.stretch(draftproof_pass.positions[0]))
        return self.run(hidden_states[0].clone(), angles, draftproof_pass, draftproof_pool)[None]


def scale_of(norm: tuple[Any, ...], dtype: torch.dtype) -> native.Scale:
    """What `norm_of` tells, for rows of this type."""
    weight, eps, *bias = norm
    return native.Scale.of(weight, eps, dtype, *bias)


def fuse(model: Any, linear: Linear | None, between: Between | None = None,
         kind: Callable[[Any], type[FusedLayer]] = lambda _: FusedLayer) -> None:
    """Replace the model's layers by fused ones, in place and one at a time, so that no more than one layer is held twice. linear: what
    makes a layer of a weight and a bias; None: torch's own. between: for `FusedLayer`; kind: what stands for a layer."""
    body, layers, family = body_of(model), layers_of(model), FAMILIES[model.config.model_type]
    for number, layer in enumerate(layers):
        straighten(layer)
        rope = rope_of(body, number, family.paired, family.backward)
        layers[number] = kind(layer)(layer, linear or HeldLinear, between, family, rope)
