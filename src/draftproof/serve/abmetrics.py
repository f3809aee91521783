"""An experiment for Prometheus: `draftproof:ab_*`. Quantiles are of a sample of the requests since it began, as gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..bench.cells import percentile
from .ab import ALL, TIMES, Cell
from .abreport import QUANTILES, Snapshot, snapshot
from .experiment import Experiment
from .metrics import PREFIX
from .rollout import State

Labels = dict[str, str]


class AbMetrics:
    """A Prometheus collector."""

    def __init__(self, model: str, experiment: Experiment) -> None:
        self._model, self._experiment = model, experiment

    def collect(self) -> Iterator[Metric]:
        found = snapshot(self._experiment)
        about = {"model_name": self._model, "experiment": self._experiment.name}
        yield from self._rollout(found.head, about)
        yield from _cells(found, about)
        yield from _replays(found, about)
        yield from _drift(found.head["drift"]["classes"], about)

    def _rollout(self, head: dict[str, Any], about: Labels) -> Iterator[Metric]:
        labels = {name.replace(" ", "_"): version for name, version in head["versions"].items()}
        yield _family("ab_info", "What is compared: versions as labels.", [({**about, **labels}, 1)])
        rollout = head["rollout"]
        states = [({**about, "state": state}, float(state == rollout["state"])) for state in get_args(State)]
        yield _family("ab_state", "1 for the state it is in.", states)
        yield _family("ab_share", "Of requests that the candidate writes.", [(about, rollout["share"])])
        yield _family("ab_stage", "Of the roll-out, from 0.", [(about, rollout["at"])])
        yield _family("ab_returns", "Times that a rule turned the candidate back.", [(about, rollout["returns"])], counter=True)
        left = [({**about, "reason": reason}, count) for reason, count in head["left_out"].items()]
        yield _family("ab_left_out", "Requests that were not compared, by reason.", left, counter=True)


def _cells(found: Snapshot, about: Labels) -> Iterator[Metric]:
    rows = [({**about, "source": source, "arm": arm, "prompt_class": name}, cell)
            for source, book in found.books.items() for (arm, name), cell in sorted(book.cells.items()) if name != ALL]
    counts: dict[str, tuple[str, Callable[[Cell], int]]] = {
        "ab_requests": ("Requests that ended.", lambda cell: cell.requests),
        "ab_failures": ("Requests that failed.", lambda cell: cell.failed),
        "ab_mixed": ("Requests that shared the engine with the other arm.", lambda cell: cell.mixed),
        "ab_rounds": ("Rounds.", lambda cell: cell.tally.rounds),
        "ab_tokens": ("Tokens written.", lambda cell: cell.tally.completion_tokens),
        "ab_draft_tokens": ("Tokens drafted.", lambda cell: cell.tally.drafted),
        "ab_accepted_tokens": ("Drafted tokens that stood.", lambda cell: cell.tally.accepted)}
    for name, (what, count) in counts.items():
        yield _family(name, what, [(labels, count(cell)) for labels, cell in rows], counter=True)
    for time in TIMES:
        sampled = [(labels, sorted(cell.times[time].values)) for labels, cell in rows]
        values = [({**labels, "quantile": str(share)}, percentile(each, share))
                  for labels, each in sampled if each for share in QUANTILES.values()]
        yield _family(f"ab_{time.removesuffix('_s')}_seconds", f"{time.removesuffix('_s')} of requests.", values)
    yield _family("ab_drafter_bytes", "Of the arm's drafter.", [(labels, cell.draft_bytes) for labels, cell in rows])


def _replays(found: Snapshot, about: Labels) -> Iterator[Metric]:
    ends = [({**about, "outcome": name}, count) for name, count in found.head["replays"].items() if name != "waiting"]
    yield _family("ab_replays", "Answers to be written again with both arms, by what came of it.", ends, counter=True)
    texts = [({**about, "prompt_class": name, "differed": which}, count) for name, one in sorted(found.matches.items()) if name != ALL
             for which, count in (("neither", one.identical), ("candidate", one.gained), ("control", one.lost), ("both", one.both))]
    yield _family("ab_texts", "Texts written again, by the arms under which they differed.", texts, counter=True)


def _drift(rows: list[dict[str, Any]], about: Labels) -> Iterator[Metric]:
    labelled = [({**about, "arm": row["arm"], "prompt_class": row["class"]}, row) for row in rows]
    yield _family("ab_acceptance_baseline", "Share of first guesses that stood, over the trailing requests.",
                  [(labels, row["baseline"]) for labels, row in labelled if row["baseline"] is not None])
    yield _family("ab_acceptance_alarms", "Times that acceptance left its own baseline.",
                  [(labels, row["alarms"]) for labels, row in labelled], counter=True)
    raised = [(labels, 0 if row["settled"] or not row["last_alarm"] else -1 if row["last_alarm"]["direction"] == "fell" else 1)
              for labels, row in labelled]
    yield _family("ab_acceptance_drift", "-1 fell, 1 rose, 0 not, until there is a new baseline.", raised)


def _family(name: str, what: str, values: Sequence[tuple[Labels, float]], counter: bool = False) -> Metric:
    names = list(values[0][0]) if values else []
    kind = CounterMetricFamily if counter else GaugeMetricFamily
    family = kind(PREFIX + name, what, labels=names)
    for labels, value in values:
        family.add_metric([labels[each] for each in names], value)
    return family
