"""Fused layers that look back through a recurrent state, not through attention.

    q, k, v = silu(convolve(qkv(norm(x))))

    DeltaLayer    S ← kept · S;  S ← S + k ⊗ (v − Sᵀk) · written    x ← x + o(norm(Sᵀq) · silu(gate))               Qwen3-Next, Qwen3.5
    SpaceLayer    S ← kept · S + k ⊗ v · written                    x ← x + o(norm((Sᵀq + skip v) · silu(gate)))    Bamba, Granite 4
    ShortLayer                                                      x ← x + o(convolve(v · before) · gate)          LFM2

the gated delta rule (Yang et al., arXiv 2412.06464), a state space (Mamba-2: Dao & Gu, arXiv 2405.21060), and a convolution alone, without
keys (arXiv 2511.23404). One product makes queries, keys, values, how much of each head is written and kept, and gates. What a layer needs
of the text before stands in states.py. kernels/recurrence.c runs all of it; `_go` is its plain twin, which the tests hold it against.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import llama, native, recurrences
from .cache import PagePool
from .families import Family
from .fused import FusedLayer, scale_of
from .levels import LevelWeight
from .packed import HeldLinear, Linear, joined, packed
from .passes import Pass
from .ropes import Rope


class StateLayer(FusedLayer):
    """memory: a text's states, [value_heads, stripes, key_dim, STRIPE]; row: numbers of a row in its history, of which the first `channels`
    go through the convolution; reach: how many rows before it that reads; number: which of such layers of the model it is (states.py)."""

    number = 0
    _made: recurrences.Recurrence | None = None
    key_heads: int
    taps: Tensor  # of the convolution, [reach + 1, channels],
    bias: Tensor | None  # and [channels]

    def _take(self, attention: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        self.kv_heads, self.window, self.cap, self.sinks, self.scaling, self.turned = 0, None, None, None, 1.0, 0
        self.rope = rope or Rope(0)
        self.written_kept: nn.Module | None = None  # what makes how much of each head is written and kept, if it is a product of its own
        order, scalars = self._shape(attention)
        weight, bias = joined(list(_parts(attention)))
        self.qkv = linear(weight, bias) if order is None else linear(weight[order], None if bias is None else bias[order])
        self.channels = 2 * self.key_heads * self.head_dim + self.heads * self.value_dim
        self.row, self.reach = self.channels + scalars * self.heads, len(self.taps) - 1
        self.memory = self.heads, self.value_dim // native.STRIPE, self.head_dim, native.STRIPE
        if hasattr(attention, "A_log"):
            self.decay, self.shift = attention.A_log.detach().float().exp(), attention.dt_bias.detach().float()

    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        """Sets sizes and what the convolution has; the order of the first product's rows (None: as they stand), and how many numbers of
        each head stand between values and gates."""
        raise AssertionError("each kind has its own")

    def _look_back(self, entered: Tensor, made: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        beside = None if self.written_kept is None else self.written_kept(entered)
        if self.ours:
            return recurrences.recall(self._recurrence(), p.course(), made, beside)
        seen = torch.empty(len(made), self.heads * self.value_dim, dtype=made.dtype)
        rows, gates = self._rows_and_gates(made, beside)
        for walk in p.walks:
            self._go(walk, rows, gates, seen)
        return seen

    def _rows_and_gates(self, made: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows as the history has them, and gates."""
        if beside is None:
            return made[:, : self.row], made[:, self.row :]
        return torch.cat([made[:, : self.channels], beside], 1), made[:, self.channels :]

    def _go(self, walk: native.Walk, rows: Tensor, gates: Tensor, seen: Tensor) -> None:
        """One text's way: states and history are left as kernels/recurrence.c leaves them."""
        reach, history = self.reach, walk.history[self.number]
        before = torch.cat([history[:reach], history[[reach + place for place in walk.owed]]])
        memory = walk.memory[self.number].transpose(1, 2).reshape(self.heads, self.head_dim, self.value_dim).clone()
        for number, line in enumerate(walk.lines):
            all_rows, guessed = torch.cat([before, rows[line]]), memory
            for element in range(walk.taken if number else 0, len(all_rows) - reach):
                guessed, found = self._step(guessed, all_rows[element : element + reach + 1])
                if number == 0 and element < walk.taken:
                    memory = guessed
                if element >= len(walk.owed):
                    row = line[element - len(walk.owed)]
                    seen[row] = self._finish(found, gates[row].view(self.heads, -1)).flatten()
        walk.memory[self.number] = memory.reshape(self.heads, self.head_dim, self.memory[1], native.STRIPE).transpose(1, 2)
        end = torch.cat([before, rows[walk.first : walk.first + walk.rows]])[walk.taken :]
        history[: len(end)] = end

    def _convolved(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [value_heads, n], float32, of the last of rows [reach + 1, …]."""
        sums = (rows[:, : self.channels].float() * self.taps).sum(0)
        sums = (sums if self.bias is None else sums + self.bias).to(rows.dtype)
        found = (functional.silu(sums) if self.key_heads else sums).float()
        keys, each = self.key_heads * self.head_dim, self.heads // max(self.key_heads, 1)
        query, key = (found[start : start + keys].view(self.key_heads, self.head_dim).repeat_interleave(each, 0) for start in (0, keys))
        return query, key, found[2 * keys :].view(self.heads, -1)

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The state [heads, key_dim, value_dim] behind the last of rows [reach + 1, …], and what that row sees [heads, value_dim]."""
        raise AssertionError("each kind has its own")

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        """[heads, value_dim], normed and gated."""
        raise AssertionError("each kind has its own")

    def kernel(self, pool: PagePool) -> llama.Layer:
        made = super().kernel(pool)
        made.recurrence = ctypes.addressof(self._recurrence())
        return made

    def _storage(self, pool: PagePool) -> tuple[int, int]:
        return 0, 0

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
    def _take(self, attention: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        super()._take(attention, linear, family, rope)
        if hasattr(attention, "in_proj_ba"):
            weight, bias = attention.in_proj_ba.weight.detach(), attention.in_proj_ba.bias
            order = _in_parts(torch.arange(2 * self.heads).view(self.key_heads, -1), [self.heads // self.key_heads] * 2)
            weight, bias = weight[order], None if bias is None else bias[order]
        else:
            weight, bias = joined([attention.in_proj_b, attention.in_proj_a])
        levels = isinstance(weight, LevelWeight)
        self.written_kept = (linear if levels or linear is HeldLinear else packed)(weight, bias)  # never rounded to fewer bits

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.written_kept]

    def _shape(self, attention: Any) -> tuple[Tensor | None, int]:
        self.key_heads, self.heads = attention.num_k_heads, attention.num_v_heads
        self.head_dim, self.value_dim = attention.head_k_dim, attention.head_v_dim
        self.taps, self.bias = attention.conv1d.weight.detach()[:, 0].float().T.contiguous(), None
        self.of_sight = attention.norm.weight.detach(), attention.norm.variance_epsilon
        if not hasattr(attention, "in_proj_qkvz"):
            return None, 2
        values = self.heads // self.key_heads * self.value_dim  # Qwen3-Next's rows stand by heads of keys
        rows = torch.arange(2 * self.key_heads * (self.head_dim + values)).view(self.key_heads, -1)
        return _in_parts(rows, [self.head_dim, self.head_dim, values, values]), 2

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self._convolved(rows)
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        written, held = rows[-1, self.channels :].view(2, self.heads)
        state = state * torch.exp(-self.decay * functional.softplus(held.float() + self.shift))[:, None, None]
        new = (value - (state * key[..., None]).sum(1)) * written.sigmoid().float()[:, None]
        state = state + key[..., None] * new[:, None]
        return state, (state * (query / self.head_dim**0.5)[..., None]).sum(1)

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        weight, eps = self.of_sight
        wide = found.to(gate.dtype).float()
        normed: Tensor = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(gate.dtype) * weight
        return (normed * functional.silu(gate.float())).to(gate.dtype)

    def _told(self) -> recurrences.Recurrence:
        return recurrences.Recurrence.of(recurrences.DELTA, self.taps, None, self._sizes(), self.number, self.decay, self.shift,
                                         scale_of(self.of_sight, self.dtype),
                                         written_kept=getattr(self.written_kept, "product", None))


class SpaceLayer(StateLayer):
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
        self.of_sight = attention.norm.weight.detach().float(), attention.norm.variance_epsilon
        values_normed = len(self.of_sight[0])
        self.groups: int = values_normed // getattr(attention.norm, "group_size", values_normed)  # as one, in older transformers
        written = torch.arange(self.heads) + 2 * values + 2 * keys
        return torch.cat([values + channels, written, torch.arange(values)]), 1

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self._convolved(rows)
        written = functional.softplus(rows[-1, self.channels :] + self.shift.to(rows.dtype)).clamp(*self.limits).float()
        state = state * torch.exp(-self.decay * written)[:, None, None] + key[..., None] * (value * written[:, None])[:, None]
        return state, (state * query[..., None]).sum(1) + value * self.skip[:, None]

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        weight, eps = self.of_sight
        wide = (found * functional.silu(gate.float())).view(self.groups, -1)
        normed: Tensor = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.view(self.groups, -1)
        return normed.to(gate.dtype)

    def _told(self) -> recurrences.Recurrence:
        norm = native.Scale.of(*self.of_sight, torch.float32)
        return recurrences.Recurrence.of(recurrences.SPACE, self.taps, self.bias, self._sizes(), self.number, self.decay, self.shift, norm,
                                         self.skip, self.groups, self.limits)


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


def state_layer(layer: Any) -> type[StateLayer]:
    """What stands for a layer that has a state."""
    return DeltaLayer if hasattr(layer, "linear_attn") else ShortLayer if hasattr(layer, "conv") else SpaceLayer


def _parts(attention: Any) -> Iterator[Any]:
    for name in ("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z"):
        if hasattr(attention, name):
            yield getattr(attention, name)


def _in_parts(rows: Tensor, sizes: list[int]) -> Tensor:
    """Of rows [heads, …], which stand by heads, the order in which the parts of these sizes stand one below the other."""
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, 1)])
