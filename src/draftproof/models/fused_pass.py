"""The whole pass over a model of fused layers: embedding, layers, norm and output matrix, in one call where all of it is our kernels'."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from operator import is_not
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import llama, native
from ..core.upload import rows_of
from .between import angles_held
from .cache import PagePool
from .families import FAMILIES, LAST_NORM, PROJECTIONS, body_of, layers_of, norm_of, part_of, positions_of
from .fused import FusedLayer, scale_of
from .packed import StreamedLinear
from .passes import Pass, Path
from .ropes import behind, measured, rotary_of
from .sides import Sides
from .states import states_of
from .streams import Streams
from .taps import SideBySide
from .target import TargetParts
from .tiled import InTiles


class FusedPass:
    """The whole forward pass over a model whose layers are `FusedLayer`s. Keeps taps, as `Taps` does, without hooks."""

    def __init__(self, model: Any) -> None:
        self.embed, self.output = model.get_input_embeddings(), model.get_output_embeddings()
        self.layers: list[FusedLayer] = list(layers_of(model))
        body, family = body_of(model), FAMILIES[model.config.model_type]
        self.rotary, self.ropes = rotary_of(body), sorted({layer.rope for layer in self.layers}, key=lambda rope: rope.number)
        self.moving = any(rope.moves for rope in self.ropes)
        self._norm, last = self.layers[0]._norm, part_of(body, LAST_NORM)
        self._last = None if last is None else norm_of(last, family, self.layers[0].hidden)
        self._entering = self._last if family.entering else None
        self._enlarged, self.positions = enlarged(body), positions_of(body)
        self._into, self._out_of = (getattr(body, name, None) for name in PROJECTIONS)
        self._finished = TargetParts(config=model.config).finished
        borrows = [layer.borrowed is not None for layer in self.layers]
        self.lent = next((number for number in range(len(borrows)) if all(borrows[number:])), len(borrows))  # from here on none has keys
        self._sides = Sides(body) if self.layers[0].side_norm is not None else None
        self._streams = Streams(body) if hasattr(body, "altup_projections") else None
        self.states = states_of(self.layers)
        self.angles: Tensor | None = None  # [positions, 2 ropes, n]: of each cos, and sin with its first half negated; and `behind` them
        self.taps: frozenset[int] = frozenset()
        self.rows: Mapping[int, Tensor] = {}
        self._table: tuple[tuple[PagePool, int, int], ctypes.Array[llama.Layer] | None] | None = None
        self._whole: tuple[tuple[Any, ...], llama.Model | None] | None = None  # what it was made of

    def rows_alone(self) -> bool:
        """Whether a row may stand alone, because its bits do not depend on the number of rows: every product and attention is ours, or
        every product and sum has one shape."""
        if all(layer.tile() for layer in self.layers):
            return isinstance(self.output, InTiles)
        beside = (part for part in (self.output, self._into, self._out_of) if part is not None)
        return self.compiled() and all(isinstance(part, StreamedLinear) for part in beside)

    def first(self, count: int) -> Self:
        """The pass over the first `count` layers alone, with taps of its own."""
        cut = copy(self)
        cut.layers = self.layers[:count]
        cut.set(())
        return cut

    def set(self, chosen: Sequence[int]) -> None:
        """From the next pass on `rows` holds the outputs [rows, hidden] of these layers."""
        wanted = frozenset(chosen)
        if wanted != self.taps:
            assert all(0 <= layer < len(self.layers) for layer in wanted), f"layers {chosen} of {len(self.layers)}"
            self.taps, self.rows = wanted, {}

    def __call__(self, p: Pass, pool: PagePool, keep: Sequence[int] | None) -> Tensor:
        """Logits [len(keep), V] of the rows in `keep`, or of all."""
        self._reach(max(p.position_list) + 1)
        if self._sides is not None:
            p.sides = self._sides(p.ids[0], self.embed(p.ids[0]), self._norm)
        model = self._model(pool)
        if model is None:
            return self.compute(self.layers[0].placed(p), pool, keep)
        taps = sorted(self.taps)
        logits, tapped = llama.forward(model, p.course(), p.ids, taps, keep, p.sides, self._rest(p, taps, keep), self.lent)
        self.rows = {} if tapped is None else SideBySide(taps, tapped)
        return self._finished(logits)

    def _rest(self, p: Pass, taps: Sequence[int], keep: Sequence[int] | None) -> native.Course | None:
        """The course of the rows that are kept alone, if the last layers may leave out the others; else None."""
        if keep is None or len(keep) == len(p.position_list) or self.lent >= len(self.layers) or taps and taps[-1] >= self.lent:
            return None
        if any(path.common for path in p.paths):
            return None
        places = {row: place for place, row in enumerate(keep)}
        paths = [Path(path.pages, kept) for path in p.paths if (kept := [places[row] for row in path.rows if row in places])]
        return native.Course([p.position_list[row] for row in keep], paths, (), (), p.page_tokens)

    def compute(self, p: Pass, pool: PagePool, keep: Sequence[int] | None) -> Tensor:
        """The same where the table of angles reaches, and the plain twin of `llama.forward`. Without `keep`, and but for compiled kernels
        and moving angles, it looks at nothing but tensors, so that graphs.py can record it."""
        x = self._enter(p)
        if self._streams is not None:
            p.streams = self._streams.branch(x)
        angles = self._measure(x, p.positions) if self.angles is None else self.angles[p.positions[0]]
        cos, sin = angles[:, :1], angles[:, 1:2]
        table, ran = self._kernels(pool), 0
        rows: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if table is None:
                x = layer.run(x, angles, p, pool)
            elif number in self.taps or number == len(self.layers) - 1:
                llama.blocks(table, ran, number + 1, x, cos, sin, [p.course()], sides=p.sides, streams=p.streams)
                ran = number + 1
            if number in self.taps:
                rows[number] = x.clone()
        self.rows = rows
        if self._streams is not None and p.streams is not None:
            x = self._streams.merge(x, p.streams)
        if keep is not None:
            x = rows_of(x, keep)
        x = x if self._last is None else self._norm(x, *self._last)
        return self._finished(self.output(x if self._out_of is None else self._out_of(x)))

    def _enter(self, p: Pass) -> Tensor:
        """Rows [rows, hidden] as the first layer reads them."""
        x: Tensor = self.embed(p.ids[0])
        x = x if self._enlarged == 1 else x * self._enlarged
        x = x if self._into is None else self._into(x)
        x = x if self.positions is None else x + self.positions[p.positions[0]]
        return x if self._entering is None else self._norm(x, *self._entering)

    def compiled(self) -> bool:
        """Whether every layer runs through our kernels alone."""
        return all(layer.compiled() for layer in self.layers)

    def _kernels(self, pool: PagePool) -> ctypes.Array[llama.Layer] | None:
        """The layers for `llama.blocks`, made anew when the pool's storage has moved; None if they do not all run through it."""
        key = pool, pool.allocated, len(self.layers)
        if self._table is None or self._table[0] != key:
            layers = (llama.Layer * len(self.layers))(*(layer.kernel(pool) for layer in self.layers)) if self.compiled() else None
            self._table = key, layers
        return self._table[1]

    def _model(self, pool: PagePool) -> llama.Model | None:
        """The model for `llama.forward`, made anew when a part of it has moved; None if not all of it is our kernels'."""
        parts = self._kernels(pool), self.angles, self.output, self.embed
        if self._whole is None or any(map(is_not, self._whole[0], parts)):
            self._whole = parts, self._model_of(*parts)
        return self._whole[1]

    def _model_of(self, layers: ctypes.Array[llama.Layer] | None, angles: Tensor | None, output: Any, embed: Any) -> llama.Model | None:
        if layers is None or angles is None or not isinstance(output, StreamedLinear) or self._into or self._out_of:
            return None
        factor = 1.0 if type(embed) is nn.Embedding and embed.max_norm is None else scaled(embed)
        if factor is None or embed.weight.dtype != self.layers[0].dtype:
            return None
        ends = None if self._streams is None else self._streams.ends
        if self._streams is not None and ends is None:
            return None
        norm = scale_of(self._last, embed.weight.dtype) if self._last else native.Scale()
        entered = norm if self._entering else None
        return llama.Model.of(layers, output.product, norm, embed.weight, angles, factor * self._enlarged, self.positions, ends, entered)

    def _reach(self, positions: int) -> None:
        """A table of angles for so many positions; none where the angles move."""
        if not self.moving and (self.angles is None or self.angles.shape[0] < positions):
            held, like = angles_held(positions), self.embed.weight
            self.angles = self._measure(like, torch.arange(held, device=like.device)[None])

    def _measure(self, like: Tensor, positions: Tensor) -> Tensor:
        """The model's own angles at positions [1, n], as they are used here."""
        if self.rotary is None:
            return like.new_empty(positions.numel(), 2, 0)
        found = [measured(self.rotary, rope, like, positions) for rope in self.ropes]
        most = max(part.shape[-1] for part in found)
        angles = torch.cat([nn.functional.pad(part, (0, most - part.shape[-1])) for part in found], 1)
        stretch = next((layer.stretch for layer in self.layers if layer.stretch is not None), None)
        return angles if stretch is None else behind(angles, stretch(positions[0]))


def scaled(embed: Any) -> float | None:
    """By what an embedding like Gemma's or BioGPT's multiplies; None of any other."""
    if type(embed).__name__.endswith("ScaledWordEmbedding") and type(embed).__module__.startswith("transformers.models."):
        scale = embed.embed_scale
        return float(scale.to(embed.weight.dtype) if isinstance(scale, Tensor) else scale)
    return None


def enlarged(body: Any) -> float:
    """By what a model multiplies rows that its embedding gives."""
    by_width = getattr(body.config, "mup_enabled", False)
    return float(body.config.hidden_size ** 0.5 if by_width else getattr(body, "embedding_multiplier", 1))
