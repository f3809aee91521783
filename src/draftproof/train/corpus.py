"""From a log to texts worth learning from: the target's own answers, with its own template and the log's sampling.

A drafter must guess what *this* target says, so answers are written again by the target by default (about 10 % of
acceptance length; SpecForge PR 223). Texts go to a file as they are made (`answers`), so that a killed run goes on where it was.
An exchange that the target cannot take is left out, and counted with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..audition.logs import Exchange, Skipped
from ..audition.stories import check_tokens, conversation
from ..audition.turns import NotReadable
from ..engine.engine import Engine
from ..errors import Failure, OptionError, UsageError
from ..models.target import Target
from ..types import Sampling
from . import answers
from .place import identity
from .team import ALONE, Team

ROUND = 64          # prompts answered together: what a kill can lose, and what a pass can share
NO_LAW = {"max_tokens", "seed", "n", "logprobs", "prompt_logprobs", "prediction"}
ASKED = {f.name for f in fields(Sampling)} - NO_LAW                     # of a log's options


@dataclass(frozen=True, slots=True)
class Text:
    """ids of prompt and answer; the answer, which alone counts, begins at `answer_from`. line: of the log that it is from, which may
    have several: pieces of a document, turns of a conversation."""

    ids: tuple[int, ...]
    answer_from: int
    prompt_class: str | None = None
    line: int | None = field(default=None, compare=False)

    @property
    def prompt(self) -> tuple[int, ...]:
        """What the answer is to; of a text without one, all of it."""
        return self.ids[:self.answer_from or None]


def prompt_of(exchange: Exchange, target: Target) -> list[int] | None:
    """Ids of the prompt as the target would be asked; None if the log has text and there is no tokenizer for it.

    Raises NotReadable where the target's template refuses the conversation, or an id is no token of the target's, or another one there
    than it was where it was traced.
    """
    if exchange.prompt_ids is not None:
        check_tokens(exchange, target.tokenizer)
        return _known(exchange.prompt_ids, target)
    if target.tokenizer is None:
        return None
    if exchange.messages is None:
        return target.tokenizer.encode(exchange.prompt or "")
    return conversation(target.tokenizer, exchange.messages, exchange.sampling)


def answer_of(exchange: Exchange, target: Target) -> list[int]:
    """Ids of the logged answer, with the token that ended it if the log has text; [] if it has no answer. Raises NotReadable."""
    if exchange.answer_ids is not None:
        return _known(exchange.answer_ids, target)
    if not exchange.answer or target.tokenizer is None:
        return []
    ended = exchange.finish_reason in ("stop", None) and not exchange.sampling.get("stop")       # a stop text ends without the token
    return target.tokenizer.encode_plain(exchange.answer) + ([] if not ended else end_of(target, exchange.messages is not None))


def end_of(target: Target, chat: bool) -> list[int]:
    """The token with which the target ends an answer: of a chat the one that its template writes there; [] if it has none."""
    tokenizer = target.tokenizer
    if tokenizer is None or not target.eos_ids:
        return []
    if chat and tokenizer.has_chat_template:
        try:
            shown = tokenizer.chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], answered=True)
        except Exception:                       # a template is a program of its own
            shown = []
        if ends := [token for token in shown if token in target.eos_ids]:
            return ends[-1:]
    own = tokenizer.hf.eos_token_id
    return [own if own in target.eos_ids else target.eos_ids[0]]


def _known(ids: Sequence[int], target: Target) -> list[int]:
    wrong = next((token for token in ids if token >= target.vocab_size), None)
    if wrong is not None:
        raise NotReadable(f"token id {wrong}; the target has {target.vocab_size} tokens")
    return list(ids)


def as_logged(exchanges: Iterable[Exchange], target: Target, length: int, skipped: Skipped | None = None) -> Iterator[Text]:
    """Texts as the log has them, at most `length` tokens. A prompt without an answer is itself the text, but a conversation is not, its
    turns are the user's, nor what was asked of somebody who said nothing (a request that was cancelled)."""
    skipped = Skipped() if skipped is None else skipped
    for exchange in exchanges:
        try:
            prompt, answer = prompt_of(exchange, target), answer_of(exchange, target)
            if prompt is None:
                raise NotReadable("text, and the target has no tokenizer")
            asked = exchange.messages is not None or exchange.answer_ids is not None or exchange.answer is not None
            if asked and not answer:
                raise NotReadable(f"a {'request' if exchange.messages is None else 'conversation'} without an answer, and --as-logged has "
                                  "none written")
        except NotReadable as error:
            skipped.note(exchange.line, str(error))
            continue
        if answer:
            prompt = _end(prompt, length, skipped)
        for text in _pieces(prompt, answer, length):
            yield Text(text[0], text[1], exchange.prompt_class, exchange.line)


