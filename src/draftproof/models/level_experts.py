"""Experts of quantised checkpoints: levels of each expert, as they were published, in place of the large tensors that transformers joins
them to. Experts of which some are of another form become ordinary weights, all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .experts import are_experts
from .levels import Levels, LevelWeight, alike

ONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(\w+)$")         # an expert's layer: where its collection is, its number, its name
PARTS = {"gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "w3": ("gate_up_proj", 1),
         "down_proj": ("down_proj", 0), "w2": ("down_proj", 0), "gate_up_proj": ("gate_up_proj", 0)}    # of which tensor they become which
OTHERWISE = {"block_sparse_moe": "mlp"}                    # names of files that transformers changes


class LevelExperts(Tensor):
    """Stands where a model has the weights of all its experts, [experts, …]; each [out, in]. Nothing computes with it: experts.py takes
    them one by one, and until then they are silent."""

    each: Sequence[LevelWeight]

    @staticmethod
    def __new__(cls, each: Sequence[LevelWeight], shape: torch.Size) -> LevelExperts:
        made: LevelExperts = Tensor._make_wrapper_subclass(cls, shape, dtype=each[0].dtype, device=each[0].device)
        made.each = each
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LevelExperts({list(self.shape)}, {self.each[0].bits} bits)"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise RuntimeError(f"{function}: the weights of these experts are levels, which nothing but their own products computes with")


class Gathered:
    """Levels of experts on their way into a model, `empty` so far. keeps: whether a layer of these levels can be multiplied as it is."""

    def __init__(self, empty: nn.Module, keeps: Callable[[Levels], bool]) -> None:
        self._collections = {name: module for name, module in empty.named_modules() if are_experts(module)}
        self._keeps = keeps
        self._found: dict[tuple[str, str], dict[tuple[int, int], tuple[str, Levels]]] = defaultdict(dict)

    def take(self, name: str, levels: Levels) -> bool:
        """Whether it is an expert's layer that may stay."""
        found = ONE.match(name)
        if found is None or found[3] not in PARTS or not self._keeps(levels):
            return False
        place = next((place for place in self._collections if _same(place, found[1])), None)
        if place is None:
            return False
        kind, part = PARTS[found[3]]
        self._found[place, kind][int(found[2]), part] = name, levels
        return True

    def whole(self, dtype: torch.dtype, device: torch.device) -> dict[str, LevelExperts]:
        """By their names in the model, the weights of which all experts are there in one form. What is left are `others`."""
        made: dict[str, LevelExperts] = {}
        for (place, kind), found in list(self._found.items()):
            shape = getattr(self._collections[place], kind).shape
            each = [LevelWeight([found[at][1] for at in sorted(found) if at[0] == number], dtype, device) for number in range(shape[0])
                    if any(at[0] == number for at in found)]
            turned = torch.Size((shape[0], shape[2], shape[1]) if getattr(self._collections[place], "is_transposed", False) else shape)
            parts = [part for weight in each for part in weight.parts]
            if len(each) == shape[0] and {weight.shape for weight in each} == {turned[1:]} and alike([LevelWeight([part], dtype, device)
                                                                                                     for part in parts]):
                made[f"{place}.{kind}"] = LevelExperts(each, shape)
                del self._found[place, kind]
        return made

    def others(self) -> Iterator[tuple[str, Levels]]:
        """Layers by their names in the files."""
        for found in self._found.values():
            yield from found.values()


def _same(place: str, name: str) -> bool:
    """Whether a collection of the model is what a file calls so: models lie in one another, and some of their parts have two names."""
    ours, theirs = (([OTHERWISE.get(part, part) for part in path.split(".") if part not in ("model", "language_model")])
                    for path in (place, name))
    return ours == theirs


def put_experts(model: nn.Module, name: str, weights: LevelExperts) -> None:
    """Let the model have these weights where it has others."""
    place, _, kind = name.rpartition(".")
    collection = model.get_submodule(place)
    delattr(collection, kind)
    setattr(collection, kind, weights)
