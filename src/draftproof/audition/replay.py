"""What a drafter would have guessed on texts that are already written, without running the target a token at a time.

Under rule `match` acceptance depends on the text and the drafter alone: a guess stands if it is the text's next token. So a
drafter whose guess is a function of the text (and, at temperature > 0, of the seed in the log) is replayed *exactly*: the
counts are those of the engine, round for round. Heads need hidden states; `states` brings those of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.noise import gumbel, key, key_rows
from ..core.tally import Tally
from ..drafters.base import Drafter
from ..types import Budget, Commit, Draft, Role, Sampling, SequenceView, Signals

States = Callable[[Sequence[int]], Mapping[int, Tensor]]
"""Token ids of a text → layer id → hidden states [n, H] after each of them."""


@dataclass(frozen=True, slots=True)
class Story:
    """A text as it was written: its prompt, its answer (at least one token), and what it was asked with.

    limit: the longest text that was allowed, prompt included; None means as long as it is.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    sample: int = 0
    limit: int | None = None
    prompt_class: str | None = None
    end_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert self.prompt and self.answer, "a story has a prompt and an answer"


@dataclass(slots=True, eq=False)
class _Reader:
    """The text up to where the replay is (`types.SequenceView`)."""

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
    def end_ids(self) -> frozenset[int]:
        return self.story.end_ids

    @property
    def left(self) -> Sequence[int]:
        """What the text will say next."""
        return self.story.answer[len(self.tokens) - len(self.story.prompt):]

    def signals(self, start: int, stop: int) -> Signals | None:
        return Signals(start, {layer: rows[start:stop] for layer, rows in self.taps.items()}) if self.taps else None


@dataclass(frozen=True, slots=True)
class TextNoise:
    """`drafters.base.Noise` of rule `match`: the noise that the texts were written with."""

    device: torch.device
    keep_law: bool = False

    def keys(self, seqs: Sequence[SequenceView], positions: Sequence[int]) -> Tensor:
        return key_rows([key(seq.seed, seq.sample, "text", at) for seq, at in zip(seqs, positions, strict=True)], self.device)

    def __call__(self, seqs: Sequence[SequenceView], positions: Sequence[int], token_ids: Tensor | None, vocab_size: int) -> Tensor:
        ids = torch.arange(vocab_size, device=self.device) if token_ids is None else token_ids.to(self.device)
        noise = gumbel(self.keys(seqs, positions), ids)
        for row, seq in enumerate(seqs):
            if seq.sampling.greedy:
                noise[row] = 0
        return noise


def replay(drafter: Drafter, stories: Sequence[Story], depth: int, *, nodes: int | None = None, batch: int = 8, tenant: str = "",
           states: States | None = None, capped: bool = True, device: torch.device | None = None) -> list[Tally]:
    """Counts of every story with this drafter at a fixed depth, `batch` stories side by side, in their order.

    nodes: most nodes per round, None for chains. capped: a draft is no longer than what may still be emitted (as our engine does;
    others draft on). A drafter with memory across texts (suffix) meets them in order only with batch=1.
    """
    noise = TextNoise(device or torch.device("cpu"))
    waiting = [_Reader(f"replay-{i}", story, tenant, [*story.prompt, story.answer[0]]) for i, story in enumerate(stories)]
    tallies = [reader.tally for reader in waiting]
    waiting.reverse()
    live: list[_Reader] = []
    with torch.inference_mode():
        while live or waiting:
            while waiting and len(live) < batch:
                live.append(_opened(drafter, waiting.pop(), states))
            ended = [reader for reader in live if not reader.left]
            for reader in ended:
                drafter.close(reader.state)
            live = [reader for reader in live if reader.left]
            if live:
                _round(drafter, live, depth, nodes, noise, capped)
    return tallies


def _opened(drafter: Drafter, reader: _Reader, states: States | None) -> _Reader:
    reader.tally.prefill()
    if states is not None and drafter.needs.taps:
        reader.taps = states([*reader.story.prompt, *reader.story.answer])
    reader.state = drafter.open(reader, reader.signals(0, reader.prompt_tokens))
    return reader


def _round(drafter: Drafter, live: Sequence[_Reader], depth: int, nodes: int | None, noise: TextNoise, capped: bool) -> None:
    budgets = [_budget(drafter, reader, depth, nodes, capped) for reader in live]
    asked = [i for i, budget in enumerate(budgets) if budget.depth]
    drafts = [Draft.empty(drafter.name) for _ in live]
    if asked:
        found = drafter.propose([live[i].state for i in asked], [budgets[i] for i in asked], noise)
        for i, draft in zip(asked, found, strict=True):
            drafts[i] = draft
    commits, signals = [], []
    for reader, draft in zip(live, drafts, strict=True):
        start = len(reader.tokens)
        kept, rejected = _walk(draft, reader.left)
        emitted = tuple(reader.left[:len(kept) + 1])
        roles: list[Role] = ["accepted"] * len(kept)
        roles += ["correction"] * (len(emitted) - len(kept))
        reader.tokens += emitted
        reader.tally.round(len(draft), len(kept), rejected if len(emitted) > len(kept) else 0, len(emitted))
        commits.append(Commit(start, emitted, tuple(roles), kept))
        signals.append(reader.signals(start - 1, start + len(kept)))
    drafter.observe([reader.state for reader in live], commits, signals)


def _budget(drafter: Drafter, reader: _Reader, depth: int, nodes: int | None, capped: bool) -> Budget:
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
