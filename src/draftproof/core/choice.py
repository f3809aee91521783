"""The choice under noise: argmax(log p + g), and the k best, without looking at more of a long row than can win.

Every way to a winner gives the same one: candidates are found by bounds or known in advance, and their scores are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import choices, native
from . import host
from .noise import gumbel
from .upload import rows_of, uploaded

LIKELY = 256         # tokens that a filter of a drafter looks at on a device; a nucleus is rarely larger
FEW = 4              # so many are found one after the other; more by a sort
_DENSE = 1024        # up to this vocabulary, without our kernels, noise for all of it costs no more than finding who needs it
_LOW = 0xFFFFFFFF


@dataclass(slots=True)
class Law:
    """N laws over `size` tokens as log-probabilities, −inf where a token is excluded: all of them [N, size], or those of the tokens that
    filters left: columns int64 [N, C], filled up with −1, and values [N, C], −inf there. dead: rows that have no token at all; what
    stands there is a law of nothing, so that whoever needs laws finds one. short bool [N], on a device, which is not waited for: the rows
    of which filters may have left more than the few that were looked at; thorough: makes the laws of all of them anew."""

    size: int
    given: Tensor | None = None
    few: tuple[Tensor, Tensor] | None = None
    dead: Sequence[int] = ()
    short: Tensor | None = None
    thorough: Callable[[], Law] | None = None

    @property
    def whole(self) -> Tensor:
        """[N, size]; made when it is first asked for."""
        if self.given is None:
            assert self.few is not None, "a law is given as a whole or by its tokens"
            columns, values = self.few
            wide = values.new_full((columns.shape[0], self.size + 1), -math.inf)          # one more for what only fills up
            self.given = wide.scatter_(1, columns.remainder(self.size + 1), values)[:, :self.size]
        return self.given

    def at(self, columns: Tensor) -> Tensor:
        """The log-probabilities [N, K] of these columns [N, K]."""
        if self.few is None or self.given is not None:
            return self.whole.gather(1, columns)
        names, values = self.few
        return torch.where(names[:, None] == columns[..., None], values[:, None], -math.inf).amax(-1)

    def of(self, rows: Sequence[int]) -> Law:
        """The law of some rows."""
        return Law(self.size, None if self.given is None else rows_of(self.given, rows),
                   None if self.few is None else (rows_of(self.few[0], rows), rows_of(self.few[1], rows)),
                   [i for i, row in enumerate(rows) if row in self.dead] if self.dead else (),
                   None if self.short is None else rows_of(self.short, rows))

    def sure(self) -> Law:
        """The law where no row is short; a device is waited for if one can be."""
        return self if self.short is None or not bool(self.short.any()) else self.remade()

    def remade(self) -> Law:
        """The law, with short rows made anew from all their tokens; the others stay as they are."""
        assert self.short is not None and self.thorough is not None, "nobody is short"
        return Law(self.size, torch.where(self.short[:, None], self.thorough().whole, self.whole), dead=self.dead)


def choose(law: Law | Tensor, keys: Tensor | None) -> Tensor:
    """argmax(log p − log E) of each row, int64 [N]; ties go to the lowest id. keys int32 [N, 2], or None for no noise."""
    return perturbed_top(law, keys, 1)[1].view(-1)


def perturbed_top(law: Law | Tensor, keys: Tensor | None, k: int, ids: Tensor | None = None,
                  counts: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """The k best of log q + g in each row: values [N, k] and columns [N, k], best first, ties by the lowest column.

    These are k tokens drawn from q without replacement, in order (Gumbel top-k, Kool et al., arXiv 1903.06059).
    law: of N rows, or a tensor [N, V] that is one · keys int32 [N, 2], None for no noise · ids [V]: the target's ids of the columns,
    by which noise is keyed · counts: how many rows, one after another, share each key; then keys [len(counts), 2], and their noise
    is drawn once. A row with fewer than k possible tokens ends in values of −inf, which stand for no token.
    """
    if isinstance(law, Tensor):
        law = Law(law.shape[1], law)
    assert 1 <= k <= law.size, "k distinct tokens need as many columns"
    if keys is None:
        return law.few[::-1] if law.few is not None and k == law.few[0].shape[1] == 1 else _best(law.whole, k)
    if keys.device.type == "cpu" and (law.few is not None or law.size > _DENSE or compiled(law.whole)):
        return _searched(law, keys, k, ids, counts)
    if law.few is not None and law.short is not None:
        columns, values = law.few
        scores = _plus(values, columns if ids is None else ids[columns], keys, counts)
        return _taken(scores, columns, ranks(scores, columns).topk(k).indices)
    tokens = torch.arange(law.size, dtype=torch.int32, device=keys.device) if ids is None else ids
    return _best(_plus(law.whole, tokens, keys, counts), k)


def _searched(law: Law, noise: Tensor, k: int, ids: Tensor | None, counts: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """On a processor; whole rows by the compiled kernel, of which numpy's way is the twin. Rows of one key share the bound of its noise."""
    owners = slice(None) if counts is None or max(counts) == 1 else np.repeat(np.arange(len(counts)), counts)
    if law.few is None and compiled(law.whole):
        return choices.best(law.whole, noise[owners], ids, k)
    keys, names = noise.numpy().view(np.uint32), None if ids is None else ids.numpy()
    if law.few is not None:
        values, columns = host.best_of_few(law.few[1].numpy(), law.few[0].numpy(), keys[owners], names, k)
    else:
        values, columns = host.best_of_row(law.whole.numpy(), host.bound(keys, names, law.size)[owners], keys[owners], names, k)
    return torch.from_numpy(values), torch.from_numpy(columns)


