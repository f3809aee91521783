"""A slim forward pass for models made of Llama's block: one product for q, k and v, one for gate and up, few operations between.

    x ← x + o(attention(rotary(qkv(norm(x)))))        x ← x + down(act(gate(norm(x))) · up(norm(x)))

or, in place of the latter, what a mixture of such experts makes of norm(x) (experts.py).

A pass over a few rows is short enough for the interpreter's share to show: transformers' block runs about 60 small operations,
this one about 30. What is computed, and in which order values are rounded, is the same; the models' own forward stays
the plain twin (`load_target(…, fused=False)`), and a test compares the two.

Which models: exact classes of `transformers`, layer by layer. A subclass, a quantised layer or a stranger runs as before.
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

from .. import native
from ..core.upload import rows_of
from .attention import attend, compiled
from .between import Between, angles_held, rms_norm, signed, tiled_norm, turn
from .cache import PagePool
from .experts import SILU, Routed
from .packed import HeldLinear, Linear, StreamedLinear, joined
from .passes import Pass
from .shares import bare, kept
from .taps import SideBySide
from .tiled import InTiles

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
            "qwen3_moe": "Qwen3Moe"}
MOVING_ROPE = {"dynamic", "longrope"}  # their angles depend on the longest row of the pass, so there is no table of them


class FusedLayer(nn.Module):
    """One block with its products joined. Stands in the model's own list of layers and can be called as they are."""

    def __init__(self, layer: Any, linear: Linear, between: Between | None = None) -> None:
        """between: what stands for the block's own choice."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx, self.head_dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.window = getattr(attention, "sliding_window", None)
        if type(attention).__name__ in ("MistralAttention", "MixtralAttention"):  # read their window from the configuration
            self.window = attention.config.sliding_window
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = linear(*joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self.o = kept(attention.o_proj, linear)
        self.routed = Routed(mlp, linear) if hasattr(mlp, "experts") else None
        if self.routed is None:
            self.gate_up = linear(*joined([mlp.gate_proj, mlp.up_proj]))
            self.down = kept(mlp.down_proj, linear)
        self.act = mlp.act_fn if self.routed is None else self.routed.act_fn
        self.inner: int = mlp.gate_proj.out_features if self.routed is None else self.routed.inner
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        # bound once: finding and calling a module costs as much as a small operation
        parts = [self.qkv, self.o, *([self.gate_up, self.down] if self.routed is None else ())]
        self._products = tuple(part.forward for part in parts)
        ours = between is None and compiled(layer.input_layernorm.weight.device, layer.input_layernorm.weight.dtype)
        tiled = isinstance(self.qkv, InTiles)
        found = between or (Between(native.norm, native.turn) if ours else Between(tiled_norm if tiled else rms_norm, turn, tiled=tiled))
        self._norm, self._turn, self._weigh, self._tiled = found.norm, found.turn, found.weigh, found.tiled
        self._gate = native.gate if ours and type(self.act) in SILU else partial(found.gate, self.act)
        self._norms = [(norm.weight.detach(), norm.variance_epsilon) for norm in (self.input_norm, self.mlp_norm)]
        self.head_norm: Tensor | None = None  # [heads + kv_heads, head_dim], Qwen 3's norm of each head
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm, attention.k_norm
            self.head_eps = q.variance_epsilon
            self.head_norm = torch.cat([q.weight.detach().expand(self.heads, -1), k.weight.detach().expand(self.kv_heads, -1)])

    def run(self, x: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        """x [rows, hidden], which is overwritten; angles [rows, 2, head_dim], sin negative in its first half → [rows, hidden]."""
        rows, turned = x.shape[0], self.heads + self.kv_heads
        to_qkv, to_out, *mlp = self._products
        before, after = self._norms
        heads = to_qkv(self._norm(x, *before)).view(rows, -1, self.head_dim)
        qk = heads[:, :turned]
        if self.head_norm is not None:
            qk = self._norm(qk, self.head_norm, self.head_eps)
        qk = self._turn(qk, angles[:, :1], angles[:, 1:])
        out = attend(self.layer_idx, qk[:, : self.heads], qk[:, self.heads :], heads[:, turned:], self.scaling, self.window, p, pool,
                     weigh=self._weigh)
        x.add_(to_out(out.reshape(rows, -1)))
        h = self._norm(x, *after)
        return x.add_(mlp[1](self._gate(mlp[0](h))) if self.routed is None else self.routed(h))

    def placed(self, p: Pass) -> Pass:
        """The pass, ready for `run`."""
        return p.placed()

    def streamed(self) -> list[StreamedLinear]:
        """Its products but for those of experts, if the block runs through our kernels alone; else none."""
        wanted = [self.qkv, self.o, *([self.gate_up, self.down] if self.routed is None else ())]
        found = [part for part in wanted if isinstance(part, StreamedLinear)]
        behind = self._gate is native.gate if self.routed is None else self.routed.compiled
        return found if len(found) == len(wanted) and behind else []

    def tile(self) -> int:
        """The rows of a tile, if every product and sum over a row has one shape (tiled.py); else 0."""
        if self.routed is not None:
            return 0
        tiles = [part.tile for part in (self.qkv, bare(self.o), self.gate_up, bare(self.down)) if isinstance(part, InTiles)]
        return max(tiles) if len(tiles) == 4 and self._tiled else 0

    def kernel(self, pool: PagePool) -> native.Layer:
        """The block for `native.blocks`."""
        (before, before_eps), (after, after_eps) = self._norms
        one = before.new_empty(0, self.kv_heads, self.head_dim)
        keys, values = pool.storage(self.layer_idx, one, one)
        of_heads, heads_eps = (None, 0.0) if self.head_norm is None else (self.head_norm.data_ptr(), self.head_eps)
        products = [part.product for part in self.streamed()]
        if self.routed is not None:
            products += [native.Product(), native.Product()]
        return native.Layer(
            *products,
            before.data_ptr(), after.data_ptr(), of_heads, None, before_eps, after_eps, heads_eps, self.scaling,
            self.heads, self.kv_heads, self.head_dim, self.window or 0, 0, keys.data_ptr(), values.data_ptr(),
            None if self.routed is None else self.routed.address())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        draftproof_pass: Pass,
        draftproof_pool: PagePool,
        **_: Any,
    ) -> Tensor:
        """As a transformers block is called: hidden_states [1, rows, hidden] and (cos, sin) [1, rows, head_dim] of the model's rotary."""
        cos, sin = position_embeddings
        return self.run(hidden_states[0].clone(), torch.stack([cos[0], signed(sin[0])], 1), draftproof_pass, draftproof_pool)[None]


