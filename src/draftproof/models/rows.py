"""Blocks and products on a GPU by our own kernels (gpu/): few of them, each begun while the one before ends.

    x ← x + o(attention(turn(qkv(norm(x)))))        x ← x + down(gated(norm(x)))        eight kernels, nine for trees and many rows

A row's bits do not depend on its neighbours (gpu/kernels.py), so reproducible and fast passes of few rows are the same ones. Where bits
may depend on rows, many of them go to torch's libraries, which take large products faster. `FusedLayer` is the plain twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import gpu
from ..config import LoadConfig
from ..core.upload import sent
from ..errors import LoadError, first_line
from . import between
from .attention import TILE
from .cache import PagePool
from .experts import SILU
from .float8 import Float8Linear, multiplies
from .fused import FusedLayer
from .known import can_fuse
from .packed import HeldLinear, Linear
from .passes import Pass, Path
from .shares import bare
from .tiled import InTiles

TOLERANCE = 0.05  # of what a block adds: roundings of half precision
EIGHT = "weights are floats of eight bits, with a factor per output; our kernels read activations as halves"
CHECKED = (5, 40, 100)  # rows that a load compares: of a small tile of a product, and of larger ones
FEW, FEW_OF_EIGHT = 128, 16  # rows up to which ours take no longer than torch's libraries


class ByRows(InTiles, ABC):
    """A linear layer whose rows our kernels multiply: few of them, or, if it stands `alone`, any number."""

    tile = 1
    alone: bool
    weight: Any
    bias: Any
    steps: Any = None

    @abstractmethod
    def matrix(self) -> Tensor:
        """What our kernel reads, [out, in]."""

    @abstractmethod
    def many(self, rows: Tensor) -> Tensor:
        """The product of rows [n, in] by torch's libraries."""

    def many_onto(self, x: Tensor, rows: Tensor) -> Tensor:
        """x + that, in place."""
        return x.add_(self.many(rows))

    def plain(self, rows: Tensor) -> Tensor:
        """The same of the very numbers that our kernel multiplies: its twin."""
        return self.many(rows)

    def few(self) -> int:
        """Rows up to which our kernel multiplies them where it need not."""
        return FEW

    def takes(self, rows: Tensor) -> bool:
        return self.alone or rows.shape[0] <= self.few()

    def reads(self, rows: Tensor) -> torch.dtype:
        """The type in which so many rows come."""
        return rows.dtype

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self._ours(rows) if self.takes(rows) else self.many(rows)
        return out.reshape(*x.shape[:-1], -1)

    def onto(self, x: Tensor, rows: Tensor) -> Tensor:
        """x + the product of rows, in place."""
        return self._ours(rows, onto=x) if self.takes(rows) else self.many_onto(x, rows)

    def heads(self, rows: Tensor, angles: Tensor, plan: Plan, keys: Tensor, values: Tensor) -> Tensor:
        """The product of rows, queries turned, keys and values in their places."""
        from ..gpu.calls import heads

        return heads(rows.to(self.reads(rows)).contiguous(), self.matrix(), self.bias, self.steps, angles, plan.write_to, keys, values,
                     self.weight.dtype)

    def gated(self, act: Any, rows: Tensor, kind: torch.dtype) -> Tensor:
        """act of the first half of the product, times the second, in this type."""
        if type(act) not in SILU:
            return between.gated(act, self.forward(rows)).to(kind)
        if self.takes(rows):
            return self._ours(rows, gated=True, kind=kind)
        from ..gpu.calls import gate

        return gate(self.many(rows), kind)

    def _ours(self, rows: Tensor, kind: torch.dtype | None = None, **more: Any) -> Tensor:
        from ..gpu.calls import product

        return product(rows.to(self.reads(rows)).contiguous(), self.matrix(), self.bias, self.steps, kind=kind or self.weight.dtype, **more)


