"""draftproof view: a trace as a page, as one HTML file, as charts, as lines on a terminal, or for Perfetto."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ..errors import Failure, OptionError
from ..view import bundle, perfetto, server, terminal
from .console import note
from .view_charts import CHARTS, Wish, draw
from .view_files import check_apart, replacing

if TYPE_CHECKING:
    from ..trace.events import Event

EMBEDDED_LIMIT = 1_700_000              # bytes of a packed trace, so that the demo's page stays under 2 MB
MOST_NOTES = 8


@click.command(short_help="Show a trace: the page, an HTML file, charts, lines on a terminal.")
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--import", "engine", type=click.Choice(("auto", "vllm", "llamacpp")),
              help="TRACE holds answers of another engine.  [default: auto, where it is no trace]")
@click.option("--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT",
              help="Write what was imported as a trace.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT",
              help="Write one self-contained HTML file.")
@click.option("--terminal", "on_terminal", is_flag=True, help="Print one line a round.")
@click.option("--perfetto", "perfetto_file", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT",
              help="Write Chrome's trace format, for ui.perfetto.dev.")
@click.option("--chart", metavar="NAMES", help=f"Draw {', '.join(CHARTS)} (several with commas), or all.")
@click.option("--out", type=click.Path(path_type=Path), metavar="PATH", help="Of --chart: FILE.svg, FILE.png, or a folder.")
@click.option("--theme", type=click.Choice(("light", "dark")), help="Of --chart.  [default: light]")
@click.option("--request", metavar="ID|N", help="Of --chart: this request only.  [default: the first with guesses, or all]")
@click.option("--round", type=click.IntRange(0), metavar="N", help="Of --chart: the round of a tree, the first one of a time line.")
@click.option("--token", type=click.IntRange(0), metavar="N", help="Of --chart verification: which token of the round, from 0.")
@click.option("--with", "other", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="OTHER",
              help="Of --chart compare: the second trace.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Port of the page on 127.0.0.1.  [default: a free one]")
@click.option("--no-open", is_flag=True, help="Serve the page without opening a browser.")
def view(trace: Path, engine: str | None, trace_file: Path | None, html_file: Path | None, on_terminal: bool, perfetto_file: Path | None,
         chart: str | None, out: Path | None, port: int | None, no_open: bool, **picked: Any) -> None:
    """Show TRACE, a file that --trace FILE wrote. Without an option a local server shows the page until interrupted.

    TRACE may also hold answers of vLLM or llama.cpp: whatever they tell of their rounds is shown in the same way.
    """
    if not trace.is_file():
        raise OptionError(f"{trace}: no such file; expected a trace, as `draftproof generate --trace FILE` writes it")
    wish = Wish.of(chart, out, **picked)
    outputs = [name for name, given in (("--trace", trace_file), ("--html", html_file), ("--terminal", on_terminal),
                                        ("--perfetto", perfetto_file), ("--chart", wish)) if given]
    if outputs and (port is not None or no_open):
        raise OptionError(f"{' and '.join(outputs)} with --port or --no-open: those are for the page that is served")
    for file in (html_file, perfetto_file, trace_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise OptionError(f"{file}: the folder does not exist; create it, or name a file elsewhere")
    check_apart([("TRACE", trace), ("--with", wish.other if wish else None)],
                [("--trace", trace_file), ("--html", html_file), ("--perfetto", perfetto_file),
                 *(("--chart", file) for file in (wish.files if wish else ()))])
    with ExitStack() as stack:
        asked, trace = trace, as_trace(trace, engine, trace_file, stack)
        if html_file is not None:
            write_page(trace, html_file)
            click.echo(html_file)
        if perfetto_file is not None:
            write_perfetto(trace, perfetto_file)
            click.echo(perfetto_file)
        if wish is not None:
            for file in draw(wish, lambda path: checked(trace if path == asked else path), asked):
                click.echo(file)
        if on_terminal:
            print_lines(trace)
        if not outputs:
            serve_page(trace, port or 0, not no_open)


def as_trace(file: Path, engine: str | None, out: Path | None, stack: ExitStack) -> Path:
    """The file itself if it is a trace; else what its answers tell, as a trace in `out` or in a folder that `stack` removes."""
    from ..remote import answers, imports

    if engine is None and not answers.is_answer(file):
        if out is not None:
            raise OptionError(f"--trace {out}: {file} holds no answers of another engine; nothing is imported")
        return file
    found = imports.load(file, engine or "auto")
    for text in found.notes[:MOST_NOTES]:
        note(text)
    if len(found.notes) > MOST_NOTES:
        note(f"… and {len(found.notes) - MOST_NOTES} more of these")
    from ..trace.sinks import Jsonl

    place = out or Path(stack.enter_context(TemporaryDirectory(prefix="draftproof-"))) / f"{file.stem}.jsonl"
    sink = Jsonl(place)
    for event in found.events:
        sink.write(event)
    sink.close()
    if out is not None:
        click.echo(out)
    return place


def checked(trace: Path) -> Iterator[Event]:
    """The events of a trace. Raises Failure on what is none, an empty file and a foreign beginning included."""
    from ..trace.events import TraceStarted
    from ..trace.sinks import read_trace

    begun = False
    for event in read_trace(trace):
        if not begun and not isinstance(event, TraceStarted):
            raise Failure(f"{trace}: the first record is {event.event}, expected trace_started; is the beginning of the file missing?")
        begun = True
        yield event
    if not begun:
        raise Failure(f"{trace}: no record in it; expected a trace, as `draftproof generate --trace FILE` writes it")


def write_page(trace: Path, out: Path, limit: int | None = None, vocabulary: list[str] | None = None) -> None:
    """One HTML file with the trace inside; with a limit (bytes, packed) only as many whole requests as fit, which the page says.

    vocabulary: token texts for a trace of level summary, which has none.
    """
    from ..trace.sinks import trace_lines

    for _ in checked(trace):
        pass
    told, lines = "", with_words(trace_lines(trace), vocabulary)
    data, whole = ("".join(lines).encode(), True) if limit is None else bundle.first_requests(lines, limit)
    if not whole:
        told = f"This page holds the first requests of {trace.name}; the file has the rest: draftproof view {trace.name}"
    with replacing(out) as half:
        half.write_text(bundle.page(data, trace.name, told), encoding="utf-8")


def with_words(lines: Iterator[str], vocabulary: list[str] | None) -> Iterator[str]:
    """The lines of a trace; the first header without token texts gets them."""
    for line in lines:
        if vocabulary and line.startswith('{"event":"trace_started"'):
            header: dict[str, Any] = json.loads(line)
            if not header.get("vocabulary"):
                header["vocabulary"], vocabulary = vocabulary, None
                line = json.dumps(header, ensure_ascii=False, separators=(",", ":")) + "\n"
        yield line


def write_perfetto(trace: Path, out: Path) -> None:
    """Chrome's trace format; gzipped when the name ends with .gz, which Perfetto opens too."""
    with replacing(out) as half, (gzip.open(half, "wt", encoding="utf-8") if out.suffix == ".gz" else
                                  half.open("w", encoding="utf-8")) as file:
        perfetto.write(checked(trace), file)


