"""Experts in C (kernels/experts.c): what many small products and the sorting between them cost is more than the products themselves."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .native import SILU, TYPES, Product, address_of, fields, loaded

Products = ctypes.Array[Product]


class Routing(NamedTuple):
    """How a row's experts are chosen and weighed.

    by_sigmoid: weights are sigmoids of the router's logits, not their softmax. wide: its sums stay float32. normed: those of a row add
    up to 1, but for `beside`, which is added to their sum first; kept: they are rounded to the type of the stream. factor: what they are
    then taken times. A row chooses among the experts of `within` of the groups, of one size each, whose `leading` worthiest experts add up
    to most (DeepSeek-V2, arXiv 2405.04434).
    by_logits: experts are chosen by logits, not by their weights. near: each is chosen among those that are left, and weighs its softmax
    among those of them whose logits are so near, of their size (sparse mixing as inference does it, arXiv 2409.12136). before: rows are
    taken times their weights as they enter experts (Llama 4's).
    shared: how many experts, the last ones, all rows go through (Dai et al., arXiv 2401.06066), with weight `always`, or, gated, the
    sigmoid of one logit more.
    """

    by_sigmoid: bool = False
    wide: bool = False
    normed: bool = True
    beside: float = 0.0
    kept: bool = False
    factor: float = 1.0
    groups: int = 1
    within: int = 1
    leading: int = 1
    by_logits: bool = False
    near: float = 0.0
    before: bool = False
    always: float = 1.0
    shared: int = 0
    gated: bool = False


class Mixture(ctypes.Structure):
    """The experts of a layer, as kernels/lanes.h has them. The parts must outlive it."""

    _fields_ = [("router", Product), *fields(pointers="first down bias scales", numbers="count chosen shared groups within leading",
                                             flags="by_sigmoid wide normed kept gated act", reals="factor alpha limit beside",
                                             flags_="by_logits before", reals_="near always")]
    parts: tuple[Any, ...]

    @classmethod
    def of(cls, first: Products, down: Products, chosen: int, limits: tuple[float, float] | None = None, act: int = SILU,
           routing: Routing | None = None, router: Product | None = None, bias: Tensor | None = None, scales: Tensor | None = None) -> Self:
        """first [experts]: gate and up, one below the other, or up alone; chosen: by each row. limits: alpha and the limit of gates like
        gpt-oss's, whose gates and ups stand in turn; act: of others. For `route`: how, the router, and, float32, bias: what is added to
        weights where experts are chosen, and scales: what they are taken times last."""
        how = routing or Routing()
        assert len(first) == len(down) and first[0].out in (down[0].columns, 2 * down[0].columns) and first[0].columns == down[0].out
        assert router is None or router.out == len(first) - how.shared + how.gated
        for each in (bias, scales):
            assert each is None or each.dtype == torch.float32 and each.shape == (len(first) - how.shared,) and each.is_contiguous()
        made = cls(router or Product(), ctypes.addressof(first), ctypes.addressof(down), address_of(bias), address_of(scales), len(first),
                   chosen, how.shared, how.groups, how.within, how.leading, how.by_sigmoid, how.wide, how.normed, how.kept, how.gated, act,
                   how.factor, *(limits or (0.0, 0.0)), how.beside, how.by_logits, how.before, how.near, how.always)
        made.parts = first, down, bias, scales
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


def route(mixture: Mixture, logits: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Of the router's logits [rows, experts] the worthiest experts, int64 [rows, k], of equals the first, and their weights float32;
    dtype: of the stream, if it is another."""
    rows, halves = len(logits), logits.dtype == torch.bfloat16
    assert logits.shape == (rows, mixture.router.out) and logits.dtype in TYPES
    logits = logits.contiguous()
    chosen, weights = torch.empty(rows, mixture.chosen, dtype=torch.int64), torch.empty(rows, mixture.chosen)
    _library().route(mixture, logits.data_ptr(), chosen.data_ptr(), weights.data_ptr(), rows, halves, dtype == torch.bfloat16 or halves)
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
    library.route.argtypes, library.route.restype = [ctypes.POINTER(Mixture), *[pointer] * 3, whole, small, small], None
    library.multiply_each.argtypes = [ctypes.POINTER(Product), ctypes.POINTER(_Portions), *[pointer] * 2, small, small]
    library.multiply_each.restype = small
    return library
