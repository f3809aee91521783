"""From a log's exchanges to texts that a drafter can be replayed on, and what is known of how they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.choice import likeliest
from ..errors import Failure, OptionError
from ..models.target import Target
from ..models.tokenizer import Tokenizer
from ..trace.events import UNCLASSED
from ..types import Draft, Likely, Sampling
from .logprobs import Pieces, Seen, in_ids
from .logs import Exchange, Skipped, read_log
from .replay import Passes, States, Story
from .turns import Message, NotReadable

GREEDY = Sampling(temperature=0.0, top_p=1.0)
CHUNK = 512
FEWER = "answers with far less text than usage.completion_tokens counts, such as reasoning that the log does not have"
COMPARED = 32       # tokens of a traced request whose texts are compared with the target's
NEUTRAL = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "top_k": -1}     # off, as engines write it
CONSTRAINED = ("response_format", "grammar", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
               "bad_words", "min_tokens", "ignore_eos", "tool_choice")


def no_tokenizer() -> Tokenizer | None:
    return None


@lru_cache(maxsize=2)
def tokenizer_at(path: str) -> Tokenizer | None:
    """The tokenizer of a model folder or hub id, without its weights; it goes to other processes as its path."""
    return Tokenizer.load(path)


@dataclass(frozen=True, slots=True)
class Reader:
    """What is known of the target: enough to make ids of text and to know where texts had to end.

    tokenizer: called when the first text without ids comes; it may raise Failure or LoadError. context: the longest text, or None.
    """

    tokenizer: Callable[[], Tokenizer | None] = no_tokenizer
    context: int | None = None
    eos_ids: tuple[int, ...] = ()
    vocab_size: int | None = None

    @classmethod
    def of(cls, target: Target) -> Reader:
        return cls(lambda: target.tokenizer, target.context, tuple(target.eos_ids), target.vocab_size)

    def stories(self, log: str | Path, skipped: Skipped) -> Iterator[Read]:
        """Every request of a log that has an answer, in its order; what is left out is counted in `skipped`."""
        for exchange in read_log(log, skipped):
            read = self.story(exchange, skipped)
            if read is not None:
                yield read

    def story(self, exchange: Exchange, skipped: Skipped) -> Read | None:
        """None, and a note in `skipped`, where it cannot be replayed: no prompt, no answer, foreign ids, options that are none."""
        seen = self._seen(exchange)
        try:
            if self.vocab_size is not None:
                check_tokens(exchange, self.tokenizer())
            prompt, answer, made = self._ids(exchange, seen)
            sampling, known = _sampling(exchange)
        except NotReadable as error:
            skipped.note(exchange.line, str(error))
            return None
        if not prompt or not answer:
            skipped.note(exchange.line, "a request without prompt or answer")
            return None
        if self.vocab_size is not None and max(max(prompt), max(answer)) >= self.vocab_size:
            skipped.note(exchange.line, f"token id {max(max(prompt), max(answer))}; the target's ids are below {self.vocab_size}")
            return None
        skipped.told[FEWER] += made and (exchange.usage or 0) > 1.25 * len(answer) + 8
        seed = exchange.sampling.get("seed")
        ends = () if sampling.ignore_eos else self.eos_ids
        story = Story(prompt, answer, sampling, seed=seed if known and isinstance(seed, int) else 0, sample=_sample(exchange),
                      limit=self._limit(exchange, len(prompt), len(answer)), prompt_class=exchange.prompt_class or UNCLASSED,
                      end_ids=frozenset((*ends, *sampling.stop_token_ids)), tenant=exchange.tenant, depths=exchange.depths)
        predicted = self._prediction(exchange)
        if predicted:
            story = replace(story, sampling=replace(sampling, prediction=predicted))
        aligned = not known and seen is not None and tuple(place.token for place in seen) == answer
        asked = _asked(exchange) if aligned else None
        return Read(story, retokenised=made, known=known, asked=asked, seen=() if asked is None or seen is None else seen)

    def _ids(self, exchange: Exchange, seen: Sequence[Seen] | None) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """(prompt, answer, whether any of them had to be made from text)."""
        told = exchange.answer_ids
        if told is None and seen is not None:                    # tokens of the answer, if they spell all of it
            told = tuple(place.token for place in seen)
            tokenizer = self.tokenizer()
            if tokenizer is not None and exchange.answer is not None and tokenizer.decode(told) != exchange.answer:
                told = None
        if exchange.prompt_ids is not None and (told is not None or exchange.answer is None):
            return exchange.prompt_ids, told or (), False
        tokenizer = self.tokenizer()
        if tokenizer is None:
            raise Failure(f"line {exchange.line} of the log is text, and there is no tokenizer for it; "
                          "expected token ids, or --target with the model that wrote it")
        if exchange.prompt_ids is not None:
            prompt = list(exchange.prompt_ids)
        elif exchange.messages is not None:
            prompt = conversation(tokenizer, exchange.messages, exchange.sampling)
        else:
            prompt = tokenizer.encode(exchange.prompt or "")
        if exchange.document and exchange.answer is None:        # nobody asked: its first third stands for a prompt
            first = max(1, len(prompt) // 3)
            return tuple(prompt[:first]), tuple(prompt[first:]), True
        return tuple(prompt), told if told is not None else tuple(tokenizer.encode_plain(exchange.answer or "")), True

    def _seen(self, exchange: Exchange) -> tuple[Seen, ...] | None:
        """The log-probabilities of an answer in ids, if the log has them and they are its tokens'."""
        if exchange.places is None:
            return None
        named = all(isinstance(place.token, int) for place in exchange.places)
        tokenizer = self.tokenizer() if not named else None
        seen = in_ids(exchange.places, None if tokenizer is None else Pieces.of(tokenizer))
        if seen is None or (exchange.answer_ids is not None and tuple(place.token for place in seen) != exchange.answer_ids):
            return None
        return seen

    def _limit(self, exchange: Exchange, prompt: int, answer: int) -> int | None:
        if exchange.finish_reason == "length" or exchange.max_tokens is None:
            return None
        limit = prompt + max(answer, exchange.max_tokens)
        return limit if self.context is None else max(prompt + answer, min(limit, self.context))

    def _prediction(self, exchange: Exchange) -> tuple[int, ...]:
        """OpenAI's `prediction` of a request, as ids."""
        asked = exchange.sampling.get("prediction")
        content = asked.get("content") if isinstance(asked, Mapping) else None
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        tokenizer = self.tokenizer() if isinstance(content, str) and content else None
        return tuple(tokenizer.encode_plain(content)) if tokenizer is not None and isinstance(content, str) else ()


