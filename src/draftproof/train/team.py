"""Several processes teach one drafter, each on its own device: each answers and reads its share of the texts, gradients are averaged, the
first one alone writes, looks and publishes.

    accelerate launch --num_processes 4 -m draftproof train eagle3 --target PATH --data LOG --out DIR

Every process starts from the same weights and takes the same averaged steps, so nothing but gradients travels. A process that is
alone needs none of this and loads none of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import OptionError

T = TypeVar("T")
PATIENCE = timedelta(hours=12)      # the others wait while the first one looks at what is served


@dataclass(frozen=True, slots=True)
class Team:
    """This process, the rank-th of `size`; together: accelerate's `Accelerator`, where there are more than one."""

    rank: int = 0
    size: int = 1
    together: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> str | None:
        """Where this process should work; None: its own choice."""
        return None if self.together is None else str(self.together.device)

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part; the parts of all are all items."""
        return list(items[self.rank::self.size])

    def wait(self) -> None:
        """Until all have come here."""
        if self.together is not None:
            self.together.wait_for_everyone()

    def average(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Gradients become their mean over all processes; so does the loss, which is returned."""
        if self.together is None:
            return loss
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        mean: Tensor = self.together.reduce(torch.cat([part.flatten().float() for part in (loss, *gradients)]), "mean")
        for p, part in zip(parameters, torch.split(mean[1:], [p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).to(p.dtype)
        return mean[0]

    def leave(self) -> None:
        """The work is done; all come here."""
        if self.together is not None:
            self.together.end_training()


ALONE = Team()


def join(batch: int) -> Team:
    """The team that `accelerate launch` (or torchrun) started this process in. batch: texts per step, which all of them share.

    Raises OptionError if the batch cannot be shared evenly, or the package is missing.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team()
    if batch % size:
        raise OptionError(f"--batch {batch} with {size} processes; expected a multiple of {size}, so that all read as many texts")
    try:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs
    except ImportError:
        raise OptionError("several processes need accelerate: pip install 'draftproof[train]'") from None
    together = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    return Team(together.process_index, together.num_processes, together)
