"""How multi-token prediction weights are named in published checkpoints, and the way back into one.

The weights live in the target's own checkpoint, beside the layers that generate, and `transformers` drops them at load:

    deepseek      model.layers.{L + i}.{enorm, hnorm, eh_proj, shared_head.norm}, usually .embed_tokens and .shared_head.head (the
                  target's again), and a decoder layer: DeepSeek-V3/R1, GLM-4.5 and later
    qwen          mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm} and mtp.layers.{i}.*: Qwen3-Next, Qwen3.5, K-EXAONE, Mellum
    mimo          model.mtp_layers.{i}.{input_proj, token_layernorm, hidden_layernorm, final_layernorm} and a decoder layer
    ernie         model.{mtp_linear_proj, mtp_emb_norm, mtp_hidden_norm}.0 and model.mtp_block.0.*, no norm at the end: Ernie 4.5
    speculators   mtp_layers.{i}.* with MiMo's names around Qwen's head: `speculators_model_type` mtp, a folder of its own

Inside they are one thing: fusions.{i}.{token_norm, hidden_norm, proj} · blocks.{i}.* · norms.{i} · embed · heads.{i}.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...errors import LoadError
from .. import quantised
from .files import HeadFiles, folder_of, read_files, save_file

INDEX = "model.safetensors.index.json"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")       # by which configs say how many layers a head has
EXPERT = re.compile(r"^(.*\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
EXPECTED = "expected mtp.*, mtp_layers.*, model.mtp_layers.*, model.mtp_block.* or model.layers.N.eh_proj"
OTHERS = re.compile(r"(?:^|[._])(?:mtp|nextn)|\.eh_proj\.")              # how heads are named that are not read here
PACKED = ("_scale_inv", ".weight_scale", ".qweight", ".weight_packed")       # beside or instead of a weight that is quantised


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to name a head, and what its family feeds.

    layer: prefix of a layer's names, its number next · own: names inside a layer that are not its decoder block
    shared: names that stand once for all layers · hidden_first: [hidden, embedding] instead of [embedding, hidden]
    normed: the target's hidden states pass its final norm first · blank_first: the embedding beside position 0 is zero
    borrowed_norm: the target's final norm, not one of the head's own, stands before the output, and the next step reads what is before it
    """

    name: str
    layer: str
    own: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    normed: bool = True
    blank_first: bool = False
    borrowed_norm: bool = False

    def ours(self, name: str, base: int) -> str:
        """Our name of a published one; a name that belongs to no head stays as it is."""
        for there, here in self.shared.items():
            if name.startswith(there):
                return here + name[len(there):]
        number, dot, rest = name.removeprefix(self.layer).partition(".")
        if not name.startswith(self.layer) or not dot or not number.isdigit():
            return name
        place = int(number) - base
        for there, here in self.own.items():
            if rest.startswith(there):
                return here.format(i=place) + rest[len(there):]
        return f"blocks.{place}.{rest}"

    def theirs(self, name: str, base: int) -> str:
        """The published name of one of ours; any other stays as it is."""
        for there, here in self.shared.items():
            if name.startswith(here):
                return there + name[len(here):]
        kind, _, rest = name.partition(".")
        number = "0" if kind == "embed" else rest.partition(".")[0]
        if kind not in ("embed", "fusions", "blocks", "norms", "heads") or not number.isdigit():
            return name
        prefix = f"{self.layer}{base + int(number)}."
        for there, here in self.own.items():
            if name.startswith(here.format(i=number)):
                return prefix + there + name[len(here.format(i=number)):]
        return prefix + name.removeprefix(f"blocks.{number}.")


