"""TableTarget: a tiny, exact Markov "language model" in float64, so that laws can be enumerated and rounds run in microseconds.

The next token's distribution depends on the last `order` tokens through a table drawn from a seed. Nothing is cached
but the tokens themselves, which is the point: whatever the engine commits or rewinds can be compared with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types import Draft, Scores
from .target import LoadFacts, TargetParts
from .tokenizer import Tokenizer


@dataclass(slots=True, eq=False)      # two slots of equal tokens are two slots
class TableSlot:
    tokens: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)  # (token, parent) awaiting rewind

    @property
    def length(self) -> int:
        return len(self.tokens)


class TableTarget:
    """A Target whose law is known. `sharpness` scales the logits: 0 is uniform, large is nearly greedy."""

    def __init__(
        self,
        vocab_size: int = 4,
        order: int = 1,
        seed: int = 0,
        sharpness: float = 1.5,
        context: int = 4096,
        eos_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.vocab_size, self.order, self.context, self.eos_ids, self.tokenizer = vocab_size, order, context, eos_ids, tokenizer
        self.device, self.parts, self.trees = torch.device("cpu"), TargetParts(), True
        self.defaults: dict[str, float] = {}
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size + 1,) * order + (vocab_size,)  # index vocab_size stands for "before the text"
        self.table = (torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness).log_softmax(-1)
        self.open_slots: list[TableSlot] = []
        self.facts = LoadFacts(
            name=f"table-{vocab_size}",
            device="cpu",
            dtype="float64",
            tier=0,
            threads=1,
            weight_bytes=self.table.numel() * 8,
            cache_bytes_per_token=0,
            invisible=True,
            invisible_reason="yes: rows are read from a table",
        )

    def law(self, text: Sequence[int]) -> Tensor:
        """log p [V] float64 of the token after `text`."""
        last = [self.vocab_size] * max(0, self.order - len(text)) + list(text[len(text) - min(self.order, len(text)) :])
        return self.table[tuple(last)]

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> TableSlot:
        slot = TableSlot()
        self.open_slots.append(slot)
        return slot

    def extend(self, slots: Sequence[TableSlot], tokens: Sequence[Tensor]) -> Scores:
        for slot, ids in zip(slots, tokens, strict=True):
            assert not slot.nodes, "rewind before extending"
            slot.tokens.extend(int(t) for t in ids)
        return Scores(torch.stack([self.law(s.tokens) for s in slots]), tuple(range(len(slots) + 1)))

    def score(self, slots: Sequence[TableSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        rows: list[Tensor] = []
        starts = [0]
        for slot, root, draft in zip(slots, roots.tolist(), drafts, strict=True):
            assert not slot.nodes, "rewind before scoring"
            slot.tokens.append(root)
            paths: list[list[int]] = []
            for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
                paths.append((paths[parent] if parent >= 0 else []) + [token])
            slot.nodes = list(zip(draft.tokens.tolist(), draft.parents, strict=True))
            rows += [self.law(slot.tokens + path) for path in [[], *paths]]
            starts.append(len(rows))
        return Scores(torch.stack(rows), tuple(starts))

    def rewind(self, slot: TableSlot, kept: Sequence[int]) -> None:
        parent = -1
        for node in kept:
            token, above = slot.nodes[node]
            assert above == parent, "kept nodes form a path from the root"
            slot.tokens.append(token)
            parent = node
        slot.nodes = []

    def truncate(self, slot: TableSlot, length: int) -> None:
        assert not slot.nodes and length <= slot.length, "a slot only shrinks, between passes"
        del slot.tokens[length:]

    def close(self, slot: TableSlot) -> None:
        self.open_slots.remove(slot)

    def fits(self, tokens: int) -> bool:
        return True
