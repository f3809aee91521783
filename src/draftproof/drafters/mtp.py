"""`mtp`: the multi-token prediction layer that a model was trained with guesses several tokens by recursion (DeepSeek-V3, arXiv
2412.19437; FastMTP, arXiv 2509.18362). Without a path its weights are those in the target's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor

from ..models.heads.files import HeadFiles, read_files
from ..models.heads.mtp import MtpHead
from ..models.heads.mtp_files import inside, read_head
from ..models.heads.mtp_layers import Layered
from .base import NoOptions, Site
from .lines import Line
from .recurrent import RecurrentDrafter


class MtpDrafter(NoOptions, RecurrentDrafter):
    """`mtp` or `mtp:PATH`. With more nodes than depth the tree grows where guesses are worth most, judged after the noise."""

    name = "mtp"
    takes_path: ClassVar[bool] = True

    def __init__(self, head: MtpHead, vocab_size: int, graphs: bool = True) -> None:
        self._layered = Layered(head) if head.layers > 1 else None
        super().__init__(self._layered or head, vocab_size, graphs and self._layered is None)     # several layers look at caches

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Self:
        target = site.target
        files = read_head(path) if path else _own(target.facts.name, int(target.parts.config.get_text_config().num_hidden_layers))
        return cls(MtpHead.read(files, target.parts, target.vocab_size), target.vocab_size, site.graphs)

    def _last(self, lines: Sequence[Line]) -> Tensor:
        if self._layered is not None:
            self._layered.at = 0
        return super()._last(lines)

    def _extend(self, lines: Sequence[Line], tokens: Tensor, hidden: Tensor, level: int, slots: int, seen: Tensor | None) -> Tensor:
        if self._layered is not None:
            self._layered.at = level + 1
        return super()._extend(lines, tokens, hidden, level, slots, seen)


def _own(name: str, layers: int) -> HeadFiles:
    """The head of this target: in its checkpoint, or, for the demo target, beside it."""
    from ..models.load import WEIGHTS, builtin

    demo = Path(name).is_dir() and Path(name).resolve() == (WEIGHTS / "target").resolve()
    return read_files(builtin("mtp")) if demo else inside(name, layers)
