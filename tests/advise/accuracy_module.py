"""benchmarks/advice.py as a module."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_advice() -> Any:
    folder = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("advice_benchmark", folder / "advice.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["advice_benchmark"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
