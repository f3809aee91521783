"""What is being compared, by name and content: labels that change when the target, a drafter, the template or the engine does."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import __version__
from ..drafters import parse_spec

EDGE = 1 << 20              # bytes that are read at both ends of a weight file


def target_version(name: str) -> str:
    """`name` is a folder or a hub id."""
    return _named(name)


def drafter_version(spec: str | None) -> str:
    """A drafter spec, with a mark of the contents of every folder in it."""
    if spec in (None, "none"):
        return spec or "the server's own"
    parsed = parse_spec(spec)
    marks = [mark for part in parsed.parts or (parsed,) if part.path is not None and (mark := folder_mark(part.path))]
    return " ".join([spec, *(f"({mark})" for mark in marks)])


def template_version(tokenizer: Any) -> str:
    """A mark of the chat template; "none" where there is none."""
    template = getattr(getattr(tokenizer, "hf", None), "chat_template", None)
    return "none" if not template else hashlib.sha256(str(template).encode()).hexdigest()[:10]


def engine_version() -> str:
    import torch

    return f"draftproof {__version__}, torch {torch.__version__}"


@lru_cache(maxsize=64)
def folder_mark(place: str) -> str:
    """Ten digits that change with the weights and settings in a folder: names, sizes, and the contents of files up to 2 MiB, of larger
    ones both ends. "" if it is no folder."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        return ""
    mark = hashlib.sha256()
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        size = file.stat().st_size
        mark.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            mark.update(content.read(EDGE))
            content.seek(max(EDGE, size - EDGE))
            mark.update(content.read(EDGE))
    return mark.hexdigest()[:10]


def _named(name: str) -> str:
    mark = folder_mark(name)
    return f"{Path(name).name} ({mark})" if mark else name
