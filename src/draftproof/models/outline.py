"""What a server's edge must know of a model that another engine runs: sizes, tokenizer, defaults, but no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import GenerationConfig

from ..config import LoadConfig
from ..errors import LoadError
from .folder import configuration, context_of, defaults_of, end_ids, read_tokenizer
from .target import LoadFacts, Target, TargetParts
from .tokenizer import Tokenizer


@dataclass(eq=False)
class Outline:
    """The fields of `Target` that are no computation."""

    vocab_size: int
    context: int
    facts: LoadFacts
    tokenizer: Tokenizer | None
    defaults: dict[str, float]
    eos_ids: tuple[int, ...]
    device: torch.device
    parts: TargetParts
    trees: bool = False


def outline(path: str | Path, context: int | None = None) -> Target:
    """The outline of the model at `path` (a folder or hub id); context: the other engine's own limit, if it is lower.

    Typed as a target for those who only read it: the methods of one are not there. Raises LoadError.
    """
    config = configuration(path).get_text_config()
    tokenizer = read_tokenizer(path, LoadConfig(), {})
    if tokenizer is None:
        raise LoadError(f"{path} has no tokenizer files; expected the model that the other engine serves, with its tokenizer")
    try:
        generation = GenerationConfig.from_pretrained(str(path))
    except OSError:
        generation = GenerationConfig()
    own = context_of(config)
    facts = LoadFacts(name=str(path), device="remote", dtype=str(getattr(config, "dtype", "")).removeprefix("torch."), tier=0, threads=0,
                      weight_bytes=0, cache_bytes_per_token=0, invisible=False, invisible_reason="not promised: another engine runs it")
    found = Outline(int(config.vocab_size), min(own, context or own), facts, tokenizer,
                    defaults_of(generation, path), end_ids(generation, config, tokenizer, path), torch.device("cpu"), TargetParts())
    return cast(Target, found)
