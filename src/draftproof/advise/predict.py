"""Expected speed-up from counts and costs. Pure: numbers in, numbers and reasons out.

A plain round emits one token per sequence in T₀ seconds, a round that drafts emits E of them in T. Before its first round a request
takes P₀ seconds of reading, and P with a drafter that reads too; the requests beside it wait for that. So for n tokens after the first
of each of b requests side by side

    S = (b·P₀ + n·T₀) / (b·P + n·T / E)

E comes from an audition, the rest from rounds timed on this machine (arXiv 2211.17192, Theorem 3.8, with measured costs for γ·c + v + o).
P follows the length of prompts, T₀ and T the length of texts, T the draft lengths too. Requests of all classes run side by side, unless
classes are said to be served apart: of b, b − 1 have the prompts, the texts, the draft lengths and the rounds of the whole log, and in a
request's time so many more of them begin as it has more rounds than they.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bench.cells import ALL, Spread
from ..bench.profile import FREE
from ..core.budget import distinct_experts

MARGIN = 0.02           # a drafter that is expected to gain less is not worth its memory
LITTLE = 1.15           # tokens per round below which hardly any guess stands
FAR = 1.5               # times the drafts that were timed: beyond, a forecast says that it is extrapolated
OFF = "none"


@dataclass(frozen=True, slots=True)
class Cost:
    """A round of a whole batch, timed. drafter "none" and depth 0: without guesses.

    seconds: a typical round's and its 95 % interval · nodes: drafted tokens per sequence and round, and slope: seconds for one more
    slope_error: half the 95 % interval of the slope · context: tokens of the text before it, and context_s: seconds for one more
    start_s, token_s: of one request before its first round, and for each token of its prompt · free_rows: rows per pass up to which a
    plain pass is not exceeded by a quarter, None if not known · passes: (rows per text, seconds) of passes of the target alone ·
    experts: of a mixture, how many a layer has, and how many of them a row chooses
    """

    drafter: str
    depth: int
    batch: int
    seconds: Spread
    nodes: float = 0.0
    slope: float = 0.0
    slope_error: float = 0.0
    context: float = 0.0
    context_s: float = 0.0
    start_s: float = 0.0
    token_s: float = 0.0
    free_rows: int | None = None
    passes: tuple[tuple[int, float], ...] = ()
    experts: tuple[int, int] | None = None

    def at(self, nodes: float, context: float) -> float:
        """Seconds of a round that drafts `nodes` tokens per sequence after `context` of text; never below half of what was timed."""
        seconds = self.seconds.median + self.slope * (nodes - self.nodes) + self.context_s * (context - self.context)
        return max(seconds, 0.5 * self.seconds.median)

    def start(self, prompt_tokens: float | None) -> float:
        """Seconds before the first round of a request with a prompt of this length."""
        return self.start_s + self.token_s * (prompt_tokens or 0.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """One cell of `advise --json`."""

    prompt_class: str
    concurrency: int
    drafter: str
    depth: int
    speedup: Spread
    reason: str
    recommended: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"class": self.prompt_class, "concurrency": self.concurrency, "drafter": self.drafter, "depth": self.depth,
                "expected_speedup": {"mid": self.speedup.median, "low": self.speedup.low, "high": self.speedup.high},
                "reason": self.reason, "recommended": self.recommended, **self.notes}


def forecast(cell: Mapping[str, Any], plain: Cost, cost: Cost, crowd: Mapping[str, Any] | None = None) -> Forecast | None:
    """What a drafter at a depth is expected to gain on the texts of an audition's cell; None if it counted no round.

    crowd: the cell of the requests that run beside; None: they are like these.
    """
    if not cell["rounds"]:
        return None
    length, nodes = float(cell["acceptance_length"]), cell["drafted"] / cell["rounds"]
    beside = cell if crowd is None or not crowd["rounds"] else crowd
    share = (plain.batch - 1) / plain.batch
    around = nodes + share * (beside["drafted"] / beside["rounds"] - nodes)       # drafted per sequence in a round of the whole batch
    context = _context(cell) + share * (_context(beside) - _context(cell))
    own, other = _tokens(cell), _tokens(beside)
    plain_s, round_s = plain.at(0.0, context), cost.at(around, context)
    before = _seconds(plain, cell, beside, own, own / other, plain_s)
    after = _seconds(cost, cell, beside, own / length, own / length / (other / float(beside["acceptance_length"])), round_s)
    mid, half = before / after, _log_half(cell, plain, cost, min(1.0, cost.slope_error * abs(around - cost.nodes) / round_s))
    round_ratio = round_s / plain_s
    gains = mid >= 1 + MARGIN
    return Forecast(
        cell["class"], plain.batch, cell["drafter"], int(cell["depth"]), Spread(mid, mid * math.exp(-half), mid * math.exp(half)),
        _reason(length, nodes, around, round_s, plain_s, gains, plain) + (
            f"; rounds that draft {around:.1f} tokens are extrapolated from {cost.nodes:.1f}" if around > FAR * cost.nodes else ""),
        notes={"acceptance_length": length, "drafted_per_round": nodes, "drafted_timed": cost.nodes, "round_cost": round_ratio,
               "figure": cell.get("figure", "exact")})


def _tokens(cell: Mapping[str, Any]) -> float:
    """Of an answer, after the first."""
    return float(max(1.0, cell["tokens"] / max(1, cell["requests"]) - 1))


def _context(cell: Mapping[str, Any]) -> float:
    """Tokens before a round of its requests, on average."""
    return (cell.get("prompt_tokens") or 0.0) + _tokens(cell) / 2


def _seconds(cost: Cost, cell: Mapping[str, Any], beside: Mapping[str, Any], rounds: float, longer: float, each: float) -> float:
    """Of a request with so many rounds of `each` seconds, in which `longer` times as many others begin as have a place beside it."""
    waiting = (cost.batch - 1) * longer * cost.start(beside.get("prompt_tokens"))
    return cost.start(cell.get("prompt_tokens")) + waiting + rounds * each


def _log_half(cell: Mapping[str, Any], plain: Cost, cost: Cost, moved: float) -> float:
    """Half the width of the interval of log S: the sources are independent, so their squares add up.

    moved: the same of a round's seconds alone, for the way from the drafts that were timed to those of the log."""
    halves = [moved, *(math.log(c.seconds.high / c.seconds.low) / 2 for c in (plain, cost) if c.seconds.low > 0)]
    spread = cell.get("acceptance_length_interval")
    if spread:
        halves.append(math.log(spread["high"] / spread["low"]) / 2)
    return math.sqrt(sum(h * h for h in halves))


