"""Logits → the distribution that the request asks for, and the choice from it under noise. Used for p and for q alike.

The order is fixed: penalties, bias and bans (`edits.py`), temperature, top-k, top-p, min-p. Filters are thresholds: top-k keeps
every token not below the k-th value; top-p keeps the smallest set of likeliest tokens whose mass reaches p, equal tokens ordered
by id; min-p keeps what is at least min_p times as likely as the likeliest. A mass or a ratio reaches its threshold within the
precision of the logits' type, so top_p=0.5 over (½, ¼, ¼) keeps one token although ½ has no exact float32 logarithm.

A row's bits depend on that row alone: log_softmax and cumsum work row by row in a fixed order (a test compares bits over
row counts and threads), maxima and elementwise operations have no order, and no sum over the vocabulary is left to a
reduction that may be split between threads. Which way the kept tokens were found changes nothing either: every way sees the
same sorted prefix and adds its masses in the same order, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Failure, OptionError
from ..types import Sampling
from .choice import likeliest, ordered
from .edits import Rows, edit

_SORTED = 128        # likeliest tokens looked at before a whole row is sorted; a nucleus is rarely larger
_FLOOR = -10.0       # then: tokens at least e**−10 as likely as the likeliest; then the whole row
_COLD = 1e-30        # the lowest temperature above 0 that float32 can divide by on every device
_SLACK = {torch.float32: 1e-6, torch.float64: 1e-12}


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
    return laws(logits, groups)[0]


def laws(logits: Tensor, groups: Sequence[Rows]) -> tuple[Tensor, Tensor | None]:
    """`distribution`, and columns int64 [N, C] that hold all possible tokens of their row where filters left few; else None."""
    assert logits.shape[0] == sum(len(g.paths) for g in groups), "one path per row of logits"
    x = logits if logits.dtype in _SLACK else logits.float()
    batches: dict[_Filters, list[int]] = {}
    edited, start = False, 0
    for g in groups:
        stop = start + len(g.paths)
        if g.edited:
            x = x.clone() if x is logits else x
            edit(x[start:stop], g)
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
        out[rows] = _law(x[rows], top[rows], filters)[0]
    return out, None


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


# Temperature and filters.


def _law(x: Tensor, top: Tensor, f: _Filters) -> tuple[Tensor, Tensor | None]:
    """`laws` of rows [G, V] that share their filters; top [G, 1] is each row's largest logit."""
    if f.temperature == 0:
        winners = x.argmax(-1, keepdim=True)
        return torch.full_like(x, -math.inf).scatter_(1, winners, 0.0), winners
    if not f.active:
        return _log_softmax(x, top, f.temperature), None
    out = torch.full_like(x, -math.inf)
    # The mass of the whole row; −log of it stands at the likeliest token, whose own weight is 1.
    total = None if f.top_k or f.top_p == 1 else _log_softmax(x, top, f.temperature).amax(-1, keepdim=True).double().neg_().exp_()
    width = max(_SORTED, f.top_k + f.top_k // 4 + 64)
    if x.is_cuda or width >= x.shape[1] // 2:
        values, columns = torch.sort(x, dim=-1, stable=True, descending=True)
        return _write(out, values, columns, top, total, f)[0], None
    values, columns = likeliest(x, width)
    out, enough = _write(out, values, columns, top, total, f)
    lacking = (~enough).nonzero()[:, 0].tolist()
    for r in lacking:
        one = slice(r, r + 1)
        for floor in (_FLOOR, -math.inf):                # at last the whole row, which is always enough
            ranked = _above(x[one], top[one] + floor * f.temperature)
            if bool(_write(out[one].fill_(-math.inf), *ranked, top[one], None if total is None else total[one], f)[1]):
                break
    return out, None if lacking else columns


def _log_softmax(x: Tensor, top: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return torch.log_softmax(x, -1)
    return torch.log_softmax((x - top).div_(max(temperature, _COLD)), -1)   # shifted first: no overflow, and precise where the mass is


def _above(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """All values of one row [1, V] above the bound and their columns, descending, ties by id."""
    columns = (x[0] > bound[0]).nonzero()[:, 0]
    values = x[0, columns]
    order = torch.sort(~ordered(values), stable=True).indices if x.dtype == torch.float32 else torch.sort(-values, stable=True).indices
    return values[order][None], columns[order][None]      # integers, for a long row is then sorted by radix


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
