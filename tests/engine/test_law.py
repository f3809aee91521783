"""The joint rules through the whole engine: the law of the text is the target's, over several rounds with rejections between.

χ² of the joint law of the three tokens after the prefill's, against the enumerated table; seeds are fixed, and a sound
engine fails with probability 1e-6 per test. A total variation of 0.06 has a non-centrality of at least 4 · 0.06² · 12,000 =
173 on 78 degrees of freedom and is caught with a power of 0.999; smaller faults are `tests/core`'s, by enumeration.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from scipy.stats import chi2

from draftproof import Draft, Engine, EngineConfig, Sampling
from draftproof.drafters.base import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.errors import CacheFull
from draftproof.models.fake import TableTarget

SAMPLES, VOCABULARY, FALSE_ALARM = 12_000, 3, 1e-6


def statistic(target: TableTarget, texts: list[tuple[int, ...]]) -> float:
    """χ² p-value of tokens 2–4 of the texts given the table; the first token is one of them too, conditioned on."""
    seen = Counter(texts)
    firsts = Counter(text[0] for text in texts)
    total, cells = 0.0, 0
    for text in product(range(VOCABULARY), repeat=4):
        logp = sum(float(target.law([1, *text[:i]])[text[i]]) for i in range(1, 4))
        expected = firsts[text[0]] * 2.718281828459045**logp
        if expected > 0:
            total += (seen[text] - expected) ** 2 / expected
            cells += 1
    return float(chi2.sf(total, cells - len(firsts)))


def texts(target: TableTarget, drafter: Drafter, rule: str, tree: int | None, depth: int = 2) -> list[tuple[int, ...]]:
    config = EngineConfig(trace="none", max_batch=256, max_waiting=SAMPLES, max_samples=SAMPLES)
    with Engine(target=target, drafter=drafter, depth=depth, tree=tree, rule=rule, config=config) as engine:  # type: ignore[arg-type]
        out = engine.generate([1], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=4, n=SAMPLES))
        assert engine.speculation.state[0] == "on", engine.speculation.failure
        counts = engine.stats()["metrics"]
    assert 0.1 < counts["draft_utilisation"] < 0.95, "rejections and acceptances both happen"
    return [sample.token_ids for sample in out.samples]


@pytest.mark.parametrize(("rule", "tree"), [("ratio", None), ("ratio", 5), ("block", None)])
def test_a_sampled_draft_keeps_the_law(rule: str, tree: int | None) -> None:
    target = TableTarget(vocab_size=VOCABULARY, order=1, seed=1, sharpness=1.0)
    drafter = ModelDrafter(TableTarget(vocab_size=VOCABULARY, order=1, seed=2, sharpness=1.0))
    assert statistic(target, texts(target, drafter, rule, tree)) > FALSE_ALARM


class EndsBehind(ModelDrafter):
    """Ends a draft behind a token 2 that comes first, as drafts end behind a token that ends the text."""

    def propose(self, states, budgets, noise):  # type: ignore[no-untyped-def]
        return [self.cut(draft) for draft in super().propose(states, budgets, noise)]

    def cut(self, draft: Draft) -> Draft:
        kept = draft.parents.count(-1)
        if not len(draft) or int(draft.tokens[0]) != 2:
            return draft
        law = None if draft.law is None else replace(draft.law, row=draft.law.row[:kept])
        return Draft(draft.tokens[:kept], draft.parents[:kept], law=law, drafter=draft.drafter)


class Tight(TableTarget):
    """Has room for a tree of one level, or for a chain."""

    def score(self, slots, roots, drafts):  # type: ignore[no-untyped-def]
        if any(not draft.is_chain and max(draft.parents) >= 0 for draft in drafts):
            raise CacheFull("no page left")
        return super().score(slots, roots, drafts)


def test_a_tree_without_room_keeps_the_law() -> None:
    """Whether there is room depends on what was drawn, so a draft may not be dropped for it: its first line stays."""
    target = Tight(vocab_size=VOCABULARY, order=1, seed=1, sharpness=1.0)
    drafter = EndsBehind(TableTarget(vocab_size=VOCABULARY, order=1, seed=2, sharpness=1.0))
    with Engine(target=target, drafter=drafter, depth=2, tree=4, rule="ratio", config=EngineConfig(trace="none")) as engine:
        found = [engine.generate([1], Sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=4)).token_ids for seed in range(2000)]
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    assert statistic(target, found) > FALSE_ALARM


def test_the_statistic_can_fail() -> None:
    target = TableTarget(vocab_size=VOCABULARY, order=1, seed=1, sharpness=1.0)
    other = TableTarget(vocab_size=VOCABULARY, order=1, seed=2, sharpness=1.0)
    config = EngineConfig(trace="none", max_batch=64, max_waiting=SAMPLES, max_samples=SAMPLES)
    with Engine(target=other, config=config) as engine:
        out = engine.generate([1], Sampling(seed=3, max_tokens=4, n=2000))
    assert statistic(target, [sample.token_ids for sample in out.samples]) < FALSE_ALARM


def test_no_noise_is_judged_twice() -> None:
    """A position that is drafted again gets another coin and another draft noise: the attempt is part of every key."""
    target = TableTarget(vocab_size=VOCABULARY, order=1, seed=1, sharpness=1.0)
    drafter = ModelDrafter(TableTarget(vocab_size=VOCABULARY, order=1, seed=2, sharpness=1.0))
    with Engine(target=target, drafter=drafter, depth=4, rule="block", config=EngineConfig(trace="full")) as engine:
        out = engine.generate([1], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=80))
    coins: dict[int, list[float | None]] = {}
    for event in out.trace:
        if event.event == "round_done":
            for level, node in enumerate(event.nodes):
                coins.setdefault(event.position + level, []).append(node.coin)
    assert max(map(len, coins.values())) >= 3, "some position is drafted three times"
    every = [coin for thrown in coins.values() for coin in thrown]
    assert None not in every and len(set(every)) == len(every)


def test_point_masses_keep_the_law() -> None:
    target = TableTarget(vocab_size=VOCABULARY, order=1, seed=1, sharpness=1.0)
    assert statistic(target, texts(target, NgramDrafter(1, 2), "block", None)) > FALSE_ALARM
