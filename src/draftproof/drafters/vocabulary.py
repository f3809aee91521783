"""Do two models mean the same by a token id? Compared by content: padding may differ, a single exchanged id may not.

A drafter's ids are given to the target as they are. If `17` is another word there, every guess of it is wrong and nothing
says so: the text stays right, and speculation is slow for no visible reason. Hence the check at load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from ..errors import VocabularyMismatch
from ..models.target import Target
from ..models.tokenizer import Tokenizer

SHOWN = 5          # differences that a message names
PROBE = "def f(x):\n    return x  # ünï 1234"
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
ANCHOR = "a"       # stands before a piece of text that must not be taken for the beginning of one

Content = bytes | str
"""What a token means: the bytes it writes in the middle of a text, or the name of a special token, which writes none."""


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
    def file(self) -> Mapping[str, Any]:
        """The tokenizer.json."""
        found: Mapping[str, Any] = json.loads(self.tokenizer.backend.to_str()) if self.tokenizer else {}
        return found

    @property
    def model(self) -> Mapping[str, Any]:
        """The trained part of it: its type and, for BPE, its merges."""
        return self.file.get("model") or {}

    @cached_property
    def front(self) -> list[int]:
        """What it puts before a text (BOS)."""
        return _prefix(self.tokenizer) if self.tokenizer else []

    def inside(self, text: str) -> list[int]:
        """Ids of `text` where it stands in the middle of another: neither a BOS nor a space is put before it."""
        assert self.tokenizer is not None, "text needs a tokenizer"
        anchor, whole = self.tokenizer.encode_plain(ANCHOR), self.tokenizer.encode_plain(ANCHOR + text)
        return whole[len(anchor):] if whole[:len(anchor)] == anchor else self.tokenizer.encode_plain(text)

    @property
    def merges(self) -> list[str] | None:
        found = self.model.get("merges")
        return None if found is None else [m if isinstance(m, str) else " ".join(m) for m in found]


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary writes: the content of every id, and ids for any bytes. Of ids with equal content (a byte and the
    character it is) the one that encoding uses stands in `ids`.

    byte-level: pieces are bytes in GPT-2's alphabet · metaspace: pieces are text, ▁ a space, <0x0A> a byte (SentencePiece).
    """

    words: Words
    kind: Literal["byte-level", "metaspace"]
    contents: Mapping[int, Content]
    ids: Mapping[Content, int]

    @classmethod
    def of(cls, words: Words) -> Self | None:
        """None if there is no tokenizer, or one whose pieces do not say which bytes they are."""
        kind = _kind(words)
        if kind is None or words.tokenizer is None:
            return None
        special = {*words.tokenizer.special_ids, *(i for i, t in words.tokenizer.hf.added_tokens_decoder.items() if t.special)}
        contents: dict[int, Content] = {}
        ids: dict[Content, int] = {}
        for piece, i in sorted(words.pieces.items(), key=lambda entry: (_byte(entry[0]) is None, -entry[1])):
            content = piece if i in special else piece.encode() if piece in words.added else _bytes_of(piece, kind)
            if content and i < words.vocab_size:
                contents[i], ids[content] = content, i
        return cls(words, kind, contents, ids)

    def spell(self, data: bytes) -> tuple[int, ...] | None:
        """Ids that write exactly these bytes in the middle of a text, whole characters or not; None if none do."""
        if data in self.ids:
            return (self.ids[data],)
        try:
            text = "".join(CHARACTER[b] for b in data) if self.kind == "byte-level" else data.decode().replace(" ", "▁")
        except UnicodeDecodeError:
            text = ""
        assert self.words.tokenizer is not None
        found = tuple(token.id for token in self.words.tokenizer.backend.model.tokenize(text)) if text else ()
        if self.written(found) == data:
            return found
        singles = [self.ids.get(bytes([b])) for b in data]
        return None if None in singles else tuple(i for i in singles if i is not None)

    def written(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids; special tokens and ids without a piece write nothing."""
        contents = (self.contents.get(i) for i in ids)
        return b"".join(content for content in contents if isinstance(content, bytes))


def shared(target: Spelling, drafter: Spelling) -> list[tuple[int, int]]:
    """(target's id, drafter's id) of every token that both have, by content and in the order of the target's ids."""
    return sorted((i, drafter.ids[content]) for content, i in target.ids.items() if content in drafter.ids)


def counterpart(special: str, mine: Words, other: Words) -> Content:
    """What a special token of one side is for a reader of the other: its token of the same role, or else the name, spelled out."""
    for role in ROLES:
        theirs = _role(other, role)
        if theirs is not None and _role(mine, role) == special:
            return theirs
    return special.encode()


def _role(words: Words, role: str) -> str | None:
    found = getattr(words.tokenizer.hf, role, None) if words.tokenizer else None
    return None if found is None else str(found)


def foreign(target: Words, drafter: Words) -> bool:
    """Whether both have tokenizers, and those give ids another meaning."""
    return target.tokenizer is not None and drafter.tokenizer is not None and any(c.fatal and not c.ok for c in compare(target, drafter))


def _alphabet() -> dict[int, str]:
    """Byte → its character in byte-level pieces: itself where it can be printed, else the next one from U+0100 on (GPT-2)."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [b for b in range(256) if b not in printed]
    return {b: chr(b) if b in printed else chr(256 + hidden.index(b)) for b in range(256)}


CHARACTER = _alphabet()
BYTE = {character: b for b, character in CHARACTER.items()}


def _byte(piece: str) -> int | None:
    """N of SentencePiece's <0xN>."""
    return int(piece[3:5], 16) if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") else None


def _bytes_of(piece: str, kind: str) -> bytes:
    if kind == "byte-level":
        return bytes(BYTE[c] for c in piece) if all(c in BYTE for c in piece) else piece.encode()
    byte = _byte(piece)
    return piece.replace("▁", " ").encode() if byte is None else bytes([byte])


def _kind(words: Words) -> Literal["byte-level", "metaspace"] | None:
    if words.model.get("continuing_subword_prefix") or words.model.get("end_of_word_suffix"):
        return None
    parts = [*_stages(words.file.get("decoder")), *_stages(words.file.get("pre_tokenizer"))]
    if any(part["type"] == "ByteLevel" for part in parts):
        return "byte-level"
    spaces = any(part["type"] == "Metaspace" or part["type"] == "Replace" and part["pattern"] == {"String": "▁"} for part in parts)
    return "metaspace" if spaces else None


def _stages(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A stage of a tokenizer.json, or those of a sequence."""
    if part is None:
        return []
    inner = next((part[name] for name in ("decoders", "pretokenizers") if name in part), None)
    return [part] if inner is None else [stage for each in inner for stage in _stages(each)]


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
    pairs = [(role, _role(target, role), _role(drafter, role)) for role in ROLES]
    told = ", ".join(f"{part} is {a!r} in the target and {b!r} in the drafter" for part, a, b in pairs if a != b)
    return Check("special tokens", not told, told or _listed(f"{part} {a!r}" for part, a, _ in pairs if a is not None), fatal=False)


def _front(target: Words, drafter: Words) -> Check:
    """What each puts before a text (BOS). The drafter reads the target's ids, so it sees the target's way."""
    ours, theirs = target.front, drafter.front
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
