"""Hidden states of a transformers model, by forward hooks: the output of chosen decoder layers, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """Keeps the last pass's output [rows, H] of each chosen layer (0 is the first) in `rows`; none by default."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._hooks: list[Any] = []
        self._chosen: tuple[int, ...] = ()
        self.rows: dict[int, Tensor] = {}

    def set(self, chosen: Sequence[int]) -> None:
        """Choose layers, instead of those before; costs nothing if they are the same."""
        if tuple(chosen) == self._chosen:
            return
        self._chosen = tuple(chosen)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.rows = [], {}
        for layer in chosen:
            assert 0 <= layer < len(self._layers), f"layer {layer} of {len(self._layers)}"
            self._hooks.append(self._layers[layer].register_forward_hook(self._keeper(layer)))

    def _keeper(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self.rows[layer] = hidden.reshape(-1, hidden.shape[-1])

        return keep


def stacked(passes: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """The rows of several passes, one after the other."""
    return {layer: torch.cat([rows[layer] for rows in passes]) for layer in passes[0]} if passes else {}
