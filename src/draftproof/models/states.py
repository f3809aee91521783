"""Recurrent states beside pages: what layers of linear attention and state spaces remember of a text, which has no positions to cut at.

    the text        ░░░░░░░░░░░░░░░░░░▒▒▒▒▒▒█        ░ taken: in memory       ▒ owed: in the history       █ the root, and what is guessed
    history         [rows that reach into the next one's convolution][owed][those of the last pass]

Memory takes in only what cannot fall: a pass goes through its guesses in a thread's own memory and leaves its rows in the history, and the
next pass begins with those that stood (kernels/recurrence.c). So a rejection costs nothing, no state is copied, and the same additions are
made whatever was guessed. What a caller appends may be cut again for a while (a draft model's slot), so memory stays `held` rows behind it,
and twice as many as such a cut takes away where that was too few.
What is cut further back begins anew, and is read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native import Walk

HELD = 16       # rows
MOST_OWED = 64  # that memory leaves for the end of a page; who appends as many will not cut them, and no draft is cut as far
AGAIN = 512     # tokens of a pass that reads a text again


@dataclass(slots=True)
class States:
    """Those of a model. memory, row: shapes of a text's memory [layers, value_heads, key_dim · value_dim] and of a layer's row in the
    history; reach: how many rows before it a convolution reads. page: how many tokens one has: memory stops at the end of each, so that
    other texts may go on from there."""

    memory: tuple[int, ...]
    row: int
    reach: int
    dtype: torch.dtype
    page: int = 1 << 62
    held: int = HELD

    @property
    def layers(self) -> int:
        return self.memory[0]

    def new(self) -> State:
        return State(self, torch.zeros(self.memory), torch.zeros(self.layers, self.reach + 2 * self.held, self.row, dtype=self.dtype))

    def behind(self, mark: Mark) -> State:
        """One that goes on from there."""
        state = self.new()
        state.memory.copy_(mark.memory)
        state.history[:, : self.reach] = mark.reach
        state.taken = mark.taken
        return state

    @property
    def bytes(self) -> int:
        """Of a text."""
        return self._bytes(self.reach + 2 * self.held)

    @property
    def mark_bytes(self) -> int:
        """Of a `Mark`."""
        return self._bytes(self.reach)

    def _bytes(self, rows: int) -> int:
        """With so many of its rows in each layer's history."""
        return math.prod(self.memory) * torch.float32.itemsize + self.layers * rows * self.row * self.dtype.itemsize


class Mark(NamedTuple):
    """A state at the end of a page: memory, and the rows that reach into what comes behind it [layers, reach, …]."""

    taken: int
    memory: Tensor
    reach: Tensor


@dataclass(slots=True)
class State:
    """One text's. taken: tokens that memory has taken in; owed: places of those behind, beyond the reach; flight: the place of the root of
    the last pass; marks: what it was at the end of pages, by how many tokens it had taken: the last one that was met."""

    of: States
    memory: Tensor
    history: Tensor
    taken: int = 0
    owed: list[int] = field(default_factory=list)
    flight: int = 0
    marks: dict[int, Mark] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many tokens a pass finds here."""
        return self.taken + len(self.owed)

    def walk(self, lines: Sequence[Sequence[int]], certain: int) -> Walk:
        """Through rows of a pass. certain: how many of the first line's the caller appends; 0: it guesses, and what is owed stands."""
        first, rows = lines[0][0], max(map(max, lines)) - lines[0][0] + 1
        taken = self._takes(certain)
        needed = self.of.reach + len(self.owed) + rows - taken
        if needed > self.history.shape[1]:
            wider = self.history.new_zeros(self.of.layers, needed, self.of.row)
            wider[:, : self.history.shape[1]] = self.history
            self.history = wider
        return Walk(self.memory, self.history, list(self.owed), taken, lines, first, rows)

    def _takes(self, certain: int) -> int:
        """How many of those owed and of the rows that are certain memory takes in. It stops at the end of a page, unless much would be
        owed."""
        whole, held = len(self.owed) + certain, self.of.held if certain else 0
        taken = whole - held if whole > 2 * held else 0
        end = (self.taken + whole) // self.of.page * self.of.page - self.taken
        return end if end > 0 and whole - end <= MOST_OWED and (end <= taken or certain >= MOST_OWED) else taken

    def passed(self, walk: Walk) -> None:
        """The pass was run; its rows lie behind those that are owed still."""
        self.taken += walk.taken
        left = len(self.owed) - walk.taken
        self.owed, self.flight = list(range(max(left, 0))), left
        usual = self.of.reach + max(left + walk.rows, 2 * self.of.held)
        if self.history.shape[1] > 4 * usual:
            self.history = self.history[:, :usual].clone()
        if walk.taken and self.taken % self.of.page == 0:
            self.marks = {self.taken: Mark(self.taken, self.memory.clone(), self.history[:, : self.of.reach].clone())}

    def keep(self, rows: Sequence[int]) -> None:
        """These rows of the last pass, counted from the text's first one, are the text's."""
        self.owed += [place for row in rows if (place := self.flight + row) >= 0]

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if length < self.taken:
            if self.length - length <= MOST_OWED:
                self.of.held = max(self.of.held, 2 * (self.length - length))
            self.forget()
        del self.owed[length - self.taken :]

    def forget(self) -> None:
        """All of it: no text has this length, so the next pass reads its text again, into a new state."""
        self.taken, self.owed = -1, []


def states_of(layers: Sequence[Any]) -> States | None:
    """Of fused layers, which are numbered here; None: they have no states."""
    found = [layer.state for layer in layers if layer.state is not None]
    for number, layer in enumerate(found):
        layer.number = number
    if not found:
        return None
    one = found[0]
    assert all((layer.memory, layer.row, layer.reach) == (one.memory, one.row, one.reach) for layer in found), "states of one shape"
    return States((len(found), *one.memory), one.row, one.reach, one.dtype)


def read_again(target: Any, slots: Sequence[Any]) -> None:
    """Give the target's states that have forgotten their text the text, as `extend` does."""
    for slot in slots:
        if slot.state is None or slot.state.length == slot.length:
            continue
        text, pages = slot.tokens[:], len(slot.pages)
        try:
            target.truncate(slot, 0)
            target.adopt(slot, text)
            if pages - len(slot.pages) <= target.pool.available():  # nobody else is to take what it was opened with
                target._reach(slot, pages * target.pool.page_tokens)
            for start in range(slot.length, len(text), AGAIN):
                target.extend([slot], [torch.tensor(text[start : start + AGAIN])])
        except BaseException:
            slot.held[:] = text
            slot.state.forget()
            raise
