"""DSpark heads (arXiv 2607.05147): a DFlash block whose slots are tied together by a small Markov head, and a confidence head.

    vanilla   bias = W2 W1[previous token]
    gated     bias = W2 (sigmoid(gate_proj([h, W1[previous]])) · W1[previous])
    rnn       gate, candidate, out = joint_proj([state, W1[previous], h]);  state ← σ(gate) state + (1 − σ(gate)) tanh(candidate);
              bias = W2 tanh(out); the state is 0 in front of a block
    confidence of a slot = proj([h]) or proj([h, W1[previous]]): the log-odds that the target accepts its token

h is the slot's hidden state. Slot i guesses the token i + 1 places behind the anchor. Keys: DFlash's, `markov_head.markov_w1.weight`
[V, r], `markov_head.markov_w2.weight` [Vd, r], `markov_head.gate_proj.*` or `markov_head.joint_proj.*`, `confidence_head.proj.*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import LoadError
from ..target import TargetParts
from .dflash import DFlash
from .eagle import settle
from .files import HeadFiles

KINDS = ("vanilla", "gated", "rnn")
SIGNS = {"gated": "gate_proj", "rnn": "joint_proj"}


class MarkovHead(nn.Module):
    """Logits that a token lends to the next one."""

    def __init__(self, kind: str, vocab_size: int, out_size: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, out_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """previous […] tokens of the target, hidden […, H], state […, r] or None → bias […, Vd] and the next state."""
        before = self.markov_w1(previous)
        if self.kind == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat((hidden, before), -1))) * before
        elif self.kind == "rnn":
            state = torch.zeros_like(before) if state is None else state
            gate, candidate, before = self.joint_proj(torch.cat((state, before, hidden), -1)).chunk(3, -1)
            gate, before = torch.sigmoid(gate), torch.tanh(before)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(before), state


class ConfidenceHead(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)
        return out.squeeze(-1)


class DSpark(DFlash):
    """See the head of this file."""

    architecture, family = "Qwen3DSparkModel", "dspark"
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.markov_head, self.confidence_head = None, None

    def give(self, files: HeadFiles, tensors: Mapping[str, Tensor]) -> None:
        settings = {**files.config, **(files.config.get("dflash_config") or {})}
        w1, w2 = (tensors.get(f"markov_head.{name}.weight") for name in ("markov_w1", "markov_w2"))
        if w1 is not None and w2 is not None:
            kind = next((kind for kind, name in SIGNS.items() if f"markov_head.{name}.weight" in tensors), "vanilla")
            stated = str(settings.get("markov_head_type") or kind).lower()
            if stated != kind:
                raise LoadError(f"{files.path}: markov_head_type is {stated!r} and the tensors are those of {kind!r}; expected the same of "
                                f"{', '.join(KINDS)} in both")
            if w1.shape[0] != self.vocab_size:
                raise LoadError(f"{files.path}: markov_w1 has {w1.shape[0]} rows, the target {self.vocab_size} tokens; "
                                "expected a head that was trained for this target's vocabulary")
            self.markov_head = MarkovHead(kind, w1.shape[0], w2.shape[0], w1.shape[1], self.shape.hidden)
        proj = tensors.get("confidence_head.proj.weight")
        if proj is not None:
            widths = {self.shape.hidden, self.shape.hidden + (self.markov_head.rank if self.markov_head is not None else 0)}
            if proj.shape[1] not in widths:
                raise LoadError(f"{files.path}: the confidence head reads {proj.shape[1]} values; expected "
                                f"{' or '.join(map(str, sorted(widths)))}")
            self.confidence_head = ConfidenceHead(proj.shape[1], "confidence_head.proj.bias" in tensors)

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 2, block: int = 7, taps: Sequence[int] | None = None, mask_token: int | None = None,
              context: int | None = None, rank: int = 64, kind: str = "vanilla", confidence: bool = True, **sizes: Any) -> Self:
        head = super().fresh(parts, layers, block, taps, mask_token, context, **sizes)
        head.markov_head = MarkovHead(kind, head.vocab_size, head.vocab_size, rank, head.shape.hidden)
        nn.init.zeros_(head.markov_head.markov_w2.weight)          # begins as a plain DFlash
        head.confidence_head = ConfidenceHead(head.shape.hidden + rank) if confidence else None
        return settle(head, parts)

    def published(self) -> dict[str, Any]:
        """DeepSpec's flat fields beside z-lab's."""
        markov, confidence = self.markov_head, self.confidence_head
        wide = confidence is not None and confidence.proj.in_features > self.shape.hidden
        return {**super().published(), "mask_token_id": self.layout.mask_token, "target_layer_ids": list(self.taps),
                "markov_rank": 0 if markov is None else markov.rank, "markov_head_type": "vanilla" if markov is None else markov.kind,
                "enable_confidence_head": confidence is not None, "confidence_head_with_markov": wide}

    def tie(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits […, Vd] of a slot, given the token before it; and the state that its next slot wants."""
        if self.markov_head is None:
            return logits, None
        bias, state = self.markov_head(previous, hidden, state)
        return logits + bias, state

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Log-odds […] that the target accepts the slot's token, None without a confidence head. As trained: published ones are too
        sure of themselves, so nothing is decided by them."""
        if self.confidence_head is None:
            return None
        wide = self.confidence_head.proj.in_features > self.shape.hidden
        x = torch.cat((hidden, self.markov_head.markov_w1(previous)), -1) if wide and self.markov_head is not None else hidden
        found: Tensor = self.confidence_head(x)
        return found
