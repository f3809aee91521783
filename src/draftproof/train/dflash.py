"""Training of block heads: blocks of masks behind random anchors of a text, against what the target says at every place.

DFlash (arXiv 2602.06036): cross-entropy with weights that fall along the block, exp(−i/γ). DSpark (arXiv 2607.05147): 0.1
cross-entropy + 0.9 total variation, and the confidence head learns the chance of acceptance, 1 − total variation, by binary
cross-entropy. DFlash 2: DFlash's loss, and the selector's cross-entropy over each slot's candidates, among which the target's likeliest
token is put where it is missing. Domino and XPress: DFlash's loss, of slots tied by the text's own tokens. Cross-entropies are taken
against the target's distribution, not against one draw from it: the same in the mean, with less noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..models.heads.dflash import Anchored, DFlash
from ..models.heads.dflash2 import DFlash2
from ..models.heads.domino import Domino
from ..models.heads.dspark import DSpark
from ..models.heads.xpress import XPress
from .base import Features, logits_after

ANCHORS = 32        # blocks per text and step


def decay(slots: int, gamma: float) -> Tensor:
    """exp(−i/γ), i = 0 … slots − 1: a slot counts only if all before it were right."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32) / gamma)


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """−Σ p log q […] of logits and the target's logits […, V], in float32."""
    return -(wanted.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


def total_variation(logits: Tensor, wanted: Tensor) -> Tensor:
    """½ Σ |p − q| […] = 1 − the chance that a draw from q is accepted."""
    return 0.5 * (wanted.float().softmax(-1) - logits.float().softmax(-1)).abs().sum(-1)


def anchors_of(mask: Tensor, count: int) -> Tensor:
    """At most `count` random positions, rising, right before a token that counts; from torch's own generator."""
    possible = mask[1:].nonzero()[:, 0].cpu()
    return possible[torch.randperm(possible.shape[0])[:count]].sort().values.to(mask.device)


class DFlashTask:
    """`train.base.Task` of a DFlash head, which learns in float32 and is saved in the target's precision."""

    def __init__(self, head: DFlash) -> None:
        parts = head.target
        self.saved_as = parts.saved_as or head.dtype
        self.module = self.head = head.float().requires_grad_(True)
        self.last = int(parts.config.get_text_config().num_hidden_layers) - 1
        self.taps = tuple(sorted({*head.taps, self.last}))
        self.weights = decay(head.reach, 7.0 if head.block > 8 else 4.0).to(head.norm.weight.device)

    def save(self, folder: Path) -> None:
        self.head.save(folder, self.saved_as)

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        """Mean over the slots that count, weighed; figures: accepted, how many slots in a row have the target's likeliest token,
        and hit_i, the share of slots i that have it."""
        total = torch.zeros((), device=self.head.norm.weight.device)
        weight, seen, right, rows = total.clone(), 0, torch.zeros(self.head.reach), torch.zeros(self.head.reach)
        accepted = 0.0
        for text in batch:
            found = self._text(text)
            if found is None:
                continue
            loss, weights, valid, hits = found
            total, weight = total + (loss * weights).sum(), weight + weights.sum()
            seen, accepted = seen + valid.shape[0], accepted + float((hits & valid).int().cumprod(-1).sum())
            right, rows = right + (hits & valid).sum(0).cpu(), rows + valid.sum(0).cpu()
        figures = {"accepted": accepted / max(1, seen)}
        figures |= {f"hit_{i + 1}": hit for i, hit in enumerate((right / rows.clamp(min=1)).tolist())}
        return total / weight.clamp(min=1e-6), figures

    def _text(self, text: Features) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Loss, weights, which slots count, and which have the target's likeliest token, [A, reach] each."""
        head, size = self.head, text.ids.shape[0]
        anchors = anchors_of(text.mask, ANCHORS)
        if not anchors.shape[0]:
            return None
        features = torch.cat([text.taps[tap] for tap in head.taps], -1)
        context = head.keys(head.fuse(features), torch.arange(size, device=text.ids.device))
        rows, first = head.rows(text.ids[anchors], anchors, Anchored(head, context, anchors)), head.block - head.reach
        ahead = anchors[:, None] + torch.arange(-first, head.reach, device=anchors.device)    # the place of the token before each row
        before = ahead[:, first:]                                                             # slot i guesses the token behind before[:, i]
        inside = before + 1 < size
        ahead, before = ahead.clamp(0, size - 2), before.clamp(max=size - 2)
        valid = (inside & text.mask[before + 1]).int().cumprod(-1).bool()
        with torch.no_grad():
            wanted = self._wanted(text.taps[self.last][before])
        logits, loss = self._losses(head.logits(rows[:, first:]), wanted, rows, text.ids[ahead])
        return loss, self.weights * valid, valid, logits.argmax(-1) == wanted.argmax(-1)

    def _wanted(self, states: Tensor) -> Tensor:
        """The target's logits over the head's tokens, of outputs of its last layer."""
        logits = logits_after(self.head.target, states)
        return logits if self.head.ids is None else logits[..., self.head.ids]

    def _losses(self, logits: Tensor, wanted: Tensor, rows: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The final logits [A, S, V], and the loss of every slot [A, S]. rows [A, block, H] and the tokens before them [A, block]: of the
        whole block, of which the slots are the last."""
        return logits, cross_entropy(logits, wanted)

    def _slots(self, whole: Tensor) -> Tensor:
        return whole[:, self.head.block - self.head.reach:]

    def _tied(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [A, S, V] of slots that the head ties by a state, behind the text's own tokens."""
        tied: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(logits.shape[1]):
            one, state = self.head.tie(logits[:, slot], previous[:, slot], hidden[:, slot], state)  # type: ignore[operator]
            tied.append(one)
        return torch.stack(tied, 1)


class DSparkTask(DFlashTask):
    """`Task` of a DSpark head: slots are tied by the text's own tokens."""

    CE, TV, CONFIDENCE = 0.1, 0.9, 1.0
    head: DSpark

    def _losses(self, logits: Tensor, wanted: Tensor, rows: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        hidden, previous = self._slots(rows), self._slots(previous)
        logits = self._tied(logits, hidden, previous)
        variation = total_variation(logits, wanted)
        loss = self.CE * cross_entropy(logits, wanted) + self.TV * variation
        sure = self.head.confidence(hidden, previous)
        if sure is not None:
            chance = (1 - variation.detach()).clamp(0, 1)
            loss = loss + self.CONFIDENCE * functional.binary_cross_entropy_with_logits(sure.float(), chance, reduction="none")
        return logits, loss


class DFlash2Task(DFlashTask):
    """`Task` of a DFlash 2 head: slots are tied by the text's own tokens."""

    head: DFlash2

    def _losses(self, logits: Tensor, wanted: Tensor, rows: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        selector, (candidates, unary), previous = self.head.candidate_selector, self.head.candidates(logits), self._slots(previous)
        gate, best = selector.hidden_projection(self._slots(rows)), wanted.argmax(-1, keepdim=True)
        scores = unary + selector(gate, previous, candidates)
        chosen = torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(-1, candidates, scores.detach())
        lacking, least = (candidates != best).all(-1, keepdim=True), unary.argmin(-1, keepdim=True)
        learnt = candidates.scatter(-1, least, torch.where(lacking, best, candidates.gather(-1, least)))
        scores = logits.gather(-1, learnt).float() + selector(gate, previous, learnt)
        return chosen, cross_entropy(logits, wanted) + cross_entropy(scores, wanted.gather(-1, learnt))


class DominoTask(DFlashTask):
    """`Task` of a Domino head: slots are tied by the text's own tokens."""

    head: Domino

    def _losses(self, logits: Tensor, wanted: Tensor, rows: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._tied(logits, self._slots(rows), self._slots(previous))
        return logits, cross_entropy(logits, wanted)


class XPressTask(DFlashTask):
    """`Task` of an XPress head: every row reads the text's own tokens, to which refining leads where all guesses stand."""

    head: XPress

    def _losses(self, logits: Tensor, wanted: Tensor, rows: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        refiner = self.head.xpress_head
        read = refiner.read(refiner.features(rows), previous)
        bias = torch.stack([refiner(read[:, :row + 1]) for row in range(self.head.block - self.head.reach, self.head.block)], 1)
        return logits + bias, cross_entropy(logits + bias, wanted)