class FusedPass:
    """The whole forward pass over a model whose layers are `FusedLayer`s. Keeps taps, as `Taps` does, without hooks."""

    def __init__(self, model: Any) -> None:
        self.embed, self.output = model.get_input_embeddings(), model.get_output_embeddings()
        self.layers: list[FusedLayer] = list(model.model.layers)
        self.norm, self.rotary = model.model.norm, model.model.rotary_emb
        self.moving = self.rotary.rope_type in MOVING_ROPE
        self._norm, self._last = self.layers[0]._norm, (self.norm.weight.detach(), self.norm.variance_epsilon)
        self.angles: Tensor | None = None  # [positions, 2, head_dim]: cos, and sin with its first half negated
        self.taps: frozenset[int] = frozenset()
        self.rows: Mapping[int, Tensor] = {}
        self._table: tuple[tuple[PagePool, int, int], ctypes.Array[native.Layer] | None] | None = None
        self._whole: tuple[tuple[Any, ...], native.Model | None] | None = None  # what it was made of

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
        logits, tapped = native.forward(model, p.course(), p.ids, taps, keep)
        self.rows = {} if tapped is None else SideBySide(taps, tapped)
        return logits

    def compute(self, p: Pass, pool: PagePool, keep: Sequence[int] | None) -> Tensor:
        """The same where the table of angles reaches, and the plain twin of `native.forward`. Without `keep`, and but for compiled kernels
        and moving angles, it looks at nothing but tensors, so that graphs.py can record it."""
        x = self.embed(p.ids[0])
        angles = self._measure(x, p.positions) if self.angles is None else self.angles[p.positions[0]]
        cos, sin = angles[:, :1], angles[:, 1:]
        table, ran = self._kernels(pool), 0
        rows: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if table is None:
                x = layer.run(x, angles, p, pool)
            elif number in self.taps or number == len(self.layers) - 1:
                native.blocks(table, ran, number + 1, x, cos, sin, [p.course()])
                ran = number + 1
            if number in self.taps:
                rows[number] = x.clone()
        self.rows = rows
        if keep is not None:
            x = rows_of(x, keep)
        logits: Tensor = self.output(self._norm(x, *self._last))
        return logits

    def compiled(self) -> bool:
        """Whether every layer runs through our kernels alone."""
        return all(layer.streamed() for layer in self.layers)

    def _kernels(self, pool: PagePool) -> ctypes.Array[native.Layer] | None:
        """The layers for `native.blocks`, made anew when the pool's storage has moved; None if they do not all run through it."""
        key = pool, pool.allocated, len(self.layers)
        if self._table is None or self._table[0] != key:
            layers = (native.Layer * len(self.layers))(*(layer.kernel(pool) for layer in self.layers)) if self.compiled() else None
            self._table = key, layers
        return self._table[1]

    def _model(self, pool: PagePool) -> native.Model | None:
        """The model for `native.forward`, made anew when a part of it has moved; None if not all of it is our kernels'."""
        parts = self._kernels(pool), self.angles, self.output, self.embed
        if self._whole is None or any(map(is_not, self._whole[0], parts)):
            self._whole = parts, self._model_of(*parts)
        return self._whole[1]

    def _model_of(self, layers: ctypes.Array[native.Layer] | None, angles: Tensor | None, output: Any, embed: Any) -> native.Model | None:
        weight = self.norm.weight
        if layers is None or angles is None or not isinstance(output, StreamedLinear):
            return None
        if type(embed) is not nn.Embedding or embed.max_norm is not None or embed.weight.dtype != weight.dtype:
            return None
        return native.Model.of(layers, output.product, weight, self.norm.variance_epsilon, embed.weight, angles)

    def _reach(self, positions: int) -> None:
        """A table of angles for so many positions; none where the angles move."""
        if not self.moving and (self.angles is None or self.angles.shape[0] < positions):
            held, like = angles_held(positions), self.embed.weight
            self.angles = self._measure(like, torch.arange(held, device=like.device)[None])

    def _measure(self, like: Tensor, positions: Tensor) -> Tensor:
        """The model's own angles at positions [1, n], as they are used here: [n, 2, head_dim]."""
        cos, sin = self.rotary(like, positions)
        return torch.stack([cos[0], signed(sin[0])], 1)


