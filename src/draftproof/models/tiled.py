"""Products and sums of one shape, for devices whose libraries choose a kernel by the shape of the call (Law 2).

cuBLAS takes other tiles, and so adds in another order, for 3 rows than for 5; torch's reductions split a row over more threads where
there are fewer rows. Here rows are filled up to a multiple of TILE_ROWS and taken so many at a time: every call has the one shape, so a
row's bits do not depend on how many rows stand beside it. A pass of few rows is limited by how fast weights are read, and 64 rows are
still below the 200 or so at which an H200's arithmetic becomes the limit; a prefill reads the weights once per tile, and pays. The
self-test measures the bits at load. Models whose blocks our own kernels know (rows.py) need none of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .packed import HeldLinear

TILE_ROWS = 64


class InTiles:
    """What a linear layer is whose rows are multiplied `tile` at a time, however many there are."""

    tile = TILE_ROWS


def by_tiles(function: Callable[[Tensor], Tensor], x: Tensor, tile: int = TILE_ROWS) -> Tensor:
    """function, which works row by row, over x [rows, …], `tile` rows at a time, the last ones filled up with zeros."""
    rows = x.shape[0]
    short = -rows % tile
    filled = functional.pad(x, (0, 0) * (x.ndim - 1) + (0, short)) if short else x.contiguous()
    parts = [function(tile) for tile in torch.split(filled, tile)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]


class TiledLinear(HeldLinear, InTiles):
    """y = x Wᵀ + b in products of one shape, [TILE_ROWS, in] × [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        out = by_tiles(lambda rows: functional.linear(rows, self.weight, self.bias), x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)
