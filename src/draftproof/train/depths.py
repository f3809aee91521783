"""Training heads that guess depth by depth from one hidden state: the loss that Medusa, Hydra and the MLP speculator share.

The hidden state after token t guesses token t + 2 + i at depth i. Per depth: cross-entropy against the target's own
distribution at that place (soft; every text is then a sample of what is asked), or against the token that stands there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.heads.medusa import target_logits
from ..models.target import TargetParts
from .base import Features, saved_dtype


def cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """−Σ p log q of each row [m]: q = softmax(logits [m, V]), p = law [m, V]."""
    return logits.logsumexp(-1) - (law * logits).sum(-1)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """−log q of the token [m] that stands there, each row of logits [m, V]."""
    return logits.logsumexp(-1) - logits.gather(1, tokens[:, None])[:, 0]


class DepthTask(ABC):
    """See `train.base.Task`. decay: depth i weighs decay ** i; the loss is the weighted mean over guesses that count."""

    module: nn.Module

    def __init__(self, head: Any, parts: TargetParts, decay: float, soft: bool) -> None:
        """head: a network of `models.heads`; it learns in float32 and is saved in the target's precision."""
        assert parts.embed is not None and parts.norm is not None
        self.saved_as = saved_dtype(parts)
        self.module = self.head = head.float().requires_grad_(True)
        self.parts, self.decay, self.soft = parts, decay, soft
        self.last = int(parts.config.get_text_config().num_hidden_layers) - 1
        self.taps: tuple[int, ...] = tuple(sorted({*head.taps, *([self.last] if soft else [])}))

    @abstractmethod
    def guesses(self, taps: Mapping[int, Tensor], ids: Tensor) -> Iterator[Tensor]:
        """Of each depth i the logits [n − 2 − i, Vd]; row t guesses token t + 2 + i of ids [n]."""

    def hidden(self, taps: Mapping[int, Tensor]) -> Tensor:
        """What the target feeds to its output matrix [n, H], float32."""
        assert self.parts.norm is not None
        with torch.no_grad():
            return self.parts.norm(taps[self.last]).float()     # type: ignore[no-any-return]

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        """(scalar, {"accuracy_1": share of first guesses that are the text's token, …})."""
        depth = self.head.depth
        total, weight = torch.zeros((), device=batch[0].ids.device), 0.0
        right, seen = [0.0] * depth, [0] * depth
        for features in map(self._counted, batch):
            if features.ids.shape[0] < 3:
                continue
            law = self._law(features) if self.soft else None
            for i, logits in enumerate(self.guesses(features.taps, features.ids)):
                if not logits.shape[0]:
                    break
                tokens, counts = features.ids[2 + i:], features.mask[2 + i:]
                losses, counts = self._losses(logits, None if law is None else law[1 + i:-1], tokens, counts)
                number = int(counts.sum())
                total = total + (losses * counts).sum() * self.decay**i
                weight += number * self.decay**i
                right[i] += float(((self._tokens(logits.argmax(-1)) == tokens) & counts).sum())
                seen[i] += number
        return total / max(weight, 1.0), {f"accuracy_{i + 1}": right[i] / seen[i] for i in range(depth) if seen[i]}

    def save(self, folder: Path) -> None:
        self.head.save(folder, self.saved_as)

    def _counted(self, features: Features) -> Features:
        """The end of a text with all guesses that count; a head that reads the whole text overrides this."""
        first = int(features.mask.int().argmax()) if bool(features.mask.any()) else features.ids.shape[0]
        start = max(0, first - 1 - self.head.depth)
        return Features(features.ids[start:], features.mask[start:], {layer: rows[start:] for layer, rows in features.taps.items()})

    def _law(self, features: Features) -> Tensor:
        """The target's law [n, Vd] after every token, over the head's vocabulary."""
        with torch.no_grad():
            logits = target_logits(self.parts, self.hidden(features.taps)).float()
            return (logits if self.head.ids is None else logits[:, self.head.ids]).softmax(-1)

    def _tokens(self, columns: Tensor) -> Tensor:
        ids: Tensor | None = self.head.ids
        return columns if ids is None else ids[columns]

    def _losses(self, logits: Tensor, law: Tensor | None, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Each guess's loss [m], and which of them count; a token that the head does not know teaches only softly."""
        if law is not None:
            return cross_entropy(logits, law), counts
        if self.head.ids is None:
            return token_loss(logits, tokens), counts
        known = tokens[:, None] == self.head.ids
        return token_loss(logits, known.long().argmax(-1)), counts & known.any(-1)
