"""Penalties, bias and bans: what a request's options do to its logits before the temperature, in this order: repetition; presence
and frequency; bias; bad words, end tokens before min_tokens, grammar. Only rows whose request asks for them are touched.

Rows are a tensor, or on a processor the numpy array that shares its memory: the two read the same, and numpy is quicker there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OptionError
from ..types import Sampling

Block: TypeAlias = Any      # Tensor | NDArray[np.floating]


class Counted(NamedTuple):
    """The distinct tokens of a text. where: token → its place · columns int64 [D] the tokens · times [D] how often each stands in
    the output."""

    where: dict[int, int]
    columns: NDArray[np.int64]
    times: NDArray[np.float64]


class Counts:
    """How often each token stands in a text that grows at its end. It reads on from where it was left, so that a round pays for
    its own tokens only; a text that has become shorter is read anew."""

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, scope: tuple[int, int, int] | None) -> None:
        self._scope, self._read = scope, 0
        self._where: dict[int, int] = {}
        self._times: list[int] = []
        self._found: Counted | None = None

    def of(self, text: Sequence[int], start: int, prompt_tokens: int, vocabulary: int) -> Counted:
        """Of text[start:], of which text[prompt_tokens:] is output."""
        scope = (start, prompt_tokens, vocabulary)
        if scope != self._scope or len(text) < self._read:
            self._begin(scope)
        if self._found is None or len(text) > self._read:
            self._count(text, max(start, self._read), prompt_tokens, vocabulary)
            self._read = len(text)
            self._found = Counted(self._where, np.array(list(self._where), np.int64), np.array(self._times, np.float64))
        return self._found

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


def edit(rows: Tensor, g: Rows) -> None:
    """Everything before the temperature, in place on the rows [len(paths), V] of one sequence."""
    s, vocabulary = g.sampling, rows.shape[1]
    block = rows.numpy() if rows.device.type == "cpu" else rows
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
        _penalise(block, g)
    if s.logit_bias:
        wrong = [t for t in s.logit_bias if not 0 <= t < vocabulary]
        if wrong:
            raise OptionError(f"logit_bias names token {wrong[0]}; expected ids in [0, {vocabulary}): the model has no such token")
        block[:, list(s.logit_bias)] += _like(block, np.array(list(s.logit_bias.values())))
    for i, banned in enumerate(_banned(g)):
        if known := [t for t in banned if t < vocabulary]:
            block[i, known] = -math.inf
    if g.mask is not None:
        assert g.mask.shape == rows.shape, "one row of the mask per row of logits"
        rows.masked_fill_(~g.mask, -math.inf)


def _like(block: Block, values: NDArray[Any]) -> Block:
    """Values of the kind, type and device of the block."""
    if isinstance(block, np.ndarray):
        return values.astype(block.dtype)
    return torch.from_numpy(values).to(block.device, block.dtype)


def _banned(g: Rows) -> Iterator[list[int]]:
    """Tokens that may not follow the text and each path in turn; nothing where the options ban none after any."""
    s, output = g.sampling, len(g.text) - g.prompt_tokens
    if not s.bad_word_ids and output >= s.min_tokens:
        return
    ends: dict[tuple[int, ...], list[int]] = {}     # of bad words, by what stands before them
    for word in s.bad_word_ids:
        ends.setdefault(tuple(word[:-1]), []).append(word[-1])
    lengths = {len(before) for before in ends}
    last = g.text[max(0, len(g.text) - max(lengths, default=0)):]
    for path in g.paths:
        tail = (*last, *path)
        banned = list(g.end_ids) if output + len(path) < s.min_tokens else []
        for length in lengths:
            if length <= len(tail):
                banned += ends.get(tail[len(tail) - length:], ())
        yield banned


def _penalise(block: Block, g: Rows) -> None:
    """Repetition over prompt, output and path (Keskar et al., arXiv 1909.05858); presence and frequency over output and path.

    Counts are completed before they act, so a drafted row gets the very bits it gets once its path is text.
    """
    s, (m, vocabulary) = g.sampling, block.shape
    repeated = s.repetition_penalty != 1
    where, columns, times = g.counts.of(g.text, 0 if repeated else g.prompt_tokens, g.prompt_tokens, vocabulary)
    known = len(where)
    new = [t for t in dict.fromkeys(chain.from_iterable(g.paths)) if t not in where and 0 <= t < vocabulary]
    if not known + len(new):
        return
    places = {t: known + i for i, t in enumerate(new)}
    count = np.zeros((m, known + len(new)))
    count[:, :known] = times
    for row, path in enumerate(g.paths):
        for t in path:
            if 0 <= t < vocabulary:
                count[row, where[t] if t in where else places[t]] += 1
    columns = np.concatenate((columns, np.array(new, np.int64)))
    own = count > 0
    seen = own.copy()
    seen[:, :known] = True
    _act(block, columns, _like(block, count), own, seen, s)


def _act(block: Block, columns: NDArray[np.int64], count: Block, own: NDArray[np.bool_], seen: NDArray[np.bool_], s: Sampling) -> None:
    """The penalties on `columns`; count, own, seen [rows, columns]: how often in the output, whether there, whether anywhere."""
    xp: Any = np
    if not isinstance(block, np.ndarray):
        xp, columns, own, seen = torch, *(torch.from_numpy(a).to(block.device) for a in (columns, own, seen))  # type: ignore[assignment]
    x = block[:, columns]
    if s.repetition_penalty != 1:
        x = xp.where(seen, xp.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty), x)
    if s.presence_penalty or s.frequency_penalty:
        x -= count * s.frequency_penalty + own * s.presence_penalty
    block[:, columns] = x
