"""The first layers of a target as a language model of its own: same weights, same pages, no second cache.

    embed → layers 0 … E−1 → final norm → output matrix        (LayerSkip, arXiv 2404.16710: self-speculation by early exit)

What the target wrote for the text is what these layers would have written, so there is nothing to prefill. Keys of drafted
positions go into the sequence's pages behind its text, only in the first E layers; the scoring pass computes them again and
overwrites them, and whatever is not overwritten lies behind the text, where no row looks. So not one bit of the text depends
on them. Pages shared with other sequences end before the text does, and are never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.upload import uploaded
from ..errors import OptionError
from ..types import Draft, Scores
from .cache import PagedSlot
from .paged import PagedTarget, paged_of
from .passes import inferring
from .target import Target


@dataclass(slots=True, eq=False)
class ShallowSlot:
    """The place of a sequence in the target's cache, and how many drafted positions behind it hold keys now."""

    base: PagedSlot
    drafted: int = 0
    nodes: None = None      # passes here are chains that nobody judges
    state: None = None      # and targets with recurrent states are refused

    @property
    def length(self) -> int:
        return self.base.length + self.drafted

    @property
    def pages(self) -> list[int]:
        return self.base.pages

    @property
    def closed(self) -> bool:
        return self.base.closed


class Shallow:
    """What `ModelDrafter` asks of a `Target`, over the places that the target itself has opened (`join`)."""

    def __init__(self, target: PagedTarget, exit: int) -> None:
        """exit: how many layers, 1 … all. Raises OptionError for any other number."""
        count = len(target.parts.layers)
        if not 1 <= exit <= count:
            raise OptionError(f"layer-skip: exit={exit}, but {target.facts.name} has {count} layers; expected an integer from 1 to {count}")
        self.target, self.exit = target, exit
        self.vocab_size, self.context, self.device = target.vocab_size, target.context, target.device
        self.facts = replace(target.facts, name=f"the first {exit} of {count} layers of {target.facts.name}", weight_bytes=0,
                             cache_bytes_per_token=0, experts=None)
        if target.fused is not None:
            self._fused = target.fused.first(exit)
        else:
            self._model = first_layers(target.model, target.parts.layers, exit)

    def join(self, slot: PagedSlot) -> ShallowSlot:
        return ShallowSlot(slot)

    def fits(self, tokens: int) -> bool:
        """Always: the target has made the room."""
        return True

    def truncate(self, slot: ShallowSlot, length: int) -> None:
        """Forget drafted positions ≥ length; the text is the target's to shorten."""
        slot.drafted = max(0, min(slot.drafted, length - slot.base.length))

    def close(self, slot: ShallowSlot) -> None:
        slot.drafted = 0

    @inferring
    def extend(self, slots: Sequence[ShallowSlot], tokens: Sequence[Tensor]) -> Scores:
        """Feed tokens[i] [n_i ≥ 1] int64 behind slots[i], all in one pass; logits [B, V] of each slot's last row.

        Raises CacheFull if the target has no page left for them.
        """
        target = self.target
        for slot in slots:
            assert slot.base.length >= slot.base.shared * target.pool.page_tokens, "shared pages end before the text does"
            assert slot.base.nodes is None, "the target awaits a rewind"
        drafts = [Draft.chain(ids[1:]) for ids in tokens]
        ends = [sum(len(d) + 1 for d in drafts[: i + 1]) - 1 for i in range(len(drafts))]
        keep: list[int] | None = ends
        if target.whole_tiles and ends == [0]:          # no product sees one row: a second one that nobody reads
            keep, drafts = None, [Draft.chain(tokens[0])]
        elif target.whole_tiles and len(ends) == 1:
            keep = ends * 2
        p = target._plan(cast(Sequence[PagedSlot], slots), drafts, torch.stack([ids[0] for ids in tokens]))
        if target.fused is not None:
            logits = self._fused(p, target.pool, keep)
        else:
            more = {} if keep is None else {"logits_to_keep": uploaded(keep, self.device)}
            p = p.placed()
            logits = self._model(input_ids=p.ids, position_ids=p.positions, use_cache=False, draftproof_pass=p,
                                 draftproof_pool=target.pool, **more).logits[0]
        for slot, ids in zip(slots, tokens, strict=True):
            slot.drafted += ids.shape[0]
        return Scores(logits[: len(ends)], tuple(range(len(slots) + 1)))


def first_layers(model: nn.Module, layers: Sequence[nn.Module], count: int) -> Any:
    """The same model, its own code and weights, with a list of only `count` layers; the model itself is left as it is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and list(module) == list(layers):
            return _with(model, name.split("."), nn.ModuleList(list(module)[:count]))
    raise OptionError(f"layer-skip: {type(model).__name__} holds its layers in no list that could be cut; use another drafter")


def _with(module: nn.Module, path: Sequence[str], part: nn.Module) -> nn.Module:
    """A copy of `module` that shares everything but the submodule at `path`, which is `part`."""
    twin = copy(module)
    twin._modules = dict(module._modules)
    twin._modules[path[0]] = part if len(path) == 1 else _with(cast(nn.Module, module._modules[path[0]]), path[1:], part)
    return twin


def exit_of(target: PagedTarget) -> int | None:
    """The exit layer that the checkpoint itself names (transformers' `assistant_early_exit`), if it does."""
    for home in (getattr(target.model, "generation_config", None), target.parts.config):
        found = getattr(home, "assistant_early_exit", None)
        if found is not None:
            return int(found)
    return None


def shallow(target: Target, exit: int | None) -> Shallow:
    """The first `exit` layers of a target with its own pages. Raises OptionError saying why it cannot be."""
    pages = paged_of(target, "layer-skip", "pages it shares")
    if pages.states is not None:
        raise OptionError(f"layer-skip: {target.facts.name} has recurrent states, which its first layers alone would leave behind; "
                          "expected a model of attention alone; use another drafter")
    exit = exit_of(pages) if exit is None else exit
    if exit is None:
        raise OptionError(f"layer-skip: {target.facts.name} does not say after which layer to leave; "
                          f"expected layer-skip:exit=E with 1 ≤ E ≤ {len(target.parts.layers)}, as in LayerSkip checkpoints trained for it")
    return Shallow(pages, exit)
