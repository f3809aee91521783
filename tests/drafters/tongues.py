"""Small tokenizers of several kinds, trained here, and a drafter that knows a text by heart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftproof.drafters.vocabulary import Spelling, Words
from draftproof.models.fake import TableTarget
from draftproof.models.tokenizer import Tokenizer
from draftproof.types import Scores

TEXT = """the quick brown fox jumps over the lazy dog, and the dog jumps over the fox.
def add(a, b):
    return a + b
héllo wörld, grüße aus Köln! 你好世界 — the end of the story is the beginning of another story.
"""
OTHER = "a story is told by another dog; the fox returns.\nclass Fox(Dog):\n    def jump(self): return self.over\nschöne Grüße, 世界你好"


def wrapped(backend: Backend, front: bool = False, **special: str) -> Tokenizer:
    if front:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


@cache
def byte_level(size: int, text: str = TEXT, bos: str = "<s>", eos: str = "</s>", front: bool = False) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, special_tokens=[bos, eos], show_progress=False,
                                                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return wrapped(backend, front, bos_token=bos, eos_token=eos)


@cache
def metaspace(size: int, text: str = TEXT, front: bool = False) -> Tokenizer:
    """As SentencePiece models come out of conversion: ▁ for spaces, bytes where a character is unknown."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<bos>", "<eos>", *(f"<0x{i:02X}>" for i in range(256))]
    backend.train_from_iterator([text.replace("世", "")], trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    file = json.loads(backend.to_str())      # trained as special tokens to get their ids; bytes are ordinary ones
    file["added_tokens"] = [t for t in file["added_tokens"] if not t["content"].startswith("<0x")]
    return wrapped(Backend.from_str(json.dumps(file)), front, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")


@cache
def word_piece(text: str = TEXT) -> Tokenizer:
    """A kind whose pieces do not say which bytes they are."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.train_from_iterator([text], trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False))
    return wrapped(backend, unk_token="[UNK]", bos_token="[CLS]")


def letters(pieces: Sequence[str]) -> Tokenizer:
    """Exactly these pieces, byte-level, without merges."""
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return wrapped(backend)


def spelling(tokenizer: Tokenizer, padding: int = 0) -> Spelling:
    found = Spelling.of(Words(tokenizer, len(tokenizer.hf) + padding, 4096))
    assert found is not None
    return found


class Parrot(TableTarget):
    """Goes on with `text` wherever it has read a beginning of it, in words of its own tokens; says token 0 elsewhere."""

    def __init__(self, tokenizer: Tokenizer, text: str, **more: Any) -> None:
        super().__init__(len(tokenizer.hf), tokenizer=tokenizer, **more)
        self.knows, self.spelling = text.encode(), Spelling.of(Words.of(self))

    def extend(self, slots: Sequence[Any], tokens: Sequence[torch.Tensor]) -> Scores:
        for slot, ids in zip(slots, tokens, strict=True):
            slot.tokens += ids.tolist()
        logits = torch.full((len(slots), self.vocab_size), -9.0)
        for row, slot in enumerate(slots):
            logits[row, self._next(slot.tokens)] = 9.0
        return Scores(logits, tuple(range(len(slots) + 1)))

    def _next(self, ids: list[int]) -> int:
        if self.spelling is None:
            assert self.tokenizer is not None
            said = self.tokenizer.decode(ids).encode()
        else:
            said = self.spelling.written(ids)
            said = said[1:] if self.spelling.kind == "metaspace" and said.startswith(b" ") else said
        if not self.knows.startswith(said) or len(said) == len(self.knows):
            return 0
        rest = self.knows[len(said):]
        word = rest[:1] + rest[1:].split(b" ")[0].split(b"\n")[0]
        if self.spelling is None:
            assert self.tokenizer is not None
            pieces = self.tokenizer.encode_plain(word.decode())
            return pieces[0] if pieces else 0
        found = self.spelling.spell(word)
        return found[0] if found else 0
