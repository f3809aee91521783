"""Fused layers that look back through a recurrent state, not through attention.

    q, k, v = silu(convolve(qkv(norm(x))))

    DeltaLayer    S ← kept · S;  S ← S + k ⊗ (v − Sᵀk) · written    x ← x + o(norm(Sᵀq) · silu(gate))               Qwen3-Next, OLMo Hybrid
    KimiDeltaLayer    the same with each row of S kept by itself    x ← x + o(norm(Sᵀq) · sigmoid(gate))            Kimi Linear, Ling 3
    SpaceLayer    S ← kept · S + k ⊗ v · written                    x ← x + o(norm((Sᵀq + skip v) · silu(gate)))    Bamba, Nemotron-H
    ShortLayer                                                      x ← x + o(convolve(v · before) · gate)          LFM2
    BothLayer     attention and a state space beside each other: one product before them, and one behind            Falcon-H1

the gated delta rule (Yang et al., arXiv 2412.06464), Kimi's form of it (arXiv 2510.26692), a state space (Mamba-2: Dao & Gu, arXiv
2405.21060), and a convolution alone, without keys (arXiv 2511.23404). One product makes queries, keys, values, how much of each head is
written and kept, and gates. What a layer needs of the text before stands in states.py. kernels/recurrence.c runs all of it; `_go` is its
plain twin, which the tests hold it against.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import native, recurrences
from .cache import PagePool
from .families import GATED_NORM, ONLY, OUT, Family, Norms, looking_back, part_of, state_of
from .fused import FusedLayer, scale_of
from .levels import LevelWeight
from .packed import HeldLinear, Linear, joined, packed, times
from .passes import Pass
from .ropes import Rope
from .shares import kept


class StateLayer(FusedLayer):
    """memory: a text's states, [value_heads, key_dim · value_dim], STRIPE values at a time; row: numbers of a row in its history, of which
    the first `channels` go through the convolution; reach: how many rows before it that reads; number: which of such layers of the model
    it is (states.py)."""

    number = 0
    first = 0  # where its numbers begin among those that the first product makes
    memory: tuple[int, ...]
    _made: recurrences.Recurrence | None = None
    key_heads: int
    taps: Tensor  # of the convolution, [reach + 1, channels],
    bias: Tensor | None  # and [channels];
    sharp = False  # what it makes is rounded behind silu alone

    @property
    def state(self) -> Self:
        return self

    def _take(self, layer: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        attention = looking_back(layer)
        self.o = kept(part_of(attention, OUT), linear)
        self.written_kept: nn.Module | None = None  # what makes how much of each head is written and kept, if it is a product of its own
        order, scalars = self._shape(attention)
        weight, bias = joined(list(_parts(attention)))
        self.qkv = linear(weight, bias) if order is None else linear(weight[order], None if bias is None else bias[order])
        self.channels = 2 * self.key_heads * self.head_dim + self.heads * self.value_dim
        self.row, self.reach = self.channels + scalars * self.heads, len(self.taps) - 1
        self.memory = self.heads, self.head_dim * self.value_dim
        forgets = getattr(attention, "forget_gate", attention)
        if hasattr(forgets, "A_log"):
            self.decay, self.shift = forgets.A_log.detach().float().exp().flatten(), forgets.dt_bias.detach().float()

    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        """Sets sizes and what the convolution has; the order of the first product's rows (None: as they stand), and how many numbers of
        each head stand between values and gates."""
        raise AssertionError("each kind has its own")

    def _look_back(self, entered: Tensor, made: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        made, beside = self._behind(entered, made)
        if self.ours:
            return recurrences.recall(self._recurrence(), p.course(), made, beside)
        seen = torch.empty(len(made), self.heads * self.value_dim, dtype=made.dtype)
        rows, gates = self._rows_and_gates(made, beside)
        for walk in p.walks:
            self._go(walk, rows, gates, seen)
        return seen

    def _behind(self, entered: Tensor, made: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the first product made, and, of the gated delta rule, how much is written and kept."""
        return made, None if self.written_kept is None else self.written_kept(entered)

    def _rows_and_gates(self, made: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows as the history has them, and gates."""
        made = made[:, self.first :]
        if beside is None:
            return made[:, : self.row], made[:, self.row :]
        return torch.cat([made[:, : self.channels], beside], 1), made[:, self.channels :]

    def _go(self, walk: native.Walk, rows: Tensor, gates: Tensor, seen: Tensor) -> None:
        """One text's way: states and history are left as kernels/recurrence.c leaves them."""
        reach, history = self.reach, walk.history[self.number]
        before = torch.cat([history[:reach], history[[reach + place for place in walk.owed]]])
        widths = [min(native.STRIPE, self.value_dim - start) for start in range(0, self.value_dim, native.STRIPE)]
        stripes = torch.split(walk.memory[self.number], [self.head_dim * wide for wide in widths], 1)
        memory = torch.cat([stripe.view(self.heads, self.head_dim, wide) for stripe, wide in zip(stripes, widths, strict=True)], 2)
        for number, line in enumerate(walk.lines):
            all_rows, guessed = torch.cat([before, rows[line]]), memory
            for element in range(walk.taken if number else 0, len(all_rows) - reach):
                guessed, found = self._step(guessed, all_rows[element : element + reach + 1])
                if number == 0 and element < walk.taken:
                    memory = guessed
                if element >= len(walk.owed):
                    row = line[element - len(walk.owed)]
                    seen[row] = self._finish(found, gates[row].view(self.heads, -1)).flatten()
        walk.memory[self.number] = torch.cat([stripe.flatten(1) for stripe in torch.split(memory, native.STRIPE, 2)], 1)
        end = torch.cat([before, rows[walk.first : walk.first + walk.rows]])[walk.taken :]
        history[: len(end)] = end

    def _convolved(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [value_heads, n], float32, of the last of rows [reach + 1, …]."""
        sums = (rows[:, : self.channels].float() * self.taps).sum(0)
        sums = (sums if self.bias is None else sums + self.bias).to(torch.float32 if self.sharp else rows.dtype)
        found = (functional.silu(sums) if self.key_heads else sums).to(rows.dtype).float()
        keys, each = self.key_heads * self.head_dim, self.heads // max(self.key_heads, 1)
        query, key = (found[start : start + keys].view(self.key_heads, self.head_dim).repeat_interleave(each, 0) for start in (0, keys))
        return query, key, found[2 * keys :].view(self.heads, -1)

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The state [heads, key_dim, value_dim] behind the last of rows [reach + 1, …], and what that row sees [heads, value_dim]."""
        raise AssertionError("each kind has its own")

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        """[heads, value_dim], normed and gated."""
        raise AssertionError("each kind has its own")

    def address(self) -> int:
        """For kernels/block.c."""
        return ctypes.addressof(self._recurrence())

    def _recurrence(self) -> recurrences.Recurrence:
        """One for all pools."""
        if self._made is None:
            self._made = self._told()
        return self._made

    def _told(self) -> recurrences.Recurrence:
        raise AssertionError("each kind has its own")

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.key_heads, self.heads, self.head_dim, self.value_dim


class DeltaLayer(StateLayer):
    keeps = 1  # how many numbers tell how much of a head is kept
    most = 1.0  # that is written; above 1 what is kept may change its sign
    floor = 0.0  # the least logarithm of what is kept; 0: there is none
    coarse = False  # that logarithm is rounded
    opened_by = native.SILU

    def _take(self, layer: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        super()._take(layer, linear, family, rope)
        self.written_kept = _exactly(*self._written_kept(looking_back(layer)), linear)

    def _written_kept(self, attention: Any) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of what makes how much is written, and kept."""
        if not hasattr(attention, "in_proj_ba"):
            return joined([part_of(attention, names) for names in (("in_proj_b", "b_proj"), ("in_proj_a", "a_proj"))])
        weight, bias = attention.in_proj_ba.weight.detach(), attention.in_proj_ba.bias
        order = _in_parts(torch.arange(2 * self.heads).view(self.key_heads, -1), [self.heads // self.key_heads] * 2)
        return weight[order], None if bias is None else bias[order]

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.written_kept]

    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        self.key_heads, self.heads = attention.num_k_heads, attention.num_v_heads
        self.head_dim, self.value_dim = attention.head_k_dim, attention.head_v_dim
        self.taps, self.bias = attention.conv1d.weight.detach()[:, 0].float().T.contiguous(), None
        norm = part_of(attention, GATED_NORM)
        self.of_sight, self.most = (norm.weight.detach(), norm.variance_epsilon), 1.0 + getattr(attention, "allow_neg_eigval", False)
        if not hasattr(attention, "in_proj_qkvz"):
            return None, 2
        values = self.heads // self.key_heads * self.value_dim  # Qwen3-Next's rows stand by heads of keys
        rows = torch.arange(2 * self.key_heads * (self.head_dim + values)).view(self.key_heads, -1)
        return _in_parts(rows, [self.head_dim, self.head_dim, values, values]), 2

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self._convolved(rows)
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        written, told = torch.split(rows[-1, self.channels :], [self.heads, self.heads * self.keeps])
        state = state * torch.exp(self._power((told.float() + self.shift).view(self.heads, -1)))[..., None]
        new = (value - (state * key[..., None]).sum(1)) * (written.sigmoid().float() * self.most)[:, None]
        state = state + key[..., None] * new[:, None]
        return state, (state * (query / self.head_dim**0.5)[..., None]).sum(1)

    def _power(self, told: Tensor) -> Tensor:
        """The logarithm of what is kept [heads, keeps]."""
        found: Tensor = -self.decay[:, None] * functional.softplus(told)
        return found

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        weight, eps = self.of_sight
        wide = found.to(gate.dtype).float()
        normed: Tensor = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(gate.dtype) * weight
        return (normed * functional.silu(gate.float())).to(gate.dtype)

    def _told(self) -> recurrences.Recurrence:
        return recurrences.Recurrence.of(recurrences.DELTA, self.taps, None, self._sizes(), self.number, self.decay, self.shift,
                                         scale_of(self.of_sight, self.dtype), limits=(self.floor, math.inf), share=self.most,
                                         products=self._beside(), keeps=self.keeps, opened_by=self.opened_by, sharp=self.sharp,
                                         coarse=self.coarse)

    def _beside(self) -> tuple[native.Product | None, ...]:
        """Products between the first one and the last, where the whole pass is one call."""
        return getattr(self.written_kept, "product", None), None, None


class KimiDeltaLayer(DeltaLayer):
    """Where the first products make less than what is kept and gates, decays and gates are products of low rank behind them."""

    opened_by = native.SIGMOID

    def _take(self, layer: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        super()._take(layer, linear, family, rope)
        attention = looking_back(layer)
        forgets = attention.forget_gate
        self.sharp = attention.conv1d.weight.dtype != self.dtype
        self.floor = float(forgets.lower_bound) if getattr(forgets, "safe_gate", False) else 0.0
        self.coarse = hasattr(forgets, "f_proj")
        self.decays: nn.Module | None = None
        self.opens: nn.Module | None = None
        if not self.coarse:
            self.decays, self.opens = _exactly(forgets.f_b_proj.weight, None, linear), linear(attention.g_b_proj.weight, None)

    def _written_kept(self, attention: Any) -> tuple[Tensor, Tensor | None]:
        return joined([attention.b_proj, part_of(attention.forget_gate, ("f_proj", "f_a_proj"))])

    def _parts(self) -> list[Any]:
        return [*super()._parts(), *(part for part in (self.decays, self.opens) if part is not None)]

    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        self.key_heads = self.heads = attention.num_heads
        self.keeps = self.head_dim = self.value_dim = attention.head_dim
        self.taps, self.bias = attention.conv1d.weight.detach()[:, 0].float().T.contiguous(), None
        norm = part_of(attention, GATED_NORM)
        self.of_sight = norm.weight.detach().float(), norm.variance_epsilon
        return None, 1 + self.keeps

    def _behind(self, entered: Tensor, made: Tensor) -> tuple[Tensor, Tensor | None]:
        made, beside = super()._behind(entered, made)
        if self.decays is None or self.opens is None or beside is None:
            return made, beside
        told, opened = beside[:, self.heads :].contiguous(), made[:, self.channels :].contiguous()
        return torch.cat([made[:, : self.channels], self.opens(opened)], 1), torch.cat([beside[:, : self.heads], self.decays(told)], 1)

    def _power(self, told: Tensor) -> Tensor:
        found = self.floor * torch.sigmoid(self.decay[:, None] * told) if self.floor else super()._power(told)
        return found.to(self.dtype).float() if self.coarse else found

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        weight, eps = self.of_sight
        wide = found.to(gate.dtype).float()
        normed: Tensor = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight
        return (normed * gate.float().sigmoid()).to(gate.dtype)

    def _beside(self) -> tuple[native.Product | None, ...]:
        return tuple(getattr(part, "product", None) for part in (self.written_kept, self.decays, self.opens))


class SpaceLayer(StateLayer):
    sight_share = 1.0  # what a row sees is taken times it

    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        self.key_heads, self.heads = attention.n_groups, attention.num_heads
        self.head_dim, self.value_dim = attention.ssm_state_size, attention.head_dim
        keys, values = self.key_heads * self.head_dim, self.heads * self.value_dim
        v, k, q = torch.split(torch.arange(2 * keys + values), [values, keys, keys])
        channels = torch.cat([q, k, v])
        conv = attention.conv1d
        self.taps = conv.weight.detach()[channels, 0].float().T.contiguous()
        self.bias = None if conv.bias is None else conv.bias.detach()[channels].float()
        self.skip: Tensor = attention.D.detach().float()
        self.limits: tuple[float, float] = tuple(map(float, attention.time_step_limit))  # type: ignore[assignment]
        norm = attention.norm
        self.of_sight = None if isinstance(norm, nn.Identity) else (norm.weight.detach().float(), norm.variance_epsilon)
        size = getattr(norm, "group_size", None)
        self.groups: int = getattr(norm, "n_groups", 1) if size is None else len(norm.weight) // size
        written = torch.arange(self.heads) + 2 * values + 2 * keys
        return torch.cat([values + channels, written, torch.arange(values)]), 1

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self._convolved(rows)
        written = functional.softplus(rows[-1, self.channels :] + self.shift.to(rows.dtype)).clamp(*self.limits).float()
        state = state * torch.exp(-self.decay * written)[:, None, None] + key[..., None] * (value * written[:, None])[:, None]
        return state, (state * query[..., None]).sum(1) + value * self.skip[:, None]

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        wide = (found * functional.silu(gate.float())).view(self.groups, -1)
        if self.of_sight is not None:
            weight, eps = self.of_sight
            wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.view(self.groups, -1)
        return (wide * self.sight_share).to(gate.dtype)

    def _told(self) -> recurrences.Recurrence:
        norm = None if self.of_sight is None else native.Scale.of(*self.of_sight, torch.float32)
        return recurrences.Recurrence.of(recurrences.SPACE, self.taps, self.bias, self._sizes(), self.number, self.decay, self.shift, norm,
                                         self.skip, self.groups, self.limits, self.sight_share, self.first)


class ShortLayer(StateLayer):
    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        """Its numbers are as good as heads of one stripe each."""
        conv, hidden = attention.conv, attention.conv.in_channels
        self.key_heads, self.heads, self.head_dim, self.value_dim = 0, hidden // native.STRIPE, 0, native.STRIPE
        self.taps = conv.weight.detach()[:, 0].float().T.contiguous()
        self.bias = None if conv.bias is None else conv.bias.detach().float()
        return None, 0

    def _rows_and_gates(self, made: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
        value, gate, before = made.view(len(made), 3, -1).unbind(1)
        return value * before, gate

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return state, self._convolved(rows)[2]

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        return found.to(gate.dtype) * gate

    def _told(self) -> recurrences.Recurrence:
        return recurrences.Recurrence.of(recurrences.SHORT, self.taps, self.bias, self._sizes(), self.number)


class Unmade(nn.Module):
    """A weight [out, in] and a bias, of which one product is made with others."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias, self.out_features = weight, bias, weight.shape[0]


class BothLayer(FusedLayer):
    """Attention and a state space that read the same rows, and of which the sum is added (Falcon-H1, arXiv 2507.22448). What they are
    multiplied by is taken where a product or a state is rounded anyway, so that no weight is."""

    @property
    def state(self) -> SpaceLayer:
        return self._state[0]

    def _take(self, layer: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        super()._take(layer, Unmade, family, rope)
        space, attention, keys = layer.mamba, layer.self_attn, self.kv_heads * self.head_dim
        alone = SpaceLayer(SimpleNamespace(**{ONLY: space}), Unmade, None, Family("", Norms(None, None, None), mlp=ONLY))
        asked, told = float(layer.attention_in_multiplier), float(layer.attn_out_multiplier)    # values are taken times the latter
        sizes, factors = (self.heads * self.head_dim, keys, keys), (asked, asked * attention.key_multiplier, asked * told)
        alone.first, alone.sight_share = sum(sizes), float(layer.ssm_out_multiplier)
        own = space.mup_vector.flatten()[alone._shape(space)[0]].float() * space.ssm_in_multiplier
        by = torch.cat([*(torch.full((size,), factor) for size, factor in zip(sizes, factors, strict=True)), own])
        for part, entered in ((self.qkv, asked), (alone.qkv, space.ssm_in_multiplier)):     # of rows that are multiplied a bias is not
            part.bias = None if part.bias is None else part.bias.detach() / entered
        self.qkv = times(linear(*joined([self.qkv, alone.qkv])), by)
        biases = [part.bias.detach() * share for part, share in ((self.o, told), (alone.o, alone.sight_share)) if part.bias is not None]
        self.o = linear(torch.cat([self.o.weight, alone.o.weight], 1), sum(biases) if biases else None)
        alone.qkv = alone.o = None
        alone._products = ()
        self._state = (alone,)

    def _look_back(self, entered: Tensor, made: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        seen = super()._look_back(entered, made[:, : self.state.first], angles, p, pool)
        return torch.cat([seen, self.state._look_back(entered, made, angles, p, pool)], 1)


def state_layer(layer: Any) -> type[FusedLayer]:
    """What stands for a layer that has a state."""
    if looking_back(layer) is not state_of(layer):
        return BothLayer
    if hasattr(state_of(layer), "forget_gate"):
        return KimiDeltaLayer
    return DeltaLayer if hasattr(layer, "linear_attn") else ShortLayer if hasattr(layer, "conv") else SpaceLayer


def _parts(attention: Any) -> Iterator[Any]:
    for name in ("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "q_proj", "k_proj", "v_proj", "g_proj", "g_a_proj"):
        if hasattr(attention, name):
            yield getattr(attention, name)


def _exactly(weight: Tensor, bias: Tensor | None, linear: Linear) -> nn.Module:
    """A product that is never rounded to fewer bits."""
    return (linear if isinstance(weight, LevelWeight) or linear is HeldLinear else packed)(weight, bias)


def _in_parts(rows: Tensor, sizes: list[int]) -> Tensor:
    """Of rows [heads, …], which stand by heads, the order in which the parts of these sizes stand one below the other."""
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, 1)])
