"""A multi-token prediction head of several layers, as a drafter runs it: guess k is made by layer k mod n (DeepSeek-V3, arXiv 2412.19437).

Layer j of the chain reads what layer j − 1 said one token earlier. So every layer has an entry for every token, all caches have
one length, and the entry of a token in layer j is the pair (output of layer j − 1 at the entry before, the token). Layer 0 reads
the target's hidden state there, and for a guess, of which there is none, what the last layer said. Layer j has no entry for the
first j tokens of its window: their places are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .cache import HeadCache, HeadPass
from .mtp import MtpHead


class Layered(nn.Module):
    """What a drafter asks of a head, for one of n > 1 layers. Hidden states between steps are all layers' outputs side by side
    [R, n · H]. `at`: the number of the guess that `logits` is asked for."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__()
        self.head, self.at = head, 0
        self.taps, self.depth, self.context, self.ids = head.taps, head.depth, head.context, head.ids
        self.kv_heads, self.head_dim, self.size = head.kv_heads, head.head_dim, head.size
        self._before: WeakKeyDictionary[HeadCache, Tensor] = WeakKeyDictionary()      # outputs [n · H] at each cache's last true entry

    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: HeadPass) -> Tensor:
        """hidden: the target's [R, H], for rows of the text in order, or this function's own [R, n · H], for guesses."""
        size, true = self.size, hidden.shape[-1] == self.size
        outs: list[Tensor] = []
        for layer in range(self.depth):
            if layer == 0:
                before = hidden if true else hidden[:, -size:]
            else:
                before = self._earlier(outs[-1], layer - 1, attend) if true else hidden[:, (layer - 1) * size:layer * size]
            outs.append(self.head.step(tokens, before, positions, _hidden_from(attend, layer) if layer else attend, layer))
        packed = torch.cat(outs, -1)
        if true:
            ends = torch.tensor(attend.counts).cumsum(0).tolist()
            self._before.update({cache: packed[end - 1].clone() for cache, end in zip(attend.caches, ends, strict=True)})
        return packed

    def logits(self, hidden: Tensor) -> Tensor:
        layer = self.at % self.depth
        return self.head.logits(hidden[:, layer * self.size:(layer + 1) * self.size], layer)

    def _earlier(self, out: Tensor, layer: int, attend: HeadPass) -> Tensor:
        """A layer's outputs one entry earlier, within each sequence."""
        rows: list[Tensor] = []
        for cache, those in zip(attend.caches, torch.split(out, list(attend.counts)), strict=True):
            known = self._before[cache][layer * self.size:(layer + 1) * self.size] if cache.length else torch.zeros_like(those[0])
            rows += [known[None], those[:-1]]
        return torch.cat(rows)


def _hidden_from(attend: HeadPass, layer: int) -> HeadPass:
    """The same pass, in which nobody but themselves sees the first entries, which this layer does not have."""
    masks: Sequence[Tensor] = [_without_first(cache, count, mask, layer)
                               for cache, count, mask in zip(attend.caches, attend.counts, attend.masks, strict=True)]
    return HeadPass(attend.caches, attend.counts, masks)


def _without_first(cache: HeadCache, count: int, mask: Tensor | None, layer: int) -> Tensor:
    seen = torch.ones(count, cache.length + count, dtype=torch.bool, device=cache.device) if mask is None else mask.clone()
    seen[:, :layer] = False
    early = range(cache.length, min(layer, cache.length + count))
    for place in early:
        seen[place - cache.length, place] = True
    return seen
