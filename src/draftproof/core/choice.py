"""The choice under noise: argmax(log p + g), and the k best, without looking at more of a long row than can win.

Every way to a winner gives the same one: candidates are found by bounds or known in advance, and their scores are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .noise import bits, gumbel

_FEW = 128           # likeliest tokens looked at first
_DENSE = 16_384      # up to this vocabulary, noise for all of it costs no more than finding who needs it
_TILE = 64           # columns of a long row that share a maximum
_SPARE = 15          # candidates beyond k that `_pruned` looks at
_MARGIN = 1e-3       # far above the float32 error of the bound in `_pruned`
_LOW = 0xFFFFFFFF


def choose(logp: Tensor, keys: Tensor | None, few: Tensor | None = None) -> Tensor:
    """argmax(log p − log E) of each row, int64 [N]; ties go to the lowest id. keys int32 [N, 2], or None for no noise; few: as in
    `perturbed_top`."""
    return perturbed_top(logp, keys, 1, few=few)[1][:, 0]


def perturbed_top(logp: Tensor, keys: Tensor | None, k: int, ids: Tensor | None = None,
                  counts: Sequence[int] | None = None, few: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k best of log q + g in each row: values [N, k] and columns [N, k], best first, ties by the lowest column.

    These are k tokens drawn from q without replacement, in order (Gumbel top-k, Kool et al., arXiv 1903.06059).
    logp [N, V] · keys int32 [N, 2], None for no noise · ids [V]: the target's ids of the columns, by which noise is keyed ·
    counts: how many rows, one after another, share each key; then keys [len(counts), 2], and their noise is drawn once.
    few [N, C]: columns that hold all possible tokens of their row (`core.probs.laws` knows them), None if that is not known.
    A row with fewer than k possible tokens ends in values of −inf, which stand for no token.
    """
    assert 1 <= k <= logp.shape[1], "k distinct tokens need as many columns"
    few = None if few is None or k > few.shape[1] else few
    if keys is None:
        return _best(logp, k) if few is None else _best(logp.gather(1, few), k, few)
    counts = (1,) * logp.shape[0] if counts is None else counts
    if few is not None:
        rows = keys if len(counts) == logp.shape[0] else keys[_owners(counts)]
        return _best(logp.gather(1, few) + gumbel(rows, few if ids is None else ids[few]), k, few)
    if logp.is_cuda or logp.shape[1] <= _DENSE:
        tokens = torch.arange(logp.shape[1], dtype=torch.int32, device=logp.device) if ids is None else ids
        return _best(_plus(logp, gumbel(keys, tokens), counts), k)
    drawn = [_Drawn(keys[i:i + 1], ids, logp.shape[1]) for i in range(len(counts))]
    owners = _owners(counts)
    if bool((logp[:, ::logp.shape[1] // 32] > -math.inf).all()):            # a sample looks unfiltered: only a hint, results are the same
        best = [_pruned(logp[r:r + 1], drawn[i], k) for r, i in enumerate(owners)]
        return torch.cat([values for values, _ in best]), torch.cat([columns for _, columns in best])
    likely, columns = likeliest(logp, max(_FEW, k))
    values, columns = _best(likely + gumbel(keys[owners], columns if ids is None else ids[columns]), k, columns)
    for r in (likely[:, -1] > -math.inf).nonzero()[:, 0].tolist():          # rows with more possible tokens than these
        values[r:r + 1], columns[r:r + 1] = _pruned(logp[r:r + 1], drawn[owners[r]], k)
    return values, columns


def _owners(counts: Sequence[int]) -> list[int]:
    return [i for i, count in enumerate(counts) for _ in range(count)]


def _plus(logp: Tensor, noise: Tensor, counts: Sequence[int]) -> Tensor:
    """logp [N, V] with the noise [len(counts), V] of each row's key."""
    if len(set(counts)) == 1:
        return (logp.view(len(counts), counts[0], -1) + noise[:, None]).flatten(0, 1)
    return logp + noise.repeat_interleave(torch.tensor(counts, device=noise.device), 0, output_size=logp.shape[0])


@dataclass
class _Drawn:
    """The noise of one key [1, 2], for rows that share it. ids [size], or None for the columns' own numbers."""

    key: Tensor
    ids: Tensor | None
    size: int

    def gumbel(self, columns: Tensor | None = None) -> Tensor:
        """Exact, for some columns or all."""
        return gumbel(self.key, self._names if columns is None else columns if self.ids is None else self.ids[columns])

    @cached_property
    def bound(self) -> Tensor:
        """−log u [1, size] float32: no smaller than the Gumbel noise, and nearly equal to it where u is small."""
        u = bits(self.key, self._names).view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32)
        return u.log_().neg_()

    @property
    def _names(self) -> Tensor:
        return torch.arange(self.size, dtype=torch.int32) if self.ids is None else self.ids


def _pruned(logp: Tensor, drawn: _Drawn, k: int) -> tuple[Tensor, Tensor]:
    """One row: float64 logarithms only for those who can be among the k best.

    E = −log1p(−u) ≥ u, so log p − log u bounds every score from above, and nearly reaches it where u is small, which is
    where winners are. Whoever's bound stays below the k-th best exact score found so far is out.
    """
    finite = logp[0] > -math.inf
    if k <= int(finite.sum()) < logp.shape[1] // 8:
        possible = finite.nonzero()[:, 0]
        return _best(logp[:, possible] + drawn.gumbel(possible), k, possible[None])
    bound, columns = (logp + drawn.bound).topk(min(k + _SPARE, logp.shape[1]))
    scores = logp.gather(1, columns) + drawn.gumbel(columns)
    values, best = _best(scores, k, columns)
    if bound.shape[1] == logp.shape[1] or bool(bound[0, -1] < values[0, -1] - _MARGIN):
        return values, best
    return _best(logp + drawn.gumbel(), k)


def _best(scores: Tensor, k: int, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest scores [N, C] and their columns (the positions themselves, unless given), ties by the lowest column."""
    if columns is None:
        if k == 1:
            spots = scores.argmax(-1, keepdim=True)
            return scores.gather(1, spots), spots
        columns = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    if scores.dtype == torch.float32:                                       # one integer holds value and column: no ties are left
        spots = _ranks(scores, columns).topk(k).indices
    else:
        order = columns.argsort(dim=-1)
        spots = order.gather(1, scores.gather(1, order).sort(dim=-1, stable=True, descending=True).indices[:, :k])
    return scores.gather(1, spots), columns.gather(1, spots)


def likeliest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row [N, V] and their columns, descending, ties by the lowest column."""
    columns = _candidates(x, k)
    if x.dtype != torch.float32:
        columns = torch.arange(x.shape[1], device=x.device).expand_as(x) if columns is None else columns.sort(dim=-1).values
        values, spots = x.gather(1, columns).sort(dim=-1, stable=True, descending=True)
        return values[:, :k], columns.gather(1, spots[:, :k])
    columns = torch.arange(x.shape[1], device=x.device) if columns is None else columns
    found = _LOW - (_ranks(x if columns.ndim == 1 else x.gather(1, columns), columns).topk(k).values & _LOW)
    return x.gather(1, found), found


def _candidates(x: Tensor, k: int) -> Tensor | None:
    """Columns [N, C] among which are the k largest of each row, None for all: they lie in the k tiles with the largest maxima."""
    tiles = x.shape[1] // _TILE
    if x.is_cuda or 4 * k > tiles:
        return None
    whole = tiles * _TILE
    chosen = x[:, :whole].view(-1, tiles, _TILE).amax(-1).topk(k, sorted=False).indices
    columns: Tensor = (chosen[:, :, None] * _TILE + torch.arange(_TILE, device=x.device)).flatten(1)
    if whole == x.shape[1]:
        return columns
    return torch.cat((columns, torch.arange(whole, x.shape[1], device=x.device).expand(x.shape[0], -1)), 1)


def _ranks(values: Tensor, columns: Tensor) -> Tensor:
    """int64 that order float32 values, equal ones by the lowest column: no ties are left."""
    return (ordered(values).long() << 32) | (_LOW - columns)


def ordered(x: Tensor) -> Tensor:
    """int32 that compares as the float32 it came from."""
    i = (x + 0.0).view(torch.int32)     # −0.0 becomes 0.0
    return i ^ ((i >> 31) & 0x7FFFFFFF)
