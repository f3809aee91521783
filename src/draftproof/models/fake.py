"""TableTarget: a tiny, exact Markov "language model" in float64, so that laws can be enumerated and rounds run in microseconds.

The next token's distribution depends on the last `order` tokens through a table drawn from a seed. Nothing is cached
but the tokens themselves, which is the point: whatever the engine commits or rewinds can be compared with the text.

For drafters that read hidden states it has some: one-hot vectors of the last `order` tokens, the same at every layer, and
parts that fit them (an embedding, an identity for the final norm, an output matrix whose logits are the table's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ..types import Draft, Scores
from .target import LoadFacts, TargetParts
from .tokenizer import Tokenizer

LAYERS = 8  # of a model that has none


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
        self.device, self.trees = torch.device("cpu"), True
        self.defaults: dict[str, float] = {}
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size + 1,) * order + (vocab_size,)  # index vocab_size stands for "before the text"
        self.table = (torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness).log_softmax(-1)
        self.parts = _parts(self.table.float(), generator)
        self.open_slots: list[TableSlot] = []
        self._taps: tuple[int, ...] = ()
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
        return self.table[self._last(text)]

    def set_taps(self, layers: Sequence[int]) -> None:
        self._taps = tuple(layers)

    def hidden(self, text: Sequence[int]) -> Tensor:
        """What the layers say after `text`: [(V + 1) ** order] float32."""
        place = 0
        for token in self._last(text):
            place = place * (self.vocab_size + 1) + token
        row = torch.zeros((self.vocab_size + 1) ** self.order)
        row[place] = 1.0
        return row

    def _last(self, text: Sequence[int]) -> tuple[int, ...]:
        return (*[self.vocab_size] * (self.order - len(text)), *text[max(0, len(text) - self.order) :])

    def _tapped(self, texts: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        if not self._taps:
            return {}
        rows = torch.stack([self.hidden(text) for text in texts])
        return {layer: rows for layer in self._taps}

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> TableSlot:
        slot = TableSlot()
        self.open_slots.append(slot)
        return slot

    def extend(self, slots: Sequence[TableSlot], tokens: Sequence[Tensor]) -> Scores:
        seen: list[list[int]] = []
        for slot, ids in zip(slots, tokens, strict=True):
            assert not slot.nodes, "rewind before extending"
            for token in ids.tolist():
                slot.tokens.append(token)
                if self._taps:
                    seen.append(slot.tokens.copy())
        return Scores(torch.stack([self.law(s.tokens) for s in slots]), tuple(range(len(slots) + 1)), self._tapped(seen))

    def score(self, slots: Sequence[TableSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        seen: list[list[int]] = []
        starts = [0]
        for slot, root, draft in zip(slots, roots.tolist(), drafts, strict=True):
            assert not slot.nodes, "rewind before scoring"
            slot.tokens.append(root)
            paths: list[list[int]] = []
            for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
                paths.append((paths[parent] if parent >= 0 else []) + [token])
            slot.nodes = list(zip(draft.tokens.tolist(), draft.parents, strict=True))
            seen += [slot.tokens + path for path in [[], *paths]]
            starts.append(len(seen))
        return Scores(torch.stack([self.law(text) for text in seen]), tuple(starts), self._tapped(seen))

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

    def filled(self) -> float:
        """It has no cache."""
        return 0.0

    def fits(self, tokens: int) -> bool:
        return True


def _parts(table: Tensor, generator: torch.Generator) -> TargetParts:
    vocab_size = table.shape[-1]
    rows = table.reshape(-1, vocab_size)
    embed, output = nn.Embedding(vocab_size, rows.shape[0]), nn.Linear(rows.shape[0], vocab_size, bias=False)
    embed.weight.data = torch.randn(embed.weight.shape, generator=generator)
    output.weight.data = rows.t().contiguous()
    config = SimpleNamespace(hidden_size=rows.shape[0], num_hidden_layers=LAYERS, vocab_size=vocab_size, model_type="table")
    config.get_text_config = lambda: config
    layers = [nn.Identity() for _ in range(LAYERS)]
    return TargetParts(embed.requires_grad_(False), output.requires_grad_(False), layers, config, nn.Identity())
