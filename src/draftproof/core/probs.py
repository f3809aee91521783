"""Logits → the distribution that the request asks for, and the choice from it under noise. Used for p and for q alike.

The order is fixed: penalties (repetition; then presence and frequency), bias, bans (bad words, end tokens before
min_tokens, grammar), temperature, top-k, top-p, min-p. Filters are thresholds: top-k keeps every token not below the k-th
value; top-p keeps the smallest set of likeliest tokens whose mass reaches p, equal tokens ordered by id; min-p keeps what
is at least min_p times as likely as the likeliest. A mass or a ratio reaches its threshold within the precision of the
logits' type, so top_p=0.5 over (½, ¼, ¼) keeps one token although ½ has no exact float32 logarithm.

A row's bits depend on that row alone: log_softmax and cumsum work row by row in a fixed order (a test compares bits over
row counts and threads), maxima and elementwise operations have no order, and no sum over the vocabulary is left to a
reduction that may be split between threads. Which way the kept tokens were found changes nothing either: every way sees the
same sorted prefix and adds its masses in the same order, in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Failure, OptionError
from ..types import Sampling
from .noise import bits, gumbel

_SORTED = 128        # likeliest tokens looked at before a whole row is sorted; a nucleus is rarely larger
_DENSE = 16_384      # up to this vocabulary, noise for all of it costs no more than finding who needs it
_FLOOR = -10.0       # then: tokens at least e**−10 as likely as the likeliest; then the whole row
_COLD = 1e-30        # the lowest temperature above 0 that float32 can divide by on every device
_SLACK = {torch.float32: 1e-6, torch.float64: 1e-12}
_SPARE = 15          # candidates beyond k that `_pruned` looks at
_MARGIN = 1e-3       # far above the float32 error of the bound in `_pruned`
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence: the root's and one per drafted node, each with the tokens on the way to it.

    paths[i]: tokens after the text that lead to row i (() at the root) · mask: bool [len(paths), V], True = the grammar allows it
    """

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    paths: Sequence[Sequence[int]]
    end_ids: frozenset[int]
    mask: Tensor | None = None


