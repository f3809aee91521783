"""What a drafter would have guessed on texts that are already written, without running the target a token at a time.

Under rule `match` acceptance depends on the text and the drafter alone: a guess stands if it is the text's next token. So a
drafter whose guess is a function of the text (and, at temperature > 0, of the seed in the log) is replayed *exactly*: the
counts are those of the engine, round for round. Heads need hidden states; `states` brings those of the whole text.
`copied` is the same for drafters that only copy, without a tensor; `replay` is its plain twin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.noise import key, key_rows
from ..core.tally import Tally
from ..drafters.base import Drafter
from ..drafters.occurrences import TextIndex
from ..drafters.suffix import SuffixState
from ..engine.speculation import RoundNoise
from ..types import Budget, Commit, Draft, Likely, Role, Rule, Sampling, SequenceView, Signals

States = Callable[[Sequence[int]], Mapping[int, Tensor]]
"""Token ids of a text → layer id → hidden states [n, H] after each of them."""

Passes = Callable[[Sequence[int], Draft], Likely]
"""A text and a draft that follows it → what is likely behind the text and behind every node."""


@dataclass(frozen=True, slots=True)
class Story:
    """A text as it was written: its prompt, its answer (at least one token), and what it was asked with.

    limit: the longest text that was allowed, prompt included; None means as long as it is. depths: (position, depth) of the
    rounds that wrote it, rising, where a trace has them.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    sample: int = 0
    limit: int | None = None
    prompt_class: str | None = None
    end_ids: frozenset[int] = frozenset()
    tenant: str = ""
    depths: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert self.prompt and self.answer, "a story has a prompt and an answer"


@dataclass(slots=True, eq=False)
class Reading:
    """A story up to where its replay is (`types.SequenceView`)."""

    id: str
    story: Story
    tenant: str
    tokens: list[int]
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    state: object = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.story.prompt)

    @property
    def sampling(self) -> Sampling:
        return self.story.sampling

    @property
    def seed(self) -> int:
        return self.story.seed

    @property
    def sample(self) -> int:
        return self.story.sample

    @property
    def grammar(self) -> None:
        return None

    @property
    def rule(self) -> Rule:
        return "match"

    @property
    def end_ids(self) -> frozenset[int]:
        return self.story.end_ids

    @property
    def left(self) -> Sequence[int]:
        """What the text will say next."""
        return self.story.answer[len(self.tokens) - len(self.story.prompt):]

    def signals(self, start: int, stop: int, likely: Likely | None = None) -> Signals | None:
        if not self.taps and likely is None:
            return None
        return Signals(start, {layer: rows[start:stop] for layer, rows in self.taps.items()}, likely)


class TextNoise(RoundNoise):
    """The noise that the texts were written with under rule `match`: for sequences that no engine runs."""

    def __init__(self, device: torch.device, keep_law: bool = False) -> None:
        super().__init__(device, keep_law)

    def keys(self, seqs: Sequence[SequenceView], positions: Sequence[int]) -> Tensor:
        return key_rows([key(seq.seed, seq.sample, "text", at) for seq, at in zip(seqs, positions, strict=True)], self.device)


class Copier(Protocol):
    """A drafter that says its chains as plain integers, too. A shorter chain is the beginning of a longer one at the same place."""

    def start(self, seq: SequenceView) -> Any: ...
    def chain(self, state: Any, depth: int) -> Sequence[int]: ...
    def leave(self, state: Any) -> None: ...


class KnownText(TextIndex):
    """The index of a text whose end is known, read all at once; it answers as if the text were as long as `extend` was told."""

    def __init__(self, levels: int, text: Sequence[int]) -> None:
        super().__init__(levels)
        self._extend_all(text)
        self.length = 0

    def extend(self, text: Sequence[int]) -> None:
        self.length = len(text)

    @property
    def grams(self) -> list[int]:
        return [mine[self.length - 1] for level, mine in enumerate(self._hashes) if self.length >> level]

    def known(self, grams: Sequence[int]) -> int:
        return next((level for level in range(len(grams)) if self.length not in self._before[level]), len(grams))

    def places(self, level: int, gram: int, limit: int) -> list[int]:
        found: list[int] = []
        before, end = self._before[level], self._before[level].get(self.length)
        while end is not None and len(found) < limit:
            found.append(end)
            end = before.get(end)
        return found


def copied(drafter: Copier, story: Story, depths: Sequence[int | None]) -> list[Tally]:
    """`replay` of one story with chains, at several depths, for a drafter that reads nothing but the text.

    All depths see the same text, so wherever a round of any of them begins the drafter is asked once, for the longest chain. What it
    remembers of the story it learns at the end. None, the traced depth, stands alone.
    """
    assert None not in depths or set(depths) == {None}
    reader = Reading("replay", story, story.tenant, [*story.prompt, story.answer[0]])
    text, answer, n, before = reader.tokens, story.answer, len(story.answer), len(story.prompt)
    traced, last, state = None in depths, room(story), None
    limits = [depth or 0 for depth in depths]
    deepest, tallies, nexts, at = max(limits), [Tally() for _ in depths], [1] * len(depths), 1
    for tally in tallies:
        tally.prefill()
    while at < n:
        text += answer[len(text) - before:at]
        if traced:
            limits = [granted(story, len(text))] * len(depths)
            deepest = limits[0]
        most = min(deepest, last - at)
        if most > 0 and state is None:
            state = drafter.start(reader)
            if isinstance(state, SuffixState):
                state.index = KnownText(state.index.levels, (*story.prompt, *answer))
        guesses, stands, following = drafter.chain(state, most) if most > 0 else (), 0, n
        for guess in guesses[:n - at]:
            if guess != answer[at + stands]:
                break
            stands += 1
        for i, place in enumerate(nexts):
            if place == at:
                drafted = min(len(guesses), limits[i])
                kept = min(stands, drafted)
                emitted = min(kept + 1, n - at)
                tallies[i].round(drafted, kept, int(kept < drafted and emitted > kept), emitted)
                place = nexts[i] = at + emitted
            following = min(following, place)
        at = following
    if state is not None:
        text += answer[len(text) - before:]
        drafter.leave(state)
    return tallies


