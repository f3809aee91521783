"""A prediction against a measurement: the forecasts beside the cells of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Failure
from .predict import Forecast

NARROW = 0.05           # half the width of a measured interval, relative, above which a cell judges nothing
GOOD = 0.10             # relative error of a prediction that was right


def check(forecasts: Sequence[Forecast], document: Mapping[str, Any]) -> dict[str, Any]:
    """Compare with `bench --json`: each cell's relative error, the share of narrow cells within 10 %, and what recommendations lost.

    Raises Failure if the document has no cells, or none in common with the forecasts.
    """
    measured = document.get("cells")
    if not isinstance(measured, list) or not measured:
        raise Failure("the benchmark has no cells; expected the document that draftproof bench --json prints")
    known = {(f.prompt_class, f.concurrency, f.drafter, str(f.depth)): f for f in forecasts}
    rows = []
    for cell in measured:
        one = known.get((cell.get("class"), int(cell.get("concurrency", 1)), cell.get("drafter"), str(cell.get("depth"))))
        if one is None or one.depth == 0:
            continue
        speedup = cell["speedup"]
        mid = float(speedup["median"])
        rows.append({"class": one.prompt_class, "concurrency": one.concurrency, "drafter": one.drafter, "depth": one.depth,
                     "temperature": cell.get("temperature"), "predicted": one.speedup.median, "measured": mid,
                     "measured_low": float(speedup["low"]), "measured_high": float(speedup["high"]),
                     "error": one.speedup.median / mid - 1, "narrow": (speedup["high"] - speedup["low"]) / 2 <= NARROW * mid})
    if not rows:
        raise Failure("the benchmark and the forecasts have no class, concurrency, drafter and depth in common; "
                      "expected a bench of the same drafters at the same fixed depths")
    narrow = [row for row in rows if row["narrow"]]
    good = sum(abs(row["error"]) <= GOOD for row in narrow)
    return {"cells": rows, "judged": len(narrow), "within_10_percent": good / len(narrow) if narrow else None,
            "regret": _regrets(forecasts, rows)}


def _regrets(forecasts: Sequence[Forecast], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per class and load, how much slower the recommended setting was measured than the best of the measured ones, off included."""
    out = []
    for one in (f for f in forecasts if f.recommended):
        group = [row for row in rows if (row["class"], row["concurrency"]) == (one.prompt_class, one.concurrency)]
        mine = [row["measured"] for row in group if (row["drafter"], row["depth"]) == (one.drafter, one.depth)]
        if not group or (one.depth and not mine):
            continue
        chosen = sum(mine) / len(mine) if one.depth else 1.0
        best = max(1.0, *(row["measured"] for row in group))
        out.append({"class": one.prompt_class, "concurrency": one.concurrency, "drafter": one.drafter, "depth": one.depth,
                    "slower_by": max(0.0, 1 - chosen / best)})
    return out
