"""From counts and times to metrics: of a live request, and of a trace. All counting is `core.tally`'s."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from ..core.tally import Tally
from ..errors import Failure
from ..types import FinishReason
from .events import Event, PrefillDone, RequestDone, RequestStarted, RoundDone, Times, TraceStarted


@dataclass(slots=True)
class Clock:
    """When a request's tokens arrived (seconds of one monotonic clock) and where its rounds' time went."""

    submitted: float
    first: float | None = None
    last: float | None = None
    first_tokens: int = 0                 # delivered at `first`
    tokens: int = 0
    draft_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    def delivered(self, at: float, tokens: int) -> None:
        if self.first is None:
            self.first, self.first_tokens = at, tokens
        self.last = at
        self.tokens += tokens

    def spent(self, times: Times) -> None:
        self.draft_s += times.draft_s
        self.score_s += times.score_s
        self.verify_s += times.verify_s
        self.other_s += times.other_s

    @property
    def ttft_s(self) -> float | None:
        """Submission to first token, time in the queue included. No time at all is one that nobody took."""
        return None if self.first is None or self.first <= self.submitted else self.first - self.submitted

    @property
    def tpot_s(self) -> float | None:
        """(t_last − t_first) / (n_last − n_first): seconds per token after the first delivery."""
        if self.first is None or self.last is None or self.tokens == self.first_tokens or self.last <= self.first:
            return None
        return (self.last - self.first) / (self.tokens - self.first_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """All tokens over the time from submission to the last of them."""
        if self.last is None or self.last <= self.submitted:
            return None
        return self.tokens / (self.last - self.submitted)


def metrics(tally: Tally, clock: Clock, draft_bytes: int = 0, kv_tokens_lost: int = 0) -> dict[str, Any]:
    """The `metrics` of `generate --json`. draft_bytes: of the drafter's weights; kv_tokens_lost: tokens of cache they displace."""
    return {
        **tally.as_metrics(), "draft_bytes": draft_bytes, "kv_tokens_lost": kv_tokens_lost,
        "tokens_per_s": clock.tokens_per_s, "ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s,
        "draft_s": clock.draft_s, "score_s": clock.score_s, "verify_s": clock.verify_s, "other_s": clock.other_s,
    }


@dataclass(slots=True)
class RequestReport:
    """One request as its trace tells it. `finish` is None while it runs, or if the trace was cut.

    own: the drafter that its start names; loaded: the one that the trace's header names. totals: what an engine said of a request
    whose rounds it does not tell (see `remote.imports`).
    """

    request: str
    prompt_class: str | None
    prompt_tokens: int
    clock: Clock
    tally: Tally = field(default_factory=Tally)
    drafter: str = "none"
    finish: FinishReason | None = None
    draft_bytes: int = 0
    kv_tokens_lost: int = 0
    own: str = ""
    loaded: str = "none"
    totals: dict[str, Any] | None = None

    @classmethod
    def of(cls, started: RequestStarted, loaded: str = "none") -> Self:
        return cls(started.request, started.prompt_class, started.prompt_tokens, Clock(started.at_s), own=started.drafter, loaded=loaded)

    def metrics(self) -> dict[str, Any]:
        if self.totals is not None:
            return self.totals
        return metrics(self.tally, self.clock, self.draft_bytes, self.kv_tokens_lost)

    def add(self, event: Event) -> None:
        if isinstance(event, PrefillDone):
            self.tally.prefill(event.passes)
            self.clock.delivered(event.at_s, 1)
        elif isinstance(event, RoundDone):
            fates = [node.fate for node in event.nodes]
            if not 0 <= len(event.tokens) - fates.count("accepted") <= 1:
                raise Failure(f"round {event.round} of request {event.request}: accepted guesses: {fates.count('accepted')}, tokens: "
                              f"{len(event.tokens)}; a round emits what it accepted and at most one token more. Is the trace damaged?")
            self.tally.round(len(fates), fates.count("accepted"), fates.count("rejected"), len(event.tokens))
            self.clock.delivered(event.at_s, len(event.tokens))
            self.clock.spent(event.times)
            parts = set(event.drafter.split("+"))               # of its own drafter, unless another one took over
            self.drafter = self.own if parts <= set(self.own.split("+")) else event.drafter
        elif isinstance(event, RequestDone):
            self.finish = event.finish
            self.draft_bytes = event.metrics.get("draft_bytes") or 0
            self.kv_tokens_lost = event.metrics.get("kv_tokens_lost") or 0
            if not self.tally.rounds and event.completion_tokens > 1:
                self._add_totals(event)

    def _add_totals(self, event: RequestDone) -> None:
        """Counts without rounds; what was not told stays out of the sums."""
        self.totals, said = event.metrics, event.metrics
        self.tally.drafted, self.tally.accepted = said.get("drafted") or 0, said.get("accepted") or 0
        if said.get("rounds") is not None:
            self.tally.rounds, self.tally.emitted = said["rounds"], event.completion_tokens - 1
        if self.tally.drafted:
            self.drafter = self.loaded
        self.clock.delivered(event.at_s, event.completion_tokens - 1)


def requests(events: Iterable[Event]) -> dict[str, RequestReport]:
    """Every request of a trace, in the order in which they started."""
    found: dict[str, RequestReport] = {}
    loaded = "none"
    for event in events:
        if isinstance(event, TraceStarted):
            loaded = event.drafter
        elif isinstance(event, RequestStarted):
            found[event.request] = RequestReport.of(event, loaded)
        elif isinstance(event, PrefillDone | RoundDone | RequestDone) and event.request in found:
            found[event.request].add(event)
    return found


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class of prompts with one drafter. Times are medians over its requests, seconds; `tally` is the sum."""

    prompt_class: str
    drafter: str
    requests: int
    tally: Tally
    tokens_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None


def by_class(reports: Iterable[RequestReport]) -> list[ClassRow]:
    """The per-class table, sorted by class and drafter. A request without a class is in class ""."""
    groups: dict[tuple[str, str], list[RequestReport]] = {}
    for report in reports:
        groups.setdefault((report.prompt_class or "", report.drafter), []).append(report)
    rows = []
    for (name, drafter), group in sorted(groups.items()):
        total = sum((r.tally for r in group), Tally())
        rows.append(ClassRow(name, drafter, len(group), total, _median(r.clock.tokens_per_s for r in group),
                             _median(r.clock.ttft_s for r in group), _median(r.clock.tpot_s for r in group)))
    return rows


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None
