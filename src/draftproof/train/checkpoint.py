"""A training run on disk: parameters and optimizer state as safetensors, written by rename.

    checkpoint.safetensors    of the run that is under way
    finished.safetensors      of the last one that came to its end: the same command has nothing left to do, another one begins anew
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import Failure
from ..models.heads.files import save_file
from .place import written


def save(file: Path, step: int, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], notes: Mapping[str, Any]) -> None:
    """Everything that the next step depends on, in one file."""
    tensors = {f"module.{name}": p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}
    plain: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}.{index}.{name}"] = value.detach().cpu().clone()
                else:
                    plain[f"optimizer.{number}.{index}.{name}"] = value
    part = file.with_suffix(".part")
    with written(part):
        save_file(tensors, part, metadata={"step": str(step), "plain": json.dumps(plain), "notes": json.dumps(dict(notes))})
        os.replace(part, file)
    _finished(file).unlink(missing_ok=True)


def finish(file: Path) -> None:
    """The run that this is the checkpoint of is over."""
    if file.exists():
        os.replace(file, _finished(file))


def _finished(file: Path) -> Path:
    return file.with_name("finished.safetensors")


def load(file: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], notes: Mapping[str, Any]) -> int:
    """The step to go on with (0 without a checkpoint). Raises Failure if the file is of another run, none of ours, or damaged."""
    over = not file.exists()
    file = _finished(file) if over else file
    if not file.exists():
        return 0
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise Failure(f"{file} is damaged ({error}); delete it to train from the beginning") from None
    if not {"step", "plain", "notes"} <= metadata.keys():
        raise Failure(f"{file} is no checkpoint of a training run; expected one of ours, or none: move it away")
    found, wanted = json.loads(metadata["notes"]), json.loads(json.dumps(dict(notes)))
    differing = [f"{name} was {found.get(name)!r}, is {value!r}" for name, value in wanted.items() if found.get(name) != value]
    if differing and over:
        return 0
    if differing:
        raise Failure(f"{file} belongs to another run ({'; '.join(differing)}); use another folder, the same options, or delete it")
    trained = {f"module.{name}": p for name, p in module.named_parameters() if p.requires_grad}
    wrong = [name for name, p in trained.items() if name not in tensors or tensors[name].shape != p.shape]
    if wrong or any(name.startswith("module.") and name not in trained for name in tensors):
        raise Failure(f"{file} does not fit the drafter ({', '.join(wrong[:3]) or 'tensors that it has not'}); delete it to train from the "
                      "beginning")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])
    states: dict[tuple[int, int], dict[str, Any]] = {}
    for key, value in [*tensors.items(), *json.loads(metadata["plain"]).items()]:
        if key.startswith("optimizer."):
            _, number, index, name = key.split(".", 3)
            states.setdefault((int(number), int(index)), {})[name] = value
    for number, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        whole["state"] = {index: state for (owner, index), state in states.items() if owner == number}
        optimizer.load_state_dict(whole)
    return int(metadata["step"])
