"""`pard`: a small language model that was taught to fill several masks at once (arXiv 2504.18583).

A round is one pass: the text that the model has not read yet, then depth − 1 mask tokens; the last token's logits guess the
first token, each mask's the next. The masks are taken back at once, so the slot never holds anything but text. Published
as an ordinary causal language model whose config names the mask: `pard_token`, or `mask_token_id`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from ..core.upload import rows_of, uploaded
from ..errors import LoadError
from ..models.target import Target
from ..types import Budget, Commit, Draft, SequenceView, Signals
from .base import Noise, Ranking, Site
from .grow import Growth, Margins
from .model import ModelDrafter, ModelState
from .slots import Line, chains, parted, trees
from .vocabulary import Words, require_same


class Masks:
    """`Slots` of one pass: logits [sum of depths, V] of the last text token and the masks, sequence after sequence."""

    tied = False

    def __init__(self, rows: Tensor, depths: Sequence[int], ids: Tensor | None = None) -> None:
        """ids: the target's id of each column, None for its vocabulary."""
        self.rows, self.ids, starts = rows, ids, [0]
        for depth in depths:
            starts.append(starts[-1] + depth)
        self.starts, self.last = uploaded([starts[:-1], depths], rows.device).unbind()

    def logits(self, level: int | Tensor, line: Tensor, came: Tensor, previous: Tensor | None) -> Tensor:
        at = level if isinstance(level, Tensor) else uploaded(level, self.rows.device)
        return self.rows[self.starts[line] + torch.minimum(self.last[line] - 1, at)]      # a tree asks every level of all, and cuts

    def beliefs(self) -> list[Tensor]:
        return []


@dataclass(slots=True)
class PardState(ModelState):
    """tree: what grew for the text of `base` tokens, and which sequence of it this was."""

    tree: tuple[Growth, int] | None = None


class PardDrafter(ModelDrafter):
    """`pard:PATH`. score: perturbed margin, as for `model`."""

    def __init__(self, lm: Target, mask_token: int, vocab_size: int | None = None, prefill_chunk: int = 512) -> None:
        """mask_token: what stands where a token is to be guessed. vocab_size: the target's, where it differs by padding."""
        super().__init__(lm, vocab_size, prefill_chunk, "pard")
        self.needs = replace(self.needs, prices=False)              # all of a draft is one pass
        self.mask_token, self.margins, self.weight_bytes = mask_token, Margins(), lm.facts.weight_bytes

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        from ..models.load import builtin, load_target

        lm = load_target(path or builtin("pard"), site.load.of_draft())
        if lm.facts.tier == 3:
            raise LoadError(f"{lm.facts.name} keeps a recurrent state, from which masks cannot be taken back; expected a model whose cache "
                            "holds keys and values")
        drafter = cls(lm, mask_token_of(lm), site.target.vocab_size, site.load.prefill_chunk)
        drafter.checks = require_same(Words.of(site.target), Words.of(lm))
        return drafter

    def open(self, seq: SequenceView, signals: Signals | None) -> PardState:
        state = PardState(seq, Ranking(seq))
        self._seat(state)
        return state

    def observe(self, states: Sequence[ModelState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit in zip(states, commits, strict=True):
            assert isinstance(state, PardState)
            if state.tree is not None and commit.start == state.base:
                growth, i = state.tree
                growth.learn(i, commit.tokens)
            state.tree = None
        super().observe(states, commits, signals)

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            assert isinstance(state, PardState)
            self._settle(state, 0)
            state.tree = None
            if budget.depth:
                depth, reason = self._grant(state, budget.depth)
                if depth:
                    nodes = max(budget.nodes - (budget.depth - depth), depth)
                    lines.append(Line(state.seq, state.ranking, place, depth, nodes, budget.prices, reason))
                else:
                    drafts[place] = Draft.empty(self.name, reason)
        if not lines:
            return drafts
        rows = self._pass([states[line.place] for line in lines], [line.depth for line in lines])
        ends = list(accumulate((line.depth for line in lines), initial=0))
        for some, tree in parted(lines, noise):
            mine = [rows[ends[i]:ends[i + 1]] for i, line in enumerate(lines) if line in some]
            slots = Masks(rows if len(mine) == len(lines) else torch.cat(mine), [line.depth for line in some])
            if tree:
                found, growth = trees(some, slots, noise, self.vocab_size, self.lm.device, self.name, self.margins)
                for i, line in enumerate(some):
                    states[line.place].tree = (growth, i)  # type: ignore[attr-defined]
            else:
                found = chains(some, slots, noise, self.vocab_size, self.lm.device, self.name)
            for line, draft in zip(some, found, strict=True):
                drafts[line.place] = draft
        return drafts

    def _pass(self, states: Sequence[ModelState], depths: Sequence[int]) -> Tensor:
        """Read what the slots lack, and masks behind it, in one pass; logits [sum of depths, target's ids], sequence after sequence."""
        slots = [state.slot for state in states if state.slot is not None]
        texts = [state.seq.tokens for state in states]
        while behind := [(slot, text) for slot, text in zip(slots, texts, strict=True) if len(text) - slot.length > self.chunk]:
            parts = [uploaded(text[slot.length:slot.length + self.chunk], self.lm.device) for slot, text in behind]
            self.lm.extend([slot for slot, _ in behind], parts)
        unread = [list(text[slot.length:]) for slot, text in zip(slots, texts, strict=True)]
        fed = [uploaded(ids + [self.mask_token] * (depth - 1), self.lm.device) for ids, depth in zip(unread, depths, strict=True)]
        done = False
        try:
            scores = self.lm.score(slots, torch.stack([ids[0] for ids in fed]), [Draft.chain(ids[1:]) for ids in fed])
            for slot, ids in zip(slots, unread, strict=True):
                self.lm.rewind(slot, range(len(ids) - 1))
            done = True
        finally:
            for slot, state in zip(slots, states, strict=True):
                if done:
                    state.base, state.guess = len(state.seq.tokens), torch.empty(0)      # the slot holds the last token too, for now
                else:
                    self.lm.rewind(slot, ())
                    self._cut(state, min(slot.length, len(state.seq.tokens) - 1))
        lasts = [start + len(ids) - 1 for start, ids in zip(scores.starts, unread, strict=False)]
        logits = rows_of(scores.logits, [last + i for last, depth in zip(lasts, depths, strict=True) for i in range(depth)])
        return functional.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-math.inf)


def mask_token_of(lm: Target) -> int:
    """`pard_token` or `mask_token_id` of the model's config. Raises LoadError where there is none, or where it is no token of the model."""
    config = lm.parts.config
    found = next((getattr(config, name) for name in ("pard_token", "mask_token_id") if getattr(config, name, None) is not None), None)
    if getattr(config, "target_layers", None):
        raise LoadError(f"{lm.facts.name} reads hidden states of the target (its config has target_layers: PARD-2), which is another "
                        "network; expected a plain PARD model")
    if not isinstance(found, int) or not 0 <= found < lm.vocab_size:
        raise LoadError(f"{lm.facts.name}: pard_token is {found!r}; expected a token in [0, {lm.vocab_size}) in config.json, as pard_token "
                        "or mask_token_id; for an ordinary language model name drafter model")
    return found
