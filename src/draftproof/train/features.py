"""Hidden states on the fly: a text goes through the target, and what the tapped layers say is kept for one step, or in memory
for later epochs as long as there is room: on a processor the target's pass is a third of a step's work."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..models.target import Target
from .base import Features
from .corpus import Text


class Tapper:
    """Reads texts with the target. Each text has a tenant of its own, so that no prefix comes from a cache without its states.

    keep_mb: megabytes of features kept in main memory. The first texts that fit are kept, the others read anew each time: of texts
    that come once an epoch no other choice is met more often.
    """

    def __init__(self, target: Target, taps: Sequence[int], chunk: int = 512, keep_mb: float = 0) -> None:
        self.target, self.taps, self.chunk, self._count = target, tuple(sorted(set(taps))), chunk, 0
        self._kept: dict[Text, Features] = {}
        self._room = keep_mb * 1e6

    def read(self, texts: Sequence[Text]) -> list[Features]:
        """Features of each text, states in the target's dtype, as ordinary tensors (autograd may save them)."""
        self.target.set_taps(self.taps)
        try:
            found = [self._one(text) if text not in self._kept else self._kept[text].to(self.target.device) for text in texts]
        finally:
            self.target.set_taps(())
        for text, features in zip(texts, found, strict=True):
            if text not in self._kept and features.nbytes <= self._room:
                self._room -= features.nbytes
                self._kept[text] = features.to(torch.device("cpu"))
        return found

    def _one(self, text: Text) -> Features:
        self._count += 1
        ids = torch.tensor(text.ids, device=self.target.device)
        slot = self.target.open(text.ids, f"training {self._count}")
        rows: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.taps}
        try:
            for start in range(0, len(text.ids), self.chunk):
                part = ids[start:start + self.chunk]
                scores = self.target.extend([slot], [part])
                for layer in self.taps:
                    rows[layer].append(scores.taps[layer][:part.shape[0]].clone())
        finally:
            self.target.close(slot)
        mask = torch.arange(len(text.ids), device=self.target.device) >= text.answer_from
        with torch.inference_mode(False):
            return Features(ids, mask, {layer: torch.cat(parts).clone() for layer, parts in rows.items()})
