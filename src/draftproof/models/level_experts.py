"""Experts of quantised checkpoints: levels of each expert, as they were published, in place of the large tensors that transformers joins
them to. Experts of which some are of another form become ordinary weights, all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .experts import are_experts
from .levels import LevelExperts, Levels, LevelWeight, alike

ONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(\w+)$")         # an expert's layer: where its collection is, its number, its name
PARTS = {"gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "w3": ("gate_up_proj", 1),
         "down_proj": ("down_proj", 0), "w2": ("down_proj", 0), "gate_up_proj": ("gate_up_proj", 0)}    # of which tensor they become which
OTHERWISE = {"block_sparse_moe": "mlp", "attention": "self_attn", "dense": "o_proj"}   # names of files that transformers changes,
WITHOUT = ("model", "language_model", "backbone", "moe", "forget_gate")               # and parts of names that one of both has


class Gathered:
    """Levels of experts on their way into a model, `empty` so far. keeps: whether a layer of these levels can be multiplied as it is."""

    def __init__(self, empty: nn.Module, keeps: Callable[[Levels], bool]) -> None:
        self._collections = {name: module for name, module in empty.named_modules() if are_experts(module)}
        self._keeps, self._places = keeps, {path_of(name): name for name in self._collections}
        self._found: dict[tuple[str, str], dict[tuple[int, int], tuple[str, Levels]]] = defaultdict(dict)

    def take(self, name: str, levels: Levels) -> bool:
        """Whether it is an expert's layer."""
        found = ONE.match(name)
        place = found and self._places.get(path_of(found[1]))
        if found is None or place is None or found[3] not in PARTS:
            return False
        kind, part = PARTS[found[3]]
        if kind == "gate_up_proj" and not self._collections[place].has_gate:
            kind, part = "up_proj", 0
        self._found[place, kind][int(found[2]), part] = name, levels
        return True

    def whole(self, dtype: torch.dtype, device: torch.device) -> dict[str, LevelExperts]:
        """By their names in the model, the weights of which all experts are there, in one form that is kept. What is left are `others`."""
        made: dict[str, LevelExperts] = {}
        for (place, kind), found in list(self._found.items()):
            shape, by_number = getattr(self._collections[place], kind).shape, defaultdict(list)
            for number, part in sorted(found):
                by_number[number].append(found[number, part][1])
            each = [LevelWeight(parts, dtype, device) for parts in by_number.values()]
            alone = [LevelWeight([part], dtype, device) for parts in by_number.values() for part in parts]
            wanted = shape[:0:-1] if self._turned(place) else shape[1:]
            if len(each) == shape[0] and all(weight.shape == wanted for weight in each) and alike(alone) and all(
                    self._keeps(levels) for _, levels in found.values()):
                made[f"{place}.{kind}"] = LevelExperts(each, shape)
                del self._found[place, kind]
        return made

    def others(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, list[Levels]]]:
        """Ordinary weights by their names in the model, of which all experts are there, or else in files; and what they were."""
        for (place, kind), found in self._found.items():
            shape, levels = getattr(self._collections[place], kind).shape, [levels for _, (_, levels) in sorted(found.items())]
            parts = len(levels) // shape[0]
            if sum(one.shape[0] for one in levels) == shape[0] * shape[2 if self._turned(place) else 1]:
                values = [torch.cat([one.values().to(dtype) for one in levels[first : first + parts]])
                          for first in range(0, len(levels), parts)]
                yield f"{place}.{kind}", torch.stack([one.t() for one in values] if self._turned(place) else values), levels
            else:
                yield from ((f"{name}.weight", levels.values().to(dtype), [levels]) for name, levels in found.values())

    def _turned(self, place: str) -> bool:
        return bool(getattr(self._collections[place], "is_transposed", False))


def path_of(name: str) -> tuple[str, ...]:
    """What a model and its files call alike: models lie in one another, and some of their parts have two names."""
    return tuple(OTHERWISE.get(part, part) for part in name.split(".") if part not in WITHOUT)
