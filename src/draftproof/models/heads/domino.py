"""Domino heads (SGLang 0.5.23, `projector_type` domino): a DFlash block whose slots are corrected by a GRU over the tokens before them.

    s_i    = GRU(embedding of the token before slot i, s_(i−1))        from the anchor on; s is 0 in front of it
    bias_i = embed_proj.2(silu(embed_proj.0([h_i, s_i])))              added to the slot's logits; the first slot has none

h_i is the slot's hidden state. Keys: DFlash's, `prefix_gru.weight_ih_l0` [3g, H] and `.weight_hh_l0` [3g, g] (torch's GRU, without biases),
`embed_proj.0.weight` [e, H + g], `embed_proj.2.weight` [Vd, e]. Config, in dflash_config or at the top: shift_label (whether the anchor's
slot guesses), pure_draft_prefix_len (slots without a bias: 1), gru_hidden_dim, emb_dim. SGLang looks for candidates among the likeliest
tokens only; here all are in view.
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
from .files import HeadFiles, needed


class Domino(DFlash):
    """See the head of this file."""

    family = "domino"
    prefix_gru: nn.GRU
    embed_proj: nn.Sequential

    def give(self, files: HeadFiles, tensors: Mapping[str, Tensor]) -> None:
        settings = {**files.config, **(files.config.get("dflash_config") or {})}
        if settings.get("pure_draft_prefix_len") != 1 or not isinstance(settings.get("shift_label"), bool):
            raise LoadError(f"{files.path}: pure_draft_prefix_len is {settings.get('pure_draft_prefix_len')!r} and shift_label "
                            f"{settings.get('shift_label')!r}; expected 1, and true or false, as Domino heads are published")
        state, inner, out = (needed(tensors, name, files.path) for name in
                             ("prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"))
        self._correct(state.shape[1], inner.shape[0], out.shape[0])

    def _correct(self, width: int, inner: int, out: int) -> None:
        self.prefix_gru = nn.GRU(self.shape.hidden, width, bias=False)
        self.embed_proj = nn.Sequential(nn.Linear(self.shape.hidden + width, inner, bias=False), nn.SiLU(),
                                        nn.Linear(inner, out, bias=False))

    @classmethod
    def fresh(cls, parts: TargetParts, layers: int = 2, block: int = 8, taps: Sequence[int] | None = None, mask_token: int | None = None,
              context: int | None = None, rank: int = 64, **sizes: Any) -> Self:
        head = super().fresh(parts, layers, block, taps, mask_token, context, **sizes)
        head._correct(rank, rank, head.vocab_size)
        nn.init.zeros_(next(head.embed_proj[2].parameters()))     # begins as a plain DFlash
        return settle(head, parts)

    def published(self) -> dict[str, Any]:
        found = super().published()
        found["dflash_config"] |= {"projector_type": "domino", "shift_label": self.layout.from_anchor, "pure_draft_prefix_len": 1,
                                   "gru_hidden_dim": self.prefix_gru.hidden_size, "emb_dim": self.embed_proj[0].out_features}
        return found

    def tie(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits [N, Vd] of a slot, given the token before it and the state that the slot before left, None at the first; and its own."""
        _, (read,) = self.prefix_gru(self.embed(previous)[None], None if state is None else state[None])
        return (logits if state is None else logits + self.embed_proj(torch.cat((hidden, read), -1))), read

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """It has no belief of its own."""
        return None
