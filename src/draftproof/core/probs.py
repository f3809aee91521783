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
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from .. import choices
from ..errors import Failure, OptionError
from ..types import Sampling
from . import host
from .choice import Law, compiled, first_largest, ranks
from .edits import Rows, edit
from .host import Filters
from .upload import rows_of, uploaded

_SHORT = 1024        # up to this vocabulary rows are sorted whole
_THERE = 1024        # likeliest tokens that a device looks at in rows of more than _WIDE; a nucleus is rarely larger
_WIDE = 8192
_SLACK = {torch.float32: 1e-6, torch.float64: 1e-12}


def _filters(s: Sampling, vocabulary: int) -> Filters:
    """What rows must share to be worked on together."""
    temperature = 1.0 if s.temperature is None else s.temperature
    if temperature == 0:
        return Filters(0.0, 0, 1.0, 0.0)
    return Filters(min(temperature, host.HOT), s.top_k if s.top_k < vocabulary else 0, 1.0 if s.top_p is None else s.top_p, s.min_p)


def distribution(logits: Tensor, groups: Sequence[Rows]) -> Tensor:
    """Log-probabilities [N, V] after all options; −inf is excluded. Greedy rows hold 0 at the winner.

    logits [N, V], the rows of the groups one after another; float64 stays float64, everything else becomes float32.
    Raises OptionError when the options, or the grammar, exclude every token of a row, or name a token that does not exist.
    """
    return laws(logits, groups).sure().whole


def laws(logits: Tensor, groups: Sequence[Rows], due: Collection[int] | None = None) -> Law:
    """`distribution`, by the possible tokens alone where all rows went through the same filters and these left few.

    due: the rows that must have a token, all unless they are named. Where another has none it is in `Law.dead`: plain decoding hears of
    a dead end when its text is there, and a guess may lead where no text ever goes. A device is not waited for: whoever needs the laws to
    the last token asks for `Law.sure`.
    """
    assert logits.shape[0] == sum(len(g.paths) for g in groups), "one path per row of logits"
    found = _by_kernel(logits, groups)
    if found is not None:
        return found
    if logits.device.type != "cpu" and not any(g.edited or _filters(g.sampling, logits.shape[1]).temperature for g in groups):
        best, kind = first_largest(logits), logits.dtype if logits.dtype in _SLACK else torch.float32
        return Law(logits.shape[1], few=(best, logits.new_zeros((), dtype=kind).expand(best.shape)))     # all else would decide nothing
    x = logits if logits.dtype in _SLACK else logits.float()
    batches: dict[Filters, list[int]] = {}
    edited, start = False, 0
    for g in groups:
        stop = start + len(g.paths)
        if g.edited:
            x = x.clone() if x is logits else x
            edit(x[start:stop], g)
            edited = True
        batches.setdefault(_filters(g.sampling, x.shape[1]), []).extend(range(start, stop))
        start = stop
    top = torch.from_numpy(x.numpy().max(-1, keepdims=True)) if x.device.type == "cpu" else x.amax(-1, keepdim=True)
    dead: list[int] = []
    if edited or x.device.type == "cpu":                    # a device would be waited for
        dead = np.flatnonzero(~np.isfinite(top.cpu().numpy())).tolist()
        if wrong := [row for row in dead if due is None or row in due]:
            _refuse(logits, top, groups, wrong[0])
    if dead:
        x, top = _stood_in(x, dead), top.index_fill(0, uploaded(dead, x.device), 0)
    law = _batched(x, top, batches)
    law.dead = dead
    if law.short is not None:
        law.thorough = partial(_batched, x, top, batches, thorough=True)
    return law


def _batched(x: Tensor, top: Tensor, batches: Mapping[Filters, Sequence[int]], thorough: bool = False) -> Law:
    """The laws of rows [N, V], whose largest logits are top [N, 1], by filters; thorough: nobody is short."""
    if len(batches) == 1:
        return _law(x, top, next(iter(batches)), thorough)
    law = Law(x.shape[1], torch.empty_like(x))
    for filters, members in batches.items():
        rows = uploaded(members, x.device)
        part = _law(x[rows], top[rows], filters, thorough)
        law.whole[rows] = part.whole
        if part.short is not None:
            law.short = torch.zeros_like(top[:, 0], dtype=torch.bool) if law.short is None else law.short
            law.short[rows] = part.short
    return law


