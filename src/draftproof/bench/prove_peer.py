"""Level (b) on somebody else's engine: transformers' own generation, assisted against plain, and plain against itself as the control.

Its kernels see other shapes when guesses are scored, so texts may part where two tokens stand within the rounding. At every first
divergence the target's logits are computed again by passes of several shapes. `margin` is how far the best token lies above the
second there, `gap` how far the lower of the two tokens that were written lies below the best, both in units of the rounding: the
spacing of the dtype's numbers at the size of the best logit. `wobble` is how much the shape of the pass alone moves these logits.
A near tie's gap can be rounding; whatever else was written was not the target's choice by any pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..config import ProveConfig
from .prove_rule import Check
from .prove_run import END, Comparison, Divergence, Ids, RunReport, judge

ULPS = 4.0              # up to which a gap may be rounding wherever it is
WOBBLES = 3.0           # a gap of so many times what was seen of rounding at this very place may be rounding


class Peer(Protocol):
    """What `models.peer.TransformersPeer` is."""

    dtype: torch.dtype

    def plain(self, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> list[Ids]: ...
    def assisted(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[Ids], int]: ...
    def logits(self, text: Sequence[int]) -> Tensor: ...
    def piece(self, token: int) -> str: ...


def prove_peer(peer: Peer, prompts: Sequence[Ids], config: ProveConfig, note: Callable[[str], None] = lambda _: None) -> RunReport:
    """Greedy texts of every prompt: plain, plain in a padded batch, assisted. One comparison each, and the checks they lead to."""
    report = RunReport()
    note(f"run: {len(prompts)} prompts, plain …")
    plain = peer.plain(prompts, config.tokens, 1)
    note(f"run: the control, plain {config.batch} at a time …")
    control = peer.plain(prompts, config.tokens, config.batch)
    note("run: assisted …")
    assisted, saved = peer.assisted(prompts, config.tokens)
    pairs = (f"plain, {config.batch} at a time and padded, against one at a time (control)", control), ("assisted, against plain", assisted)
    report.comparisons = [compare(peer, name, prompts, found, plain) for name, found in pairs]
    judge(report.checks, report.comparisons[0], report.comparisons[1:], False, 0.0)
    words = f"{saved} of {sum(map(len, assisted))} tokens took no pass of their own"
    report.checks.append(Check("guesses accepted", saved > 0, words if saved > 0 else f"{words}: nothing was put to the proof"))
    return report


def compare(peer: Peer, name: str, prompts: Sequence[Ids], found: Sequence[Ids], plain: Sequence[Ids]) -> Comparison:
    """Pair by pair; the margin of every first difference."""
    tokens, same, differences = 0, 0, []
    for i, (prompt, mine, own) in enumerate(zip(prompts, found, plain, strict=True)):
        at = next((t for t, (a, b) in enumerate(zip(mine, own, strict=False)) if a != b), min(len(mine), len(own)))
        tokens += at
        if mine == own:
            same += 1
        elif at == min(len(mine), len(own)):
            wrote, expected = (peer.piece(ids[at]) if at < len(ids) else END for ids in (mine, own))
            differences.append(Divergence(name, 0.0, i, at, wrote, expected, None, False))
        else:
            logits = peer.logits([*prompt, *own[:at]])
            margin, gap, unit, near = tie(logits, peer.dtype, mine[at], own[at])
            wrote, expected = peer.piece(mine[at]), peer.piece(own[at])
            differences.append(Divergence(name, 0.0, i, at, wrote, expected, margin, near, margin / unit, gap / unit))
    return Comparison(name, 0.0, len(plain), same, tokens, tuple(differences))


def tie(logits: Tensor, dtype: torch.dtype, one: int, other: int) -> tuple[float, float, float, bool]:
    """(first minus second logit, first minus the lower of the two tokens, the rounding's unit there, whether rounding can have chosen).

    logits [ways, V]: of the same place; the first row decides, the others say how far rounding moves it.
    """
    values, ids = logits[0].topk(2)
    unit = spacing(float(values[0]), dtype)
    looked_at = [*ids.tolist(), one, other]
    wobble = float((logits[:, looked_at] - logits[0, looked_at]).abs().max())
    gap = float(values[0]) - min(float(logits[0, one]), float(logits[0, other]))
    return float(values[0] - values[1]), gap, unit, gap <= max(ULPS * unit, WOBBLES * wobble)


def spacing(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a dtype at this size."""
    facts = torch.finfo(dtype)
    return facts.eps * 2.0 ** math.floor(math.log2(max(abs(value), facts.tiny)))