def print_lines(trace: Path) -> None:
    width, colour = terminal_form(sys.stdout)
    screen = terminal.Screen(width, colour)
    for event in checked(trace):
        for line in screen.lines(event):
            click.echo(line, color=colour)


def terminal_form(stream: Any) -> tuple[int, bool]:
    """Columns and whether there is colour: 80 and none unless a terminal says otherwise; NO_COLOR and a dumb terminal have none."""
    if not stream.isatty():
        return 80, False
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        width = 80
    return width or 80, not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Lines:
    """A trace sink that prints each event's lines as it comes: `generate --show`."""

    def __init__(self, stream: Any) -> None:
        width, self._colour = terminal_form(stream)
        self._stream, self._screen = stream, terminal.Screen(width, self._colour)

    def write(self, event: Event) -> None:
        for line in self._screen.lines(event):
            click.echo(line, file=self._stream, color=self._colour)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        pass


def serve_page(trace: Path, port: int, opens: bool) -> None:
    name = "trace.jsonl.gz" if trace.suffix == ".gz" else "trace.jsonl"
    try:
        http = server.serve({name: trace}, port)
    except OSError as error:
        raise Failure(f"port {port} on {server.HOST}: {error.strerror}; choose another with --port, or leave it out") from error
    address = f"http://{server.HOST}:{http.server_address[1]}/?trace={name}"
    click.echo(address)
    if opens:
        import webbrowser

        webbrowser.open(address)
    note("Ctrl+C ends it.")
    try:
        http.serve_forever()
    finally:
        http.server_close()
