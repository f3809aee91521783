"""From what a caller asks to sequences that can run: every refusal happens here, before anything is queued."""

from __future__ import annotations

import secrets
from collections import abc
from dataclasses import dataclass, replace
from operator import index
from time import perf_counter
from typing import Any, Protocol

from ..core.verify import allowed
from ..drafters.base import Drafter
from ..errors import OptionError, PromptError
from ..models.grammar import grammar_of
from ..models.target import Target
from ..models.tokenizer import Tokenizer
from ..trace.report import Clock
from ..types import RULES, Rule, Sampling
from .sequence import Sequence
from .text import Text

LARGEST = (2 - 2**-23) * 2.0**127       # number of float32, which logits are: a larger bias would be +inf


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of speculation; None is the engine's own."""

    speculate: bool = True
    depth: int | str | None = None
    rule: Rule | None = None
    lane: int = 0                                # of the engine's drafters, the one that was named

    @classmethod
    def of(cls, options: abc.Mapping[str, Any] | None, drafter: tuple[str, str], tree: int | None,
           others: abc.Sequence[tuple[str, str]] = ()) -> Wish:
        """From `{"drafter", "depth", "rule"}`, each optional; drafter: the engine's own, its name and its spec; others: those it runs
        beside it.

        Raises OptionError naming what cannot be honoured.
        """
        options = options or {}
        unknown = set(options) - {"drafter", "depth", "rule"}
        if unknown:
            raise OptionError(f"unknown speculation option {sorted(unknown)[0]!r}; known: drafter, depth, rule")
        named, depth, rule = options.get("drafter"), options.get("depth"), options.get("rule")
        known = (drafter, *others)
        lane = next((i for place in (1, 0) for i, names in enumerate(known) if named == names[place]), 0)
        if named not in (None, "none", *known[lane]):
            runs = ", ".join(repr(spec) for _, spec in known)
            raise OptionError(f"speculation drafter={named!r}: this engine runs {runs}; expected that, or none")
        if depth not in (None, "auto") and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
            raise OptionError(f"speculation depth={depth!r}: expected auto or an integer ≥ 0")
        if depth and depth != "auto" and "none" in (named, known[lane][0]):
            raise OptionError(f"speculation depth={depth} with drafter none: name a drafter, or leave the depth out")
        if rule is not None and rule not in RULES:
            raise OptionError(f"speculation rule={rule!r}: expected one of {', '.join(RULES)}")
        if rule is not None:
            allowed(rule, "tree" if tree else "chain", known[lane][0])
        return cls(named != "none", depth, rule, lane)


