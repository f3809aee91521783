"""`eagle3`: EAGLE-3 and 3.1 heads (arXiv 2503.01840, 2605.09992) in any published layout; chains and dynamic trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from ..models.heads.detect import require
from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.files import read_files
from .base import NoOptions, Site
from .recurrent import RecurrentDrafter


class Eagle3Drafter(NoOptions, RecurrentDrafter):
    """`eagle3:PATH`. With more nodes than depth the tree grows where guesses are worth most, judged after the noise."""

    name = "eagle3"
    takes_path: ClassVar[bool] = True

    def __init__(self, head: Eagle3Head, vocab_size: int, graphs: bool = True, kernels: bool = True) -> None:
        super().__init__(type(self).name, head, vocab_size, graphs, kernels)

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        from ..models.load import builtin

        files = read_files(path or builtin("eagle3"))
        require(files, "eagle3")
        head = Eagle3Head.read(files, site.target.parts, site.target.vocab_size)
        return cls(head, site.target.vocab_size, site.graphs, site.load.kernels)
