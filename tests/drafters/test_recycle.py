"""`recycle`: which rows it remembers and for whom, that under shared noise they give today's choice, and where guesses end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, count
from typing import Any

import pytest
import torch
from contract.table_rounds import Log, SharedNoise, Text, plain, speculate
from torch import Tensor

from draftproof import Engine, EngineConfig, Sampling
from draftproof.core.tree import path
from draftproof.drafters import recycle
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.recycle import KEPT, LENGTHS, WIDTH, RecycleDrafter, Rows, endings
from draftproof.models.fake import TableTarget
from draftproof.types import Budget, Commit, Draft, Likely, Rule, Signals

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=200)
SMALL = 8           # a vocabulary of which a row is remembered whole
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "hot": {"temperature": 2.0},
    "cold-filtered": {"temperature": 0.6, "top_k": 3, "top_p": 0.9},
    "top-p": {"temperature": 1.2, "top_p": 0.7},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
}


def target(vocab_size: int = SMALL, seed: int = 3) -> TableTarget:
    """What follows depends on two tokens; a row of it is remembered whole, unless the vocabulary is larger."""
    return TableTarget(vocab_size, order=2, seed=seed, sharpness=1.0)


def write(lm: TableTarget, drafter: Any, seeds: Sequence[int], options: dict[str, Any], depth: int = 3, tenant: str = "") -> Log:
    """Texts one after the other, each held to plain decoding."""
    log = Log()
    for seed in seeds:
        text = Text.of([seed % lm.vocab_size, 1], Sampling(**{"top_p": 1.0, "max_tokens": 200, **options}), seed=seed, tenant=tenant)
        expected = plain(lm, text)
        more = speculate(lm, drafter, [text], lambda i, round_: (depth, depth))
        assert text.tokens == expected
        log.drafts += more.drafts
        log.verdicts += more.verdicts
        log.accepted += more.accepted
        log.rounds += more.rounds
    return log


def first_stands(log: Log) -> tuple[int, int]:
    """Of the drafts' first tokens, how many stood, and how many there were."""
    guessed = [bool(verdict.accepted) for draft, verdict in zip(log.drafts, log.verdicts, strict=True) if len(draft)]
    return sum(guessed), len(guessed)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_that_is_known_whole_gives_todays_choice(options: str) -> None:
    """A law of two tokens' making, all of it remembered: under temperature, filters and the noise of the place, guesses are always right;
    copies only sometimes."""
    lm, drafter = target(), RecycleDrafter()
    write(lm, drafter, range(20), OPTIONS[options])
    log = write(lm, drafter, range(20, 24), OPTIONS[options])
    stood, guessed = first_stands(log)
    assert stood == guessed > 50 and log.accepted == sum(map(len, log.drafts))
    if options != "greedy":
        copies, tried = first_stands(write(lm, NgramDrafter(), range(20, 24), OPTIONS[options]))
        assert copies < 0.8 * tried


def test_rows_are_learnt_from_rounds_whose_guesses_were_all_wrong() -> None:
    lm = target()
    texts = [plain(lm, Text.of([seed, 1], GREEDY, seed=seed)) for seed in range(3)]
    truth = {tuple(text[:n]): text[n] for text in texts for n in range(1, len(text))}
    wrong = AlwaysWrong(SMALL, lambda text: truth.get(tuple(text), 0))

    class Misled(RecycleDrafter):
        def propose(self, states: Any, budgets: Any, noise: Any) -> list[Draft]:
            return wrong.propose([wrong.open(state.seq, None) for state in states], budgets, noise) if misled else \
                super().propose(states, budgets, noise)

    misled, drafter = True, Misled()
    log = write(lm, drafter, range(3), {"temperature": 0.0})
    assert log.accepted == 0 and sum(map(len, log.drafts)) > 100
    misled = False
    stood, guessed = first_stands(write(lm, drafter, range(3), {"temperature": 0.0}))
    assert stood == guessed > 100


