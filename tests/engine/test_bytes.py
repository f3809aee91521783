"""Text of a tokenizer that falls back to bytes (Llama 2, Mistral, Gemma): a run of them that is no text as a whole is one mark a byte."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from draftproof.engine.text import Text
from draftproof.models.tokenizer import Tokenizer

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "ing", "s", "▁über", "日", "▁日本", "x"]
CHARACTERS = ("é", "語", "😀", "ß")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))


def ids(*pieces: str | bytes) -> list[int]:
    """Of words, and of texts or bytes that are none."""
    return [token for piece in pieces for token in (
        [WORDS.index(piece)] if piece in WORDS else [3 + byte for byte in (piece.encode() if isinstance(piece, str) else piece)])]


def said(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    text = Text(tokenizer, prompt, ())
    pieces = [text.push(token, True)[0] for token in output]
    pieces.append(text.end())
    assert "".join(pieces) == text.released
    return text.released


@pytest.mark.parametrize(("prompt", "output", "want"), [
    (["▁", "a😀😀"], ["ing", "ing", "▁cat"], "inging cat"),
    (["▁the", "語😀"], ["▁cat"], " cat"),
    (["😀😀😀"], ["😀", "s"], "😀s"),
    (["😀😀", "😀".encode()[:2]], ["😀".encode()[2:], "s"], "😀s"),             # a character that begins in the prompt ends in the text
    (["▁cat", "😀".encode()[:2]], ["▁cat"], " cat"),                            # or does not: its marks are the prompt's
    (["▁cat", "\ufffd"], ["s"], "s"),
    (["▁cat", "\ufffd"], [], ""),
    (["▁cat", b"\xa2"], ["▁cat"], " cat"),
    (["▁cat"], ["x", "語*", b"\xe4\xc6", "語"], "x語*" + 5 * "�"),              # the run is no text: nothing of its end is lost
    (["▁cat"], ["語", b"\xfe", "▁cat", "s"], "語� cats"),
    (["▁cat"], ["s", "😀".encode()[:3]], "s���"),
])
def test_text_begins_where_the_prompt_ends(prompt: list[str | bytes], output: list[str | bytes], want: str, tokenizer: Tokenizer) -> None:
    assert said(tokenizer, ids(*prompt), ids(*output)) == want


def test_pieces_join_to_what_decode_says_of_the_whole(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)

    def sample(size: int) -> list[int]:
        words = [[i] for i in range(259, len(WORDS) + 1)] + [ids(character) for character in CHARACTERS] * 3 + [[2], ids("$")]
        return [token for _ in range(size) for token in draw.choice(words)]

    for _ in range(600):
        prompt, output = sample(6), sample(draw.randrange(1, 8))
        before = tokenizer.decode(prompt)
        assert said(tokenizer, prompt, output) == tokenizer.decode([*prompt, *output])[len(before):], (prompt, output)


def test_bytes_that_are_no_text_lose_none_of_what_follows(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(600):
        words = [draw.choice([*WORDS[260:], *CHARACTERS, bytes([draw.randrange(128, 256)])]) for _ in range(draw.randrange(1, 9))]
        text = said(tokenizer, ids("▁the", "▁cat"), ids(*words, "▁cat"))
        whole = "".join(word.replace("▁", " ") for word in (*words, "▁cat") if word in WORDS)
        assert "".join(letter for letter in text if letter in whole) == whole, (words, text)
