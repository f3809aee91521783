"""The choice under noise: argmax(log p + g), and the k best, without looking at more of a long row than can win.

Every way to a winner gives the same one: candidates are found by bounds or known in advance, and their scores are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import host
from .noise import gumbel

_DENSE = 1024        # up to this vocabulary, noise for all of it costs no more than finding who needs it
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
    few [N, C]: the possible tokens of each row, filled up with −1 (`core.probs.laws` knows them), None if that is not known.
    A row with fewer than k possible tokens ends in values of −inf, which stand for no token.
    """
    assert 1 <= k <= logp.shape[1], "k distinct tokens need as many columns"
    counts = (1,) * logp.shape[0] if counts is None else counts
    if keys is None:
        return (logp.gather(1, few), few) if few is not None and k == few.shape[1] == 1 else _best(logp, k)
    if logp.device.type == "cpu" and (few is not None or logp.shape[1] > _DENSE):
        return _searched(logp.numpy(), keys.numpy().view(np.uint32), k, None if ids is None else ids.numpy(), counts,
                         None if few is None else few.numpy())
    tokens = torch.arange(logp.shape[1], dtype=torch.int32, device=logp.device) if ids is None else ids
    return _best(_plus(logp, gumbel(keys, tokens), counts), k)


def _searched(rows: host.Floats, keys: host.Ids, k: int, names: host.Ids | None, counts: Sequence[int],
              few: host.Ids | None) -> tuple[Tensor, Tensor]:
    """On a processor. Rows of one key share the bound of its noise."""
    owners = np.repeat(np.arange(len(counts)), counts)
    if few is not None:
        values, columns = host.best_of_few(rows, few, keys[owners], names, k)
    else:
        reach = host.bound(keys, names, rows.shape[1])
        values, columns = host.best_of_row(rows, reach if len(reach) == len(rows) else reach[owners], keys[owners], names, k)
    return torch.from_numpy(values), torch.from_numpy(columns)


def _plus(logp: Tensor, noise: Tensor, counts: Sequence[int]) -> Tensor:
    """logp [N, V] with the noise [len(counts), V] of each row's key."""
    if len(set(counts)) == 1:
        return (logp.view(len(counts), counts[0], -1) + noise[:, None]).flatten(0, 1)
    return logp + noise.repeat_interleave(torch.tensor(counts, device=noise.device), 0, output_size=logp.shape[0])


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores [N, V] and their columns, ties by the lowest column."""
    if k == 1:
        columns = first_largest(scores)
    elif scores.device.type == "cpu":
        columns = torch.from_numpy(host.largest(scores.numpy(), k))
    elif scores.dtype == torch.float32:                                     # one integer holds value and column: no ties are left
        columns = _ranks(scores).topk(k).indices
    else:
        columns = scores.sort(dim=-1, stable=True, descending=True).indices[:, :k]
    return scores.gather(1, columns), columns


def first_largest(x: Tensor) -> Tensor:
    """The first column of the largest value of each row [N, V], int64 [N, 1]."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(-1, keepdims=True))        # ten times as fast as torch's on a long row
    return x.argmax(-1, keepdim=True)


def _ranks(values: Tensor) -> Tensor:
    """int64 that order float32 values [N, V], equal ones by the lowest column: no ties are left."""
    i = (values + 0.0).view(torch.int32)     # −0.0 becomes 0.0; then integers that compare as the numbers they came from
    i = i ^ ((i >> 31) & 0x7FFFFFFF)
    return (i.long() << 32) | (_LOW - torch.arange(values.shape[1], device=values.device))
