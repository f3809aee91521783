"""Two tokenizers are the same if their tokens are: content, not size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftproof.drafters.vocabulary import Check, Words, compare, require_same
from draftproof.errors import VocabularyMismatch
from draftproof.models.fake import TableTarget
from draftproof.models.tokenizer import Tokenizer

PIECES = ["<s>", "</s>", "a", "b", "c", "d", "ab", "cd", "abcd"]
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd")]


def words(pieces: list[str] | None = None, merges: list[tuple[str, str]] | None = None, bos: bool = False, added: tuple[str, ...] = (),
          padding: int = 0, template: str | None = None, context: int | None = None, **special: str) -> Words:
    pieces = pieces or PIECES
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=MERGES if merges is None else merges))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, **{"bos_token": "<s>", "eos_token": "</s>", **special})
    if added:
        hf.add_tokens(list(added))
    if template:
        hf.chat_template = template
    return Words(Tokenizer(hf), len(hf) + padding, context)


def by_name(checks: list[Check]) -> Mapping[str, Check]:
    return {check.name: check for check in checks}


def test_the_same_tokenizer_passes_every_check() -> None:
    checks = require_same(words(context=64), words(context=64))
    assert all(check.ok for check in checks)
    assert [check.name for check in checks] == [
        "vocabulary", "added tokens", "merges", "special tokens", "BOS handling", "chat template", "longest context"]


def test_a_padded_output_is_no_difference() -> None:
    assert all(check.ok for check in require_same(words(), words(padding=55)))


def test_exchanged_tokens_of_an_equal_size_are_named_with_both_ids() -> None:
    swapped = ["<s>", "</s>", "a", "b", "d", "c", "ab", "cd", "abcd"]
    with pytest.raises(VocabularyMismatch) as caught:
        require_same(words(), words(swapped))
    message = str(caught.value)
    assert "2 tokens differ" in message
    assert "'c' is 4 in the target and 5 in the drafter" in message and "'d' is 5 in the target and 4 in the drafter" in message


def test_another_vocabulary_names_only_the_first_few() -> None:
    other = ["<s>", "</s>", *(f"w{i}" for i in range(7))]
    with pytest.raises(VocabularyMismatch) as caught:
        require_same(words(), words(other, merges=[]))
    assert "'a' is 2 in the target and missing in the drafter" in str(caught.value)
    assert str(caught.value).count("missing") == 5


def test_other_merges_are_named() -> None:
    with pytest.raises(VocabularyMismatch, match="merges: 3 and 3; merge 0 is 'a b' in the target and 'c d' in the drafter"):
        require_same(words(), words(merges=[("c", "d"), ("a", "b"), ("ab", "cd")]))


def test_an_added_token_behind_the_vocabulary_costs_nothing_but_is_told() -> None:
    checks = by_name(require_same(words(), words(added=("<pad>",))))
    assert checks["vocabulary"].ok and not checks["added tokens"].ok and not checks["added tokens"].fatal
    assert "only the drafter has '<pad>' (9)" in checks["added tokens"].detail


def test_an_added_token_in_the_place_of_another_is_a_mismatch() -> None:
    with pytest.raises(VocabularyMismatch, match="'<x>' is 9 in the target and missing in the drafter"):
        require_same(words(added=("<x>",)), words(added=("<y>",)))


def test_roles_front_template_and_context_are_told_but_do_not_refuse() -> None:
    checks = by_name(require_same(words(bos=True, template="{{ messages }}", context=64), words(eos_token="<s>", template="x", context=32)))
    assert "eos_token is '</s>' in the target and '<s>' in the drafter" in checks["special tokens"].detail
    assert checks["BOS handling"].detail.startswith("the target puts [0] before a text, the drafter nothing")
    assert not checks["chat template"].ok and "the target's is used" in checks["chat template"].detail
    assert not checks["longest context"].ok and "64 tokens in the target, 32 in the drafter" in checks["longest context"].detail
    assert by_name(compare(words(bos=True), words(bos=True)))["BOS handling"].detail == "both put [0] before a text"


@pytest.mark.parametrize("sides", [(None, None), ("tokenizer", None), (None, "tokenizer")])
def test_without_a_tokenizer_sizes_are_compared_and_that_is_said(sides: tuple[Any, Any]) -> None:
    target, drafter = (words() if side else Words.of(TableTarget(9)) for side in sides)
    check = require_same(target, drafter)[0]
    lacks = "neither side" if sides == (None, None) else "the drafter" if sides[0] else "the target"
    assert check.ok and lacks in check.detail and "only the sizes were compared: both 9" in check.detail
    with pytest.raises(VocabularyMismatch, match="9 in the target and 11 in the drafter"):
        require_same(Words(target.tokenizer, 9), Words(drafter.tokenizer, 11))


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(VocabularyMismatch, match="use one, or drafter ngram"):
        require_same(Words(None, 4), Words(None, 5))