_MIMO_NAMES = {"input_proj.": "fusions.{i}.proj.", "token_layernorm.": "fusions.{i}.token_norm.",
               "hidden_layernorm.": "fusions.{i}.hidden_norm.", "final_layernorm.": "norms.{i}."}
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (
    Layout("qwen", "mtp.layers.", shared={
        "mtp.fc.": "fusions.0.proj.", "mtp.pre_fc_norm_embedding.": "fusions.0.token_norm.",
        "mtp.pre_fc_norm_hidden.": "fusions.0.hidden_norm.", "mtp.norm.": "norms.0."}),
    Layout("deepseek", "model.layers.", own={
        "enorm.": "fusions.{i}.token_norm.", "hnorm.": "fusions.{i}.hidden_norm.", "eh_proj.": "fusions.{i}.proj.",
        "shared_head.norm.": "norms.{i}.", "shared_head.head.": "heads.{i}.", "embed_tokens.": "embed."}, blank_first=True),
    Layout("mimo", "model.mtp_layers.", own=_MIMO_NAMES, hidden_first=True, normed=False, blank_first=True),
    Layout("ernie", "model.mtp_block.", shared={
        "model.mtp_linear_proj.0.": "fusions.0.proj.", "model.mtp_emb_norm.0.": "fusions.0.token_norm.",
        "model.mtp_hidden_norm.0.": "fusions.0.hidden_norm."}, normed=False, borrowed_norm=True),
    Layout("speculators", "mtp_layers.", own=_MIMO_NAMES),
)}
_MARKS = {"qwen": r"mtp\.", "mimo": r"model\.mtp_layers\.\d+\.", "ernie": r"model\.mtp_block\.\d+\.", "speculators": r"mtp_layers\.\d+\.",
          "deepseek": r"model\.layers\.\d+\.(?:eh_proj|enorm|hnorm)\."}


@dataclass(frozen=True, slots=True)
class Weights:
    """A head's tensors under our names, and how they were named: `base` is the number of its first layer in the file, and
    `split` says whether every expert stood alone."""

    layout: Layout
    base: int
    split: bool
    tensors: Mapping[str, Tensor]

    @property
    def layers(self) -> int:
        return _layers(self.tensors)

    def published(self, layout: Layout, base: int, split: bool) -> dict[str, Tensor]:
        """The tensors as `layout` names them."""
        tensors = _split(self.tensors) if split else dict(self.tensors)
        return {layout.theirs(name, base): tensor for name, tensor in tensors.items()}


def _layers(names: Iterable[str]) -> int:
    """Of a head, by our names."""
    return 1 + max((int(name.split(".")[1]) for name in names if name.startswith("blocks.")), default=-1)


def understand(files: HeadFiles) -> Weights:
    """A head's tensors under our names, quantised ones in bfloat16. Raises LoadError if they are no head's."""
    source = files.path
    tensors = quantised.ordinary(files.tensors, quantised.method(files.config.get("quantization_config")), torch.bfloat16)
    layout, base, split = _recognise(tensors, source)
    named: dict[str, Tensor] = {}
    for name, tensor in _fuse(tensors, source).items():
        ours = layout.ours(name, base)
        if ours in named and not torch.equal(named[ours], tensor):
            raise LoadError(f"{source}: {name} differs from its copy in an earlier layer; expected one embedding that all layers share")
        named[ours] = tensor
    return Weights(layout, base, split, named)


def read_head(path: str | Path) -> HeadFiles:
    """A head in a folder of its own, or the one in a whole checkpoint, which is not read for it. Raises LoadError."""
    folder = folder_of(path)
    whole = folder is not None and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) and not alone(folder)
    return inside(str(path), layers_of(path)) if whole else read_files(path)


