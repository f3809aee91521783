"""`/draftproof/ab`: the report as a page of tables, without a script. Every value is escaped, and the policy lets nothing else in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..trace.events import UNCLASSED
from ..view.server import HEADERS
from .abreport import QUANTILES, report, snapshot
from .experiment import Experiment
from .refusal import Refusal
from .schema import AbRequest
from .stream import compact

STYLE = """\
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
div { overflow-x: auto; } h1 { overflow-wrap: anywhere; }
table { border-collapse: collapse; } th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; border-bottom: 1px solid; } td { border-bottom: 1px solid #8883; }
th:first-child, td:first-child { text-align: left; } .words td { text-align: left; white-space: normal; }
.wrong { font-weight: 700; } small { opacity: .75; }
"""
LOOKS = ('<p><a href="">Look again</a> · <a href="?every">every 15 seconds</a></p>', '<p>Every 15 seconds · <a href="?">stay</a></p>')
NAMES = {"ttft_s": "first token, ms", "tpot_s": "per token, ms", "e2e_s": "whole, ms"}
NOTES = """Each value stands with its 95 % interval; … is an end that so few requests cannot bound. Ratios are candidate over
control: below 1 the candidate is faster. Beside it: other texts that were on their way, on average while a request ran; times compare
arms where both met the same. Arms share the engine: where requests of both ran together (mixed), each also waited for what
the other's drafts took, and differences come out smaller than they are."""


class AbPage:
    """The routes of an experiment."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    async def look(self, request: Request) -> Response:
        """HTML for whoever accepts it, else JSON. A page that comes anew takes a reader's place away: it does with ?every only."""
        if "text/html" not in request.headers.get("accept", ""):
            return await self.document(request)
        every = "every" in request.query_params
        return Response(await asyncio.to_thread(lambda: page(self._found(), every)), media_type="text/html",
                        headers={**HEADERS, "Vary": "Accept"})

    async def document(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(lambda: compact(self._found())), media_type="application/json",
                        headers={**HEADERS, "Vary": "Accept"})

    async def style(self, request: Request) -> Response:
        return Response(STYLE, media_type="text/css", headers=HEADERS)

    async def steer(self, request: Request) -> Response:
        if not request.state.admin:
            raise Refusal(403, "this key may not steer the experiment; use one that is marked admin", "permission_error")
        wanted = AbRequest.model_validate_json(await request.body())
        if self._experiment.config is None:
            raise Refusal(409, "there is no experiment; start the server with --ab")
        self._experiment.end() if wanted.action == "end" else self._experiment.restart()
        return await self.document(request)

    def _found(self) -> dict[str, Any]:
        return report(snapshot(self._experiment))


def page(found: dict[str, Any], every: bool) -> str:
    """The report as HTML; every: that comes anew every 15 seconds."""
    about, rollout = found["experiment"], found["rollout"]
    title = "No experiment" if about is None else about["name"]
    parts = [f"<h1>{escape(title)}</h1>", LOOKS[every], _words(found),
             "<h2>Latency and acceptance</h2>", f"<p><small>{escape(NOTES)}</small></p>",
             _latencies(found["cells"])]
    if about is not None:
        parts += ["<h2>Candidate over control</h2>", _ratios(found["comparisons"]), "<h2>Texts written again with both arms</h2>",
                  _identity(found)]
    parts += ["<h2>Acceptance against its own past</h2>", _drift(found["drift"]), "<h2>What happened</h2>",
              _table(["after", "event"], [[_span(one["at_s"]), one["event"]] for one in reversed(rollout["history"])], "words")]
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">"
            + "<meta http-equiv=\"refresh\" content=\"15\">" * every +
            f"<title>{escape(title)} · Draftproof</title><link rel=\"stylesheet\" href=\"/draftproof/ab.css\"></head>\n<body>"
            + "\n".join(parts) + "\n</body></html>\n")


