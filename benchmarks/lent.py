"""Of a device that is lent for minutes: its time, its memory, and what is left of a run where something fails."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftproof.errors import first_line


class Clock:
    """How long the run may still take; what it cuts off, and what fails, is named."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.left_out: list[str] = []

    def allows(self, what: str) -> bool:
        if time.perf_counter() < self.end:
            return True
        self.left_out.append(f"{what}: no time")
        return False

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """What fails inside ends there: the rest of a run on a lent machine is worth having."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.left_out.append(f"{what}: failed ({first_line(error)})")


def finished(device: torch.device) -> float:
    """The time, once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copy_bandwidth(device: torch.device, repeats: int = 30) -> float:
    """GB/s read and written by copying a large tensor within the device's memory, the best of `repeats`."""
    source = torch.ones((1 << 32) if device.type == "cuda" else (1 << 28), dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(repeats):
        start = finished(device)
        target.copy_(source)
        best = min(best, finished(device) - start)
    return 2 * source.numel() / best / 1e9


def forget(device: torch.device) -> None:
    """Give the memory of what nobody holds any more back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
