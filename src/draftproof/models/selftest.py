"""Law 2, measured at load: do a row's bits depend on what stands beside it?

The same dozen tokens are decoded plainly, one pass each, and then scored 2, 3, 5, 8 and 17 wide, in a batch of four texts of
different lengths, behind decoys in trees, and after a prefill in other chunks. Every logit must be the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..types import Draft
from .target import Slot, Target

ROWS, WIDTHS = 12, (2, 3, 5, 8, 17)
FAR = 700  # tokens before rows: more than torch's attention takes in one block


def invisible(target: Target, page_tokens: int, chunk: int) -> tuple[bool, str]:
    """(passed, "yes: …" or the rule that fails with its count). Leaves no slot open. About a hundred small passes."""
    generator = torch.Generator().manual_seed(20)
    # the dozen rows straddle the first page edge with 8 tokens before them, where the context allows it
    edge = -(-(8 + ROWS // 2) // page_tokens) * page_tokens
    before = min(edge - ROWS // 2, target.context - 2 * ROWS - 20)
    if before < 8:
        return False, f"not measured: a context of {target.context} tokens is too short for the self-test"
    room = _room(before, page_tokens) if target.trees else _room(before, 1, 0)          # a cache that cannot branch has no pages
    if not target.fits(room):
        return False, f"not measured: the cache has no room for the {room} tokens of the self-test; raise cache_tokens (--cache-tokens)"
    text = torch.randint(0, target.vocab_size, (before + ROWS + 20,), generator=generator)
    plain = _decode(target, text, before)
    checks: list[tuple[str, Callable[[], int]]] = [
        *((f"scored {width} wide", partial(_chain, target, text, before, plain, width)) for width in WIDTHS),
        ("in a batch of 4", lambda: _batch(target, text, before, plain)),
        ("after a prefill in other chunks", lambda: _chunks(target, text, before, plain, chunk)),
    ]
    if target.trees:
        checks.append(("in a tree behind decoys", lambda: _tree(target, text, before, plain)))
    for name, check in checks:
        different = check()
        if different:
            return False, f"no: {different} of {ROWS} rows differ from plain decoding when {name}"
    shapes = "a batch, trees and" if target.trees else "a batch and"
    return True, f"yes: {ROWS} rows equal bit for bit at widths {', '.join(map(str, WIDTHS))}, in {shapes} other prefill chunks"


def _room(before: int, page_tokens: int, tails: int = 3) -> int:
    """Tokens of the pages in use at most: by the batch, or by a tree, whose paths but the first have two of their own."""
    alone, *others = (-(-(2 + length + ROWS + 20) // page_tokens) for length in _lengths(before))
    return page_tokens * (alone + max(sum(others), 2 * tails))


def _lengths(before: int) -> list[int]:
    """Of the batch's texts."""
    return [before, before // 2, before // 3 + 1, 5]


def differ_far(target: Target) -> str:
    """What `invisible` says where rows differ behind a long text, as they may where attention is not ours: the rule that fails, or nothing.
    Leaves no slot open."""
    before = FAR
    while before + ROWS + 20 > target.context or not target.fits(before + ROWS + 22):
        before //= 2
        if before < ROWS:
            return ""
    text = torch.randint(0, target.vocab_size, (before + ROWS + 20,), generator=torch.Generator().manual_seed(22))
    different = _chain(target, text, before, _decode(target, text, before), 5)
    return f"no: {different} of {ROWS} rows differ from plain decoding when scored 5 wide behind {before} tokens" if different else ""


def _filled(target: Target, text: Tensor, length: int, chunk: int | None = None) -> Slot:
    slot = target.open(text[:2].tolist(), tenant="self-test", room=length + ROWS + 20)  # two tokens find no cached page
    for start in range(0, length, chunk or length):
        target.extend([slot], [text[start : min(length, start + (chunk or length))]])
    return slot


def _decode(target: Target, text: Tensor, before: int) -> Tensor:
    slot, rows = _filled(target, text, before), []
    for i in range(ROWS):
        rows.append(target.score([slot], text[before + i : before + i + 1], [Draft.empty()]).logits[0].clone())
        target.rewind(slot, ())
    target.close(slot)
    return torch.stack(rows)


def _different(got: Tensor, want: Tensor) -> int:
    return int((got != want).any(-1).sum())


def _chain(target: Target, text: Tensor, before: int, plain: Tensor, width: int) -> int:
    bad, slot, at = 0, _filled(target, text, before), 0
    while at < ROWS:
        draft = Draft.chain(text[before + at + 1 : before + at + width])
        got = target.score([slot], text[before + at : before + at + 1], [draft]).logits
        take = min(width, ROWS - at)
        bad += _different(got[:take], plain[at : at + take])
        target.rewind(slot, tuple(range(take - 1)))
        at += take
    target.close(slot)
    return bad


def _batch(target: Target, text: Tensor, before: int, plain: Tensor) -> int:
    slots = [_filled(target, text if i == 0 else text.flip(0), n) for i, n in enumerate(_lengths(before))]
    bad = 0
    for at in range(0, ROWS, 3):
        drafts = [Draft.chain(text[before + at + 1 : before + at + 3]), Draft.empty(), Draft.chain(text[:5]), Draft.chain(text[:1])]
        got = target.score(slots, torch.stack([text[before + at], text[0], text[1], text[2]]), drafts)
        bad += _different(got.logits[got.rows(0)], plain[at : at + 3])
        for i, slot in enumerate(slots):
            target.rewind(slot, (0, 1) if i == 0 else ())
    for slot in slots:
        target.close(slot)
    return bad


def _chunks(target: Target, text: Tensor, before: int, plain: Tensor, chunk: int) -> int:
    bad = 0
    several = {40} if target.device.type == "cuda" else set()        # rows of two tiles of our products there, as 17 are of one
    for size in {max(2, min(chunk, before) // 3), 17, *several}:
        slot = _filled(target, text, before, size)
        got = target.score([slot], text[before : before + 1], [Draft.chain(text[before + 1 : before + 4])]).logits
        bad += _different(got, plain[:4])
        target.rewind(slot, ())
        target.close(slot)
    return bad


def _tree(target: Target, text: Tensor, before: int, plain: Tensor) -> int:
    """At every depth a decoy with a child of its own stands before the true token."""
    bad, slot = 0, _filled(target, text, before)
    for at in range(0, ROWS, 4):
        true = text[before + at + 1 : before + at + 4].tolist()
        tokens: list[int] = []
        parents: list[int] = []
        rows, parent = [0], -1
        for token in true:
            decoy = (token + 1) % target.vocab_size
            tokens += [decoy, decoy, token]
            parents += [parent, len(parents), parent]
            parent = len(parents) - 1
            rows.append(parent + 1)
        draft = Draft(torch.tensor(tokens), tuple(parents))
        got = target.score([slot], text[before + at : before + at + 1], [draft]).logits
        bad += _different(got[rows], plain[at : at + 4])
        target.rewind(slot, [r - 1 for r in rows[1:]])
    target.close(slot)
    return bad
