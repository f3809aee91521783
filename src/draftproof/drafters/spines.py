"""Chains, and what stands beside them, out of what levels picked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..core.upload import index_of, rows_of
from ..types import Draft, DraftLaw, SequenceView
from .base import Picks, joined_laws
from .grow import SURE


class Line(Protocol):
    """One sequence: its row of every level's picks, counted over all of them, siblings beside each level, and why it ended early."""

    rows: list[int]
    reason: str

    @property
    def seq(self) -> SequenceView: ...
    @property
    def extra(self) -> Sequence[int]: ...


def collected(lines: Sequence[Line], levels: Sequence[Picks], vocab_size: int, name: str) -> list[Draft]:
    """A draft of each line. Every line's rows are brought together first, for all at once."""
    order = index_of([row for line in lines for row in line.rows], levels[0].tokens.device)
    tokens, values = torch.cat([p.tokens for p in levels])[order], torch.cat([p.values for p in levels])[order]
    logq, ids = joined_laws(levels, vocab_size)
    if any(any(line.extra[:len(line.rows)]) for line in lines):         # trees are shaped on the host: one look for all of them
        tokens, values = tokens.cpu(), values.cpu()
    margins = _margins(values)
    drafts, end = [], 0
    for line in lines:
        count = len(line.rows)
        mine, end = slice(end, end + count), end + count
        if not count:
            drafts.append(Draft.empty(name, line.reason))
            continue
        law = None if logq is None or line.seq.sampling.greedy else DraftLaw(rows_of(logq, line.rows), tuple(range(count)), ids)
        if any(line.extra[:count]):
            drafts.append(spine(tokens[mine], values[mine], line.extra[:count], law, name, line.reason))
        else:
            score = None if margins is None else margins[mine]
            drafts.append(Draft.chain(tokens[mine, 0], score=score, law=law, drafter=name, reason=line.reason))
    return drafts


def spine(tokens: Tensor, values: Tensor, extra: Sequence[int], law: DraftLaw | None, name: str, reason: str) -> Draft:
    """tokens, values [levels, k], best first: the line of the best, and extra[level] siblings beside it in the order of their draw.
    law: rows per level; the draft's has one per node. score: perturbed margin."""
    if not any(extra):
        return Draft.chain(tokens[:, 0], score=_margins(values), law=law, drafter=name, reason=reason)
    return beside(tokens.tolist(), values.tolist(), extra, law, name, reason)


def beside(ids: Sequence[Sequence[int]], heights: Sequence[Sequence[float]], extra: Sequence[int], law: DraftLaw | None, name: str,
           reason: str) -> Draft:
    """`spine` of numbers on the host, where the draft stays."""
    flat: list[int] = []
    parents: list[int] = []
    score_of: list[float] = []
    row: list[int] = []
    parent = -1
    for level, more in enumerate(extra):
        first = len(flat)
        for j in range(1 + min(more, len(ids[level]) - 1)):
            height = heights[level][j]
            if height == -math.inf:
                break
            rival = heights[level][0 if j else 1] if len(ids[level]) > 1 else -math.inf
            flat.append(ids[level][j])
            parents.append(parent)
            score_of.append(min(height - rival, SURE))
            row.append(level)
        parent = first
    return Draft(torch.tensor(flat, dtype=torch.int64), tuple(parents), score=torch.tensor(score_of), drafter=name, reason=reason,
                 law=None if law is None else DraftLaw(law.logq, tuple(row), law.ids))


def _margins(values: Tensor) -> Tensor | None:
    """How far the best of each level [levels, k] lies above the second."""
    return (values[:, 0] - values[:, 1]).float().clamp(max=SURE) if values.shape[1] > 1 else None
