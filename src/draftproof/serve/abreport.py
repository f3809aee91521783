"""What an experiment has found, as JSON. Copies are made while nothing changes; everything that takes time is done with the copies."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from ..bench.quantiles import Estimate, estimate, ratio
from ..core.tally import Tally
from .ab import ALL, CANDIDATE, CONTROL, SERVED, TIMES, Book, Cell
from .drift import LIMIT, quiet_run
from .experiment import Experiment
from .shadow import Matches

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
KEY = "user, safety_identifier or metadata.user; else prompt and seed; and the API key"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An experiment at one moment: `head` is JSON already."""

    head: dict[str, Any]
    books: dict[str, Book]
    matches: dict[str, Matches]


def snapshot(experiment: Experiment) -> Snapshot:
    return experiment.look(_snapshot)      # type: ignore[no-any-return]


def _snapshot(now: Experiment) -> Snapshot:
    rollout = now.rollout
    stage = {arm: now.stage.cell(arm).requests for arm in now.arms}
    head: dict[str, Any] = {
        "experiment": None if now.config is None else {
            "name": now.name, "arms": {arm.name: arm.text for arm in now.arms.values()}, "hashed": KEY},
        "versions": dict(now.versions),
        "rollout": {"state": rollout.state, "share": rollout.share, "stages": list(rollout.shares), "at": rollout.at,
                    "reason": rollout.reason, "requests": stage, "needed": None if now.config is None else now.config.minimum,
                    "returns": now.returns, "history": list(now.history)},
        "limits": None if now.config is None else {name: getattr(now.config, name) for name in ("ratio", "errors", "alpha")},
        "seconds": now.seconds, "left_out": dict(now.left_out),
        "replays": {"waiting": now.replays.waiting, **now.replays.counts}, "replays_timed": not now.remembers,
        "drift": {"false_alarm_once_in": round(quiet_run(LIMIT)), "limit": LIMIT, "classes": [
            {"arm": arm, "class": name, "requests": drift.seen, "baseline": drift.baseline, "settled": drift.settled,
             "fallen": drift.sums[0], "risen": drift.sums[1], "alarms": drift.alarms,
             "last_alarm": None if drift.last is None else asdict(drift.last)}
            for (arm, name), drift in sorted(now.drifts.items())]},
    }
    return Snapshot(head, {source: _copied(book) for source, book in now.books.items()},
                    {name: _copied_matches(found) for name, found in now.matches.items()})


def report(found: Snapshot) -> dict[str, Any]:
    """The document of `/draftproof/ab.json`. Times are seconds; every figure comes with the counts behind it."""
    cells, comparisons = [], []
    for source, book in found.books.items():
        for name in book.classes:
            for arm in (CANDIDATE, CONTROL, SERVED):
                if (cell := book.cells.get((arm, name))) is not None:
                    cells.append({"source": source, "arm": arm, "class": name, **cell_report(cell)})
            candidate, control = book.cells.get((CANDIDATE, name)), book.cells.get((CONTROL, name))
            if candidate is not None and control is not None:
                comparisons.append({"source": source, "class": name, **compared(candidate, control)})
    names = sorted(found.matches, key=lambda name: (name != ALL, name))
    return {**found.head, "cells": cells, "comparisons": comparisons,
            "identity": [{"class": name, **matched(found.matches[name])} for name in names]}


def cell_report(cell: Cell) -> dict[str, Any]:
    """One arm in one class: p50, p90, p99 with 95 % intervals, what ran beside it, acceptance, and what the drafter takes."""
    times = {name: {label: _plain(estimate(sample.values, share)) for label, share in QUANTILES.items()}
             for name, sample in cell.times.items()}
    return {"requests": cell.requests, "failed": cell.failed, "mixed": cell.mixed, "beside": beside(cell), **times,
            "acceptance": acceptance(cell.tally), "memory": {"draft_bytes": cell.draft_bytes, "kv_tokens_lost": cell.kv_tokens_lost}}


def beside(cell: Cell) -> dict[str, float] | None:
    """Other texts of its own arm, and of the other, that were on their way while a request ran: the mean over requests."""
    return {name: total / cell.timed for name, total in zip(("own", "other"), cell.beside, strict=True)} if cell.timed else None


def acceptance(tally: Tally) -> dict[str, Any]:
    """Counts, and `first_guess`: of the rounds whose first guess was judged, the share in which it stood."""
    return {"rounds": tally.rounds, "rounds_drafted": tally.rounds_drafted, "drafted": tally.drafted, "accepted": tally.accepted,
            "acceptance_length": tally.acceptance_length, "acceptance_length_drafted": tally.acceptance_length_drafted,
            "draft_utilisation": tally.draft_utilisation, "first_guess": tally.hazard[0] if tally.reached else None}


def compared(candidate: Cell, control: Cell) -> dict[str, Any]:
    """Ratios of percentiles, candidate's over control's, with 95 % intervals: below 1 the candidate is faster."""
    return {name: {label: _plain(ratio(candidate.times[name].values, control.times[name].values, share))
                   for label, share in QUANTILES.items()} for name in TIMES}


def matched(found: Matches) -> dict[str, Any]:
    """Texts written again with both arms; and of the same prompts, times over control's, the median with its interval over prompts."""
    return {"compared": found.compared, "identical": found.identical, "candidate_differed": found.gained, "control_differed": found.lost,
            "both_differed": found.both, "incomparable": found.incomparable, "first_difference": found.first,
            "paired": {name: _plain(estimate(sample.values, 0.5)) for name, sample in found.ratios.items()}}


def _copied(book: Book) -> Book:
    out = Book()
    for key, cell in book.cells.items():
        twin = out.cells[key] = copy(cell)                   # its tally is replaced by every request, never changed
        twin.times = {name: sample.copy() for name, sample in cell.times.items()}
    return out


def _copied_matches(found: Matches) -> Matches:
    twin = copy(found)
    twin.ratios = {name: sample.copy() for name, sample in found.ratios.items()}
    return twin


def _plain(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)
