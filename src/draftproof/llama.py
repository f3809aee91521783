"""Layers of Llama's block, and whole passes of models made of them, in C (kernels/block.c, kernels/forward.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from operator import lt
from typing import Self

import torch
from torch import Tensor

from .native import STREAMS, TYPES, Course, CourseFields, Product, Scale, address_of, fields, loaded


class Latent(ctypes.Structure):
    """What attention through a latent has beside its first product, as kernels/lanes.h has it. Its parts must outlive it."""

    _fields_ = [*((name, Product) for name in ("queries", "keys_values")), *((name, Scale) for name in ("of_queries", "of_latent")),
                *fields(numbers="value_dim shared")]


class Side(ctypes.Structure):
    """What a layer adds last, as kernels/lanes.h has it. Its parts must outlive it."""

    _fields_ = [("gate", Product), ("last", Product), ("of_side", Scale)]


class Abreast(ctypes.Structure):
    """Norms of a layer whose MLP stands beside its experts, as kernels/lanes.h has them. Their parts must outlive it."""

    _fields_ = [*((name, Scale) for name in ("of_router", "before", "of_experts", "of_mlp")), *fields(reals="share")]


class AltUp(ctypes.Structure):
    """What a layer of several streams has beside the others, as kernels/lanes.h has it. Its parts must outlive it."""

    _fields_ = [*((name, Product) for name in ("left", "right")), *((name, Scale) for name in ("of_laurel", "of_router")),
                *fields(pointers="router by predict correct", reals="share cut", flags="cuts")]


class Ends(ctypes.Structure):
    """What makes the streams beside the first, and what becomes of them, as kernels/lanes.h has it. Their parts must outlive it."""

    _fields_ = [(name, Product * (STREAMS - 1)) for name in ("enter", "leave")]

    @classmethod
    def of(cls, products: Sequence[Product]) -> Self:
        """Those that enter, and those that leave."""
        each = Product * (STREAMS - 1)
        return cls(each(*products[: STREAMS - 1]), each(*products[STREAMS - 1 :]))


class Layer(ctypes.Structure):
    """A layer of Llama's block, as kernels/lanes.h has it. Its parts must outlive it."""

    _fields_ = [
        *((name, Product) for name in ("qkv", "o", "gate_up", "down")),
        *((name, Scale) for name in ("before", "after", "of_attention", "of_mlp", "of_heads", "of_stream")),
        *fields(reals="scaling share", numbers="heads kv_heads dim turned rope window", flags="as_one normed act",
                 pointers="sinks keys values experts latent", reals_="cap", flags_="turned_first parallel stretched opened_by",
                 pointers___="bends", numbers_="openings",
                 pointers_="recurrence side abreast", reals__="factor", flags__="borrows values_normed settles",
                 pointers__="altup", numbers__="value_dim", flags___="rounded"),
    ]


def blocks(layers: ctypes.Array[Layer], first: int, last: int, x: Tensor, cos: Tensor, sin: Tensor, courses: Sequence[Course],
           beside: Tensor | None = None, sides: Tensor | None = None, streams: Tensor | None = None) -> None:
    """Layers [first, last) one after the other over x [rows, hidden], which is overwritten: the rows of all courses. cos, sin
    [rows, 1, n] as for `turn`, of the first rope, the others' behind them; beside [rows, hidden]: what a layer with `of_stream` reads,
    too; sides [rows, layers, n]: what one with a `side` does; streams [rows, streams - 1, hidden], overwritten: those beside x, of
    layers with `altup`."""
    rows = sum(course.rows for course in courses)
    assert x.is_contiguous() and x.shape[0] == rows and cos.dtype == sin.dtype and cos.stride(0) == sin.stride(0)
    assert x.dtype in TYPES and cos.dtype in (x.dtype, torch.float32)
    assert beside is None or beside.is_contiguous() and beside.shape == x.shape and beside.dtype == x.dtype
    assert streams is None or streams.is_contiguous() and streams.shape == (rows, STREAMS - 1, x.shape[1]) and streams.dtype == x.dtype
    structs = (CourseFields * len(courses))(*(course.struct for course in courses))
    failed = _library().blocks(
        ctypes.byref(layers[first]), last - first, structs, len(courses), x.data_ptr(), address_of(beside), cos.data_ptr(), sin.data_ptr(),
        cos.stride(0), cos.dtype != x.dtype, x.dtype == torch.bfloat16, torch.get_num_threads(), *_sides(sides, x.dtype),
        first, address_of(streams))
    if failed:
        raise MemoryError(f"a pass of {rows} rows found no memory to work in")


def _sides(sides: Tensor | None, dtype: torch.dtype) -> tuple[int | None, int]:
    """Where they are, and how many bytes a row of them has."""
    assert sides is None or sides.is_contiguous() and sides.dtype == dtype
    return address_of(sides), 0 if sides is None else sides.stride(0) * sides.element_size()