@pytest.mark.parametrize("vocabulary", [3, KEPT, 40])
def test_the_engine_tells_what_was_likely_behind_every_row(vocabulary: int) -> None:
    lm, heard = target(vocabulary), list[tuple[list[int], Tensor, Tensor]]()

    class Listener(RecycleDrafter):
        asked = False

        def propose(self, *args: Any) -> list[Draft]:
            self.asked = True
            return super().propose(*args)

        def observe(self, states: Any, commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
            for state, commit, signal in zip(states, commits, signals, strict=True):
                assert (signal is not None) == self.asked            # near the end of all texts nobody is
                if signal is None:
                    continue
                likely, before = signal.likely, list(state.seq.tokens[:commit.start])
                assert likely is not None and not signal.taps
                assert len(likely.tokens) == len(likely.logits) == len(likely.nodes) + 1
                assert [likely.nodes[node] for node in commit.kept] == list(commit.tokens[:len(commit.kept)])
                for row, (own, values) in enumerate(zip(likely.tokens, likely.logits, strict=True)):
                    way = path(likely.parents, row - 1) if row else ()
                    heard.append(([*before, *(likely.nodes[node] for node in way)], own, values))
            super().observe(states, commits, signals)
            self.asked = False

    for tree in (None, 9):
        with Engine(lm, Listener(), 3, tree=tree, config=EngineConfig(max_batch=3)) as engine:
            heat = (0.0, 1.0, 0.7)
            engine.generate_batch([[1, 2], [2], [0, 1, 2]], [Sampling(temperature=t, top_p=1.0, seed=5, max_tokens=40) for t in heat])
    assert len(heard) > 200
    for text, tokens, values in heard:
        best = lm.law(text).float().topk(min(KEPT, vocabulary))
        assert tokens.tolist() == best.indices.tolist() and torch.allclose(values, best.values)


def test_nobody_is_told_while_speculation_is_off() -> None:
    class Deaf(RecycleDrafter):
        def observe(self, states: Any, commits: Any, signals: Sequence[Signals | None]) -> None:
            assert not len(signals)

    with Engine(target(), Deaf(), 3) as engine:
        engine.set_speculation(enabled=False)
        assert engine.lanes.likely == 0
        engine.generate([1, 2], Sampling(max_tokens=10))
        engine.set_speculation(enabled=True)
        assert engine.lanes.likely == KEPT


# What is remembered


def add(rows: Rows, tenant: str, text: Sequence[int], start: int, *tokens: int) -> None:
    """Rows that spoke of tokens start, start + 1, … of a text."""
    endings = [tuple(text[max(0, at - LENGTHS[0]):at]) for at in range(start, start + len(tokens))]
    rows.add(tenant, endings, torch.tensor([[token, 9] for token in tokens]), torch.tensor([[0.0, -1.0]] * len(tokens)))


def test_the_oldest_rows_are_forgotten_and_nothing_is_left_of_them() -> None:
    rows = Rows(3)
    add(rows, "a", [1, 2, 3], 1, 5, 6)                  # behind 1; behind 2
    add(rows, "b", [1, 7], 1, 8)
    assert set(rows.of("a")) == {(1,), (1, 2), (2,)} and set(rows.of("b")) == {(1,)}
    assert rows[rows.of("a")[(1,)]][0][0] == 5 and rows[rows.of("b")[(1,)]][0][0] == 8
    add(rows, "b", [1, 7], 1, 4)                        # in the place of a's oldest
    assert set(rows.of("a")) == {(1, 2), (2,)} and rows[rows.of("b")[(1,)]][0][0] == 4
    add(rows, "b", [1, 7, 7], 2, 3)
    assert not rows.of("a") and "a" not in rows._tables
    assert set(rows.of("b")) == {(1,), (1, 7), (7,)}
    add(rows, "b", [1, 2, 3, 4, 5, 6], 1, 1, 2, 3, 4, 5)      # more than fit
    assert {rows[at][0][0] for at in rows.of("b").values()} == {3, 4, 5}
    assert rows[rows.of("b")[(3, 4)]][1][:2] == [0.0, -1.0] and rows[0][1][2] == -float("inf")


def test_memory_is_bounded_and_the_newest_row_of_an_ending_speaks() -> None:
    lm, drafter = target(), RecycleDrafter(rows=30)
    write(lm, drafter, range(5), OPTIONS["sampled"])
    table = drafter.rows.of("")
    assert set(table.values()) <= set(range(30)) and 30 < len(table) <= 30 * len(LENGTHS)


def test_a_tenants_rows_serve_that_tenant_only() -> None:
    lm, drafter = target(), RecycleDrafter()
    write(lm, drafter, range(10), OPTIONS["sampled"], tenant="one")
    for tenant, known in (("one", True), ("two", False)):
        text = Text.of([5, 1], Sampling(temperature=1.0, top_p=1.0), seed=99, tenant=tenant)
        draft, = drafter.propose([drafter.open(text, None)], [Budget(1, 1, "", "")], SharedNoise())
        assert (len(draft) == 1) == known
        assert known or draft.reason == "nothing is known of the last token"


def test_an_interruption_leaves_no_row_that_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Ctrl-C falls: every tenant finds its own rows only, and the next ones are remembered as ever."""
    for at in range(8):
        calls = count()

        def interrupted(before: Sequence[int], at: int = at, calls: Iterator[int] = calls) -> list[tuple[int, ...]]:
            if next(calls) == at:
                raise KeyboardInterrupt
            return endings(tuple(before))

        rows = Rows(2)
        add(rows, "a", [1, 2, 3], 1, 5, 5)
        monkeypatch.setattr(recycle, "endings", interrupted)
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                add(rows, "b", [1, 2, 3], 1, 8, 8)
        monkeypatch.undo()
        for tenant, token in (("a", 5), ("b", 8)):
            assert all(rows[place][0][0] == token for place in rows.of(tenant).values())
        add(rows, "b", [1, 2, 3], 1, 8, 8)
        assert set(rows.of("b")) == {(1,), (1, 2), (2,)} and not rows.of("a")
        add(rows, "a", [1, 2, 3], 1, 5, 5)
        assert not rows.of("b") and {rows[place][0][0] for place in rows.of("a").values()} == {5}


def test_of_rows_that_another_drafter_wants_wider_the_likeliest_are_remembered() -> None:
    rows = Rows(3)
    rows.add("", [(1,)], torch.arange(2 * KEPT)[None], -torch.arange(2.0 * KEPT)[None])
    assert rows[0] == (list(range(KEPT)), [-float(i) for i in range(KEPT)])


# What is guessed


def guess(drafter: RecycleDrafter, text: Sequence[int], budget: Budget, sampling: Sampling = GREEDY, rule: Rule = "match") -> Draft:
    return drafter.propose([drafter.open(Text.of(text, sampling, rule=rule), None)], [budget], SharedNoise())[0]


def test_a_prompt_is_copied_as_ngrams_would() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        text = torch.randint(0, 50, (60,), generator=generator).tolist()
        text += text[20:28]                                      # eight tokens that stood before
        assert guess(RecycleDrafter(), text, Budget(6, 6, "", "")).tokens.tolist() == text[28:34]
        assert guess(RecycleDrafter(), text, Budget(6, 6, "", "")).tokens.tolist() == NgramDrafter().chain(NgramDrafter().start(
            Text.of(text, GREEDY)), 6)


def test_a_tree_offers_what_else_a_row_found_likely_and_the_copy() -> None:
    drafter = RecycleDrafter()
    likely = torch.arange(10, 10 + KEPT)[None], torch.linspace(0, -0.7, KEPT)[None]
    drafter.rows.add("", [(1, 2, 3, 4)], *likely)
    draft = guess(drafter, [1, 2, 3, 4], Budget(1, 20, "", ""))
    assert sorted(draft.tokens.tolist()) == list(range(10, 10 + WIDTH)) and set(draft.parents) == {-1}
    assert draft.tokens[0] == 10 and draft.score is not None and draft.score.tolist() == sorted(draft.score.tolist(), reverse=True)
    assert 7 in guess(drafter, [4, 7, 0, 4], Budget(1, 20, "", "")).tokens.tolist()       # a copy, where one token says the same as a row


def test_the_longest_ending_that_is_known_speaks_and_of_equal_ones_the_newest() -> None:
    drafter = RecycleDrafter()
    for before, token in (((0, 9, 1, 2), 5), ((0, 8, 1, 2), 6)):
        drafter.rows.add("", [before], torch.tensor([[token, 3]]), torch.tensor([[0.0, -5.0]]))
    for text, token in (([0, 9, 1, 2], 5), ([4, 0, 9, 1, 2], 5), ([0, 8, 1, 2], 6), ([7, 7, 1, 2], 6), ([2], 6)):
        assert guess(drafter, text, Budget(1, 1, "", "")).tokens.tolist() == [token]


def test_options_that_judge_by_a_law_get_the_rows_best_and_no_noise() -> None:
    drafter = RecycleDrafter()
    drafter.rows.add("", [(1, 2)], torch.tensor([[3, 4]]), torch.tensor([[0.0, -0.1]]))
    sampling = Sampling(temperature=1.0, top_p=1.0)
    for rule in ("ratio", "block"):
        draft = guess(drafter, [1, 2], Budget(1, 1, "", ""), sampling, rule)
        assert draft.tokens.tolist() == [3] and draft.law is None


def test_where_nothing_stands_no_row_is_paid_for_any_more() -> None:
    """Chances are counted: a target that says anything at all teaches the drafter to be silent, one that repeats itself to go far."""
    prices = tuple(accumulate([0.3] * 8))
    sizes = {}
    for sharpness in (0.0, 30.0):
        lm, drafter, found = TableTarget(200, order=1, seed=1, sharpness=sharpness), RecycleDrafter(), []
        for seed in range(6):
            text = Text.of([seed, 1], Sampling(temperature=1.0, top_p=1.0, max_tokens=300), seed=seed)
            state = drafter.open(text, None)
            while text.room > 9:
                draft, = drafter.propose([state], [Budget(8, 8, "", "", prices)], SharedNoise())
                start, tokens = len(text.tokens), draft.tokens.tolist()
                truth = plain(lm, Text.of(text.tokens, Sampling(temperature=1.0, top_p=1.0, max_tokens=9), seed=seed))[start:]
                kept = next((n for n, (a, b) in enumerate(zip(tokens, truth, strict=False)) if a != b), len(tokens))
                told = torch.stack([lm.law([*text.tokens, *truth[:n]]).float() for n in range(kept + 1)]).topk(KEPT)
                text.tokens += truth[:kept + 1]
                drafter.observe([state], [Commit(start, tuple(truth[:kept + 1]), ("plain",) * (kept + 1), tuple(range(kept)))],
                                [Signals(start - 1, {}, Likely(tokens[:kept], tuple(range(-1, kept - 1)), told.indices, told.values))])
                found.append(len(tokens))
        sizes[sharpness] = sum(found[-40:]) / len(found[-40:])
    assert sizes[0.0] < 0.2 and sizes[30.0] > 4


def test_a_priced_draft_is_a_part_of_the_whole_one() -> None:
    lm, drafter = target(), RecycleDrafter()
    write(lm, drafter, range(10), OPTIONS["sampled"])
    for nodes in (6, 24):
        for seed in range(30, 40):
            text = plain(lm, Text.of([seed % SMALL, 1], Sampling(temperature=1.0, top_p=1.0, max_tokens=20), seed=seed))
            sampling, sizes = Sampling(temperature=1.0, top_p=1.0), []
            whole = guess(drafter, text, Budget(6, nodes, "", ""), sampling)
            for each in (0.0, 0.1, 0.3, 0.6, 1.1):
                draft = guess(drafter, text, Budget(6, nodes, "", "", tuple(accumulate([each] * nodes))), sampling)
                assert draft.tokens.tolist() == whole.tokens[:len(draft)].tolist() and draft.parents == whole.parents[:len(draft)]
                sizes.append(len(draft))
            assert sizes == sorted(sizes, reverse=True) and sizes[0] == len(whole) and sizes[-1] == 0
