"""What a measurement leaves behind: CSV, one HTML page, a PNG, Spec-Bench's answer files. All of it is read from the JSON document."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import Failure, first_line
from ..view import style
from .cells import ALL, Middle

Cell = Mapping[str, Any]

COLUMNS = ("arm", "drafter", "depth", "class", "load", "concurrency", "rate", "requests", "failed", "tokens", "acceptance_length",
           "acceptance_length_drafted", "draft_utilisation", "identical", "draft_bytes", "kv_tokens_lost")
SPREADS = ("tokens_per_s", "total_tokens_per_s", "speedup", "decoding")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:78rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #d8dee4}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
.good{color:#116329}.bad{color:#a40e26;font-weight:600}.scroll{overflow-x:auto}img{max-width:100%}
code{background:#f3f4f6;padding:.1rem .3rem}pre{white-space:pre-wrap;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){body{background:#12161b;color:#e6e9ec}th,td{border-color:#333b44}code{background:#20262d}
.good{color:#56d364}.bad{color:#ff7b72}}"""


def write_files(files: Mapping[Path, Callable[[Path], object]]) -> None:
    """Every file by its own writer. Raises Failure naming those that could not be written; the others are."""
    failed = []
    for file, write in files.items():
        try:
            write(file)
        except (OSError, Failure) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            failed.append(f"{file}: {why}")
    if failed:
        raise Failure(f"{'; '.join(failed)}; not written, the result is on standard output")


def write_csv(cells: Sequence[Cell], file: Path) -> None:
    """One line a cell; spreads and percentiles in columns of their own."""
    latency = [(name, point) for name in ("ttft_s", "tpot_s", "inter_chunk_s", "e2e_s") for point in ("p50", "p90", "p99")]
    spread = [(name, part) for name in SPREADS for part in ("median", "low", "high")]
    head = [*COLUMNS, *(f"{name}_{part}" for name, part in [*spread, *latency]), "accepted_at"]
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(head)
        for cell in cells:
            spreads = [(cell[name] or {}).get(part) for name, part in spread]
            times = [(cell["latency"].get(name) or {}).get(point) for name, point in latency]
            writer.writerow([*(cell[name] for name in COLUMNS), *spreads, *times, json.dumps(cell["accepted_at"])])


def page(title: str, body: str) -> str:
    """A page that needs nothing but itself."""
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n")


def html_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(" by ".join(head[:2]))}"><table><tr>'
            + "".join(f'<th scope="col">{escape(name)}</th>' for name in head) + f"</tr>{rows}</table></div>")


def number(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:{form}}"


def lines_of(cells: Sequence[Cell]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, lines) of the table that people read; times are p50/p99."""
    head = ("class", "arm", "load", "tok/s/user", "tok/s total", "speed-up (95 %)", "decoding", "tok/round", "TTFT ms",
            "TPOT ms", "e2e s", "same", "failed")
    lines = []
    for cell in cells:
        times = {name: cell["latency"].get(name) or {} for name in ("ttft_s", "tpot_s", "e2e_s")}
        lines.append((
            cell["class"], cell["arm"], cell["load"], number(cell["tokens_per_s"]["median"], ".1f"),
            number((cell["total_tokens_per_s"] or {}).get("median"), ".1f"), Middle(**cell["speedup"]).text if cell["speedup"] else "",
            f"{cell['decoding']['median']:.2f}×" if cell["decoding"] else "", number(cell["acceptance_length"]),
            *(f"{number(times[n].get('p50'), form, 1000)}/{number(times[n].get('p99'), form, 1000)}"
              for n, form in (("ttft_s", ".0f"), ("tpot_s", ".1f"))),
            f"{number(times['e2e_s'].get('p50'))}/{number(times['e2e_s'].get('p99'))}",
            {True: "yes", False: "NO", None: ""}[cell["identical"]], str(cell["failed"] or "")))
    return head, lines


def spec_bench_lines(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, lines) of `summary.spec_bench`."""
    head = ("task", "questions", "mean accepted tokens", "tokens/s", "baseline", "speed-up")
    return head, [(row["task"], str(row["questions"]), number(row["mean_accepted_tokens"]), number(row["tokens_per_s"], ".1f"),
                   number(row["tokens_per_s_baseline"], ".1f"), number(row["speedup"])) for row in rows]


