"""Numbers from the host to a device without waiting for it, and back with as little as possible.

A plain copy to a GPU waits until everything asked of it before is done, so that a pass of many small copies runs at the pace of the host's
and the device's turns. From pinned memory the copy is one more thing asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """x of the host where a copy to `device` may begin without being waited for; torch keeps it until the copy is done."""
    return x.pin_memory() if device.type == "cuda" else x


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """x on `device`; from the host by a copy that nobody waits for. x itself may not be written afterwards."""
    device = torch.device(device)
    if not x.is_cpu:
        return x.to(device)
    return x if device.type == "cpu" else pinned(x, device).to(device, non_blocking=True)


def downloaded(x: Tensor) -> Callable[[], list[int]]:
    """Begin to copy the numbers of x [n] to the host; the function that is returned waits for this copy alone, and gives them."""
    if x.device.type != "cuda":
        return x.tolist
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    there.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(x.device))

    def read() -> list[int]:
        copied.synchronize()
        return there.tolist()

    return read


def uploaded(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)` on `device`, as `sent` brings it there."""
    return sent(torch.tensor(values, dtype=dtype), device)


def index_of(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """What takes these rows of a tensor on `device`: a slice if they are consecutive, because it copies nothing."""
    start = rows[0] if rows else 0
    stop = start + len(rows)
    return slice(start, stop) if list(rows) == list(range(start, stop)) else uploaded(rows, device)


def rows_of(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows], a view where they are consecutive."""
    return x[index_of(rows, x.device)]
