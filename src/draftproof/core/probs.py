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
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Failure, OptionError
from ..types import Sampling
from .choice import likeliest, ordered

_SORTED = 128        # likeliest tokens looked at before a whole row is sorted; a nucleus is rarely larger
_FLOOR = -10.0       # then: tokens at least e**−10 as likely as the likeliest; then the whole row
_COLD = 1e-30        # the lowest temperature above 0 that float32 can divide by on every device
_SLACK = {torch.float32: 1e-6, torch.float64: 1e-12}


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
    return laws(logits, groups)[0]


def laws(logits: Tensor, groups: Sequence[Rows]) -> tuple[Tensor, Tensor | None]:
    """`distribution`, and columns int64 [N, C] that hold all possible tokens of their row where filters left few; else None."""
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
    repeated = s.repetition_penalty != 1
    written, prompt = Counter(g.output), frozenset(g.prompt) if repeated else frozenset()
    ids = [t for t in {t: None for t in chain(chain.from_iterable(g.paths), written, prompt)} if 0 <= t < vocabulary]
    if not ids:
        return
    place = {t: i for i, t in enumerate(ids)}
    count = torch.tensor([written.get(t, 0) for t in ids], dtype=block.dtype, device=device).repeat(m, 1)
    steps = [(row, place[t]) for row, path in enumerate(g.paths) for t in path if t in place]
    if steps:
        rows, spots = torch.tensor(steps, device=device).unbind(1)
        count.index_put_((rows, spots), torch.ones((), dtype=block.dtype, device=device), accumulate=True)
    own, columns = count > 0, torch.tensor(ids, device=device)
    x = block.index_select(1, columns)
    if repeated:
        seen = own | torch.tensor([t in prompt for t in ids], device=device) if prompt else own
        x = torch.where(seen, torch.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty), x)
    if s.presence_penalty or s.frequency_penalty:
        x -= count * s.frequency_penalty + own * s.presence_penalty
    block.index_copy_(1, columns, x)


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
