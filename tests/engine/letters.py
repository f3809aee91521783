"""A tokenizer for tests: token i is the bytes PIECES[i], two of which are halves of one character."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.models.tokenizer import TextStream

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

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return TextStream(self.decode, prompt)
