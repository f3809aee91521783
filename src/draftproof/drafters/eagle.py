"""`eagle` and `eagle2`: EAGLE-1 heads (arXiv 2401.15077) as a chain or a static tree, and the same weights under a dynamic
tree re-ranked to the node budget (arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from ..models.heads.detect import require
from ..models.heads.eagle import EagleHead
from ..models.heads.files import read_files
from .base import NoOptions, Site
from .recurrent import RecurrentDrafter


class EagleDrafter(NoOptions, RecurrentDrafter):
    """`eagle:PATH`. With more nodes than depth every level has its siblings, chosen before anything is known."""

    name = "eagle"
    dynamic = False
    takes_path: ClassVar[bool] = True

    def __init__(self, head: EagleHead, vocab_size: int, graphs: bool = True, kernels: bool = True) -> None:
        super().__init__(type(self).name, head, vocab_size, graphs, kernels)

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        from ..models.load import builtin

        files = read_files(path or builtin("eagle"))
        require(files, "eagle")
        head = EagleHead.read(files, site.target.parts, site.target.vocab_size)
        return cls(head, site.target.vocab_size, site.graphs, site.load.kernels)


class Eagle2Drafter(EagleDrafter):
    """`eagle2:PATH`. With more nodes than depth the tree grows where guesses are worth most, judged after the noise."""

    name = "eagle2"
    dynamic = True
