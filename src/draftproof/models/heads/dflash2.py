"""DFlash 2 heads (inco.ai/blog/dflash2, August 2026): a DFlash block whose rows see the ones before them within the block, and whose slots
are tied together by a choice among candidates.

    local conv   [k_in, k_out] = kernel_projection(x), for every row, tap and group of channels;
                 conv(x)_i = Σ_t (base_kernel[t] + k_i[t]) · x_(i−t), no further back than the block's first row;
                 every attention and every MLP f becomes conv_out(f(conv_in(x))), x being its normed input
    selector     of a slot's `choices` likeliest tokens c by its logits u, behind the token p before them:
                 score(c) = u(c) + ⟨predecessor_codebook[p] · hidden_projection(h), successor_codebook[c]⟩; no other token is guessed

h is the slot's hidden state. Keys: DFlash's, `layers.{i}.attention_conv` and `.mlp_conv` with `.base_kernel` [2, taps, H] and
`.kernel_projection.weight` [2 · taps · H / group, H], `candidate_selector.predecessor_codebook` and `.successor_codebook` [V, r],
`candidate_selector.hidden_projection.weight` [r, H]. Config: conv_kernel_size, conv_group_size, selector_rank, selector_top_k, in
dflash_config (z-lab) or at the top (speculators).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import LoadError
from ..target import TargetParts
from .dflash import DFlash
from .eagle import settle
from .files import HeadFiles
from .layers import Attend, HeadLayer, Shape
from .layout import Local


class LocalConv(nn.Module):
    """A sublayer between two convolutions along the block, both with kernels that its input gives; fresh ones change nothing."""

    def __init__(self, hidden: int, local: Local, block: int) -> None:
        super().__init__()
        self.block, self.taps, self.groups, self.group = block, local.taps, hidden // local.group, local.group
        self.base_kernel = nn.Parameter(torch.zeros(2, local.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * local.taps * self.groups, bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B · block, H], the sublayer's input → its output, of the same shape."""
        before, after = self.kernel_projection(x).view(-1, 2, self.taps, self.groups).unbind(1)
        return self._mixed(sublayer(self._mixed(x, before, 0)), after, 1)

    def _mixed(self, x: Tensor, given: Tensor, side: int) -> Tensor:
        rows = x.view(-1, self.block, self.groups, self.group)
        kernel = self.base_kernel[side].view(self.taps, self.groups, self.group) + given.reshape(-1, self.block, self.taps, self.groups, 1)
        out = kernel[:, :, 0] * rows
        for tap in range(1, min(self.taps, self.block)):
            out[:, tap:] += kernel[:, tap:, tap] * rows[:, :-tap]
        return out.view_as(x)


class ConvLayer(HeadLayer):
    """A head's layer with a local convolution around attention and MLP."""

    def __init__(self, shape: Shape, local: Local, block: int) -> None:
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = LocalConv(shape.hidden, local, block), LocalConv(shape.hidden, local, block)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, layer: int, beside: Tensor | None = None) -> Tensor:
        assert self.input_layernorm is not None, "only EAGLE-1's first layer has none"
        y = x + self.attention_conv(self.input_layernorm(x), lambda z: self.self_attn(z, turn, attend, layer))
        out: Tensor = y + self.mlp_conv(self.post_attention_layernorm(y), self.mlp)
        return out


class Selector(nn.Module):
    def __init__(self, vocab_size: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))          # begins as a plain DFlash
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, gate: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """gate […, r] = hidden_projection(h), previous […] and candidates […, K] tokens → what is added to the candidates' logits
        […, K], float32."""
        step = self.predecessor_codebook[previous] * gate
        return (step[..., None, :] * self.successor_codebook[candidates]).float().sum(-1)


class DFlash2(DFlash):
    """See the head of this file."""

    architecture, family = "DFlash2DraftModel", "dflash2"
    candidate_selector: Selector

    def layer(self) -> HeadLayer:
        assert self.layout.local is not None, "of this family"
        return ConvLayer(self.shape, self.layout.local, self.block)

    def give(self, files: HeadFiles, tensors: Mapping[str, Tensor]) -> None:
        if self.ids is not None:
            raise LoadError(f"{files.path}: a DFlash 2 head with a reduced vocabulary; expected the target's {self.vocab_size} tokens")
        projection = tensors.get("candidate_selector.hidden_projection.weight")
        rank = self.shape.hidden if projection is None else projection.shape[0]        # where it is missing, `fill` says so
        self.candidate_selector = Selector(self.vocab_size, rank, self.shape.hidden)

    @classmethod
    def local(cls, hidden: int, vocab_size: int) -> Local:
        return Local(taps=2, group=gcd(hidden, 16), choices=min(16, vocab_size))

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 2, block: int = 8, taps: Sequence[int] | None = None, mask_token: int | None = None,
              context: int | None = None, rank: int = 64, **sizes: Any) -> Self:
        head = super().fresh(parts, layers, block, taps, mask_token, context, **sizes)
        head.candidate_selector = Selector(head.vocab_size, rank, head.shape.hidden)
        return settle(head, parts)

    def published(self) -> dict[str, Any]:
        found, local = super().published(), self.layout.local
        assert local is not None, "of this family"
        found["dflash_config"] |= {"conv_kernel_size": local.taps, "conv_group_size": local.group, "selector_top_k": local.choices,
                                   "selector_rank": self.candidate_selector.successor_codebook.shape[1]}
        return found

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits […, V] of slots → the likeliest tokens […, K] and their logits, float32."""
        assert self.layout.local is not None, "of this family"
        found = logits.topk(self.layout.local.choices, -1, sorted=False)
        return found.indices, found.values.float()
