"""Ids to text while they arrive: always valid UTF-8, and never a character of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.tokenizer import Tokenizer

CONTEXT = 6
"""Prompt tokens that the decoder sees first, so that a leading space or a split character comes out as it stands in the text."""


class Text:
    """The text of one sample. Without a tokenizer it stays empty.

    What may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])
        self.stops = tuple(stops)
        self._held = ""
        self._pieces: list[str] = []
        self._stream = tokenizer.stream() if tokenizer is not None else None
        for token in self._context:
            self._decode(token)

    @property
    def released(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int, armed: bool) -> tuple[str, bool]:
        """The text that `token` makes readable, and whether it completed a stop string (the text is then cut before it).

        armed: whether stop strings count yet; one that begins before they do never counts.
        """
        piece = self._decode(token)
        if not armed or not self.stops:
            return self._release(self._held + piece), False
        text = self._held + piece
        cuts = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if cuts:
            self._held = ""
            return self._release(text[: min(cuts)]), True
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep:]
        return self._release(text[: len(text) - keep]), False

    def end(self, output: Sequence[int]) -> str:
        """The rest, when no more tokens follow: what was held back and the marks of an unfinished character."""
        tail, self._held = self._held, ""
        piece = self._release(tail)
        if self._tokenizer is None:
            return piece
        before = self._tokenizer.decode(self._context)
        whole = self._tokenizer.decode([*self._context, *output])
        so_far = before + self.released
        return piece + (self._release(whole[len(so_far):]) if whole.startswith(so_far) else "")

    def _release(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _decode(self, token: int) -> str:
        if self._tokenizer is None or self._stream is None:
            return ""
        try:
            return self._stream.step(token)
        except Exception:
            # The library's incremental decoder refuses some byte sequences; a fresh one goes on from this token.
            self._stream = self._tokenizer.stream()
            return self._stream.step(token)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
