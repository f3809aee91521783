"""Training a P-EAGLE head (arXiv 2602.01469): EAGLE-3's network learns to fill several masks behind the text's last entry in one pass.

The rows are PARD's (pard.py), of entries where those are of tokens. Row (k, t) reads the target's features and tokens up to entry t, then k
masks at positions t + 1 … t + k, and is asked for token t + k + 2; row (0, t) is what EAGLE-3's first step learns. Labels are the
target's laws over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..models.heads.peagle import PEagleHead
from ..models.target import TargetParts
from .base import Features
from .eagle3 import Eagle3Task, labels
from .pard import rows_of


@dataclass(frozen=True, slots=True)
class Among:
    """Attention of rows among themselves. visible: bool [R, R]; positions [R]; windows: how far each layer sees, if any slides.
    q [R, heads, D], k and v [R, kv, D] → [R, heads · D]."""

    visible: Tensor
    positions: Tensor
    windows: Sequence[int | None] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = self.visible
        if self.windows and (window := self.windows[layer]) is not None:
            seen = seen & (self.positions[:, None] - self.positions < window)
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1).flatten(1)


class PEagleTask(Eagle3Task):
    """A `train.base.Task`. steps: tokens guessed in one pass. Of the rows behind k masks a share max(ratio^k, least) is learnt from."""

    module: PEagleHead

    def __init__(self, head: PEagleHead, parts: TargetParts, steps: int = 8, decay: float = 0.8, accept_at: float | None = None,
                 ratio: float = 0.7, least: float = 0.2) -> None:
        super().__init__(head, parts, steps, decay, accept_at)
        self.ratio, self.least = ratio, least

    def _one(self, text: Features) -> list[tuple[Tensor, Tensor, int]]:
        """As EAGLE-3's, with the guesses behind so many masks for a step's."""
        head, entries = self.module, text.ids.shape[0] - 1          # entry t holds token t + 1
        possible = text.mask[2:].nonzero()[:, 0]
        if not possible.shape[0]:
            return []
        laws, best, known = labels(self.parts, text.taps[self.last], head.ids)
        rows = rows_of(entries, possible, self.steps, self.ratio, self.least)
        true = head.fuse(torch.cat([text.taps[tap] for tap in head.taps], -1)[:entries].float())
        hidden = torch.where((rows.masks == 0)[:, None], true[rows.last], head.blank())
        attend = Among(rows.visible(), rows.positions, head.layers.windows)
        out = head.step(rows.ids(text.ids[1:], head.mask_token), hidden, rows.positions, attend)
        before = rows.positions + 1                                 # the token whose law a row is asked for
        wanted = text.mask[(before + 1).clamp(max=entries)] & (before < entries)
        found = []
        for masks in range(self.steps):
            behind = wanted & (rows.masks == masks)
            counts = (behind & known[before]).nonzero()[:, 0]
            logits, at = head.logits(out[counts]), before[counts]
            found.append((self._wrong(logits, laws[at]), logits.argmax(-1) == best[at], int(behind.sum())))
        return found