def _end(prompt: list[int], length: int, skipped: Skipped) -> list[int]:
    """What half of a text holds of a prompt."""
    most = length // 2
    skipped.told[f"prompts cut to their last {most} tokens, half of --length {length}; give a longer one"] += len(prompt) > most
    return prompt[-most:]


def _pieces(prompt: Sequence[int], answer: Sequence[int], length: int) -> Iterator[tuple[tuple[int, ...], int]]:
    if answer:
        yield (*prompt, *answer[:length - len(prompt)]), len(prompt)
        return
    for start in range(0, len(prompt), length):
        piece = tuple(prompt[start:start + length])
        if len(piece) > 8:
            yield piece, 0


def regenerated(exchanges: Iterable[Exchange], engine: Engine, length: int, seed: int, file: Path,
                progress: Callable[[int], None] | None = None, team: Team = ALONE, skipped: Skipped | None = None,
                say: Callable[[str], None] = lambda line: None) -> list[Text]:
    """Texts whose answers the target wrote, with the log's sampling where it names one (`ASKED`). Goes on from `file`, and adds to it.

    A document gives its first third as the prompt. Of a team each process answers its share, in a file of its own beside `file`, and
    gets the texts of all. The seed is not asked of answers that are there: they are the target's whatever the draw. Raises Failure if no
    text could be made, or the file's answers are not this target's to this log.
    """
    files = [file] if team.size == 1 else [file.with_name(f"{file.name}.{rank + 1}of{team.size}") for rank in range(team.size)]
    whose = {"target": identity(engine.target.facts.name), "dtype": engine.target.facts.dtype, "length": length}
    with answers.opened(files[team.rank], whose, say) as kept:
        made = _Asked(engine, length, seed, kept, Skipped() if skipped is None else skipped, progress, team).all(exchanges)
    team.wait()
    for rank, other in enumerate(files):
        made |= {} if rank == team.rank else {index: _text(record) for index, record in answers.read(other).items()}
    if not made:
        raise Failure("the log has no prompt that the target can read; expected messages, prompts or token ids")
    return [made[index] for index in sorted(made)]