def _reason(length: float, nodes: float, around: float, round_s: float, plain_s: float, gains: bool, plain: Cost) -> str:
    """around: drafted tokens per text in a round of the whole batch."""
    said = f"{length:.2f} tokens a round, which takes {round_s / plain_s:.2f}× a plain one"
    if gains:
        return said
    rows, free = plain.batch * (1 + nodes), plain.free_rows
    judging = read(plain.passes, 1 + around)[0] - plain.passes[0][1] if plain.passes else None     # what the rows add, drafting left out
    if length < LITTLE:
        why = f"of {nodes:.1f} tokens guessed a round hardly any stands"
    elif free is not None and rows > free and (judging is None or 2 * judging > round_s - plain_s):
        why = f"verification {_bound(plain, rows, free)}"
    else:
        why = "drafting takes more time than the accepted tokens save"
    return f"{why} ({said})"


def _bound(plain: Cost, rows: float, free: int) -> str:
    """Why verifying so many rows takes longer than a plain pass, of whose width and up to `free` rows it does not."""
    if plain.experts is not None:
        before, after = (distinct_experts(*plain.experts, each) for each in (plain.batch, rows))
        if after > FREE * before:
            return (f"reads more experts than a plain pass, about {after:.0f} of {plain.experts[0]} for {rows:.0f} rows, where "
                    f"{before:.0f} are read for {plain.batch}")
    return f"is compute-bound beyond {free} rows, and this needs {rows:.0f}"


def read(passes: Sequence[tuple[int, float]], rows: float) -> tuple[float, float]:
    """(seconds of a pass over `rows` rows, slope there), linear between measured widths and beyond the last."""
    if len(passes) == 1:
        return passes[0][1], 0.0
    after = next((i for i, (wide, _) in enumerate(passes) if wide >= rows and i), len(passes) - 1)
    (narrow, low), (wide, high) = passes[after - 1], passes[after]
    slope = (high - low) / (wide - narrow)
    return low + slope * (rows - narrow), slope


def predict(cells: Iterable[Mapping[str, Any]], costs: Sequence[Cost], apart: bool = False) -> list[Forecast]:
    """A forecast for every cell of an audition at every batch that was timed with its drafter and depth; the best of each class
    and batch is recommended, or "none" where nothing gains. apart: only requests of one class run side by side."""
    plain = {cost.batch: cost for cost in costs if cost.drafter == OFF}
    timed = {(cost.drafter, cost.depth, cost.batch): cost for cost in costs}
    found: dict[tuple[str, int], list[Forecast]] = {}
    cells = list(cells)
    crowds = {} if apart else {(cell["drafter"], cell["depth"]): cell for cell in cells if cell["class"] == ALL}
    for cell in cells:
        for batch, off in plain.items():
            cost = timed.get((cell["drafter"], cell["depth"], batch))
            made = forecast(cell, off, cost, crowds.get((cell["drafter"], cell["depth"]))) if cost is not None else None
            if made is not None:
                found.setdefault((made.prompt_class, batch), []).append(made)
    return [one for key, group in found.items() for one in _chosen(key, group)]


