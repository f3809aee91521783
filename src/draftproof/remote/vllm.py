"""vLLM behind `engine.port`: the same requests, answers, switch and trace as the local engine, written by replicas of a server.

Speculation cannot be switched in a running vLLM, so off is another replica: one without a drafter (a *plain* one). A text whose
replica dies goes on at another one from the ids already sent; that is exact up to near ties for greedy texts and a valid sample
otherwise, and its answer says `restarted`.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..core.tally import Tally
from ..engine.admit import Wish, check_prediction, encode, resolve
from ..engine.port import TokenEvent
from ..engine.records import json_options
from ..engine.text import Text
from ..errors import Failure, OptionError
from ..models.target import Target
from ..trace.events import VERSION, Event, PrefillDone, RequestDone, RequestStarted, TokenRecord, TraceStarted
from ..trace.report import Clock, metrics
from ..trace.sinks import Sink
from ..types import Rule, Sampling
from .fleet import Fleet, Replica
from .steps import Step, round_of, steps_of, told_by
from .wire import Arrived, Ended, Lost, News, Refused, Stream
from .writing import Arm, Part, Writing, check, only_plain

log = logging.getLogger("draftproof.remote")

STEP_S = 0.02            # how long a step waits for news
RETRIES = 3              # replicas that one text may lose
PATIENCE_S = 60.0        # for a replica to come up, with a text waiting
GRACE_S = 1.0            # for the report after the end of a text


@dataclass(frozen=True, slots=True)
class Setting:
    """What the replicas were started with."""

    drafter: str = "none"
    depth: int = 0
    rule: Rule = "ratio"
    trace: str = "summary"


class VllmEngine:
    """Implements `engine.port.Port` over a fleet, which outlives it. target: an outline, see `models.outline`."""

    def __init__(self, fleet: Fleet, target: Target, setting: Setting, sinks: Sequence[Sink] = ()) -> None:
        self.fleet, self.target, self.setting = fleet, target, setting
        self.enabled = setting.drafter != "none"
        self._sinks: list[Sink] = list(sinks)
        self._news: queue.SimpleQueue[tuple[Stream, News]] = queue.SimpleQueue()
        self._live: dict[str, Writing] = {}
        self._of: dict[int, Writing] = {}                     # by id of the stream
        self._count, self._began = 0, perf_counter()
        self._done: Counter[str] = Counter()
        self._arms: dict[str, Arm] = {}
        self._tally = Tally()
        self._unknown = target.vocab_size                     # stands for guesses that vLLM does not name
        self._header = self._first_record()
        for sink in self._sinks:
            sink.write(self._header)

    # Requests

    def submit(self, prompt: str | Sequence[int], sampling: Sampling | None = None, *, prompt_class: str | None = None, tenant: str = "",
               speculation: Mapping[str, Any] | None = None) -> list[Writing]:
        """Queue a request; one handle per sample. Raises PromptError or OptionError, queueing nothing."""
        ids = encode(self.target, prompt)
        check(sampling or Sampling())
        options = resolve(self.target, sampling or Sampling())
        spec = self.setting.drafter
        wish = Wish.of(speculation, (spec, spec), None)
        self._check_wish(wish)
        check_prediction(options, wish, None, spec)
        speculate, arm, reason = self._route(wish, options)
        request, now = f"r{self._count}", perf_counter()
        self._count += 1
        ends = () if options.ignore_eos else self.target.eos_ids
        found = [Writing(
            id=request if options.n == 1 else f"{request}/{sample}", request=request, sample=sample, prompt=ids, sampling=options,
            end_ids=frozenset((*ends, *options.stop_token_ids)), limit=min(len(ids) + options.max_tokens, self.target.context),
            text=Text(self.target.tokenizer, ids, options.stop), clock=Clock(now), speculate=speculate, reason=reason, arm=arm,
            setting={"drafter": spec, "depth": self.setting.depth, "rule": self.setting.rule}, prompt_class=prompt_class, tenant=tenant)
            for sample in range(options.n)]
        for writing in found:
            self._live[writing.id] = writing
            self._emit(writing, RequestStarted(writing.id, now - self._began, len(ids), 0, json_options(options), writing.seed,
                                               writing.sample, prompt_class, tenant, ids if self.setting.trace == "full" else None,
                                               self.setting.rule))
            self._begin(writing)
        return found

    def step(self) -> list[TokenEvent]:
        """What arrived since the last step; waits a moment for it."""
        events: list[TokenEvent] = []
        self._look_after()
        wait: float | None = STEP_S if self._live else None
        while True:
            try:
                stream, news = self._news.get(timeout=wait) if wait else self._news.get_nowait()
            except queue.Empty:
                return events
            wait = None
            writing = self._of.get(id(stream))
            if writing is not None:
                events += self._hear(writing, news)

    def cancel(self, request: str) -> None:
        """End a request (all its samples) or one sample; an unknown or finished id is ignored."""
        for writing in [w for w in self._live.values() if request in (w.id, w.request)]:
            writing.finish = "cancelled"
            self._end(writing)

    # Steering and looking

    def set_speculation(self, enabled: bool | None = None, depth_cap: int | None = None, drafter: str | None = None) -> dict[str, Any]:
        """The kill switch: off sends whatever comes from now on to plain replicas. Raises OptionError for what vLLM cannot change."""
        if depth_cap is not None:
            raise OptionError("depth_cap: vLLM's depth is fixed when it starts; restart the server with another --depth, or switch "
                              "speculation off")
        if drafter not in (None, "none", self.setting.drafter):
            raise OptionError(f"drafter={drafter!r}: the replicas run {self.setting.drafter!r}; restart the server with another one")
        if drafter is not None:
            enabled = drafter != "none"
        if enabled is False and self.setting.drafter != "none" and not self.fleet.has(plain=True):
            raise OptionError("speculation cannot be switched off: there is no plain replica to send requests to; start the server with "
                              "--plain-replicas 1 (or --plain-url)")
        if enabled is not None:
            self.enabled = enabled and self.setting.drafter != "none"
        return self._state()

    def stats(self) -> dict[str, Any]:
        """Counts since the engine started; `arms` compare requests with and without speculation."""
        return {
            "requests": {"waiting": sum(not writing.parts for writing in self._live.values()), "running": len(self._live),
                         "done": sum(self._done.values())},
            "uptime_s": perf_counter() - self._began, "completion_tokens": self._tally.completion_tokens,
            "metrics": self._tally.as_metrics(), "speculation": self._state(), "target": self.target.facts.name}

    def events(self, sink: Sink) -> Callable[[], None]:
        """Send every trace event from now on to `sink`; the returned function ends that."""
        self._sinks.append(sink)
        sink.write(self._header)
        return lambda: self._sinks.remove(sink) if sink in self._sinks else None

    def close(self) -> None:
        """Cancel everything. The fleet goes on."""
        for writing in list(self._live.values()):
            self.cancel(writing.id)
        for sink in self._sinks:
            sink.flush()

    # Where a request goes

    def _check_wish(self, wish: Wish) -> None:
        if wish.depth not in (None, "auto", self.setting.depth):
            raise OptionError(f"speculation depth={wish.depth}: vLLM has no depth per request; expected {self.setting.depth}, or "
                              "drafter none")
        if wish.rule not in (None, self.setting.rule):
            raise OptionError(f"speculation rule={wish.rule!r}: these vLLM servers verify by {self.setting.rule!r}")

    def _route(self, wish: Wish, options: Sampling) -> tuple[bool, str, str]:
        """Whether it may run where speculation is on, the arm it counts for, and why. Raises OptionError."""
        if self.setting.drafter == "none":
            return False, "off", "no drafter was given"
        if not self.enabled:
            return False, "off", "speculation is switched off"
        other = only_plain(options)
        if not wish.speculate or other:
            why = f"vLLM refuses {other} while it speculates" if other else "the request asked for no drafter"
            if not self.fleet.has(plain=True):
                raise OptionError(f"{other or 'speculation off'}: {why}, and there is no plain replica; start the server with "
                                  "--plain-replicas 1 (or --plain-url)")
            return False, "off", why
        return True, "speculative", "fixed when the replicas started"

    def _begin(self, writing: Writing) -> None:
        """Ask a replica for what is still to be written; without one, wait."""
        lost = writing.parts[-1].replica if writing.parts else None
        replica = self.fleet.pick(not writing.speculate, lost)
        if replica is None and writing.speculate and self.fleet.has(plain=True):
            replica = self.fleet.pick(True, lost)              # a text is worth more than its speed
            if replica is not None:
                writing.speculate, writing.reason = False, "no speculative replica is up"
                writing.arm = "moved" if writing.output else "off"      # written in part with guesses: it would blur both arms
        if replica is None:
            writing.homeless_since = writing.homeless_since or perf_counter()
            return
        writing.homeless_since = None
        try:
            body = writing.body(replica.model)
        except Failure as error:
            writing.fail(error)
            return self._end(writing)
        writing.parts.append(Part(replica, f"continued at replica {replica.name}" if writing.output else writing.reason))
        replica.live += 1
        replica.served += 1
        writing.stream = Stream(replica.url, replica.key, body, lambda stream, news: self._news.put((stream, news)))
        self._of[id(writing.stream)] = writing

    def _look_after(self) -> None:
        """Texts without a replica get one; texts at a replica that is down leave it."""
        for writing in list(self._live.values()):
            if writing.finish is not None:
                if writing.clock.last is not None and perf_counter() - writing.clock.last > GRACE_S:
                    self._end(writing)
            elif writing.stream is not None and writing.parts[-1].replica.state != "up":
                self._lose(writing, writing.parts[-1].replica.why or "it is down")
            elif writing.stream is None:
                if writing.homeless_since is not None and perf_counter() - writing.homeless_since > PATIENCE_S:
                    writing.fail(Failure(f"no vLLM replica was up for {PATIENCE_S:.0f} s; try again later"))
                    self._end(writing)
                else:
                    self._begin(writing)

    # What replicas say

    def _hear(self, writing: Writing, news: News) -> list[TokenEvent]:
        if isinstance(news, Arrived):
            first = not writing.output
            try:
                events = writing.take(news)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self._lose(writing, f"what it sent is no piece of a text ({type(error).__name__}: {error})")
                return []
            if first and events:
                self._prefilled(writing, news.at)
            return events
        if isinstance(news, Refused):
            self._drop(writing)
            writing.fail(OptionError(f"vLLM refused the request: {news.message}"))
            self._end(writing)
        elif isinstance(news, Lost):
            self._lose(writing, news.reason)
        else:
            self._ended(writing, news)
        return []

    def _prefilled(self, writing: Writing, at: float) -> None:
        writing.tally.prefill()
        record = TokenRecord(writing.output[0], "prefill")
        self._emit(writing, PrefillDone(writing.id, at - self._began, at - writing.clock.submitted, 1, record, writing.pieces[0]))

    def _ended(self, writing: Writing, news: Ended) -> None:
        self._drop(writing)
        if not writing.parts[-1].pieces:
            return self._lose(writing, "it sent no token")
        part, writing.cached = writing.parts[-1], news.cached
        part.report, part.untold = told_by(news.report)
        if part.untold and self._guesses(part.replica) and len(writing.output) > 1:
            part.replica.complain(part.untold)
        if writing.finish is None:                              # vLLM saw an end that we do not know: its own stop tokens
            writing.finish = "length" if writing.said == "length" or len(writing.prompt) + len(writing.output) >= writing.limit else "stop"
            writing.text.end()                    # told with an empty last piece: rare, and only the tail is late
        self._end(writing)

    def _lose(self, writing: Writing, reason: str) -> None:
        """Its replica is gone: whatever is there stays, the rest is asked for elsewhere."""
        part = writing.parts[-1]
        part.untold = "the replica was lost before it told what it drafted"
        self._drop(writing)
        part.replica.failed_once(reason)
        if writing.finish is not None:
            return self._end(writing)                           # the text was whole, only the report is missing
        if len(writing.parts) > RETRIES:
            writing.fail(Failure(f"{len(writing.parts)} replicas were lost while this request ran, the last one: {reason}"))
            return self._end(writing)
        self._begin(writing)

    def _drop(self, writing: Writing) -> None:
        stream, writing.stream = writing.stream, None
        if stream is not None and self._of.pop(id(stream), None) is not None:
            stream.stop()
            writing.parts[-1].replica.live -= 1

    # The books

    def _end(self, writing: Writing) -> None:
        self._drop(writing)
        if self._live.pop(writing.id, None) is None:
            return
        writing.closed = True
        self._rounds(writing)
        assert writing.finish is not None, "ended for a reason"
        numbers = metrics(writing.tally, writing.clock)
        self._emit(writing, RequestDone(writing.id, perf_counter() - self._began, writing.finish, len(writing.output), numbers,
                                        None if writing.failure is None else str(writing.failure)))
        self._tally = self._tally + writing.tally
        self._done[writing.finish] += 1
        self._arms.setdefault(writing.arm, Arm()).add(writing)

    def _rounds(self, writing: Writing) -> None:
        """Every step of the text as a round, now that it is known what they were."""
        done, number = 0, 0
        before = writing.clock.first or 0.0
        for index, part in enumerate(writing.parts):
            pieces = list(part.pieces)
            if not done and pieces:
                done, pieces[0] = 1, (pieces[0][0], pieces[0][1] - 1)     # the prefill's token
                index = 0
            first: list[Step] = []
            if index and done and pieces:                        # a continued text begins with a prefill, and without a draft
                first, pieces[0] = [Step(pieces[0][0], 1, 0)], (pieces[0][0], pieces[0][1] - 1)
            guessing = self._guesses(part.replica)
            for step in (*first, *steps_of([piece for piece in pieces if piece[1]], part.report, guessing)):
                end = done + step.emitted
                record = round_of(step, number, writing.id, writing.output[done:end], len(writing.prompt) + done,
                                  "".join(writing.pieces[done:end]), max(0.0, step.at - before), self._began, part.replica.live + 1,
                                  self.setting.drafter if guessing else "none", self.setting.depth, part.reason, self._unknown,
                                  part.untold)
                writing.tally.round(step.drafted, step.accepted, step.rejected, step.emitted)
                writing.clock.spent(record.times)
                self._emit(writing, record)
                done, number, before = end, number + 1, step.at

    def _guesses(self, replica: Replica) -> bool:
        return not replica.plain and self.setting.drafter != "none"

    def _emit(self, writing: Writing, event: Event) -> None:
        writing.records.append(event)
        for sink in self._sinks:
            sink.write(event)

    def _state(self) -> dict[str, Any]:
        replicas = [replica.as_dict() for replica in self.fleet.replicas]
        up = [replica for replica in self.fleet.replicas if replica.state == "up" and not replica.plain]
        if self.setting.drafter == "none":
            state, reason = "none", "no drafter was given"
        elif not self.enabled:
            state, reason = "off", "speculation is switched off: requests go to plain replicas"
        elif not up:
            state, reason = "out of service", "no speculative replica is up"
        else:
            state, reason = "on", f"{len(up)} speculative replicas are up"
        return {"state": state, "drafter": self.setting.drafter, "depth": self.setting.depth if state != "none" else 0,
                "rule": self.setting.rule, "reason": reason, "engine": "vllm", "replicas": replicas,
                "arms": {name: arm.as_dict() for name, arm in sorted(self._arms.items())}}

    def _first_record(self) -> TraceStarted:
        tokenizer = self.target.tokenizer
        words = None
        if self.setting.trace == "full" and tokenizer is not None:
            words = (*(tokenizer.piece(i) for i in range(self.target.vocab_size)), "(not told)")
        machine = {"engine": "vllm", "device": "remote", "tier": 0, "invisible": self.target.facts.invisible_reason,
                   "unknown_token": self._unknown, "times": "score_s is the whole of a step, drafting included"}
        return TraceStarted(VERSION, self.target.facts.name, self.setting.drafter, self.setting.rule, str(self.setting.depth), machine,
                            words)


__all__ = ["Fleet", "Replica", "Setting", "VllmEngine"]
