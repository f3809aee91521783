"""What the engine asks of a target, whatever stands behind it: paged attention, a model's own cache, or a table.

Invariant between rounds: a slot holds the keys of every token of the text but the last (`slot.length == len(text) − 1`);
the last token is the root of the next scoring pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.budget import distinct_experts
from ..errors import CacheFull
from ..types import Draft, Scores
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """Routed experts of a mixture: `count` in a layer, of which each row chooses `chosen`; parameters and bytes of all of them."""

    count: int
    chosen: int
    bytes: int
    parameters: int

    def unread(self, rows: float) -> float:
        """The share of them that a pass over so many rows is expected to leave unread (`distinct_experts`)."""
        return 1 - distinct_experts(self.count, self.chosen, rows) / self.count


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """What a load decided and measured. Every automatic choice carries its reason."""

    name: str
    device: str
    dtype: str
    tier: int  # 1 own pages · 2 the model's cache · 3 recurrent · 0 a table
    threads: int
    weight_bytes: int
    cache_bytes_per_token: int
    invisible: bool  # speculation is invisible to the bit, as measured
    invisible_reason: str  # "yes: …" or the rule that fails
    reasons: dict[str, str] = field(default_factory=dict)  # choice → why
    parameters: int = 0
    experts: ExpertFacts | None = None  # None: no mixture of experts

    @property
    def active_parameters(self) -> int:
        """Those that one row goes through."""
        return self.parameters - (round(self.experts.parameters * self.experts.unread(1)) if self.experts else 0)

    def pass_bytes(self, rows: float) -> float:
        """Bytes of weights that a pass over so many rows is expected to read: all of them, but for experts that no row chooses."""
        return self.weight_bytes - (self.experts.bytes * self.experts.unread(rows) if self.experts else 0.0)


CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")      # Gemma's and others', RecurrentGemma's, xLSTM's


@dataclass(frozen=True)
class TargetParts:
    """Read-only parts that drafters may borrow."""

    embed: torch.nn.Module | None = None
    output: torch.nn.Module | None = None
    layers: Sequence[torch.nn.Module] = ()
    config: Any = None
    norm: torch.nn.Module | None = None  # the final norm: finished(output(norm(output of the last layer))) are the logits
    saved_as: torch.dtype | None = None  # of the checkpoint's weights; they may be loaded in another

    @cached_property
    def finish(self) -> tuple[float, float]:
        """(what the output matrix's products are multiplied by, at what they are softly capped: c · tanh(x / c), 0 where they are not):
        families that do so have it in their configs."""
        config = self.config.get_text_config()
        family, scale = str(getattr(config, "model_type", "")), 1.0
        if family.startswith("cohere"):
            scale = 1.0 if config.logit_scale is None else config.logit_scale
        elif family.startswith("granite") or family == "minicpm3":
            scale = 1 / config.logits_scaling
        elif family == "hyperclovax":
            scale = config.logits_scaling
        elif family == "falcon_h1":
            scale = config.lm_head_multiplier
        return scale, next((float(cap) for name in CAPS if (cap := getattr(config, name, None))), 0.0)

    @cached_property
    def table(self) -> torch.nn.Module | None:
        """Tokens → rows of the embedding's matrix as they stand, as engines that serve heads read them: modules of some families
        (Gemma's) scale them."""
        if not isinstance(self.embed, torch.nn.Embedding) or type(self.embed) is torch.nn.Embedding:
            return self.embed
        found: torch.nn.Module = torch.nn.Embedding.from_pretrained(self.embed.weight.detach())  # type: ignore[no-untyped-call]
        return found

    def finished(self, products: Tensor) -> Tensor:
        """The target's logits, of what its output matrix gives."""
        scale, cap = self.finish
        logits = products if scale == 1 else products * scale
        return torch.tanh(logits / cap) * cap if cap else logits


class Slot(Protocol):
    """The place of one sequence in the caches; opaque but for its length, and of use only to the target that opened it."""

    @property
    def length(self) -> int: ...  # tokens whose keys are held


class Target(Protocol):
    vocab_size: int
    context: int  # longest text, in tokens
    device: torch.device
    facts: LoadFacts
    parts: TargetParts
    tokenizer: Tokenizer | None
    trees: bool  # whether `score` takes trees
    defaults: dict[str, float]  # temperature, top_p, … of the model's generation config
    eos_ids: tuple[int, ...]

    def set_taps(self, layers: Sequence[int]) -> None:
        """From the next pass on `Scores.taps` holds the output of these decoder layers (0 is the first) for every row. Cheap: an
        engine says it before each of its steps, because several may share a target."""
        ...

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> Slot:
        """A slot for a text that begins with `tokens` and may grow by `room` more. slot.length > 0 if a prefix was cached
        (at most len(tokens) − 1). Raises CacheFull, taking nothing."""
        ...

    def extend(self, slots: Sequence[Any], tokens: Sequence[Tensor]) -> Scores:
        """Append tokens[i] [n_i ≥ 1] int64 to slots[i], all in one pass; logits [B, V] of each slot's last row, taps of all rows."""
        ...

    def score(self, slots: Sequence[Any], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        """One pass over every root [B] and every node. The slots then hold the nodes until `rewind`."""
        ...

    def rewind(self, slot: Any, kept: Sequence[int]) -> None:
        """After `score`: keep the root and the nodes `kept` (a path from the root), forget the others."""
        ...

    def truncate(self, slot: Any, length: int) -> None:
        """Forget every key at positions ≥ length (length ≤ slot.length)."""
        ...

    def close(self, slot: Any) -> None:
        """Give the slot's memory back (its full pages may serve later prompts of the same tenant)."""
        ...

    def fits(self, tokens: int) -> bool:
        """Whether a new slot of so many tokens could be opened now."""
        ...

    def filled(self) -> float:
        """The share of the cache that open slots hold or have reserved; what is kept for later prompts alone does not count."""
        ...


@runtime_checkable
class Adopts(Protocol):
    """What a target has beside `Target` if a slot may read what other texts have left in the cache since it was opened."""

    def adopt(self, slot: Any, tokens: Sequence[int]) -> int:
        """Of a text that begins with `tokens`, none of which was read by a pass: from now on slot.length is as `open` would have it.
        Returns how many of them begin other texts, too: a pass that ends there leaves what later ones go on from (0: any pass does)."""
        ...


@runtime_checkable
class Begins(Protocol):
    """What a target has beside `Target` if its plain passes may begin before anybody has read what they go on from."""

    def begin(self, slots: Sequence[Any], roots: Tensor) -> Scores | None:
        """The pass of `score` over roots [B], on the device, without drafts: no slot takes anything. None if it would be another one here.
        Raises CacheFull."""
        ...

    def settle(self, slots: Sequence[Any], roots: Tensor) -> None:
        """What `score` notes of its roots, for slots of a pass that was begun with these; the next step is `rewind`."""
        ...


def reserve(held: int, tokens: int, most: int) -> int:
    """`tokens`, the keys that a new slot may come to hold beside `held` others. Raises CacheFull where they are more than `most`."""
    if tokens and held + tokens > most:
        raise CacheFull(f"{held} of {most} cache tokens are spoken for, and a text that may reach {tokens} wants in; raise cache_tokens "
                        "(--cache-tokens), or run fewer or shorter sequences")
    return tokens
