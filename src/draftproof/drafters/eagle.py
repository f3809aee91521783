"""`eagle` and `eagle2`: EAGLE-1 heads (arXiv 2401.15077) as a chain or a static tree, and the same weights under a dynamic
tree re-ranked to the node budget (arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from ..models.heads.eagle import EagleHead
from .base import NoOptions, Site, published
from .recurrent import RecurrentDrafter


class EagleDrafter(NoOptions, RecurrentDrafter):
    """`eagle:PATH`. With more nodes than depth every level has its siblings, chosen before anything is known."""

    name = "eagle"
    dynamic = False
    takes_path: ClassVar[bool] = True

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published("eagle", EagleHead.read, path, site), site.target.vocab_size, site.graphs, site.load.kernels)


class Eagle2Drafter(EagleDrafter):
    """`eagle2:PATH`. With more nodes than depth the tree grows where guesses are worth most, judged after the noise."""

    name = "eagle2"
    dynamic = True
