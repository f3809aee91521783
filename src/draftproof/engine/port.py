"""What an engine is, to everything above it: the local engine and a remote one look the same from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..trace.events import Alternative, Event
from ..trace.sinks import Sink
from ..types import FinishReason, Role, Sampling


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-softmax (natural logarithm), before temperature and penalties; in `top`, `probability` is a log-probability.

    logprob: None for the first token of a prompt, which follows nothing. rank: how many tokens are as likely or likelier, itself
    among them; None where that is not known.
    """

    token_id: int
    logprob: float | None
    top: tuple[Alternative, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token as it arrives. `text` is what it made readable: "" while a character or a stop string is unfinished.

    round: −1 for the prefill's token. finish: why the text ended, on its last token only.
    """

    token_id: int
    text: str
    role: Role
    round: int
    request: str
    sample: int = 0
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None       # when the request asked for log-probabilities
    prompt_logprobs: tuple[TokenLogprob, ...] = ()      # of every token of the prompt, with the prefill's token, when it asked for those


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample. Times in `metrics` are seconds; its keys are those of `generate --json`."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    seed: int
    sample: int
    metrics: dict[str, Any]
    speculation: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    trace: tuple[Event, ...] = field(default=(), repr=False)
    error: str | None = None
    samples: tuple[Completion, ...] = field(default=(), repr=False)     # all of them, this one included, when n > 1

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


class Handle(Protocol):
    """One sample of a request, from submission on."""

    @property
    def id(self) -> str: ...
    @property
    def sample(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...      # what ended it, with finish reason `error`

    def completion(self) -> Completion:
        """What there is of the text; complete once `done`."""
        ...


class Port(Protocol):
    """An engine. Not thread-safe: one thread submits, steps and cancels."""

    def submit(self, prompt: str | Sequence[int], sampling: Sampling | None = None, *, prompt_class: str | None = None, tenant: str = "",
               speculation: Mapping[str, Any] | None = None) -> Sequence[Handle]:
        """Queue a request; one handle per sample. Raises PromptError or OptionError, queueing nothing."""
        ...

    def step(self) -> list[TokenEvent]:
        """Admit, prefill a chunk, run one round; the tokens that arrived, in order, for all requests."""
        ...

    def cancel(self, request: str) -> None:
        """End a request (all its samples) or one sample; an unknown or finished id is ignored."""
        ...

    def set_speculation(self, enabled: bool | None = None, depth_cap: int | None = None, drafter: str | None = None) -> dict[str, Any]:
        """Steer guessing from the next round on; returns the new state. None leaves a setting as it is."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counts and totals since the engine started."""
        ...

    def events(self, sink: Sink) -> Callable[[], None]:
        """Send every trace event from now on to `sink`; the returned function ends that."""
        ...

    def close(self) -> None:
        """Cancel everything and give all memory back."""
        ...
