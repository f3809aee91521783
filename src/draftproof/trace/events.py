"""The record of what happened: frozen, versioned, one per round. Everything that counts, draws or reports reads these.

Times are seconds of a monotonic clock since the trace began. A field that the trace level leaves out is None or empty.
JSON form: one object a line with "event" first; `from_json(to_json(e)) == e`; a reader ignores keys it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..types import Fate, FinishReason, Role

VERSION = 1
UNCLASSED = "no class"      # how requests without a class are shown, and counted where they need a name


@dataclass(frozen=True, slots=True)
class Alternative:
    token: int
    probability: float


class NodeRecord(NamedTuple):
    """One drafted token and what became of it. Level full also has p, q, noise (match) or coin (ratio, block)."""

    token: int
    parent: int                                     # node index, −1 is the root
    fate: Fate
    p: float | None = None                          # target's probability of this token at its place
    q: float | None = None                          # drafter's, None where the drafter gives no law
    noise: float | None = None                      # the Gumbel value that target and drafter share
    coin: float | None = None
    score: float | None = None


class TokenRecord(NamedTuple):
    """One emitted token."""

    token: int
    role: Role
    p: float | None = None
    noise: float | None = None
    alternatives: tuple[Alternative, ...] = ()      # the target's likeliest, after the request's options
    draft_alternatives: tuple[Alternative, ...] = ()
    logprob: float | None = None                    # raw log-softmax, when the request asked for logprobs
    top_logprobs: tuple[Alternative, ...] = ()      # `probability` then holds the log-probability


class Times(NamedTuple):
    """Seconds that a round spent; shared passes are given to every sequence of the batch in full."""

    draft_s: float
    score_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class TraceStarted:
    event: ClassVar[str] = "trace_started"
    version: int
    target: str
    drafter: str
    rule: str
    depth: str                                      # "auto" or a number
    machine: dict[str, Any] = field(default_factory=dict)     # device, dtype, threads, tier, invisible, versions
    vocabulary: tuple[str, ...] | None = None       # token texts, level full, so that a reader needs no tokenizer


@dataclass(frozen=True, slots=True)
class RequestStarted:
    event: ClassVar[str] = "request_started"
    request: str
    at_s: float
    prompt_tokens: int
    cached_tokens: int                              # of the prompt, found in the prefix cache
    sampling: dict[str, Any]
    seed: int
    sample: int
    prompt_class: str | None = None
    tenant: str = ""
    prompt_ids: tuple[int, ...] | None = None       # level full
    rule: str = "match"                             # of this request; a name that begins with "lossy" is one that keeps no law
    drafter: str = ""                               # of this request, a chain with all its parts; "" in older traces


@dataclass(frozen=True, slots=True)
class PrefillDone:
    event: ClassVar[str] = "prefill_done"
    request: str
    at_s: float
    seconds: float
    passes: int
    token: TokenRecord
    text: str


@dataclass(frozen=True, slots=True)
class RoundDone:
    event: ClassVar[str] = "round_done"
    request: str
    round: int                                      # 0, 1, … within the request
    at_s: float
    batch: int                                      # sequences in this round
    position: int                                   # of the first emitted token
    depth: int                                      # granted
    drafter: str
    reason: str                                     # of the budget
    draft_reason: str                               # why the draft was shorter, if it was
    nodes: tuple[NodeRecord, ...]
    tokens: tuple[TokenRecord, ...]
    text: str
    times: Times


@dataclass(frozen=True, slots=True)
class RequestDone:
    event: ClassVar[str] = "request_done"
    request: str
    at_s: float
    finish: FinishReason
    completion_tokens: int
    metrics: dict[str, Any]                         # the keys of `generate --json`'s metrics
    error: str | None = None


Event = TraceStarted | RequestStarted | PrefillDone | RoundDone | RequestDone
