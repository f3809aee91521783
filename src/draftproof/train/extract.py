"""Hidden states to disk, as safetensors shards, for trainers that are not ours.

    index.json             target, layers, dtype, and for every text its shard, number, length and where the answer begins
    shard-00000.safetensors    {n}.ids [t] int64 · {n}.mask [t] bool · {n}.layer_{i} [t, H]   (i: 0-based decoder layer, its output)

Ask for the last layer too: the target's logits are output(norm(layer_{L-1})), so they need no room on the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import Failure
from ..models.heads.files import save_file
from ..models.target import Target
from .corpus import Text
from .features import Tapper
from .place import written


def extract(target: Target, texts: Iterable[Text], layers: Sequence[int], folder: Path, shard_bytes: int,
            progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Write the shards and, last, the index; returns it. Raises Failure if the folder already holds anything, or there is no text."""
    count = len(target.parts.layers)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise Failure(f"layers {wrong or 'none'}: expected ids from 0 to {count - 1} of {target.facts.name}")
    held = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if held:
        raise Failure(f"{folder} already holds {', '.join(held[:3])}{' …' if len(held) > 3 else ''}; expected a new folder or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    tapper, rows, size, shards = Tapper(target, layers), [], 0, 0
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        nonlocal waiting, size, shards
        part = folder / f"shard-{shards:05d}.part"
        with written(part, "Empty the folder before the next go"):
            save_file(waiting, part, metadata={"format": "pt"})
            os.replace(part, part.with_suffix(".safetensors"))
        waiting, size, shards = {}, 0, shards + 1

    for number, text in enumerate(texts):
        (features,) = tapper.read([text])
        tensors: dict[str, Tensor] = {"ids": features.ids, "mask": features.mask, **{f"layer_{i}": t for i, t in features.taps.items()}}
        waiting |= {f"{number}.{name}": tensor.cpu() for name, tensor in tensors.items()}
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        rows.append({"text": number, "shard": shards, "tokens": len(text.ids), "answer_from": text.answer_from, "class": text.prompt_class})
        if size >= shard_bytes:
            write()
        if progress:
            progress(number + 1)
    if waiting:
        write()
    if not rows:
        raise Failure("the log has no text that the target can read; expected messages, prompts or token ids")
    index = {"version": 1, "target": target.facts.name, "layers": list(layers), "dtype": target.facts.dtype, "shards": shards,
             "texts": rows}
    (folder / "index.part").write_text(json.dumps(index) + "\n", encoding="utf-8")
    os.replace(folder / "index.part", folder / "index.json")
    return index