class _Filters(NamedTuple):
    """What rows must share to be worked on together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, s: Sampling, vocabulary: int) -> _Filters:
        temperature = 1.0 if s.temperature is None else s.temperature
        if temperature == 0:
            return cls(0.0, 0, 1.0, 0.0)
        return cls(temperature, s.top_k if s.top_k < vocabulary else 0, 1.0 if s.top_p is None else s.top_p, s.min_p)

    @property
    def active(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def distribution(logits: Tensor, groups: Sequence[Rows]) -> Tensor:
    """Log-probabilities [N, V] after all options; −inf is excluded. Greedy rows hold 0 at the winner.

    logits [N, V], the rows of the groups one after another; float64 stays float64, everything else becomes float32.
    Raises OptionError when the options, or the grammar, exclude every token of a row, or name a token that does not exist.
    """
    assert logits.shape[0] == sum(len(g.paths) for g in groups), "one path per row of logits"
    x = logits if logits.dtype in _SLACK else logits.float()
    batches: dict[_Filters, list[int]] = {}
    edited, start = False, 0
    for g in groups:
        stop = start + len(g.paths)
        if _edits(g):
            x = x.clone() if x is logits else x
            _edit(x[start:stop], g)
            edited = True
        batches.setdefault(_Filters.of(g.sampling, x.shape[1]), []).extend(range(start, stop))
        start = stop
    top = x.amax(-1, keepdim=True)
    if (edited or not x.is_cuda) and not bool(torch.isfinite(top).all()):  # on a GPU the question costs a host sync
        _refuse(logits, top, groups)
    if len(batches) == 1:
        return _law(x, top, next(iter(batches)))
    out = torch.empty_like(x)
    for filters, members in batches.items():
        rows = torch.tensor(members, device=x.device)
        out[rows] = _law(x[rows], top[rows], filters)
    return out


def _refuse(logits: Tensor, top: Tensor, groups: Sequence[Rows]) -> None:
    """Say why a row has no finite maximum."""
    row = int((~torch.isfinite(top[:, 0])).nonzero()[0])
    group, offset = next((g, row - s) for g, s in _starts(groups) if s <= row < s + len(g.paths))
    largest = logits[row].amax().item()
    if not math.isfinite(largest):
        raise Failure(f"row {row}: the largest logit is {largest}; expected a finite number: the model overflowed, try another dtype")
    if top[row].item() > 0:
        raise OptionError("logit_bias holds +inf; expected numbers or -inf: to force a token give it a large bias, or ban the others")
    if group.mask is not None and not bool(group.mask[offset].any()):
        raise OptionError("the grammar allows no token here; expected at least one: check the schema against the text and its end tokens")
    raise OptionError("logit_bias, bad_word_ids, min_tokens and grammar together exclude every token; expected one left: relax one of them")


def _starts(groups: Sequence[Rows]) -> Iterable[tuple[Rows, int]]:
    start = 0
    for g in groups:
        yield g, start
        start += len(g.paths)


# Penalties, bias and bans: only rows whose request asks for them are touched.


def _edits(g: Rows) -> bool:
    return bool(g.sampling.needs_history or g.sampling.logit_bias or g.mask is not None)


def _edit(block: Tensor, g: Rows) -> None:
    """Everything before the temperature, in place on the rows [len(paths), V] of one sequence."""
    s, vocabulary = g.sampling, block.shape[1]
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
        _penalise(block, g)
    if s.logit_bias:
        wrong = [t for t in s.logit_bias if not 0 <= t < vocabulary]
        if wrong:
            raise OptionError(f"logit_bias names token {wrong[0]}; expected ids in [0, {vocabulary}): the model has no such token")
        ids = torch.tensor(list(s.logit_bias), device=block.device)
        block[:, ids] += torch.tensor(list(s.logit_bias.values()), dtype=block.dtype, device=block.device)
    banned = [(i, t) for i, path in enumerate(g.paths) for t in _banned(g, path) if t < vocabulary]
    if banned:
        rows, ids = torch.tensor(banned, device=block.device).unbind(1)
        block[rows, ids] = -math.inf
    if g.mask is not None:
        assert g.mask.shape == block.shape, "one row of the mask per row of logits"
        block.masked_fill_(~g.mask, -math.inf)


def _banned(g: Rows, path: Sequence[int]) -> list[int]:
    """Tokens that may not follow the text and this path."""
    s = g.sampling
    banned = list(g.end_ids) if len(g.output) + len(path) < s.min_tokens else []
    if s.bad_word_ids:
        reach = max(len(word) for word in s.bad_word_ids) - 1
        tail = (*_last(g.prompt, reach - len(g.output) - len(path)), *_last(g.output, reach - len(path)), *path)
        for word in s.bad_word_ids:
            before = len(word) - 1
            if before <= len(tail) and tail[len(tail) - before:] == tuple(word[:-1]):
                banned.append(word[-1])
    return banned


def _last(tokens: Sequence[int], n: int) -> Sequence[int]:
    return tokens[max(0, len(tokens) - n):] if n > 0 else ()


def _penalise(block: Tensor, g: Rows) -> None:
    """Repetition over prompt, output and path (Keskar et al., arXiv 1909.05858); presence and frequency over output and path.

    Counts are completed before they act, so a drafted row gets the very bits it gets once its path is text.
    """
    s, (m, vocabulary), device = g.sampling, block.shape, block.device
    written = Counter(g.output)
    repeated = s.repetition_penalty != 1
    drafted = [t for t in dict.fromkeys(chain.from_iterable(g.paths)) if t < vocabulary]
    place = {t: i for i, t in enumerate(drafted)}
    ids = drafted + [t for t in written if t < vocabulary and t not in place]
    counted = len(ids)
    if repeated:
        ids += [t for t in set(g.prompt).difference(written, drafted) if t < vocabulary]
    if not ids:
        return
    steps = [(row, place[t]) for row, path in enumerate(g.paths) for t in path if t in place]
    rows, spots = torch.tensor(steps, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    columns = torch.tensor(ids, device=device)
    x = block[:, columns]
    if repeated:
        seen = torch.ones(m, len(ids), dtype=torch.bool, device=device)
        seen[:, :len(drafted)] = torch.tensor([t in written or t in g.prompt for t in drafted], dtype=torch.bool, device=device)
        seen[rows, spots] = True
        x = torch.where(seen, torch.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty), x)
    if s.presence_penalty or s.frequency_penalty:
        count = torch.tensor([written.get(t, 0) for t in ids[:counted]], dtype=x.dtype, device=device).repeat(m, 1)
        count.index_put_((rows, spots), torch.ones((), dtype=x.dtype, device=device), accumulate=True)
        x[:, :counted] -= count * s.frequency_penalty + (count > 0) * s.presence_penalty
    block[:, columns] = x


# Temperature and filters.


def _law(x: Tensor, top: Tensor, f: _Filters) -> Tensor:
    """Log-probabilities of rows [G, V] that share their filters; top [G, 1] is each row's largest logit."""
    if f.temperature == 0:
        return torch.full_like(x, -math.inf).scatter_(1, x.argmax(-1, keepdim=True), 0.0)
    if not f.active:
        return _log_softmax(x, top, f.temperature)
    out = torch.full_like(x, -math.inf)
    # The mass of the whole row; −log of it stands at the likeliest token, whose own weight is 1.
    total = None if f.top_k or f.top_p == 1 else _log_softmax(x, top, f.temperature).amax(-1, keepdim=True).double().neg_().exp_()
    width = max(_SORTED, f.top_k + f.top_k // 4 + 64)
    if x.is_cuda or width >= x.shape[1] // 2:
        values, columns = torch.sort(x, dim=-1, stable=True, descending=True)
        return _write(out, values, columns, top, total, f)[0]
    out, enough = _write(out, *_likeliest(x, width), top, total, f)
    for r in (~enough).nonzero()[:, 0].tolist():
        one = slice(r, r + 1)
        for floor in (_FLOOR, -math.inf):                # at last the whole row, which is always enough
            ranked = _above(x[one], top[one] + floor * f.temperature)
            if bool(_write(out[one].fill_(-math.inf), *ranked, top[one], None if total is None else total[one], f)[1]):
                break
    return out


def _log_softmax(x: Tensor, top: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return torch.log_softmax(x, -1)
    return torch.log_softmax((x - top).div_(max(temperature, _COLD)), -1)   # shifted first: no overflow, and precise where the mass is


def _likeliest(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest values of each row and their columns, descending, ties by id (topk leaves their order open)."""
    values, columns = x.topk(width)
    columns, order = columns.sort(dim=-1)
    order = values.gather(1, order).sort(dim=-1, stable=True, descending=True).indices
    return values, columns.gather(1, order)


def _above(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """All values of one row [1, V] above the bound and their columns, descending, ties by id."""
    columns = (x[0] > bound[0]).nonzero()[:, 0]
    values = x[0, columns]
    order = torch.sort(~_ordered(values), stable=True).indices if x.dtype == torch.float32 else torch.sort(-values, stable=True).indices
    return values[order][None], columns[order][None]      # integers, for a long row is then sorted by radix


def _ordered(x: Tensor) -> Tensor:
    """int32 that compares as the float32 it came from."""
    i = (x + 0.0).view(torch.int32)     # −0.0 becomes 0.0
    return i ^ ((i >> 31) & 0x7FFFFFFF)


def _write(out: Tensor, values: Tensor, columns: Tensor, top: Tensor, total: Tensor | None, f: _Filters) -> tuple[Tensor, Tensor]:
    """Fill `out` [G, V] (−inf so far) from ranked tokens [G, C] that miss none above the last; also bool [G]: were they enough?"""
    z = (values.double() - top.double()).div_(max(f.temperature, _COLD))
    cumulated = z.exp().cumsum(-1)
    last = values[:, -1:]
    complete = (last == -math.inf) | (values.shape[1] == out.shape[1])      # nothing that could count was left out
    slack = _SLACK[values.dtype]
    keep = values > -math.inf
    enough = complete
    if f.top_k:
        place = min(f.top_k, values.shape[1])
        kth = values[:, place - 1:place]
        keep &= values >= kth
        enough = complete | (kth > last)                                    # no token equal to the k-th was left out
        total = cumulated.gather(1, keep.sum(-1, keepdim=True) - 1)
    if f.top_p < 1:
        assert total is not None, "without top-k the row's mass is given"
        keep[:, 1:] &= cumulated[:, :-1] < total * (f.top_p * (1 - slack))
    if f.min_p:
        keep &= z >= math.log(f.min_p) - slack
    end = keep.sum(-1, keepdim=True) - 1
    if not f.top_k:
        enough = complete | (values.gather(1, end) > last)                  # the cut lies among the ranked, not behind them
    logp = (z - cumulated.gather(1, end).log()).masked_fill_(~keep, -math.inf)
    return out.scatter_(1, columns, logp.to(out.dtype)), enough[:, 0]


# The choice under noise.


def choose(logp: Tensor, keys: Tensor | None) -> Tensor:
    """argmax(log p − log E) of each row, int64 [N]; ties go to the lowest id. keys int32 [N, 2], or None for no noise."""
    return perturbed_top(logp, keys, 1)[1][:, 0]


def perturbed_top(logp: Tensor, keys: Tensor | None, k: int, ids: Tensor | None = None,
                  counts: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """The k best of log q + g in each row: values [N, k] and columns [N, k], best first, ties by the lowest column.

    These are k tokens drawn from q without replacement, in order (Gumbel top-k, Kool et al., arXiv 1903.06059).
    logp [N, V] · keys int32 [N, 2], None for no noise · ids [V]: the target's ids of the columns, by which noise is keyed ·
    counts: how many rows, one after another, share each key; then keys [len(counts), 2], and their noise is drawn once.
    A row with fewer than k possible tokens ends in values of −inf, which stand for no token.
    """
    assert 1 <= k <= logp.shape[1], "k distinct tokens need as many columns"
    if keys is None:
        return _best(logp, k)
    counts = (1,) * logp.shape[0] if counts is None else counts
    if logp.is_cuda or logp.shape[1] <= _DENSE:
        tokens = torch.arange(logp.shape[1], dtype=torch.int32, device=logp.device) if ids is None else ids
        return _best(_plus(logp, gumbel(keys, tokens), counts), k)
    drawn = [_Drawn(keys[i:i + 1], ids, logp.shape[1]) for i in range(len(counts))]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    if bool((logp[:, ::logp.shape[1] // 32] > -math.inf).all()):            # a sample looks unfiltered: only a hint, results are the same
        best = [_pruned(logp[r:r + 1], drawn[i], k) for r, i in enumerate(owners)]
        return torch.cat([values for values, _ in best]), torch.cat([columns for _, columns in best])
    likely, columns = logp.topk(max(_SORTED, k))
    values, columns = _best(likely + gumbel(keys[owners], columns if ids is None else ids[columns]), k, columns)
    for r in (likely[:, -1] > -math.inf).nonzero()[:, 0].tolist():          # rows with more possible tokens than these
        values[r:r + 1], columns[r:r + 1] = _pruned(logp[r:r + 1], drawn[owners[r]], k)
    return values, columns


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
        spots = ((_ordered(scores).long() << 32) | (_LOW - columns)).topk(k).indices
    else:
        order = columns.argsort(dim=-1)
        spots = order.gather(1, scores.gather(1, order).sort(dim=-1, stable=True, descending=True).indices[:, :k])
    return scores.gather(1, spots), columns.gather(1, spots)
