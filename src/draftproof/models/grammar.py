"""Structured output: which tokens a grammar allows next, and which it forces (llguidance, the extra `structured`).

A grammar is a mapping with one key: {"json_schema": schema}, {"json_object": true}, {"regex": text} or {"lark": text}. The
matcher follows the output token by token; masks along drafted paths are read by trying the path and taking it back.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import OptionError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .target import Target

KEPT = 64       # compiled grammars, per target
KINDS = ("json_schema", "json_object", "regex", "lark")
MOST_SPACE = 40  # characters of white space at a place in JSON: as many as ten levels are indented by


class GrammarTokens:
    """A tokenizer as llguidance needs it, made once per target. end_ids: the tokens that end a text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        try:
            from llguidance.hf import from_tokenizer
            from llguidance.numpy import fill_next_token_bitmask  # its twin for torch takes seconds to import
        except ImportError:
            raise OptionError("structured output needs llguidance: pip install 'draftproof[structured]'") from None
        if not end_ids:
            raise OptionError("structured output needs a token that ends the text, and this model has none")
        self.vocab_size, self.end_ids = vocab_size, tuple(end_ids)
        self.fill = fill_next_token_bitmask
        self.table = from_tokenizer(tokenizer.hf, vocab_size, list(end_ids))
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def matcher(self, grammar: Mapping[str, Any]) -> Any:
        """A matcher at the beginning of the grammar; the last ones compiled are kept. May be called from any thread. Raises
        OptionError if the grammar does not compile."""
        from llguidance import LLMatcher

        name = json.dumps(grammar, default=str)          # the order of properties counts
        with self._lock:
            found = self._compiled.get(name)
        if found is None:
            found = LLMatcher(self.table, _compiled(grammar), log_level=0)
            _check(found)
        with self._lock:
            self._compiled[name] = found
            self._compiled.move_to_end(name)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return found.deep_copy()


_tables: WeakKeyDictionary[Any, GrammarTokens] = WeakKeyDictionary()


def grammar_of(target: Target, grammar: Mapping[str, Any]) -> GrammarState:
    """A fresh state in a text of `target`. Raises OptionError if there is no tokenizer, no end token, or no such grammar."""
    if target.tokenizer is None:
        raise OptionError("grammar: the target has no tokenizer; structured output needs one")
    if target not in _tables:
        _tables[target] = GrammarTokens(target.tokenizer, target.vocab_size, target.eos_ids)
    return GrammarState(grammar, _tables[target])


class GrammarState:
    """Where one text stands in its grammar. Raises OptionError if the grammar does not compile."""

    def __init__(self, grammar: Mapping[str, Any], tokens: GrammarTokens) -> None:
        self._tokens, self._followed = tokens, 0
        self._matcher = tokens.matcher(grammar)

    def follow(self, output: Sequence[int]) -> None:
        """Read what is new in `output`, the whole text after the prompt."""
        if len(output) > self._followed:
            self._matcher.consume_tokens(list(output[self._followed:]))
            self._followed = len(output)

    def masks(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """bool [len(paths), V] on the CPU: what is allowed after the text and each path. A path that the grammar forbids gets a
        row of True: the target cannot go there, so the row is never read."""
        words = torch.full((len(paths), (self._tokens.vocab_size + 31) // 32), -1, dtype=torch.int32)
        for row, path in enumerate(paths):
            taken = self._matcher.try_consume_tokens(list(path)) if path else 0
            if taken == len(path):
                self._tokens.fill(self._matcher, words.numpy(), row)
            if taken:
                self._matcher.rollback(taken)
        _check(self._matcher)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.bool().flatten(1)[:, :self._tokens.vocab_size]

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens of the bytes that the grammar forces next, whatever the model says.

        Where the bytes are certain but not how they fall into tokens, this is the tokenizer's own way of writing them.
        """
        certain = self._matcher.compute_ff_tokens()
        tokens = certain or self._tokens.table.tokenize_bytes(self._matcher.compute_ff_bytes())
        return [int(token) for token in tokens[:most]]


def spaced(schema: Any) -> Any:
    """The schema with a bound on white space, which JSON leaves free: a small model may write nothing else until max_tokens.

    A schema that says itself how much there may be (`x-guidance`, as llguidance reads it) is left as it is.
    """
    said = schema.get("x-guidance", {}) if isinstance(schema, Mapping) else None
    if not isinstance(said, Mapping) or {"whitespace_flexible", "whitespace_pattern"} & said.keys():
        return schema
    return {**schema, "x-guidance": {**said, "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_SPACE}}}"}}


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise OptionError(f"grammar: {matcher.get_error().splitlines()[0][:300]}")


def _compiled(grammar: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    if len(grammar) != 1 or next(iter(grammar)) not in KINDS:
        raise OptionError(f"grammar with the keys {', '.join(map(str, grammar)) or 'none'}: expected exactly one of {', '.join(KINDS)}")
    ((kind, value),) = grammar.items()
    try:
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(value))
        if kind == "lark":
            return str(LLMatcher.grammar_from_lark(value))
        return str(LLMatcher.grammar_from_json_schema(spaced({"type": "object"} if kind == "json_object" else value)))
    except (ValueError, TypeError) as error:
        raise OptionError(f"grammar {kind}: {error}") from None
