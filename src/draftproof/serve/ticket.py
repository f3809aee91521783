"""One request on its way: what was asked, where it is, and what its reader was told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.port import Completion, Handle, TokenEvent
from ..types import Sampling


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt, all its samples. `news` is called in the worker's thread, once after each step that brought something."""

    prompt: str | tuple[int, ...]
    sampling: Sampling
    speculation: Mapping[str, Any] | None = None
    prompt_class: str | None = None
    tenant: str = ""
    deadline: float = float("inf")                          # of the monotonic clock, as the next two and `first`
    queued: float = 0.0
    admitted: float | None = None
    news: Callable[[], None] = lambda: None
    events: deque[TokenEvent] = field(default_factory=deque)   # for the reader
    completions: dict[int, Completion] = field(default_factory=dict)
    error: BaseException | None = None                      # what ended the ticket
    done: bool = False
    handles: list[Handle] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)   # when each sample's first token was told
    told: list[list[int]] = field(default_factory=list)     # tokens that the reader was told, per sample
    written: list[int] = field(default_factory=list)        # tokens that the engine has written: fewer than told during a replay
    replays: int = 0
    rule: str = "match"
    spare: bool = False                                     # nobody waits for it: it makes way for everyone

    @property
    def samples(self) -> int:
        return self.sampling.n
