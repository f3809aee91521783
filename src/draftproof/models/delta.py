"""A fused layer of linear attention by the gated delta rule (Yang et al., arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.

    q, k, v = silu(convolve(qkv(norm(x))))      S ← decay · S;  S ← S + k ⊗ (v − Sᵀk) · written       x ← x + o(norm(Sᵀq) · silu(gate))

One product makes queries, keys, values, how much of each head is written and kept, and gates. What it needs of the text before stands in
states.py. kernels/delta.c runs all of it; `_look_back` without it is the plain twin, which the tests hold it against.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from .. import deltas, llama, native
from .cache import PagePool
from .families import Family, Rope
from .fused import FusedLayer, scale_of
from .packed import Linear, joined
from .passes import Pass


class DeltaLayer(FusedLayer):
    """memory: a text's states, [value_heads, stripes, key_dim, STRIPE]; row: numbers of a row in its history, of which the first `channels`
    go through the convolution; reach: how many rows before it that reads; number: which of such layers of the model it is (states.py)."""

    number = 0

    def _take(self, attention: Any, linear: Linear, family: Family, rope: Rope | None) -> None:
        self.key_heads, self.heads, self.kv_heads = attention.num_k_heads, attention.num_v_heads, 0
        self.head_dim, self.value_dim = attention.head_k_dim, attention.head_v_dim
        self.window, self.cap, self.sinks, self.scaling, self.turned = None, None, None, 1.0, 0
        self.rope = rope or Rope(0)
        weight, bias = joined(_parts(attention))
        order = _order(attention)
        self.qkv = linear(*((weight, bias) if order is None else (weight[order], bias)))
        self.channels = 2 * self.key_heads * self.head_dim + self.heads * self.value_dim
        self.row = self.channels + 2 * self.heads
        self.memory = self.heads, self.value_dim // native.STRIPE, self.head_dim, native.STRIPE
        self.taps = attention.conv1d.weight.detach()[:, 0].float().T.contiguous()
        self.reach = len(self.taps) - 1
        self.decay, self.shift = attention.A_log.detach().float().exp(), attention.dt_bias.detach().float()
        self.of_sight = attention.norm.weight.detach(), attention.norm.variance_epsilon

    def _look_back(self, made: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        if self.ours:
            return deltas.recall(self.kernel(pool), p.course(), made)
        seen = torch.empty(len(made), self.heads * self.value_dim, dtype=made.dtype)
        for walk in p.walks:
            self._go(walk, made, seen)
        return seen

    def _go(self, walk: native.Walk, made: Tensor, seen: Tensor) -> None:
        """One text's way: states and history are left as kernels/delta.c leaves them."""
        reach, rows, history = self.reach, made[:, : self.row], walk.history[self.number]
        before = torch.cat([history[:reach], history[[reach + place for place in walk.owed]]])
        memory = walk.memory[self.number].transpose(1, 2).reshape(self.heads, self.head_dim, -1)
        for number, line in enumerate(walk.lines):
            all_rows, guessed = torch.cat([before, rows[line]]), memory
            for element in range(walk.taken if number else 0, len(all_rows) - reach):
                guessed, found = self._step(guessed, all_rows[element : element + reach + 1])
                if number == 0 and element < walk.taken:
                    memory = guessed
                if element >= len(walk.owed):
                    row = line[element - len(walk.owed)]
                    gate = made[row, self.row :].view(self.heads, -1)
                    seen[row] = self._finish(found.to(made.dtype), gate).flatten()
        walk.memory[self.number] = memory.reshape(self.heads, self.head_dim, -1, native.STRIPE).transpose(1, 2)
        end = torch.cat([before, rows[walk.first : walk.first + walk.rows]])[walk.taken :]
        history[: len(end)] = end

    def _step(self, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The state [heads, key_dim, value_dim] behind the last of rows [reach + 1, …], and what that row sees [heads, value_dim]."""
        sums = (rows[:, : self.channels].float() * self.taps).sum(0).to(rows.dtype)
        found = nn.functional.silu(sums).float()
        keys = self.key_heads * self.head_dim
        query, key = (part.view(self.key_heads, -1).repeat_interleave(self.heads // self.key_heads, 0)
                      for part in (found[:keys], found[keys : 2 * keys]))
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        written, held = rows[-1, self.channels :].view(2, self.heads)
        by = torch.exp(-self.decay * nn.functional.softplus(held.float() + self.shift))
        state = state * by[:, None, None]
        new = (found[2 * keys :].view(self.heads, -1) - (state * key[..., None]).sum(1)) * written.sigmoid().float()[:, None]
        state = state + key[..., None] * new[:, None]
        return state, (state * (query / self.head_dim**0.5)[..., None]).sum(1)

    def _finish(self, found: Tensor, gate: Tensor) -> Tensor:
        """[heads, value_dim], normed and gated."""
        weight, eps = self.of_sight
        wide = found.float()
        normed: Tensor = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(found.dtype) * weight
        return (normed * nn.functional.silu(gate.float())).to(found.dtype)

    def kernel(self, pool: PagePool) -> llama.Layer:
        made = super().kernel(pool)
        made.delta = ctypes.addressof(self._delta())
        return made

    def _storage(self, pool: PagePool) -> tuple[int, int]:
        return 0, 0

    def _delta(self) -> deltas.Delta:
        """One for all pools."""
        if not hasattr(self, "_told"):
            self._told = deltas.Delta.of(self.taps, self.decay, self.shift, scale_of(self.of_sight, self.dtype), self.key_heads,
                                         self.head_dim, self.value_dim, self.number)
        return self._told


def _parts(attention: Any) -> list[Any]:
    if hasattr(attention, "in_proj_qkvz"):
        return [attention.in_proj_qkvz, attention.in_proj_ba]
    return [attention.in_proj_qkv, attention.in_proj_b, attention.in_proj_a, attention.in_proj_z]


def _order(attention: Any) -> Tensor | None:
    """Of Qwen3-Next's rows, which stand by heads of keys: queries, keys, values, written, kept, gates; None: they stand so."""
    if not hasattr(attention, "in_proj_qkvz"):
        return None
    heads, each = attention.num_k_heads, attention.num_v_heads // attention.num_k_heads
    key, value = attention.head_k_dim, each * attention.head_v_dim
    qkvz = torch.arange(heads * 2 * (key + value)).view(heads, -1)
    q, k, v, z = torch.split(qkvz, [key, key, value, value], 1)
    b, a = torch.split(torch.arange(heads * 2 * each).view(heads, -1) + qkvz.numel(), [each, each], 1)
    return torch.cat([part.flatten() for part in (q, k, v, b, a, z)])
