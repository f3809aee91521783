"""A slim forward pass for models made of Llama's block: one product for q, k and v, one for gate and up, few operations between.

    x ← x + o(attention(rotary(qkv(norm(x)))))        x ← x + down(act(gate(norm(x))) · up(norm(x)))

or, in place of the latter, what a mixture of such experts makes of norm(x) (routed.py); and what families add to that (families.py).

A pass over a few rows is short enough for the interpreter's share to show: transformers' block runs about 60 small operations,
this one about 30. What is computed, and in which order values are rounded, is the same; the models' own forward stays
the plain twin (`load_target(…, fused=False)`), and a test compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import is_not
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import llama, native
from ..core.upload import rows_of
from .attention import attend, compiled
from .between import Between, angles_held, row_norm, tiled_norm, turn
from .cache import PagePool
from .families import (
    ACTS,
    DOWN,
    FAMILIES,
    GATES,
    LAST_NORM,
    OUT,
    Family,
    Rope,
    cos_and_sin,
    halves_apart,
    looking_back,
    norm_of,
    part_of,
    rope_of,
    rotary_of,
    scaled,
)
from .joins import gate_up_of, gates_last, qkv_of
from .packed import HeldLinear, Linear, StreamedLinear
from .passes import Pass
from .routed import Routed
from .shares import bare, kept
from .states import states_of
from .taps import SideBySide
from .target import TargetParts
from .tiled import InTiles


class FusedLayer(nn.Module):
    """One block with its products joined. Stands in the model's own list of layers and can be called as they are."""

    heads: int
    kv_heads: int
    value_dim: int
    memory: tuple[int, ...] = ()  # the shape of recurrent states
    openings = 0  # gates of what attention gives, which the first product makes behind values

    def __init__(self, layer: Any, linear: Linear, between: Between | None = None, family: Family = FAMILIES["llama"],
                 rope: Rope | None = None) -> None:
        """between: what stands for the block's own choice; rope: None for one that turns whole heads."""
        super().__init__()
        attention, mlp = looking_back(layer), family.mlp_of(layer)
        out, down = part_of(attention, OUT), part_of(mlp, DOWN)
        self.layer_idx, self.share = attention.layer_idx, float(getattr(layer, "residual_multiplier", 1))
        self.dtype, device = (getattr(bare(out).weight, name) for name in ("dtype", "device"))
        self._take(attention, linear, family, rope)
        self.o = kept(out, linear)
        self.routed = Routed(mlp, linear, family.routing(mlp), layer) if hasattr(mlp, "experts") else None
        if self.routed is None:
            self.gate_up, self.down = linear(*gate_up_of(mlp)), kept(down, linear)
        named: Any = part_of(mlp, ("act_fn", "activation_fn", "act", "activation"))
        self.act: Any = self.routed.act_fn if self.routed else nn.SiLU() if named is None else named
        inner: Any = self.routed.inner if self.routed else bare(down).in_features
        self.inner: int = inner
        self.parallel, self.turned_first, norms = family.parallel, family.turned_first, family.norms_of(layer)
        self.input_norm: Any = norms[0]
        self.mlp_norm: Any = norms[2]
        # bound once: finding and calling a module costs as much as a small operation
        self._products = tuple(part.forward for part in self._parts())
        self.ours = between is None and compiled(device, self.dtype)
        tiled = isinstance(self.qkv, InTiles)
        plain = Between(native.norm, native.turn) if self.ours else Between(tiled_norm if tiled else row_norm, turn, tiled=tiled)
        found = between or plain
        self._norm, self._turn, self._weigh, self._tiled = found.norm, found.turn, found.weigh, found.tiled
        kind, alone = ACTS.get(type(self.act)), part_of(mlp, GATES) is None
        self.gates, self.kind = self.ours and kind is not None, kind or native.SILU
        plainly = self.act if alone else partial(found.gate, self.act)
        self._gate = partial(native.gate, act=self.kind, alone=alone) if self.gates else plainly
        self._norms: list[Any] = [norm and norm_of(norm, family) for norm in norms]
        self.head_norm: Tensor | None = None  # [heads + kv_heads, head_dim], Qwen 3's norm of each head
        self.head_bias: list[Tensor] = []     # one, if it is centred
        self.as_one = False                   # or OLMo 2's of all queries and all keys
        if hasattr(attention, family.head_norms[0]):
            queries, keys = (norm_of(getattr(attention, name), family) for name in family.head_norms)
            self._take_head_norms(queries, keys, family.adjoining)

    def _take(self, attention: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        """All of that but the last product."""
        self.scaling = attention.scaling
        self.head_dim: int = getattr(attention, "qk_head_dim", None) or attention.head_dim
        self.window = family.window(attention)
        self.rope = rope or Rope(self.head_dim)
        self.turned = self.rope.numbers if family.turns(attention) else 0
        self.cap: float | None = getattr(attention, "attn_logit_softcapping", None)
        sinks = getattr(attention, "sinks", None)
        self.sinks = None if sinks is None else sinks.detach().float().contiguous()
        self._join(attention, linear, family)

    def _join(self, attention: Any, linear: Linear, family: Family) -> None:
        """The product before attention, and how many heads there are."""
        weight, bias = qkv_of(attention)
        sight: Any = bare(part_of(attention, OUT)).in_features
        self.heads, self.value_dim = sight // self.head_dim, self.head_dim
        if family.gated:
            order = gates_last(self.heads, self.head_dim, len(weight))
            weight, bias = weight[order], None if bias is None else bias[order]
        self.openings = sight if family.gated else 0 if getattr(attention, "g_proj", None) is None else self.heads
        self.kv_heads = ((len(weight) - self.openings) // self.head_dim - self.heads) // 2
        apart = family.adjoining and self._apart(weight.shape[0])
        self.qkv = linear(*((weight, bias) if apart is False else (weight[apart], None if bias is None else bias[apart])))

    def _take_head_norms(self, queries: tuple[Any, ...], keys: tuple[Any, ...], adjoining: bool) -> None:
        """Those of `norm_of`: of a head, of each head, or of all as one."""
        self.as_one, self.head_eps = queries[0].dim() == 1 and queries[0].numel() > self.head_dim, queries[1]
        order, counts = self._order() if adjoining else slice(None), (self.heads, self.kv_heads)
        self.head_norm, *self.head_bias = (
            torch.cat([part.view(-1, self.head_dim).expand(n, -1) for part, n in zip(parts, counts, strict=True)])[:, order].contiguous()
            for parts in zip(queries[::2], keys[::2], strict=True))
        assert not (self.as_one and self.head_bias), "a centred norm of all heads"

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
        return [self.qkv, self.o, *([self.gate_up, self.down] if self.routed is None else ())]

    def run(self, x: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        """x [rows, hidden], which is overwritten; angles [rows, 2 ropes, n], of each cos, and sin, negative in its first half
        → [rows, hidden]."""
        to_qkv, to_out, *mlp = self._products
        before, of_attention, after, of_mlp = self._norms
        entered = x if before is None else self._norm(x, *before)
        out = self._look_back(entered, to_qkv(entered), angles, p, pool)
        aside = self._norm(x, *after) if self.parallel else None
        x = self._add(x, to_out(out), of_attention)
        h = aside if aside is not None else x if after is None else self._norm(x, *after)
        return self._add(x, mlp[1](self._gate(mlp[0](h))) if self.routed is None else self.routed(h), of_mlp)

    def _look_back(self, entered: Tensor, made: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        """What rows see, [rows, …], of what the first product read and made [rows, …]."""
        behind = made.shape[1] - self.openings
        q, k, v = self._heads(made[:, :behind], angles)
        out = attend(self.layer_idx, q, k, v, self.scaling, self.window, p, pool, self.cap, self.sinks, self._weigh).reshape(len(made), -1)
        if not self.openings:
            return out
        gate = made[:, behind:].repeat_interleave(out.shape[1] // self.openings, 1)
        return native.gate(torch.cat([gate, out], 1), native.SIGMOID) if self.ours else out * gate.sigmoid()

    def _heads(self, made: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, n] of what the first product made [rows, …]."""
        turned, first = self.heads + self.kv_heads, 2 * self.rope.number
        heads = made.view(len(made), -1, self.head_dim)
        qk = heads[:, :turned]
        if self.head_norm is not None and not self.turned_first:
            qk = self._head_normed(qk, self.head_norm)
        if self.turned:
            qk = self._turn(qk, angles[:, first : first + 1], angles[:, first + 1 : first + 2])
        if self.head_norm is not None and self.turned_first:
            qk = self._head_normed(qk, self.head_norm)
        return qk[:, : self.heads], qk[:, self.heads :], heads[:, turned:]

    def _head_normed(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Queries and keys [rows, heads + kv_heads, head_dim], normed head by head, or all queries as one, and keys."""
        if not self.as_one:
            return self._norm(qk, weight, self.head_eps, *self.head_bias)
        sizes = [self.heads, self.kv_heads]
        parts = zip(torch.split(qk, sizes, 1), torch.split(weight, sizes), strict=True)
        return torch.cat([self._norm(part.flatten(1), norm.flatten(), self.head_eps).view_as(part) for part, norm in parts], 1)

    def _add(self, x: Tensor, made: Tensor, norm: tuple[Any, ...] | None) -> Tensor:
        """x += what a block made, normed, and its share taken."""
        if norm is not None:
            made = self._norm(made, *norm)
        return x.add_(made if self.share == 1 else made * self.share)

    def placed(self, p: Pass) -> Pass:
        """The pass, ready for `run`."""
        return p.placed()

    def streamed(self) -> list[StreamedLinear]:
        """Its products but for those of experts, if the block runs through our kernels alone; else none."""
        found = [part for part in self._parts() if isinstance(part, StreamedLinear)]
        behind = self.gates if self.routed is None else self.routed.compiled
        return found if self.ours and behind and len(found) == len(self._parts()) else []

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
        products = [part.product for part in self.streamed()[: 4 if self.routed is None else 2]]
        if self.routed is not None:
            products += [native.Product(), native.Product()]
        return llama.Layer(
            *products, *scales, self.scaling, self.share, self.heads, self.kv_heads, self.head_dim, self.turned, self.rope.number,
            self.window or 0, self.as_one, 0, self.kind, native.address_of(self.sinks), keys, values,
            None if self.routed is None else self.routed.address(), None, self.cap or 0, self.turned_first, self.parallel, self.openings)

    def _storage(self, pool: PagePool) -> tuple[int, int]:
        """Where its keys and values are."""
        ones = (torch.empty(0, self.kv_heads, dim, dtype=self.dtype) for dim in (self.head_dim, self.value_dim))
        keys, values = pool.storage(self.layer_idx, *ones)
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
        return self.run(hidden_states[0].clone(), angles, draftproof_pass, draftproof_pool)[None]


def scale_of(norm: tuple[Any, ...], dtype: torch.dtype) -> native.Scale:
    """What `norm_of` tells, for rows of this type."""
    weight, eps, *bias = norm
    return native.Scale.of(weight, eps, dtype, *bias)


class FusedPass:
    """The whole forward pass over a model whose layers are `FusedLayer`s. Keeps taps, as `Taps` does, without hooks."""

    def __init__(self, model: Any) -> None:
        self.embed, self.output = model.get_input_embeddings(), model.get_output_embeddings()
        self.layers: list[FusedLayer] = list(model.model.layers)
        body = model.model
        self.rotary, self.ropes = rotary_of(body), sorted({layer.rope for layer in self.layers}, key=lambda rope: rope.number)
        self.moving = any(rope.moves for rope in self.ropes)
        self._norm, self._last = self.layers[0]._norm, norm_of(part_of(body, LAST_NORM), FAMILIES[model.config.model_type])
        self._enlarged = float(getattr(body, "embedding_multiplier", 1))
        self._finished = TargetParts(config=model.config).finished
        self.states = states_of(self.layers)
        self.angles: Tensor | None = None  # [positions, 2 ropes, n]: of each cos, and sin with its first half negated
        self.taps: frozenset[int] = frozenset()
        self.rows: Mapping[int, Tensor] = {}
        self._table: tuple[tuple[PagePool, int, int], ctypes.Array[llama.Layer] | None] | None = None
        self._whole: tuple[tuple[Any, ...], llama.Model | None] | None = None  # what it was made of

    def rows_alone(self) -> bool:
        """Whether a row may stand alone, because its bits do not depend on the number of rows: every product and attention is ours, or
        every product and sum has one shape."""
        if all(layer.tile() for layer in self.layers):
            return isinstance(self.output, InTiles)
        return self.compiled() and isinstance(self.output, StreamedLinear)

    def first(self, count: int) -> Self:
        """The pass over the first `count` layers alone, with taps of its own."""
        cut = copy(self)
        cut.layers = self.layers[:count]
        cut.set(())
        return cut

    def set(self, chosen: Sequence[int]) -> None:
        """From the next pass on `rows` holds the outputs [rows, hidden] of these layers."""
        wanted = frozenset(chosen)
        if wanted != self.taps:
            assert all(0 <= layer < len(self.layers) for layer in wanted), f"layers {chosen} of {len(self.layers)}"
            self.taps, self.rows = wanted, {}

    def __call__(self, p: Pass, pool: PagePool, keep: Sequence[int] | None) -> Tensor:
        """Logits [len(keep), V] of the rows in `keep`, or of all."""
        self._reach(max(p.position_list) + 1)
        model = self._model(pool)
        if model is None:
            return self.compute(self.layers[0].placed(p), pool, keep)
        taps = sorted(self.taps)
        logits, tapped = llama.forward(model, p.course(), p.ids, taps, keep)
        self.rows = {} if tapped is None else SideBySide(taps, tapped)
        return self._finished(logits)

    def compute(self, p: Pass, pool: PagePool, keep: Sequence[int] | None) -> Tensor:
        """The same where the table of angles reaches, and the plain twin of `llama.forward`. Without `keep`, and but for compiled kernels
        and moving angles, it looks at nothing but tensors, so that graphs.py can record it."""
        x = self.embed(p.ids[0])
        if self._enlarged != 1:
            x = x * self._enlarged
        angles = self._measure(x, p.positions) if self.angles is None else self.angles[p.positions[0]]
        cos, sin = angles[:, :1], angles[:, 1:2]
        table, ran = self._kernels(pool), 0
        rows: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if table is None:
                x = layer.run(x, angles, p, pool)
            elif number in self.taps or number == len(self.layers) - 1:
                llama.blocks(table, ran, number + 1, x, cos, sin, [p.course()])
                ran = number + 1
            if number in self.taps:
                rows[number] = x.clone()
        self.rows = rows
        if keep is not None:
            x = rows_of(x, keep)
        return self._finished(self.output(self._norm(x, *self._last)))

    def compiled(self) -> bool:
        """Whether every layer runs through our kernels alone."""
        return all(layer.streamed() for layer in self.layers)

    def _kernels(self, pool: PagePool) -> ctypes.Array[llama.Layer] | None:
        """The layers for `llama.blocks`, made anew when the pool's storage has moved; None if they do not all run through it."""
        key = pool, pool.allocated, len(self.layers)
        if self._table is None or self._table[0] != key:
            layers = (llama.Layer * len(self.layers))(*(layer.kernel(pool) for layer in self.layers)) if self.compiled() else None
            self._table = key, layers
        return self._table[1]

    def _model(self, pool: PagePool) -> llama.Model | None:
        """The model for `llama.forward`, made anew when a part of it has moved; None if not all of it is our kernels'."""
        parts = self._kernels(pool), self.angles, self.output, self.embed
        if self._whole is None or any(map(is_not, self._whole[0], parts)):
            self._whole = parts, self._model_of(*parts)
        return self._whole[1]

    def _model_of(self, layers: ctypes.Array[llama.Layer] | None, angles: Tensor | None, output: Any, embed: Any) -> llama.Model | None:
        if layers is None or angles is None or not isinstance(output, StreamedLinear):
            return None
        factor = 1.0 if type(embed) is nn.Embedding and embed.max_norm is None else scaled(embed)
        if factor is None or embed.weight.dtype != self.layers[0].dtype:
            return None
        norm = scale_of(self._last, embed.weight.dtype)
        return llama.Model.of(layers, output.product, norm, embed.weight, angles, factor * self._enlarged)

    def _reach(self, positions: int) -> None:
        """A table of angles for so many positions; none where the angles move."""
        if not self.moving and (self.angles is None or self.angles.shape[0] < positions):
            held, like = angles_held(positions), self.embed.weight
            self.angles = self._measure(like, torch.arange(held, device=like.device)[None])

    def _measure(self, like: Tensor, positions: Tensor) -> Tensor:
        """The model's own angles at positions [1, n], as they are used here."""
        if self.rotary is None:
            return like.new_empty(positions.numel(), 2, 0)
        return torch.cat([rope.angles(*cos_and_sin(self.rotary(like, positions, *rope.kind))) for rope in self.ropes], 1)


def fuse(model: Any, linear: Linear | None, between: Between | None = None,
         kind: Callable[[Any], type[FusedLayer]] = lambda _: FusedLayer) -> None:
    """Replace the model's layers by fused ones, in place and one at a time, so that no more than one layer is held twice. linear: what
    makes a layer of a weight and a bias; None: torch's own. between: for `FusedLayer`; kind: what stands for a layer."""
    body, family = model.model, FAMILIES[model.config.model_type]
    for number, layer in enumerate(body.layers):
        body.layers[number] = kind(layer)(layer, linear or HeldLinear, between, family, rope_of(body, number, family.paired))
