"""What the training loop and a family of drafters agree on: one text with its hidden states in, a loss out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..models.target import Target, TargetParts


@dataclass(frozen=True, slots=True)
class Features:
    """One text, and what the target saw in it. Nothing here carries a gradient.

    ids [n] int64 · mask [n] bool: whether token t belongs to an answer, so that a guess at it counts
    taps: layer id (0 is the first) → output of that decoder layer [n, H], one row per token
    """

    ids: Tensor
    mask: Tensor
    taps: Mapping[int, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.ids, self.mask, *self.taps.values()))

    def to(self, device: torch.device) -> Features:
        """The same on another device; on its own, the same tensors."""
        return Features(self.ids.to(device), self.mask.to(device), {layer: rows.to(device) for layer, rows in self.taps.items()})


class Task(Protocol):
    """A drafter in training. One file in train/ per family."""

    @property
    def module(self) -> nn.Module: ...           # what the optimizer sees: its parameters with requires_grad
    @property
    def taps(self) -> tuple[int, ...]: ...       # the layers it reads; the last one's among them if the loss needs the target's logits

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        """A scalar loss (mean over the guesses that count) and figures to show, such as accuracy per depth."""
        ...

    def save(self, folder: Path) -> None:
        """Write the drafter as `drafters` load it (models.heads.files.write_files)."""
        ...


def require_laws(target: Target) -> None:
    """Raises LoadError unless the target's distribution can be had from the outputs of its last layer (`logits_after`): of a few tokens
    that is looked at."""
    parts, tokens = target.parts, torch.arange(min(8, target.vocab_size), device=target.device)
    if parts.norm is None or parts.output is None or parts.embed is None:
        raise LoadError("this target shows no embedding, final norm and output matrix, so its distribution cannot be had from its hidden "
                        "states; expected a decoder whose last layer, norm and output matrix are known")
    last = len(parts.layers) - 1
    target.set_taps((last,))
    slot = target.open(tokens.tolist(), "laws")
    try:
        scores = target.extend([slot], [tokens])
        wanted, found = scores.logits[0].float(), logits_after(parts, scores.taps[last][-1:])[0].float()
    finally:
        target.close(slot)
        target.set_taps(())
    off, most = float((wanted - found).abs().max()), float(wanted.abs().max())
    if not off <= 0.05 * most + 1e-3:
        raise LoadError(f"the logits of this target are not what its final norm and output matrix give: they differ by {off:.3g}, at "
                        f"most {most:.3g}; expected a family of which it is known what happens behind the output matrix")


def saved_dtype(parts: TargetParts) -> torch.dtype:
    """The precision to save a drafter in: that of the target's checkpoint, else of its embedding."""
    assert parts.embed is not None, "a target has an embedding"
    return parts.saved_as or next(iter(parts.embed.parameters())).dtype


@torch.no_grad()
def logits_after(parts: TargetParts, states: Tensor) -> Tensor:
    """What the target says [n, V] after each of these outputs [n, H] of its last layer."""
    assert parts.norm is not None and parts.output is not None, "checked by require_laws"
    return parts.finished(parts.output(parts.norm(states)))
