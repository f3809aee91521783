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

    Raises Failure if the document has no cells, or none in common with the forecasts, or cells of another form.
    """
    measured = document.get("cells")
    if not isinstance(measured, list) or not measured:
        raise Failure("the benchmark has no cells; expected the document that draftproof bench --json prints")
    if not all(isinstance(cell, dict) for cell in measured):
        raise Failure("a cell of the benchmark has another form; expected the document that draftproof bench --json prints")
    usable = [cell for cell in measured if cell.get("concurrency", 1) is not None and cell.get("speedup", {}) is not None]
    if not usable:
        raise Failure("the benchmark has no cell with a concurrency and a speed-up over speculation off; expected bench --concurrency N, "
                      "not --rate, and an arm without it")
    known = {(f.prompt_class, f.concurrency, f.drafter, str(f.depth)): f for f in forecasts}
    rows = []
    for cell in usable:
        try:
            one = known.get((cell.get("class"), int(cell.get("concurrency", 1)), cell.get("drafter"), str(cell.get("depth"))))
            rows += [_row(one, cell)] if one is not None and one.depth else []
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise Failure(f"a cell of the benchmark has another form ({type(error).__name__}: {error}); "
                          "expected the document that draftproof bench --json prints") from None
    if not rows:
        raise Failure("the benchmark and the forecasts have no class, concurrency, drafter and depth in common; "
                      "expected a bench of the same drafters at the same fixed depths")
    narrow = [row for row in rows if row["narrow"]]
    good = sum(abs(row["error"]) <= GOOD for row in narrow)
    return {"cells": rows, "judged": len(narrow), "within_10_percent": good / len(narrow) if narrow else None,
            "regret": _regrets(forecasts, rows)}


def _row(one: Forecast, cell: Mapping[str, Any]) -> dict[str, Any]:
    mid = float(cell["speedup"]["median"])
    low, high = (None if cell["speedup"][name] is None else float(cell["speedup"][name]) for name in ("low", "high"))
    narrow = low is not None and high is not None and (high - low) / 2 <= NARROW * mid      # of few prompts there is no interval
    return {"class": one.prompt_class, "concurrency": one.concurrency, "drafter": one.drafter, "depth": one.depth,
            "temperature": cell.get("temperature"), "predicted": one.speedup.median, "measured": mid, "measured_low": low,
            "measured_high": high, "error": one.speedup.median / mid - 1, "narrow": narrow}


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