@dataclass(frozen=True, slots=True)
class Read:
    """A story, whether its ids were made from text, and whether it is known how it was sampled (greedily, or with a seed of ours).

    asked, seen: where that is not known, but the log has the options and the likeliest tokens of every place of the answer.
    """

    story: Story
    retokenised: bool
    known: bool
    asked: Sampling | None = None
    seen: tuple[Seen, ...] = ()


def conversation(tokenizer: Tokenizer, messages: Sequence[Message], asked: Mapping[str, Any]) -> list[int]:
    """Ids of the turns, as the model was asked for an answer to them: with the tools of the request, and what it told the template.

    Raises NotReadable where the model's template refuses them.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n".join(message["content"] for message in messages) + "\n")
    tools, told = asked.get("tools"), asked.get("chat_template_kwargs")
    listed = tools if isinstance(tools, list) and asked.get("tool_choice") != "none" and tokenizer.takes_tools else None
    try:
        return tokenizer.chat(messages, listed, told=told if isinstance(told, dict) else None)
    except Exception as error:                  # a template is a program of its own
        raise NotReadable(f"the chat template refuses the conversation ({type(error).__name__}: {str(error)[:80]!r})") from None


def check_tokens(exchange: Exchange, tokenizer: Tokenizer | None) -> None:
    """Raises NotReadable if a trace's ids are of other tokens than these: `COMPARED` of its last ones are compared."""
    recorded, ids = exchange.recorded, (*(exchange.prompt_ids or ()), *(exchange.answer_ids or ()))
    if recorded is None or tokenizer is None:
        return
    for token in dict.fromkeys(ids[-COMPARED:]):
        there, here = recorded.tokens[token] if token < len(recorded.tokens) else None, tokenizer.piece(token)
        if there != here:
            raise NotReadable(f"traced with target {recorded.target[:80]}, whose token {token} is {there!r}; the one here has {here!r}: "
                              "expected the target that it was recorded with")


