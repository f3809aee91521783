"""The cost curve of a target on this device: seconds of a scoring pass as a function of rows, context and batch, and its roofline.

A pass over few rows is bound by reading the weights and the keys; rows are then free, but in a mixture of experts, where each row may
read experts of its own until hardly any is left (`core.budget.distinct_experts`). Where arithmetic takes over, each row is paid for:
`free_rows` says where (Williams et al., "Roofline", 2009; arXiv 2211.17192, section 3.4, on what verification costs).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..errors import Failure, OptionError
from ..huge import room
from ..models.target import Target
from ..types import Draft
from ..view import style
from .cells import Spread, percentile

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
QUICK_ROWS = (1, 2, 4, 8, 16, 32)
FREE = 1.25             # a pass that takes at most so many times a one-row pass counts as free
CHUNK = 512
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. rows: per sequence, the root included; every text has `context` tokens."""

    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = (64, 512)
    batches: tuple[int, ...] = (1, 4)
    repeats: int = 15

    def __post_init__(self) -> None:
        for name in ("rows", "contexts", "batches"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected integers ≥ 1")
        if self.repeats < 1:
            raise OptionError(f"repeats={self.repeats}: expected an integer ≥ 1")


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of a pass over `rows` rows of each of `batch` texts of `context` tokens; low and high: 10th and 90th percentile."""

    rows: int
    context: int
    batch: int
    seconds: Spread


def curve(target: Target, plan: Plan, seed: int = 0, clock: Clock = time.perf_counter) -> Iterator[Point]:
    """Measure every context and batch that fits; the widths take turns, so that the machine's weather hits all alike."""
    for context in plan.contexts:
        for batch in plan.batches:
            widest = min(max(plan.rows), target.context - context)
            if widest < 1 or not target.fits(batch * (context + widest + 1)):
                continue
            yield from _measured(target, context, batch, [rows for rows in plan.rows if rows <= widest], plan.repeats, seed, clock)


def _measured(target: Target, context: int, batch: int, widths: Sequence[int], repeats: int, seed: int, clock: Clock) -> list[Point]:
    rng = random.Random(seed)
    texts = [[rng.randrange(target.vocab_size) for _ in range(context + max(widths))] for _ in range(batch)]
    slots: list[Any] = []
    times: dict[int, list[float]] = {rows: [] for rows in widths}
    with torch.inference_mode():
        try:
            for i, text in enumerate(texts):
                slots.append(target.open(text[:context], f"profile {seed} {context} {batch} {i}", max(widths)))
                for start in range(slots[-1].length, context, CHUNK):
                    target.extend([slots[-1]], [torch.tensor(text[start:min(start + CHUNK, context)], device=target.device)])
            for turn in range(repeats + 1):                     # the first turn warms up
                for place in range(len(widths)):
                    rows = widths[(turn + place) % len(widths)]
                    seconds = timed_pass(target, slots, texts, context, rows, clock)
                    if turn:
                        times[rows].append(seconds)
        finally:
            for slot in slots:
                target.close(slot)
    return [Point(rows, context, batch, _spread(times[rows])) for rows in widths]


def timed_pass(target: Target, slots: Sequence[Any], texts: Sequence[Sequence[int]], context: int, rows: int,
               clock: Clock = time.perf_counter) -> float:
    """Seconds of one pass over `rows` rows of every text, whose slots hold `context` tokens before it and after it."""
    roots = torch.tensor([text[context] for text in texts], device=target.device)
    drafts = [Draft.chain(torch.tensor(text[context + 1:context + rows], device=target.device, dtype=torch.int64)) for text in texts]
    _settle(target.device)
    before = clock()
    target.score(slots, roots, drafts)
    _settle(target.device)
    seconds = clock() - before
    for slot in slots:
        target.rewind(slot, ())
        target.truncate(slot, context)
    return seconds


def _settle(device: torch.device) -> None:
    """Wait for the device, which may lag behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(times: Sequence[float]) -> Spread:
    ordered = sorted(times)
    return Spread(median(ordered), percentile(ordered, 0.1), percentile(ordered, 0.9))


def large_block(megabytes: int, device: torch.device) -> Tensor:
    """Ones, float32, that lie as our weights do: on a CPU in huge pages, which are read a tenth faster."""
    if device.type != "cpu":
        return torch.ones(megabytes << 18, device=device)
    return room(megabytes << 18).view(torch.float32).fill_(1.0)


def read_bandwidth(device: torch.device, megabytes: int = 256, repeats: int = 5, clock: Clock = time.perf_counter) -> float:
    """Bytes per second at which this device reads memory: the best of some sums over a block that no cache holds."""
    block = large_block(megabytes, device)
    _, *times = [reading(block, clock) for _ in range(repeats + 1)]      # the first warms up
    return block.nbytes / min(times)


def reading(block: torch.Tensor, clock: Clock = time.perf_counter) -> float:
    """Seconds that its device takes to read every number of it."""
    _settle(block.device)
    before = clock()
    block.sum().item()
    return clock() - before


def free_rows(points: Sequence[Point], context: int, batch: int) -> int | None:
    """`most_free` of one context and batch; None if one row was not measured."""
    times = {p.rows: p.seconds.median for p in points if (p.context, p.batch) == (context, batch)}
    return most_free(times) if 1 in times else None


def most_free(times: Mapping[int, float]) -> int:
    """The most rows per sequence, of those measured without a gap from 1, whose pass takes at most FREE times that of one row."""
    free = 1
    for rows in sorted(times):
        if times[rows] > FREE * times[1]:
            break
        free = rows
    return free


def document(target: Target, points: Sequence[Point], bandwidth: float | None) -> dict[str, Any]:
    """Curve and roofline as `profile --json` has them. Bytes of a pass: all weights once, but of a mixture of experts those that its rows
    are expected to choose, and the keys of every text. by_rows: the same of the wider passes of a mixture, which read more."""
    facts, roofs = target.facts, []
    for context, batch in dict.fromkeys((p.context, p.batch) for p in points):
        one = next((p.seconds.median for p in points if (p.context, p.batch, p.rows) == (context, batch, 1)), None)
        keys = batch * context * facts.cache_bytes_per_token
        moved = facts.pass_bytes(batch) + keys
        widths = [p.rows for p in points if (p.context, p.batch) == (context, batch)] if facts.experts else []
        roofs.append({
            "context": context, "batch": batch, "bytes": moved, "free_rows": free_rows(points, context, batch),
            "bytes_per_s": None if one is None else moved / one,
            "share_of_limit": None if one is None or bandwidth is None else moved / one / bandwidth,
            "limit_s": None if bandwidth is None else moved / bandwidth,
            "by_rows": [{"rows": rows, "bytes": facts.pass_bytes(batch * rows) + keys} for rows in widths]})
    return {
        "target": {"name": facts.name, "device": facts.device, "dtype": facts.dtype, "parameters": facts.parameters,
                   "active_parameters": facts.active_parameters, "experts": None if facts.experts is None else asdict(facts.experts),
                   "weight_bytes": facts.weight_bytes, "cache_bytes_per_token": facts.cache_bytes_per_token,
                   "vocab_size": target.vocab_size, "context": target.context, "threads": facts.threads},
        "curve": [asdict(p) for p in points], "roofline": {"read_bytes_per_s": bandwidth, "free_means": FREE, "passes": roofs}}


def points_of(record: dict[str, Any]) -> list[Point]:
    """The curve of a document. Raises Failure if it has none, or a point that cannot have been measured."""
    try:
        points = [Point(p["rows"], p["context"], p["batch"], Spread(**p["seconds"])) for p in record["curve"]]
    except (KeyError, TypeError) as error:
        raise Failure(f"no cost curve in the document ({type(error).__name__}: {error}); "
                      "expected the output of draftproof profile --json") from error
    seen = set()
    for number, p in enumerate(points, 1):
        key, times = (p.rows, p.context, p.batch), (p.seconds.low, p.seconds.median, p.seconds.high)
        wrong = "" if all(type(n) is int and n > 0 for n in key) else f"rows, context and batch are {key}"
        wrong = wrong or ("" if all(map(positive, times)) and sorted(times) == list(times) else f"seconds are {asdict(p.seconds)}")
        wrong = wrong or ("rows, context and batch are those of a point before it" if key in seen else "")
        if wrong:
            raise Failure(f"point {number} of the cost curve: {wrong}; expected the output of draftproof profile --json")
        seen.add(key)
    return points


def experts_of(record: dict[str, Any]) -> tuple[int, int] | None:
    """(experts of a layer, how many of them a row chooses) of the target of a document; None if it tells of none."""
    target = record.get("target")
    told = target.get("experts") if isinstance(target, dict) else None
    count, chosen = (told.get("count"), told.get("chosen")) if isinstance(told, dict) else (None, None)
    return (count, chosen) if type(count) is int and type(chosen) is int and 0 < chosen <= count else None


def positive(value: Any) -> bool:
    """Whether a value of a document is a number above 0, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw the curve as a picture, PNG or SVG. Raises Failure if matplotlib is missing."""
    points = points_of(record)
    try:
        with style.sheet() as colours:
            figure = style.figure(5.0)
            axes = figure.subplots()
            lines = list(dict.fromkeys((p.context, p.batch) for p in points))
            for (context, batch), look in zip(lines, style.looks(colours, len(lines)), strict=True):
                mine = [p for p in points if (p.context, p.batch) == (context, batch)]
                rows = [p.rows for p in mine]
                axes.plot(rows, [p.seconds.median * 1e3 for p in mine], label=f"context {context}, batch {batch}", **look)
                axes.fill_between(rows, [p.seconds.low * 1e3 for p in mine], [p.seconds.high * 1e3 for p in mine], alpha=0.15,
                                  color=look["color"], linewidth=0)
            limits = [p["limit_s"] for p in record["roofline"]["passes"] if p["limit_s"] is not None]
            if limits:
                axes.axhline(min(limits) * 1e3, linestyle="--", color=colours["plain"],
                             label=f"reading {'one row’s experts and other ' if record['target'].get('experts') else 'the '}weights once, "
                                   "at the measured bandwidth")
            axes.set(xlabel="rows per sequence (1 + drafted tokens)", ylabel="milliseconds per pass", ylim=(0, None))
            axes.grid(True)
            axes.legend()
            where = f"{Path(record['target']['name']).name} on {record['target']['device']}, {record['target']['dtype']}"
            style.title(axes, "A pass by its number of rows", where, colours)
            style.save(figure, file, "svg" if file.suffix == ".svg" else "png")
    except ImportError as error:
        raise Failure(str(error)) from error
