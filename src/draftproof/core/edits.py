"""Penalties, bias and bans: what a request's options do to its logits before the temperature, in this order: repetition; presence
and frequency; bias; bad words, end tokens before min_tokens, grammar. Only rows whose request asks for them are touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError
from ..types import Sampling


class Counted(NamedTuple):
    """The distinct tokens of a text. where: token → its place · columns int64 [D] the tokens · times [D] how often each stands in
    the output."""

    where: dict[int, int]
    columns: Tensor
    times: Tensor


class Counts:
    """How often each token stands in a text that grows at its end. It reads on from where it was left, so that a round pays for
    its own tokens only; a text that has become shorter is read anew."""

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, scope: tuple[int, int, int] | None) -> None:
        self._scope, self._read = scope, 0
        self._where: dict[int, int] = {}
        self._times: list[int] = []
        self._tensors: Counted | None = None

    def of(self, text: Sequence[int], start: int, prompt_tokens: int, like: Tensor) -> Counted:
        """Of text[start:], of which text[prompt_tokens:] is output; tensors are of the type and device of `like` [N, V]."""
        scope = (start, prompt_tokens, like.shape[1])
        if scope != self._scope or len(text) < self._read:
            self._begin(scope)
        found = self._tensors
        if found is None or len(text) > self._read or (found.times.dtype, found.times.device) != (like.dtype, like.device):
            self._count(text, max(start, self._read), prompt_tokens, like.shape[1])
            self._read = len(text)
            times = torch.tensor(self._times, dtype=like.dtype, device=like.device)
            columns = torch.tensor(list(self._where), dtype=torch.int64, device=like.device)
            self._tensors = found = Counted(self._where, columns, times)
        return found

    def _count(self, text: Sequence[int], begin: int, prompt_tokens: int, vocabulary: int) -> None:
        where, times = self._where, self._times
        for at in range(begin, len(text)):
            token = text[at]
            if 0 <= token < vocabulary:
                place = where.setdefault(token, len(times))
                if place == len(times):
                    times.append(0)
                times[place] += at >= prompt_tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence: the root's and one per drafted node, each with the tokens on the way to it.

    text: prompt and output so far, of which the first prompt_tokens are the prompt · paths[i]: tokens after the text that lead to
    row i (() at the root) · mask: bool [len(paths), V], True = the grammar allows it · counts: of this sequence, kept from
    round to round
    """

    sampling: Sampling
    text: Sequence[int]
    prompt_tokens: int
    paths: Sequence[Sequence[int]]
    end_ids: frozenset[int]
    mask: Tensor | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def edited(self) -> bool:
        return bool(self.sampling.needs_history or self.sampling.logit_bias or self.mask is not None)


def edit(block: Tensor, g: Rows) -> None:
    """Everything before the temperature, in place on the rows [len(paths), V] of one sequence."""
    s, vocabulary = g.sampling, block.shape[1]
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
        _penalise(block, g)
    if s.logit_bias:
        wrong = [t for t in s.logit_bias if not 0 <= t < vocabulary]
        if wrong:
            raise OptionError(f"logit_bias names token {wrong[0]}; expected ids in [0, {vocabulary}): the model has no such token")
        ids = torch.tensor(list(s.logit_bias), device=block.device)
        block[:, ids] += torch.tensor(list(s.logit_bias.values()), dtype=block.dtype, device=block.device)
    banned = [(i, t) for i, path in enumerate(g.paths) for t in _banned(g, path) if t < vocabulary]
    if banned:
        rows, ids = torch.tensor(banned, device=block.device).unbind(1)
        block[rows, ids] = -math.inf
    if g.mask is not None:
        assert g.mask.shape == block.shape, "one row of the mask per row of logits"
        block.masked_fill_(~g.mask, -math.inf)


def _banned(g: Rows, path: Sequence[int]) -> list[int]:
    """Tokens that may not follow the text and this path."""
    s = g.sampling
    banned = list(g.end_ids) if len(g.text) - g.prompt_tokens + len(path) < s.min_tokens else []
    if s.bad_word_ids:
        reach = max(len(word) for word in s.bad_word_ids) - 1
        tail = (*_last(g.text, reach - len(path)), *path)
        for word in s.bad_word_ids:
            before = len(word) - 1
            if before <= len(tail) and tail[len(tail) - before:] == tuple(word[:-1]):
                banned.append(word[-1])
    return banned


def _last(tokens: Sequence[int], n: int) -> Sequence[int]:
    return tokens[max(0, len(tokens) - n):] if n > 0 else ()


def _penalise(block: Tensor, g: Rows) -> None:
    """Repetition over prompt, output and path (Keskar et al., arXiv 1909.05858); presence and frequency over output and path.

    Counts are completed before they act, so a drafted row gets the very bits it gets once its path is text.
    """
    s, (m, vocabulary), device = g.sampling, block.shape, block.device
    repeated = s.repetition_penalty != 1
    where, columns, times = g.counts.of(g.text, 0 if repeated else g.prompt_tokens, g.prompt_tokens, block)
    known = len(where)
    new = [t for t in dict.fromkeys(chain.from_iterable(g.paths)) if t not in where and 0 <= t < vocabulary]
    if new:
        columns, times = torch.cat((columns, torch.tensor(new, device=device))), torch.cat((times, times.new_zeros(len(new))))
    elif not known:
        return
    places = {t: known + i for i, t in enumerate(new)}
    steps = [(row, where.get(t, places.get(t))) for row, path in enumerate(g.paths) for t in path if t in where or t in places]
    count = times.repeat(m, 1)
    if steps:
        rows, spots = torch.tensor(steps, device=device).unbind(1)
        count.index_put_((rows, spots), torch.ones((), dtype=block.dtype, device=device), accumulate=True)
    own = count > 0
    x = block.index_select(1, columns)
    if repeated:
        seen = own.clone()
        seen[:, :known] = True
        x = torch.where(seen, torch.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty), x)
    if s.presence_penalty or s.frequency_penalty:
        x -= count * s.frequency_penalty + own * s.presence_penalty
    block.index_copy_(1, columns, x)