def _sample(exchange: Exchange) -> int:
    sample = exchange.sampling.get("sample", 0)
    return sample if isinstance(sample, int) else 0


def _sampling(exchange: Exchange) -> tuple[Sampling, bool]:
    """(options to replay drafts with, whether they are those of the text). What is not known is replayed greedily.

    Raises NotReadable for a trace's options that are none.
    """
    asked = exchange.sampling
    if "sample" not in asked or not isinstance(asked.get("seed"), int):        # only our own traces say so
        return GREEDY, asked.get("temperature") == 0
    names = {f.name for f in fields(Sampling)} - {"prediction", "seed", "n", "grammar"}
    known = {name: tuple(map(_tupled, value)) if isinstance(value, list) else value for name, value in asked.items() if name in names}
    try:
        known["logit_bias"] = {int(token): bias for token, bias in asked.get("logit_bias", {}).items()}
        return Sampling.of(**known), asked.get("grammar") is None
    except (OptionError, TypeError, ValueError, AttributeError) as error:
        raise NotReadable(f"options of a request that are none ({str(error)[:80]!r})") from None


def _asked(exchange: Exchange) -> Sampling | None:
    """The options by which a sampled answer was drawn; None where the log does not say, or where they are more than filters."""
    found = {name: value for name, value in exchange.sampling.items() if value is not None and value != NEUTRAL.get(name)}
    constrained = any(found.get(name) not in (None, False, (), [], {}, "auto", "none", {"type": "text"}) for name in CONSTRAINED)
    if constrained or found.get("logit_bias") or {"repetition_penalty", "presence_penalty", "frequency_penalty"} & found.keys():
        return None
    temperature = found.get("temperature")
    if not isinstance(temperature, int | float) or temperature <= 0:
        return None
    try:
        return Sampling(temperature=temperature, top_k=found.get("top_k", 0), top_p=found.get("top_p", 1.0), min_p=found.get("min_p", 0.0))
    except (OptionError, TypeError):
        return None


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(slots=True)
class TargetStates:
    """Hidden states of whole texts by prefill. Each text has a tenant of its own, so that no prefix comes without its states."""

    target: Target
    taps: tuple[int, ...]
    count: int = field(default=0)

    def __call__(self, ids: Sequence[int]) -> Mapping[int, Tensor]:
        self.count += 1
        target, tokens = self.target, torch.tensor(ids, device=self.target.device)
        target.set_taps(self.taps)
        slot = target.open(ids, f"audition {self.count}")
        rows: dict[int, list[Tensor]] = {layer: [] for layer in self.taps}
        try:
            for start in range(0, len(ids), CHUNK):
                part = tokens[start:start + CHUNK]
                taps = target.extend([slot], [part]).taps
                for layer in self.taps:
                    rows[layer].append(taps[layer][:part.shape[0]].clone())
        finally:
            target.close(slot)
        return {layer: torch.cat(parts) for layer, parts in rows.items()}


def states_of(target: Target | None, taps: tuple[int, ...]) -> States | None:
    """The states that a drafter wants, None if it wants none."""
    return TargetStates(target, taps) if target is not None and taps else None


@dataclass(slots=True)
class TargetPasses:
    """The pass that a round of the engine's runs, for what is likely behind a draft: a log does not say it of guesses that were refused."""

    target: Target
    count: int

    def __call__(self, text: Sequence[int], draft: Draft) -> Likely:
        target, tokens = self.target, torch.tensor(text, device=self.target.device)
        target.set_taps(())
        slot = target.open(text, "audition")                # most of the text was read for the round before
        try:
            while slot.length < len(text) - 1:
                target.extend([slot], [tokens[slot.length:-1][:CHUNK]])
            scores = target.score([slot], tokens[-1:], [draft])
            return Likely(draft.tokens.tolist(), draft.parents, *likeliest(scores.logits[:1 + len(draft)], self.count))
        finally:
            target.close(slot)


def passes_of(target: Target | None, likely: int) -> Passes | None:
    """What tells a drafter what was likely, None if it does not ask."""
    return TargetPasses(target, likely) if target is not None and likely else None