def write_html(document: Mapping[str, Any], file: Path) -> None:
    """The table, the acceptance by position, the machine; the plot if matplotlib is there."""
    head, lines = lines_of(document["cells"])
    body = f"<p>{escape(document.get('note', ''))}; times are p50/p99</p>" + html_table(head, lines)
    accepted = [(cell["class"], cell["arm"], cell["load"], *(f"{share:.2f}" for share in cell["accepted_at"]))
                for cell in document["cells"] if cell["accepted_at"]]
    if accepted:
        width = max(len(line) for line in accepted) - 3
        body += "<h2>Accepted at each position, per draft</h2>" + html_table(
            ("class", "arm", "load", *(str(i + 1) for i in range(width))), [(*line, *[""] * (width + 3 - len(line))) for line in accepted])
    if document.get("spec_bench"):
        for arm, table in document["spec_bench"].items():
            body += f"<h2>Spec-Bench's own report: {escape(arm)}</h2>" + html_table(*spec_bench_lines(table))
    try:
        picture = base64.b64encode(plot(document["cells"])).decode()
        body += f'<h2>Plots</h2><img alt="speed-up by load, acceptance by position" src="data:image/png;base64,{picture}">'
    except Failure:
        body += "<p>No plots: install <code>draftproof[report]</code> for them.</p>"
    facts = json.dumps({name: document[name] for name in ("machine", "versions", "command")}, indent=1)
    file.write_text(page("draftproof bench", f"{body}<h2>Where this was measured</h2><pre>{escape(facts)}</pre>"), encoding="utf-8")


def plot(cells: Sequence[Cell]) -> bytes:
    """PNG: speed-up over off by load, total against per-user speed, acceptance by position. Raises Failure without matplotlib."""
    stream = io.BytesIO()
    try:
        with style.sheet() as colours:
            figure = style.figure(4.2, 14.0)
            draw(figure, colours, cells)
            style.save(figure, stream, "png")
    except ImportError as error:
        raise Failure(str(error)) from None
    return stream.getvalue()


def draw(figure: Any, colours: Mapping[str, str], cells: Sequence[Cell]) -> None:
    speed, pareto, depth = figure.subplots(1, 3)
    whole = [cell for cell in cells if cell["class"] == ALL]
    loads = list(dict.fromkeys(cell["load"] for cell in whole))
    arms = list(dict.fromkeys(cell["arm"] for cell in whole))
    for arm, look in zip(arms, style.looks(colours, len(arms)), strict=True):
        mine = [cell for cell in whole if cell["arm"] == arm]
        known = [cell for cell in mine if cell["speedup"]]
        if known:
            middle = [cell["speedup"]["median"] for cell in known]
            ends = [[0 if cell["speedup"][end] is None else abs(cell["speedup"][end] - m) for m, cell in zip(middle, known, strict=True)]
                    for end in ("low", "high")]
            speed.errorbar([loads.index(cell["load"]) for cell in known], middle, yerr=ends, capsize=3, label=arm, **look)
        total = [cell for cell in mine if cell["total_tokens_per_s"]]
        pareto.plot([cell["tokens_per_s"]["median"] for cell in total], [cell["total_tokens_per_s"]["median"] for cell in total],
                    label=arm, **look)
        for cell in mine[:1]:
            if cell["accepted_at"]:
                depth.plot(range(1, len(cell["accepted_at"]) + 1), cell["accepted_at"], label=arm, **look)
    speed.axhline(1, color=colours["correction"], linewidth=1)
    speed.set(title="speed-up over off (95 %)", xlabel="load", xticks=range(len(loads)), xticklabels=loads)
    speed.yaxis.set_major_formatter("{x:g}×")
    pareto.set(title="whole load against one user", xlabel="tokens/s per user", ylabel="tokens/s total")
    depth.set(title="accepted at position, per draft", xlabel="position", ylim=(0, 1))
    depth.xaxis.get_major_locator().set_params(integer=True)
    for axes in (speed, pareto, depth):
        axes.grid(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)


def write_answers(lines: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Spec-Bench's answer file; its folder is made if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
