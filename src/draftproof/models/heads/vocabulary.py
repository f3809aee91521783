"""The reduced vocabulary of a draft head: `d2t` are offsets, `t2d` is a mask (EAGLE-3, arXiv 2503.01840, and all that follow).

Draft token i is the target's token i + d2t[i]; t2d[token] says whether a token of the target has a draft id. Both are kept
sorted by the target's ids. Read as an index table, d2t gives guesses that are nearly never right, and nothing else shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import LoadError

ENOUGH = 64     # so many draft tokens without two neighbours among them are no vocabulary


def draft_ids(tensors: Mapping[str, Tensor], size: int, vocab_size: int, source: str | Path) -> Tensor | None:
    """The target's id of each of the head's `size` tokens, int64 [size]; None where the head has the whole vocabulary.

    Raises LoadError for a missing, foreign or index-style table.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if t2d is not None or size != vocab_size:
            raise LoadError(f"{source}: tensor d2t is missing, and the head's output has {size} rows for a target of {vocab_size} tokens; "
                            "expected the offsets from draft ids to target ids")
        return None
    if d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise LoadError(f"{source}: d2t is {list(d2t.shape)} of {d2t.dtype}; expected {size} integers, one per row of the head's output")
    d2t = d2t.to(torch.int64).cpu()
    ids = d2t + torch.arange(size)
    marked = None if t2d is None else t2d.cpu().bool().nonzero()[:, 0]
    if _is_index(d2t, ids, marked, vocab_size):
        raise LoadError(f"{source}: d2t is an index table (it holds target ids); expected offsets, target id = i + d2t[i]: "
                        "subtract torch.arange(len(d2t)) from it")
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise LoadError(f"{source}: i + d2t[i] runs from {int(ids.min())} to {int(ids.max())}; expected rising ids in [0, {vocab_size}), "
                        "the target's vocabulary")
    if marked is not None and not torch.equal(marked, ids):
        raise LoadError(f"{source}: t2d marks {marked.shape[0]} tokens that are not the {size} of d2t; expected one vocabulary")
    return ids


def _is_index(d2t: Tensor, ids: Tensor, marked: Tensor | None, vocab_size: int) -> bool:
    """Whether d2t reads as an index table and not as offsets. A table of offsets rises at every step only if no two draft
    tokens are neighbours, which no vocabulary of size is."""
    if marked is not None:
        return torch.equal(marked, d2t) and not torch.equal(marked, ids)
    steps = d2t.diff()
    rising = d2t.shape[0] > 1 and bool((steps > 0).all()) and 0 <= int(d2t[0]) and int(d2t[-1]) < vocab_size
    return rising and (int(ids[-1]) >= vocab_size or (d2t.shape[0] >= ENOUGH and bool((steps == 1).any()) and not bool((steps == 1).all())))


def offsets(ids: Tensor) -> Tensor:
    """`d2t` of sorted target ids: int64 [len(ids)]."""
    return ids.to(torch.int64) - torch.arange(ids.shape[0], device=ids.device)


def mask(ids: Tensor, vocab_size: int) -> Tensor:
    """`t2d` of target ids: bool [vocab_size]."""
    marked = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    marked[ids] = True
    return marked
