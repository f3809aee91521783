"""P-EAGLE heads (parallel EAGLE, arXiv 2602.01469): EAGLE-3's network, taught to guess several tokens in one pass.

Behind the text's last entry stand as many *masks* as further guesses are asked for: the embedding of a token that means "not known", and,
where an entry has the taps' hidden states, the vector `mask_hidden [taps · H_target]`, through the same norms and fc. A row sees the
entries before it and the masks before it; mask i guesses the token i + 2 places behind the last. Layouts are EAGLE-3's (eagle3.py), usually
of four layers. The mask's token is `mask_token_id` (speculators, NeMo Automodel), `pard_token` or `ptd_token_id` (vLLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import LoadError
from ..target import TargetParts
from .eagle3 import Eagle3Head, canonical
from .files import HeadFiles, needed

TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


class PEagleHead(Eagle3Head):
    """mask_token: what stands for a token that is not known."""

    def __init__(self, *given: Any, mask_token: int = 0, **more: Any) -> None:
        super().__init__(*given, **more)
        self.mask_token = mask_token
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.target_hidden * len(self.taps)) * 0.02)

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """As `Eagle3Head.read`; raises LoadError, too, where config.json names no token for masks."""
        name = next((name for name in files.tensors if canonical(name) == "mask_hidden"), "mask_hidden")
        tensors = {**files.tensors, name: needed(files.tensors, name, files.path).reshape(1, 1, -1)}
        head = super().read(HeadFiles(files.path, files.config, tensors), parts, vocab_size)
        head.mask_token = _mask_token(files.config, vocab_size, files.path)
        return head

    def published(self) -> dict[str, Any]:
        return {**super().published(), "architectures": ["PEagleDraftModel"], "parallel_drafting": True, "mask_token_id": self.mask_token,
                "pard_token": self.mask_token}

    def blank(self) -> Tensor:
        """[1, H] what a mask has where an entry has the target's hidden states."""
        return self.fuse(self.mask_hidden[0])


def told_token(config: Mapping[str, Any]) -> Any:
    """The token of masks as config.json has it, None where it has none."""
    return next((config[name] for name in TOKENS if config.get(name) is not None), None)


def _mask_token(config: Mapping[str, Any], vocab_size: int, source: Path) -> int:
    found = told_token(config)
    token = int(found) if isinstance(found, int) or isinstance(found, str) and found.isdigit() else -1
    if not 0 <= token < vocab_size:
        raise LoadError(f"{source}: the token of masks is {found!r}; expected one in [0, {vocab_size}) in config.json, as "
                        f"{' or '.join(TOKENS)}: the one that the head was trained with")
    return token