def _chosen(key: tuple[str, int], group: Sequence[Forecast]) -> list[Forecast]:
    """The group with its winner marked; a row for off beside it, recommended if nothing gains enough."""
    best = max(group, key=lambda one: one.speedup.median)
    gains = best.speedup.median >= 1 + MARGIN
    off = Forecast(key[0], key[1], OFF, 0, Spread(1.0, 1.0, 1.0),
                   "speculation off" if gains else f"off: the best, {best.drafter} at depth {best.depth}, reaches "
                   f"{best.speedup.median:.2f}×: {best.reason}", recommended=not gains)
    return [*(_marked(one) if gains and one is best else one for one in group), off]


def _marked(one: Forecast) -> Forecast:
    return Forecast(one.prompt_class, one.concurrency, one.drafter, one.depth, one.speedup, one.reason, True, one.notes)


def thresholds(forecasts: Sequence[Forecast]) -> dict[str, int | None]:
    """Class → the most concurrent requests, of those looked at, up to which speculation pays at every load; None if at none."""
    out: dict[str, int | None] = {}
    for name in dict.fromkeys(f.prompt_class for f in forecasts):
        out[name] = None
        for one in sorted((f for f in forecasts if f.prompt_class == name and f.recommended), key=lambda f: f.concurrency):
            if one.drafter == OFF:
                break
            out[name] = one.concurrency
    return out


@dataclass(frozen=True, slots=True)
class Overall:
    """One drafter for the whole traffic. depths: load → its best depth there, 0 where it does not gain · depth: the one that gains most
    over all loads, each weighing the same, without a loss that counts at any; None if there is none · speedups: load → of that depth."""

    drafter: str
    depths: dict[int, int]
    depth: int | None
    speedups: dict[int, float]

    @property
    def schedule(self) -> str:
        """As `export config --depth-by-batch` reads it: a load's depth from there up to the next load that was looked at."""
        loads = sorted(self.depths)
        starts = [(1 if i == 0 else load, self.depths[load]) for i, load in enumerate(loads)
                  if i == 0 or self.depths[load] != self.depths[loads[i - 1]]]
        return ",".join(f"{start}:{depth}" for start, depth in starts)


def overall(forecasts: Sequence[Forecast]) -> Overall | None:
    """The drafter that gains most on all requests together, off wherever it does not; None if none gains at any load."""
    found: dict[str, dict[int, dict[int, float]]] = {}       # drafter → load → depth → speed-up
    for one in forecasts:
        if one.prompt_class == ALL and one.drafter != OFF:
            found.setdefault(one.drafter, {}).setdefault(one.concurrency, {})[one.depth] = one.speedup.median
    best = max(found, key=lambda name: sum(max(0.0, math.log(max(each.values()))) for each in found[name].values()), default=None)
    if best is None:
        return None
    loads = found[best]
    depths = {load: max(each, key=lambda depth: each[depth]) for load, each in sorted(loads.items())}
    depths = {load: depth if loads[load][depth] >= 1 + MARGIN else 0 for load, depth in depths.items()}
    if not any(depths.values()):
        return None
    fixed = [depth for depth in set.intersection(*map(set, loads.values())) if all(each[depth] >= 1 - MARGIN for each in loads.values())]
    depth = max(fixed, key=lambda depth: math.prod(each[depth] for each in loads.values()), default=None)
    return Overall(best, depths, depth, {} if depth is None else {load: loads[load][depth] for load in depths})


def verdict(forecasts: Sequence[Forecast]) -> str:
    """What to do, in words: per class and load the setting, then where it stops paying."""
    said = []
    for one in (f for f in forecasts if f.recommended):
        where = f"{one.prompt_class} at {one.concurrency} concurrent"
        if one.drafter == OFF:
            said.append(f"{where}: {one.reason}")
        else:
            said.append(f"{where}: {one.drafter} at depth {one.depth}, {one.speedup.median:.2f}× "
                        f"({one.speedup.low:.2f}–{one.speedup.high:.2f}{', not shown' if one.speedup.low <= 1 else ''}), {one.reason}")
    return "; ".join(said) if said else "nothing to say: the audition and the timed rounds have no drafter and depth in common"
