"""A trace in Chrome's trace event format (JSON object form), which ui.perfetto.dev and chrome://tracing open.

One process per request, one thread per phase; times in microseconds. Counters show the granted depth and the tokens accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

THREADS = {"prefill": 0, "draft": 1, "score": 2, "verify": 3, "other": 4}


def write(events: Iterable[Any], out: TextIO) -> int:
    """Write all of `events` (records of trace/events.py) and return how many spans there were."""
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    spans, first = 0, True
    for record in records(events):
        out.write(("" if first else ",\n") + json.dumps(record, separators=(",", ":"), allow_nan=False))
        first = False
        spans += record["ph"] == "X"
    out.write("]}\n")
    return spans


def records(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    process, numbers = 0, dict[str, int]()
    for event in events:
        kind = event.event
        if kind == "request_started":
            process += 1
            numbers[event.request] = process
            name = f"{event.request} {event.prompt_class or ''}".strip()
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            for name, thread in THREADS.items():
                yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        elif getattr(event, "request", None) in numbers:
            yield from _of_request(event, numbers[event.request])


def _of_request(event: Any, process: int) -> Iterator[dict[str, Any]]:
    if event.event == "prefill_done":
        yield _span("prefill", process, event.at_s - event.seconds, event.seconds, {"passes": event.passes})
    elif event.event == "round_done":
        yield from _round(event, process)
    elif event.event == "request_done":
        yield {"ph": "i", "s": "p", "name": f"done: {event.finish}", "pid": process, "tid": 0, "ts": 1e6 * event.at_s}


def _round(event: Any, process: int) -> Iterator[dict[str, Any]]:
    times = event.times
    parts = {"draft": times.draft_s, "score": times.score_s, "verify": times.verify_s, "other": times.other_s}
    accepted = sum(node.fate == "accepted" for node in event.nodes)
    about = {"round": event.round, "depth": event.depth, "drafter": event.drafter, "drafted": len(event.nodes), "accepted": accepted,
             "text": event.text, "reason": event.reason}
    begin = event.at_s - sum(parts.values())
    for name, seconds in parts.items():
        yield _span(name, process, begin, seconds, about if name == "score" else {"round": event.round})
        begin += seconds
    yield {"ph": "C", "name": "accepted", "pid": process, "ts": 1e6 * event.at_s, "args": {"accepted": accepted, "depth": event.depth}}


def _span(name: str, process: int, begin: float, seconds: float, about: dict[str, Any]) -> dict[str, Any]:
    """Draft and target have names of their own, so that a viewer's sums keep them apart."""
    return {"ph": "X", "name": name, "cat": "draftproof", "pid": process, "tid": THREADS[name], "ts": 1e6 * begin, "dur": 1e6 * seconds,
            "args": about}
