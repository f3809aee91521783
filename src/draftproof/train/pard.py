"""Training of PARD (arXiv 2504.18583): a language model learns to fill several masks behind a text in one pass.

Row (k, t) guesses token t + 1 from the text up to t − k and k masks behind it, at positions t − k + 1 … t; k = 0 is the ordinary
language model. All rows of a text go through the model at once, under a mask that shows each only what it will see when
served. Of the rows with k masks a share ratio^k is kept, nested, so that a row's own chain is always whole (conditional
drop of tokens), and the cost is a small multiple of ordinary training. Labels are the target's distributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import LoadError
from ..models.causal import CausalLM
from ..models.target import TargetParts
from .base import Features, logits_after
from .dflash import cross_entropy


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one text: masks [R], how many stand before the guess; last [R], the last true token they see; and what they read."""

    masks: Tensor
    last: Tensor

    @property
    def positions(self) -> Tensor:
        return self.last + self.masks

    def ids(self, text: Tensor, mask_token: int) -> Tensor:
        return torch.where(self.masks == 0, text[self.last], mask_token)

    def visible(self) -> Tensor:
        """bool [R, R]: true tokens up to `last`, and of the masks those of the own chain up to oneself."""
        masks, last = self.masks, self.last
        true = (masks[None] == 0) & (last[None] <= last[:, None])
        chain = (masks[None] > 0) & (last[None] == last[:, None]) & (masks[None] <= masks[:, None])
        return true | chain


def rows_of(size: int, possible: Tensor, depth: int, ratio: float, least: float) -> Rows:
    """All rows without a mask, and of those with k = 1 … depth − 1 a share max(ratio^k, least) of the `possible` last tokens [m],
    nested, as far as a token to guess is left. From torch's own generator."""
    order = possible[torch.randperm(possible.shape[0]).to(possible.device)]
    masks, last = [torch.zeros(size, dtype=torch.int64, device=possible.device)], [torch.arange(size, device=possible.device)]
    for k in range(1, depth):
        kept = order[:max(1, round(possible.shape[0] * max(ratio**k, least)))]
        kept = kept[kept + k + 1 < size]
        last.append(kept)
        masks.append(torch.full_like(kept, k))
    return Rows(torch.cat(masks), torch.cat(last))


class PardTask:
    """`train.base.Task`. depth: tokens guessed in one pass; mask_token: a token that texts do not hold."""

    def __init__(self, lm: CausalLM, parts: TargetParts, mask_token: int, depth: int = 8, ratio: float = 0.7, least: float = 0.2) -> None:
        if not 0 <= mask_token < lm.vocab_size:
            raise LoadError(f"mask token {mask_token}: expected one of the model's {lm.vocab_size} tokens, best one that no text holds")
        lm.require_rows()
        self.lm, self.parts, self.mask_token = lm, parts, mask_token
        self.depth, self.ratio, self.least = depth, ratio, least
        self.module = lm.module.requires_grad_(True)
        self.last = int(parts.config.get_text_config().num_hidden_layers) - 1
        self.taps = (self.last,)

    def save(self, folder: Path) -> None:
        self.lm.save(folder, pard_token=self.mask_token, spd_type="pard")

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        """Mean over the guesses at tokens that count; figures: hit_i, the share of guesses behind i − 1 masks that are the target's
        likeliest token."""
        total, rows = torch.zeros((), device=batch[0].ids.device), 0
        right, seen = torch.zeros(self.depth), torch.zeros(self.depth)
        for text in batch:
            size = text.ids.shape[0]
            possible = text.mask[1:].nonzero()[:, 0]          # the last true token stands right before one that counts
            if not possible.shape[0]:
                continue
            chosen = rows_of(size, possible, self.depth, self.ratio, self.least)
            logits = self.lm.logits_of_rows(chosen.ids(text.ids, self.mask_token), chosen.positions, chosen.visible())
            at = chosen.positions
            counts = (at + 1 < size) & text.mask[(at + 1).clamp(max=size - 1)]
            wanted = logits_after(self.parts, text.taps[self.last])[at[counts]]
            width = min(wanted.shape[-1], logits.shape[-1])
            guessed, wanted, masks = logits[counts][:, :width], wanted[:, :width], chosen.masks[counts].cpu()
            total, rows = total + cross_entropy(guessed, wanted).sum(), rows + masks.shape[0]
            hits = (guessed.argmax(-1) == wanted.argmax(-1)).float().cpu()
            right, seen = right.index_add(0, masks, hits), seen.index_add(0, masks, torch.ones_like(hits))
        return total / max(1, rows), {f"hit_{i + 1}": hit for i, hit in enumerate((right / seen.clamp(min=1)).tolist())}
