"""The pair that engine.py and peers.py measure: the built-in one, inflated to 579 M and 18 M, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from inflate import Shape, build_inflated
from provenance import digest
from transformers import AutoModelForCausalLM, AutoTokenizer

SHAPES = {"target": Shape(1536, 16, 24, 12, 6144), "draft": Shape(512, 4, 8, 4, 1728)}


def inflated(source: Path, name: str, work: Path, seed: int) -> Path:
    """The folder of the inflated model; built unless it is there already, made from the same weights, shape and seed."""
    folder, key = work / name, repr((digest(source), SHAPES[name], seed))
    note = folder / "inflated.txt"
    if not note.exists() or note.read_text() != key:
        small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        build_inflated(small, SHAPES[name], "cpu", torch.bfloat16, seed).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        note.write_text(key)
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
