"""The operations that torch and numpy are slow at on a CPU, in C (kernels/), made by the machine's own compiler at first use.

* Products of few rows with a bfloat16 matrix: torch takes them below the speed of memory, by a third where the processor has no bfloat16
  instructions; and with whole numbers of eight or four bits, where it is slower still. Tiles (AMX) take sixteen rows in the time of one.
* Attention over pages: torch copies pages that do not adjoin, and reads keys at a third of the speed of memory, bfloat16 ones slower.
* Llama's block as a whole, and a pass from ids to logits (llama.py): between its products stand twenty small calls of torch, and around
  the blocks five, each of which finds the caches cold.
* Laws of rows, and choices from them (choices.py).

docs/log.md has the figures. The compiled library is kept in the user's cache folder, by what it was made of. Where there is no compiler
`available` says so, and packed.py, attention.py and choice.py take torch's and numpy's ways, which are the plain twins.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from . import compiler
from .huge import room

CHUNK = 16  # keys that attention takes at a time (kernels/lanes.h)
LEAST_VECTOR, STRIPE = 16, 32  # of a recurrent state: its rows are a multiple of the first, its columns of half the second (recurrence.c)
BEHIND = 4  # bytes of a step, behind the levels of a head of keys or values (kernels/attention.c)
ALIKE = 128  # columns of floats of eight bits that share a step (kernels/narrow.c)
STREAMS = 4  # of a model that has several (kernels/lanes.h)
EIGHT_FLOATS, FOUR_BY_32, FOUR_BY_16 = -8, -32, -16  # in place of the bits of a product's numbers
TYPES = (torch.float32, torch.bfloat16)
SILU, GELU_BY_TANH, GELU, RELU_SQUARED, SIGMOID, SOFTPLUS, RELU = range(7)  # what an MLP makes of its gates (kernels/lanes.h)


def fields(**kinds: str) -> list[tuple[str, type]]:
    """Of a struct in kernels/, in their order: names by type."""
    types = {"pointers": ctypes.c_void_p, "numbers": ctypes.c_long, "reals": ctypes.c_float, "flags": ctypes.c_int}
    return [(name, types[kind.rstrip("_")]) for kind, names in kinds.items() for name in names.split()]


class CourseFields(ctypes.Structure):
    _fields_ = fields(
        numbers="rows paths writes page", pointers="position row_start page_start row_of page_of common write_to write_from own",
        numbers_="room", pointers_="sight", numbers__="seen", pointers__="walks", numbers___="walk_count")


class _Attention(ctypes.Structure):
    _fields_ = fields(
        pointers="query keys values sinks out", numbers="query_stride heads group dim value_dim window", reals="scaling cap",
        flags="halves", numbers_="out_stride", flags_="rounded")


class Product(ctypes.Structure):
    """A matrix as `product` makes it."""

    _fields_ = fields(pointers="panels bias steps spare_start spare_at spare", numbers="columns out bits")


class Scale(ctypes.Structure):
    """A norm's weights, as kernels/lanes.h has them."""

    _fields_ = fields(pointers="weight bias", reals="eps", flags="late")

    @classmethod
    def of(cls, weight: Tensor | None, eps: float, dtype: torch.dtype, bias: Tensor | None = None) -> Self:
        """Of rows of this type; weights that are float32 where rows are not count as late: what they make is rounded once, behind them.
        None: there is no norm. bias: of a norm that is centred; both are float32. The tensors must outlive it."""
        assert weight is None or weight.is_contiguous() and weight.dtype in (dtype, torch.float32)
        assert bias is None or weight is not None and bias.dtype == weight.dtype == torch.float32
        assert bias is None or weight is not None and bias.shape == weight.shape and bias.is_contiguous()
        return cls(address_of(weight), address_of(bias), eps, weight is not None and weight.dtype != dtype)


class Spare(NamedTuple):
    """Blocks of four columns that narrow panels cannot hold: where each panel's begin among all, int64 [panels + 1]; which blocks
    of the panel they are, int64 [n + panels], each panel's ended by a number that none has; and their words, int32 [n, 2, outputs of a
    panel]."""

    starts: Tensor
    at: Tensor
    words: Tensor


