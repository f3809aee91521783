"""Filters and choices on a processor, in numpy, whose operations on few numbers cost a third of torch's.

Twins of what `probs.py` and `choice.py` do on a device, where every row is sorted and drawn for as a whole. Here only tokens that
can count are looked at, and bounds prove that none was missed. The same tokens are left, with the same float64 sums over the
same order; the two may differ in the last bit of a logarithm. What is done to one row depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ids = NDArray[np.integer]

FEW = 128            # likeliest tokens looked at before more; a nucleus is rarely larger
ROOM = 1024          # for what reaches the least of these, ties with it among them; then sixteen times as much
FLOOR = -10.0        # then: tokens at least e**−10 as likely as the likeliest; then the whole row
TILE = 64            # columns of a long row that share a maximum; of a shorter one an eighth as many
LONG = 16_384        # rows from here on are long
HOT = 1e30           # the highest: far above any difference of logits, and float32 can still divide −inf by it
COLD = 1e-30         # the lowest temperature above 0 that float32 can divide by on every device
_MARGIN = 1e-3       # far above the float32 error of `bound`
_LOWEST = float(np.finfo(np.float32).min)
_NONE = np.iinfo(np.int64).max
_ROUNDS = ((np.uint32(16), np.uint32(0x7FEB352D)), (np.uint32(15), np.uint32(0x846CA68B)))


class Filters(NamedTuple):
    """What a request asks of a law; 0, or 1 for top_p, is off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def active(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


# Filters.


def filtered(row: Floats, top: float, total: float | None, f: Filters) -> tuple[Ids, Floats]:
    """What the filters leave of one row of logits [V]: columns [C], likeliest first, and their log-probabilities, float64.

    top: the largest logit · total: the mass of the row at this temperature, of which the likeliest token's is 1, where top_p applies to
    all of it (without top_k).
    """
    for bound in (_first_bound(row, f), top + FLOOR * f.temperature, -math.inf):        # at last the whole row, which is always enough
        reached = np.flatnonzero(row >= max(bound, _LOWEST))
        columns, logs, enough = ranked(reached, row[reached], top, total, f)
        if enough or bound == -math.inf:
            break
    return columns, logs


def _first_bound(row: Floats, f: Filters) -> float:
    """A value that at least `k` tokens reach: the k-th of the maxima of tiles, which is not above the k-th of all."""
    k, size = f.top_k or FEW, len(row)
    if k >= size // 2:
        return -math.inf
    tile = TILE if size >= LONG else TILE // 8
    wide = size // tile
    where = row if k > wide // 2 else row[:wide * tile].reshape(tile, wide).max(0)
    return float(np.partition(where, len(where) - k)[len(where) - k])


def ranked(columns: Ids, values: Floats, top: float, total: float | None, f: Filters) -> tuple[Ids, Floats, bool]:
    """`filtered`, from the tokens [C] that reach a bound, rising, and their logits, and whether these were enough to tell."""
    fallen = -values
    order = _rising(fallen)                                     # descending logits, ties by id
    columns, fallen = columns[order], fallen[order]
    z = (-fallen.astype(np.float64) - top) / max(f.temperature, COLD)
    mass = np.exp(z).cumsum()
    give = 1e-12 if values.dtype == np.float64 else 1e-6
    count = kept = len(columns)
    if f.top_k:
        kept = int(np.count_nonzero(fallen <= fallen[min(f.top_k, count) - 1]))
    if f.top_p < 1:                                             # the likeliest token's mass is 1
        kept = min(kept, 1 + int(mass.searchsorted((mass[kept - 1] if total is None else total) * (f.top_p * (1 - give)))))
    if f.min_p:
        kept = min(kept, int(np.count_nonzero(z >= math.log(f.min_p) - give)))
    return columns[:kept], z[:kept] - np.log(mass[kept - 1]), count >= f.top_k if f.top_k else kept < count


def _rising(x: Floats) -> Ids:
    """The stable order; of many float32 by integers, which numpy sorts five times as fast."""
    if x.dtype != np.float32 or len(x) < 4096:
        return x.argsort(kind="stable")
    i = (x + np.float32(0)).view(np.int32)                      # −0.0 becomes 0.0
    keys = ((i ^ ((i >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32) | np.arange(len(x))
    keys.sort()
    return keys & 0xFFFFFFFF


def stacked(rows: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, Floats]:
    """Columns and values of each row as [N, C], filled up with −1 and −inf."""
    if len(rows) == 1:
        return rows[0][0][None], rows[0][1][None]
    widest = max(len(columns) for columns, _ in rows)
    columns, values = np.full((len(rows), widest), -1), np.full((len(rows), widest), -math.inf)
    for i, (own, logs) in enumerate(rows):
        columns[i, :len(own)], values[i, :len(own)] = own, logs
    return columns, values


# Noise: `core/noise.py` in numpy.


def bits(keys: Ids, tokens: Ids) -> Ids:
    """h as uint32 [R, K]: keys uint32 [R, 2], tokens [K] or [R, K] of any integer type."""
    h = tokens.astype(np.uint32) ^ keys[:, :1]
    scratch = np.empty_like(h)
    _mix(h, scratch)
    h += keys[:, 1:]
    _mix(h, scratch)
    return h


def _mix(h: Ids, scratch: Ids) -> None:
    for shift, multiplier in _ROUNDS:
        h ^= np.right_shift(h, shift, out=scratch)
        h *= multiplier
    h ^= np.right_shift(h, _ROUNDS[0][0], out=scratch)


def gumbel(keys: Ids, tokens: Ids) -> Floats:
    """g float32 [R, K], rounded where `noise.gumbel` rounds."""
    u = bits(keys, tokens) + 0.5
    u *= -(2.0**-32)
    exponential = np.log1p(u, out=u).astype(np.float32).astype(np.float64)
    g: Floats = -np.log(-exponential).astype(np.float32)
    return g


def bound(keys: Ids, names: Ids | None, size: int) -> Floats:
    """−log u float32 [R, size]: E = −log1p(−u) ≥ u, so but for rounding it is no smaller than the Gumbel noise, and nearly equal where u
    is small, which is where winners are."""
    u = bits(keys, np.arange(size, dtype=np.uint32) if names is None else names).astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.log(u, out=u)
    return np.negative(u, out=u)


# Choices.


def largest(rows: Floats, k: int) -> Ids:
    """The columns [N, k] of the k largest values of each row [N, V], best first, ties by the lowest column."""
    if k == 1:
        first: Ids = rows.argmax(1)
        return first[:, None]
    if k <= 4:
        rest, found, every = rows.copy(), [], np.arange(len(rows))
        for _ in range(k):
            found.append(rest.argmax(1))
            if (rest[every, found[-1]] == -math.inf).any():
                break
            rest[every, found[-1]] = -math.inf
        else:
            return np.stack(found, 1)
    place = rows.shape[1] - k
    floors = np.partition(rows, place)[:, place]
    columns = [np.flatnonzero(row >= floor) for row, floor in zip(rows, floors, strict=True)]
    return np.stack([own[np.argsort(-row[own], kind="stable")[:k]] for row, own in zip(rows, columns, strict=True)])


def best_of_few(values: Floats, columns: Ids, keys: Ids, names: Ids | None, k: int) -> tuple[Floats, Ids]:
    """The k best of log p + g of each row: their scores and columns [N, k], ties by the lowest column; −inf, and columns that are
    none of them, where they are fewer. values, columns [N, C]: log p of the tokens that count, filled up with −inf and −1;
    keys [N, 2]; names [V]: the target's ids of the columns."""
    if not columns.shape[1]:
        return _filled(values, columns, k)
    scores = values + gumbel(keys, columns if names is None else names[columns])
    if k == 1:
        best = scores.max(1, keepdims=True)
        return best, np.maximum(np.where(scores == best, columns, _NONE).min(1, keepdims=True), 0)
    every = np.arange(len(columns))[:, None]
    order = np.lexsort((columns, -scores))[:, :k]
    values, found = scores[every, order], columns[every, order]
    if order.shape[1] < k or (values == -math.inf).any():
        return _filled(values, found, k)
    return values, found


def _filled(values: Floats, found: Ids, k: int) -> tuple[Floats, Ids]:
    """Rows of k, where some have fewer: columns that are none of the found stand for no token."""
    lines = []
    for own in found:
        own = own[own >= 0]
        lines.append(np.concatenate((own, np.setdiff1d(np.arange(k), own)))[:k])
    return np.pad(values, ((0, 0), (0, k - values.shape[1])), constant_values=-math.inf), np.stack(lines)


def best_of_row(rows: Floats, reach: Floats, keys: Ids, names: Ids | None, k: int) -> tuple[Floats, Ids]:
    """`best_of_few` over all columns of rows [N, V]: exact scores for those alone that can be among the k best. reach [N, V]: `bound`
    of the keys.

    Looked at is who reaches a floor somewhat below the highest bound: if k exact scores lie above it, nobody else can come between.
    """
    limits = rows + reach
    top = limits.max(1, keepdims=True)
    for below in (2.0 * k, 8.0 * k, math.inf):
        floor = np.maximum(top - below, _LOWEST)
        columns = _where(limits >= floor)
        values = rows[np.arange(len(rows))[:, None], columns]
        values[columns < 0] = -math.inf
        values, found = best_of_few(values, columns, keys, names, k)
        if below == math.inf or (values[:, -1:] > floor + _MARGIN).all():
            break
    return values, found


def _where(chosen: NDArray[np.bool_]) -> Ids:
    """The columns of the True of each row [N, V] as [N, C], ascending, filled up with −1."""
    n, size = chosen.shape
    flat = np.flatnonzero(chosen)
    if n == 1:
        return flat[None]
    row = flat // size
    count = np.bincount(row, minlength=n)
    columns = np.full((n, int(count.max())), -1)
    columns[row, np.arange(flat.shape[0]) - np.repeat(np.cumsum(count) - count, count)] = flat - row * size
    return columns
