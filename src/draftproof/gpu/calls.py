"""The kernels as functions of tensors on one GPU. Sizes of blocks were chosen on an H200 (docs/log.md)."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import BLOCK, QUERIES, Tiles, kernels

LINKS = (9, 0)  # compute capability from which kernels of a stream may overlap
PART = 128  # keys of a part of a text, and of a block where pages are a multiple of it and heads not wider
SOME_HEADS, SOME_PARTS, SOME_ROWS = 8, 16, 4
ROOM = 1 << 30  # bytes of the parts that wait to be joined: 512 rows of 32 heads of 128 numbers behind 16 k tokens
GATING = 1024  # outputs of a program
MERGING = 1  # warps that join the parts of one head of one row
FEW = 16  # rows of the smallest tile of a product
LEAST_SHARED = 101_376  # bytes that a program may have, where torch does not say
LOG2_E = 1.4426950408889634


@cache
def linked(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= LINKS


@cache
def processors(device: torch.device) -> int:
    """Of a GPU; 2 where kernels are interpreted."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *given: Any, **more: Any) -> None:
    """A kernel where its tensors are: Triton itself asks the current device, which need not be that one. Products and sums are one
    instruction where they can be, which is Triton's default up to 3.9 only: else other bits than those that were compared."""
    if linked(device):
        more |= {"launch_pdl": True}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*given, LINKED=linked(device), enable_fp_fusion=True, **more)


def norm(x: Tensor, weight: Tensor, eps: float, kind: torch.dtype | None = None) -> Tensor:
    """`between.rms_norm` of rows x [n, width]. kind: the type of what is returned, x's if None; halves are cut into their range."""
    out, width = torch.empty_like(x, dtype=kind), x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 512))
    _launch(kernels.norm, (x.numel() // width,), x.device, x, weight, out, eps, width, block, out.dtype != x.dtype, num_warps=warps)
    return out


def gate(both: Tensor, kind: torch.dtype | None = None) -> Tensor:
    """silu of the first half of each row of both [n, 2 w], times the second, [n, w]. kind: as in `norm`."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width, dtype=kind)
    _launch(kernels.gate, (rows, triton.cdiv(width, GATING)), both.device, both, out, width, GATING, out.dtype != both.dtype, num_warps=4)
    return out


class Blocks(NamedTuple):
    """Of a product: rows, outputs and inputs of a block, how many blocks are on their way at once, and the warps that multiply."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


LARGE = Blocks(64, 64, 128, 4, 8), Blocks(64, 128, 128, 4, 8), Blocks(64, 256, 64, 4, 8), Blocks(128, 256, 64, 4, 8)
LARGE_GATED = Blocks(64, 64, 128, 4, 4), Blocks(64, 128, 64, 4, 4), Blocks(128, 128, 64, 4, 8)


@cache
def large(device: torch.device) -> bool:
    """Whether tiles of 64 rows and more give a row the bits that it has in smaller ones. On Hopper another instruction multiplies them, and
    gave the same bits wherever it was tried (docs/log.md); on older GPUs it is the same one. What newer ones do was not tried."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0)


@cache
def blocks(rows: int, outputs: int, inputs: int, size: int, gated: bool, processors: int = 132, large: bool = True) -> Blocks:
    """size: bytes of a weight; large: as of the device. Of large tiles those that take one turn of all processors, else the least work.
    Weights of eight bits would go through shared memory once more there."""
    if rows > FEW and large and size > 1:

        def cost(found: Blocks) -> tuple[bool, int, int]:
            turns = triton.cdiv(triton.cdiv(rows, found.rows) * triton.cdiv(outputs, found.outputs), processors)
            return turns > 1, turns * found.rows * found.outputs, turns

        return min(LARGE_GATED if gated else LARGE, key=cost)
    tile = FEW if rows <= FEW else 2 * FEW
    if size == 1 and gated:  # 32 rows of 256 inputs would take more registers than there are
        return Blocks(tile, 64, 256, 3, 4) if tile == FEW else Blocks(tile, 64, 128, 6, 4)
    if size == 1:
        return Blocks(tile, 32, 256, 6, 4)
    if gated:
        return Blocks(tile, 64, 128, 3, 4)
    if outputs < 96 * 32:  # else there would be fewer programs than processors
        return Blocks(tile, 16, 256, 6, 4)
    return Blocks(tile, 64, 128, 5, 4) if outputs > inputs else Blocks(tile, 32, 512, 4, 4)


def stage(found: Blocks, size: int, gated: bool) -> int:
    """Bytes of one stage: of the weights and of the rows."""
    return found.inputs * (found.outputs * size * (2 if gated else 1) + 2 * found.rows)


def fitted(found: Blocks, room: int, size: int, gated: bool) -> Blocks:
    """With no more stages than so many bytes of shared memory have room for."""
    return found._replace(stages=max(2, min(found.stages, room // stage(found, size, gated))))


@cache
def room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; as many as it likes where kernels are interpreted."""
    if device.type != "cuda":
        return sys.maxsize
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED))


