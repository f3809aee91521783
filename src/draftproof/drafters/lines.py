"""One sequence as a recurrent drafter keeps it, and within one `propose`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..models.heads.cache import HeadCache
from ..types import Budget, SequenceView
from .base import Ranking
from .window import Window


@dataclass(slots=True)
class RecurrentState:
    """One sequence. Entry i of the cache is of position window.first + i; `window.held` of them are true, what lies behind was guessed."""

    seq: SequenceView
    ranking: Ranking
    cache: HeadCache | None                 # None: closed
    window: Window = field(default_factory=Window)
    last: Tensor | None = None              # [H] output of the last true entry
    learn: Callable[[Sequence[int]], None] | None = None    # from what becomes of the tree that grew for the text as it is
    length: int = 0                         # tokens of that text


@dataclass(slots=True)
class Line:
    """One sequence within one `propose`."""

    state: RecurrentState
    cache: HeadCache
    place: int                              # of its draft in the answer
    budget: Budget
    reason: str = ""
    rows: list[int] = field(default_factory=list)         # its row of every level's picks, counted over the whole round
    path: tuple[int, ...] = ()                            # the chain on the host, where it is read
    extra: list[int] = field(default_factory=list)        # siblings beside each level of the chain
    due: int = 0                                          # entries that it lacks before it drafts

    @property
    def seq(self) -> SequenceView:
        return self.state.seq


class Ways(NamedTuple):
    """Chains that are recorded, other chains, trees that are recorded, other trees."""

    replayed: list[Line]
    chains: list[Line]
    planted: list[Line]
    trees: list[Line]
