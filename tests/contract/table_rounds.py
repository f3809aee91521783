"""Plain decoding and speculative rounds in a few lines, over any `Target`: the contract tests' own loop, without the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftproof.core import noise as hashed
from draftproof.core.choice import Law, choose
from draftproof.core.edits import Rows
from draftproof.core.probs import laws
from draftproof.core.tree import depths, path
from draftproof.core.verify import match, short_of
from draftproof.models.target import Target
from draftproof.types import Budget, Commit, Draft, Likely, Rule, Sampling, Scores, Signals, Verdict


@dataclass(eq=False)
class Text:
    """A sequence as drafters see it."""

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    seed: int = 0
    sample: int = 0
    id: str = "s"
    tenant: str = ""
    end_ids: frozenset[int] = frozenset()
    grammar: Any = None
    rule: Rule = "match"

    @classmethod
    def of(cls, prompt: Sequence[int], sampling: Sampling, **more: Any) -> Text:
        return cls(list(prompt), len(prompt), sampling, **more)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted; 0 behind an end token."""
        ended = len(self.tokens) > self.prompt_tokens and self.tokens[-1] in self.end_ids
        return 0 if ended else self.sampling.max_tokens - (len(self.tokens) - self.prompt_tokens)


class SharedNoise:
    """The engine's noise: the text's own stream under `match`, the draft stream otherwise."""

    def __init__(self, keep_law: bool = False, attempt: int = 0) -> None:
        self.keep_law, self.attempt = keep_law, attempt

    def keys(self, seqs: Sequence[Any], positions: Sequence[int]) -> Tensor:
        stream = "draft" if self.keep_law else "text"
        return hashed.key_rows([hashed.key(s.seed, s.sample, stream, p, self.attempt) for s, p in zip(seqs, positions, strict=True)], "cpu")

    def __call__(self, seqs: Sequence[Any], positions: Sequence[int], token_ids: Tensor | None, vocab_size: int) -> Tensor:
        values = hashed.gumbel(self.keys(seqs, positions), torch.arange(vocab_size) if token_ids is None else token_ids)
        for i, seq in enumerate(seqs):
            if seq.sampling.greedy:
                values[i] = 0
        return values


def rows_of(text: Text, paths: Sequence[Sequence[int]]) -> Rows:
    return Rows(text.sampling, text.tokens, text.prompt_tokens, paths, text.end_ids)


def chosen(text: Text, logits: Tensor, paths: Sequence[Sequence[int]]) -> list[int]:
    """The target's choice after the text and each path; any token where the options leave none after a path."""
    return _choices([text] * len(paths), laws(logits, [rows_of(text, paths)], (0,)), paths)


def _choices(texts: Sequence[Text], logp: Law, paths: Sequence[Sequence[int]]) -> list[int]:
    """Row by row: texts and paths are those of each row."""
    found = [0] * len(texts)
    for greedy in (True, False):
        if rows := [i for i, text in enumerate(texts) if text.sampling.greedy == greedy]:
            keys = [hashed.key(texts[i].seed, texts[i].sample, "text", len(texts[i].tokens) + len(paths[i])) for i in rows]
            choices = choose(logp if len(rows) == len(texts) else logp.of(rows), None if greedy else hashed.key_rows(keys, "cpu"))
            for i, choice in zip(rows, choices.tolist(), strict=True):
                found[i] = choice
    return found


def plain(target: Target, text: Text) -> list[int]:
    """The whole text, one token per pass."""
    slot = target.open(text.tokens)
    copy = Text.of(text.tokens, text.sampling, seed=text.seed, sample=text.sample, end_ids=text.end_ids)
    while copy.room:
        logits = target.extend([slot], [torch.tensor(copy.tokens[slot.length:])]).logits
        copy.tokens += chosen(copy, logits, [()])
    target.close(slot)
    return copy.tokens


@dataclass
class Log:
    drafts: list[Draft] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    accepted: int = 0
    rounds: int = 0


BudgetOf = Callable[[int, int], tuple[int, int]]
"""(sequence, round) → (depth, nodes) wished for."""