def fitting(device: torch.device, rows: int, outputs: int, inputs: int, size: int, gated: bool) -> Blocks:
    """`blocks` for this device, `fitted` into its shared memory."""
    return fitted(blocks(rows, outputs, inputs, size, gated, processors(device), large(device)), room(device), size, gated)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, steps: Tensor | None = None, onto: Tensor | None = None,
            gated: bool = False, kind: torch.dtype | None = None) -> Tensor:
    """x Wᵀ + b of x [n, in], W [out, in] or, with a float32 step for each output and x of halves, of E4M3. onto [n, out]: what it is added
    to, in place. gated: silu of the product with the first half of W, times that with the second, [n, out / 2]. kind: as in `norm`."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, outputs, dtype=kind) if onto is None else onto
    shape = fitting(x.device, rows, outputs, inputs, weight.element_size(), gated)
    _launch(kernels.product, (triton.cdiv(rows, shape.rows), triton.cdiv(outputs, shape.outputs)), x.device,
            x, weight, x if steps is None else steps, x if bias is None else bias, out, rows, outputs, inputs, shape.rows, shape.outputs,
            shape.inputs, steps is not None, bias is not None, onto is not None, gated, num_warps=shape.warps, num_stages=shape.stages)
    return out


def halves(dim: int) -> int:
    """Outputs of a program of `heads`, with as many half a head behind them; 0 where half a head is no multiple of a tile."""
    return next((some for some in (32, 16) if dim // 2 % some == 0), 0)


def turns(rows: int, dim: int) -> bool:
    """Whether `heads` takes so many rows of heads so wide."""
    return rows <= FEW and halves(dim) > 0


def heading(dim: int, size: int) -> Blocks:
    """Of `heads`."""
    return Blocks(FEW, halves(dim), 128, 8 if size == 1 else 5, 4)


def heads(x: Tensor, weight: Tensor, bias: Tensor | None, steps: Tensor | None, angles: Tensor, write_to: Tensor, keys: Tensor,
          values: Tensor, kind: torch.dtype) -> Tensor:
    """`product` and `turn` in one kernel, where it `turns` them and heads have no norms: each row's keys and values go to its own place of
    write_to [rows], −1 for none. Returns [rows, (H + 2 KV) · D], of which only the queries are written."""
    (rows, inputs), (kv, dim) = x.shape, keys.shape[1:]
    size, outputs = weight.element_size(), weight.shape[0]
    out = x.new_empty(rows, outputs, dtype=kind)
    shape = fitted(heading(dim, size), room(x.device), size, True)
    _launch(kernels.heads, (1, outputs // 2 // shape.outputs), x.device,
            x, weight, x if steps is None else steps, x if bias is None else bias, angles, write_to, out, keys, values, rows,
            outputs // dim - 2 * kv, kv, dim, inputs, shape.rows, shape.outputs, shape.inputs, steps is not None, bias is not None,
            num_warps=shape.warps, num_stages=shape.stages)
    return out


def turn(heads: Tensor, angles: Tensor, norms: Tensor | None, eps: float, write_to: Tensor, write_from: Tensor, keys: Tensor,
         values: Tensor) -> None:
    """Turn the queries of heads [rows, (H + 2 KV) · D] in place by angles [rows, 2, D], after `norms` [H + KV, D] of each head, and write
    the turned keys and the values of rows write_from into the rows write_to of keys and values [places, KV, D], −1 for none."""
    kv, dim = keys.shape[1:]
    rows, writes, many = heads.shape[0], write_to.shape[0], heads.shape[1] // dim - kv
    grid = (max(rows, writes), triton.cdiv(many, SOME_HEADS))
    _launch(kernels.turn, grid, heads.device, heads, angles, heads if norms is None else norms, eps, write_to, write_from, keys, values,
            rows, writes, many - kv, kv, dim, triton.next_power_of_2(dim // 2), SOME_HEADS, norms is not None, num_warps=4)


def _behind(rows: Tensor, first: int) -> Tensor:
    """rows[:, first:]; themselves from the first on: a view of each takes the host a microsecond, in every layer."""
    return rows[:, first:] if first else rows


def attend(heads: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scaling: float, window: int | None, page: int,
           kind: torch.dtype | None = None, sight: Tensor | None = None) -> Tensor:
    """The queries of heads [rows, (H + 2 KV) · D] along their paths over keys and values [places, KV, D], in pages of `page`,
    a multiple of BLOCK: [rows, H · D]. window: how many keys a row sees, itself included (None: all). kind: of what is returned. sight
    [rows, 2]: 128 bits, which of the keys behind its position a row sees; None: none of them."""
    kv, dim = keys.shape[1:]
    rows, asked = heads.shape[0], heads.shape[1] // dim - 2 * kv
    most, group = tiles.table.shape[1], asked // kv
    parts, deep = triton.cdiv(most * page, PART), max(16, triton.next_power_of_2(dim))
    block = PART if page % PART == 0 and dim <= PART else BLOCK
    out = heads.new_empty(rows, asked * dim, dtype=kind)
    some = kv if parts == 1 else min(kv, max(1, ROOM // (4 * parts * rows * group * dim)))
    averages = out if parts == 1 else heads.new_empty(parts, rows, some * group, dim, dtype=torch.float32)
    logs = heads.new_empty(parts, rows, some * group, dtype=torch.float32)
    for first in range(0, kv, some):
        here, begin = min(some, kv - first), first * group * dim
        _launch(kernels.attend, (tiles.table.shape[0] * tiles.tiles, here, parts), heads.device,
                _behind(heads, begin), _behind(keys, first), _behind(values, first), tiles.position, tiles.take, tiles.table,
                heads if sight is None else sight, averages, logs, scaling * LOG2_E, window or 0, rows, some * group, most, tiles.tiles,
                heads.shape[1], kv, group, dim, deep, page, block, PART // block, QUERIES, bool(window), sight is not None, num_warps=4)
        if parts > 1:
            _launch(kernels.merge, (rows, here * group), heads.device, averages, logs, _behind(out, begin), rows, some * group, parts,
                    asked * dim, dim, deep, SOME_PARTS, num_warps=MERGING)
    return out


def move(stores: Tensor, like: Tensor, source: Tensor, target: Tensor) -> None:
    """Rows `source` [m] to the rows `target` [m] of every store, whose addresses are stores [n]; they are like [places, ..], contiguous."""
    width = like[0].numel()
    grid = (triton.cdiv(len(source), SOME_ROWS), len(stores))
    _launch(kernels.move, grid, like.device, stores, source, target, len(source), like, width, triton.next_power_of_2(width), SOME_ROWS,
            num_warps=4)
