"""Distilling a small draft model: half cross entropy on the text, half KL from the target's distribution.

What rule `match` accepts depends on the whole of both distributions, Σ 1 / Σ max(p_y/p_x, q_y/q_x) (Daliri et al., arXiv 2408.07978),
so the target's law is the better half of the lesson.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..models.causal import CausalLM
from ..models.target import TargetParts
from .base import Features, logits_after
from .depths import token_loss


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL(p || q) [m] of p = softmax(wanted [m, V]) and q = softmax(logits [m, V])."""
    return (wanted.softmax(-1) * (wanted.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)


class ModelTask:
    """`train.base.Task` of a language model with the target's vocabulary."""

    def __init__(self, lm: CausalLM, parts: TargetParts, share: float = 0.5) -> None:
        """share: of the KL in the loss."""
        self.lm, self.parts, self.share = lm, parts, share
        self.module = lm.module.requires_grad_(True)
        self.last = int(parts.config.get_text_config().num_hidden_layers) - 1
        self.taps = (self.last,)

    def save(self, folder: Path) -> None:
        self.lm.save(folder)

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        """Mean over the tokens that count; figures: cross entropy, KL, and how often the likeliest tokens agree."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for text in batch:
            counts = text.mask[1:]
            if not bool(counts.any()):
                continue
            logits = self.lm.logits(text.ids[:-1])[counts].float()
            wanted = logits_after(self.parts, text.taps[self.last][:-1][counts]).float()
            width = min(logits.shape[-1], wanted.shape[-1])
            logits, wanted = logits[:, :width], wanted[:, :width]
            found.append((token_loss(logits, text.ids[1:][counts]), divergence(logits, wanted), logits.argmax(-1) == wanted.argmax(-1)))
        if not found:
            return torch.zeros((), device=batch[0].ids.device, requires_grad=True), {}
        entropy, kl, agreed = (torch.cat(parts).float().mean() for parts in zip(*found, strict=True))
        figures = {"cross_entropy": entropy.item(), "kl": kl.item(), "agreement": agreed.item()}
        return (1 - self.share) * entropy + self.share * kl, figures
