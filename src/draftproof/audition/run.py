"""An audition: every drafter and depth over a whole log, streamed, in blocks that can be counted apart and by several processes.

A drafter that remembers past texts meets the log in its order and is only ever asked about texts it has not seen: whoever
counts a later block lets its store *learn* the earlier ones first, which is fast and leaves the store as a replay would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..core.tally import Tally
from ..drafters import parse_spec
from ..drafters.base import Drafter, PerSequence
from ..drafters.ngram import NgramDrafter
from ..drafters.prediction import PredictionDrafter
from ..drafters.suffix import SuffixDrafter
from ..errors import OptionError
from ..models.target import Target
from ..types import Rule
from .counts import ALL, Counts
from .logs import Skipped
from .replay import Story, asked, copied, replay
from .stories import UNCLASSED, Read, Reader, states_of

BLOCK = 64              # requests that are counted, and kept in a partial result, together
BATCH = 8               # texts side by side, for drafters that are models
RULE: Rule = "match"
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
        return bool(spec.parts) or spec.name in ("suffix", "custom")


@dataclass(frozen=True, slots=True)
class Share:
    """The blocks of one arm that one worker counts: every `of`-th from `index` on, but for those already done."""

    arm: int
    index: int = 0
    of: int = 1
    done: frozenset[int] = frozenset()


@dataclass(slots=True)
class Part:
    """What one block of the log showed of one arm."""

    arm: int
    block: int
    tokens: int = 0
    retokenised: int = 0
    classes: dict[str, Counts] = field(default_factory=dict)

    def add(self, read: Read, tally: Tally, exact: bool) -> None:
        counts = self.classes.setdefault(read.story.prompt_class or ALL, Counts())
        counts.add(tally, exact or read.known, len(read.story.prompt))
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
    """A log, how it is read, and what replays it. target: where a drafter is a model or reads hidden states."""

    log: str
    arms: tuple[Arm, ...]
    reader: Reader
    target: Target | None = None
    make: Maker | None = None           # of drafters that are no copiers
    batch: int = BATCH

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm.spec == "none":
                raise OptionError("an audition of drafter none has nothing to count; leave it out")
            if arm.depth is not None and arm.depth < 1:
                raise OptionError(f"depth {arm.depth}: expected an integer ≥ 1; at depth 0 nothing is guessed")

    def parts(self, share: Share, skipped: Skipped) -> Iterator[Part]:
        """Count the blocks of a share, one after the other."""
        arm = self.arms[share.arm]
        drafter = self._drafter(arm)
        learn = getattr(drafter, "learn", None) if arm.copies else None
        for number, block in enumerate(_blocks(self.reader.stories(self.log, skipped))):
            mine = number % share.of == share.index and number not in share.done
            if mine or (arm.remembers and learn is None):
                part = self._count(arm, drafter, Part(share.arm, number), block)
                if mine:
                    yield part
            elif arm.remembers and learn is not None:
                for read in (read for read in block if asked(read.story, arm.depth)):
                    learn((*read.story.prompt, *read.story.answer), len(read.story.prompt), read.story.tenant)

    def _drafter(self, arm: Arm) -> Drafter:
        spec = parse_spec(arm.spec)
        if spec.name in COPIERS:
            drafter: Drafter = COPIERS[spec.name](**spec.options)
            return drafter
        assert self.make is not None, "a drafter that is a model comes with its target"
        return self.make(arm.spec)

    def _count(self, arm: Arm, drafter: Drafter, part: Part, block: Sequence[Read]) -> Part:
        stories = [read.story for read in block]
        if arm.depth is None:
            _check_traced(stories)
        copier: Any = drafter if arm.copies and hasattr(drafter, "chain") else None
        if copier is not None:
            tallies = [copied(copier, story, arm.depth) for story in stories]
        else:
            tallies = replay(drafter, stories, arm.depth, batch=1 if arm.remembers else self.batch,
                             states=states_of(self.target, drafter.needs.taps), device=self.target.device if self.target else None)
        for read, tally in zip(block, tallies, strict=True):
            part.add(read, tally, follows_text(drafter))
        return part


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

    def add(self, part: Part) -> None:
        for name, counts in part.classes.items():
            known = self.counts.get((part.arm, name))
            self.counts[part.arm, name] = counts if known is None else known + counts
        if part.arm == 0:
            self.requests += part.requests
            self.tokens += part.tokens
            self.retokenised += part.retokenised

    def cells(self) -> list[dict[str, Any]]:
        """A cell per arm and class, then one per arm over all; a log without classes has only the latter."""
        names = sorted({name for _, name in self.counts})
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
                "complaints": list(self.skipped.shown)}


def log_size(log: str | Path) -> int:
    """Bytes of the file; 0 if it is missing, which the reader then says."""
    file = Path(log).expanduser()
    return file.stat().st_size if file.is_file() else 0
