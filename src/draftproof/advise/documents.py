"""What other commands printed, checked: a prediction is made of an audition, and of nothing that merely looks like one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bench.profile import positive
from ..errors import Failure

NEEDED: dict[str, type | tuple[type, ...]] = {
    "class": str, "drafter": str, "depth": (int, str), "rounds": int, "drafted": int, "requests": int, "tokens": int}
"""Keys of an audition's cell that a prediction reads, and their types."""
EXPECTED = "expected the document that draftproof audition --json prints"


def cells_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of `audition --json` whose depth is fixed. Raises Failure, naming the cell that is none."""
    cells = document.get("cells")
    if not isinstance(cells, list) or not cells:
        raise Failure(f"no cells in it; {EXPECTED}")
    seen = set()
    for number, cell in enumerate(cells, 1):
        wrong = _wrong(cell)
        if wrong:
            raise Failure(f"cell {number}: {wrong}; {EXPECTED}")
        key = cell["class"], cell["drafter"], cell["depth"]
        if key in seen:                                     # a prediction would take either
            raise Failure(f"cell {number}: class {key[0]}, drafter {key[1]}, depth {key[2]} is there twice; {EXPECTED}: run it again")
        seen.add(key)
    fixed = [cell for cell in cells if isinstance(cell["depth"], int)]
    if not fixed:
        raise Failure(f"no cell of a fixed depth; {EXPECTED}, with --depth N")
    return fixed


def _wrong(cell: Any) -> str | None:
    """What is wrong with a cell, in words."""
    if not isinstance(cell, dict):
        return f"found a JSON {type(cell).__name__}, not an object"
    for name, kind in NEEDED.items():
        if name not in cell:
            return f"{name} is missing"
        value = cell[name]
        if not isinstance(value, kind) or isinstance(value, bool) or isinstance(value, int) and value < 0:
            return f"{name} is {value!r}"
    length, interval, prompt = (cell.get(name) for name in ("acceptance_length", "acceptance_length_interval", "prompt_tokens"))
    if cell["rounds"] and not positive(length):
        return f"acceptance_length is {length!r}"
    if interval is not None and not (isinstance(interval, dict) and positive(interval.get("low")) and positive(interval.get("high"))
                                     and interval["low"] <= interval["high"]):
        return f"acceptance_length_interval is {interval!r}"
    if prompt is not None and not (prompt == 0 or positive(prompt)):
        return f"prompt_tokens is {prompt!r}"
    return None
