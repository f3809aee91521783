"""Drafts out of slots that are guessed at once: the part that block drafters share (`dflash`, `dspark`, `pard`).

A pass has given logits for every place behind the text. Where a place does not depend on what was guessed before it, one
`pick` draws all places of all sequences; where it does (a Markov head, or options that look back), it goes place by place.
Trees grow under `match` by worth after the noise (`drafters.grow`); where q is kept, siblings are fixed before the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..core.upload import rows_of, uploaded
from ..types import Draft, SequenceView
from .base import NOTHING, Noise, Picks, Ranking, pick
from .grow import CANDIDATES, Growth, Margins, evenly, longer
from .spines import collected

WIDEST = 8      # nodes of one sequence that a level extends at most


class Slots(Protocol):
    """What one pass says of the places behind the texts of several sequences."""

    tied: bool      # whether a place depends on the tokens guessed before it

    @property
    def ids(self) -> Tensor | None: ...       # int64 [Vd], None for the target's vocabulary

    def logits(self, level: int | Tensor, line: Tensor, came: Tensor, previous: Tensor | None) -> Tensor:
        """[N, Vd]: row i is place `level` of sequence line[i], reached from row came[i] of the call before by token previous[i]
        (None at the first place, behind the text's last token). Without `tied`, came and previous are not looked at, and level
        may be [N]."""
        ...

    def beliefs(self) -> list[Tensor]:
        """The drafter's own belief in the rows of all calls so far, to be joined; empty if it has none beside the margin."""
        ...


@dataclass(slots=True)
class Line:
    """One sequence within one `propose`."""

    seq: SequenceView
    ranking: Ranking
    place: int                              # of its draft in the answer
    depth: int
    nodes: int
    prices: Sequence[float] = ()                          # as in its budget
    reason: str = ""
    rows: list[int] = field(default_factory=list)         # its row of every level's picks, counted over the whole round
    path: tuple[int, ...] = ()                            # the chain on the host, where it is read
    extra: list[int] = field(default_factory=list)        # siblings beside each level of the chain


def parted(lines: Sequence[Line], noise: Noise) -> list[tuple[list[Line], bool]]:
    """Those that grow trees, then those that guess chains, with which they do; neither is empty."""
    grow = [not noise.keep_law and line.nodes > line.depth for line in lines]
    both = [([line for line, own in zip(lines, grow, strict=True) if own is tree], tree) for tree in (True, False)]
    return [(some, tree) for some, tree in both if some]


def chains(lines: Sequence[Line], slots: Slots, noise: Noise, vocab_size: int, device: torch.device, name: str) -> list[Draft]:
    """The best of every place, with siblings beside it where the budget has more nodes than levels."""
    edited = any(line.ranking.names_tokens for line in lines)
    read = edited or device.type == "cpu"                 # elsewhere a look at a token would wait for the device
    for line in lines:
        line.extra = evenly(line.depth, line.nodes - line.depth)
    width = max(2, 1 + max(line.extra[0] for line in lines))
    at_once = not slots.tied and not any(line.ranking.looks_back for line in lines)
    levels: list[Picks] = []
    live, row, level = list(range(len(lines))), 0, 0
    previous: Tensor | None = None
    came = torch.arange(len(lines), device=device)
    while live:
        deepest = max(line.depth for line in lines) if at_once else level + 1
        todo = [(i, at) for at in range(level, deepest) for i in live if at < lines[i].depth]
        line_of, level_of = uploaded(todo, device).unbind(1)
        logits = slots.logits(level_of if at_once else level, line_of, came, previous)
        picks = pick(logits, [lines[i].ranking.rows(lines[i].path) for i, _ in todo], [lines[i].seq for i, _ in todo],
                     [len(lines[i].seq.tokens) + at for i, at in todo], noise, width, slots.ids, vocab_size)
        levels.append(picks)
        host = picks.tokens[:, 0].tolist() if read else [-1] * len(todo)
        dead = (picks.values[:, 0] == -math.inf).tolist() if edited else [False] * len(todo)
        going = _extended(lines, todo, host, dead, row)
        row += len(todo)
        level += 1
        if at_once:
            break
        live = [todo[n][0] for n in going]
        came = uploaded(going, device, torch.int64)
        previous = picks.tokens[:, 0][came]
    return _collect(lines, levels, slots.beliefs(), vocab_size, name)


def _extended(lines: Sequence[Line], todo: Sequence[tuple[int, int]], host: Sequence[int], dead: Sequence[bool], row: int) -> list[int]:
    """Take what was picked into the lines, level after level; which of `todo` go on to a next level."""
    going, ended = [], set()
    for n, (i, at) in enumerate(todo):
        line = lines[i]
        if i in ended:
            continue
        if dead[n]:
            line.reason = NOTHING
            ended.add(i)
            continue
        line.rows.append(row + n)
        line.path += (host[n],)
        if host[n] in line.seq.end_ids and at + 1 < line.depth:
            line.reason = "the draft ends the text"
            ended.add(i)
        elif at + 1 < line.depth:
            going.append(n)
    return going


def _collect(lines: Sequence[Line], levels: Sequence[Picks], beliefs: Sequence[Tensor], vocab_size: int, name: str) -> list[Draft]:
    """Drafts out of the picks of all levels."""
    drafts = collected(lines, levels, vocab_size, name)
    if not beliefs:
        return drafts
    sure = torch.cat(list(beliefs)).float()
    return [replace(draft, score=rows_of(sure, line.rows)) if line.rows and not any(line.extra[:len(line.rows)]) else draft
            for line, draft in zip(lines, drafts, strict=True)]


def trees(lines: Sequence[Line], slots: Slots, noise: Noise, vocab_size: int, device: torch.device, name: str,
          margins: Margins) -> tuple[list[Draft], Growth]:
    """Trees by worth, and what grew, from which `margins` may learn."""
    deepest, batch = max(line.depth for line in lines), len(lines)
    history = any(line.ranking.looks_back for line in lines)
    growth = Growth([line.depth for line in lines], [line.nodes for line in lines], [line.seq.sampling.greedy for line in lines],
                    [line.seq.end_ids for line in lines], margins,
                    [min(WIDEST, max(2, line.nodes // line.depth + 1)) for line in lines], [line.prices for line in lines])
    seqs, count = [line.seq for line in lines], CANDIDATES       # of every line as many: company changes nothing
    paths: list[list[tuple[int, ...]]] = [[()] for _ in lines]
    line_of = came = torch.arange(batch, device=device)
    previous: Tensor | None = None
    width = 1
    tied = slots.tied or history
    whole = None if tied else _whole(lines, slots, noise, count, vocab_size, device)
    for level in range(deepest):
        if whole is None:
            logits = slots.logits(level, line_of, came, previous)
            picks = pick(logits, [line.ranking.rows(*paths[i]) for i, line in enumerate(lines)], seqs,
                         [len(seq.tokens) + level for seq in seqs], noise, count, slots.ids, vocab_size, shares=True)
            shape = (batch, width, -1)
            front = growth.grow(*picks.offered(shape))
        else:
            front = growth.grow(*(part[:, level:level + 1].expand(-1, width, -1) for part in whole))
        if front is None:
            break
        width = front.tokens.shape[1]
        if tied:
            paths = longer(paths, front) if history else [[()] * width for _ in lines]
            before = line_of.shape[0] // batch
            came = (front.parents + before * torch.arange(batch, device=device)[:, None]).flatten()
            line_of, previous = torch.arange(batch, device=device).repeat_interleave(width), front.tokens.flatten()
    drafts = growth.finish(name)
    return [_explained(draft, line.reason) for line, draft in zip(lines, drafts, strict=True)], growth


def _explained(draft: Draft, reason: str) -> Draft:
    """With the reason for being shorter than asked, or empty."""
    reason = reason if len(draft) else NOTHING
    return replace(draft, reason=reason) if reason else draft


def _whole(lines: Sequence[Line], slots: Slots, noise: Noise, count: int, vocab_size: int,
           device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of all places at once, where they do not depend on each other: tokens, values, shares [B, deepest, K]."""
    deepest = max(line.depth for line in lines)
    todo = [(line, i, at) for i, line in enumerate(lines) for at in range(deepest)]
    line_of, level_of = uploaded([(i, at) for _, i, at in todo], device).unbind(1)
    picks = pick(slots.logits(level_of, line_of, line_of, None), [line.ranking.rows(()) for line, _, _ in todo],
                 [line.seq for line, _, _ in todo], [len(line.seq.tokens) + at for line, _, at in todo], noise, count, slots.ids,
                 vocab_size, shares=True)
    return picks.offered((len(lines), deepest, -1))
