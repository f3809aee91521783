"""The processes of an audition. This file imports nothing heavy, so that they can load their modules while their parent loads its own."""

from __future__ import annotations

import multiprocessing
from typing import Any

WORKERS = "draftproof.audition.workers"


def context() -> Any:
    """Never forks of this process: torch's threads do not survive that. A server that has imported everything is forked instead."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([WORKERS])
    return found


def begin() -> None:
    """Let that server import everything now: it takes seconds, in a process of its own."""
    if context().get_start_method() == "forkserver":
        from multiprocessing.forkserver import ensure_running

        ensure_running()