def compiled(rows: Tensor, *more: torch.dtype) -> bool:
    """Whether the kernels take these rows, of float32 or one of the types named."""
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, *more) and native.available()[0]


def _plus(logp: Tensor, tokens: Tensor, keys: Tensor, counts: Sequence[int] | None) -> Tensor:
    """logp [N, C] with the noise of each row's key for its tokens [N, C], or [C], which are drawn once for rows of one key."""
    if counts is not None and tokens.dim() == 1 and len(set(counts)) == 1:
        return (logp.view(len(counts), counts[0], -1) + gumbel(keys, tokens)[:, None]).flatten(0, 1)
    if counts is None:
        return logp + gumbel(keys, tokens)
    owners = uploaded([i for i, count in enumerate(counts) for _ in range(count)], keys.device)
    return logp + (gumbel(keys, tokens)[owners] if tokens.dim() == 1 else gumbel(keys[owners], tokens))


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores [N, V] and their columns, ties by the lowest column."""
    if k == 1:
        columns = first_largest(scores)
    elif compiled(scores):
        return choices.best(scores, None, None, k)
    elif scores.device.type == "cpu":
        columns = torch.from_numpy(host.largest(scores.numpy(), k))
    elif scores.dtype == torch.float32:
        return largest(scores, k)
    else:
        columns = scores.sort(dim=-1, stable=True, descending=True).indices[:, :k]
    return scores.gather(1, columns), columns


def narrowed(logp: Tensor, top_k: Tensor, top_p: Tensor, fall: Tensor) -> Tensor:
    """Filters on laws [N, .., V] as a drafter needs them, which may be wrong about a token: of the likeliest those that top_k, or 0, top_p
    and a fall, the logarithm of min_p, below the largest leave, [N] each, and their equals; the others become −inf, and what is left a law.
    A row whose filters leave more than is looked at stays as it is. Operations of torch alone, so that a CUDA graph can hold them; the
    filters that are exact are in probs.py."""
    top_k, top_p, fall = (each.view(-1, *[1] * (logp.ndim - 1)) for each in (top_k, top_p, fall))
    values = logp.topk(min(LIKELY, logp.shape[-1])).values
    mass = values.double().exp().cumsum(-1)
    keep = (top_k == 0) | (values >= values.gather(-1, (top_k - 1).clamp(0, values.shape[-1] - 1).expand(*values.shape[:-1], 1)))
    total = torch.where(top_k == 0, 1.0, mass.gather(-1, keep.sum(-1, keepdim=True) - 1))
    keep[..., 1:] &= (top_p >= 1) | (mass[..., :-1] < total * (top_p * (1 - 1e-6)))
    keep &= values >= values[..., :1] + (fall - 1e-6)
    last = keep.sum(-1, keepdim=True) - 1
    whole = keep[..., -1:] & (values.shape[-1] < logp.shape[-1])
    least = values.gather(-1, last).masked_fill(whole, -math.inf)
    return torch.where(logp >= least, logp - mass.gather(-1, last).log().masked_fill(whole, 0.0).to(logp.dtype), -math.inf)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row [N, V] the likeliest tokens int64 [N, k], best first, and their logits float32, on the host; k = min(count, V).
    Equal ones come in any order."""
    k = min(count, logits.shape[1])
    if logits.is_cpu:
        values, tokens = _best(logits.float(), k)
        return tokens, values
    values, tokens = logits.topk(k)
    both = torch.stack((tokens.int(), values.float().view(torch.int32))).cpu()          # their bits, in one look
    return both[0].long(), both[1].view(torch.float32)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 scores [N, V] and their columns, ties by the lowest; −inf, which stands for no candidate, may name any.
    Operations of torch alone, so that a CUDA graph can hold them."""
    if k > FEW:
        every = torch.arange(scores.shape[1], device=scores.device)
        return _taken(scores, every.expand_as(scores), ranks(scores, every).topk(k).indices)
    found = [scores.max(-1, keepdim=True)]                  # of equal ones the first
    while len(found) < k:
        scores = scores.scatter(1, found[-1].indices, -math.inf)
        found.append(scores.max(-1, keepdim=True))
    return torch.cat([best.values for best in found], 1), torch.cat([best.indices for best in found], 1)


def first_largest(x: Tensor) -> Tensor:
    """The first column of the largest value of each row [N, V], int64 [N, 1]."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(-1, keepdims=True))        # ten times as fast as torch's on a long row
    return x.argmax(-1, keepdim=True)


def ranks(values: Tensor, columns: Tensor) -> Tensor:
    """int64 that order float32 values [N, C], equal ones by the lowest of their columns [N, C] or [C]: one integer holds value and column,
    so that no ties are left."""
    i = (values + 0.0).view(torch.int32)     # −0.0 becomes 0.0; then integers that compare as the numbers they came from
    i = i ^ ((i >> 31) & 0x7FFFFFFF)
    return (i.long() << 32) | (_LOW - columns)


def _taken(values: Tensor, columns: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    return values.gather(1, places), columns.gather(1, places)
