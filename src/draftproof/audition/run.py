"""An audition: every drafter and depth over a whole log, streamed, in blocks that can be counted apart and by several processes.

A drafter that remembers past texts meets the log in its order and is only ever asked about texts it has not seen: whoever
counts a later block lets its store *learn* the earlier ones first, which is fast and leaves the store as a replay would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..core.tally import Tally
from ..drafters import DRAFTERS, REMEMBER, parse_spec
from ..drafters.base import Drafter, PerSequence
from ..drafters.model import ModelDrafter
from ..drafters.ngram import NgramDrafter
from ..drafters.pard import PardDrafter
from ..drafters.prediction import PredictionDrafter
from ..drafters.suffix import SuffixDrafter
from ..errors import OptionError
from ..models.target import Target
from ..trace.events import UNCLASSED
from .counts import ALL, Counts
from .logs import Skipped
from .replay import Story, asked, copied, replay, room
from .sampled import chances, expected_rounds
from .stories import GREEDY, Read, Reader, passes_of, states_of

BLOCK = 64              # requests that are counted, and kept in a partial result, together
BATCH = 8               # texts side by side, for drafters that are models
CLASSES = 256           # of prompts that are counted apart; further ones count as `OTHER`
OTHER = "other"
COPIERS: dict[str, type[Any]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "prediction": PredictionDrafter}
"""Drafters that read nothing but the text and the request: they need no target, and may work in other processes."""

Maker = Callable[[str], Drafter]
"""A drafter of a spec, new and with an empty memory."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter at a depth; None is the depth of the rounds that wrote the log, where it is one of our traces."""

    spec: str
    depth: int | None

    @property
    def shown_depth(self) -> int | str:
        return "traced" if self.depth is None else self.depth

    @property
    def copies(self) -> bool:
        """Whether it needs no target."""
        return parse_spec(self.spec).name in COPIERS         # not a chain of them, which learns whom to ask

    @property
    def remembers(self) -> bool:
        """Whether what it says depends on earlier texts."""
        spec = parse_spec(self.spec)
        return bool(spec.parts) or spec.name in {*REMEMBER, "custom"}


@dataclass(frozen=True, slots=True)
class Share:
    """The blocks of some arms that one worker counts: every `of`-th from `index` on, but for the (arm, block) that are done.

    The arms have one drafter, at several depths: they are counted together.
    """

    arms: tuple[int, ...]
    index: int = 0
    of: int = 1
    done: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class Part:
    """What one block of the log showed of one arm."""

    arm: int
    block: int
    tokens: int = 0
    retokenised: int = 0
    classes: dict[str, Counts] = field(default_factory=dict)

    def add(self, read: Read, tally: Tally, exact: bool, rounds: tuple[float, float] | None = None) -> None:
        name = read.story.prompt_class or UNCLASSED
        counts = self.classes.setdefault(OTHER if name == ALL else name, Counts())      # ALL is the whole log
        counts.add(tally, exact or read.known, len(read.story.prompt), rounds, read.retokenised)
        self.tokens += len(read.story.answer)
        self.retokenised += read.retokenised

    @property
    def requests(self) -> int:
        return sum(counts.tally.requests for counts in self.classes.values())

    def as_json(self) -> dict[str, Any]:
        return {"arm": self.arm, "block": self.block, "tokens": self.tokens, "retokenised": self.retokenised,
                "classes": {name: counts.as_dict() for name, counts in self.classes.items()}}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Part:
        return cls(record["arm"], record["block"], record["tokens"], record["retokenised"],
                   {name: Counts.from_dict(counts) for name, counts in record["classes"].items()})