class Model(ctypes.Structure):
    """A model of Llama's blocks, as kernels/forward.c has it. Its parts must outlive it."""

    _fields_ = [*fields(pointers="layers"), ("output", Product), ("norm", Scale),
                *fields(pointers="embedding angles", numbers="count hidden vocabulary turns turned", reals="factor",
                         flags="sharp halves", pointers_="positions", numbers_="places", pointers__="ends"), ("entered", Scale)]

    @classmethod
    def of(cls, layers: ctypes.Array[Layer], output: Product, norm: Scale, embedding: Tensor, angles: Tensor, factor: float = 1,
           positions: Tensor | None = None, ends: Ends | None = None, entered: Scale | None = None) -> Self:
        """norm: of the last layer's stream; embedding [vocabulary, hidden], which enters times `factor`, and normed by `entered`; angles
        [positions, 2 ropes, n]: of each cos, and sin with its first half negated, in the embedding's type or float32. positions
        [n, hidden]: what is added to rows where they enter, by their positions, the last of them from there on. All contiguous. ends: of a
        model of several streams."""
        (vocabulary, hidden), dtype = embedding.shape, embedding.dtype
        assert dtype in TYPES and angles.dtype in (dtype, torch.float32) and output.columns == hidden
        assert embedding.is_contiguous() and angles.is_contiguous() and angles.dim() == 3
        assert positions is None or positions.is_contiguous() and positions.dtype == dtype and positions.shape[1] == hidden
        return cls(ctypes.addressof(layers), output, norm, embedding.data_ptr(), angles.data_ptr(), len(layers), hidden, vocabulary,
                   angles[0].numel(), angles.shape[-1], factor, angles.dtype != dtype, dtype == torch.bfloat16,
                   address_of(positions), 0 if positions is None else len(positions), None if ends is None else ctypes.addressof(ends),
                   entered or Scale())


class _Wish(ctypes.Structure):
    _fields_ = fields(pointers="ids taps keep tapped logits", numbers="tap_count kept", pointers_="sides", numbers_="side_stride",
                      pointers__="rest", numbers__="lent")


def forward(model: Model, course: Course, ids: Tensor, taps: Sequence[int], keep: Sequence[int] | None,
            sides: Tensor | None = None, rest: Course | None = None, lent: int = 0) -> tuple[Tensor, Tensor | None]:
    """The whole pass of ids int64 [1, rows]: logits [len(keep), V] of the rows in `keep`, which rise, or of all, and the outputs
    [rows, layers, hidden] of the layers `taps`, which rise, if there are any. sides: as for `blocks`. rest: the course of the kept rows
    alone, for which layers from `lent` on are run, which write no keys and are not tapped. Positions lie within the model's angles. Raises
    IndexError, as torch's embedding does, for an id that the model lacks."""
    rows, kept = course.rows, course.rows if keep is None else len(keep)
    assert ids.shape == (1, rows) and ids.dtype == torch.int64 and ids.is_contiguous()
    assert keep is None or all(map(lt, (-1, *keep), (*keep, rows))), f"rows {keep} of {rows}"
    assert not taps or 0 <= taps[0] and taps[-1] < model.count and list(taps) == sorted(set(taps)), f"layers {taps} of {model.count}"
    dtype = torch.bfloat16 if model.halves else torch.float32
    logits = torch.empty(kept, model.output.out, dtype=dtype)
    tapped = torch.empty(rows, len(taps), model.hidden, dtype=dtype) if taps else None
    numbers = array("q", (*taps, *(keep or ())))
    address, size = numbers.buffer_info()[0], numbers.itemsize
    wish = _Wish(ids.data_ptr(), address, None if keep is None else address + size * len(taps), address_of(tapped), logits.data_ptr(),
                 len(taps), kept, *_sides(sides, dtype), None if rest is None else ctypes.addressof(rest.struct), lent)
    failed = _library().forward(model, course.struct, wish, torch.get_num_threads())
    if failed == 2:
        raise IndexError(f"ids {ids.tolist()}: expected each to be one of the embedding's {model.vocabulary}")
    if failed:
        raise MemoryError(f"a pass of {rows} rows found no memory to work in")
    return logits, tapped


def _library() -> ctypes.CDLL:
    return _told(loaded())


@cache
def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """What the functions take."""
    whole, pointer, small = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.blocks.argtypes = [ctypes.POINTER(Layer), whole, ctypes.POINTER(CourseFields), whole, *[pointer] * 4, whole, *[small] * 3,
                               pointer, whole, whole, pointer]
    library.blocks.restype = small
    library.forward.argtypes, library.forward.restype = [*map(ctypes.POINTER, (Model, CourseFields, _Wish)), small], small
    return library