def can_fuse(model: Any) -> tuple[bool, str]:
    """Whether every layer is Llama's block as we know it, and why or why not."""
    family = str(model.config.model_type)
    if family not in FAMILIES:
        return False, f"{type(model).__name__} is not one of the families whose block is known ({', '.join(FAMILIES)})"
    home, prefix = f"transformers.models.{family}.modeling_{family}", FAMILIES[family]

    def exact(module: Any, name: str) -> bool:
        return type(module).__module__ == home and type(module).__name__ == prefix + name

    known = exact(model, "ForCausalLM") and exact(model.model, "Model") and exact(model.model.norm, "RMSNorm")
    for layer in model.model.layers if known else ():
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, bare(attention.o_proj)]
        if hasattr(mlp, "experts"):
            known = known and exact(mlp, "SparseMoeBlock") and exact(mlp.gate, "TopKRouter") and exact(mlp.experts, "Experts")
            known = known and model.device.type == "cpu"        # elsewhere they would wait to be told which experts are chosen
        else:
            linears += [mlp.gate_proj, mlp.up_proj, bare(mlp.down_proj)]
            known = known and exact(mlp, "MLP")
        known = known and exact(layer, "DecoderLayer") and exact(attention, "Attention")
        known = known and all(exact(norm, "RMSNorm") for norm in norms) and all(type(linear) is nn.Linear for linear in linears)
        known = known and attention.k_proj.out_features == attention.v_proj.out_features
    if not known:
        return False, f"{type(model).__name__} has layers of other classes than {home} ships, or experts on another device than a CPU"
    rotary = model.model.rotary_emb
    if not exact(rotary, "RotaryEmbedding") or 2 * rotary.inv_freq.shape[0] != model.model.layers[0].self_attn.head_dim:
        return False, "its rotary positions do not cover the whole head"
    return True, "one product for q, k and v, one for gate and up, and few operations between them"


def fuse(model: Any, linear: Linear | None, between: Between | None = None, kind: Callable[..., FusedLayer] | None = None) -> None:
    """Replace the model's layers by fused ones, in place and one at a time, so that no more than one layer is held twice. linear: what
    makes a layer of a weight and a bias; None: torch's own. between: for `FusedLayer`; kind: what stands for it."""
    layers = model.model.layers
    for number in range(len(layers)):
        layers[number] = kind(layers[number], linear) if kind else FusedLayer(layers[number], linear or HeldLinear, between)
