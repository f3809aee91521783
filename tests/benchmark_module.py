"""benchmarks/NAME.py as a module: its own judgement is tested, and its parts are used, without running it."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "benchmarks"
# how a fake worker of peers.py begins; formatted with the folder of worker.py and the seconds that a step takes
FAKE_CLOCK = """
import sys, time
sys.path.insert(0, {folder!r})
pace, clock = {pace!r}, [0.0]
time.perf_counter = lambda: clock[0]          # it says how long it took, so that no load of the machine counts
"""


@cache
def benchmark(name: str) -> Any:
    """Loaded once, as `benchmark_NAME`: a test folder may have the plain name. What stands beside it can be imported by it."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
