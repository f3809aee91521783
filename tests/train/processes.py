"""One command in several processes that form a team on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from draftproof.remote.fleet import free_port

TESTS = Path(__file__).parent.parent


def start(count: int, *command: str) -> list[subprocess.Popen[str]]:
    """The command in `count` processes that find each other over loopback, as `accelerate launch --cpu` starts them."""
    shared = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    return [subprocess.Popen([sys.executable, *command], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(count)]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        told = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, told, strict=True)]
