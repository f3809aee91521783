"""One sample that another engine writes: what arrived, what it means, and what must be asked for if its server dies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.tally import Tally
from ..engine.port import Completion, TokenEvent, TokenLogprob
from ..engine.text import Text
from ..errors import Failure, OptionError
from ..trace.events import Alternative, Event
from ..trace.report import Clock, metrics
from ..types import FinishReason, Role, Sampling
from .fleet import Replica
from .wire import Arrived, Stream

STRIDE = 1_000_003       # between the seeds of a text's parts: a continued text may not see the same noise twice
SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")


@dataclass(slots=True)
class Part:
    """What one replica wrote of a text: pieces as they arrived, and what it said of its steps at the end."""

    replica: Replica
    reason: str                                      # why it is this one
    pieces: list[tuple[float, int]] = field(default_factory=list)      # moment, tokens
    report: Mapping[str, Any] | None = None
    untold: str = "the text ended before the server told what it drafted"      # if it is not known


@dataclass(eq=False)
class Writing:
    """A handle of `engine.port`. Options are resolved: nothing is left to the server's own defaults."""

    id: str
    request: str
    sample: int
    prompt: tuple[int, ...]
    sampling: Sampling
    end_ids: frozenset[int]
    limit: int                                       # tokens of prompt and output together
    text: Text
    clock: Clock
    speculate: bool
    reason: str                                      # of where it runs
    arm: str
    setting: dict[str, Any]                          # drafter, depth and rule of the engine
    prompt_class: str | None = None
    tenant: str = ""
    output: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # text of each output token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    stream: Stream | None = None
    finish: FinishReason | None = None
    failure: BaseException | None = None
    records: list[Event] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    closed: bool = False                             # nothing about it changes any more
    said: str | None = None                          # how the server says that it ended, told behind the last token
    homeless_since: float | None = None              # no replica could take it since
    cached: int = 0

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None, "resolved"
        return self.sampling.seed

    @property
    def done(self) -> bool:
        return self.closed

    @property
    def error(self) -> BaseException | None:
        return self.failure

    @property
    def restarted(self) -> int:
        return sum(bool(part.pieces) for part in self.parts[:-1])

    def body(self, model: str) -> dict[str, Any]:
        """vLLM's completion request for what is still to be written. Raises Failure if it cannot be continued where it stands."""
        written = len(self.output)
        if written and (self.sampling.grammar or self.sampling.presence_penalty or self.sampling.frequency_penalty):
            raise Failure("the replica died, and a text with a grammar, a presence or a frequency penalty cannot be continued from its "
                          "ids elsewhere: send the request again")
        options = {name: getattr(self.sampling, name) for name in SAME}
        seed = (self.seed + self.sample + STRIDE * len(self.parts)) % 2**63
        out: dict[str, Any] = {
            "model": model, "prompt": [*self.prompt, *self.output], "max_tokens": self.limit - len(self.prompt) - written,
            "min_tokens": max(0, self.sampling.min_tokens - written), **options, "seed": seed, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True, "stop": list(self.sampling.stop),
            "stop_token_ids": sorted(self.end_ids), "bad_words": list(self.sampling.bad_words)}
        if self.sampling.logit_bias:
            out["logit_bias"] = {str(token): bias for token, bias in self.sampling.logit_bias.items()}
        if self.sampling.logprobs is not None:
            out |= {"logprobs": self.sampling.logprobs, "return_tokens_as_token_ids": True}
        if self.sampling.grammar is not None:
            out["structured_outputs"] = structured(self.sampling.grammar)
        return out

    def take(self, arrived: Arrived) -> list[TokenEvent]:
        """Append what came, up to the first end. Tokens behind it are dropped, as they are when our own engine stops a text."""
        if not arrived.tokens:
            self.said = arrived.finish or self.said
        entries = logprobs_of(arrived.logprobs, self.sampling.logprobs) if arrived.logprobs else []
        events: list[TokenEvent] = []
        first = not self.output
        for i, token in enumerate(arrived.tokens):
            if self.finish is not None:
                break
            self.output.append(token)
            last = i + 1 == len(arrived.tokens)
            piece = self._read(token, arrived.finish if last else None)
            self.pieces.append(piece)
            entry = entries[i] if i < len(entries) else None
            if entry is not None:
                self.logprobs.append(entry)
            role: Role = "prefill" if first and i == 0 else "correction" if last else "accepted"
            number = -1 if role == "prefill" else 0 if first else sum(len(part.pieces) for part in self.parts) - 1
            events.append(TokenEvent(token, piece, role, number, self.id, self.sample, self.finish, entry))
        if events:
            self.parts[-1].pieces.append((arrived.at, len(events)))
            self.clock.delivered(arrived.at, len(events))
        return events

    def _read(self, token: int, said: str | None) -> str:
        """The text of a token, and whether it ends the whole; said: how the server says that the text ended with it."""
        written = len(self.output)
        if token in self.end_ids and written > self.sampling.min_tokens:
            self.finish = "stop"
            return self.text.end()
        piece, stopped = self.text.push(token, written > self.sampling.min_tokens)
        if stopped:
            self.finish = "stop"
        elif said is not None or len(self.prompt) + written >= self.limit:
            self.finish = "stop" if said == "stop" else "length"
            piece += self.text.end()
        return piece

    def fail(self, error: BaseException) -> None:
        self.finish, self.failure = "error", error

    @property
    def speculation(self) -> dict[str, Any]:
        """`speculation` of an answer; `identical` is absent: this engine does not promise it."""
        found = {**self.setting, "state": "on" if self.speculate else "off", "reason": self.reason, "engine": "vllm", "arm": self.arm}
        if not self.speculate:
            found["depth"] = 0
        if self.parts:
            found["replica"] = self.parts[-1].replica.name
        return {**found, "restarted": self.restarted} if self.restarted else found

    def completion(self) -> Completion:
        return Completion(
            text=self.text.released, token_ids=tuple(self.output), prompt_tokens=len(self.prompt), finish_reason=self.finish or "length",
            seed=self.seed, sample=self.sample, metrics=metrics(self.tally, self.clock), speculation=self.speculation,
            logprobs=None if self.sampling.logprobs is None else tuple(self.logprobs), trace=tuple(self.records),
            error=None if self.failure is None else str(self.failure))