def _stood_in(x: Tensor, dead: Sequence[int]) -> Tensor:
    """A copy of x [N, V] whose dead rows are sure of the first token."""
    x = x.clone()
    x[dead] = -math.inf
    x[dead, 0] = 0
    return x


def _by_kernel(logits: Tensor, groups: Sequence[Rows]) -> Law | None:
    """Where all rows have one temperature and the same filters, and nothing before them: the lines of `laws` and `_law` in one call, from
    logits of any type. None where there is more to do, or a row to refuse."""
    if not compiled(logits, torch.bfloat16) or any(g.edited for g in groups):
        return None
    filters = _filters(groups[0].sampling, logits.shape[1])
    if any(_filters(g.sampling, logits.shape[1]) != filters for g in groups[1:]):
        return None
    if filters.active:
        return _by_filters(logits, filters) if logits.shape[1] > _SHORT else None
    if filters.temperature:
        whole = choices.law(logits, max(filters.temperature, host.COLD))
        return None if whole is None else Law(logits.shape[1], whole)
    best = choices.first(logits)
    return None if best is None else Law(logits.shape[1], few=(best, _certain(best.shape[0])))


@lru_cache(maxsize=64)
def _certain(rows: int) -> Tensor:
    """The log-probabilities [rows, 1] of tokens that are chosen for sure."""
    return torch.zeros(rows, 1)


def check_finite(logits: Tensor, rows: Iterable[int]) -> None:
    """Raises Failure where the largest of a row's logits is no finite number, whatever the options made of them."""
    for row in rows:
        largest = logits[row].amax().item()
        if not math.isfinite(largest):
            raise Failure(f"row {row}: the largest logit is {largest}; expected a finite number: the model overflowed, try another dtype")


def _refuse(logits: Tensor, top: Tensor, groups: Sequence[Rows], row: int) -> None:
    """Say why a row has no finite maximum."""
    group, offset = next((g, row - s) for g, s in _starts(groups) if s <= row < s + len(g.paths))
    check_finite(logits, [row])
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


def _law(x: Tensor, top: Tensor, f: Filters, thorough: bool = False) -> Law:
    """`_batched` rows [G, V] that share their filters."""
    if f.temperature == 0:
        return Law(x.shape[1], few=(first_largest(x), torch.zeros_like(top)))
    if not f.active:
        return Law(x.shape[1], _log_softmax(x, top, f.temperature))
    whole = f.top_p < 1 and not f.top_k
    if x.device.type != "cpu" or x.shape[1] <= _SHORT:
        total = _log_softmax(x, top, f.temperature).amax(-1, keepdim=True).double().neg_().exp_() if whole else None
        few = x.shape[1] > _WIDE and 2 * f.top_k <= _THERE and x.dtype == torch.float32 and not thorough
        return _topmost(x, top, total, f) if few else Law(x.shape[1], _sorted(x, top, total, f))
    if compiled(x):
        found = _by_filters(x, f)
        assert found is not None, "rows without a finite maximum were refused"
        return found
    return _searched(x, top, _log_softmax(x, top, f.temperature) if whole else None, f)


def _log_softmax(x: Tensor, top: Tensor, temperature: float) -> Tensor:
    if compiled(x):
        found = choices.law(x, max(temperature, host.COLD))
        assert found is not None, "rows without a finite maximum were refused"
        return found
    if temperature == 1:
        return torch.log_softmax(x, -1)
    return torch.log_softmax((x - top).div_(max(temperature, host.COLD)), -1)   # shifted first: no overflow, and precise where the mass is


