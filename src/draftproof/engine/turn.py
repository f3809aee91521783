"""Whose turn it is at an engine, which is of one thread at a time."""

from __future__ import annotations

from threading import RLock
from types import TracebackType

from ..errors import Failure


class Turn:
    """`with turn`: what stands there is one thread's, or is refused; `with turn.lock`: it waits for the thread that is there."""

    def __init__(self) -> None:
        self.lock = RLock()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise Failure("this engine is in a round in another thread; give each thread an engine of its own, ask for many texts at once "
                          "with generate_batch, or run `draftproof serve`")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.lock.release()
