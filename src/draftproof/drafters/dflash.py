"""`dflash`: a head that guesses a whole block in one pass from the target's hidden states (arXiv 2602.06036).

What the target left behind waits until a guess is asked for, and is then fused, projected and kept per layer; a round costs one pass
over one block per sequence, however deep the guess. Slots do not know of each other, so under `match` any of a slot's candidates may
follow any of the one before, and a tree is a product of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..core.upload import uploaded
from ..models.heads.cache import HeadCache, entry_bytes
from ..models.heads.dflash import Blocks, DFlash
from ..models.packed import can_pack, pack, sizes
from ..models.taps import abreast
from ..types import Budget, Commit, Draft, SequenceView, Signals
from .base import Needs, Noise, NoOptions, Ranking, Site, published
from .grow import Growth, Margins
from .slots import Line, Slots, chains, parted, trees
from .window import Window

CHUNK = 1024        # hidden states that are fused in one pass, and of one sequence that wait at most


@dataclass(slots=True)
class BlockState:
    """One sequence. The cache has context keys of the positions that the window holds."""

    seq: SequenceView
    ranking: Ranking
    cache: HeadCache | None                 # None: closed
    window: Window = field(default_factory=Window)
    tree: tuple[Growth, int] | None = None  # what grew for the text as it is, and which sequence of it this was
    length: int = 0                         # tokens of that text


class Block:
    """`Slots` of a DFlash head: slots [B, reach, H] are independent of each other."""

    tied = False

    def __init__(self, head: DFlash, slots: Tensor) -> None:
        self.head, self.slots = head, slots
        self.base = head.logits(slots)

    @property
    def ids(self) -> Tensor | None:
        return self.head.ids

    def logits(self, level: int | Tensor, line: Tensor, came: Tensor, previous: Tensor | None) -> Tensor:
        return self.base[line, level]

    def beliefs(self) -> list[Tensor]:
        return []


class DFlashDrafter(NoOptions):
    """`dflash:PATH`. score: perturbed margin, how far log q + g of a token lies above the best other of its slot; a sibling's is
    negative."""

    name = "dflash"
    takes_path: ClassVar[bool] = True
    kind: ClassVar[type[DFlash]] = DFlash

    def __init__(self, head: DFlash, vocab_size: int) -> None:
        """head: ready for its device; its linear layers are packed here where that pays. vocab_size: the target's."""
        self.vocab_size = vocab_size
        self.weight_bytes, self.parameters = sizes(head)
        self.device, self.dtype = head.norm.weight.device, head.dtype
        head.requires_grad_(False).eval()
        if self.device.type == "cpu" and can_pack(self.dtype)[0]:
            pack(head)
        self.head = head
        self.cache_bytes_per_token = entry_bytes(head.depth, head.shape.kv_heads, head.shape.head_dim, self.dtype)
        self.needs = Needs(taps=tuple(sorted(set(head.taps))), parts=("embed", "output"), law=True, tree=True, context=head.context)
        self.margins = Margins()

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published(cls.name, cls.kind.read, path, site), site.target.vocab_size)

    def open(self, seq: SequenceView, signals: Signals | None) -> BlockState:
        shape = self.head.shape
        state = BlockState(seq, Ranking(seq), HeadCache(self.head.depth, shape.kv_heads, shape.head_dim, self.dtype, self.device))
        if signals is not None:
            self._take(state, signals)
        return state

    def close(self, state: BlockState) -> None:
        state.cache, state.tree = None, None
        state.window.close()

    def observe(self, states: Sequence[BlockState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit, rows in zip(states, commits, signals, strict=True):
            if state.cache is None:
                continue
            if state.tree is not None and commit.start == state.length:
                growth, i = state.tree
                growth.learn(i, commit.tokens)
            state.tree = None
            if rows is not None:
                self._take(state, rows)

    @torch.inference_mode()
    def propose(self, states: Sequence[BlockState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.tree = None
            if not budget.depth:
                continue
            depth, reason = self._grant(state, budget.depth)
            if not depth:
                drafts[place] = Draft.empty(self.name, reason)
                continue
            nodes = max(budget.nodes - (budget.depth - depth), depth)
            lines.append(Line(state.seq, state.ranking, place, depth, nodes, budget.prices, reason))
        for some, tree in parted(lines, noise):
            self._catch_up([states[line.place] for line in some])
            slots = self._pass([states[line.place] for line in some], max(line.depth for line in some))
            for line, draft in zip(some, self._draw(some, states, slots, noise, tree), strict=True):
                drafts[line.place] = draft
        return drafts

    def _draw(self, lines: list[Line], states: Sequence[BlockState], slots: Slots, noise: Noise, tree: bool) -> list[Draft]:
        if not tree:
            return chains(lines, slots, noise, self.vocab_size, self.device, self.name)
        drafts, growth = trees(lines, slots, noise, self.vocab_size, self.device, self.name, self.margins)
        for i, line in enumerate(lines):
            states[line.place].tree, states[line.place].length = (growth, i), len(line.seq.tokens)
        return drafts

    def _pass(self, states: Sequence[BlockState], depth: int) -> Slots:
        """One pass over the blocks of these sequences."""
        anchors, positions = uploaded([[state.seq.tokens[-1] for state in states], [len(state.seq.tokens) - 1 for state in states]],
                                      self.device).unbind()
        attend = Blocks(self.head, [state.cache for state in states if state.cache is not None])
        return self._slots(self.head.hidden(anchors, positions, attend)[:, :depth], anchors)

    def _slots(self, hidden: Tensor, anchors: Tensor) -> Slots:
        return Block(self.head, hidden)

    def _grant(self, state: BlockState, depth: int) -> tuple[int, str]:
        """How deep this sequence may draft now (0: not at all), and why less than asked."""
        length, reach, context = len(state.seq.tokens), self.head.reach, self.head.context
        if state.cache is None:
            return 0, "the sequence is closed"
        if state.window.empty or state.window.end != length - 1:
            return 0, "the target's hidden states of the last tokens are not here yet"
        if context is not None and context - length < min(depth, reach):
            return max(0, context - length), f"the drafter's context ends at {context}"
        return (reach, f"a block holds {reach} guesses") if reach < depth else (depth, "")

    def _take(self, state: BlockState, signals: Signals) -> None:
        """Hidden states that the target left."""
        assert state.cache is not None, "of an open sequence"
        if state.window.take(abreast(signals.taps, self.head.taps), signals.start):
            state.cache.truncate(0)
        if state.window.ahead > CHUNK:
            self._catch_up([state])

    @torch.inference_mode()
    def _catch_up(self, states: Sequence[BlockState]) -> None:
        """Project what waits, of all sequences together."""
        behind = [(state.window, state.cache) for state in states if state.window.ahead and state.cache is not None]
        if not behind:
            return
        counts = [window.ahead for window, _ in behind]
        flat = torch.cat([window.due(window.ahead) for window, _ in behind])
        places = uploaded([at for window, _ in behind for at in range(window.at, window.end)], self.device)
        found = [self.head.keys(self.head.fuse(flat[at:at + CHUNK]), places[at:at + CHUNK]) for at in range(0, flat.shape[0], CHUNK)]
        for layer, parts in enumerate(zip(*found, strict=True)):
            keys, values = (torch.cat(part) if len(found) > 1 else part[0] for part in zip(*parts, strict=True))
            for (_, cache), k, v in zip(behind, torch.split(keys, counts), torch.split(values, counts), strict=True):
                cache.write(layer, k, v)
        for (window, cache), count in zip(behind, counts, strict=True):
            cache.advance(count)
            window.read(count)
