"""How much memory is left, when guessing has to give way to it, and what the garbage collector need not look at."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from time import perf_counter

import torch

EVERY_S = 0.25          # seconds between two looks, which take some tens of microseconds
SYSTEM, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@cache
def freeze() -> None:
    """Once per process: from now on the garbage collector skips what is alive now, torch and the models. A full collection takes a fifth
    of a second, and came in the middle of a round, once in some hundred rounds of many sequences."""
    gc.collect()
    gc.freeze()
    atexit.register(_thaw)


def _thaw() -> None:
    """At the end of the process, where Triton is bound by nanobind (since 3.9): on standard error that one calls leaked, in tens of lines,
    whatever the collector does not reach then. Elsewhere it may stay frozen: the last collection takes a second."""
    triton = sys.modules.get("triton._C.libtriton")
    if triton is not None and type(triton.ir.attribute).__module__ == "nanobind":
        gc.unfreeze()


def free_share(device: torch.device) -> float | None:
    """The share of the memory of this device that could be taken now; None where the system does not tell.

    A GPU's: what is free and what torch holds in reserve. The host's: what Linux calls available, or what is left of the
    limit of the control group (a container's), whichever is less.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) / total
    try:
        facts = SYSTEM.read_text()
        left = _fact(facts, "MemAvailable:") / _fact(facts, "MemTotal:")
    except (OSError, ValueError, IndexError):
        return None
    try:
        limit, used = int((GROUP / "memory.max").read_text()), int((GROUP / "memory.current").read_text())
        idle = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines()).get("inactive_file", "0")
        left = min(left, 1 - (used - int(idle)) / limit)
    except (OSError, ValueError, ZeroDivisionError):
        pass                                                     # no control group, or one without a limit
    return left


def _fact(facts: str, name: str) -> int:
    """The number behind a name; the names are few of many, so that lines are not taken apart. Raises IndexError without one."""
    return int(facts.partition(name)[2].split(None, 1)[0])


class Pressure:
    """Says now and then whether memory is short: from less than `least` free until twice as much is."""

    def __init__(self, least: float, left: Callable[[], float | None], clock: Callable[[], float] = perf_counter) -> None:
        self.least, self._left, self._clock = least, left, clock
        self._next, self._why = -inf, ""

    def __call__(self) -> str:
        """Called once a round; why guessing should pause, or nothing."""
        if self.least and (now := self._clock()) >= self._next:
            self._next, left = now + EVERY_S, self._left()
            bound = self.least * (2 if self._why else 1)
            self._why = "" if left is None or left >= bound else f"memory is short: {left:.1%} is free, guessing needs {bound:.1%}"
        return self._why