@dataclass(slots=True)
class _Asked:
    """This process's share of the prompts, and their answers."""

    engine: Engine
    length: int
    seed: int
    kept: answers.Answers
    skipped: Skipped
    progress: Callable[[int], None] | None
    team: Team

    def all(self, exchanges: Iterable[Exchange]) -> dict[int, Text]:
        """By index in the log, those that the file has and those that are new, which are added to it."""
        made: dict[int, Text] = {}
        waiting: list[tuple[int, Exchange, list[int], Sampling]] = []
        for index, exchange in enumerate(exchanges):
            if index % self.team.size != self.team.rank:
                continue
            try:
                prompt, wish = self._wish(index, exchange)
            except NotReadable as error:
                self.skipped.note(exchange.line, str(error))
                continue
            if index in self.kept.made:
                made[index] = self._checked(index, exchange, prompt)
                continue
            waiting.append((index, exchange, prompt, wish))
            if len(waiting) == ROUND:
                self._answer(waiting, made)
                waiting.clear()
        if waiting:
            self._answer(waiting, made)
        return made

    def _wish(self, index: int, exchange: Exchange) -> tuple[list[int], Sampling]:
        prompt = prompt_of(exchange, self.engine.target)
        if not prompt:
            raise NotReadable("an empty prompt" if prompt is not None else "text, and the target has no tokenizer")
        if exchange.document:
            prompt = prompt[:max(4, min(len(prompt), self.length) // 3)]
        prompt = _end(prompt, self.length, self.skipped)
        return prompt, sampling_of(exchange, self.length - len(prompt), f"{self.seed} {index}")

    def _checked(self, index: int, exchange: Exchange, prompt: Sequence[int]) -> Text:
        text = _text(self.kept.made[index])
        if text.prompt != tuple(prompt):
            raise Failure(f"{self.kept.file}: its answer {index} is to another prompt than line {exchange.line} of the log; expected "
                          "answers to this log, cut to this --length. Name another file with --answers, or delete this one")
        return replace(text, line=exchange.line)

    def _answer(self, waiting: Sequence[tuple[int, Exchange, list[int], Sampling]], made: dict[int, Text]) -> None:
        for (index, exchange, prompt, _), answer in zip(waiting, self._generated(waiting), strict=True):
            if answer is None:
                continue
            made[index] = Text((*prompt, *answer), len(prompt), exchange.prompt_class, exchange.line)
            self.kept.add({"index": index, **asdict(made[index])})
        self.kept.flush()
        if self.progress:
            self.progress(len(made))

    def _generated(self, waiting: Sequence[tuple[int, Exchange, list[int], Sampling]]) -> list[tuple[int, ...] | None]:
        """Answers to prompts that go together; None where the engine refuses what the log asks for."""
        try:
            done = self.engine.generate_batch([prompt for *_, prompt, _ in waiting], [wish for *_, wish in waiting])
            return [answer.token_ids for answer in done]
        except UsageError as error:
            if len(waiting) > 1:
                return [answer for one in waiting for answer in self._generated([one])]
            self.skipped.note(waiting[0][1].line, str(error)[:200])
            return [None]


def _text(record: Mapping[str, Any]) -> Text:
    return Text(tuple(record["ids"]), record["answer_from"], record["prompt_class"], record.get("line"))


def sampling_of(exchange: Exchange, room: int, key: str) -> Sampling:
    """What the log asks of the answer, in `room` tokens: every option that `Sampling` has, by its name. Raises NotReadable.

    OpenAI's and vLLM's spellings are read: a bias by the id as text, top_k −1 for off. A schema (response_format) is not asked for.
    """
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in exchange.sampling.items()
                             if name in ASKED and value is not None}
    most = max(1, min(room, exchange.max_tokens or room))
    try:
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        if "min_tokens" in given:
            given["min_tokens"] = min(given["min_tokens"], most)
        return Sampling(max_tokens=most, seed=random.Random(key).getrandbits(48), **given)
    except (OptionError, TypeError, ValueError, AttributeError) as error:
        raise NotReadable(f"options of a request that are none ({str(error)[:80]})") from None


def split(texts: Sequence[Text], share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """(texts to learn from, texts held out), by a seeded shuffle of the log's lines and conversations; at least one on each side. No prompt
    is on both: of one that comes again its first text is held out, and nothing is learnt from the others. At most one line or conversation
    is on both, with its end held out: where it has more texts than were still wanted."""
    first: dict[tuple[int, ...], int] = {}
    for i, text in enumerate(texts):
        first.setdefault(text.prompt, i)
    if len(first) < 2:
        raise Failure(f"texts in the data: {len(texts)}, of different prompts: {len(first)}; expected at least 2 prompts, one of them to "
                      "be held out")
    order = _together({prompt: texts[i].line for prompt, i in first.items()})
    random.Random(seed).shuffle(order)
    most, chosen = max(1, min(len(first) - 1, round(len(first) * share))), list[int]()
    for prompts_of_one in order:
        chosen += [first[prompt] for prompt in prompts_of_one[-(most - len(chosen)):]] if len(chosen) < most else []
    held = [texts[i] for i in sorted(chosen)]
    prompts = {text.prompt for text in held}
    return [text for text in texts if text.prompt not in prompts], held


def _together(lines: Mapping[tuple[int, ...], int | None]) -> list[list[tuple[int, ...]]]:
    """Prompts (with their lines) that are of one line, or of one conversation: there a prompt begins with an earlier one."""
    above: dict[object, object] = {}

    def top(of: object) -> object:
        while (found := above.setdefault(of, of)) != of:
            of = found
        return of

    begun: tuple[int, ...] | None = None
    for prompt in sorted(lines):                    # all that begin as one does stand right behind it
        begun = begun if begun is not None and prompt[:len(begun)] == begun else prompt
        for one in (prompt, lines[prompt]):
            if one is not None:
                above[top(one)] = top(begun)
    found: dict[object, list[tuple[int, ...]]] = {}
    for prompt in lines:
        found.setdefault(top(prompt), []).append(prompt)
    return list(found.values())


def apart(general: Sequence[Text], held: Iterable[Text]) -> list[Text]:
    """Of another log, the texts of lines none of which begins as the held-out ones do: a document is asked to go on, a conversation
    goes on."""
    prompts = {text.prompt for text in held}
    lengths = sorted({len(prompt) for prompt in prompts})
    known = [any(text.ids[:n] in prompts for n in lengths) for text in general]
    lines = {text.line for text, found in zip(general, known, strict=True) if found and text.line is not None}
    return [text for text, found in zip(general, known, strict=True) if not found and text.line not in lines]


def mixed(own: Sequence[Text], general: Sequence[Text], share: float, seed: int) -> list[Text]:
    """`own` with so much of `general` beside it that the latter is `share` of the whole (fine-tuning on little traffic forgets)."""
    wanted = round(len(own) * share / (1 - share))
    picked = random.Random(seed).choices(list(general), k=wanted) if general and wanted else []
    return [*own, *picked]
