"""When a round's phases ended, without waiting for the device that works on them."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import torch


class Marks:
    """`mark` at the start and at the end of each phase; `spans` once the device was waited for anyway. On a GPU a phase ends when the
    device has done what was asked until then, which its own events tell; elsewhere when the host gets there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        self._times.append(perf_counter())
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._events.append(event)

    def spans(self) -> list[float]:
        """Seconds of every phase, and those since the last mark."""
        end = perf_counter()
        if self._stream is None:
            return [b - a for a, b in pairwise([*self._times, end])]
        found = [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]
        return [*found, max(0.0, end - self._times[0] - sum(found))]