def inside(name: str, layers: int) -> HeadFiles:
    """The multi-token prediction tensors of a target's own checkpoint: a folder, or a hub id that has been loaded before.

    Opens only these tensors. Raises LoadError if the checkpoint has none.
    """
    folder = _folder(name)
    places = _places(folder)
    where = {tensor: file for tensor, file in places.items() if _is_head(tensor, layers)}
    others = [tensor for tensor in places if OTHERS.search(tensor)]
    if others and not where:
        raise LoadError(f"{name}, of family {_config(folder).get('model_type')!r}, has multi-token prediction weights under names that are "
                        f"not read here ({', '.join(sorted(others)[:4])}); {EXPECTED}")
    if not where:
        raise LoadError(f"{name} has no multi-token prediction weights (no mtp.*, model.mtp_layers.* or model.layers.{layers}.* tensors; "
                        "quantised repacks often drop them); expected the original checkpoint, or mtp:PATH with a head of its own")
    return HeadFiles(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")), _load(folder, where))


def stitch(head: str | Path, target: str | Path, out: str | Path) -> list[str]:
    """Copy the target's folder to `out` with the head's tensors in place of its own, named, shaped and typed as they were: what
    engines load. A target without any gets them as a shard of their own. A config that counts such layers counts the head's.
    Returns the names written.

    Raises LoadError if `out` is not empty, the shapes differ, or the target's head is quantised or has more layers.
    """
    source, place = _folder(target), Path(out).expanduser()
    if place.exists() and any(place.iterdir()):
        raise LoadError(f"{place} is not empty; expected a new folder for the stitched checkpoint")
    where, depth = _places(source), _depth(source)
    missing = sorted(shard for shard in set(where.values()) if not (source / shard).is_file())
    if missing:
        raise LoadError(f"{source}: {missing[0]}, which its index names, is missing; fetch the checkpoint again")
    there = {name: file for name, file in where.items() if _is_head(name, depth)}
    found = read_files(head)
    weights = understand(found)
    layout, base, split = _recognise(there, source) if there else (weights.layout, weights.base, weights.split)
    if layout.name == "speculators":
        layout = LAYOUTS["qwen"]
    if not there and layout.name == "deepseek":
        base = depth
    held = _layers(layout.ours(name, base) for name in there)
    if held > weights.layers > 0:
        raise LoadError(f"{source}: its head has {held} layers, {head} has {weights.layers}; expected as many or more, for those that stay "
                        "would be read as the new head's")
    tensors = weights.published(layout, base, split)
    packed = sorted(name for name in there if name.endswith(PACKED))
    if packed:
        raise LoadError(f"{source}: its head is quantised ({packed[0]}); stitch into the checkpoint in its original precision")
    place.mkdir(parents=True, exist_ok=True)
    _write(source, place, where, tensors)
    config = _config(source)
    part, name, told = counted(config)
    if 0 < told < weights.layers:
        part[name] = weights.layers
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copy2(source / "config.json", place / "config.json")
    return sorted(tensors)


def brings(target: str | Path) -> bool:
    """Whether a checkpoint has a head, or its config counts the layers of one, as that of a repack which lost them does."""
    return holds(target) or counted(_config(_folder(target)))[2] > 0


def layers_of(target: str | Path) -> int:
    """A checkpoint's own layers, as its config counts them. Raises LoadError where it does not."""
    return _depth(_folder(target))


def holds(target: str | Path) -> bool:
    """Whether a checkpoint has a head."""
    folder = _folder(target)
    depth = _depth(folder)
    return any(_is_head(name, depth) for name in _places(folder))


def alone(folder: str | Path) -> bool:
    """Whether a folder holds a head without the model that it belongs to, which other engines would look for around it."""
    place = Path(folder).expanduser()
    if not (place / "config.json").is_file() or not any(place.glob("*.safetensors")):
        return False
    return not any(re.match(r"(?:model\.)?(?:language_model\.)?layers\.0\.", name) for name in _places(place))


def counted(config: dict[str, Any]) -> tuple[dict[str, Any], str, int]:
    """Where a config says how many layers the head has, under which name, and how many; 0 where it says nothing."""
    for part in (config, config.get("text_config") or {}):
        for name in COUNTS:
            if isinstance(part.get(name), int) and part[name] > 0:
                return part, name, part[name]
    return config, COUNTS[0], 0


def _write(source: Path, place: Path, where: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """All but config.json, which comes last, so that a copy that was cut short is no model."""
    touched = {where[name] for name in tensors if name in where}
    added = {name: tensor for name, tensor in tensors.items() if name not in where}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in touched | {"config.json", INDEX}:
            shutil.copy2(file, place / file.name)
    for shard in sorted(touched):
        with safe_open(source / shard, framework="pt") as opened:
            kept, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118 (not a dict)
        for name, old in kept.items():
            if name in tensors and tensors[name].shape != old.shape:
                raise LoadError(f"{name}: the head's is {list(tensors[name].shape)}, the target's {list(old.shape)}; "
                                "they belong to different models")
            if name in tensors:
                kept[name] = tensors[name].to(old.dtype).contiguous()
        save_file(kept, place / shard, metadata=metadata)
    index = source / INDEX
    shard = next(name for number in count() if not (source / (name := f"model-mtp{f'-{number}' if number else ''}.safetensors")).exists())
    if added:
        save_file({name: tensor.contiguous() for name, tensor in added.items()}, place / shard, metadata={"format": "pt"})
    if added or index.is_file():
        known: dict[str, Any] = {"metadata": {}, "weight_map": dict(where)}
        if index.is_file():
            known = json.loads(index.read_text(encoding="utf-8"))
        known["weight_map"] |= dict.fromkeys(added, shard)
        if "total_size" in known.get("metadata", {}):
            known["metadata"]["total_size"] += sum(t.numel() * t.element_size() for t in added.values())
        (place / INDEX).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _recognise(names: Iterable[str], source: str | Path) -> tuple[Layout, int, bool]:
    """Layout, number of the first layer, and whether experts stand alone."""
    names = list(names)
    kind = next((kind for kind, mark in _MARKS.items() if any(re.match(mark, name) for name in names)), None)
    if kind is None:
        raise LoadError(f"{source}: no multi-token prediction head among its tensors (found {', '.join(sorted(names)[:4]) or 'none'}); "
                        f"{EXPECTED}")
    layout = LAYOUTS[kind]
    numbers = [int(found[1]) for name in names if (found := re.match(re.escape(layout.layer) + r"(\d+)\.", name))]
    return layout, min(numbers, default=0), any(EXPERT.match(name) for name in names)


def _is_head(name: str, layers: int) -> bool:
    """Whether a tensor of a target with so many layers belongs to its head."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) >= layers if found else name.startswith(("mtp.", "mtp_layers.", "model.mtp_"))


def _fuse(tensors: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """Experts that stand alone become what transformers computes with: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    fused = {name: tensor for name, tensor in tensors.items() if not EXPERT.match(name)}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if found := EXPERT.match(name):
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor
    for prefix, those in experts.items():
        short = [i for i in range(1 + max(those)) if len(those.get(i, {})) != 3]
        if short:
            raise LoadError(f"{source}: {prefix}{short[0]} is incomplete; expected gate_proj, up_proj and down_proj of every expert")
        ordered = [those[i] for i in range(len(those))]
        fused[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((one["gate_proj"], one["up_proj"])) for one in ordered])
        fused[f"{prefix}down_proj"] = torch.stack([one["down_proj"] for one in ordered])
    return fused


def _split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back: every expert by itself."""
    alone: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, dot, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for i, both in enumerate(tensor.unbind()):
                gate, up = both.chunk(2)
                alone |= {f"{prefix}{dot}{i}.gate_proj.weight": gate, f"{prefix}{dot}{i}.up_proj.weight": up}
        elif kind == "down_proj":
            alone |= {f"{prefix}{dot}{i}.down_proj.weight": down for i, down in enumerate(tensor.unbind())}
        else:
            alone[name] = tensor
    return alone


def _folder(name: str | Path) -> Path:
    found = folder_of(name)
    if found is None:
        raise LoadError(f"{name} is neither a folder nor in the hub's cache; expected the target's checkpoint on this machine")
    return found


def _places(folder: Path) -> dict[str, str]:
    """Tensor → file, from the index or, without one, from the files."""
    index = folder / INDEX
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    where: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), shard.name)
    if not where:
        raise LoadError(f"{folder} has no safetensors weights; expected a checkpoint as published")
    return where


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{folder / 'config.json'} cannot be read ({error}); expected a checkpoint as published") from error
    return config


def _depth(folder: Path) -> int:
    config = _config(folder)
    depth = (config.get("text_config") or config).get("num_hidden_layers")
    if not isinstance(depth, int):
        raise LoadError(f"{folder / 'config.json'} has no num_hidden_layers; expected the config of a decoder")
    return depth


def _load(folder: Path, where: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(where.values())):
        if not (folder / shard).is_file():
            raise LoadError(f"{folder}: {shard}, which holds its multi-token prediction weights, is missing; fetch the checkpoint again")
        with safe_open(folder / shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name, home in where.items() if home == shard}
    return tensors
