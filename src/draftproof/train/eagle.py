"""Training an EAGLE-1 head (Li et al., arXiv 2401.15077): the hidden state after the next token by smooth L1, and the target's law
over it by soft cross-entropy, a tenth of it; uniform noise on the hidden states, as the head will read its own errors.

With `steps` > 1 it goes on from its own outputs like EAGLE-3's training-time test (HASS, arXiv 2408.15766).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..models.heads.eagle import EagleHead
from ..models.heads.medusa import target_logits
from ..models.target import TargetParts
from .base import Features, saved_dtype
from .eagle3 import logit_blocks, soft_cross_entropy
from .mtp import StepsTask, Unrolled

NOISE = 0.2         # times 512 / length, as EAGLE draws it


def hidden_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Smooth L1 [R] between hidden states [R, H], mean over their entries."""
    return functional.smooth_l1_loss(found.float(), wanted.float(), reduction="none").mean(-1)


class EagleTask(StepsTask):
    """hidden_loss + law_weight · soft cross-entropy. The target's likeliest token is the right one."""

    module: EagleHead

    def __init__(self, head: EagleHead, parts: TargetParts, steps: int = 3, decay: float = 0.8, law_weight: float = 0.1,
                 noise: float = NOISE) -> None:
        super().__init__(steps, decay)
        self.module, self.parts, self.taps = head.float().requires_grad_(True), parts, head.taps
        self.law_weight, self.noise = law_weight, noise
        self.saved_as = saved_dtype(parts)

    def _one(self, text: Features) -> list[tuple[Tensor, Tensor, int]]:
        head, ids, attend = self.module, text.ids, Unrolled()
        length = ids.shape[0]
        with torch.no_grad():
            true = head.fuse(text.taps[head.taps[0]])
            laws = torch.cat([logits.softmax(-1) for logits in logit_blocks(self.parts, text.taps[head.taps[0]])])
            hidden = true.float() + (torch.rand_like(true, dtype=torch.float32) - 0.5) * 2 * self.noise * 512 / max(length, 512)
        found = []
        for step in range(min(self.steps, length - 2)):
            rows = length - 2 - step
            places = torch.arange(rows, device=ids.device) + step
            hidden = head.step(ids[step + 1:step + 1 + rows], hidden[:rows], places, attend)
            counts = text.mask[step + 2:].nonzero()[:, 0]
            at = counts + step + 1
            logits = target_logits(self.parts, hidden[counts])
            losses = hidden_loss(hidden[counts], true[at]) + self.law_weight * soft_cross_entropy(logits, laws[at])
            found.append((losses, logits.argmax(-1) == laws[at].argmax(-1), len(at)))
        return found
