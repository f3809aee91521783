"""Experts in C (kernels/experts.c): what many small products and the sorting between them cost is more than the products themselves."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Self

import torch
from torch import Tensor

from .native import Product, fields, loaded

Products = ctypes.Array[Product]


class Mixture(ctypes.Structure):
    """The experts of a layer, as kernels/lanes.h has them. The parts must outlive it."""

    _fields_ = [("router", Product), *fields(pointers="first down", numbers="count chosen", flags="normed kept", reals="alpha limit")]
    parts: tuple[Products, Products]

    @classmethod
    def of(cls, first: Products, down: Products, chosen: int, limits: tuple[float, float] | None = None, router: Product | None = None,
           normed: bool = False, kept: bool = False) -> Self:
        """first [experts]: gate and up, one below the other; chosen: by each row. limits: alpha and the limit of gates like gpt-oss's,
        whose gates and ups stand in turn. For `route`: the router; normed: weights of a row add up to 1; kept: they are rounded to the
        type of logits."""
        assert len(first) == len(down) and first[0].out == 2 * down[0].columns and first[0].columns == down[0].out
        made = cls(router or Product(), ctypes.addressof(first), ctypes.addressof(down), len(first), chosen, normed, kept,
                   *(limits or (0.0, 0.0)))
        made.parts = first, down
        return made


class _Portions(ctypes.Structure):
    _fields_ = fields(pointers="of start", numbers="count")


def mix(mixture: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What experts make of x [rows, hidden], float32 or bfloat16: chosen int64 and weights [rows, k]; an expert that there
    is not counts as none."""
    rows, down = len(x), mixture.parts[1][0]
    assert x.shape == (rows, down.out) and chosen.shape == weights.shape == (rows, mixture.chosen) and chosen.dtype == torch.int64
    x, chosen, weights, y = x.contiguous(), chosen.contiguous(), weights.float().contiguous(), torch.empty(x.shape, dtype=x.dtype)
    if _library().mix(mixture, x.data_ptr(), chosen.data_ptr(), weights.data_ptr(), y.data_ptr(), rows, x.dtype == torch.bfloat16,
                      torch.get_num_threads()):
        raise MemoryError(f"a mixture of experts found no memory to work in for {rows} rows")
    return y


def route(mixture: Mixture, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of the router's logits [rows, experts] the likeliest experts, int64 [rows, k], of equals the first, and their weights float32."""
    rows = len(logits)
    assert logits.shape == (rows, mixture.count)
    logits = logits.contiguous()
    chosen, weights = torch.empty(rows, mixture.chosen, dtype=torch.int64), torch.empty(rows, mixture.chosen)
    _library().route(mixture, logits.data_ptr(), chosen.data_ptr(), weights.data_ptr(), rows, logits.dtype == torch.bfloat16)
    return chosen, weights


def multiply_each(products: Products, x: Tensor, portions: Sequence[tuple[int, int, int]]) -> Tensor:
    """y [rows, out]: of x [rows, in], float32 or bfloat16, for each (number, start, end), which follow one another and leave out no row,
    these rows by the product of that number."""
    starts = [start for _, start, _ in portions] + [len(x)]
    assert x.shape[1] == products[0].columns and [end for *_, end in portions] == starts[1:] and starts[0] == 0
    x, y = x.contiguous(), torch.empty(len(x), products[0].out, dtype=x.dtype)
    of, start = array("q", [number for number, *_ in portions]), array("q", starts)
    asked = _Portions(of.buffer_info()[0], start.buffer_info()[0], len(of))
    if _library().multiply_each(products, asked, x.data_ptr(), y.data_ptr(), x.dtype == torch.bfloat16, torch.get_num_threads()):
        raise MemoryError(f"{len(of)} products found no memory to work in for {len(x)} rows")
    return y


def _library() -> ctypes.CDLL:
    return _told(loaded())


@cache
def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """What the functions take."""
    whole, pointer, small = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.mix.argtypes, library.mix.restype = [ctypes.POINTER(Mixture), *[pointer] * 4, whole, small, small], small
    library.route.argtypes, library.route.restype = [ctypes.POINTER(Mixture), *[pointer] * 3, whole, small], None
    library.multiply_each.argtypes = [ctypes.POINTER(Product), ctypes.POINTER(_Portions), *[pointer] * 2, small, small]
    library.multiply_each.restype = small
    return library