def _words(found: dict[str, Any]) -> str:
    about, rollout = found["experiment"], found["rollout"]
    rows: list[list[Any]] = []
    if about is not None:
        stages = ", ".join(f"{share:.3g}" for share in rollout["stages"])
        rows = [*([name, text] for name, text in about["arms"].items()), ["hashed", about["hashed"]],
                ["state", f"{rollout['state']}: candidate writes {rollout['share']:.3g}" + (f" (of stages {stages})" if stages else "")],
                ["reason", rollout["reason"] or "–"],
                ["requests of this stage", ", ".join(f"{arm} {count}" for arm, count in rollout["requests"].items())
                 + f"; {rollout['needed']} each are needed"]]
    rows += [[name, version] for name, version in found["versions"].items()]
    rows += [["left out", ", ".join(f"{count}: {reason}" for reason, count in found["left_out"].items()) or "nothing"],
             ["for", _span(found["seconds"])]]
    return _table(["", ""], rows, "words")


def _latencies(cells: Sequence[dict[str, Any]]) -> str:
    head = ["class", "arm", "", "requests", "failed", "mixed", "beside it, own arm", "other",
            *(f"{name} {label}" for name in NAMES.values() for label in QUANTILES),
            "tokens a round", "first guess stood", "drafter, MB"]
    rows = [[cell["class"] or UNCLASSED, cell["arm"], cell["source"], cell["requests"], cell["failed"], cell["mixed"],
             *(_number(cell["beside"] and cell["beside"][side]) for side in ("own", "other")),
             *(_estimate(cell[name][label], 1000) for name in NAMES for label in QUANTILES),
             _number(cell["acceptance"]["acceptance_length"]), _number(cell["acceptance"]["first_guess"]),
             _number(cell["memory"]["draft_bytes"] / 1e6)] for cell in cells]
    return _table(head, rows)


def _ratios(comparisons: Sequence[dict[str, Any]]) -> str:
    head = ["class", "", *(f"{name.removesuffix(', ms')} {label}" for name in NAMES.values() for label in QUANTILES)]
    return _table(head, [[row["class"] or UNCLASSED, row["source"], *(_estimate(row[name][label]) for name in NAMES for label in QUANTILES)]
                         for row in comparisons])


def _identity(found: dict[str, Any]) -> str:
    head = ["class", "compared", "identical", "candidate differed", "control differed", "both", "first difference, token", "not comparable",
            *(f"{name.removesuffix(', ms')}, ratio" for name in NAMES.values())]
    names = ("compared", "identical", "candidate_differed", "control_differed", "both_differed", "first_difference", "incomparable")
    told = ", ".join(f"{name} {count}" for name, count in found["replays"].items())
    if not found["replays_timed"]:
        told += "; not timed: a drafter that learns from past outputs finds the very answer"
    return f"<p><small>{escape(told)}</small></p>" + _table(head, [
        [row["class"] or UNCLASSED, *("–" if row[name] is None else row[name] for name in names),
         *(_estimate(row["paired"][name]) for name in NAMES)] for row in found["identity"]])


def _drift(found: dict[str, Any]) -> str:
    rows = [[row["class"] or UNCLASSED, row["arm"], row["requests"], _number(row["baseline"]), f"{row['fallen']:.1f}",
             f"{row['risen']:.1f}", row["alarms"],
             "–" if row["last_alarm"] is None else "{direction} {before:.3f} → {since:.3f}".format(**row["last_alarm"])]
            for row in found["classes"]]
    said = f"An alarm is a sum above {found['limit']:.0f}; about one in {found['false_alarm_once_in']} requests of a class is false."
    return f"<p><small>{escape(said)}</small></p>" + _table(
        ["class", "arm", "requests", "first guess stood", "sum, fallen", "sum, risen", "alarms", "last alarm"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    top = "".join(f"<th scope=\"col\">{escape(name)}</th>" for name in head) if any(head) else ""
    name = escape(" by ".join(filter(None, head[:2])) or "the experiment")
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return (f"<div tabindex=\"0\" role=\"region\" aria-label=\"{name}\"><table class=\"{kind}\"><thead><tr>{top}</tr></thead>"
            f"<tbody>\n{body}\n</tbody></table></div>")


def _estimate(found: dict[str, Any] | None, scale: float = 1.0) -> str:
    if found is None:
        return "–"
    ends = ["…" if found[end] is None else _number(found[end] * scale) for end in ("low", "high")]
    return f"{_number(found['value'] * scale)} [{ends[0]}, {ends[1]}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
