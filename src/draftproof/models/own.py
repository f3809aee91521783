"""What tiers 2 and 3 share: the cache is the model's own, one per sequence and one sequence per pass. Chains only."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from .taps import Taps
from .target import LoadFacts, TargetParts, reserve
from .tokenizer import Tokenizer

CHUNK = 512  # tokens per pass when a cache is rebuilt from its text
ADVICE = "decode it with transformers' own generate, or look for a release of transformers that mends this"
# what families call their cache, in forward's arguments and its output: the first since transformers 5.24, where it stands for the next two
CACHES = ("cache", "past_key_values", "cache_params", "state")


def cache_name(model: nn.Module) -> str | None:
    """One of `CACHES`; None for a model that takes no cache."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in takes), None)


def difference(found: Tensor, expected: Tensor) -> float:
    """Median over rows of ‖a − b‖ / ‖b − mean b‖."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((found.float() - expected).norm(dim=-1) / spread.clamp_min(1e-9)).median())


@dataclass(slots=True, eq=False)
class OwnSlot:
    """cache None: nothing is known of the tokens. reserved: tokens that it may grow to."""

    reserved: int = 0
    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


S = TypeVar("S", bound=OwnSlot)


class OwnCacheTarget(ABC, Generic[S]):
    """The part of `Target` that does not depend on how such a cache goes back."""

    trees = False
    slot: ClassVar[type[OwnSlot]]

    def __init__(self, model: nn.Module, *, vocab_size: int, context: int, cache_tokens: int, whole_tiles: bool, facts: LoadFacts,
                 parts: TargetParts, tokenizer: Tokenizer | None, defaults: dict[str, float], eos_ids: tuple[int, ...]) -> None:
        self.model, self.vocab_size, self.context, self.cache_tokens = model, vocab_size, context, cache_tokens
        self.facts, self.parts, self.tokenizer, self.defaults, self.eos_ids = facts, parts, tokenizer, defaults, eos_ids
        self.whole_tiles, self.device = whole_tiles, next(model.parameters()).device
        self.slots: list[S] = []
        self._taps = Taps(parts.layers)

    @abstractmethod
    def _settle(self, slot: S) -> None:
        """Take the cache back to the slot's tokens, where it holds more."""

    def set_taps(self, layers: Sequence[int]) -> None:
        self._taps.set(layers)

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> S:
        slot: S = self.slot(reserve(self._held(), len(tokens) + room, self.cache_tokens))  # type: ignore[assignment]
        self.slots.append(slot)
        return slot

    def close(self, slot: S) -> None:
        if slot in self.slots:
            self.slots.remove(slot)

    def fits(self, tokens: int) -> bool:
        return self._held() + tokens <= self.cache_tokens

    def filled(self) -> float:
        return self._held() / self.cache_tokens

    def _held(self) -> int:
        return sum(max(slot.length, slot.reserved) for slot in self.slots)

    def truncate(self, slot: S, length: int) -> None:
        assert not slot.nodes and length <= slot.length, "a slot only shrinks, between passes"
        del slot.tokens[length:]
        self._settle(slot)

    def rewind(self, slot: S, kept: Sequence[int]) -> None:
        assert list(kept) == list(range(len(kept))), "kept nodes of a chain are its head"
        slot.tokens += slot.nodes[: len(kept)]
        slot.nodes = []
        self._settle(slot)
