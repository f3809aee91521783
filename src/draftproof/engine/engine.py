"""The local engine: what `port.Port` asks for, over one target, its drafters and one batch."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from math import ceil
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch

from ..config import EngineConfig, LoadConfig, SpeculationConfig
from ..core.tally import Tally
from ..drafters.base import Drafter
from ..errors import CacheFull, Failure, OptionError, PromptError
from ..models.target import Target
from ..trace.events import VERSION, TraceStarted
from ..trace.report import metrics
from ..trace.sinks import Sink
from ..types import Commit, Rule, Sampling, is_integer
from . import ahead
from .admit import Wish, check_limits, check_prediction, encode, resolve, sequences
from .batch import Batch
from .costs import PassCosts
from .lanes import Lanes
from .memory import Pressure, free_share, freeze
from .plans import Control
from .port import Completion, TokenEvent
from .profile import profile
from .records import Recorder
from .sequence import Sequence
from .setup import check_depth, control_of, draft_bytes, open_drafter, open_target, spec_of
from .speculation import UNASKED, Speculation
from .turn import Turn


class Request:
    """One sample of a request on its way (`port.Handle`)."""

    def __init__(self, engine: Engine, seq: Sequence) -> None:
        self._engine, self._seq = engine, seq
        self._final: Completion | None = None
        self.inbox: deque[TokenEvent] | None = None      # tokens for a stream that has not read them yet

    @property
    def id(self) -> str:
        return self._seq.id

    @property
    def sample(self) -> int:
        return self._seq.sample

    @property
    def seed(self) -> int:
        return self._seq.seed

    @property
    def done(self) -> bool:
        return self._seq.done

    @property
    def error(self) -> BaseException | None:
        """Why it ended with finish reason `error`."""
        return self._seq.error

    def completion(self) -> Completion:
        """What there is of the text; complete, and not changing any more, once `done`."""
        return self._read() if self._final is None else self._final

    def settle(self) -> Completion:
        """Keep the completion as it is now, whatever the engine does later."""
        self._final = self._read()
        return self._final

    def _read(self) -> Completion:
        seq = self._seq
        return Completion(
            text=seq.text.released, token_ids=tuple(seq.output), prompt_tokens=seq.prompt_tokens, finish_reason=seq.finish or "length",
            seed=seq.seed, sample=seq.sample, metrics=self._engine._metrics(seq), speculation=self._engine._speculation_of(seq),
            logprobs=None if seq.sampling.logprobs is None else tuple(seq.logprobs),
            prompt_logprobs=None if seq.sampling.prompt_logprobs is None else tuple(seq.prompt_logprobs), trace=tuple(seq.records),
            error=None if seq.error is None else str(seq.error))


class Engine:
    """Text from a target, faster with a drafter, and not one token different.

    target: a folder, a hub id, a `Target`, or None for the built-in demo model. drafter: a spec such as "ngram:min=2" or a
    `Drafter`. depth: tokens to guess per round, or "auto". tree: most nodes per round (None: chains). sinks: where trace
    events go besides `Completion.trace`. others: further drafters that are loaded, which a request may name in `speculation`.
    Of one thread at a time: what another one asks while a round runs is refused. Raises OptionError, SpecError or LoadError.
    """

    def __init__(self, target: str | PathLike[str] | Target | None = None, drafter: str | Drafter = "none", depth: str | int = "auto", *,
                 tree: int | None = None, rule: Rule = "match", load: LoadConfig | None = None, config: EngineConfig | None = None,
                 sinks: abc.Iterable[Sink] = (), others: abc.Iterable[str | Drafter] = ()) -> None:
        self.load, self.config = load or LoadConfig(), config or EngineConfig()
        if depth != "auto" and not is_integer(depth):
            raise OptionError(f"depth={depth!r}: expected auto or an integer ≥ 0")
        spec = spec_of(drafter)
        self.settings = SpeculationConfig(drafter=spec, depth=None if depth == "auto" else int(depth), tree=tree, rule=rule)
        self._fixed = self.settings.depth                           # as asked: a drafter that comes back after none has it again
        self.target = open_target(target, self.load)
        check_depth(self.target, self.settings)
        experts = self.target.facts.experts
        self._passes = PassCosts(ahead.overlaps(self.target), (experts.count, experts.chosen) if experts else None)
        self.speculation = self._lane(drafter, self.settings)
        self._others = [self._other(other) for other in others]
        self.lanes = Lanes([self.speculation, *(lane for _, lane in self._others)], self._passes)
        self._recorder = Recorder(self.config.trace, sinks, self.config.trace_alternatives)
        self._batch = Batch(self.target, self.lanes, self._recorder, self.config.max_batch, self.load.prefill_chunk)
        self._handles: dict[str, Request] = {}
        self._turn, self._closed = Turn(), False
        self._profile()
        self._count, self._done, self._total = 0, 0, Tally()
        self._recorder.begin(self._header())
        freeze()

    # Requests

    def submit(self, prompt: str | abc.Sequence[int], sampling: Sampling | None = None, *, prompt_class: str | None = None,
               tenant: str = "", speculation: Mapping[str, Any] | None = None) -> list[Request]:
        """Queue a request; one handle per sample. Raises PromptError, OptionError or CacheFull, or Failure if the engine is closed, in a
        round in another thread, or has too many waiting; nothing is queued then."""
        if self._closed:
            raise Failure("this engine is closed; open another one")
        with self._turn:
            return self._queue(prompt, sampling, prompt_class, tenant, speculation)

    def _queue(self, prompt: str | abc.Sequence[int], sampling: Sampling | None, prompt_class: str | None, tenant: str,
               speculation: Mapping[str, Any] | None) -> list[Request]:
        ids = encode(self.target, prompt)
        options = resolve(self.target, sampling or Sampling())
        check_limits(options, self.config.max_samples, self.config.max_logprobs)
        names = [(lane.name, spec) for spec, lane in ((self.settings.drafter, self.speculation), *self._others)]
        wish = Wish.of(speculation, names[0], self.settings.tree, names[1:])
        check_prediction(options, wish, self.lanes.lanes[wish.lane].drafter, names[wish.lane][1])
        if len(self._batch.waiting) + options.n > self.config.max_waiting:
            raise Failure(f"{len(self._batch.waiting)} requests are waiting, the limit is {self.config.max_waiting}; "
                          "try again later, or raise max_waiting")
        seqs = sequences(self.target, f"r{self._count}", ids, options, wish, self.settings.rule, tenant, prompt_class)
        if not self._batch.live:
            self._check_fits(seqs[0])
        self._count += 1
        self._batch.waiting.extend(seqs)
        handles = [Request(self, seq) for seq in seqs]
        self._handles.update((handle.id, handle) for handle in handles)
        return handles

    def step(self) -> list[TokenEvent]:
        """Admit what fits, prefill a chunk of the prompts, run one round; the tokens that arrived, in order."""
        return self._step(every=True)

    def cancel(self, request: str) -> None:
        """End a request (all its samples) or one sample of it; an unknown or finished id is ignored."""
        self._cancel({request})

    def generate(self, prompt: str | abc.Sequence[int], sampling: Sampling | None = None, **options: Any) -> Completion:
        """The whole text. options: fields of `Sampling`, or prompt_class, tenant, speculation. With n > 1 see `samples`."""
        return self.generate_batch([prompt], sampling, **options)[0]

    def generate_batch(self, prompts: abc.Sequence[str | abc.Sequence[int]], sampling: Sampling | abc.Sequence[Sampling] | None = None,
                       **options: Any) -> list[Completion]:
        """The whole texts of many prompts, in rounds they share; one `Sampling` for all, or one each."""
        if isinstance(prompts, str):
            raise PromptError("prompts is one text; expected a list of them, or `generate` for one")
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise OptionError(f"{len(each)} sampling options for {len(prompts)} prompts; expected one for all, or one each")
        groups: list[list[Request]] = []
        try:
            for prompt, wanted in zip(prompts, each, strict=True):
                groups.append(self._submit(prompt, wanted, options))
            while not all(handle.done for group in reversed(groups) for handle in reversed(group)):     # the last ones end last
                self._step(every=False)
        finally:
            self._abandon(groups)
        return [_gather(group) for group in groups]

    def stream(self, prompt: str | abc.Sequence[int], sampling: Sampling | None = None, **options: Any) -> Iterator[TokenEvent]:
        """Tokens as they arrive. A consumer that walks away cancels the request and leaves every cache valid."""
        handles = self._submit(prompt, sampling, options)
        try:
            inbox: deque[TokenEvent] = deque()
            for handle in handles:
                handle.inbox = inbox
            while True:
                while inbox:
                    yield inbox.popleft()
                if all(handle.done for handle in reversed(handles)):
                    break
                self._step(every=False)
        finally:
            self._abandon([handles])
        _gather(handles)

    # Steering and looking

    def set_speculation(self, enabled: bool | None = None, depth_cap: int | None = None,
                        drafter: str | Drafter | None = None) -> dict[str, Any]:
        """Steer guessing from the next round on, also in the middle of texts; None leaves a setting as it is. Returns the new state.

        depth_cap bounds every depth, NO_CAP takes the bound away. A drafter that was out of service can be brought back by naming it.
        Raises OptionError, SpecError or LoadError, changing nothing.
        """
        if depth_cap is not None and not (is_integer(depth_cap) and depth_cap >= 0):
            raise OptionError(f"depth_cap={depth_cap!r}: expected an integer ≥ 0")
        if drafter is not None:
            spec = spec_of(drafter)
            settings = replace(self.settings, drafter=spec, depth=None if spec == "none" else self._fixed)
            worker = open_drafter(drafter, self.target, settings, self.load)
            self.settings = settings
            self.speculation.replace(worker, self._control(worker, self.settings))
            self._profile()
        self.lanes.steer(enabled, depth_cap)
        state = self._state(self.speculation, self.settings.rule, "auto" if self._fixed is None else self._fixed)
        state["depth_cap"] = self.speculation.depth_cap
        if self._others:
            state["others"] = {spec: dict(zip(("state", "reason"), lane.state, strict=True)) for spec, lane in self._others}
        return state

    def stats(self) -> dict[str, Any]:
        """Counts since the engine started: requests by state, the tally of all of them, the target's name, the share of its cache that is
        taken, speculation."""
        tally = sum((seq.tally for seq in self._batch.live), self._total)
        return {
            "requests": {"waiting": len(self._batch.waiting), "running": len(self._batch.live), "done": self._done},
            "uptime_s": self._recorder.at(), "completion_tokens": tally.completion_tokens, "metrics": tally.as_metrics(),
            "speculation": self.set_speculation(), "target": self.target.facts.name, "cache_filled": self.target.filled(),
        }

    def events(self, sink: Sink) -> Callable[[], None]:
        """Send every trace event from now on to `sink`; the returned function ends that."""
        return self._recorder.add(sink)

    def close(self) -> None:
        """Cancel everything, give all memory back, and flush the sinks (whoever opened a sink closes it). No request is taken any more."""
        with self._turn.lock:
            self._closed = True
            for seq in list(self._batch):
                self._batch.end(seq, "cancelled")
            self._settle()
            self.lanes.leave_all()
            self._recorder.flush()

    def __repr__(self) -> str:
        depth = "auto" if self._fixed is None else self._fixed
        return (f"<Engine {self.target.facts.name}, drafter {self.settings.drafter}, depth {depth}, rule {self.settings.rule}"
                f"{', closed' if self._closed else ''}>")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Inside

    def _lane(self, drafter: str | Drafter, settings: SpeculationConfig) -> Speculation:
        worker, device = open_drafter(drafter, self.target, settings, self.load), self.target.device
        return Speculation(worker, self._control(worker, settings), self.target.vocab_size, device, settings.tree,
                           keep_law=self.config.trace == "full", pressure=Pressure(self.config.free_memory, lambda: free_share(device)),
                           trees=self.target.trees)

    def _control(self, drafter: Drafter | None, settings: SpeculationConfig) -> Control:
        return control_of(settings, drafter, self._passes, self.config.least_acceptance)

    def _profile(self) -> None:
        """Time the target's passes, if a controller will want to know, nothing is running, and it has not been done."""
        if self.config.profile_s and self.settings.depth is None and not self._passes.known and not self._batch.live:
            if any(lane.drafter is not None for lane in self.lanes.lanes):
                self.target.set_taps(self.lanes.taps)               # as the passes to come, where a device records them
                profile(self.target, self._passes, self.config.max_batch, self.config.profile_s)

    def _other(self, drafter: str | Drafter) -> tuple[str, Speculation]:
        spec = spec_of(drafter)
        lane = self._lane(drafter, replace(self.settings, drafter=spec))
        if lane.drafter is None:
            raise OptionError(f"others: {spec!r}; expected drafters that guess: none needs no loading")
        return spec, lane

    def _submit(self, prompt: str | abc.Sequence[int], sampling: Sampling | None, options: Mapping[str, Any]) -> list[Request]:
        """`submit` with fields of `Sampling` among the options."""
        ours = {name: options[name] for name in ("prompt_class", "tenant", "speculation") if name in options}
        asked = {name: value for name, value in options.items() if name not in ours}
        if asked:
            sampling = Sampling.of(**{**({f.name: getattr(sampling, f.name) for f in fields(sampling)} if sampling else {}), **asked})
        return self.submit(prompt, sampling, **ours)

    def _step(self, every: bool) -> list[TokenEvent]:
        """`step`; the events of all tokens, or only of those that a stream waits for."""
        with self._turn:
            events = [event for seq, commit in self._batch.step() for event in self._deliver(seq, commit, every)]
            self._settle()
        return events

    def _abandon(self, groups: abc.Sequence[abc.Sequence[Request]]) -> None:
        """Cancel whatever is not done, when its only reader is gone."""
        if left := {handle.id for group in groups for handle in group if not handle.done}:
            self._cancel(left)

    def _cancel(self, names: abc.Set[str]) -> None:
        """names: of requests, or of samples."""
        with self._turn.lock:
            for seq in [seq for seq in self._batch if seq.id in names or seq.request in names]:
                self._batch.end(seq, "cancelled")
            self._settle()

    def _check_fits(self, seq: Sequence) -> None:
        """With nothing else running: refuse what could never run. Raises CacheFull."""
        reach = self._batch.reach(seq)
        if not self.target.fits(reach):
            raise CacheFull(f"a prompt of {seq.prompt_tokens} tokens with max_tokens={seq.sampling.max_tokens} may need {reach}, more than "
                            f"the cache has ({self.load.cache_tokens}); lower max_tokens, shorten the prompt, or raise cache_tokens "
                            "(--cache-tokens)")

    def _deliver(self, seq: Sequence, commit: Commit, every: bool) -> list[TokenEvent]:
        """One event per token, also into the stream's inbox if there is one; none are made where nobody waits for them."""
        inbox = self._handles[seq.id].inbox
        if inbox is None and not every:
            return []
        number = -1 if commit.roles[0] == "prefill" else seq.rounds - 1
        last = len(commit.tokens) - 1
        logprobs = [None] * (last + 1) if seq.sampling.logprobs is None else seq.logprobs[-1 - last:]
        read = tuple(seq.prompt_logprobs) if number == -1 else ()
        events = [TokenEvent(token, piece, role, number, seq.id, seq.sample, commit.finish if i == last else None, logprobs[i], read)
                  for i, (token, piece, role) in enumerate(zip(commit.tokens, seq.pieces, commit.roles, strict=True))]
        if inbox is not None:
            inbox.extend(events)
        return events

    def _settle(self) -> None:
        """Add the sequences that ended to the totals and the trace, and keep their completions; each once, also after an interruption."""
        while self._batch.ended:
            seq = self._batch.ended[0]
            figures = self._metrics(seq)
            del self._batch.ended[0]
            handle = self._handles.pop(seq.id)
            self._total = self._total + seq.tally
            self._done += 1
            try:
                self._recorder.done(seq, figures)
            finally:
                handle.settle()

    def _metrics(self, seq: Sequence) -> dict[str, Any]:
        size, per_token = draft_bytes(self.lanes.of(seq).drafter), self.target.facts.cache_bytes_per_token
        return metrics(seq.tally, seq.clock, size, ceil(size / per_token) if per_token else 0)

    def _state(self, lane: Speculation, rule: str, depth: int | str) -> dict[str, Any]:
        state, reason = lane.state
        return {"state": state, "drafter": lane.name, "depth": depth if state == "on" else 0, "rule": rule, "reason": reason}

    def _speculation_of(self, seq: Sequence) -> dict[str, Any]:
        """The `speculation` of `generate --json`."""
        depth = seq.depth if isinstance(seq.depth, int) else "auto" if self._fixed is None else self._fixed
        state = self._state(self.lanes.of(seq), seq.rule, depth)
        if state["state"] == "on":
            state["reason"] = seq.reason or "no round yet"
            if not seq.speculate:
                state.update(state="off", depth=0, reason=UNASKED)
        return state

    def _header(self) -> TraceStarted:
        facts, full = self.target.facts, self.config.trace == "full"
        tokenizer = self.target.tokenizer
        machine = {"device": facts.device, "dtype": facts.dtype, "threads": facts.threads, "tier": facts.tier,
                   "invisible": facts.invisible_reason, "torch": torch.__version__}
        words = tuple(tokenizer.piece(i) for i in range(self.target.vocab_size)) if full and tokenizer is not None else None
        return TraceStarted(VERSION, facts.name, self.settings.drafter, self.settings.rule,
                            "auto" if self.settings.depth is None else str(self.settings.depth), machine, words)


def _gather(handles: abc.Sequence[Request]) -> Completion:
    """The first sample's completion, holding all of them if there are several. Raises what ended a sample in error."""
    for handle in handles:
        if handle.error is not None:
            raise handle.error
    texts = [handle.completion() for handle in handles]
    return texts[0] if len(texts) == 1 else replace(texts[0], samples=tuple(texts))
