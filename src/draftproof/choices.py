"""Laws of rows of logits, and choices from them, in C (kernels/choice.c): numpy reads a row a dozen times to find the few tokens that can
be kept by filters, or win."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .native import address_of, loaded


class Sifted(NamedTuple):
    """Of a row: its largest number; what the exponentials of all its numbers add up to, of which the largest's is 1, if that was asked for;
    what those that were found reach; their columns, rising, and they. None are found where there was no room for all."""

    top: float
    total: float | None
    bound: float
    columns: NDArray[np.int64]
    values: NDArray[np.float32]


def best(x: Tensor, keys: Tensor | None, names: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k best of log p + g: x [N, V] float32 log-probabilities, keys int32 [N, 2] of `core.noise`, None for no noise; names int64 [V]:
    the target's ids of the columns → scores float32 and columns int64 [N, k], as `core.choice.perturbed_top` gives them."""
    rows, size = x.shape
    assert x.dtype == torch.float32 and 1 <= k <= size and (names is None or names.dtype == torch.int64 and len(names) == size)
    x, keys = x.contiguous(), None if keys is None else keys.contiguous()
    assert keys is None or keys.dtype == torch.int32 and keys.shape == (rows, 2)
    scores, columns = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    if _library().best(x.data_ptr(), rows, size, address_of(keys), address_of(names), k, scores.data_ptr(), columns.data_ptr(),
                       torch.get_num_threads()):
        raise MemoryError(f"the choice of {rows} rows found no memory to work in")
    return scores, columns


def first(x: Tensor) -> Tensor | None:
    """The first column of the largest value of each row [N, V], int64 [N, 1]; None if a row's largest is not finite."""
    x, columns = x.contiguous(), torch.empty(x.shape[0], 1, dtype=torch.int64)
    wrong = _library().first(x.data_ptr(), *x.shape, x.dtype == torch.bfloat16, columns.data_ptr(), torch.get_num_threads())
    return None if wrong else columns


def law(x: Tensor, temperature: float) -> Tensor | None:
    """log softmax of x [N, V] at this temperature above 0, float32; None if a row's largest is not finite."""
    x, y = x.contiguous(), torch.empty(x.shape)
    wrong = _library().law(x.data_ptr(), y.data_ptr(), *x.shape, temperature, x.dtype == torch.bfloat16, torch.get_num_threads())
    return None if wrong else y


def sift(x: Tensor, temperature: float, k: int, fall: float, room: int, weighed: bool) -> list[Sifted] | None:
    """What filters of this temperature above 0 can keep of each row of x [N, V]. k: of columns those that at least so many reach, or, where
    it is 0, those whose number is no further than `fall` below the largest; weighed: whether totals are asked for. None if a row's largest
    is not finite."""
    x, rows = x.contiguous(), x.shape[0]
    tops, bounds, masses = np.empty((3, rows), np.float32)
    counts, columns, values = np.empty(rows, np.int64), np.empty((rows, room), np.int64), np.empty((rows, room), np.float32)
    wrong = _library().sift(x.data_ptr(), *x.shape, temperature, k, fall, room, tops.ctypes.data, bounds.ctypes.data,
                            masses.ctypes.data if weighed else None, counts.ctypes.data, columns.ctypes.data, values.ctypes.data,
                            x.dtype == torch.bfloat16, torch.get_num_threads())
    if wrong:
        return None
    counts[counts > room] = 0
    totals = np.exp(masses.astype(np.float64)).tolist() if weighed else [None] * rows
    each = zip(tops.tolist(), totals, bounds.tolist(), counts.tolist(), strict=True)
    return [Sifted(top, total, bound, columns[i, :n], values[i, :n]) for i, (top, total, bound, n) in enumerate(each)]


def _library() -> ctypes.CDLL:
    return _told(loaded())


@cache
def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """What the functions take."""
    whole, pointer, small = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.best.argtypes = [pointer, whole, whole, pointer, pointer, whole, pointer, pointer, small]
    library.best.restype = small
    library.law.argtypes, library.law.restype = [pointer, pointer, whole, whole, ctypes.c_float, small, small], small
    library.sift.argtypes = [pointer, whole, whole, ctypes.c_float, whole, ctypes.c_float, whole, *[pointer] * 6, small, small]
    library.sift.restype = small
    library.first.argtypes, library.first.restype = [pointer, whole, whole, small, pointer, small], small
    return library
