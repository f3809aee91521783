"""The nouns: everything that crosses a boundary between two parts. No behaviour beyond invariants and arithmetic.

    target   the model whose word is the text          drafter  guesses ahead; its word is never the text
    Draft    what a drafter proposes, a chain or a tree Scores   the target's logits at every node of it
    Verdict  what stands, and the next token           Commit   what entered the text
    Budget   how far to guess this round, and why      Sampling what the request wants

p is the target's distribution and q the draft's, always. A *node* is a drafted token; the *root* is the last token of
the text, which every scoring pass feeds first. Position t of a token is the number of tokens before it, prompt included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .errors import OptionError

if TYPE_CHECKING:      # the command line reads these types, and their defaults, without waiting for torch
    from torch import Tensor

Rule = Literal["match", "ratio", "block", "lossy-typical"]
RULES: tuple[Rule, ...] = ("match", "ratio", "block", "lossy-typical")
LOSSY: frozenset[Rule] = frozenset({"lossy-typical"})
"""Rules that keep neither the text nor its law. They run only when named, and whatever they touch says *lossy*."""

Role = Literal["prefill", "accepted", "correction", "bonus", "plain"]
"""What an emitted token was: prefill's own, an accepted draft, the target's token after a rejection, the target's token
after full acceptance, or the token of a round without a draft."""

Fate = Literal["accepted", "rejected", "discarded"]
"""What became of a drafted node: emitted, judged and refused, or never judged (or behind a stop)."""

FinishReason = Literal["stop", "length", "cancelled", "error"]

REFUSED_OPTIONS = {
    "best_of": "generate n samples with n and choose among them yourself",
    "num_beams": "beam search has no exact speculative form; use n samples",
    "use_beam_search": "beam search has no exact speculative form; use n samples",
    "echo": "prepend the prompt to the text yourself; prompt_logprobs says how likely it is",
}


_PLAIN = ("top_k", "min_tokens", "max_tokens", "n", "seed", "logprobs", "prompt_logprobs", "stop", "bad_words", "stop_token_ids",
          "bad_word_ids", "prediction")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: Any) -> bool:
    """An integer, also one of numpy; a bool is none."""
    return isinstance(value, int | Integral) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Integers as Python's own, and collections as tuples: what a trace can write."""
    if is_integer(value):
        return int(value)
    return tuple(map(_plain, value)) if isinstance(value, Collection) and not isinstance(value, str) else value


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _all(values: Any, are: Callable[[Any], bool]) -> bool:
    return isinstance(values, Collection) and all(map(are, values))


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one request asks of the distribution and of the end of the text.

    The order in which options act is fixed: penalties, bias, bans (bad words, min_tokens, grammar), temperature, top-k,
    top-p, min-p. Filters are thresholds. `temperature=None` and `top_p=None` take the model's own defaults. One text as
    `stop` or `bad_words` is a list of one. Raises OptionError.
    """

    temperature: float | None = None      # 0 is greedy
    top_k: int = 0                        # 0 is off
    top_p: float | None = None            # 1 is off
    min_p: float = 0.0                    # 0 is off; relative to the likeliest token
    repetition_penalty: float = 1.0       # over prompt and output (CTRL, arXiv 1909.05858); 1 is off
    presence_penalty: float = 0.0         # over the output (OpenAI)
    frequency_penalty: float = 0.0        # over the output (OpenAI)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: str | tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()   # token sequences that may not be completed
    min_tokens: int = 0                   # before this many, no end token
    max_tokens: int = 256
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None               # None: drawn, and reported
    n: int = 1                            # samples; sample i has noise index i
    logprobs: int | None = None           # None: none; k: the chosen token's and the k likeliest tokens'
    prompt_logprobs: int | None = None    # the same of the prompt's tokens, which costs its cached prefix: all of it is read
    grammar: Mapping[str, Any] | None = None   # structured output: {"json_schema": …}, {"json_object": True}, {"regex": …} or {"lark": …}
    prediction: str | tuple[int, ...] = ()    # what the output will resemble, for drafter `prediction`; changes no token

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected {expected}")

        for name in _PLAIN:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))      # else its letters were many texts
            need(_all(getattr(self, name), _text), name, "a text or several, none empty")
        need(self.temperature is None or (_finite(self.temperature) and self.temperature >= 0), "temperature", "a number ≥ 0 (0 is greedy)")
        need(is_integer(self.top_k) and self.top_k >= 0, "top_k", "an integer ≥ 0 (0 is off)")
        need(self.top_p is None or (_finite(self.top_p) and 0 < self.top_p <= 1), "top_p", "a number in (0, 1]")
        need(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number in [0, 1]")
        need(_finite(self.repetition_penalty) and 1e-30 <= self.repetition_penalty <= 1e30, "repetition_penalty",
             "a number in [1e-30, 1e30]")                    # logits times any of these stay far within float32
        for name in ("presence_penalty", "frequency_penalty"):
            need(_finite(getattr(self, name)) and abs(getattr(self, name)) <= 1e30, name, "a number in [-1e30, 1e30]")
        need(isinstance(self.logit_bias, Mapping) and _all(self.logit_bias, is_integer)
             and _all(self.logit_bias.values(), lambda bias: isinstance(bias, Real) and not math.isnan(bias)),
             "logit_bias", "numbers by token id, no NaN")
        need(_all(self.bad_word_ids, lambda ids: _all(ids, is_integer) and len(ids) > 0), "bad_word_ids",
             "sequences of token ids, none empty")
        need(_all(self.stop_token_ids, is_integer), "stop_token_ids", "token ids")
        need(isinstance(self.prediction, str) or _all(self.prediction, is_integer), "prediction", "token ids, or a text")
        need(is_integer(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer ≥ 1")
        need(is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens, "min_tokens",
             f"an integer in [0, max_tokens={self.max_tokens}]")
        need(is_integer(self.n) and self.n >= 1, "n", "an integer ≥ 1")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            need(count is None or (is_integer(count) and count >= 0), name, "None or an integer ≥ 0")
        need(self.seed is None or (is_integer(self.seed) and 0 <= self.seed < 2**63), "seed", "an integer in [0, 2**63)")

    @classmethod
    def of(cls, **options: Any) -> Sampling:
        """Like the constructor, but an unknown or refused option is an `OptionError` that names it."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name in REFUSED_OPTIONS:
                raise OptionError(f"{name} is not supported: {REFUSED_OPTIONS[name]}")
            if name not in known:
                raise OptionError(f"unknown sampling option {name!r}; known: {', '.join(sorted(known))}")
        return cls(**options)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the distribution at a node depends on the tokens before it beyond the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.bad_word_ids or self.min_tokens)


