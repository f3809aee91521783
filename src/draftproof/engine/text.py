"""Ids to text while they arrive: always valid UTF-8, and never a character of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.tokenizer import Tokenizer


class Text:
    """The text of one sample. Without a tokenizer it stays empty.

    What may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""
        self._pieces: list[str] = []
        self._stream = None if tokenizer is None else tokenizer.stream(prompt)

    @property
    def released(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int, armed: bool) -> tuple[str, bool]:
        """The text that `token` makes readable, and whether it completed a stop string (the text is then cut before it).

        armed: whether stop strings count yet; one that begins before they do never counts.
        """
        piece = self._stream.step(token) if self._stream else ""
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

    def end(self) -> str:
        """The rest, when no more tokens follow: what was held back and the marks of an unfinished character."""
        tail, self._held = self._held, ""
        return self._release(tail + (self._stream.rest() if self._stream else ""))

    def _release(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
