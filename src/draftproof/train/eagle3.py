"""Training an EAGLE-3 head by training-time test (Li et al., arXiv 2503.01840): it learns from its own outputs, as it is served.

Step 0 of entry t reads the target's features at t and token t + 1 and is asked for token t + 2. Step i reads the head's own
output of step i − 1 and token t + 1 + i, which is the text's (tokens of its own guessing hurt), at position t + i; its attention
sees the true entries up to t and the entry's own chain. Labels are the target's laws over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.budget import match_acceptance
from ..errors import LoadError
from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.vocabulary import mask, offsets
from ..models.target import TargetParts
from .base import Features, logits_after, saved_dtype
from .mtp import StepsTask, Unrolled

ROWS = 256      # rows of the target's logits at a time; at a vocabulary of 128k they are large
TOP, TINY = 24, 1e-9


def draft_vocabulary(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """d2t int64 [size] (offsets) and t2d bool [V] of the `size` tokens with the highest counts [V]; ties, and what never
    occurs, by the lowest id. Count tokens that the target wrote: the vocabulary is fixed before training."""
    if not 1 <= size <= counts.shape[0]:
        raise LoadError(f"a draft vocabulary of {size} of {counts.shape[0]} tokens; expected from 1 to all of them")
    ids = torch.sort(counts, descending=True, stable=True).indices[:size].sort().values
    return offsets(ids), mask(ids, counts.shape[0])


def logit_blocks(parts: TargetParts, last: Tensor) -> Iterator[Tensor]:
    """Logits [≤ ROWS, V] float32, block by block, of outputs [N, H] of the target's last layer."""
    for start in range(0, last.shape[0], ROWS):
        yield logits_after(parts, last[start:start + ROWS]).float()


@torch.no_grad()
def labels(parts: TargetParts, last: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the target says after each token, seen through the draft vocabulary ids [Vd] (None: all).

    Laws [N, Vd], renormalised · best [N], the draft token that is the target's likeliest · known [N] bool, whether there is one.
    """
    laws, best, known = [], [], []
    for logits in logit_blocks(parts, last):
        chosen = logits if ids is None else logits[:, ids]
        laws.append(chosen.softmax(-1))
        best.append(chosen.argmax(-1))
        known.append(chosen.amax(-1) >= logits.amax(-1))
    return torch.cat(laws), torch.cat(best), torch.cat(known)


def soft_cross_entropy(logits: Tensor, laws: Tensor) -> Tensor:
    """−Σ p log q [R] of the head's logits [R, Vd] and the target's laws [R, Vd]."""
    return -(laws * logits.float().log_softmax(-1)).sum(-1)


def acceptance(logits: Tensor, laws: Tensor, temperature: float, top: int = TOP) -> Tensor:
    """`core.budget.match_acceptance` [R] at this temperature, of the head's logits [R, V] and the target's laws [R, V]. Each row's `top`
    tokens that matter most are taken one by one, all others as if they were one: an upper bound, close where these hold nearly all."""
    q = (logits.float() / temperature).softmax(-1)
    p = laws if temperature == 1 else (laws.clamp(min=TINY).log() / temperature).softmax(-1)
    most = torch.maximum(p, q.detach()).topk(min(top, p.shape[-1])).indices
    few = (law.gather(1, most) for law in (p, q))
    return match_acceptance(*(torch.cat((law, (1 - law.sum(-1, keepdim=True)).clamp(min=0.0)), 1) + TINY for law in few))


class Eagle3Task(StepsTask):
    """Soft cross-entropy. The target's likeliest token is the right one, given the text's own tokens before it."""

    module: Eagle3Head

    def __init__(self, head: Eagle3Head, parts: TargetParts, steps: int = 5, decay: float = 0.8, accept_at: float | None = None) -> None:
        """accept_at: learn to be accepted at this temperature, once the law is roughly known; None: the law alone."""
        super().__init__(steps, decay)
        if parts.output is None or parts.embed is None:
            raise LoadError("the target has no embedding or output matrix to learn from; expected a decoder-only language model")
        self.module, self.parts, self.accept_at = head.float().requires_grad_(True), parts, accept_at
        self.last = int(parts.config.get_text_config().num_hidden_layers) - 1
        self.taps: tuple[int, ...] = tuple(sorted({*head.taps, self.last}))
        self.saved_as = saved_dtype(parts)

    def _one(self, text: Features) -> list[tuple[Tensor, Tensor, int]]:
        """Guesses whose token the draft vocabulary lacks are asked for, and do not count."""
        head, ids, attend = self.module, text.ids, Unrolled(self.module.layers.windows)
        length = ids.shape[0]
        laws, best, known = labels(self.parts, text.taps[self.last], head.ids)
        hidden = head.fuse(torch.cat([text.taps[tap] for tap in head.taps], -1).float())
        found = []
        for step in range(min(self.steps, length - 2)):
            rows = length - 2 - step
            places = torch.arange(rows, device=ids.device) + step
            hidden = head.step(ids[step + 1:step + 1 + rows], hidden[:rows], places, attend)
            wanted = text.mask[step + 2:]
            counts = (wanted & known[step + 1:step + 1 + rows]).nonzero()[:, 0]
            at = counts + step + 1
            logits = head.logits(hidden[counts])
            found.append((self._wrong(logits, laws[at]), logits.argmax(-1) == best[at], int(wanted.sum())))
        return found

    def _wrong(self, logits: Tensor, laws: Tensor) -> Tensor:
        """The loss [R] of guesses. The better a step's guesses are, the more it is their refusal itself and the less cross-entropy, which
        leads there from afar (LK losses, arXiv 2602.23881, with the chance under shared noise for the overlap of the laws)."""
        far = soft_cross_entropy(logits, laws)
        if self.accept_at is None or not len(far):
            return far
        stand = acceptance(logits, laws, self.accept_at)
        share = torch.exp(-3.0 * stand.detach().mean())
        return share * far + (1 - share) * (1 - stand)
