"""A head's folder as published: its config and its tensors, and the rule that nothing in it is silently ignored."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as plain
from torch import Tensor, nn
from transformers.utils import cached_file

from ...errors import LoadError

NUMBERS = {"head_dim", "hidden_size", "hidden_state_offset", "hydra_num_heads", "hydra_num_layers", "input_embedding_scale", "logit_scale",
           "max_position_embeddings", "medusa_num_heads", "n_predict", "num_attention_heads", "num_target_layers", "output_multiplier",
           "rms_norm_eps", "rope_theta", "sliding_window", "swa_window_size", "vocab_size"}
OBJECTS = {"dflash_config", "eagle_config", "rope_parameters", "rope_scaling", "transformer_layer_config"}
LISTS = {"aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "target_layer_ids"}         # of numbers


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """config.json and every tensor of a head's folder, on the CPU, under the names they have in the file."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_files(path: str | Path) -> HeadFiles:
    """Read a folder, or the hub's copy of an id that was fetched before, with config.json and *.safetensors (one file or shards). Pickled
    weights are refused: they can run code.

    Raises LoadError with what was found, what was expected and what to do.
    """
    folder = folder_of(path)
    if folder is None:
        raise LoadError(f"{path} is no folder, and the hub's cache has no such id; expected a folder with config.json and safetensors "
                        f"weights, or the id of a head that was fetched before: hf download {path}")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise LoadError(f"{folder} has no config.json; expected a head's folder as published")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{config_file} is no JSON ({error}); fetch the head again") from None
    if not isinstance(config, dict):
        raise LoadError(f"{config_file} holds a {type(config).__name__}; expected an object")
    _check_kinds(config_file, config)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        other = sorted(f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        raise LoadError(
            f"{folder} has no safetensors weights (found: {', '.join(other) or 'none'}); pickled weights can run code and are not read; "
            "convert them with safetensors.torch.save_file"
        )
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in tensors:
                        raise LoadError(f"{folder}: tensor {name} stands in two files; expected it once")
                    tensors[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise LoadError(f"{shard} cannot be read ({error}); the file is damaged or incomplete, fetch it again") from None
    return HeadFiles(folder, config, tensors)


def folder_of(path: str | Path) -> Path | None:
    """A folder, or the one in which the hub keeps what it has fetched of an id; None if there is neither."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    try:
        found = cached_file(str(path), "config.json", local_files_only=True)
    except (OSError, ValueError):
        found = None
    return None if found is None else Path(found).parent


def _check_kinds(file: Path, config: Mapping[str, Any]) -> None:
    """Raises LoadError for a field that is no number, object or list of numbers where every layout of a head has one."""
    for name, value in config.items():
        expected = ("a number" if name in NUMBERS and not _number(value) else
                    "an object" if name in OBJECTS and not isinstance(value, dict) else
                    "a list of numbers" if name in LISTS and not (isinstance(value, list) and all(map(_number, value))) else None)
        if expected and value is not None:
            raise LoadError(f"{file} has {name}={value!r}; expected {expected}: fetch the head again")
        if isinstance(value, dict) and name in OBJECTS:
            _check_kinds(file, value)


def _number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: str | Path, rename: Callable[[str], str] | None = None,
         borrowed: Collection[str] = (), unused: Collection[str] = ()) -> None:
    """Copy tensors into the module's parameters and buffers, converting the dtype.

    rename maps a file's name to the module's. borrowed: names of the module that need not be in the file (the target has them).
    unused: names of the file (after renaming) that may be left. Raises LoadError naming every tensor that nobody reads,
    every parameter that stays empty, and every shape that differs.
    """
    named = {(rename(name) if rename else name): (name, tensor) for name, tensor in tensors.items()}
    own = module.state_dict(keep_vars=True)
    surplus = sorted(original for name, (original, _) in named.items() if name not in own and name not in unused)
    missing = sorted(name for name in own if name not in named and name not in borrowed)
    wrong = [f"{original} is {list(tensor.shape)}, expected {list(own[name].shape)}"
             for name, (original, tensor) in named.items() if name in own and tensor.shape != own[name].shape]
    found = [f"{what}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
             for what, names in (("tensors that nothing reads", surplus), ("missing tensors", missing), ("wrong shapes", wrong)) if names]
    if found:
        raise LoadError(f"{source} does not fit {type(module).__name__}: {'; '.join(found)}")
    with torch.no_grad():
        for name, (_, tensor) in named.items():
            if name in own:
                own[name].copy_(tensor)


def save_file(tensors: dict[str, Tensor], file: str | Path, metadata: dict[str, str] | None = None) -> None:
    """As safetensors does, but in a file with the rights of any new one."""
    plain.save_file(tensors, file, metadata)
    share(Path(file))


def share(file: Path) -> None:
    """Give it the rights that the umask leaves: safetensors' files are their owner's alone, and a server may be another user."""
    mask = os.umask(0o077)                  # there is no other way to ask for it
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def write_files(path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head's folder: the weights first, config.json last, each by rename, so that no half-written head is ever read."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    weights, settings = folder / "model.safetensors", folder / "config.json"
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, f"{weights}.part", metadata={"format": "pt"})
    os.replace(f"{weights}.part", weights)
    Path(f"{settings}.part").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(f"{settings}.part", settings)


def converted(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Tensors as a file is to hold them; dtype None keeps each one's own."""
    return {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in tensors.items()}


def needed(tensors: Mapping[str, Tensor], name: str, source: str | Path) -> Tensor:
    if name not in tensors:
        raise LoadError(f"{source}: tensor {name} is missing (found: {', '.join(sorted(tensors)[:6])} …); expected a complete head: "
                        "fetch it again")
    return tensors[name]
