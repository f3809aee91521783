"""Text to ids and back: a thin, read-only wrapper around a `transformers` fast tokenizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from ..errors import LoadError
from .turns import folded

SHORTENED = {"NoneType": 1, "NFC": 3}     # by normaliser: how many times more bytes a text may have before it than after
CONTEXT = 6  # prompt ids that a stream sees first, so that a leading space or a split character comes out as it stands in the text
LONGEST = 4  # bytes of a character
MARK = "�"   # what stands for bytes that are no text
WORD, CALL_ID = "Draftproof", "abcdefghi"    # what a template is tried with: some want nine letters of an id


class TextStream:
    """Turns ids into text that is always valid UTF-8: bytes of an unfinished character wait for the next token."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        """decode: ids to text; prompt: what the ids follow, none of which is told."""
        self._decode = decode
        context, unfinished = _context(decode, prompt)
        self._settle(context)
        self._ids += unfinished
        self._marks = self.rest()  # of a character that begins in the prompt, unless the first ids end it

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        piece = "" if text.endswith(MARK) else self._new(text)
        if piece:
            self._settle(self._ids[self._settled:])
        return piece

    def rest(self) -> str:
        """What waits, when no more ids follow."""
        return self._new(self._decode(self._ids))

    def _settle(self, ids: list[int]) -> None:
        """What these say has been told; they stay for the sake of what follows, a space or not."""
        self._ids, self._settled, self._told, self._marks = ids, len(ids), self._decode(ids), ""

    def _new(self, text: str) -> str:
        """Of the text of all ids, that of those behind the settled ones."""
        start = len(self._told)
        if not text.startswith(self._told):  # it ended in bytes, and with those that follow they are no text: each is a mark
            same = len(commonprefix((self._told, text)))
            start = same + len(self._told[same:].encode())
        return text[start:].removeprefix(self._marks)


def _context(decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """The last ids of a prompt that are text, and those of an unfinished character behind them.

    A tokenizer that falls back to bytes makes marks of all that stand together if one is astray, so a context may not begin inside a
    character.
    """
    for end in range(len(prompt), max(0, len(prompt) - LONGEST), -1):
        for start in range(max(0, len(prompt) - CONTEXT), max(0, len(prompt) - CONTEXT - LONGEST) - 1, -1):
            if not decode(prompt[start:end]).endswith(MARK):
                return list(prompt[start:end]), list(prompt[end:])
    return list(prompt[-CONTEXT:]), []


class Tokenizer:
    """Wraps a fast tokenizer. `hf` is the transformers object, `backend` the Rust one."""

    def __init__(self, hf: Any) -> None:
        if not getattr(hf, "is_fast", False):
            raise LoadError(f"{type(hf).__name__} is not a fast tokenizer; expected a tokenizer.json beside the model")
        hf.model_max_length = 1 << 60                            # the engine measures prompts itself, against the model's context
        self.hf = hf
        self.backend = hf.backend_tokenizer

    @classmethod
    def load(cls, path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code))

    @property
    def vocab_size(self) -> int:
        return len(self.hf)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token piece → id, added tokens included."""
        vocabulary: dict[str, int] = self.hf.get_vocab()
        return vocabulary

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    @cached_property
    def most_bytes(self) -> int | None:
        """Bytes of text that one token stands for at most. None where that has no bound: where a text is shortened before it is cut
        (a normaliser, blanks that belong to a special token), or is not spelled byte by byte."""
        before = self.backend.pre_tokenizer
        state = {} if before is None else json.loads(before.__getstate__())
        steps = state.get("pretokenizers", [state])
        kept = all(step.get("type") in ("ByteLevel", "Split", "Digits") and step.get("behavior") != "Removed" for step in steps)
        spelled = steps[-1].get("type") == "ByteLevel" and set(ByteLevel.alphabet()) <= self.vocabulary.keys()
        blanks = any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values())
        normaliser = type(self.backend.normalizer).__name__
        if not (kept and spelled) or blanks or normaliser not in SHORTENED:
            return None
        return SHORTENED[normaliser] * max(len(piece.encode()) for piece in self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with whatever the tokenizer itself adds at the front (BOS)."""
        ids: list[int] = self.hf.encode(text)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text with nothing added."""
        ids: list[int] = self.hf.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self.hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    def piece(self, token_id: int) -> str:
        """The text of one token for display; bytes that are no character on their own show as �."""
        return self.decode([token_id], skip_special=False)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return TextStream(self._plain, prompt)

    def _plain(self, ids: Sequence[int]) -> str:
        text: str = self.backend.decode(ids)         # skips special tokens, and is what `decode` comes to
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template knows how to tell the model about tools."""
        return "tools" in str(getattr(self.hf, "chat_template", None) or "")

    @cached_property
    def knows(self) -> frozenset[str]:
        """Of `system`, `tool` and `tool_calls` what the chat template writes; the others it refuses, or leaves out in silence."""
        def called(name: str) -> list[dict[str, Any]]:
            call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}
            return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

        def answered(name: str, text: str) -> list[dict[str, Any]]:
            return [*called(name), {"role": "tool", "name": name, "tool_call_id": CALL_ID, "content": text}]

        probes = {"system": [[{"role": "system", "content": WORD}, {"role": "user", "content": "a"}]],
                  "tool": [answered("f", WORD)], "tool_calls": [called(WORD), answered(WORD, "a")]}
        return frozenset(name for name, talks in probes.items() if any(map(self._writes, talks)))

    def _writes(self, turns: list[dict[str, Any]]) -> bool:
        try:
            return WORD in str(self.hf.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception:                                        # a template is a program, with errors of its own
            return False

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
             answered: bool = False, told: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer unless it is `answered`, `folded` for what the template does not know.
        told: what else it shall know, by its own names. The template runs in transformers' sandbox; it may refuse the conversation (an
        unknown role) with an exception of its own."""
        if not self.has_chat_template:
            raise LoadError("this tokenizer has no chat template; use generate, or a model with one")
        own = inspect.signature(self.hf.apply_chat_template).parameters if told else {}
        more = {name: value for name, value in (told or {}).items() if name not in own}
        turns = folded(messages, self.knows)
        out = self.hf.apply_chat_template(turns, add_generation_prompt=not answered, tokenize=True, return_dict=False,
                                          tools=list(tools) if tools else None, **more)
        return list(out)