def check_budget(draft: Draft, budget: Budget, vocab_size: int) -> None:
    assert len(draft) <= budget.nodes, "more nodes than granted"
    assert not len(draft) or max(depths(draft.parents)) <= budget.depth, "deeper than granted"
    assert all(0 <= t < vocab_size for t in draft.tokens.tolist()), "an id that the target does not have"
    edges = list(zip(draft.parents, draft.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges), "twice the same child"
    assert draft.score is None or draft.score.shape == draft.tokens.shape and bool(draft.score.isfinite().all())
    assert draft.tokens.dtype == torch.int64


def opened(target: Target, drafter: Any, texts: Sequence[Text]) -> tuple[list[Any], list[Any]]:
    """A state and a slot per text; a drafter with taps gets the hidden states of every position but the last token's."""
    target.set_taps(drafter.needs.taps)
    states, slots = [], []
    for text in texts:
        slot, signals = target.open(text.tokens), None
        start = slot.length
        if len(text.tokens) - 1 > start:
            taps = target.extend([slot], [torch.tensor(text.tokens[start:-1])]).taps
            signals = Signals(start, dict(taps)) if taps else None
        slots.append(slot)
        states.append(drafter.open(text, signals))
    return states, slots


def signals_of(scores: Scores, i: int, commit: Commit, draft: Draft, likely: int = 0) -> Signals | None:
    """Rows of the root and of the nodes that entered the text; of all what was likely, if that is wanted."""
    if not scores.taps and not likely:
        return None
    root = scores.starts[i]
    rows = [root, *(root + 1 + node for node in commit.kept)]
    told = scores.logits[scores.rows(i)].float().topk(min(likely, scores.logits.shape[1]))
    taps = {layer: hidden[rows] for layer, hidden in scores.taps.items()}
    return Signals(commit.start - 1, taps, Likely(draft.tokens.tolist(), draft.parents, told.indices, told.values) if likely else None)


def speculate(target: Target, drafter: Any, texts: Sequence[Text], wish: BudgetOf, after: Callable[[list[Any]], None] | None = None) -> Log:
    """Rounds under `match` until every text is full; texts grow in place."""
    log = Log()
    states, slots = opened(target, drafter, texts)
    while live := [i for i, text in enumerate(texts) if text.room]:
        budgets = []
        for i in live:
            depth, nodes = wish(i, log.rounds)
            depth = min(depth, texts[i].room - 1)
            budgets.append(Budget(depth, max(depth, nodes) if depth else 0, drafter.name, "test"))
        drafts = drafter.propose([states[i] for i in live], budgets, SharedNoise())
        for draft, budget in zip(drafts, budgets, strict=True):
            check_budget(draft, budget, target.vocab_size)
        roots = torch.tensor([texts[i].tokens[-1] for i in live])
        scores = target.score([slots[i] for i in live], roots, drafts)
        ids = [draft.tokens.tolist() for draft in drafts]
        paths = [[(), *(tuple(own[j] for j in path(draft.parents, node)) for node in range(len(own)))]
                 for own, draft in zip(ids, drafts, strict=True)]
        groups = [rows_of(texts[i], own) for i, own in zip(live, paths, strict=True)]
        owners = [texts[i] for i, own in zip(live, paths, strict=True) for _ in own]
        law = laws(scores.logits, groups, scores.starts[:-1])
        choices = _choices(owners, law, [each for own in paths for each in own])
        commits = []
        for row, (i, draft, own) in enumerate(zip(live, drafts, ids, strict=True)):
            start, stop = scores.starts[row], scores.starts[row] + 1 + len(own)
            dead = [at - start - 1 for at in law.dead if start < at < stop]
            verdict = short_of(match(draft.parents, own, choices[start:stop]), own, dead)
            new = [*(own[node] for node in verdict.accepted), verdict.next_token]
            end = next((at for at, token in enumerate(new) if token in texts[i].end_ids), len(new) - 1)
            new, kept = new[:end + 1], verdict.accepted[:end + 1]
            target.rewind(slots[i], kept if len(kept) < len(new) else kept[:-1])
            commits.append(Commit(len(texts[i].tokens), tuple(new), ("accepted",) * len(new), kept))
            texts[i].tokens += new
            log.drafts.append(draft)
            log.verdicts.append(verdict)
            log.accepted += len(kept)
        likely = drafter.needs.likely
        signals = [signals_of(scores, row, commit, draft, likely) for row, (commit, draft) in enumerate(zip(commits, drafts, strict=True))]
        drafter.observe([states[i] for i in live], commits, signals)
        log.rounds += 1
        if after:
            after(states)
    for state in states:
        drafter.close(state)
    for slot in slots:
        target.close(slot)
    return log
