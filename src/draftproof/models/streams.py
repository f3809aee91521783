"""What Gemma 3n adds to Gemma 4's block: streams beside each other, of which layers compute with the first, and a product beside attention.

    seen(x) = tanh(router(norm(x) / H))                                     [streams]
    hᵢ ← hᵢ + Σₖ predict(seen(h₀))ᵢₖ hₖ                                     before a layer: AltUp (Baykal et al., arXiv 2301.13310)
    x ← (h₀ + norm(attention(n)) + n + norm(right(left(n)))) / √2           n = norm(h₀): LAuReL (Menghani et al., arXiv 2411.07501)
    x ← x + norm(mlp(norm(x)))                                              of gates g: max(g − mean − cut · deviation, 0), in some layers
                                                                            (You et al., arXiv 2506.06644)
    hᵢ ← hᵢ + (1 + correct(seen(x))ᵢ) (x − h₀)                              behind it
    hᵢ ← hᵢ + norm(last(act(gate(h₀ · by)) · side)), i > 0                  as Gemma 4's (sides.py)

The streams beside the first are made of the embedded rows, each as large as these; behind the layers each is projected, made as large as
the first, and the mean of all goes on. See `Gemma3nTextModel` and `Gemma3nTextDecoderLayer` in transformers. kernels/streams.c runs it.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import llama
from .cache import PagePool
from .families import Family, norm_of
from .fused import FusedLayer, scale_of
from .packed import Linear, StreamedLinear
from .passes import Pass

LEAST = 1e-5    # mean square that a stream counts as, where it is made as large as another


class StreamsLayer(FusedLayer):
    """x [rows, hidden] is the first stream; the others are the pass's."""

    def _take_side(self, layer: Any, linear: Linear, family: Family) -> None:
        super()._take_side(layer, linear, family)
        altup, laurel, mlp = layer.altup, layer.laurel, layer.mlp
        self.left, self.right = (linear(part.weight, None) for part in (laurel.linear_left, laurel.linear_right))
        self.of_laurel, self.of_router = norm_of(laurel.post_laurel_norm, family), norm_of(altup.router_norm, family)
        self.router, self.router_share = altup.modality_router.weight.detach().to(self.dtype).contiguous(), float(altup.router_input_scale)
        parts = (altup.prediction_coefs, altup.correction_coefs)
        self.predicts, self.corrects = (part.weight.detach().float().contiguous() for part in parts)
        by = altup.correct_output_scale.detach()
        self.by = by.to(self.dtype) if altup.config.altup_correct_scale else torch.ones_like(by, dtype=self.dtype)
        below = torch.tensor(mlp.activation_sparsity, dtype=torch.float32)
        self.cut = float((torch.erfinv(2 * below - 1) * 2**0.5).to(self.dtype)) if below > 0 else None

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.left, self.right]

    def run(self, x: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        """As `FusedLayer.run`; p.streams [rows, streams - 1, hidden], too, is overwritten."""
        before, of_attention, after, of_mlp = self._norms
        assert p.streams is not None
        predicted = self._predict(torch.cat([x[:, None], p.streams], 1))
        first, others = predicted[:, 0], predicted[:, 1:]
        entered = self._norm(first, *before)
        stays = entered + self._norm(self.right(self.left(entered)), *self.of_laurel)
        seen = self.o(self._look_back(entered, self.qkv(entered), angles, p, pool))
        x = (first + self._norm(seen, *of_attention) + stays) * 0.5**0.5
        made = self.down(self._gate(self._cut_off(self.gate_up(self._norm(x, *after)))))
        x = x + self._norm(made, *of_mlp)
        by = self._coefficients(x, self.corrects) + 1
        changed = (x - first)[:, None]
        x = (changed * by[:, :1, None])[:, 0] + first
        told = self._norm(self._of_side(x * self.by, p), *self.side_norm)   # type: ignore[misc]
        p.streams.copy_(changed * by[:, 1:, None] + others + told[:, None])
        return x

    def _coefficients(self, x: Tensor, weight: Tensor) -> Tensor:
        """What a small product [n, streams] makes of what the router sees in x [rows, hidden]: [rows, n]."""
        asked = self._norm(x, *self.of_router) * self.router_share
        seen = (asked.float()[:, None] * self.router.float()).sum(-1).to(x.dtype).float().tanh().to(x.dtype)
        found: Tensor = (seen.float()[:, None] * weight).sum(-1).to(x.dtype)
        return found

    def _predict(self, streams: Tensor) -> Tensor:
        """streams [rows, streams, hidden] → what they are predicted to become."""
        rows, count, _ = streams.shape
        by = self._coefficients(streams[:, 0].contiguous(), self.predicts).view(rows, count, count, 1).float()
        sums = by[:, :, 0] * streams[:, None, 0].float()
        for k in range(1, count):
            sums.addcmul_(by[:, :, k], streams[:, None, k].float())
        return sums.to(streams.dtype) + streams

    def _cut_off(self, made: Tensor) -> Tensor:
        """Gates and ups [rows, 2 inner], of the former what lies above most."""
        if self.cut is None:
            return made
        gate, up = made.chunk(2, -1)
        least = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * self.cut
        return torch.cat([functional.relu(gate - least), up], -1)

    def kernel(self, pool: PagePool) -> llama.Layer:
        made = super().kernel(pool)
        made.altup = ctypes.addressof(self._altup)
        return made

    @cached_property
    def _altup(self) -> llama.AltUp:
        """One for all pools: each pass over the layers reads it where it lies."""
        scales = (scale_of(norm, self.dtype) for norm in (self.of_laurel, self.of_router))
        parts = (part.data_ptr() for part in (self.router, self.by, self.predicts, self.corrects))
        return llama.AltUp(self.left.product, self.right.product, *scales, *parts, self.router_share, self.cut or 0, self.cut is not None)


class Streams:
    """Those beside the first: made of what enters a model's layers, and what becomes of them behind."""

    def __init__(self, body: Any) -> None:
        self._enter, self._leave = list(body.altup_projections), list(body.altup_unembed_projections)

    def branch(self, x: Tensor) -> Tensor:
        """Of embedded rows x [rows, hidden]: [rows, streams - 1, hidden]."""
        return torch.stack([_as_large(part(x), x) for part in self._enter], 1)

    def merge(self, x: Tensor, streams: Tensor) -> Tensor:
        """x [rows, hidden] and the others → what the last norm reads [rows, hidden]."""
        found = [x, *(_as_large(part(streams[:, at].contiguous()), x) for at, part in enumerate(self._leave))]
        return torch.stack(found).mean(0)

    @cached_property
    def ends(self) -> llama.Ends | None:
        """For kernels/forward.c; None: they do not all run through our kernels."""
        parts = [*self._enter, *self._leave]
        return llama.Ends.of([part.product for part in parts]) if all(isinstance(part, StreamedLinear) for part in parts) else None


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x [rows, hidden], its rows as large as those of another."""
    own, target = (part.pow(2).mean(-1, keepdim=True) for part in (x, like))
    return x * target.sqrt() / own.clamp(min=LEAST).sqrt()