@dataclass(frozen=True, slots=True)
class Work:
    """A log, how it is read, and what replays it. target: where a drafter is a model or reads hidden states.

    version: which target made ids of text, by name and content; a partial result of another one is not gone on with.
    """

    log: str
    arms: tuple[Arm, ...]
    reader: Reader
    target: Target | None = None
    make: Maker | None = None           # of drafters that are no copiers
    batch: int = BATCH
    version: str = ""

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm.spec == "none":
                raise OptionError("an audition of drafter none has nothing to count; leave it out")
            spec = parse_spec(arm.spec)
            unseen = [what for part in spec.parts or (spec,) if (what := getattr(DRAFTERS[part.name], "unseen", None))]
            if unseen:
                raise OptionError(f"{arm.spec} guesses from {unseen[0]}, which a replay does not have; count it where texts run: "
                                  "draftproof bench, or serve --trace")
            if arm.depth is not None and arm.depth < 1:
                raise OptionError(f"depth {arm.depth}: expected an integer ≥ 1; at depth 0 nothing is guessed")

    def groups(self) -> list[tuple[int, ...]]:
        """Arms that are counted together: of one drafter, unless what it remembers depends on how deep it was asked to guess."""
        found: dict[tuple[str, int | None], list[int]] = {}
        for at, arm in enumerate(self.arms):
            apart = at if arm.remembers and not arm.copies else -1 if arm.depth is None else None
            found.setdefault((arm.spec, apart), []).append(at)
        return [tuple(group) for group in found.values()]

    def parts(self, share: Share, skipped: Skipped) -> Iterator[Part]:
        """Count the blocks of a share, one after the other."""
        first = self.arms[share.arms[0]]
        drafter = self._drafter(first)
        learn = getattr(drafter, "learn", None) if first.copies else None
        for number, block in enumerate(_blocks(self.reader.stories(self.log, skipped))):
            due = [at for at in share.arms if number % share.of == share.index and (at, number) not in share.done]
            if due or (first.remembers and learn is None):
                yield from (part for part in self._count(due or share.arms, drafter, number, block) if part.arm in due)
            elif first.remembers and learn is not None:
                for read in (read for read in block if asked(read.story, first.depth)):
                    learn((*read.story.prompt, *read.story.answer), len(read.story.prompt), read.story.tenant)

    def _drafter(self, arm: Arm) -> Drafter:
        spec = parse_spec(arm.spec)
        if spec.name in COPIERS:
            drafter: Drafter = COPIERS[spec.name](**spec.options)
            return drafter
        assert self.make is not None, "a drafter that is a model comes with its target"
        return self.make(arm.spec)

    def _count(self, arms: Sequence[int], drafter: Drafter, number: int, block: Sequence[Read]) -> list[Part]:
        stories, depths = [read.story for read in block], [self.arms[at].depth for at in arms]
        if None in depths:
            _check_traced(stories)
        copier: Any = drafter if self.arms[arms[0]].copies and hasattr(drafter, "chain") else None
        if copier is not None:
            tallies = list(zip(*(copied(copier, story, depths) for story in stories), strict=True))
        else:
            device = self.target.device if self.target else None
            batch = 1 if self.arms[arms[0]].remembers else self.batch
            states, passes = states_of(self.target, drafter.needs.taps), passes_of(self.target, drafter.needs.likely)
            tallies = [tuple(replay(drafter, stories, depth, batch=batch, states=states, passes=passes, device=device)) for depth in depths]
        rounds = self._rounds(drafter, block, depths)
        parts = []
        for at, mine, expected in zip(arms, tallies, rounds, strict=True):
            part = Part(at, number)
            for read, tally, bounds in zip(block, mine, expected, strict=True):
                part.add(read, tally, follows_text(drafter), bounds)
            parts.append(part)
        return parts

    def _rounds(self, drafter: Drafter, block: Sequence[Read], depths: Sequence[int | None]) -> list[list[tuple[float, float] | None]]:
        """Per depth and request: fewest and most rounds that sampled drafts can be expected to take; None where the log does not say."""
        found: list[list[tuple[float, float] | None]] = [[None] * len(block) for _ in depths]
        fit = [i for i, read in enumerate(block) if read.asked is not None]
        if not fit or self.target is None or follows_text(drafter) or not drafter.needs.law:
            return found
        stories = [replace(block[i].story, sampling=block[i].asked or GREEDY) for i in fit]
        likely = chances(drafter, stories, [block[i].seen for i in fit], self.target.vocab_size, batch=self.batch,
                         states=states_of(self.target, drafter.needs.taps), device=self.target.device)
        for depth, bounds in zip(depths, found, strict=True):
            if depth is not None and (depth == 1 or law_follows_text(drafter)):
                for i, story, each in zip(fit, stories, likely, strict=True):
                    bounds[i] = expected_rounds(each, depth, room(story))
        return found


def law_follows_text(drafter: Drafter) -> bool:
    """Whether its law at a place is a function of the text before it, however long ago the round began. Heads go on from their own
    states, and block drafters from masks, so theirs is known at a round's first guess only."""
    return isinstance(drafter, ModelDrafter) and not isinstance(drafter, PardDrafter)


def follows_text(drafter: Drafter) -> bool:
    """Whether a guess is a function of the text alone, whatever the temperature and the seed."""
    parts = getattr(drafter, "parts", None)
    return all(map(follows_text, parts)) if parts else isinstance(drafter, PerSequence)


def _check_traced(stories: Sequence[Story]) -> None:
    if any(len(story.answer) > 1 and not story.depths for story in stories):
        raise OptionError("depth traced: the log does not say how deep each round guessed; expected a trace of ours, or give depths")


def _blocks(reads: Iterator[Read]) -> Iterator[list[Read]]:
    while block := list(islice(reads, BLOCK)):
        yield block


@dataclass(slots=True)
class Result:
    """Everything that was counted, and what the log was."""

    arms: tuple[Arm, ...]
    counts: dict[tuple[int, str], Counts] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    retokenised: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    names: set[str] = field(default_factory=set)

    def add(self, part: Part) -> None:
        for name, counts in part.classes.items():
            if name not in self.names:
                name = OTHER if len(self.names) >= CLASSES else name
                self.names.add(name)
            known = self.counts.get((part.arm, name))
            self.counts[part.arm, name] = counts if known is None else known + counts
        if part.arm == 0:
            self.requests += part.requests
            self.tokens += part.tokens
            self.retokenised += part.retokenised

    def cells(self) -> list[dict[str, Any]]:
        """A cell per arm and class, then one per arm over all; a log without classes has only the latter."""
        names = sorted(self.names)
        cells = [] if names in ([], [UNCLASSED]) else [
            self.counts[at, name].as_cell(arm.spec, arm.shown_depth, name)
            for name in names for at, arm in enumerate(self.arms) if (at, name) in self.counts]
        for at, arm in enumerate(self.arms):
            whole = sum((self.counts[at, name] for name in names if (at, name) in self.counts), Counts())
            cells.append(whole.as_cell(arm.spec, arm.shown_depth, ALL))
        return cells

    def log(self) -> dict[str, Any]:
        """`log` of `audition --json`."""
        return {"requests": self.requests, "tokens": self.tokens, "skipped": self.skipped.count, "retokenised": self.retokenised,
                "complaints": list(self.skipped.shown), "remarks": self.skipped.remarks()}


def log_size(log: str | Path) -> int:
    """Bytes of the file; 0 if it is missing, which the reader then says."""
    file = Path(log).expanduser()
    return file.stat().st_size if file.is_file() else 0
