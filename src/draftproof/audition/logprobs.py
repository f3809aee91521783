"""What a log says of the target's law: of each token of an answer its log-probability, and those of the likeliest at its place.

    ours, minimal   "logprobs": [{"token_id", "logprob", "top": [{"token_id", "logprob"}, …]}, …]
    chats           choices[0].logprobs.content: [{"token", "logprob", "top_logprobs": [{"token", "logprob"}, …]}, …]
    completions     choices[0].logprobs: {"tokens": […], "token_logprobs": […], "top_logprobs": [{token: logprob, …}, …]}

Tokens are ids, the text of a token, or "token_id:N" (vLLM's return_tokens_as_token_ids). Natural logarithms, before temperature and
filters, as our server, vLLM (raw_logprobs) and OpenAI's API give them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..models.tokenizer import Tokenizer

NAMED = re.compile(r"token_id:(\d{1,9})")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"           # how a piece shows bytes that are no character on their own
Word = int | str


@dataclass(frozen=True, slots=True)
class Place:
    """One token of an answer as the log has it, and what it says of the tokens that might have stood there."""

    token: Word
    logprob: float
    top: tuple[tuple[Word, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """The same in ids. logprobs: of the chosen token and those of the likeliest whose id is known; nameless: of the others."""

    token: int
    logprobs: Mapping[int, float]
    nameless: tuple[float, ...] = ()


def read_places(value: Any) -> tuple[Place, ...] | None:
    """Of any of the forms above; None where there is none, or where it is broken: a log with less is still a log."""
    if isinstance(value, Mapping):
        value = value["content"] if isinstance(value.get("content"), list) else _columns(value)
    if not isinstance(value, list) or not value:
        return None
    places = []
    for entry in value:
        place = _place(entry) if isinstance(entry, Mapping) else None
        if place is None:
            return None
        places.append(place)
    return tuple(places)


def _columns(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tokens, own, top = value.get("tokens"), value.get("token_logprobs"), value.get("top_logprobs")
    if not (isinstance(tokens, list) and isinstance(own, list) and isinstance(top, list) and len(tokens) == len(own) == len(top)):
        return None
    return [{"token": token, "logprob": logprob, "top": [{"token": t, "logprob": p} for t, p in (each or {}).items()]}
            for token, logprob, each in zip(tokens, own, top, strict=True) if each is None or isinstance(each, Mapping)]


def _place(entry: Mapping[str, Any]) -> Place | None:
    top = entry.get("top") if "top" in entry else entry.get("top_logprobs")
    pairs = [_pair(one) for one in top] if isinstance(top, list) and all(isinstance(one, Mapping) for one in top) else []
    own = _pair(entry)
    return None if own is None or None in pairs else Place(own[0], own[1], tuple(pair for pair in pairs if pair is not None))


def _pair(entry: Mapping[str, Any]) -> tuple[Word, float] | None:
    word, logprob = entry.get("token_id", entry.get("token")), entry.get("logprob")
    if isinstance(word, str) and (named := NAMED.fullmatch(word)):
        word = int(named[1])
    if not isinstance(word, int | str) or not isinstance(logprob, int | float) or math.isnan(logprob) or logprob > 1e-3:
        return None
    return word, min(float(logprob), 0.0)


class Pieces:
    """The ids of a tokenizer by their text; texts of several ids are left out."""

    _known: WeakKeyDictionary[Tokenizer, Pieces] = WeakKeyDictionary()

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids: dict[str, int | None] = {}
        for token in tokenizer.vocabulary.values():
            piece = tokenizer.piece(token)
            ids[piece] = token if piece not in ids else None
        self._ids = {piece: token for piece, token in ids.items() if token is not None and UNKNOWN not in piece}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Pieces:
        """Made once per tokenizer: it takes a call for every token of the vocabulary."""
        found = cls._known.get(tokenizer)
        if found is None:
            found = cls._known[tokenizer] = cls(tokenizer)
        return found

    def __call__(self, word: str) -> int | None:
        return self._ids.get(word)


def in_ids(places: Sequence[Place], pieces: Pieces | None) -> tuple[Seen, ...] | None:
    """Every place in ids; None where the id of a chosen token is not known."""
    found = []
    for place in places:
        token = _id(place.token, pieces)
        if token is None:
            return None
        known, nameless = {token: place.logprob}, []
        for word, logprob in place.top:
            other = _id(word, pieces)
            if other is None:
                nameless.append(logprob)
            else:
                known.setdefault(other, logprob)
        found.append(Seen(token, known, tuple(nameless)))
    return tuple(found)


def _id(word: Word, pieces: Pieces | None) -> int | None:
    return word if isinstance(word, int) else pieces(word) if pieces is not None else None