def available() -> tuple[bool, str]:
    """Whether the compiled products can be taken, and why or why not. Compiles them at the first call."""
    library = _library()
    return not isinstance(library, str), library if isinstance(library, str) else "compiled for this processor"


def arrange(weight: Tensor) -> Tensor:
    """weight [out, in] bfloat16 → linear.c's panels, int32 [panels, pairs of columns, outputs of a panel]."""
    library, (out, columns) = loaded(), weight.shape
    panels, weight = _panels(out, -(-columns // 2)), weight.contiguous()
    library.arrange(weight.data_ptr(), panels.data_ptr(), out, columns, torch.get_num_threads())
    return panels


def _panels(out: int, words: int) -> Tensor:
    """Room for `words` words of each output, int32 [panels, words, outputs of a panel]."""
    wide = loaded().wide()
    shape = -(-out // wide), words, wide
    return room(math.prod(shape)).view(shape)


def takes_narrow(bits: int = 12) -> bool:
    """Whether products can be taken with panels of `arrange_narrow`, twelve bits or EIGHT_FLOATS, or `arrange_four` with a table."""
    return bool(loaded().takes_narrow(bits))


def arrange_narrow(weight: Tensor, steps: Tensor | None = None) -> tuple[Tensor, Spare]:
    """weight [out, in] bfloat16 → narrow.c's panels, int32 [panels, words], in twelve bits a weight, and the blocks of four columns that
    are not in them. With steps float32 [out, in / ALIKE, rounded up], of the weight's outputs and adjoining inputs, the weight is of
    E4M3's numbers, and takes eight bits."""
    library, (out, columns) = loaded(), weight.shape
    weight, groups, wide = weight.contiguous(), -(-columns // ALIKE), library.wide()
    blocks = -(-columns // 4) if steps is None else groups * ALIKE // 4
    count, words = -(-out // wide), 16 + (blocks * 3 * wide // 2 if steps is None else (blocks + groups) * wide)
    assert steps is None or steps.shape == (out, groups) and steps.dtype == torch.float32 and steps.is_contiguous()
    panels, spare = room(count * words).view(count, words), torch.empty(count, blocks, dtype=torch.uint8)
    library.arrange_narrow(weight.data_ptr(), address_of(steps), panels.data_ptr(), spare.data_ptr(), out, columns, torch.get_num_threads())
    at = spare.nonzero().contiguous()
    held = torch.empty(len(at), 2, wide, dtype=torch.int32)
    library.arrange_spare(weight.data_ptr(), at.data_ptr(), held.data_ptr(), len(at), out, columns)
    counts = spare.sum(1)
    listed = at.new_full((len(at) + count,), torch.iinfo(torch.int64).max)
    listed[torch.arange(len(at)) + at[:, 0]] = at[:, 1]
    return panels, Spare(torch.cat([at.new_zeros(1), counts.cumsum(0)]), listed, held)


def product(panels: Tensor, bias: Tensor | None, steps: Tensor | None, out: int, columns: int, bits: int,
            spare: Spare | None = None) -> Product:
    """What `multiply` and `Layer` take: panels by an `arrange…`, of 16, 12, 8 or 4 bits, EIGHT_FLOATS or FOUR_BY_…; bias, and steps of 8
    bits, float32 [out]; spare, of narrow panels. The tensors must outlive it."""
    blocks = (None,) * 3 if spare is None else tuple(map(address_of, spare))
    return Product(panels.data_ptr(), address_of(bias), address_of(steps), *blocks, columns, out, bits)


def multiply(x: Tensor, by: Product) -> Tensor:
    """x [..., in] float32 or bfloat16 → x Wᵀ + b [..., out] in x's type; a row's bits do not depend on the others."""
    columns, halves = x.shape[-1], x.dtype == torch.bfloat16
    assert columns == by.columns and x.dtype in TYPES, f"x {list(x.shape)} {x.dtype} for {by.columns} columns"
    x, y = x.contiguous(), torch.empty(*x.shape[:-1], by.out, dtype=x.dtype)
    rows = math.prod(x.shape[:-1])
    if loaded().multiply(by, x.data_ptr(), y.data_ptr(), rows, halves, torch.get_num_threads()):
        raise MemoryError(f"a product of {rows} rows found no memory to work in")
    return y


def arrange_eight(levels: Tensor) -> Tensor:
    """levels int8 [out, in] → integers.c's panels, int32 [panels, words of four columns, outputs of a panel]."""
    library, (out, columns) = loaded(), levels.shape
    panels, levels = _panels(out, -(-columns // 4)), levels.contiguous()
    library.arrange_eight(levels.data_ptr(), panels.data_ptr(), out, columns, torch.get_num_threads())
    return panels


def arrange_four(levels: Tensor, steps: Tensor, table: Tensor | None = None) -> Tensor:
    """levels uint8 [out, groups * 64], 0 … 15, and steps bfloat16 [out, groups, 2], step and zero → integers.c's panels, int32. With a
    table uint8 [16] of what levels stand for, groups are of 32 or 16 and steps int32 [out, groups], as kernels/lanes.h has them."""
    library, (out, groups), size, head = loaded(), steps.shape[:2], levels.shape[1] // steps.shape[1], 0 if table is None else 16
    assert levels.shape == (out, size * groups) and size in ((32, 16) if head else (64,)) and levels.dtype == torch.uint8
    assert steps.dtype == (torch.int32 if head else torch.bfloat16)
    count, words = -(-out // library.wide()), head + groups * (size // 8 + 1) * library.wide()
    panels, levels, steps = room(count * words).view(count, words), levels.contiguous(), steps.contiguous()
    library.arrange_four(
        levels.data_ptr(), steps.data_ptr(), address_of(table), panels.data_ptr(), out, groups, size, torch.get_num_threads())
    return panels


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Walk(NamedTuple):
    """A text's recurrent states on a pass, as kernels/lanes.h has them. memory float32 and history, both [layers, …]: the states, and rows
    that they lack; owed: places of the history that hold the text's own of these, rising; taken: how many of these, and then of the first
    line's rows, memory takes in for good; lines: the ways, each from the root on, of the text's rows, which are so many from the `first`
    on."""

    memory: Tensor
    history: Tensor
    owed: Sequence[int]
    taken: int
    lines: Sequence[Sequence[int]]
    first: int
    rows: int


class Course:
    """Where a pass runs, as kernels/lanes.h has it. positions [rows]; paths: pages in order, the rows that attend through them, and how
    many leading keys are those of the path before it, whole chunks of a page, and are read there (0: a new family of paths); write_to,
    write_from: places of the storage, and the rows whose keys go there; page: tokens of one. own [layers, 2, places, kv_heads,
    head_dim]: keys and values of these rows alone, which must outlive it; None: each layer's storage. sight bool [rows, n]: which of the
    first n keys a row sees, none behind its position; None: all. walks: of models with recurrent states."""

    def __init__(
        self, positions: Sequence[int], paths: Sequence[tuple[Sequence[int], Sequence[int], int]], write_to: Sequence[int],
        write_from: Sequence[int], page: int, own: Tensor | None = None, sight: Tensor | None = None, walks: Sequence[Walk] = ()
    ) -> None:
        pages, rows, common = zip(*paths, strict=True)
        assert all(keys % page % CHUNK == 0 for keys in common) and not common[0], f"keys in common: {common}"
        starts = ([*accumulate(map(len, lists), initial=0)] for lists in (rows, pages))
        numbers: list[int] = []
        at = []
        for part in (positions, *starts, chain(*rows), chain(*pages), common, write_to, write_from):
            at.append(8 * len(numbers))
            numbers.extend(part)
        self.rows, self._numbers = len(positions), array("q", numbers)
        address = self._numbers.buffer_info()[0]
        self._sight = None if sight is None else sight.contiguous()
        self.struct = CourseFields.from_buffer(array("q", (          # sooner than field by field
            self.rows, len(paths), len(write_to), page, *[address + start for start in at], address_of(own) or 0,
            0 if own is None else own.shape[2], address_of(self._sight) or 0, 0 if sight is None else sight.shape[1],
            self._told(walks) if walks else 0, len(walks))))

    def _told(self, walks: Sequence[Walk]) -> int:
        """Where they stand for the kernels."""
        numbers, at, told = array("q"), list[tuple[int, int, int]](), array("q")
        for walk in walks:
            places = []
            for part in (walk.owed, accumulate(map(len, walk.lines), initial=0), chain(*walk.lines)):
                places.append(8 * len(numbers))
                numbers.extend(part)
            at.append((places[0], places[1], places[2]))
        address = numbers.buffer_info()[0]
        for walk, (owed, starts, rows) in zip(walks, at, strict=True):
            told.extend((walk.memory.data_ptr(), walk.history.data_ptr(), walk.history.shape[1], len(walk.owed), address + owed, walk.taken,
                         len(walk.lines), address + starts, address + rows, walk.first, walk.rows))
        self._walks = walks, numbers, told
        return told.buffer_info()[0]


def attend(
    course: Course, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None
) -> Tensor:
    """Every row over the keys it sees: query [rows, H, D], keys and values [places, KV, ...] → [rows, H, ...]; or these int8, a head's
    levels and step, of bfloat16 queries (models/key_levels.py). window: how many keys a row sees, itself included (None: all); sinks [H]:
    logits that only normalise; cap: of scores, cap · tanh(score / cap)."""
    (rows, heads, dim), (_, kv_heads, deep), rounded = query.shape, values.shape, keys.dtype == torch.int8
    assert keys.dtype == values.dtype == (torch.int8 if rounded else query.dtype), f"{query.dtype} {keys.dtype} {values.dtype}"
    assert rows == course.rows and (not rounded or query.dtype == torch.bfloat16), f"{query.dtype} {rows} rows of {course.rows}"
    deep -= BEHIND if rounded else 0
    query = query if _rows_whole(query) else query.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(rows, heads, deep, dtype=query.dtype)
    asked = _Attention(
        query.data_ptr(), keys.data_ptr(), values.data_ptr(), address_of(sinks), out.data_ptr(), query.stride(0),
        kv_heads, heads // kv_heads, dim, deep, window or 0, scaling, cap or 0, query.dtype == torch.bfloat16, 0, rounded)
    if loaded().attend(course.struct, asked, torch.get_num_threads()):
        raise MemoryError(f"attention of {rows} rows found no memory to work in")
    return out


def draft(head: ctypes.Structure, growth: ctypes.Structure, last: Tensor) -> bool:
    """kernels/draft.c's draft, its structures as models/heads/compiled.py makes them; false if a logit is no number. last [hidden]: written
    if anything is fed."""
    failed = loaded().draft(ctypes.byref(head), ctypes.byref(growth), last.data_ptr(), torch.get_num_threads())
    if failed == -1:
        raise MemoryError("a draft found no memory to work in")
    return not failed


def norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """x / rms(x) · weight over the last dimension: x [rows, n], weight [n]; or x [rows, heads, n], weight [heads, n]. Of a weight in
    float32 the product is rounded once. With a bias it is x's distance from its mean, by its deviation, · weight + bias, float32."""
    inner, n = weight.numel() // weight.shape[-1], weight.shape[-1]
    assert x.shape[1:] == weight.shape and _rows_whole(x), f"{x.shape} {x.stride()}"
    y = torch.empty(x.shape, dtype=x.dtype)
    loaded().norm(x.data_ptr(), Scale.of(weight, eps, x.dtype, bias), y.data_ptr(), x.shape[0], inner, n, x.stride(0),
                   x.dtype == torch.bfloat16, torch.get_num_threads())
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, n], whose heads' first numbers are turned by rotary angles; cos, sin [rows, 1, numbers], sin negative in its first
    half. Of angles in float32 the sum is rounded once."""
    (rows, heads, n), turned, sharp = x.shape, cos.shape[-1], cos.dtype != x.dtype
    assert cos.dtype == sin.dtype and cos.dtype in (x.dtype, torch.float32) and cos.stride(0) == sin.stride(0)
    assert _rows_whole(x) and turned % 2 == 0 and turned <= n, f"{x.shape} {x.stride()}"
    y = torch.empty(rows, heads, n, dtype=x.dtype)
    loaded().turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows, heads, n, turned, x.stride(0), cos.stride(0),
                   sharp, x.dtype == torch.bfloat16, torch.get_num_threads())
    return y


def _rows_whole(x: Tensor) -> bool:
    """Whether each row of x [rows, …] is contiguous."""
    return x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == x.shape[2])


def copy_rows(stores: Sequence[Tensor], moves: Sequence[tuple[int, int, int]]) -> None:
    """In every store [places, …], for each move (start, to, rows) in turn: rows [start, start + rows) to [to, to + rows), which do not
    overlap."""
    end = max(max(start, to) + rows for start, to, rows in moves)
    assert all(store.is_contiguous() and end <= len(store) for store in stores)
    assert all(abs(start - to) >= rows >= 0 for start, to, rows in moves)
    numbers = array("q", chain(*moves))
    addresses = (ctypes.c_void_p * len(stores))(*(store.data_ptr() for store in stores))
    sizes = (ctypes.c_long * len(stores))(*(store.stride(0) * store.element_size() for store in stores))
    loaded().copy_rows(addresses, sizes, len(stores), numbers.buffer_info()[0], len(moves), torch.get_num_threads())


def gate(x: Tensor, act: int = SILU, alone: bool = False) -> Tensor:
    """act(x[:, :n]) · x[:, n:] of x [rows, 2 n]; or, alone, act(x) of x [rows, n]. act: SILU …"""
    rows, n = x.shape[0], x.shape[1] // (1 if alone else 2)
    x, y = x.contiguous(), torch.empty(rows, n, dtype=x.dtype)
    loaded().gate(x.data_ptr(), y.data_ptr(), rows, n, alone, act, x.dtype == torch.bfloat16, torch.get_num_threads())
    return y


def bend(x: Tensor, bends: Tensor) -> Tensor:
    """xIELU of x [rows, n]; bends float32 [4], as kernels/block.c has them."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    loaded().bend(x.data_ptr(), y.data_ptr(), *x.shape, bends.data_ptr(), x.dtype == torch.bfloat16, torch.get_num_threads())
    return y


def loaded() -> ctypes.CDLL:
    library = _library()
    assert not isinstance(library, str), library
    return library


@cache
def _library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    try:
        library = _open(compiler.built())
    except (compiler.Unavailable, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the kernels were not compiled: {error}"
    return library


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    whole, pointer, small = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.wide.argtypes, library.wide.restype = [], whole
    library.arrange.argtypes, library.arrange.restype = [pointer, pointer, whole, whole, small], None
    library.multiply.argtypes, library.multiply.restype = [ctypes.POINTER(Product), *[pointer] * 2, whole, small, small], small
    library.takes_narrow.argtypes, library.takes_narrow.restype = [small], small
    library.arrange_narrow.argtypes, library.arrange_narrow.restype = [*[pointer] * 4, whole, whole, small], None
    library.arrange_spare.argtypes, library.arrange_spare.restype = [*[pointer] * 3, *[whole] * 3], None
    library.arrange_eight.argtypes, library.arrange_eight.restype = [pointer, pointer, whole, whole, small], None
    library.arrange_four.argtypes, library.arrange_four.restype = [*[pointer] * 4, *[whole] * 3, small], None
    library.attend.argtypes, library.attend.restype = [ctypes.POINTER(CourseFields), ctypes.POINTER(_Attention), small], small
    library.draft.argtypes, library.draft.restype = [*[pointer] * 3, small], whole
    library.copy_rows.argtypes, library.copy_rows.restype = [pointer, pointer, whole, pointer, whole, small], None
    library.norm.argtypes, library.norm.restype = [pointer, ctypes.POINTER(Scale), pointer, *[whole] * 4, small, small], None
    library.turn.argtypes, library.turn.restype = [*[pointer] * 4, *[whole] * 6, *[small] * 3], None
    library.bend.argtypes, library.bend.restype = [*[pointer] * 2, *[whole] * 2, pointer, *[small] * 2], None
    library.gate.argtypes, library.gate.restype = [*[pointer] * 2, *[whole] * 2, *[small] * 4], None
    return library