class RowsLinear(ByRows, HeldLinear):
    """Of half-precision weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, alone: bool) -> None:
        HeldLinear.__init__(self, weight.contiguous(), bias)
        self.alone = alone

    def matrix(self) -> Tensor:
        return self.weight  # type: ignore[no-any-return]

    def many(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)

    def many_onto(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.addmm_(rows, self.weight.t()) if self.bias is None else super().many_onto(x, rows)


class RowsFloat8Linear(ByRows, Float8Linear):
    """Of weights of eight bits. Our kernel multiplies activations of half precision, not of eight bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, alone: bool) -> None:
        Float8Linear.__init__(self, weight, bias)
        self.alone = alone

    def matrix(self) -> Tensor:
        return self.eight

    def few(self) -> int:
        return FEW_OF_EIGHT

    def reads(self, rows: Tensor) -> torch.dtype:
        return torch.float16 if self.takes(rows) else self.weight.dtype

    def many(self, rows: Tensor) -> Tensor:
        return Float8Linear.forward(self, rows)

    def plain(self, rows: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(rows.float(), self.eight.float() * self.steps, bias).to(rows.dtype)


def linear(alone: bool) -> Linear:
    """What makes such a layer of half-precision weights."""
    return lambda weight, bias: RowsLinear(weight, bias, alone)


def linear_of_eight(alone: bool) -> Linear:
    """The same of weights of eight bits; of sizes that the hardware does not multiply, a layer that is not rounded."""

    def made(weight: Tensor, bias: Tensor | None) -> nn.Module:
        return (RowsFloat8Linear if multiplies(weight) else RowsLinear)(weight, bias, alone)

    return made


class Plan(NamedTuple):
    """Where a pass writes its keys, from which of its rows, and how its rows attend: tensors on the device. once: every row writes its own,
    in order."""

    write_to: Tensor
    write_from: Tensor
    tiles: gpu.Tiles
    once: bool


class RowsLayer(FusedLayer):
    """A block by our kernels."""

    def __init__(self, layer: Any, form: Linear, _: Any = None, *kind: Any) -> None:
        """kind: the family and the rope, as `FusedLayer` takes them."""
        from ..gpu.calls import norm

        super().__init__(layer, form, between.Between(norm, between.turn), *kind)

    def run(self, x: Tensor, angles: Tensor, p: Pass, pool: PagePool) -> Tensor:
        from ..gpu.calls import attend, norm

        (before, before_eps), _, (after, after_eps), _ = self._norms
        plan = planned(p, self.heads // self.kv_heads)
        one = x.new_empty(0, self.kv_heads, self.head_dim)
        keys, values = pool.storage(self.layer_idx, one, one)
        eps = 0.0 if self.head_norm is None else self.head_eps
        heads = turned(self.qkv, norm(x, before, before_eps, read(self.qkv, x)), angles, self.head_norm, eps, plan, keys, values)
        added(x, self.o, attend(heads, keys, values, plan.tiles, self.scaling, self.window, pool.page_tokens, read(self.o, x)))
        h = norm(x, after, after_eps, read(self.gate_up, x))
        if isinstance(self.gate_up, ByRows):
            return added(x, self.down, self.gate_up.gated(self.act, h, read(self.down, x)))
        return added(x, self.down, between.gated(self.act, self.gate_up(h)))

    def seats(self) -> int:
        """Rows of one path that a tile of attention holds."""
        return gpu.seats(self.heads // self.kv_heads)

    def placed(self, p: Pass) -> Pass:
        plan = planned(p, self.heads // self.kv_heads)  # out of the host's numbers, while they are there
        p.write_to, p.write_from = plan.write_to, plan.write_from
        return p.placed()

    def tile(self) -> int:
        parts = [part for part in (self.qkv, bare(self.o), self.gate_up, bare(self.down)) if isinstance(part, InTiles)]
        alone = len(parts) == 4 and all(part.alone for part in parts if isinstance(part, ByRows))
        return max(part.tile for part in parts) if alone else 0


def turned(qkv: nn.Module, h: Tensor, angles: Tensor, norms: Tensor | None, eps: float, plan: Plan, keys: Tensor, values: Tensor) -> Tensor:
    """The heads of rows h after `norms`, queries turned; keys, turned, and values go where the plan says."""
    from ..gpu.calls import turn, turns

    if plan.once and norms is None and isinstance(qkv, ByRows) and qkv.takes(h) and turns(len(h), keys.shape[-1]):
        return qkv.heads(h, angles, plan, keys, values)
    heads: Tensor = qkv(h)
    turn(heads, angles, norms, eps, plan.write_to, plan.write_from, keys, values)
    return heads


def read(product: nn.Module, x: Tensor) -> torch.dtype:
    """The type in which a product takes as many rows as x has."""
    return product.reads(x) if isinstance(product, ByRows) else x.dtype


def added(x: Tensor, product: nn.Module, rows: Tensor) -> Tensor:
    """x + product(rows), in place."""
    return product.onto(x, rows) if isinstance(product, ByRows) else x.add_(product(rows))


def planned(p: Pass, group: int) -> Plan:
    """The pass's plan, for `group` query heads to a key head; made once, in one copy from the host."""
    if p.plan is None:
        size = gpu.seats(group)
        tiles = max(-(-len(path.rows) // size) for path in p.paths)
        take = [row for path in p.paths for row in (*path.rows, *[-1] * (tiles * size - len(path.rows)))]
        lasts = [max(p.position_list[row] for row in path.rows) // p.page_tokens + 1 for path in p.paths]
        table = [page for path, last in zip(p.paths, lasts, strict=True) for page in (*path.pages[:last], *[0] * (max(lasts) - last))]
        once, (to, source) = p.write_from is None, p.writes()
        parts = [list(to), list(source), p.position_list, take, table]
        numbers = sent(torch.tensor(sum(parts, [])), p.ids.device)
        write_to, write_from, position, taken, pages = torch.split(numbers, [len(part) for part in parts])
        p.plan = Plan(write_to, write_from, tiles_of(position, taken, pages.view(len(p.paths), -1), group), once)
    found: Plan = p.plan
    return found


def tiles_of(position: Tensor, take: Tensor, table: Tensor, group: int) -> gpu.Tiles:
    """`Tiles` of paths with equally many."""
    return gpu.Tiles(position, take, table, take.shape[0] // table.shape[0] // gpu.seats(group))


def usable(model: Any, config: LoadConfig, reasons: dict[str, str]) -> bool:
    """Whether the blocks of a model of tier 1 run through our kernels."""
    if model.device.type != "cuda" or not (config.kernels and config.packed) or config.compile or not can_fuse(model)[0]:
        return False
    able, why = gpu.available(model.device, model.dtype)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    if able and config.page_tokens % gpu.BLOCK:
        able, why = False, f"page_tokens={config.page_tokens} is no multiple of {gpu.BLOCK}"
    elif able and group > gpu.QUERIES:
        able, why = False, f"a key head has {group} query heads, more than {gpu.QUERIES}"
    reasons["kernels"] = why if able else f"torch's: {why}"
    return able


def check(layer: RowsLayer, page_tokens: int) -> None:
    """Raises LoadError where a block's kernels compute something else than its plain twin."""
    try:
        off = max(disagreement(layer, page_tokens, rows) for rows in sorted({min(rows, page_tokens) for rows in CHECKED}))
    except Exception as error:  # Triton compiles for the model's own shapes only now
        raise LoadError(f"our kernels do not run here ({first_line(error)}); expected a GPU that Triton compiles for: "
                        "leave them out (--no-kernels)") from error
    if not off <= TOLERANCE:
        raise LoadError(f"our kernels and torch's operations differ by {off:.1e} of what a block adds; expected at most {TOLERANCE:.0e}: "
                        "leave them out (--no-kernels), and report this")


@torch.inference_mode()
def disagreement(layer: RowsLayer, page_tokens: int, rows: int = 5) -> float:
    """How far a block's kernels are from torch's operations on random rows: the largest difference of what it adds, of the largest."""
    weight = layer.input_norm.weight
    dice = torch.Generator(weight.device).manual_seed(0)
    x, angles = (torch.randn(*shape, generator=dice, device=weight.device, dtype=torch.float32).to(weight.dtype)
                 for shape in ((rows, weight.numel()), (rows, 2, layer.head_dim)))
    ids, at = torch.zeros(1, rows, dtype=torch.int64, device=weight.device), list(range(rows))
    found = []
    for run in (layer.run, _twin(layer)):
        places = torch.tensor(at, device=weight.device)
        p = Pass(ids, places[None], at, places + page_tokens, None, [Path([1], at)], page_tokens, TILE)
        found.append(run(x.clone(), angles, p, PagePool(page_tokens, 2 * page_tokens, weight.device)).float() - x.float())
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())


def _twin(layer: RowsLayer) -> Any:
    """`layer.run` by torch's operations over the same weights."""
    twin = copy(layer)
    twin._norm = between.rms_norm
    parts = (layer.qkv, layer.o, layer.gate_up, layer.down)
    twin._products = tuple(part.plain if isinstance(part, ByRows) else part.forward for part in parts)
    return partial(FusedLayer.run, twin)
