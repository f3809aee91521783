"""Layers of linear attention by the gated delta rule in C (kernels/delta.c)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Self

import torch
from torch import Tensor

from .llama import Layer
from .native import LEAST_VECTOR, STRIPE, Course, CourseFields, Scale, fields, loaded


class Delta(ctypes.Structure):
    """What such a layer has between its products, as kernels/lanes.h has it. Its parts must outlive it."""

    _fields_ = [*fields(pointers="taps decay shift"), ("of_sight", Scale),
                *fields(numbers="key_heads value_heads key_dim value_dim reach number")]

    @classmethod
    def of(cls, taps: Tensor, decay: Tensor, shift: Tensor, of_sight: Scale, key_heads: int, key_dim: int, value_dim: int,
           number: int) -> Self:
        """taps float32 [reach + 1, channels]; decay, shift float32 [value_heads]."""
        assert all(part.dtype == torch.float32 and part.is_contiguous() for part in (taps, decay, shift))
        assert taps.shape[1] == 2 * key_heads * key_dim + len(decay) * value_dim and len(decay) == len(shift)
        assert key_dim % LEAST_VECTOR == 0 and value_dim % STRIPE == 0 and len(decay) % key_heads == 0
        return cls(taps.data_ptr(), decay.data_ptr(), shift.data_ptr(), of_sight, key_heads, len(decay), key_dim, value_dim,
                   len(taps) - 1, number)


def recall(layer: Layer, course: Course, made: Tensor) -> Tensor:
    """What rows see, [rows, value_heads * value_dim], of what the first product made of them, [rows, qkv.out]."""
    assert made.is_contiguous() and made.shape == (course.rows, layer.qkv.out)
    seen = torch.empty(course.rows, layer.o.columns, dtype=made.dtype)
    if _library().recalled(layer, course.struct, made.data_ptr(), seen.data_ptr(), made.dtype == torch.bfloat16, torch.get_num_threads()):
        raise MemoryError(f"linear attention of {course.rows} rows found no memory to work in")
    return seen


def _library() -> ctypes.CDLL:
    return _told(loaded())


@cache
def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """What the function takes."""
    pointer, small = ctypes.c_void_p, ctypes.c_int
    library.recalled.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(CourseFields), pointer, pointer, small, small]
    library.recalled.restype = small
    return library