class GrammarView(Protocol):
    """What a drafter may ask of the grammar that a text must follow."""

    def masks(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """bool [len(paths), V]: the tokens allowed after the text and each path."""
        ...

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens that come next whatever the model says."""
        ...


class SequenceView(Protocol):
    """What a drafter may read of a sequence. `tokens` is the whole text so far, prompt first."""

    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...      # temperature and top_p are resolved, never None
    @property
    def rule(self) -> Rule: ...              # by which its drafts are judged
    @property
    def seed(self) -> int: ...
    @property
    def sample(self) -> int: ...             # noise index of this sample, 0 … n−1
    @property
    def tenant(self) -> str: ...
    @property
    def grammar(self) -> GrammarView | None: ...   # where the text stands in the grammar it must follow
    @property
    def end_ids(self) -> frozenset[int]: ...  # tokens that end the text (EOS and stop ids); empty with ignore_eos and no stop ids


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """q, as the tokens were really drawn from it.

    logq [m, Vq] float32: normalised log-probabilities over the drafter's own vocabulary, one row per node that had children.
    row  [n]: which row drafted node i. ids [Vq] int64: the target's id of each drafter token, None if they are the same.
    """

    logq: Tensor
    row: tuple[int, ...]
    ids: Tensor | None = None


@lru_cache(maxsize=64)
def _line(count: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, count - 1))


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's proposal for one sequence. Parents come before children; −1 is the root; a chain is −1, 0, 1, ….

    tokens [n] int64 (any device) · parents [n] · score [n] float32, the drafter's own belief, or None
    law: q, only when the rule needs it and the draft was sampled; None means point masses tried in order
    reason: why it is shorter than asked, for the trace
    """

    tokens: Tensor
    parents: tuple[int, ...]
    score: Tensor | None = None
    law: DraftLaw | None = None
    drafter: str = "none"
    reason: str = ""

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and len(self.parents) == self.tokens.shape[0], "one parent per token"
        assert self.is_chain or all(-1 <= p < i for i, p in enumerate(self.parents)), "parents come before children"

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        line = _line(len(self.parents))
        return self.parents is line or self.parents == line

    @classmethod
    def chain(cls, tokens: Sequence[int] | Tensor, **more: Any) -> Draft:
        import numpy as np
        import torch

        ids = tokens if isinstance(tokens, torch.Tensor) else torch.from_numpy(np.array(tokens, np.int64))       # sooner than torch.tensor
        return cls(ids, _line(ids.shape[0]), **more)

    @staticmethod
    @lru_cache(maxsize=64)
    def empty(drafter: str = "none", reason: str = "") -> Draft:
        import torch

        return Draft(torch.empty(0, dtype=torch.int64), (), drafter=drafter, reason=reason)


@dataclass(frozen=True, slots=True)
class Budget:
    """How far one sequence may guess this round: at most `depth` levels and `nodes` tokens, by `drafter`, for `reason`.

    prices: what a draft of 1, 2, … nodes must bring, in expected tokens, to be worth the rows that it takes; empty: its size is given.
    step: what a level must bring to be worth drafting, apart from its row; 0 where that is not known. A drafter that chooses nodes after
    the noise, or without any, may stop where the next ones are not worth it, one that keeps q must not.
    """

    depth: int
    nodes: int
    drafter: str
    reason: str
    prices: tuple[float, ...] = ()
    step: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.depth <= self.nodes or self.depth == self.nodes == 0, "a chain of the depth must fit the nodes"
        assert not self.prices or len(self.prices) >= self.nodes, "a price for every number of nodes"

    def without(self, taken: int) -> Budget:
        """What is left when `taken` nodes of it are filled."""
        left = self.nodes - taken
        paid = self.prices[taken - 1] if taken and self.prices else 0.0
        return replace(self, depth=min(self.depth, left), nodes=left, prices=tuple(price - paid for price in self.prices[taken:]))


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of one pass. Sequence i owns rows starts[i] … starts[i+1]−1: first the root's row, then one per node.

    logits [rows, V] · taps: layer id → hidden states [rows, H] (only the layers that a drafter asked for)
    """

    logits: Tensor
    starts: tuple[int, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)

    def rows(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i + 1])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stands of a draft: `accepted` node indices from the root down, the target's `next_token`, and its role.

    rejected: nodes that were judged and refused (a chain has at most one). All others are discarded.
    """

    accepted: tuple[int, ...]
    next_token: int
    role: Role
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What one round added to the text. `kept` are the accepted nodes that entered it (fewer than accepted behind a stop).

    tokens and roles are parallel; start is the position of the first token.
    """

    start: int
    tokens: tuple[int, ...]
    roles: tuple[Role, ...]
    kept: tuple[int, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Likely:
    """The target's likeliest tokens in one round: behind the root, and behind every node of the draft that was scored, refused ones too.

    nodes, parents: the draft, whosever it was · tokens [1 + nodes, k] int64, best first, and their raw logits float32, on the host
    """

    nodes: Sequence[int]
    parents: Sequence[int]
    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Signals:
    """What the target left behind for a drafter. taps[layer]: hidden states [rows, H] of positions start … start+rows−1

    likely: not of prompts, nor of rounds in which nobody was to guess
    """

    start: int
    taps: Mapping[int, Tensor]
    likely: Likely | None = None
