"""The pair that engine.py and peers.py measure: the built-in one, inflated to 579 M and 18 M, a head and prompts for it. In place of the
dense target a mixture of experts of as many parameters."""

from __future__ import annotations

import json
import math
import sysconfig
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from inflate import Shape, build_inflated, real_layers, rotation_of
from provenance import digest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SHAPES = {"target": Shape(1536, 16, 24, 12, 6144), "draft": Shape(512, 4, 8, 4, 1728)}
TARGETS = {"dense": SHAPES["target"], "moe": Shape(512, 10, 12, 6, 2304, experts=16, chosen=4)}     # 579 M; 582 M, a token reads 156


def built(source: Path, folder: Path, shape: Shape, seed: int) -> Path:
    """The folder of the inflated model; built unless it is there already, made from the same weights, shape and seed."""
    note, key = folder / "inflated.txt", repr((digest(source), shape, seed))
    if not note.exists() or note.read_text() != key:
        small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        build_inflated(small, shape, "cpu", torch.bfloat16, seed).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        note.write_text(key)
    return folder


def inflated(source: Path, name: str, work: Path, seed: int) -> Path:
    """`built` in the shape of the pair's "target" or "draft"."""
    return built(source, work / name, SHAPES[name], seed)


def turned_head(head: Path, source: Path, shape: Shape, folder: Path, seed: int, device: str | torch.device = "cpu") -> Path:
    """The folder of an EAGLE-3 head of the small target `source`, made to fit `source` inflated to this shape on this device:
    the same function of the same text.

    The large stream is s·R·h, so its input projection reads it through Rᵀ/s, at the layers that compute the small ones; the embedding
    that it borrowed goes with it. Everything else is as it was trained, and as small."""
    config, tensors = json.loads((head / "config.json").read_text("utf-8")), load_file(head / "model.safetensors")
    small = json.loads((source / "config.json").read_text("utf-8"))
    width, layers = small["hidden_size"], small["num_hidden_layers"]
    assert not config["fc_norm"] and not config["norm_before_fc"], "a norm before the projection would have to be turned, too"
    back = rotation_of(shape.hidden, width, torch.Generator(device).manual_seed(seed)).cpu().T / math.sqrt(shape.hidden / width)
    parts = tensors["fc.weight"].float().split(width, 1)
    tensors["fc.weight"] = torch.cat([part @ back for part in parts], 1).to(tensors["fc.weight"].dtype)
    tensors["embed_tokens.weight"] = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    places = real_layers(layers, shape.layers)
    taps = [places.index(layer) for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = taps
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "target_hidden_size": shape.hidden}, indent=2))
    return folder


def read_prompts(path: Path, tokenizer: Any, count: int, low: int, high: int) -> list[list[int]]:
    """`count` prompts of low…high tokens, the classes in turn. Raises SystemExit if there are none."""
    classes: dict[str, list[list[int]]] = {}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        ids = tokenizer.encode(record["prompt"])
        if low <= len(ids) <= high:
            classes.setdefault(record["class"], []).append(ids)
    if not classes:
        raise SystemExit(f"{path}: no prompt of {low} to {high} tokens")
    longest = max(map(len, classes.values()))
    return [group[i] for i in range(longest) for group in classes.values() if i < len(group)][:count]


def long_prompts(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of so many tokens: beginnings of modules of Python's standard library, by their names. Raises SystemExit if too
    few are as long."""
    texts = (path.read_text("utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    begun = (tokenizer.encode(text[:8 * tokens])[:tokens] for text in texts)
    found = list(islice((ids for ids in begun if len(ids) == tokens), count))
    if len(found) < count:
        raise SystemExit(f"Python's standard library has {len(found)} prompts of {tokens} tokens, {count} were asked for")
    return found


def pass_bytes(folder: Path) -> int:
    """Bytes of weights that a pass of one row reads: all but embedding tables, which are looked up, and but the experts that a token does
    not choose. Keys and values come on top."""
    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            tensors |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors.pop("__metadata__", None)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    experts, chosen = config.get("num_local_experts") or config.get("num_experts") or 1, config.get("num_experts_per_tok") or 1
    tied = not any("lm_head" in name for name in tensors)
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in tensors.items()
             if "embed_tokens_per_layer" not in name and (tied or "embed_tokens" not in name)}
    return sum(size * chosen // experts if ".experts." in name else size for name, size in sizes.items())
