"""`eagle3`: EAGLE-3 and 3.1 heads (arXiv 2503.01840, 2605.09992) in any published layout; chains and dynamic trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from ..models.heads.eagle3 import Eagle3Head
from .base import NoOptions, Site, published
from .recurrent import RecurrentDrafter


class Eagle3Drafter(NoOptions, RecurrentDrafter):
    """`eagle3:PATH`. With more nodes than depth the tree grows where guesses are worth most, judged after the noise."""

    name = "eagle3"
    takes_path: ClassVar[bool] = True

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        return cls(published("eagle3", Eagle3Head.read, path, site), site.target.vocab_size, site.graphs, site.load.kernels)
