"""`peagle`: EAGLE-3's network taught to fill several masks at once (P-EAGLE, arXiv 2602.01469).

A round is one pass: the entries that the target has left since the last one, and depth − 1 masks behind them. The last entry's output
guesses the first token, each mask's the next. Only true entries stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..core.upload import uploaded
from ..models.heads.cache import HeadCache, HeadPass
from ..models.heads.peagle import PEagleHead
from ..types import Budget, Draft
from .base import Noise, NoOptions, Site, published
from .lines import RecurrentState
from .pard import Masks
from .recurrent import CHUNK, RecurrentDrafter
from .slots import Line, chains, parted, trees


class PEagleDrafter(NoOptions, RecurrentDrafter):
    """`peagle:PATH`. score: perturbed margin; a sibling's is negative."""

    name = "peagle"
    takes_path: ClassVar[bool] = True
    head: PEagleHead

    def __init__(self, head: PEagleHead, vocab_size: int) -> None:
        super().__init__(head, vocab_size, graphs=False)
        self.needs = replace(self.needs, prices=False)              # all of a draft is one pass

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published(cls.name, PEagleHead.read, path, site), site.target.vocab_size)

    @cached_property
    def _blank(self) -> Tensor:
        """`PEagleHead.blank`, which no round changes: it reads all of fc."""
        return self.head.blank()

    @torch.inference_mode()
    def propose(self, states: Sequence[RecurrentState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.learn = None
            if not budget.depth:
                continue
            reason = self._silence(state)
            if reason:
                drafts[place] = Draft.empty(self.name, reason)
                continue
            lines.append(Line(state.seq, state.ranking, place, budget.depth, max(budget.nodes, budget.depth), budget.prices))
        for some, tree in parted(lines, noise):
            depths = [line.depth for line in some]
            slots = Masks(self._pass([states[line.place] for line in some], depths), depths, self.head.ids)
            if tree:
                found, growth = trees(some, slots, noise, self.vocab_size, self.device, self.name, self.margins)
                for i, line in enumerate(some):
                    states[line.place].learn, states[line.place].length = partial(growth.learn, i), len(line.seq.tokens)
            else:
                found = chains(some, slots, noise, self.vocab_size, self.device, self.name)
            for line, draft in zip(some, found, strict=True):
                drafts[line.place] = draft
        return drafts

    def _pass(self, states: Sequence[RecurrentState], depths: Sequence[int]) -> Tensor:
        """Read what the caches lack, and masks behind it, in one pass; logits [sum of depths, Vd], sequence after sequence."""
        while behind := [state for state in states if self._missing(state) > CHUNK]:
            self._feed(behind)
        due = [self._missing(state) for state in states]
        counts = [own + depth - 1 for own, depth in zip(due, depths, strict=True)]
        found: list[Tensor] = []
        for state, own, out in zip(states, due, torch.split(self._step(states, due, counts), counts), strict=True):
            if own:
                assert state.cache is not None, "the sequence is open"
                state.cache.advance(own)
                state.window.read(own)
                state.last = out[own - 1].clone()
            assert state.last is not None, "a cache that lacks nothing has read something"
            found += [state.last[None], out[own:]]
        return self.head.logits(torch.cat(found))

    def _step(self, states: Sequence[RecurrentState], due: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Outputs [rows, H] of `counts` rows of each sequence: the entries that are due, and masks."""
        fed = [self._due(state) for state, own in zip(states, due, strict=True) if own]
        true = iter(torch.split(self.head.fuse(torch.cat([rows for rows, _ in fed])), [len(text) for _, text in fed]) if fed else ())
        texts, blank = iter(text for _, text in fed), self._blank
        tokens: list[int] = []
        places: list[int] = []
        hidden: list[Tensor] = []
        busy: list[tuple[HeadCache, int]] = []
        for state, own, count in zip(states, due, counts, strict=True):
            assert state.cache is not None, "the sequence is open"
            state.cache.truncate(state.window.held)
            tokens += [*(next(texts) if own else ()), *[self.head.mask_token] * (count - own)]
            places += range(state.window.at, state.window.at + count)
            hidden += [*([next(true)] if own else []), blank.expand(count - own, -1)]
            busy += [(state.cache, count)] if count else []
        if not tokens:
            return blank[:0]
        ids, at = uploaded([tokens, places], self.device).unbind()
        return self.head.step(ids, torch.cat(hidden), at, HeadPass([cache for cache, _ in busy], [count for _, count in busy]))
