"""Paths behind which the options leave no token: guesses may lead there and change nothing; a text that goes there ends as plain
decoding's does, with its tokens and its error. (The parity tests have options of this kind, too.)"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from engine.engine_support import DEAD, LENGTH, check_counts, drafters, full, nothing_after, table
from scipy.stats import chi2

from draftproof import Completion, Engine, EngineConfig, Sampling
from draftproof.drafters.model import ModelDrafter, ModelState
from draftproof.models.fake import TableTarget
from draftproof.types import Rule, SequenceView, Signals

SAFE, LEADS_THERE = [5, 6, 7], [0, 1]           # behind the one plain texts pass the dead end by, behind the other they do not
NAMES = ("ngram", "model", "wrong", "oracle", "lost")
SHAPES: list[tuple[Rule, int | None]] = [("match", None), ("match", 12), ("ratio", None), ("ratio", 9), ("block", None),
                                         ("lossy-typical", None), ("lossy-typical", 12)]


def wish(temperature: float) -> Sampling:
    return Sampling(temperature=temperature, bad_word_ids=nothing_after(DEAD), seed=17, max_tokens=LENGTH, logprobs=2)


def run(engine: Engine, prompt: list[int], sampling: Sampling) -> Completion:
    """To its end, which may be an error."""
    handle, = engine.submit(prompt, sampling)
    while not handle.done:
        engine.step()
    return handle.completion()


def plain(prompt: list[int], sampling: Sampling) -> Completion:
    with Engine(table()) as engine:
        return run(engine, prompt, sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule, tree", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_and_its_error_are_plain_decodings(name: str, rule: Rule, tree: int | None, temperature: float) -> None:
    """Where noise decides in another way than plain decoding's, the drafter stays and only a dead end ends a text."""
    target, sampling = table(), wish(temperature)
    for prompt, finish in ((SAFE, "length"), (LEADS_THERE, "error")):
        want = plain(prompt, sampling)
        assert want.finish_reason == finish and (want.token_ids[-1] == DEAD) == (finish == "error") and len(want.token_ids) > 2
        maker = drafters([prompt + list(want.token_ids)])[name]
        if tree and not maker().needs.tree:
            continue
        for config in (None, full()):
            with Engine(target, maker(), 5, tree=tree, rule=rule, config=config) as engine:
                got = run(engine, prompt, sampling)
                assert engine.speculation.state[0] == "on", engine.speculation.failure
            ended = got.token_ids[-1] == DEAD and len(got.token_ids) < LENGTH
            assert (got.finish_reason == "error") == ended and DEAD not in got.token_ids[:-1]
            if rule == "match" or not temperature:
                assert (got.token_ids, got.finish_reason, got.error) == (want.token_ids, want.finish_reason, want.error)
                assert got.logprobs == want.logprobs
            check_counts(got)
    assert not target.open_slots


def test_a_right_guess_of_the_last_token_is_the_rounds_own_and_nothing_is_likely_behind_it() -> None:
    want = plain(LEADS_THERE, wish(1.0))
    maker = drafters([LEADS_THERE + list(want.token_ids)])["oracle"]
    with Engine(table(), maker(), 6, config=full()) as engine:
        got = run(engine, LEADS_THERE, wish(1.0))
    ends = [e for e in got.trace if e.event == "round_done" and any(n.token == DEAD for n in e.nodes)]
    last = ends[-1]
    at = next(i for i, node in enumerate(last.nodes) if node.token == DEAD)
    assert last.tokens[-1].token == DEAD and last.tokens[-1].role == "bonus" and len(last.tokens) == at + 1
    assert [node.fate for node in last.nodes] == ["accepted"] * at + ["discarded"] * (len(last.nodes) - at)
    assert [node.p for node in last.nodes[at + 1:at + 2]] == [0.0] and last.nodes[at].p is not None and last.nodes[at].p > 0


def test_one_request_in_a_dead_end_costs_the_others_neither_text_nor_drafter() -> None:
    free = Sampling(seed=9, max_tokens=LENGTH)
    with Engine(table()) as engine:
        want = engine.generate(SAFE, free)
    with Engine(table(), ModelDrafter(table(seed=8)), 4) as engine:
        handles = [engine.submit(prompt, sampling)[0] for prompt, sampling in
                   ((LEADS_THERE, wish(1.0)), (SAFE, free), (LEADS_THERE, wish(0.0)), (SAFE, wish(1.0)))]
        while not all(handle.done for handle in handles):
            engine.step()
        found = [handle.completion() for handle in handles]
        assert engine.speculation.state[0] == "on"
    assert [out.finish_reason for out in found] == ["error", "length", "error", "length"]
    assert found[1].token_ids == want.token_ids and found[1].metrics["accepted"] > 0


class Blind(ModelDrafter):
    """Draws as if no word were bad, so that its drafts go on behind dead ends, with a law."""

    def open(self, seq: SequenceView, signals: Signals | None) -> ModelState:
        state = super().open(seq, signals)
        state.ranking.sampling = replace(state.ranking.sampling, bad_word_ids=())
        return state


SAMPLES, FALSE_ALARM, LAST = 2000, 1e-6, 2       # token 2 is the last of its text


@pytest.mark.parametrize("kind", [ModelDrafter, Blind])
@pytest.mark.parametrize("rule, tree", [("ratio", None), ("ratio", 5), ("block", None)])
def test_the_joint_rules_keep_the_law_of_texts_that_end_there(rule: Rule, tree: int | None, kind: type[ModelDrafter]) -> None:
    """χ² of whole texts of up to four tokens given the first, as in test_law.py; here they end with `LAST`, too."""
    target, draft = (TableTarget(vocab_size=3, order=1, seed=seed, sharpness=1.0) for seed in (1, 2))
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=4, n=SAMPLES, bad_word_ids=tuple((LAST, b) for b in range(3)))
    config = EngineConfig(trace="none", max_batch=4, max_waiting=SAMPLES, max_samples=SAMPLES)
    with Engine(target, kind(draft), 3, tree=tree, rule=rule, config=config) as engine:
        handles = engine.submit([1], sampling)
        for handle in handles:
            while not handle.done:
                engine.step()
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    texts = Counter(handle.completion().token_ids for handle in handles)
    firsts: Counter[int] = Counter()
    for text, count in texts.items():
        firsts[text[0]] += count
    total, cells = 0.0, 0
    for text in {cut(whole) for whole in product(range(3), repeat=4)} - {(LAST,)}:
        expected = firsts[text[0]] * float(sum(target.law([1, *text[:i]])[text[i]] for i in range(1, len(text))).exp())  # type: ignore
        total, cells = total + (texts[text] - expected) ** 2 / expected, cells + 1
    assert set(texts) <= {cut(whole) for whole in product(range(3), repeat=4)}
    assert float(chi2.sf(total, cells - 2)) > FALSE_ALARM


def cut(text: tuple[int, ...]) -> tuple[Any, ...]:
    """The text up to its first `LAST`."""
    return text[:text.index(LAST) + 1] if LAST in text else text
