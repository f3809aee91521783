"""Chains of drafters: who is asked, whose guess is used, how two become one tree, and what stays exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, check_budget, plain, speculate
from engine.test_law import FALSE_ALARM, VOCABULARY, statistic, texts

from draftproof import Engine, EngineConfig, Sampling
from draftproof.core.tree import path
from draftproof.drafters.base import Needs, PerSequence
from draftproof.drafters.chain import AGAIN, TRIALS, ChainDrafter, chained
from draftproof.drafters.fixed import AlwaysWrong, NoDrafter, Oracle, TextState
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.setup import draft_bytes
from draftproof.models.fake import TableTarget
from draftproof.types import Budget, Commit, Draft, SequenceView

V = 13
SAMPLED = Sampling(temperature=1.0, top_p=1.0, max_tokens=300)
Guess = Callable[[Sequence[int], Budget], Draft]


class Scripted(PerSequence[TextState]):
    """Says what it is told to, and notes when it was asked."""

    def __init__(self, name: str, guess: Guess, **needs: Any) -> None:
        self.name, self.script, self.needs = name, guess, Needs(**{"tree": True, **needs})      # type: ignore[misc]
        self.asked: list[tuple[int, Budget]] = []
        self.closed = 0

    def start(self, seq: SequenceView) -> TextState:
        return TextState(seq)

    def guess(self, state: TextState, budget: Budget) -> Draft:
        self.asked.append((len(state.seq.tokens), budget))
        return self.script(state.seq.tokens, budget)

    def leave(self, state: TextState) -> None:
        self.closed += 1


def says(name: str, *tokens: int, parents: tuple[int, ...] | None = None, score: float = 0.5) -> Scripted:
    ids = torch.tensor(tokens, dtype=torch.int64)
    shape = tuple(range(-1, len(tokens) - 1)) if parents is None else parents
    return Scripted(name, lambda text, budget: Draft(ids, shape, score=torch.full((len(tokens),), score), drafter=name))


def ask(drafter: Any, depth: int, nodes: int, text: Text | None = None, noise: SharedNoise | None = None) -> Draft:
    state = drafter.open(text or Text.of([1, 2, 3], SAMPLED), None)
    draft, = drafter.propose([state], [Budget(depth, nodes, "", "")], noise or SharedNoise())
    return draft


def tokens_of(draft: Draft) -> list[int]:
    return draft.tokens.tolist()


# Chains


def test_the_second_is_asked_where_the_first_has_nothing() -> None:
    first, second = Scripted("a", lambda text, budget: Draft.empty("a", "nothing here")), says("b", 4, 5)
    draft = ask(ChainDrafter(first, second), 2, 2)
    assert tokens_of(draft) == [4, 5] and draft.drafter == "b"
    first, second = says("a", 6), says("b", 4)
    draft = ask(ChainDrafter(first, second), 2, 2)
    assert tokens_of(draft) == [6] and draft.drafter == "a" and not second.asked


def test_where_both_have_nothing_both_reasons_are_given() -> None:
    empty = [Scripted(name, lambda text, budget, name=name: Draft.empty(name, f"{name} is silent")) for name in "ab"]
    assert ask(chained(empty), 2, 2).reason == ask(chained(empty), 2, 6).reason == "a: a is silent; b: b is silent"


def counted(drafter: Any, rounds_depth: int = 3) -> tuple[dict[str, int], float]:
    """Rounds per drafter over a text of 300 sampled tokens, and tokens that stood per round."""
    target, text = TableTarget(V, order=2, seed=1), Text.of([1, 2, 3], SAMPLED, seed=7)
    log = speculate(target, drafter(_truth(target)), [text], lambda i, round_: (rounds_depth, rounds_depth))
    used = [draft.drafter for draft in log.drafts if len(draft)]
    return {name: used.count(name) for name in set(used)}, log.accepted / log.rounds


def _truth(target: TableTarget) -> Callable[[Sequence[int]], int]:
    whole = plain(target, Text.of([1, 2, 3], SAMPLED, seed=7))
    return lambda text: whole[len(text)] if len(text) < len(whole) and list(text) == whole[:len(text)] else 0


def test_what_is_always_wrong_is_seldom_used_whichever_place_it_has() -> None:
    used, stood = counted(lambda truth: ChainDrafter(AlwaysWrong(V, truth), Oracle(truth)))
    assert used["oracle"] > 10 * used["always-wrong"] and stood > 2.6
    used, stood = counted(lambda truth: ChainDrafter(Oracle(truth), AlwaysWrong(V, truth)))
    assert used["oracle"] > 10 * used["always-wrong"] and stood > 2.5


def test_a_draft_is_not_counted_for_one_who_had_nothing_to_put_in_its_place() -> None:
    chain, text = ChainDrafter(says("a", 5, 6), says("b")), Text.of([1, 2, 3], SAMPLED)
    state = chain.open(text, None)
    for _ in range(8):
        draft, = chain.propose([state], [Budget(2, 2, "", "")], SharedNoise())
        assert tokens_of(draft) == [5, 6] and draft.drafter == "a"
        chain.observe([state], [Commit(len(text.tokens), (5, 6, 7), ("accepted", "accepted", "bonus"), (0, 1))], [None])
        text.tokens += (5, 6, 7)
    record = chain._in_chains.of(0.5)
    assert record.seen == [TRIALS, 0] and record.brought == [2, 0]


def test_the_worse_is_tried_again_in_case_it_became_better() -> None:
    """The first becomes right after 40 rounds."""
    rounds = []

    def make(truth: Callable[[Sequence[int]], int]) -> ChainDrafter:
        wrong, right, middling = AlwaysWrong(V, truth), Oracle(truth), Oracle(truth, wrong_at=lambda position: position % 2 == 0)
        state = TextState(Text.of([0], SAMPLED))

        def first(text: Sequence[int], budget: Budget) -> Draft:
            rounds.append(len(text))
            state.seq = Text.of(list(text), SAMPLED)
            return Draft(*(lambda d: (d.tokens, d.parents))((wrong if len(rounds) < 40 else right).guess(state, budget)), drafter="late")

        return ChainDrafter(Scripted("late", first), middling)

    used, _ = counted(make)
    assert used["late"] > 20 + 40 / AGAIN


def test_sure_and_unsure_drafts_are_judged_apart() -> None:
    """The first is right where its score is high and wrong where it is low; the second is right one token far."""
    def make(truth: Callable[[Sequence[int]], int]) -> ChainDrafter:
        def first(text: Sequence[int], budget: Budget) -> Draft:
            sure, grown = len(text) % 10 < 5, list(text)
            for _ in range(budget.depth):
                grown.append(truth(grown) if sure else (truth(grown) + 1) % V)
            return Draft.chain(grown[len(text):], score=torch.full((budget.depth,), 0.9 if sure else 0.1), drafter="moody")

        return ChainDrafter(Scripted("moody", first), Scripted("steady", lambda text, budget: Draft.chain([truth(text)], drafter="steady")))

    used, stood = counted(make)
    assert used["moody"] > 30 and used["steady"] > 30 and stood > 1.7


def test_three_in_a_row() -> None:
    parts = [Scripted("a", lambda t, b: Draft.empty("a")), Scripted("b", lambda t, b: Draft.empty("b")), says("c", 9)]
    drafter = chained(parts)
    assert drafter.name == "a+b+c" and ask(drafter, 1, 1).drafter == "c"


# Trees


def test_two_guesses_become_one_tree_that_shares_beginnings() -> None:
    first, second = says("a", 4, 5, 6), says("b", 4, 7, 5, 8, 8, parents=(-1, -1, 0, 0, 1))
    draft = ask(ChainDrafter(first, second), 3, 8)
    assert draft.drafter == "a+b" and draft.score is not None
    check_budget(draft, Budget(3, 8, "", ""), V)
    found = {tuple(tokens_of(draft)[i] for i in path(draft.parents, node)) for node in range(len(draft))}
    assert found == {(4,), (4, 5), (4, 5, 6), (7,), (4, 8), (7, 8)}
    assert tokens_of(draft)[:3] == [4, 5, 6], "the first's come first"


@pytest.mark.parametrize(("depth", "nodes"), [(1, 2), (3, 4), (4, 5), (4, 9), (6, 30)])
def test_the_union_keeps_the_budget_whatever_the_parts_fill(depth: int, nodes: int) -> None:
    junk = [AlwaysWrong(V), AlwaysWrong(V, lambda text: 5), ModelDrafter(TableTarget(V, order=1, seed=9), V)]
    for parts in (junk[:2], junk, junk[::-1]):
        draft = ask(chained(parts), depth, nodes)
        check_budget(draft, Budget(depth, nodes, "", ""), V)
        assert len(draft) == nodes


def test_what_the_first_leaves_over_is_the_seconds() -> None:
    first, second = says("a", 4), Scripted("b", lambda text, budget: Draft.empty("b"))
    ask(ChainDrafter(first, second), 4, 10)
    assert first.asked[0][1].nodes == 10 and second.asked[0][1].nodes == 9
    chain_only = says("c", 4)
    chain_only.needs = Needs()                                  # type: ignore[misc]
    ask(ChainDrafter(says("a", 4), chain_only), 4, 10)
    assert chain_only.asked[0][1].nodes == 4
    full, idle = says("a", 4, 5, 6), says("b", 7)
    assert ask(ChainDrafter(full, idle), 2, 3).drafter == "a" and not idle.asked


@pytest.mark.parametrize(("way", "kept"), [(0, 6), (1, 5), (2, 1), (3, 0)])
def test_the_ways_of_a_tree(way: int, kept: int) -> None:
    first, second = says("a", 1, 2, 3, 4, 5, 6), says("b", 9)
    drafter = ChainDrafter(first, second)
    for record in drafter._in_trees.records:
        record.seen, record.brought = [9.0] * 4, [float(other == way) for other in range(4)]
    draft = ask(drafter, 6, 10)
    assert tokens_of(draft) == [*range(1, kept + 1), 9] and second.asked[0][1].nodes == 10 - kept


@pytest.mark.parametrize(("price", "kept"), [(0.0, 6), (0.3, 0)])
def test_rows_that_bring_nothing_are_left_out_where_they_cost(price: float, kept: int) -> None:
    """The second's node stands in every round, the first's six never do: without prices no way is better than to take them all."""
    first, second = says("a", 1, 2, 3, 4, 5, 6, parents=(-1,) * 6), says("b", 9)
    drafter, text = ChainDrafter(first, second), Text.of([1, 2, 3], SAMPLED)
    state, budget = drafter.open(text, None), Budget(6, 10, "", "", tuple(price * n for n in range(1, 11)) if price else ())
    for _ in range(20):
        draft, = drafter.propose([state], [budget], SharedNoise())
        commit = Commit(len(text.tokens), (9, 0), ("accepted", "bonus"), (tokens_of(draft).index(9),))
        text.tokens += commit.tokens
        drafter.observe([state], [commit], [None])
    assert tokens_of(drafter.propose([state], [budget], SharedNoise())[0]) == [*range(1, kept + 1), 9]


def test_a_union_catches_more_than_either() -> None:
    def stood(*parts: Callable[[], Any]) -> float:
        """On a text that repeats itself enough for both to be worth asking."""
        target, text = TableTarget(V, order=2, seed=1, sharpness=3.0), Text.of([1, 2, 3], SAMPLED, seed=0)
        log = speculate(target, chained([part() for part in parts]), [text], lambda i, round_: (4, 12))
        return log.accepted / log.rounds

    def left() -> ModelDrafter:
        return ModelDrafter(TableTarget(V, order=1, seed=9), V)

    assert stood(left, SuffixDrafter) > max(stood(left), stood(SuffixDrafter))


# Joint rules


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_joint_rule_gets_one_drafters_draft(rule: Any) -> None:
    text = Text.of([1, 2, 3], SAMPLED, rule=rule)
    nodes = 9 if rule == "ratio" else 3
    draft = ask(ChainDrafter(says("a", 4, 5, 6), ModelDrafter(TableTarget(V), V)), 3, nodes, text, SharedNoise(True))
    assert draft.drafter == "a" and draft.law is None
    drawn = ask(ChainDrafter(ModelDrafter(TableTarget(V), V), says("a", 4, 5, 6)), 3, nodes, text, SharedNoise(True))
    assert drawn.drafter == "model" and drawn.law is not None
    greedy = Text.of([1, 2, 3], Sampling(temperature=0.0, top_p=1.0), rule="ratio")
    assert ask(ChainDrafter(says("a", 4, 5, 6), says("b", 7)), 3, 9, greedy).drafter == "a+b", "at temperature 0 every rule is match"


def test_a_draft_that_was_drawn_is_never_put_aside() -> None:
    """However bad the past: to withhold a token after its value was seen would bias the text."""
    drafter = ChainDrafter(ModelDrafter(TableTarget(V, seed=5), V), says("a", 4))
    for record in drafter._in_chains.records:
        record.seen, record.brought = [50.0, 50.0], [0.0, 3.0]
    for seed in range(40):
        text = Text.of([1, 2, 3], SAMPLED, rule="ratio", seed=seed)
        assert ask(drafter, 3, 3, text, SharedNoise(True)).drafter == "model"
    assert ask(drafter, 3, 3, Text.of([1, 2, 3], SAMPLED)).drafter == "a", "under match it may be"


@pytest.mark.parametrize(("rule", "tree"), [("ratio", None), ("ratio", 4), ("block", None)])
def test_a_chain_keeps_the_law(rule: str, tree: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.test_law.SAMPLES", 1500)
    target = TableTarget(vocab_size=VOCABULARY, order=1, seed=1, sharpness=1.0)
    model = ModelDrafter(TableTarget(vocab_size=VOCABULARY, order=1, seed=2, sharpness=1.0))
    assert statistic(target, texts(target, chained([NgramDrafter(2, 2), model, SuffixDrafter()]), rule, tree)) > FALSE_ALARM


# Parts


def test_needs_are_those_of_all_parts() -> None:
    parts = [says("a", 1), says("b", 2), says("c", 3)]
    parts[0].needs, parts[1].needs = Needs(taps=(5, 1), parts=("embed",), context=30), Needs(taps=(1, 2), parts=("output", "embed"), law=True, context=50)  # type: ignore[misc]  # noqa: E501
    assert ChainDrafter(*parts[:2]).needs == Needs(taps=(1, 2, 5), parts=("embed", "output"), law=True, context=50)
    assert chained(parts).needs.context is None and chained(parts).needs.tree


@pytest.mark.parametrize("nodes", [3, 9])
def test_a_part_is_not_asked_beyond_its_context(nodes: int) -> None:
    short, long = says("short", 4, 5), says("long", 6)
    short.needs = Needs(tree=True, context=5)                   # type: ignore[misc]
    drafter = ChainDrafter(short, long)
    ask(drafter, 3, nodes, Text.of([1, 2, 3], SAMPLED))
    assert short.asked[-1][1].depth == 2 and short.asked[-1][1].nodes == max(2, nodes - 1), "a chain's budget stays a chain's"
    assert ask(drafter, 3, nodes, Text.of([1] * 5, SAMPLED)).drafter == "long" and len(short.asked) == 1


def test_every_part_is_closed_and_an_open_that_fails_leaves_nothing() -> None:
    first, second = says("a", 1), says("b", 2)
    drafter = ChainDrafter(first, second)
    drafter.close(drafter.open(Text.of([1], SAMPLED), None))
    assert first.closed == second.closed == 1

    def broken(seq: SequenceView) -> TextState:
        raise RuntimeError("no memory")

    second.start = broken                                       # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        drafter.open(Text.of([1], SAMPLED), None)
    assert first.closed == 2


def test_weights_of_all_parts_count() -> None:
    lm = TableTarget(V)
    assert draft_bytes(chained([SuffixDrafter(), ModelDrafter(lm, V), NoDrafter()])) == lm.facts.weight_bytes > 0


def test_the_trace_says_who_drafted() -> None:
    target = TableTarget(V, order=2, seed=1)
    options = Sampling(temperature=1.0, top_p=1.0, seed=7, max_tokens=80)
    with Engine(target) as engine:
        expected = engine.generate([1, 2, 3], options).token_ids
    for tree, names in ((None, {"ngram", "model"}), (12, {"ngram+model", "model", "ngram"})):
        drafter = ChainDrafter(NgramDrafter(), ModelDrafter(TableTarget(V, order=1, seed=9), V))
        with Engine(target, drafter, depth=4, tree=tree, config=EngineConfig(trace="full")) as engine:
            run = engine.generate([1, 2, 3], options)
        assert run.token_ids == expected and run.speculation["drafter"] == "ngram+model"
        assert {event.drafter for event in run.trace if event.event == "round_done" and event.nodes} == names
