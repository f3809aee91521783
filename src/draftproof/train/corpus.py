"""From a log to texts worth learning from: the target's own answers, with its own template and sampling.

A drafter must guess what *this* target says, so answers are written again by the target by default (about 10 % of
acceptance length; SpecForge PR 223). Texts go to a file as they are made, so that a killed run goes on where it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..audition.logs import Exchange
from ..engine.engine import Engine
from ..errors import Failure
from ..models.target import Target
from ..types import Sampling
from .team import ALONE, Team

ROUND = 64          # prompts answered together: what a kill can lose, and what a pass can share


@dataclass(frozen=True, slots=True)
class Text:
    """ids of prompt and answer; the answer, which alone counts, begins at `answer_from`."""

    ids: tuple[int, ...]
    answer_from: int
    prompt_class: str | None = None


def prompt_of(exchange: Exchange, target: Target) -> list[int] | None:
    """Ids of the prompt as the target would be asked; None if the log has text and there is no tokenizer for it."""
    if exchange.prompt_ids is not None:
        return list(exchange.prompt_ids)
    if target.tokenizer is None:
        return None
    if exchange.messages is not None:
        if target.tokenizer.has_chat_template:
            return target.tokenizer.chat(exchange.messages)
        return target.tokenizer.encode("\n".join(message["content"] for message in exchange.messages) + "\n")
    return target.tokenizer.encode(exchange.prompt or "")


def answer_of(exchange: Exchange, target: Target) -> list[int]:
    """Ids of the logged answer; [] if the log has none."""
    if exchange.answer_ids is not None:
        return list(exchange.answer_ids)
    return target.tokenizer.encode_plain(exchange.answer) if exchange.answer and target.tokenizer else []


def as_logged(exchanges: Iterable[Exchange], target: Target, length: int) -> Iterator[Text]:
    """Texts as the log has them, at most `length` tokens; without an answer, the prompt itself is the text."""
    for exchange in exchanges:
        prompt, answer = prompt_of(exchange, target), answer_of(exchange, target)
        if not prompt:
            continue
        for text in _pieces(prompt, answer, length):
            yield Text(text[0], text[1], exchange.prompt_class)


def _pieces(prompt: Sequence[int], answer: Sequence[int], length: int) -> Iterator[tuple[tuple[int, ...], int]]:
    if answer:
        kept = list(prompt[-(length // 2):])
        yield (*kept, *answer[:length - len(kept)]), len(kept)
        return
    for start in range(0, len(prompt), length):
        piece = tuple(prompt[start:start + length])
        if len(piece) > 8:
            yield piece, 0


def regenerated(exchanges: Iterable[Exchange], engine: Engine, length: int, seed: int, file: Path,
                progress: Callable[[int], None] | None = None, team: Team = ALONE) -> list[Text]:
    """Texts whose answers the target wrote, with the log's sampling where it names one. Goes on from `file`, and adds to it.

    A document gives its first third as the prompt. Of a team each process answers its share, in a file of its own beside `file`, and
    gets the texts of all. Raises Failure if no text could be made.
    """
    files = [file] if team.size == 1 else [file.with_name(f"{file.name}.{rank + 1}of{team.size}") for rank in range(team.size)]
    made = _answer(exchanges, engine, length, seed, files[team.rank], progress, team)
    team.wait()
    made += [pair for rank, other in enumerate(files) if rank != team.rank for pair in _resume(other)]
    if not made:
        raise Failure("the log has no prompt that the target can read; expected messages, prompts or token ids")
    return [text for _, text in sorted(made, key=lambda pair: pair[0])]


def _answer(exchanges: Iterable[Exchange], engine: Engine, length: int, seed: int, file: Path,
            progress: Callable[[int], None] | None, team: Team) -> list[tuple[int, Text]]:
    """This process's share of the texts, each with its index in the log; the new ones are added to its file."""
    made = _resume(file)
    done = made[-1][0] if made else -1
    waiting: list[tuple[int, list[int], Exchange]] = []
    with file.open("a", encoding="utf-8") as out:
        def write() -> None:
            prompts = [prompt for _, prompt, _ in waiting]
            wishes = [_sampling(exchange, length - len(prompt), f"{seed} {index}") for index, prompt, exchange in waiting]
            for (index, prompt, exchange), answer in zip(waiting, engine.generate_batch(prompts, wishes), strict=True):
                text = Text((*prompt, *answer.token_ids), len(prompt), exchange.prompt_class)
                made.append((index, text))
                out.write(json.dumps({"index": index, **asdict(text)}) + "\n")
            out.flush()
            waiting.clear()
            if progress:
                progress(len(made))

        for index, exchange in enumerate(exchanges):
            if index <= done or index % team.size != team.rank:
                continue
            prompt = prompt_of(exchange, engine.target)
            if not prompt:
                continue
            if exchange.document:
                prompt = prompt[:max(4, min(len(prompt), length) // 3)]
            waiting.append((index, prompt[-(length // 2):], exchange))
            if len(waiting) == ROUND:
                write()
        if waiting:
            write()
    return made


def _resume(file: Path) -> list[tuple[int, Text]]:
    """Texts already made, each with its index in the log; a last line cut short by a kill is dropped from the file."""
    made: list[tuple[int, Text]] = []
    whole = 0
    if file.exists():
        with file.open("rb") as stream:
            for line in stream:
                try:
                    record = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                made.append((record["index"], Text(tuple(record["ids"]), record["answer_from"], record["prompt_class"])))
                whole += len(line)
        if whole < file.stat().st_size:
            with file.open("rb+") as stream:
                stream.truncate(whole)
    return made


def _sampling(exchange: Exchange, room: int, key: str) -> Sampling:
    asked = exchange.sampling
    known = {name: asked[name] for name in ("temperature", "top_p", "top_k", "min_p") if asked.get(name) is not None}
    seed = random.Random(key).getrandbits(48)
    return Sampling(max_tokens=max(1, min(room, exchange.max_tokens or room)), seed=seed, **known)


def split(texts: Sequence[Text], share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """(texts to learn from, texts held out), by a seeded shuffle; at least one text on each side."""
    if len(texts) < 2:
        raise Failure(f"{len(texts)} text in the data; expected at least 2, one of them to be held out")
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    held = max(1, min(len(texts) - 1, round(len(texts) * share)))
    return [texts[i] for i in sorted(order[held:])], [texts[i] for i in sorted(order[:held])]


def mixed(own: Sequence[Text], general: Sequence[Text], share: float, seed: int) -> list[Text]:
    """`own` with so much of `general` beside it that the latter is `share` of the whole (fine-tuning on little traffic forgets)."""
    wanted = round(len(own) * share / (1 - share))
    picked = random.Random(seed).choices(list(general), k=wanted) if general and wanted else []
    return [*own, *picked]
