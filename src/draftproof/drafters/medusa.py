"""`medusa`: heads that guess all depths from one hidden state (arXiv 2401.10774). A tree's children at one depth are the same
below every node, the best of that depth's head under the target's own noise, so that the tree costs no more than the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from torch import Tensor

from ..core.upload import uploaded
from ..models.heads.medusa import MedusaHead
from ..types import Draft
from .base import Noise, NoOptions, Picks, Site, pick, published
from .grow import CANDIDATES
from .spines import collected
from .vector import Line, Path, VectorDrafter


class MedusaDrafter(NoOptions, VectorDrafter):
    """`medusa:PATH`. Carried from level to level: the logits of all depths [B, depth, V]."""

    name = "medusa"
    takes_path: ClassVar[bool] = True
    widest = 8          # further nodes cost nothing here

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published(cls.name, MedusaHead.read, path, site), site.target.parts, site.target.vocab_size)

    def begin(self, lines: Sequence[Line], depth: int) -> Tensor:
        logits: Tensor = self.head(self.hidden(lines), depth)
        return logits

    def step(self, level: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return carry[:, level], carry

    def chains(self, lines: Sequence[Line], noise: Noise) -> list[Draft]:
        """All levels in one choice, unless options look back at the guesses before."""
        if any(line.state.ranking.names_tokens for line in lines):
            return super().chains(lines, noise)
        places = [(i, level) for i, line in enumerate(lines) for level in range(line.depth)]
        logits = self.begin(lines, max(line.depth for line in lines))
        mine = [lines[i] for i, _ in places]
        flat = logits.flatten(0, 1)
        if len(places) < len(flat):
            flat = flat[uploaded([i * logits.shape[1] + level for i, level in places], flat.device)]
        picks = pick(flat, [line.state.ranking.rows(()) for line in mine], [line.seq for line in mine],
                     [len(lines[i].seq.tokens) + level for i, level in places], noise, max(2, 1 + max(line.extra[0] for line in lines)),
                     self.head.ids, self.vocab_size)
        host = picks.tokens[:, 0].tolist() if self.device.type == "cpu" else [-1] * len(places)
        start = 0
        for line in lines:
            rows = range(start, start + line.depth)
            ends = next((level for level, row in enumerate(rows) if host[row] in line.seq.end_ids), line.depth - 1)
            if ends < line.depth - 1:
                line.reason = "the draft ends the text"
            line.rows, start = list(rows[:ends + 1]), rows.stop
        return collected(lines, [picks], self.vocab_size, self.name)

    def candidates(self, lines: Sequence[Line], level: int, carry: Tensor, tokens: Tensor, paths: Sequence[Sequence[Path]],
                   noise: Noise) -> tuple[Picks, Tensor]:
        """One choice per sequence serves its whole frontier; only options that look back tell its nodes apart."""
        count, slots = tokens.shape
        apart = any(line.state.ranking.looks_back for line in lines)
        logits = carry[:, level].repeat_interleave(slots, 0) if apart else carry[:, level]
        groups = [line.state.ranking.rows(*(paths[i] if apart else ((),))) for i, line in enumerate(lines)]
        picks = pick(logits, groups, [line.seq for line in lines], [len(line.seq.tokens) + level for line in lines], noise,
                     CANDIDATES, self.head.ids, self.vocab_size, shares=True)
        if apart or slots == 1:
            return picks, carry
        tokens, values, shares = (part.repeat_interleave(slots, 0) for part in picks.offered(picks.tokens.shape))
        return Picks(tokens, values, None, picks.ids, shares), carry

    def width(self, line: Line) -> int:
        return self.widest

    def follow(self, carry: Tensor, rows: Tensor) -> Tensor:
        return carry
