"""Laws of rows of logits, and choices from them, in C (kernels/choice.c): numpy reads a row a dozen times to find the few tokens that can
be kept by filters, or win."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .native import address_of, loaded


class Filters(ctypes.Structure):
    """core/host.py's, as kernels/lanes.h has them: least is the logarithm of min_p."""

    _fields_ = [("temperature", ctypes.c_double), ("top_p", ctypes.c_double), ("least", ctypes.c_double), ("top_k", ctypes.c_long)]

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float, min_p: float) -> Self:
        return cls(temperature, top_p, math.log(min_p) if min_p else -math.inf, top_k)


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


def filtered(x: Tensor, filters: Filters, k: int, fall: float, room: int) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]] | None:
    """What filters leave of each row of x [N, V]: columns, likeliest first, and their log-probabilities. They look at what at least k
    numbers reach, or, where k is 0, at what is no further than `fall` below the largest. No columns where these are too few to tell, or
    more than `room`. None if a row's largest is not finite."""
    x, rows = x.contiguous(), x.shape[0]
    counts, columns, logs = np.empty(rows, np.int64), np.empty((rows, room), np.int64), np.empty((rows, room))
    wrong = _library().filter(x.data_ptr(), *x.shape, filters, k, fall, room, counts.ctypes.data, columns.ctypes.data, logs.ctypes.data,
                              x.dtype == torch.bfloat16, torch.get_num_threads())
    return None if wrong else [(columns[i, :count], logs[i, :count]) for i, count in enumerate(counts.tolist())]


def _library() -> ctypes.CDLL:
    return _told(loaded())


@cache
def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """What the functions take."""
    whole, pointer, small = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.best.argtypes = [pointer, whole, whole, pointer, pointer, whole, pointer, pointer, small]
    library.best.restype = small
    library.law.argtypes, library.law.restype = [pointer, pointer, whole, whole, ctypes.c_float, small, small], small
    library.filter.argtypes = [pointer, whole, whole, ctypes.POINTER(Filters), whole, ctypes.c_float, whole, *[pointer] * 3, small, small]
    library.filter.restype = small
    library.first.argtypes, library.first.restype = [pointer, whole, whole, small, pointer, small], small
    return library
