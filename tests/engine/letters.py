"""A tokenizer for tests: token i is the bytes PIECES[i], two of which are halves of one character."""

from __future__ import annotations

from collections.abc import Sequence

PIECES = [b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"c", b"ba", b"d", b"e", b""]


class Letters:
    """As much of `models.tokenizer.Tokenizer` as the engine uses."""

    vocab_size, most_bytes = len(PIECES), None

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(bytes([byte])) for byte in text.encode()]

    encode_plain = encode

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return b"".join(PIECES[i] for i in ids).decode(errors="replace")

    def piece(self, token_id: int) -> str:
        return self.decode([token_id])

    def stream(self) -> LetterStream:
        return LetterStream()


class LetterStream:
    """Releases text up to the last whole character; a byte that can be none shows as �."""

    def __init__(self) -> None:
        self.held = b""

    def step(self, token_id: int) -> str:
        self.held += PIECES[token_id]
        keep = 1 if self.held.endswith(b"\xc3") else 0
        whole, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return whole.decode(errors="replace")