@dataclass(slots=True)
class Arm:
    """One side of a comparison, added up: requests, tokens, and seconds to the first and between the others."""

    requests: int = 0
    tokens: int = 0
    begun: int = 0                                   # that had a first token
    ttft_s: float = 0.0
    writing_s: float = 0.0
    following: int = 0

    def add(self, writing: Writing) -> None:
        clock = writing.clock
        self.requests += 1
        self.tokens += len(writing.output)
        if clock.first is not None and clock.last is not None and clock.ttft_s is not None:
            self.begun += 1
            self.ttft_s += clock.ttft_s
            self.writing_s += clock.last - clock.first
            self.following += clock.tokens - clock.first_tokens

    def as_dict(self) -> dict[str, Any]:
        return {"requests": self.requests, "tokens": self.tokens, "ttft_s": self.ttft_s / self.begun if self.begun else None,
                "tpot_s": self.writing_s / self.following if self.following else None}


def check(sampling: Sampling) -> None:
    """Raises OptionError for what vLLM's API cannot be asked for. `sampling` as the client gave it."""
    if sampling.bad_word_ids:
        raise OptionError("bad_word_ids: vLLM takes bad words as text only; use bad_words")
    if sampling.prompt_logprobs is not None:
        raise OptionError("prompt_logprobs (echo with logprobs): vLLM tells them in answers that it does not stream; ask its server itself")
    if sampling.logprobs is not None and sampling.logprobs > 20:
        raise OptionError(f"logprobs={sampling.logprobs}: vLLM gives at most 20 unless it is started with --max-logprobs; lower it")


def only_plain(sampling: Sampling) -> str | None:
    """The option that vLLM refuses while it speculates, if there is one."""
    return "min_p" if sampling.min_p else "logit_bias" if sampling.logit_bias else None


def structured(grammar: Mapping[str, Any]) -> dict[str, Any]:
    """`Sampling.grammar` in vLLM's words."""
    names = {"json_schema": "json", "json_object": "json_object", "regex": "regex", "lark": "grammar"}
    return {names[kind]: value for kind, value in grammar.items()}


def logprobs_of(found: Mapping[str, Any], wanted: int | None) -> list[TokenLogprob]:
    """vLLM's parallel lists, tokens written as "token_id:N"."""
    out = []
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    for token, value, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
        best = sorted(((token_id(name), float(p)) for name, p in (top or {}).items()), key=lambda pair: (-pair[1], pair[0]))
        out.append(TokenLogprob(token_id(token), float(value), tuple(Alternative(i, p) for i, p in best[:wanted or 0])))
    return out


def token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
