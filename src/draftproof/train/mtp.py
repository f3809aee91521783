"""Training a multi-token prediction head as it is served: several steps by recursion, the text's own tokens at every step
(FastMTP, arXiv 2509.18362: three steps, weights falling by 0.6).

Step k of row t reads the head's own output of step k − 1 and token t+k+1, and is asked for token t+k+2. Its attention is the
served one: true rows up to t, then the row's own chain (training-time test, EAGLE-3, arXiv 2503.01840), where FastMTP lets a
step see other rows' guesses, which no served draft ever does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import LoadError
from ..models.heads.medusa import target_logits
from ..models.heads.mtp import MtpHead
from .base import Features, logits_after


def step_weights(steps: int, decay: float) -> list[float]:
    """decay^k over their sum, k from 0 (FastMTP, equation 2)."""
    raw = [decay**step for step in range(steps)]
    return [weight / sum(raw) for weight in raw]


def weighted_mean(sums: Sequence[Sequence[Tensor]], counts: Sequence[int], weights: Sequence[float]) -> Tensor | None:
    """Σ over steps of weight · mean over that step's guesses; sums[i] are its texts' sums, counts[i] how many guesses. None if none."""
    parts = [weight * torch.stack(list(found)).sum() / count for found, count, weight in zip(sums, counts, weights, strict=True) if count]
    return torch.stack(parts).sum() if parts else None


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """[R] from logits [R, V]: wanted are token ids [R], or probabilities [R, V]."""
    if wanted.ndim == 1:
        return functional.cross_entropy(logits, wanted, reduction="none")
    return -(wanted * logits.log_softmax(-1)).sum(-1)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """Attention of all steps over one text. Row t of a layer's first pass sees rows up to t; of a later one, those and its own chain.
    A later pass may be shorter. windows: how far each layer sees, if any slides. q [R, heads, D], k and v [R, kv, D] → [R, heads · D]."""

    windows: Sequence[int | None] = ()
    held: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, dim = q.shape
        group = heads // k.shape[1]
        chain = self.held.setdefault(layer, [])
        chain.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        (keys, values), *later = [(k[:rows], v[:rows]) for k, v in chain]
        seen = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        if self.windows and (window := self.windows[layer]) is not None:
            seen, later = seen.triu(len(chain) - window), later[max(0, len(later) - window):]
        true = torch.einsum("qhd,khd->hqk", q, keys).masked_fill(~seen, float("-inf"))
        own = [(q * k).sum(-1).t()[..., None] for k, _ in later]
        weights = (torch.cat((true, *own), -1) * dim**-0.5).float().softmax(-1).to(v.dtype)
        out = torch.einsum("hqk,khd->qhd", weights[..., :rows], values)
        for place, (_, v) in enumerate(later):
            out = out + weights[..., rows + place].t()[..., None] * v
        return out.reshape(rows, heads * dim)


class StepsTask(ABC):
    """`train.base.Task` of a head that guesses on from its own outputs, trained in float32 and saved in the target's precision."""

    module: Any
    saved_as: torch.dtype

    def __init__(self, steps: int, decay: float) -> None:
        self.steps, self.weights = steps, step_weights(steps, decay)

    @abstractmethod
    def _one(self, text: Features) -> list[tuple[Tensor, Tensor, int]]:
        """Per step: the loss of every guess that counts, whether its best token is the right one, and how many guesses were asked for."""

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        """Mean over the guesses of a step, steps weighted; figures: how often the best token is the right one, per step."""
        sums: list[list[Tensor]] = [[] for _ in range(self.steps)]
        counts, right, asked = ([0] * self.steps for _ in range(3))
        for text in batch:
            for step, (losses, hits, wanted) in enumerate(self._one(text)):
                sums[step].append(losses.sum())
                counts[step] += losses.shape[0]
                right[step] += int(hits.sum())
                asked[step] += wanted
        loss = weighted_mean(sums, counts, self.weights)
        figures = {f"accuracy {step + 1}": right[step] / asked[step] for step in range(self.steps) if asked[step]}
        return next(self.module.parameters()).sum() * 0.0 if loss is None else loss, figures      # no guess counts: nothing moves

    def save(self, folder: Path) -> None:
        self.module.save(folder, self.saved_as)


class MtpTask(StepsTask):
    """Cross-entropy. `soft`: the labels are the target's own distributions; otherwise the text's tokens, as FastMTP has them. The
    text's token is the right one."""

    module: MtpHead

    def __init__(self, head: MtpHead, steps: int = 3, decay: float = 0.6, soft: bool = True) -> None:
        super().__init__(steps, decay)
        weight = getattr(head.parts.output, "weight", None) if head.heads is None else head.heads[0].weight
        if weight is None or weight.is_meta:
            raise LoadError("the target's output matrix is packed and has no gradient; load the target with packing off to train")
        self.saved_as = head.parts.saved_as or next(head.fusions.parameters()).dtype
        self.module, self.taps = head.float().requires_grad_(True), head.taps
        for shared in (head.embed, head.heads):
            if shared is not None:
                shared.requires_grad_(False)            # copies of the target's
        self.soft = soft

    def _one(self, text: Features) -> list[tuple[Tensor, Tensor, int]]:
        head, ids, length, attend = self.module, text.ids, text.ids.shape[0], Unrolled([self.module.window] * self.module.layers)
        with torch.no_grad():
            features = head.fuse(text.taps[self.taps[0]])
        hidden, found = features, []
        for step in range(min(self.steps, length - 2)):
            rows = length - 2 - step
            places = torch.arange(rows, device=ids.device) + step
            hidden = head.step(ids[step + 1:step + 1 + rows], hidden[:rows], places, attend, step)
            counts = text.mask[step + 2:].nonzero()[:, 0]
            logits = self._logits(hidden[counts], step).float()
            label = ids[step + 2:][counts]
            losses = cross_entropy(logits, self._target(text, counts + step + 1) if self.soft else label)
            found.append((losses, logits.argmax(-1) == label, len(label)))
        return found

    def _logits(self, hidden: Tensor, step: int) -> Tensor:
        head = self.module
        return target_logits(head.parts, head.ready(hidden)) if head.heads is None else head.logits(hidden, step)

    @torch.no_grad()
    def _target(self, text: Features, positions: Tensor) -> Tensor:
        """What the target says after each of these tokens: probabilities [R, V] float32."""
        return logits_after(self.module.parts, text.taps[self.taps[0]][positions]).float().softmax(-1)
