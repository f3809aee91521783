"""What benchmarks/gpu.py is held to, and how it says what it found. A cell is one arm of one shape, mode and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratios import shown

OFF, AUTO = "off", "auto"
DEPTHS_CHECKED, TEMPERATURES, CHECKED = range(9), (0.0, 0.8), 24     # of the check for bits; its texts at each of them
TEXTS = len(DEPTHS_CHECKED) * len(TEMPERATURES) * CHECKED
COPY_GOAL, ROUNDED_GOAL, ON_GOAL = 0.85, 2.9, 3.0


def goals(cells: Sequence[Mapping[str, Any]], copy: float) -> list[dict[str, Any]]:
    """Every goal with what was found, None if it was not measured."""
    def of(shape: str) -> list[Mapping[str, Any]]:
        """The cells of batch 1 in the fast mode, joined or not, whose plain decoding is faster: guesses are held against the better one."""
        here = [c for c in cells if c["shape"] == shape and c["batch"] == 1 and c["mode"] in ("fast", "compiled")]
        mode = max((c for c in here if c["arm"] == OFF), key=lambda c: c["tokens_per_s"], default={"mode": ""})["mode"]
        return [c for c in here if c["mode"] == mode]

    def best(shape: str) -> float | None:
        return max((c["over_off"]["median"] for c in of(shape) if "@" in c["arm"]), default=None)

    off = [c["read_gb_per_s"] / copy for c in of("8B") if c["arm"] == OFF]
    found: list[tuple[str, float | None, float]] = [
        ("8B, batch 1, off: bandwidth ÷ a copy's", off[0] if off else None, COPY_GOAL),
        ("8B, batch 1, the best drafter ÷ off", best("8B"), ON_GOAL),
        ("70B of eight bits, batch 1, the best drafter ÷ off", best("70B"), ROUNDED_GOAL)]
    shapes = sorted({c["shape"] for c in cells})
    for shape in shapes:
        guessed: dict[int, float] = {}
        here = [c for c in cells if c["shape"] == shape and c["mode"] == "fast" and "@" in c["arm"]]
        chosen = [c for c in here if c["arm"].endswith(f"@{AUTO}")]                     # by the engine, where it was let: of each drafter
        for c in chosen or here:
            worse = min if chosen else max
            guessed[c["batch"]] = worse(c["over_off"]["median"], guessed.get(c["batch"], c["over_off"]["median"]))
        found.append((f"{shape}, fast, batches {', '.join(map(str, guessed))}: guesses ÷ off, the least of them",
                      min(guessed.values(), default=None), 1.0))
    for shape in shapes:
        bits = next((c["bits"] for c in cells if c["shape"] == shape and c["bits"] and c["bits"]["texts"]), None)
        if bits is not None or any(c["shape"] == shape and c["mode"] == "reproducible" for c in cells):
            texts, different = (bits["texts"], bits["different"]) if bits else (0, 0)
            same = 1 - different / texts if different or texts == TEXTS else None       # all were asked for
            found.append((f"{shape}, reproducible: share of {texts} texts of {TEXTS} equal to the text alone without a guess", same, 1.0))
    return [{"goal": name, "found": value, "bound": bound, "met": None if value is None else value >= bound}
            for name, value, bound in found]


def modes_beside(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What reproducible mode costs: its rates over those of fast mode, which were measured before or after it."""
    rates = {(c["shape"], c["mode"], c["batch"], c["arm"]): c["tokens_per_s"] for c in cells}
    return [f"| {shape} | {batch} | {arm} | {rate / rates[shape, 'fast', batch, arm]:.3f} |" for (shape, mode, batch, arm), rate
            in rates.items() if mode == "reproducible" and (shape, "fast", batch, arm) in rates]


def page(result: Mapping[str, Any]) -> str:
    lines = [f"copy {result['copy_gb_per_s']:.0f} GB/s (read and written)", "", "| shape | mode | batch | arm | tokens/s | ÷ off | GB/s |",
             "|---|---|---|---|---|---|---|"]
    for c in result["cells"]:
        read = f"{c['read_gb_per_s']:.0f}" if c["read_gb_per_s"] else ""
        what = " | ".join(str(c[name]) for name in ("shape", "mode", "batch", "arm"))
        lines.append(f"| {what} | {c['tokens_per_s']:.1f} | {shown(c['over_off'])} | {read} |")
    if beside := modes_beside(result["cells"]):
        lines += ["", "| shape | batch | arm | reproducible ÷ fast |", "|---|---|---|---|", *beside]
    reached = {True: "yes", False: "NO", None: "not measured"}
    lines += ["", "| goal | at least | found | reached |", "|---|---|---|---|"]
    lines += [f"| {g['goal']} | {g['bound']} | {'–' if g['found'] is None else format(g['found'], '.3f')} | {reached[g['met']]} |"
              for g in result["goals"]]
    return "\n".join([*lines, *(f"left out: {what}" for what in result["left_out"])])
