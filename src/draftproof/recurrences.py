"""Layers with recurrent states in C (kernels/recurrence.c)."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Self

import torch
from torch import Tensor

from .native import LEAST_VECTOR, SILU, STRIPE, Course, CourseFields, Product, Scale, address_of, fields, loaded

DELTA, SPACE, SHORT = range(3)  # rules (kernels/lanes.h)


class Recurrence(ctypes.Structure):
    """What such a layer has between its products, as kernels/lanes.h has it. Its parts must outlive it."""

    _fields_ = [*((name, Product) for name in ("written_kept", "decays", "gates")), *fields(pointers="taps bias decay shift skip"),
                ("of_sight", Scale), *fields(numbers="key_heads value_heads key_dim value_dim reach number groups first keeps",
                                             reals="floor top share", flags="rule opened_by sharp coarse")]

    @classmethod
    def of(cls, rule: int, taps: Tensor, bias: Tensor | None, sizes: tuple[int, int, int, int], number: int, decay: Tensor | None = None,
           shift: Tensor | None = None, of_sight: Scale | None = None, skip: Tensor | None = None, groups: int = 1,
           limits: tuple[float, float] = (0, math.inf), share: float = 1, first: int = 0, *,
           products: tuple[Product | None, ...] = (None,) * 3, keeps: int = 0, opened_by: int = SILU, sharp: bool = False,
           coarse: bool = False) -> Self:
        """All float32: taps [reach + 1, channels], bias [channels], decay and skip [value_heads], shift [value_heads · keeps]; sizes: heads
        of keys and of values, numbers of a key and of a value; products: written_kept, decays and gates of kernels/lanes.h, of the gated
        delta rule, where the whole pass is one call; first: where its numbers begin among those that the first product makes; all else as
        kernels/lanes.h has it."""
        key_heads, heads, key_dim, value_dim = sizes
        held_or_not = taps, bias, decay, shift, skip
        held = [part for part in held_or_not if part is not None]
        assert all(part.dtype == torch.float32 and part.is_contiguous() for part in held)
        assert taps.shape[1] == 2 * key_heads * key_dim + heads * value_dim and key_dim % LEAST_VECTOR == 0 == value_dim % (STRIPE // 2)
        assert all(len(part) == heads for part in (decay, skip) if part is not None) and keeps in (0, 1, key_dim)
        assert shift is None or shift.shape == (heads * max(keeps, 1),)
        assert heads % groups == 0 and heads % max(key_heads, 1) == 0
        return cls(*(product or Product() for product in products), *map(address_of, held_or_not), of_sight or Scale(), key_heads, heads,
                   key_dim, value_dim, len(taps) - 1, number, groups, first, keeps, *limits, share, rule, opened_by, sharp, coarse)


def recall(what: Recurrence, course: Course, made: Tensor, beside: Tensor | None) -> Tensor:
    """What rows see, [rows, value_heads * value_dim], of what the first product made of them, [rows, out], which a short convolution
    changes, and of how much is written and kept, [rows, value_heads · (1 + keeps)], by the gated delta rule."""
    assert made.is_contiguous() and (beside is None) == (what.rule != DELTA)
    shape = len(made), what.value_heads * (1 + what.keeps)
    assert beside is None or beside.is_contiguous() and beside.shape == shape and beside.dtype == made.dtype
    seen = torch.empty(course.rows, what.value_heads * what.value_dim, dtype=made.dtype)
    if _library().recalled(what, made.shape[1], course.struct, made.data_ptr(), address_of(beside), seen.data_ptr(),
                           made.dtype == torch.bfloat16, torch.get_num_threads()):
        raise MemoryError(f"recurrent states of {course.rows} rows found no memory to work in")
    return seen


def _library() -> ctypes.CDLL:
    return _told(loaded())


@cache
def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """What the function takes."""
    pointer, small = ctypes.c_void_p, ctypes.c_int
    library.recalled.argtypes = [ctypes.POINTER(Recurrence), ctypes.c_long, ctypes.POINTER(CourseFields), *[pointer] * 3, small, small]
    library.recalled.restype = small
    return library
