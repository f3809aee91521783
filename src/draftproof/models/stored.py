"""Tensors of a safetensors file, one by one: the list of them is read once, which takes ten milliseconds where there are thousands, and
what was read leaves memory with its tensor, where a mapped file would stay."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
         "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}


class TensorFile:
    """https://huggingface.co/docs/safetensors: eight bytes with the length of the list that follows, JSON, and behind it the numbers."""

    def __init__(self, path: Path) -> None:
        """A file that safetensors opens."""
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._path, self._start = path, 8 + length

    def type_of(self, name: str) -> torch.dtype:
        """Raises KeyError for one that is not known."""
        return TYPES[self._entries[name]["dtype"]]

    def get(self, name: str, number: int | None = None) -> Tensor:
        """The tensor of this name, or one of those that lie in it side by side. Raises KeyError for a type that is not known."""
        entry = self._entries[name]
        kind, shape, (start, end) = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if number is not None:
            each = (end - start) // shape[0]
            shape, start, end = shape[1:], start + number * each, start + (number + 1) * each
        if not math.prod(shape):
            return torch.empty(shape, dtype=kind)
        held = bytearray(end - start)
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            file.readinto(held)
        return torch.frombuffer(held, dtype=kind).view(shape)
