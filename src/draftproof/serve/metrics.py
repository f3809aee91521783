"""Numbers for Prometheus: a sink that adds up the trace's rounds, the times of tickets, and a collector that shows them.

Names after the prefix are vLLM's, so that its tools work; counts are `core.tally`'s. Series of speculation appear with the
first draft: absent, not zero, while it is off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Lock
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .. import __version__
from ..core.tally import Tally
from ..trace.events import Event, PrefillDone, RequestDone, RequestStarted, RoundDone
from ..trace.sinks import Null
from .refusal import Refusal
from .ticket import Ticket

PREFIX = "draftproof:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PARTS = ("draft", "score", "verify", "other")


class Metrics(Null):
    """A trace sink and a Prometheus collector. `look` gives what only the server knows: gauges by name, and counters (…_total).

    Labels: model_name, and prompt_class (at most `classes` of them, then "other").
    """

    def __init__(self, model: str, classes: int, look: Callable[[], dict[str, float]]) -> None:
        self._model, self._most, self._look, self._lock = model, classes, look, Lock()
        self._class_of: dict[str, str] = {}                  # of live requests
        self._tallies: dict[str, Tally] = {}
        self._prompt_tokens: Counter[str] = Counter()
        self._cached_tokens: Counter[str] = Counter()        # of the prompts
        self._depths: Counter[tuple[str, int]] = Counter()
        self._ends: Counter[tuple[str, str]] = Counter()
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._last: dict[str, float] = {}                    # when something was last delivered, of live requests
        self._depth, self._reason = 0, "no round yet"
        self._draft_bytes, self._kv_lost = 0, 0
        self.refusals: Counter[int] = Counter()
        self.switches = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(PREFIX + name, what, ("model_name", "prompt_class"), buckets=SECONDS, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "Submission to first token, the queue included.")
        self._tpot = histogram("time_per_output_token_seconds", "Seconds per token after the first delivery.")
        self._gap = histogram("inter_chunk_seconds", "Between two rounds of one text, whatever is streamed of them.")
        self._queue = histogram("request_queue_time_seconds", "Submission to the engine's taking it.")
        self._whole = histogram("e2e_request_latency_seconds", "Submission to the end of the text, the queue included.")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # Times as clients see them, over the queue and the crashes that a trace knows nothing of

    def follow(self, ticket: Ticket) -> None:
        """Measure the texts of a ticket that is about to be submitted."""
        tell, left = ticket.news, set(range(ticket.samples))

        def news() -> None:
            ended = left & ticket.completions.keys() if not ticket.done else set(left)
            left.difference_update(ended)
            if ended:
                self._ended(ticket, ended, monotonic())
            tell()

        ticket.news = news

    def _ended(self, ticket: Ticket, samples: set[int], now: float) -> None:
        ends = [end for sample in samples if (end := ending(ticket, sample)) is not None]
        if not ends:
            return
        with self._lock:
            name = self._bounded(ticket.prompt_class or "")
            self._tallies.setdefault(name, Tally())          # which bounds the names
            self._ends.update((name, end) for end in ends)
        if ticket.admitted is None:
            return
        for sample in samples:
            if sample in ticket.first:
                self._ttft.labels(self._model, name).observe(ticket.first[sample] - ticket.queued)
            self._whole.labels(self._model, name).observe(now - ticket.queued)
            self._queue.labels(self._model, name).observe(ticket.admitted - ticket.queued)

    # The trace's side

    def write(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RoundDone):
                self._round(event)
            elif isinstance(event, RequestStarted):
                self._class_of[event.request] = name = self._bounded(event.prompt_class or "")
                self._tallies.setdefault(name, Tally())
                self._prompt_tokens[name] += event.prompt_tokens
                self._cached_tokens[name] += event.cached_tokens
                self._last[event.request] = event.at_s
            elif isinstance(event, PrefillDone):
                self._tallies[self._class_of[event.request]].prefill(event.passes)
                self._last[event.request] = event.at_s
            elif isinstance(event, RequestDone):
                self._done(event)
            else:                                            # another engine: nothing of the old one lives
                self._class_of.clear()
                self._last.clear()

    def _round(self, event: RoundDone) -> None:
        name = self._class_of[event.request]
        fates = [node.fate for node in event.nodes]
        self._tallies[name].round(len(fates), fates.count("accepted"), fates.count("rejected"), len(event.tokens))
        self._depths[name, event.depth] += 1
        share = 1 / event.batch                              # a shared pass is in the record of every sequence of the batch
        times = event.times
        for part, seconds in zip(PARTS, (times.draft_s, times.score_s, times.verify_s, times.other_s), strict=True):
            self._parts[part] += seconds * share
        self._depth, self._reason = event.depth, event.reason
        self._gap.labels(self._model, name).observe(max(0.0, event.at_s - self._last[event.request]))
        self._last[event.request] = event.at_s

    def _done(self, event: RequestDone) -> None:
        name, found = self._class_of.pop(event.request, None), event.metrics
        self._last.pop(event.request, None)
        if name is None:                                     # it ended in the queue
            return
        self._draft_bytes, self._kv_lost = found["draft_bytes"], found["kv_tokens_lost"]
        if found["tpot_s"] is not None:
            self._tpot.labels(self._model, name).observe(found["tpot_s"])

    def _bounded(self, name: str) -> str:
        known = name in self._tallies or len(self._tallies) < self._most
        return name if known else "other"

    # Prometheus's side

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = [*self._texts(), *self._speculation(), *self._rounds()]
        yield from found
        for name, value in self._look().items():
            yield (self._total if name.endswith("_total") else self._gauge)(name, "Of the server, now.", value)
        build = GaugeMetricFamily(PREFIX + "build_info", "What serves.", labels=("model_name", "version"))
        build.add_metric((self._model, __version__), 1)
        yield build

    def _texts(self) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Tokens of prompts, a prompt once per sample.", self._prompt_tokens)
        if any(self._cached_tokens.values()):                # engines elsewhere do not say
            yield self._counter("prefix_cache_queries", "Tokens of prompts that were looked for.", self._prompt_tokens)
            yield self._counter("prefix_cache_hits", "Those that were found.", self._cached_tokens)
        yield self._counter("generation_tokens", "Tokens written.", {n: t.completion_tokens for n, t in self._tallies.items()})
        passes = {name: tally.target_passes for name, tally in self._tallies.items()}
        yield self._counter("target_passes", "Rounds and prefill passes, per sequence.", passes)
        ends = CounterMetricFamily(PREFIX + "request_success", "Texts by the reason they ended.",
                                   labels=("model_name", "prompt_class", "finished_reason"))
        for (name, finish), count in self._ends.items():
            ends.add_metric((self._model, name, finish), count)
        yield ends
        refusals = CounterMetricFamily(PREFIX + "refusals", "Requests refused, by status.", labels=("model_name", "status"))
        for status, count in list(self.refusals.items()):       # the loop counts on meanwhile
            refusals.add_metric((self._model, str(status)), count)
        yield refusals
        yield self._total("speculation_changes", "Times that the runtime switch was used.", self.switches)

    def _speculation(self) -> Iterator[Metric]:
        drafted = {name: tally for name, tally in self._tallies.items() if tally.rounds_drafted}
        if not drafted:
            return
        each: dict[str, Callable[[Tally], int]] = {
            "drafts": lambda t: t.rounds_drafted, "draft_tokens": lambda t: t.drafted, "accepted_tokens": lambda t: t.accepted,
            "rejected_tokens": lambda t: t.rejected, "discarded_tokens": lambda t: t.drafted - t.accepted - t.rejected}
        for name, count in each.items():
            values = {prompt_class: count(tally) for prompt_class, tally in drafted.items()}
            yield self._counter(f"spec_decode_num_{name}", f"Speculation: {name.replace('_', ' ')}.", values)
        places = CounterMetricFamily(PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Drafts whose token of this position stood.",
                                     labels=("model_name", "prompt_class", "position"))
        for name, tally in drafted.items():
            for position, passed in enumerate(tally.passed):
                places.add_metric((self._model, name, str(position)), passed)
        yield places
        yield self._gauge("spec_decode_passes_saved", "Tokens beyond one per target pass.", sum(t.passes_saved for t in drafted.values()))
        yield self._gauge("spec_decode_drafter_bytes", "Of the drafter's weights.", self._draft_bytes)
        yield self._gauge("spec_decode_kv_tokens_lost", "Tokens of cache that the drafter's weights displace.", self._kv_lost)

    def _rounds(self) -> Iterator[Metric]:
        rounds = CounterMetricFamily(PREFIX + "rounds", "Rounds by the depth they were granted.",
                                     labels=("model_name", "prompt_class", "depth"))
        for (name, depth), count in sorted(self._depths.items()):
            rounds.add_metric((self._model, name, str(depth)), count)
        yield rounds
        seconds = CounterMetricFamily(PREFIX + "round_seconds", "Where the time of rounds went.", labels=("model_name", "part"))
        for part, spent in self._parts.items():
            seconds.add_metric((self._model, part), spent)
        yield seconds
        yield self._gauge("spec_decode_depth", "Of the last round.", self._depth)
        reason = GaugeMetricFamily(PREFIX + "spec_decode_reason", "Why the last round had its depth.", labels=("model_name", "reason"))
        reason.add_metric((self._model, re.sub(r"\d[\d.]*", "N", self._reason)[:120]), 1)
        yield reason

    def _counter(self, name: str, what: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, what, labels=("model_name", "prompt_class"))
        for prompt_class, value in values.items():
            family.add_metric((self._model, prompt_class), value)
        return family

    def _total(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, what, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, what, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family


def ending(ticket: Ticket, sample: int) -> str | None:
    """How a text of a ticket ended: as the engine says, or by what kept it from its end. None: it was refused before it was one."""
    if sample in ticket.completions:
        return ticket.completions[sample].finish_reason
    if isinstance(ticket.error, Refusal):
        found = "stopped" if ticket.error.code == "stopping" else {499: "cancelled", 504: "deadline"}.get(ticket.error.status)
        if found is not None:
            return found
    return None if ticket.admitted is None else "error"


def as_gauges(state: dict[str, Any]) -> dict[str, float]:
    """The state of speculation as numbers: one gauge per state that there is, and the operator's cap, if there is one."""
    states, cap = ("none", "off", "out of service", "on"), state.get("depth_cap")
    gauges = {f"spec_decode_state_{name.replace(' ', '_')}": float(state["state"] == name) for name in states}
    return gauges if cap is None else {**gauges, "spec_decode_depth_cap": float(cap)}
