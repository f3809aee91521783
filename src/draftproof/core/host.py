"""Filters and choices on a processor, in numpy, whose operations on few numbers cost a third of torch's.

Twins of what `probs.py` and `choice.py` do on a device, where every row is sorted and drawn for as a whole. Here only tokens that
can count are looked at, and bounds prove that none was missed. The same tokens are left, with the same float64 sums over the
same order; the two may differ in the last bit of a logarithm. What is done to one row depends on that row alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ids = NDArray[np.integer]

FEW = 128            # likeliest tokens looked at before more; a nucleus is rarely larger
FLOOR = -10.0        # then: tokens at least e**−10 as likely as the likeliest; then the whole row
TILE = 64            # columns of a long row that share a maximum
LONG = 16_384        # rows from here on are searched by their tiles
COLD = 1e-30         # the lowest temperature above 0 that float32 can divide by on every device
_MARGIN = 1e-3       # far above the float32 error of `bound`
_LOWEST = float(np.finfo(np.float32).min)
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


def filtered(rows: Floats, top: Floats, tiles: Floats | None, logp: Floats | None, f: Filters) -> tuple[Ids, Floats]:
    """What the filters leave of rows of logits [N, V]: columns [N, C], likeliest first, filled up with −1, and their log-probabilities,
    float64.

    top [N]: the largest logits · tiles [N, T]: maxima of `TILE` columns each, of long rows · logp [N, V]: the log-softmax at this
    temperature, for its mass, where top_p applies to the whole row (without top_k).
    """
    columns, logs, enough = _ranked(rows, top, _first_bound(rows, tiles, f), logp, f)
    if enough.all():
        return columns, logs
    ways = [(columns[r, columns[r] >= 0], logs[r, columns[r] >= 0]) for r in range(len(rows))]
    for r in np.flatnonzero(~enough).tolist():
        one = slice(r, r + 1)
        for floor in (FLOOR, -math.inf):                        # at last the whole row, which is always enough
            more, law, done = _ranked(rows[one], top[one], top[one] + floor * f.temperature, None if logp is None else logp[one], f)
            if done[0]:
                break
        ways[r] = more[0], law[0]
    widest = max(len(own) for own, _ in ways)
    columns, logs = np.full((len(rows), widest), -1), np.full((len(rows), widest), -math.inf)
    for r, (own, law) in enumerate(ways):
        columns[r, :len(own)], logs[r, :len(own)] = own, law
    return columns, logs


def _first_bound(rows: Floats, tiles: Floats | None, f: Filters) -> Floats:
    """Of each row a value that at least `k` tokens reach."""
    k = f.top_k or FEW
    if k >= rows.shape[1] // 2:
        return np.full(len(rows), -math.inf)
    where = rows if tiles is None or k > tiles.shape[1] // 2 else tiles       # the k-th of the tiles' maxima is not above the k-th of all
    return np.partition(where, where.shape[1] - k)[:, where.shape[1] - k]


def _ranked(rows: Floats, top: Floats, bound: Floats, logp: Floats | None, f: Filters) -> tuple[Ids, Floats, NDArray[np.bool_]]:
    """`filtered`, from the tokens that reach bound [N], and whether [N] these were enough to tell."""
    whole = bound == -math.inf
    columns, count = _where(rows >= np.maximum(bound, _LOWEST)[:, None])
    every = np.arange(len(rows))[:, None]
    fallen = np.where(columns < 0, math.inf, -rows[every, columns])
    order = _rising(fallen)                                     # descending logits, ties by id
    columns, fallen = columns[every, order], fallen[every, order]
    z = (-fallen.astype(np.float64) - top[:, None]) / max(f.temperature, COLD)
    mass = np.exp(z).cumsum(1)
    give, kept = 1e-12 if rows.dtype == np.float64 else 1e-6, count
    at = every[:, 0]
    if f.top_k:
        last = fallen[:, min(f.top_k, fallen.shape[1]) - 1]
        kept = np.minimum(count, np.count_nonzero(fallen <= last[:, None], 1))
        total = mass[at, kept - 1]
    elif logp is not None:
        total = np.exp(-logp[at, columns[:, 0]].astype(np.float64))
    if f.top_p < 1:
        kept = np.minimum(kept, 1 + np.count_nonzero(mass < (total * (f.top_p * (1 - give)))[:, None], 1))
    if f.min_p:
        kept = np.minimum(kept, np.count_nonzero(z >= math.log(f.min_p) - give, 1))
    enough = whole | (count >= f.top_k if f.top_k else kept < count)
    logs = z - np.log(mass[at, kept - 1])[:, None]
    width = int(kept.max())
    left = np.arange(width) < kept[:, None]
    return np.where(left, columns[:, :width], -1), np.where(left, logs[:, :width], -math.inf), enough


def _rising(x: Floats) -> Ids:
    """The stable order of each row; of long float32 rows by integers, which numpy sorts five times as fast."""
    if x.dtype != np.float32 or x.shape[1] < 4096:
        return x.argsort(1, kind="stable")
    i = (x + np.float32(0)).view(np.int32)                      # −0.0 becomes 0.0
    keys = ((i ^ ((i >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32) | np.arange(x.shape[1])
    keys.sort(1)
    return keys & 0xFFFFFFFF


def _where(chosen: NDArray[np.bool_]) -> tuple[Ids, Ids]:
    """The columns of the True of each row [N, V] as [N, C], ascending, filled up with −1; and how many there are [N]."""
    n, size = chosen.shape
    flat = np.flatnonzero(chosen)
    if n == 1:
        return flat[None], np.array([flat.shape[0]])
    row = flat // size
    count = np.bincount(row, minlength=n)
    columns = np.full((n, int(count.max())), -1)
    columns[row, np.arange(flat.shape[0]) - np.repeat(np.cumsum(count) - count, count)] = flat - row * size
    return columns, count


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


def best_of_few(rows: Floats, columns: Ids, keys: Ids, names: Ids | None, k: int) -> tuple[Floats, Ids]:
    """The k best of log p + g of each row [N, V] among columns [N, C], filled up with −1: values and columns [N, k], ties by the lowest
    column; −inf, and columns that are none of them, where they are fewer. keys [N, 2]; names [V]: the target's ids of the columns."""
    every = np.arange(len(rows))[:, None]
    scores = rows[every, columns] + gumbel(keys, columns if names is None else names[columns])
    scores[columns < 0] = -math.inf
    if k == 1:
        best = scores.max(1, keepdims=True)
        return best, np.where(scores == best, columns, rows.shape[1]).min(1, keepdims=True)
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
    """`best_of_few` over all columns: exact scores for those alone that can be among the k best. reach [N, V]: `bound` of the keys.

    Looked at is who reaches a floor somewhat below the highest bound: if k exact scores lie above it, nobody else can come between.
    """
    limits = rows + reach
    top = limits.max(1, keepdims=True)
    for below in (2.0 * k, 8.0 * k, math.inf):
        floor = np.maximum(top - below, _LOWEST)
        columns, _ = _where(limits >= floor)
        values, found = best_of_few(rows, columns, keys, names, k)
        if below == math.inf or (values[:, -1:] > floor + _MARGIN).all():
            break
    return values, found
