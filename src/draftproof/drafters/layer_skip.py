"""`layer-skip`: the target guesses for itself, leaving after its first E layers (LayerSkip, Elhoushi et al., arXiv 2404.16710).

No weights, no prefill and no cache of its own: it reads the keys that the target left for the text and puts those of drafted
positions behind it (models/shallow.py). Any model can be asked; one trained with early exits (the published LayerSkip
checkpoints are ordinary Llama weights) guesses well. With E = all layers every guess is right, and nothing is gained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

from ..models.shallow import Shallow, shallow
from ..models.target import Target
from .base import Site
from .model import ModelDrafter, ModelState


class LayerSkipDrafter(ModelDrafter):
    """Drafts as `model` does, siblings and laws included. The sequences must be the engine's: their places in the target's
    cache are its own."""

    keys: ClassVar[Mapping[str, tuple[int, int]]] = {"exit": (1, 4096)}
    takes_path: ClassVar[bool] = False
    unseen: ClassVar[str] = "what the target keeps of a running text"           # in a replay
    weight_bytes = 0

    def __init__(self, layers: Shallow) -> None:
        super().__init__(cast(Target, layers), name="layer-skip")
        self.layers = layers

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(shallow(site.target, options.get("exit")))

    def _seat(self, state: ModelState) -> None:
        slot: Any = getattr(state.seq, "slot", None)
        if slot is None:
            state.silent = "the sequence has no place in the target's cache"
        else:
            state.slot = self.layers.join(slot)
