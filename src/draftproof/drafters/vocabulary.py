"""Do two models mean the same by a token id? Compared by content: padding may differ, a single exchanged id may not.

A drafter's ids are given to the target as they are. If `17` is another word there, every guess of it is wrong and nothing
says so: the text stays right, and speculation is slow for no visible reason. Hence the check at load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from ..errors import VocabularyMismatch
from ..models.target import Target
from ..models.tokenizer import Tokenizer

SHOWN = 5          # differences that a message names
PROBE = "def f(x):\n    return x  # ünï 1234"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared. fatal: the pair cannot be used unless it is ok; otherwise a difference only costs acceptance."""

    name: str
    ok: bool
    detail: str
    fatal: bool = True


@dataclass(frozen=True)
class Words:
    """What a model knows of its own ids: its tokenizer, if it has one, the rows of its output, and its longest text."""

    tokenizer: Tokenizer | None
    vocab_size: int
    context: int | None = None
    name: str = ""

    @classmethod
    def of(cls, model: Target) -> Self:
        return cls(model.tokenizer, model.vocab_size, model.context, model.facts.name)

    @cached_property
    def pieces(self) -> Mapping[str, int]:
        return self.tokenizer.vocabulary if self.tokenizer else {}

    @cached_property
    def used(self) -> frozenset[int]:
        return frozenset(self.pieces.values())

    @cached_property
    def added(self) -> Mapping[str, int]:
        """Tokens laid over the trained vocabulary, special ones among them."""
        decoder: Mapping[int, Any] = self.tokenizer.hf.added_tokens_decoder if self.tokenizer else {}
        return {str(token): i for i, token in decoder.items()}

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The trained part of a tokenizer.json: its type and, for BPE, its merges."""
        found: Mapping[str, Any] = json.loads(self.tokenizer.backend.to_str())["model"] if self.tokenizer else {}
        return found

    @property
    def merges(self) -> list[str] | None:
        found = self.model.get("merges")
        return None if found is None else [m if isinstance(m, str) else " ".join(m) for m in found]


def compare(target: Words, drafter: Words) -> list[Check]:
    """Every check of the pair, in the order in which `doctor` prints them; raises nothing."""
    if target.tokenizer is None or drafter.tokenizer is None:
        return [_sizes(target, drafter), *_contexts(target, drafter)]
    parts = (_vocabulary, _added, _merges, _special, _front, _template)
    return [*(part(target, drafter) for part in parts), *_contexts(target, drafter)]


def require_same(target: Words, drafter: Words) -> list[Check]:
    """The checks of the pair. Raises VocabularyMismatch naming the first differing tokens with both ids."""
    checks = compare(target, drafter)
    broken = [check for check in checks if check.fatal and not check.ok]
    if broken:
        of = f" of {drafter.name}" if drafter.name else ""
        raise VocabularyMismatch(f"the drafter's tokens{of} are not the target's: " + "; ".join(f"{c.name}: {c.detail}" for c in broken)
                                 + ". Expected a drafter trained with the target's tokenizer; use one, or drafter ngram")
    return checks


def _sizes(target: Words, drafter: Words) -> Check:
    without = [side for side, words in (("target", target), ("drafter", drafter)) if words.tokenizer is None]
    lack = "neither side has a tokenizer" if len(without) == 2 else f"the {without[0]} has no tokenizer"
    same = target.vocab_size == drafter.vocab_size
    sizes = f"both {target.vocab_size}" if same else f"{target.vocab_size} in the target and {drafter.vocab_size} in the drafter"
    return Check("vocabulary", same, f"{lack}, so only the sizes were compared: {sizes}")


def _vocabulary(target: Words, drafter: Words) -> Check:
    """Piece → id. A piece that only one side has is a difference unless it was added there behind everything the other has."""
    ours, theirs = target.pieces, drafter.pieces
    if ours == theirs:
        return Check("vocabulary", True, f"{len(ours)} tokens, all with the same ids")
    differing = {piece for piece in ours.keys() & theirs.keys() if ours[piece] != theirs[piece]}
    differing |= {piece for piece in ours.keys() - theirs.keys() if not _beyond(piece, target, drafter)}
    differing |= {piece for piece in theirs.keys() - ours.keys() if not _beyond(piece, drafter, target)}
    if not differing:
        return Check("vocabulary", True, f"{len(ours.keys() & theirs.keys())} tokens with the same ids")
    first = sorted(differing, key=lambda piece: (min(ours.get(piece, 1 << 60), theirs.get(piece, 1 << 60)), piece))[:SHOWN]
    named = ", ".join(f"{piece!r} is {_id(ours, piece)} in the target and {_id(theirs, piece)} in the drafter" for piece in first)
    return Check("vocabulary", False, f"{len(differing)} tokens differ, first {named}")


def _beyond(piece: str, owner: Words, other: Words) -> bool:
    """Whether `piece` is an added token whose id the other side leaves unused."""
    return piece in owner.added and owner.pieces[piece] not in other.used


def _id(pieces: Mapping[str, int], piece: str) -> str:
    return str(pieces[piece]) if piece in pieces else "missing"


def _added(target: Words, drafter: Words) -> Check:
    told = []
    for side, mine, other in (("target", target, drafter), ("drafter", drafter, target)):
        only = [f"{piece!r} ({i})" for piece, i in mine.added.items() if piece not in other.pieces]
        if only:
            told.append(f"only the {side} has {', '.join(only[:SHOWN])}")
    return Check("added tokens", not told, "; ".join(told) or f"the same {len(target.added)}", fatal=False)


def _merges(target: Words, drafter: Words) -> Check:
    ours, theirs = target.merges, drafter.merges
    if ours is None and theirs is None:
        return Check("merges", True, f"none: both are {target.model.get('type')} models")
    if ours == theirs:
        return Check("merges", True, f"the same {len(ours or ())}")
    if ours is None or theirs is None:
        return Check("merges", False, f"the target is a {target.model.get('type')} model, the drafter a {drafter.model.get('type')} model")
    return Check("merges", False, _first_difference(ours, theirs))


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    a, b = (repr(m[at]) if at < len(m) else "nothing" for m in (ours, theirs))
    return f"{len(ours)} and {len(theirs)}; merge {at} is {a} in the target and {b} in the drafter"


def _special(target: Words, drafter: Words) -> Check:
    """Which token plays which part. Pairs of a base and a chat model differ here and still work."""
    parts = ("bos_token", "eos_token", "pad_token", "unk_token")
    pairs = [(part, *(getattr(w.tokenizer.hf, part, None) if w.tokenizer else None for w in (target, drafter))) for part in parts]
    told = ", ".join(f"{part} is {a!r} in the target and {b!r} in the drafter" for part, a, b in pairs if a != b)
    return Check("special tokens", not told, told or _listed(f"{part} {a!r}" for part, a, _ in pairs if a is not None), fatal=False)


def _front(target: Words, drafter: Words) -> Check:
    """What each puts before a text (BOS). The drafter reads the target's ids, so it sees the target's way."""
    ours, theirs = (_prefix(w.tokenizer) if w.tokenizer else [] for w in (target, drafter))
    if ours == theirs:
        return Check("BOS handling", True, f"both put {ours} before a text" if ours else "neither puts a token before a text", fatal=False)
    detail = f"the target puts {ours or 'nothing'} before a text, the drafter {theirs or 'nothing'}; the target's way is used"
    return Check("BOS handling", False, detail, fatal=False)


def _prefix(tokenizer: Tokenizer) -> list[int]:
    whole, plain = tokenizer.encode(PROBE), tokenizer.encode_plain(PROBE)
    for front in range(len(whole) - len(plain) + 1):
        if whole[front:front + len(plain)] == plain:
            return whole[:front]
    return []


def _template(target: Words, drafter: Words) -> Check:
    ours, theirs = (bool(w.tokenizer and w.tokenizer.has_chat_template) for w in (target, drafter))
    if ours and theirs:
        same = _chat(target) == _chat(drafter)
        return Check("chat template", same, "the same" if same else "they differ; the target's is used", fatal=False)
    told = {(True, False): "only the target has one; it is used", (False, True): "only the drafter has one; it is not used"}
    return Check("chat template", True, told.get((ours, theirs), "none"), fatal=False)


def _chat(words: Words) -> Any:
    return words.tokenizer.hf.chat_template if words.tokenizer else None


def _contexts(target: Words, drafter: Words) -> list[Check]:
    if target.context is None or drafter.context is None:
        return []
    enough = drafter.context >= target.context
    detail = f"{target.context} tokens in the target, {drafter.context} in the drafter"
    return [Check("longest context", enough, detail if enough else detail + ", which stops guessing there", fatal=False)]


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "none"
