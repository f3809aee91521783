"""Numbers from the host to a device without waiting for it.

A plain copy to a GPU waits until everything asked of it before is done, so that a pass of many small copies runs at the pace of the host's
and the device's turns. From pinned memory the copy is one more thing asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """x on `device`; from the host by a copy that nobody waits for. x itself may not be written afterwards."""
    device = torch.device(device)
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def uploaded(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)` on `device`, as `sent` brings it there."""
    return sent(torch.tensor(values, dtype=dtype), device)


def rows_of(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows], a view where they are consecutive."""
    if rows and rows[-1] - rows[0] == len(rows) - 1 and all(b - a == 1 for a, b in zip(rows, rows[1:], strict=False)):
        return x[rows[0]:rows[-1] + 1]
    return x[list(rows)] if x.device.type == "cpu" else x.index_select(0, uploaded(rows, x.device, torch.int64))