class Reads(Protocol):
    """What makes a prompt of a text: a target, or whoever stands before one."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def encode(target: Reads, prompt: str | abc.Sequence[int]) -> tuple[int, ...]:
    """The prompt's ids, checked. Raises PromptError."""
    room = target.context - 1
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise PromptError("the prompt is text, but the target has no tokenizer; give token ids (--prompt-ids)")
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode ({error.reason}, character {error.start}); expected UTF-8 text") from error
        # Before it is read, which takes seconds; and the longest token is looked for (0.1 s) only where most texts are too long.
        if size > 8 * room and size > room * (target.tokenizer.most_bytes or size):
            raise _too_long(f"{size} bytes, more than any {room} tokens stand for", target.context)
        ids = tuple(target.tokenizer.encode(prompt))
    elif not hasattr(prompt, "__len__") or not hasattr(prompt, "__iter__"):
        raise PromptError(f"the prompt is of type {type(prompt).__name__}; expected a text, or a list of token ids")
    elif len(prompt) > room:
        raise _too_long(f"{len(prompt)} tokens", target.context)
    else:
        try:
            ids = tuple(index(token) for token in prompt)
        except TypeError as error:
            raise PromptError(f"the prompt holds what is no token id ({error}); expected a text, or integers") from None
    if not ids:
        raise PromptError("the prompt is empty; expected at least one token")
    wrong = next((token for token in ids if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise PromptError(f"the prompt holds token id {wrong}; expected ids in [0, {target.vocab_size})")
    if len(ids) > room:
        raise _too_long(f"{len(ids)} tokens", target.context)
    return ids


def _too_long(found: str, context: int) -> PromptError:
    """In the words by which clients know this error, and shorten a conversation."""
    return PromptError(f"the prompt has {found}; this model's maximum context length is {context} tokens, and the last is for the answer: "
                       f"shorten it to {context - 1}")


def resolve(target: Target, sampling: Sampling) -> Sampling:
    """Nothing left open: the model's own temperature and top-p, a seed, bad words as token ids. Raises OptionError."""
    for name in ("logit_bias", "stop_token_ids"):
        wrong = next((token for token in getattr(sampling, name) if not 0 <= token < target.vocab_size), None)
        if wrong is not None:
            raise OptionError(f"{name} names token id {wrong}; expected ids in [0, {target.vocab_size})")
    large = next((token for token, bias in sampling.logit_bias.items() if bias > LARGEST), None)
    if large is not None:
        raise OptionError(f"logit_bias holds {sampling.logit_bias[large]} for token {large}; expected numbers up to 3.4e38, or -inf to "
                          "ban it: to force a token give it a large bias, or ban the others")
    banned = list(sampling.bad_word_ids)
    wrong = next((token for ids in banned for token in ids if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise OptionError(f"bad_word_ids names token id {wrong}; expected ids in [0, {target.vocab_size})")
    for name in ("stop", "bad_words"):
        if getattr(sampling, name) and target.tokenizer is None:
            instead = "stop_token_ids" if name == "stop" else "bad_word_ids"
            raise OptionError(f"{name} is text, but the target has no tokenizer; use {instead}")
    for word in sampling.bad_words:
        assert target.tokenizer is not None, "refused above"
        for form in (word, " " + word.lstrip()):
            ids = tuple(target.tokenizer.encode_plain(form))
            if ids and ids not in banned:
                banned.append(ids)
    if sampling.grammar is not None and sampling.ignore_eos:
        raise OptionError("grammar with ignore_eos: a text that follows a grammar ends with it; leave one of them out")
    prediction = sampling.prediction
    if isinstance(prediction, str):
        if target.tokenizer is None:
            raise OptionError("prediction is text, but the target has no tokenizer; give a tuple of token ids")
        prediction = tuple(target.tokenizer.encode_plain(prediction))
    wrong = next((token for token in prediction if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise OptionError(f"prediction holds token id {wrong}; expected ids in [0, {target.vocab_size})")
    temperature = target.defaults.get("temperature", 1.0) if sampling.temperature is None else sampling.temperature
    top_p = target.defaults.get("top_p", 1.0) if sampling.top_p is None else sampling.top_p
    seed = secrets.randbits(48) if sampling.seed is None else sampling.seed
    try:
        return replace(sampling, temperature=temperature, top_p=top_p, bad_word_ids=tuple(banned), seed=seed, prediction=prediction)
    except OptionError as error:                             # of what was left to the model: the rest has been looked at
        raise OptionError(f"{error}; the model's generation_config.json has it so: correct that, or give one with the request") from error


def check_limits(sampling: Sampling, most_samples: int, most_logprobs: int) -> None:
    """Raises OptionError for a request that would take more than its share, whoever sends it."""
    for name, most in (("n", most_samples), ("logprobs", most_logprobs), ("prompt_logprobs", most_logprobs)):
        if (getattr(sampling, name) or 0) > most:
            raise OptionError(f"{name}={getattr(sampling, name)}: expected at most {most}")


def check_prediction(sampling: Sampling, wish: Wish, drafter: Drafter | None, spec: str) -> None:
    """Raises OptionError if the request predicts its output and the engine's drafter would not read it."""
    if sampling.prediction and wish.speculate and (drafter is None or not drafter.needs.prediction):
        raise OptionError(f"prediction with drafter {spec!r}, which does not read it; expected drafter prediction, or a chain with "
                          "it such as prediction+ngram: choose one, or leave the prediction out")


def sequences(target: Target, request: str, prompt: tuple[int, ...], sampling: Sampling, wish: Wish, rule: Rule, tenant: str,
              prompt_class: str | None) -> list[Sequence]:
    """One per sample of a request whose `sampling` is resolved. Raises OptionError for a grammar that does not compile."""
    assert sampling.seed is not None, "resolved options have a seed"
    eos = () if sampling.ignore_eos else target.eos_ids
    now = perf_counter()
    return [
        Sequence(
            id=request if sampling.n == 1 else f"{request}/{sample}", request=request, prompt=prompt, sampling=sampling,
            seed=sampling.seed, sample=sample, end_ids=frozenset((*eos, *sampling.stop_token_ids)),
            limit=min(len(prompt) + sampling.max_tokens, target.context), text=Text(target.tokenizer, prompt, sampling.stop),
            clock=Clock(now), rule=wish.rule or rule, depth=wish.depth, speculate=wish.speculate, lane=wish.lane, tenant=tenant,
            prompt_class=prompt_class, grammar=None if sampling.grammar is None else grammar_of(target, sampling.grammar))
        for sample in range(sampling.n)
    ]
