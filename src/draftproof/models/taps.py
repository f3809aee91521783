"""Hidden states: the outputs of chosen decoder layers, row by row. What holds them, and how hooks of a transformers model take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SideBySide(Mapping[int, Tensor]):
    """Outputs [rows, H] of some layers in one tensor [rows, layers, H], so that rows are taken from all of them at once."""

    def __init__(self, layers: Sequence[int], whole: Tensor) -> None:
        assert whole.ndim == 3 and whole.shape[1] == len(layers), f"{tuple(whole.shape)} of {len(layers)} layers"
        self.layers, self.whole = tuple(layers), whole

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        return self.whole[:, self.layers.index(layer)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def rows_at(taps: Mapping[int, Tensor], rows: slice | Tensor) -> Mapping[int, Tensor]:
    """These rows of every layer."""
    if isinstance(taps, SideBySide):
        count = taps.whole.shape[0]
        return taps if isinstance(rows, slice) and rows.indices(count) == (0, count, 1) else SideBySide(taps.layers, taps.whole[rows])
    return {layer: hidden[rows] for layer, hidden in taps.items()}


def abreast(taps: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
    """Of every row the outputs of these layers, one after the other: [rows, len(layers) * H]."""
    if isinstance(taps, SideBySide) and taps.layers == tuple(layers):
        return taps.whole.flatten(1)
    return torch.cat([taps[layer] for layer in layers], -1)


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


def stacked(passes: Sequence[Mapping[int, Tensor]]) -> Mapping[int, Tensor]:
    """The rows of several passes, one after the other."""
    first = passes[0] if passes else {}
    if isinstance(first, SideBySide):
        beside = [rows.whole for rows in passes if isinstance(rows, SideBySide) and rows.layers == first.layers]
        if len(beside) == len(passes):
            return SideBySide(first.layers, torch.cat(beside))
    return {layer: torch.cat([rows[layer] for rows in passes]) for layer in first}


def side_by_side(taps: Mapping[int, Tensor]) -> SideBySide:
    """The same in one tensor."""
    return taps if isinstance(taps, SideBySide) else SideBySide(tuple(taps), torch.stack(list(taps.values()), 1))


def rows_in(taps: Mapping[int, Tensor]) -> int:
    """How many rows each layer has."""
    return (taps.whole if isinstance(taps, SideBySide) else next(iter(taps.values()))).shape[0]
