"""XPress heads (vLLM 0.33 `qwen3_xpress`, speculators 0.9 `xpress`): a DFlash block whose slots are tied by a small causal refiner.

    x_i    = in_proj([down_h(h_i), down_g(mean of the block's h), w1[token before row i]])     row i of the block, the anchor's among them
    m_i    = x_i + Σ_(j ≤ i) L[:, i, j] · x_j                                                  each of the r channels by itself
    bias_i = w2(m_i + mlp(m_i))                                                                added to the row's logits

Engines guess all rows and refine them several times together, each time behind the tokens of the time before. A row reads only those
before it, so what that settles on are the tokens chosen one after the other, as they are here, with all the vocabulary in view.

Keys: DFlash's, and `xpress_head.` with `w1.weight` [V, r], `down_h.weight` and `down_g.weight` [r, H], `in_proj.weight` [r, 3r], `mix.L`
[r, block, block], `mlp.{gate,up,down}_proj.weight`, `w2.weight` [Vd, r]; speculators: `refiner_head.` with names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import LoadError
from ..target import TargetParts
from .blocks import GatedMlp
from .dflash import DFlash
from .eagle import settle
from .files import HeadFiles, needed


class Refiner(nn.Module):
    """Logits that the tokens before a row, and the block's hidden states, lend to it."""

    def __init__(self, vocab_size: int, out_size: int, rank: int, inner: int, hidden: int, block: int) -> None:
        super().__init__()
        self.w1 = nn.Embedding(vocab_size, rank)
        self.down_h, self.down_g = nn.Linear(hidden, rank, bias=False), nn.Linear(hidden, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = nn.ParameterDict({"L": torch.zeros(rank, block, block)})
        self.mlp = GatedMlp(rank, inner)
        self.w2 = nn.Linear(rank, out_size, bias=False)

    def features(self, rows: Tensor) -> Tensor:
        """Hidden states of whole blocks [B, block, H] → what each row reads of them [B, block, 2r]."""
        return torch.cat((self.down_h(rows), self.down_g(rows.mean(1, keepdim=True)).expand(-1, rows.shape[1], -1)), -1)

    def read(self, features: Tensor, previous: Tensor) -> Tensor:
        """features [N, 2r] of rows, and the tokens [N] before them → x [N, r]."""
        x: Tensor = self.in_proj(torch.cat((features, self.w1(previous)), -1))
        return x

    def forward(self, past: Tensor) -> Tensor:
        """x of a block's rows up to one of them [N, rows, r] → the bias of the last one [N, Vd]."""
        last = past.shape[1] - 1
        mixed = past[:, last] + (self.mix["L"][:, last, :last + 1].t() * past).sum(1)
        bias: Tensor = self.w2(mixed + self.mlp(mixed))
        return bias


class XPress(DFlash):
    """See the head of this file."""

    architecture, family = "Qwen3XPressModel", "xpress"
    xpress_head: Refiner

    def give(self, files: HeadFiles, tensors: Mapping[str, Tensor]) -> None:
        w1, w2, up, mix = (needed(tensors, f"xpress_head.{name}", files.path)
                           for name in ("w1.weight", "w2.weight", "mlp.up_proj.weight", "mix.L"))
        if w1.shape[0] != self.vocab_size:
            raise LoadError(f"{files.path}: the refiner's w1 has {w1.shape[0]} rows, the target {self.vocab_size} tokens; "
                            "expected a head that was trained for this target's vocabulary")
        if mix.shape[-1] != self.block:
            raise LoadError(f"{files.path}: the refiner mixes {mix.shape[-1]} rows, and block_size is {self.block}; expected the same")
        self.xpress_head = Refiner(self.vocab_size, w2.shape[0], w1.shape[1], up.shape[0], self.shape.hidden, self.block)

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 2, block: int = 8, taps: Sequence[int] | None = None, mask_token: int | None = None,
              context: int | None = None, rank: int = 64, **sizes: Any) -> Self:
        head = super().fresh(parts, layers, block, taps, mask_token, context, **sizes)
        head.xpress_head = Refiner(head.vocab_size, head.vocab_size, rank, 2 * rank, head.shape.hidden, head.block)
        nn.init.zeros_(head.xpress_head.w2.weight)                # begins as a plain DFlash
        return settle(head, parts)

    def published(self) -> dict[str, Any]:
        rank, inner = self.xpress_head.w1.embedding_dim, self.xpress_head.mlp.down_proj.in_features
        return {**super().published(), "xpress_rank": rank, "xpress_mlp_hidden": inner, "xpress_block_size": self.block}