def room(story: Story) -> int:
    """How many tokens of the answer a draft may reach to: all that may be emitted, less the target's own last one."""
    return (story.limit or len(story.prompt) + len(story.answer)) - len(story.prompt) - 1


def asked(story: Story, depth: int | None) -> bool:
    """Whether a drafter is ever asked for a guess on this story; otherwise it never hears of it."""
    if len(story.answer) < 2:
        return False
    return room(story) > 1 and (depth is not None or any(granted > 0 for _, granted in story.depths))


def granted(story: Story, position: int) -> int:
    """The depth of the round that wrote the token at `position`; 0 where the story does not say."""
    place = bisect_right(story.depths, (position, 1 << 30))
    return story.depths[place - 1][1] if place else 0


def replay(drafter: Drafter, stories: Sequence[Story], depth: int | None, *, nodes: int | None = None, batch: int = 8,
           states: States | None = None, passes: Passes | None = None, capped: bool = True,
           device: torch.device | None = None) -> list[Tally]:
    """Counts of every story with this drafter at a fixed depth, `batch` stories side by side, in their order.

    depth: None takes those of the rounds that wrote the story. nodes: most nodes per round, None for chains. passes: for a drafter that is
    told what was likely. capped: a draft is no longer than what may still be emitted (as our engine does; others draft on, with which the
    tests against vLLM compare). A drafter with memory across texts (suffix, recycle) meets them in order only with batch=1.
    """
    noise = TextNoise(device or torch.device("cpu"))
    waiting = [Reading(f"replay-{i}", story, story.tenant, [*story.prompt, story.answer[0]]) for i, story in enumerate(stories)]
    tallies = [reader.tally for reader in waiting]
    waiting.reverse()
    live: list[Reading] = []
    with torch.inference_mode():
        while live or waiting:
            while waiting and len(live) < batch:
                live.append(opened(drafter, waiting.pop(), states))
            ended = [reader for reader in live if not reader.left]
            for reader in ended:
                if reader.state is not None:
                    drafter.close(reader.state)
            live = [reader for reader in live if reader.left]
            if live:
                _round(drafter, live, depth, nodes, noise, capped, passes)
    return tallies


def opened(drafter: Drafter, reader: Reading, states: States | None) -> Reading:
    """The reading, its drafter told where it reads hidden states from the start."""
    reader.tally.prefill()
    if drafter.needs.taps:                  # it follows from the start; others join when they are first asked, as in the engine
        if states is not None:
            reader.taps = states([*reader.story.prompt, *reader.story.answer])
        reader.state = drafter.open(reader, reader.signals(0, reader.prompt_tokens))
    return reader


def _round(drafter: Drafter, live: Sequence[Reading], depth: int | None, nodes: int | None, noise: TextNoise, capped: bool,
           passes: Passes | None) -> None:
    budgets = [_budget(drafter, reader, depth, nodes, capped) for reader in live]
    wanted = [i for i, budget in enumerate(budgets) if budget.depth]
    drafts = [Draft.empty(drafter.name) for _ in live]
    if wanted:
        for reader in (live[i] for i in wanted if live[i].state is None):
            reader.state = drafter.open(reader, None)
        found = drafter.propose([live[i].state for i in wanted], [budgets[i] for i in wanted], noise)
        for i, draft in zip(wanted, found, strict=True):
            drafts[i] = draft
    commits, signals = [], []
    for reader, draft in zip(live, drafts, strict=True):
        start, likely = len(reader.tokens), passes(reader.tokens, draft) if passes and wanted else None
        kept, rejected = _walk(draft, reader.left)
        emitted = tuple(reader.left[:len(kept) + 1])
        roles: list[Role] = ["accepted"] * len(kept)
        roles += ["correction"] * (len(emitted) - len(kept))
        reader.tokens += emitted
        reader.tally.round(len(draft), len(kept), rejected if len(emitted) > len(kept) else 0, len(emitted))
        commits.append(Commit(start, emitted, tuple(roles), kept))
        signals.append(reader.signals(start - 1, start + len(kept), likely))
    here = [i for i, reader in enumerate(live) if reader.state is not None]
    if here:
        drafter.observe([live[i].state for i in here], [commits[i] for i in here], [signals[i] for i in here])


def _budget(drafter: Drafter, reader: Reading, depth: int | None, nodes: int | None, capped: bool) -> Budget:
    depth = granted(reader.story, len(reader.tokens)) if depth is None else depth
    if capped:
        limit = reader.story.limit or len(reader.story.prompt) + len(reader.story.answer)
        depth = max(0, min(depth, limit - len(reader.tokens) - 1))
    if drafter.needs.context is not None:
        depth = max(0, min(depth, drafter.needs.context - len(reader.tokens)))
    return Budget(depth, max(depth, nodes or 0) if depth else 0, drafter.name, "replay")


def _walk(draft: Draft, truth: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """(nodes that the text follows, how many children were refused where it left them)."""
    tokens = draft.tokens.tolist()
    kept: list[int] = []
    node = -1
    for child, parent in enumerate(draft.parents):
        if parent == node and len(kept) < len(truth) and tokens[child] == truth[len(kept)]:
            kept.append(child)
            node = child
    return tuple(kept), sum(parent == node for parent in draft.parents)