def _sorted(x: Tensor, top: Tensor, total: Tensor | None, f: Filters) -> Tensor:
    """All rows at once, each sorted whole. total [G, 1]: a row's mass (the likeliest token's is 1), where top_p applies to all of it."""
    values, columns = torch.sort(x, dim=-1, stable=True, descending=True)
    return torch.empty_like(x).scatter_(1, columns, _kept(values, top, total, f).to(x.dtype))


def _topmost(x: Tensor, top: Tensor, total: Tensor | None, f: Filters) -> Law:
    """The same from each row's likeliest tokens, without sorting all others. Who keeps the last of them, or its equal, may have kept more,
    and is short."""
    values, columns = x.topk(_THERE)                            # of equal ones, which have an order here, any
    order = ranks(values, columns).argsort(-1, descending=True)
    values, columns = values.gather(1, order), columns.gather(1, order)
    logp = _kept(values, top, total, f)
    short = (logp.isfinite() & (values == values[:, -1:])).any(-1)
    return Law(x.shape[1], few=(columns, logp.to(x.dtype)), short=short)


def _kept(values: Tensor, top: Tensor, total: Tensor | None, f: Filters) -> Tensor:
    """Log-probabilities, float64, of sorted logits [G, K], −inf where filters leave nothing."""
    z = (values.double() - top.double()).div_(max(f.temperature, host.COLD))
    mass = z.exp().cumsum(-1)
    keep = values > -math.inf
    slack = _SLACK[values.dtype]
    if f.top_k:
        keep &= values >= values[:, f.top_k - 1:f.top_k]
        total = mass.gather(1, keep.sum(-1, keepdim=True) - 1)
    if f.top_p < 1:
        assert total is not None, "without top-k the row's mass is given"
        keep[:, 1:] &= mass[:, :-1] < total * (f.top_p * (1 - slack))
    if f.min_p:
        keep &= z >= math.log(f.min_p) - slack
    return (z - mass.gather(1, keep.sum(-1, keepdim=True) - 1).log()).masked_fill_(~keep, -math.inf)


def _searched(x: Tensor, top: Tensor, logp: Tensor | None, f: Filters) -> Law:
    """The same on a processor, looking only at tokens that can be kept. logp [G, V]: for the masses of rows, where they count."""
    totals = [None] * len(x) if logp is None else np.exp(-logp.numpy().max(1).astype(np.float64)).tolist()
    rows = zip(x.numpy(), top.flatten().tolist(), totals, strict=True)
    return _few(x, [host.filtered(row, likeliest, total, f) for row, likeliest, total in rows])


def _by_filters(x: Tensor, f: Filters) -> Law | None:
    """`_searched` by the kernel, of rows of bfloat16 also; None if one has no finite maximum."""
    temperature, kept = max(f.temperature, host.COLD), dict[int, tuple[host.Ids, host.Floats]]()
    asked = choices.Filters.of(temperature, *f[1:])
    for k, room in ((f.top_k or host.FEW, host.ROOM), (0, 16 * host.ROOM)):
        left = [row for row in range(len(x)) if row not in kept]
        found = choices.filtered(rows_of(x, left), asked, k, -host.FLOOR * temperature, room) if left else []
        if found is None:
            return None
        kept |= {row: both for row, both in zip(left, found, strict=True) if len(both[0])}
    for row in set(range(len(x))) - kept.keys():                # flat ones, whose many tokens numpy sorts sooner
        own, logp = x[row].float().numpy(), choices.law(x[row:row + 1], temperature)
        assert logp is not None
        total = None if f.top_k or f.top_p == 1 else float(np.exp(-logp.numpy().max().astype(np.float64)))
        kept[row] = host.filtered(own, float(own.max()), total, f)
    return _few(x, [kept[row] for row in range(len(x))])


def _few(x: Tensor, rows: Sequence[tuple[host.Ids, host.Floats]]) -> Law:
    """The law of x [N, V], whose rows are those of `host.filtered`."""
    columns, values = host.stacked(rows)
    return Law(x.shape[1], few=(torch.from_numpy(columns), torch.from_numpy(values).to(torch.promote_types(x.dtype, torch.float32))))
