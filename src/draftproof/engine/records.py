"""What happened, as trace records. Nothing is built at level none; level summary reads no tensor."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import TraceLevel
from ..core.choice import Law
from ..core.noise import gumbel, key, key_rows
from ..core.tree import positions as places
from ..core.verify import dense_law
from ..trace.events import (
    Alternative,
    Event,
    NodeRecord,
    PrefillDone,
    RequestDone,
    RequestStarted,
    RoundDone,
    Times,
    TokenRecord,
    TraceStarted,
)
from ..trace.sinks import Sink
from ..types import Budget, Commit, Draft, Fate, Sampling, Scores
from .sequence import Sequence


class Judged(NamedTuple):
    """One sequence's part of a round."""

    seq: Sequence
    budget: Budget
    draft: Draft
    nodes: list[int]
    commit: Commit
    fates: tuple[Fate, ...]
    coins: Tensor | None         # [n] float64 under a joint rule


class Detail(NamedTuple):
    """What level full adds: per node (p, q, noise, coin, score), per token (p, noise, alternatives, draft alternatives)."""

    nodes: list[tuple[Any, ...]]
    tokens: list[tuple[Any, ...]]


class Recorder:
    """Builds events and hands them to the sinks; each sequence also keeps its own, for its `Completion`."""

    def __init__(self, level: TraceLevel, sinks: abc.Iterable[Sink], alternatives: int) -> None:
        self.level, self._sinks, self._alternatives = level, list(sinks), alternatives
        self._began = perf_counter()
        self._header: TraceStarted | None = None

    def at(self, moment: float | None = None) -> float:
        """Seconds of a `perf_counter` moment (now) since the trace began."""
        return (perf_counter() if moment is None else moment) - self._began

    def add(self, sink: Sink) -> Callable[[], None]:
        """Send every event from now on to `sink`, the header first; the returned function ends that."""
        self._sinks.append(sink)
        if self._header is not None:
            sink.write(self._header)
        return lambda: self._sinks.remove(sink) if sink in self._sinks else None

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def begin(self, header: TraceStarted) -> None:
        if self.level != "none":
            self._header = header
            for sink in self._sinks:
                sink.write(header)

    def started(self, seq: Sequence, cached_tokens: int, drafter: str) -> None:
        if self.level == "none":
            return
        self._emit(seq, RequestStarted(
            seq.id, self.at(seq.clock.submitted), seq.prompt_tokens, cached_tokens, json_options(seq.sampling), seq.seed, seq.sample,
            seq.prompt_class, seq.tenant, seq.prompt if self.level == "full" else None, seq.rule, drafter))

    def prefill(self, seq: Sequence, law: Law) -> None:
        """After the commit of the first token; law: of its one row."""
        if self.level == "none":
            return
        token = seq.output[0]
        detail: tuple[Any, ...] = ()
        if self.level == "full":
            noise = None if seq.sampling.greedy else _noise(seq, [seq.prompt_tokens], [token])[0]
            detail = (float(law.whole[0, token].exp()), noise, _top(law.whole, self._alternatives)[0])
        record = TokenRecord(token, "prefill", *detail, **_logprob(seq, 1)[0])
        self._emit(seq, PrefillDone(seq.id, self.at(seq.clock.last), seq.prefill_s, seq.prefill_passes, record, seq.pieces[0]))

    def rounds(self, judged: abc.Sequence[Judged], law: Law, scores: Scores, times: Times) -> None:
        if self.level == "none":
            return
        if law.dead and self.level == "full":
            law.whole[list(law.dead)] = -math.inf         # nothing is likely behind a dead end
        events: list[Event] = []
        for i, one in enumerate(judged):
            start, marks = scores.starts[i], zip(one.nodes, one.draft.parents, one.fates, strict=True)
            words = zip(one.commit.tokens, one.commit.roles, strict=True)
            if self.level == "full":
                detail = self._detail(one, law.whole[start:start + len(one.nodes) + 1])
                nodes = [NodeRecord(*mark, *more) for mark, more in zip(marks, detail.nodes, strict=True)]
                tokens = [TokenRecord(*word, *more) for word, more in zip(words, detail.tokens, strict=True)]
            else:
                nodes = [NodeRecord(*mark) for mark in marks]
                tokens = [TokenRecord(*word) for word in words]
            if one.seq.sampling.logprobs is not None:
                tokens = [token._replace(**entry) for token, entry in zip(tokens, _logprob(one.seq, len(tokens)), strict=True)]
            events.append(RoundDone(
                one.seq.id, one.seq.rounds - 1, self.at(one.seq.clock.last), len(judged), one.commit.start, one.budget.depth,
                one.draft.drafter if one.nodes else one.budget.drafter, one.budget.reason, one.draft.reason, tuple(nodes), tuple(tokens),
                "".join(one.seq.pieces), times))
            one.seq.records.append(events[-1])
        for event in events:                     # a sink that fails costs no text its record
            self._send(event)

    def done(self, seq: Sequence, metrics: dict[str, Any]) -> None:
        if self.level == "none":
            return
        assert seq.finish is not None, "a request ends with a reason"
        self._emit(seq, RequestDone(seq.id, self.at(), seq.finish, len(seq.output), metrics, None if seq.error is None else str(seq.error)))

    def _emit(self, seq: Sequence, event: Event) -> None:
        seq.records.append(event)
        self._send(event)

    def _send(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def _detail(self, one: Judged, laws: Tensor) -> Detail:
        """p, q, noise or coin and alternatives. laws [1+n, V]: this sequence's log-probabilities, root first."""
        seq, parents, start = one.seq, one.draft.parents, one.commit.start
        n, rows = len(one.nodes), [0, *(1 + node for node in one.commit.kept)][:len(one.commit.tokens)]
        scores: list[float | None] = [None] * n if one.draft.score is None else _finite(one.draft.score)
        p = laws[[parent + 1 for parent in parents], one.nodes].exp().tolist() if n else []
        q: list[float | None] = [None] * n
        law = dense_law(one.draft.law, laws.shape[-1]) if n and one.draft.law is not None else None
        if law is not None:
            q = _finite(law[range(n), one.nodes])
        noises: list[float | None] = [None] * n
        if n and one.coins is None and not seq.sampling.greedy:
            noises = _noise(seq, places(parents, start - 1), one.nodes)
        coins: list[float | None] = [None] * n if one.coins is None else one.coins.tolist()
        chosen = laws[rows, list(one.commit.tokens)].exp().tolist()
        shared: list[float | None] = [None] * len(rows)
        if one.coins is None and not seq.sampling.greedy:
            shared = _noise(seq, range(start, start + len(rows)), one.commit.tokens)
        best, drafted = _top(laws[rows], self._alternatives), self._draft_top(one, rows, law)
        return Detail(list(zip(p, q, noises, coins, scores, strict=True)), list(zip(chosen, shared, best, drafted, strict=True)))

    def _draft_top(self, one: Judged, rows: list[int], law: Tensor | None) -> list[tuple[Alternative, ...]]:
        """The drafter's likeliest at the place of each emitted token, where it drafted there and gave a law."""
        out: list[tuple[Alternative, ...]] = [()] * len(rows)
        if law is not None:
            first = {parent: node for node, parent in reversed(list(enumerate(one.draft.parents)))}
            for j, row in enumerate(rows):
                if row - 1 in first:
                    node = first[row - 1]
                    out[j] = _top(law[node:node + 1].log(), self._alternatives)[0]
        return out


def _finite(values: Tensor) -> list[float | None]:
    """What a drafter says of its nodes; None for what JSON has no number for."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _noise(seq: Sequence, at: abc.Sequence[int], tokens: abc.Sequence[int]) -> list[Any]:
    """The Gumbel value that target and drafter share for tokens[i] at position at[i]."""
    keys = key_rows([key(seq.seed, seq.sample, "text", place) for place in at], "cpu")
    return list(gumbel(keys, torch.tensor(tokens)[:, None])[:, 0].tolist())


def _top(laws: Tensor, count: int) -> list[tuple[Alternative, ...]]:
    """The likeliest tokens of each row of log-probabilities, excluded ones left out."""
    values, ids = laws.topk(min(count, laws.shape[-1]), -1)
    return [tuple(Alternative(i, p) for i, p in zip(row_ids, row, strict=True) if p > 0)
            for row_ids, row in zip(ids.tolist(), values.exp().tolist(), strict=True)]


def _logprob(seq: Sequence, count: int) -> list[dict[str, Any]]:
    """The record's fields for the last `count` tokens, if the request asked for log-probabilities."""
    if seq.sampling.logprobs is None:
        return [{}] * count
    return [{"logprob": entry.logprob, "top_logprobs": entry.top} for entry in seq.logprobs[-count:]]


def json_options(sampling: Sampling) -> dict[str, Any]:
    """The options as JSON has them: lists for tuples, strings for keys, and finite biases."""
    options = asdict(sampling)
    for name in ("bad_words", "stop", "stop_token_ids"):
        options[name] = list(options[name])
    options["bad_word_ids"] = [list(ids) for ids in sampling.bad_word_ids]
    options["prediction"] = len(sampling.prediction)     # tokens; what they say is the request's own business, as its prompt is
    options["logit_bias"] = {str(token): max(min(float(bias), 1e9), -1e9) for token, bias in sampling.logit_bias.items()}
    return options
