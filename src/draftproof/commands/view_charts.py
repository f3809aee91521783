"""draftproof view --chart: pictures of a trace, PNG or SVG, from the same numbers as its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Failure, OptionError
from ..view import charts, charts_time, charts_token, style
from .console import note
from .view_files import replacing

if TYPE_CHECKING:
    from ..trace.events import Event, RoundDone
    from ..trace.figures import Run

    Draw = Callable[[Any, style.Colours, Any], None]

CHARTS = ("acceptance", "pays", "gantt", "rounds", "timeline", "tree", "verification", "compare")
FORMS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Wish:
    """What to draw. request: an id or a number; None: the first with guesses, and for acceptance, pays and compare all of them."""

    names: tuple[str, ...]
    out: Path
    theme: str = "light"
    request: str | None = None
    round: int | None = None
    token: int | None = None
    other: Path | None = None

    @classmethod
    def of(cls, chart: str | None, out: Path | None, **more: Any) -> Wish | None:
        """From the command line; None without --chart. Raises OptionError."""
        if chart is None:
            given = [name for name, value in (("out", out), *more.items()) if value is not None]
            if given:
                raise OptionError(f"--{given[0].replace('other', 'with')} without --chart: name what to draw: {', '.join(CHARTS)} or all")
            return None
        if out is None:
            raise OptionError("--chart without --out: name a FILE.svg, a FILE.png, or a folder for several charts")
        names = CHARTS if chart == "all" else tuple(dict.fromkeys(name.strip() for name in chart.split(",")))
        unknown = [name for name in names if name not in CHARTS]
        if unknown:
            raise OptionError(f"--chart {unknown[0]}: no such chart; expected {', '.join(CHARTS)}, or all")
        if out.suffix in FORMS and len(names) > 1:
            raise OptionError(f"--out {out}: one file for {len(names)} charts; name a folder, which gets one SVG of each")
        if out.suffix not in FORMS and (out.suffix or out.is_file()) and not out.is_dir():
            raise OptionError(f"--out {out}: expected FILE.svg, FILE.png or a folder")
        if not out.absolute().parent.is_dir():
            raise OptionError(f"--out {out}: the folder does not exist; create it, or name a place elsewhere")
        if "compare" in names and chart != "all" and more.get("other") is None:
            raise OptionError("--chart compare draws two traces; name the second one: --with OTHER")
        return cls(names, out, **{name: value for name, value in more.items() if value is not None})

    @property
    def single(self) -> bool:
        """Whether `out` is the picture, not a folder of several."""
        return self.out.suffix in FORMS

    def file(self, name: str) -> Path:
        """Where the chart of that name goes."""
        return self.out if self.single else self.out / f"{name}.svg"

    @property
    def files(self) -> list[Path]:
        return [self.file(name) for name in self.names]


def draw(wish: Wish, read: Callable[[Path], Iterable[Event]], trace: Path) -> list[Path]:
    """Draw all that is wished and return the files. `read` gives a trace's events, as often as asked. Raises Failure, also for a chart
    that this trace cannot have; under `all` such a chart is left out with a note."""
    from ..trace.figures import runs

    found = runs(read(trace))
    done = []
    if not wish.single:
        wish.out.mkdir(exist_ok=True)
    for name in wish.names:
        try:
            painter, data, height = _prepare(name, wish, read, trace, found)
        except Failure as error:
            if len(wish.names) == 1 or wish.names != CHARTS:
                raise
            note(f"{name} is left out: {error}")
            continue
        file = wish.file(name)
        _paint(painter, data, height, file, wish.theme)
        done.append(file)
    if not done:
        raise Failure(f"{trace}: nothing of it could be drawn")
    return done


def _paint(painter: Draw, data: Any, height: float, file: Path, theme: str) -> None:
    try:
        with style.sheet(theme) as colours, replacing(file) as half:
            figure = style.figure(height)
            painter(figure, colours, data)
            style.save(figure, half, file.suffix[1:])
    except ImportError as error:
        raise Failure(str(error)) from error


def _prepare(name: str, wish: Wish, read: Callable[[Path], Iterable[Event]], trace: Path, found: list[Run]) -> tuple[Draw, Any, float]:
    """(what draws it, its numbers, inches of height). Raises Failure if the trace lacks them."""
    from ..trace import figures

    if not found:
        raise Failure(f"{trace}: no request in it")
    if name in ("acceptance", "pays", "compare"):
        chosen = found if wish.request is None else [_chosen(found, wish.request, trace)]
        if name == "acceptance":
            numbers = figures.acceptance(chosen)
            if not numbers.positions:
                raise Failure(f"{trace}: nothing was guessed in rounds that it tells of, so there is no acceptance by position")
            return charts.acceptance, numbers, 7.2
        if name == "pays":
            lines = figures.payoffs(found, chosen)
            if not lines:
                raise Failure(f"{trace}: no round with a guess and a time, so nothing can be said of speed")
            return charts.pays, lines, 5.4
        if wish.other is None:
            raise Failure("a second trace is needed (--with OTHER)")
        theirs = figures.runs(read(wish.other))
        changes = figures.changes(chosen, theirs)
        if not changes:
            raise Failure(f"{trace} and {wish.other} have no metric in common")
        shares = [figures.acceptance(group).positions for group in (chosen, theirs)]
        return charts.compare, (trace.name, wish.other.name, changes, *shares), 5.0
    run = _chosen(found, wish.request, trace)
    if not run.rounds:
        raise Failure(f"{trace}: request {run.started.request} has no round")
    off = figures.without_guesses(found, run)
    plain = figures.plain(found, [run])
    if name == "timeline":
        return charts_time.timeline, (run, off, plain), 4.6
    if name == "rounds":
        return charts_time.rounds, (run, _first(wish, run, trace)), 4.8
    if name == "gantt":
        if not any(one.seconds for one in run.rounds):
            raise Failure(f"{trace}: request {run.started.request} has no times of its rounds")
        return charts_time.gantt, (run, off, plain, _first(wish, run, trace)), 5.4
    return _of_a_round(name, wish, read(trace), trace, run)


def _chosen(found: Sequence[Run], request: str | None, trace: Path) -> Run:
    """The request of that id or number, or the first one that tells most: with guesses, with rounds."""
    if request is None:
        return next((run for run in found if run.guesses and run.rounds), next((run for run in found if run.rounds), found[0]))
    named = [run for run in found if run.started.request == request]
    if named:
        return named[0]
    if request.isdigit() and int(request) < len(found):
        return found[int(request)]
    raise Failure(f"{trace}: no request {request!r}; expected an id as the trace has it, or a number from 0 to {len(found) - 1}")


def _first(wish: Wish, run: Run, trace: Path) -> int:
    """Where the rounds that a chart shows begin."""
    found = next((place for place, one in enumerate(run.rounds) if one.number == wish.round), None)
    if wish.round is not None and found is None:
        raise _no_round(wish, run, trace)
    return found or 0


def _no_round(wish: Wish, run: Run, trace: Path) -> Failure:
    return Failure(f"{trace}: request {run.started.request} has no round {wish.round}; expected 0 to {run.rounds[-1].number}")


def _of_a_round(name: str, wish: Wish, events: Iterable[Event], trace: Path, run: Run) -> tuple[Draw, Any, float]:
    from ..trace.judged import judgement

    record, vocabulary = _record(events, wish.round, run)
    if record is None:
        raise _no_round(wish, run, trace)

    def piece(token: int) -> str:
        return vocabulary[token] if token < len(vocabulary) else f"#{token}"

    if name == "tree":
        return charts_token.tree, (record, piece), charts_token.tree_size([node.parent for node in record.nodes])
    tokens = record.tokens
    if not tokens:
        raise Failure(f"{trace}: round {record.round} emitted nothing; name another with --round")
    place = wish.token if wish.token is not None else len(tokens) - 1 if tokens[-1].role == "correction" else 0
    if place >= len(tokens):
        raise Failure(f"{trace}: round {record.round} emitted {len(tokens)} tokens, counted from 0; there is no --token {place}")
    if tokens[place].p is None:
        raise Failure(f"{trace}: no probabilities in it (level summary, or imported); write one with --trace-level full")
    return charts_token.verification, (record, place, judgement(run.started, record, place), piece), 4.8


def _record(events: Iterable[Event], number: int | None, run: Run) -> tuple[RoundDone | None, tuple[str, ...]]:
    """The round of that number, or without one the first of those that say most: guesses that stood, and one that fell. And the
    token texts of its target, from the request's header or an earlier one."""
    from ..trace.events import RequestStarted, RoundDone, TraceStarted

    best: RoundDone | None = None
    most, ordinal, mine, words = (0, False), -1, False, dict[str, tuple[str, ...]]()
    for event in events:
        if isinstance(event, TraceStarted):
            words[event.target] = event.vocabulary or words.get(event.target, ())
        elif isinstance(event, RequestStarted):
            ordinal += 1
            if event.request == run.started.request:            # of several engines in one trace, each may have this id
                if mine:
                    break
                mine = ordinal == run.index
        elif mine and isinstance(event, RoundDone) and event.request == run.started.request:
            says = (len({node.fate for node in event.nodes}), "accepted" in {token.role for token in event.tokens[:1]})
            if event.round == number or number is None and (best is None or says > most):
                best, most = event, says
    return best, words.get(run.header.target, ())
