"""The contract of every drafter: whatever it proposes, the text is plain decoding's; its budget binds it; it may be
abandoned at any moment. A new drafter joins with one line in DRAFTERS below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from contract.block_heads import BLOCK_HEADS
from contract.chains import CHAINS
from contract.eagle_heads import EAGLE_HEADS
from contract.foreign import FOREIGN
from contract.mtp_heads import MTP_HEADS
from contract.table_rounds import SharedNoise, Text, check_budget, chosen, opened, plain, rows_of, speculate
from contract.vector_heads import CONTRACT as VECTOR_HEADS

from draftproof.core.probs import distribution
from draftproof.core.tree import depths, path
from draftproof.drafters.base import Needs, Ranking, pick
from draftproof.drafters.chain import ChainDrafter
from draftproof.drafters.fixed import AlwaysWrong, NoDrafter, Oracle
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.errors import CacheFull
from draftproof.models.fake import TableTarget
from draftproof.types import Budget, Commit, Sampling, Signals

V = 13
END = 5
NextToken = Callable[[Sequence[int]], int]

DRAFTERS: dict[str, Callable[[TableTarget, NextToken], Any]] = {
    "none": lambda target, truth: NoDrafter(),
    "ngram": lambda target, truth: NgramDrafter(),
    "ngram-1-3": lambda target, truth: NgramDrafter(1, 3),
    "model-itself": lambda target, truth: ModelDrafter(target, V),
    "model-other": lambda target, truth: ModelDrafter(TableTarget(V, order=1, seed=9), V, prefill_chunk=3),
    "model-padded": lambda target, truth: ModelDrafter(TableTarget(V + 3, order=1, seed=9), V),
    "model-smaller": lambda target, truth: ModelDrafter(TableTarget(V - 4, order=1, seed=9), V),
    "model-short-context": lambda target, truth: ModelDrafter(TableTarget(V, order=1, seed=9, context=20), V),
    "always-wrong": lambda target, truth: AlwaysWrong(V, truth),
    "junk": lambda target, truth: AlwaysWrong(V),
    "oracle": lambda target, truth: Oracle(truth),
    "oracle-decoys": lambda target, truth: Oracle(truth, decoys=2),
    "oracle-often-wrong": lambda target, truth: Oracle(truth, wrong_at=lambda position: position % 3 == 0),
    **CHAINS,
    **VECTOR_HEADS,
    **BLOCK_HEADS,
    **MTP_HEADS,
    **EAGLE_HEADS,
    **FOREIGN,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cold-filtered": {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    "bias-and-bans": {"temperature": 1.0, "logit_bias": {3: 2.0, 7: -4.0, 12: 1.0}, "bad_word_ids": ((4, 2), (1,))},
    "dead-end": {"temperature": 1.0, "logit_bias": {11: -1.0}, "bad_word_ids": tuple((11, token) for token in range(V))},
    "greedy-dead-end": {"temperature": 0.0, "logit_bias": {3: -1.0}, "bad_word_ids": tuple((3, token) for token in range(V))},
    "ends": {"temperature": 1.0, "min_tokens": 10},
}

# Options whose texts are drafted in one batch: every text's budgets are those that it has among its own four.
TOGETHER = ("greedy", "sampled", "cold-filtered min-p ends penalties greedy-penalties bias-and-bans dead-end greedy-dead-end")

SHAPES: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "chain": lambda i, round_: ((0, 1, 3, 6)[(i + round_) % 4],) * 2,
    "tree": lambda i, round_: ((0, 1, 3, 6)[(i + round_) % 4], (0, 5, 7, 20)[(i + round_) % 4]),
}


def table() -> TableTarget:
    return TableTarget(V, order=2, seed=1)


def make_texts(options: dict[str, Any], count: int = 4, max_tokens: int = 20) -> list[Text]:
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [6], [4, 4, 4, 4, 0], [7, 8, 9, 10, 11, 12, 7, 8]]
    ends = frozenset({END}) if "min_tokens" in options else frozenset()
    sampling = Sampling(**{"top_p": 1.0, "max_tokens": max_tokens, **options})
    return [Text.of(prompts[i % 4], sampling, seed=11 + i, id=f"s{i}", end_ids=ends) for i in range(count)]


@cache
def plain_texts(options: str) -> list[list[int]]:
    target = table()
    return [plain(target, text) for text in make_texts(OPTIONS[options])]


def truth_of(texts: Sequence[Sequence[int]]) -> NextToken:
    """What the target will choose after a beginning of one of these texts; 0 after anything else."""
    known = {tuple(text[:n]): text[n] for text in texts for n in range(1, len(text))}
    return lambda text: known.get(tuple(text), 0)


def together(name: str) -> Sequence[str]:
    """Options that are drafted together; each alone if the drafter knows a text by how it begins, which is the same under all of them."""
    return tuple(OPTIONS) if "oracle" in name or "wrong" in name else TOGETHER


def parts_of(drafter: Any) -> list[Any]:
    """The drafters of a chain, or the drafter itself."""
    return [one for part in drafter.parts for one in parts_of(part)] if isinstance(drafter, ChainDrafter) else [drafter]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "options"), [(name, options) for name in DRAFTERS for options in together(name)])
def test_the_text_is_plain_decodings(name: str, options: str, shape: str) -> None:
    target, texts, expected = table(), list[Text](), list[list[int]]()
    for one in options.split():
        texts += [replace(text, id=f"{one} {text.id}") for text in make_texts(OPTIONS[one])]
        expected += plain_texts(one)
    drafter = DRAFTERS[name](target, truth_of(expected))
    wish = SHAPES[shape] if drafter.needs.tree else SHAPES["chain"]
    speculate(target, drafter, texts, wish)
    assert [text.tokens for text in texts] == expected
    models = [part.lm for part in parts_of(drafter) if isinstance(part, ModelDrafter)]
    assert not target.open_slots and not any(getattr(lm, "lm", lm).open_slots for lm in models)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_batch_of_one_proposes_what_a_batch_of_four_does(name: str) -> None:
    target, texts = table(), make_texts(OPTIONS["sampled"])
    drafter = DRAFTERS[name](target, truth_of([plain(target, text) for text in texts]))
    budgets = [Budget(d, n, name, "") for d, n in ((4, 4), (0, 0), (2, 6), (5, 9))]
    together = drafter.propose(opened(target, drafter, texts)[0], budgets, SharedNoise())
    alone = [drafter.propose(opened(target, drafter, [text])[0], [budget], SharedNoise())[0]
             for text, budget in zip(texts, budgets, strict=True)]
    assert [(d.tokens.tolist(), d.parents, d.reason) for d in together] == [(d.tokens.tolist(), d.parents, d.reason) for d in alone]
    assert not len(together[1])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_tree_does_not_grow_by_what_others_may_have(name: str) -> None:
    """Beside a text whose budget is larger; many texts, as the best guesses are mostly the same."""
    target, sampling = table(), Sampling(top_p=1.0, max_tokens=20)
    texts = [Text.of([1, 2, seed % V, 3, seed // V], sampling, seed=seed, id=f"a{seed}") for seed in range(60)]
    drafter, texts = DRAFTERS[name](target, lambda _: 0), [*texts, Text.of([4, 5, 6], sampling, seed=7, id="b")]
    found = []
    for nodes in (5, 14):
        budgets = [*[Budget(2, 5, name, "")] * 60, Budget(2, nodes, name, "")]
        drafts = drafter.propose(opened(target, drafter, texts)[0], budgets, SharedNoise())
        found.append([(draft.tokens.tolist(), draft.parents) for draft in drafts[:60]])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_abandoned_draft_leaves_no_trace(name: str) -> None:
    """Proposing twice gives the same draft; closing with a draft out gives the memory back; a late observe is harmless."""
    target, texts = table(), make_texts(OPTIONS["sampled"], count=2)
    drafter = DRAFTERS[name](target, truth_of([plain(target, text) for text in texts]))
    states, _ = opened(target, drafter, texts)
    budgets = [Budget(4, 4, name, ""), Budget(3, 3, name, "")]
    first, second = (drafter.propose(states, budgets, SharedNoise()) for _ in range(2))
    assert [d.tokens.tolist() for d in first] == [d.tokens.tolist() for d in second]
    texts[0].tokens += [0, 3]                       # the text went elsewhere, and nobody told the drafter
    moved = drafter.propose(states, budgets, SharedNoise())
    fresh = drafter.propose([drafter.open(texts[0], None)], budgets[:1], SharedNoise())
    if not name.startswith("oracle") and not drafter.needs.taps:      # without the hidden states of its text a head is silent
        assert moved[0].tokens.tolist() == fresh[0].tokens.tolist()
    drafter.close(states[1])
    drafter.observe(states[1:], [Commit(len(texts[1].tokens), (0,), ("correction",), ())], [None])
    for draft, budget in zip(drafter.propose(states, budgets, SharedNoise()), budgets, strict=True):
        check_budget(draft, budget, V)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_target_as_its_own_drafter_is_always_right(options: str, shape: str) -> None:
    """Only if drafter and target add the same noise at the same position and honour the same options."""
    target, texts = table(), make_texts(OPTIONS[options])
    log = speculate(target, ModelDrafter(target, V), texts, SHAPES[shape])
    for draft, verdict in zip(log.drafts, log.verdicts, strict=True):
        if len(draft):
            assert len(verdict.accepted) == max(depths(draft.parents))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", ["greedy", "sampled"])
def test_always_wrong_is_never_right(options: str, shape: str) -> None:
    target, texts = table(), make_texts(OPTIONS[options])
    truth = truth_of([plain(target, text) for text in texts])
    log = speculate(target, AlwaysWrong(V, truth), texts, SHAPES[shape])
    assert log.accepted == 0 and sum(len(d) for d in log.drafts) > 100


def test_always_wrong_fills_the_whole_budget() -> None:
    text = make_texts(OPTIONS["sampled"], count=1)[0]
    drafter = AlwaysWrong(V)
    for depth, nodes in ((1, 12), (3, 3), (3, 30), (6, 20)):
        draft, = drafter.propose([drafter.open(text, None)], [Budget(depth, nodes, "", "")], SharedNoise())
        check_budget(draft, Budget(depth, nodes, "", ""), V)
        assert len(draft) == nodes and max(depths(draft.parents)) == depth


@pytest.mark.parametrize("decoys", [0, 1, 3])
def test_an_oracle_is_right_behind_its_decoys(decoys: int) -> None:
    target, texts = table(), make_texts(OPTIONS["sampled"])
    truth = truth_of([plain(target, text) for text in texts])
    log = speculate(target, Oracle(truth, decoys=decoys), texts, lambda i, round_: (5, 5 * (decoys + 1)))
    for draft, verdict in zip(log.drafts, log.verdicts, strict=True):
        assert len(verdict.accepted) * (decoys + 1) == len(draft)
        assert all((node + 1) % (decoys + 1) == 0 for node in verdict.accepted), "the right child stands last"


def test_an_oracle_is_wrong_where_it_should_be() -> None:
    target, (text,) = table(), make_texts(OPTIONS["greedy"], count=1)
    truth, start = truth_of([plain(target, text)]), len(text.tokens)
    log = speculate(target, Oracle(truth, wrong_at=lambda position: position == start + 2), [text], lambda i, round_: (5, 5))
    assert len(log.verdicts[0].accepted) == 2 and log.verdicts[0].role == "correction"


class Listener(Oracle):
    """Reads hidden states and keeps them all."""

    needs = Needs(taps=(1, 6), tree=True)

    def open(self, seq: Any, signals: Signals | None) -> Any:
        state = super().open(seq, signals)
        self.heard = {**getattr(self, "heard", {}), seq.id: [] if signals is None else [signals]}
        return state

    def observe(self, states: Sequence[Any], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit, more in zip(states, commits, signals, strict=True):
            assert more is not None and more.start == commit.start - 1 and more.taps[1].shape[0] == len(commit.kept) + 1
            self.heard[state.seq.id].append(more)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drafter_with_taps_hears_the_hidden_state_of_every_token_but_the_last(shape: str) -> None:
    target, texts = table(), make_texts(OPTIONS["sampled"])
    drafter = Listener(truth_of([plain(target, text) for text in texts]), wrong_at=lambda position: position % 3 == 0)
    speculate(target, drafter, texts, SHAPES[shape])
    for text in texts:
        expected = torch.stack([target.hidden(text.tokens[:n]) for n in range(1, len(text.tokens))])
        at = 0
        for signals in drafter.heard[text.id]:
            assert set(signals.taps) == {1, 6} and signals.start == at
            at += signals.taps[1].shape[0]
        heard = torch.cat([signals.taps[6] for signals in drafter.heard[text.id]])
        assert torch.equal(heard, expected)


# The draft model


def test_the_draft_cache_follows_the_text() -> None:
    target, texts = table(), make_texts(OPTIONS["penalties"])
    lm = TableTarget(V, order=1, seed=9)

    def check(states: list[Any]) -> None:
        for state in states:
            text = state.seq.tokens
            assert state.slot.length <= len(text) - 1 and state.slot.tokens == text[:state.slot.length]

    log = speculate(target, ModelDrafter(lm, V), texts, SHAPES["tree"], after=check)
    assert 0 < log.accepted


class Counting(TableTarget):
    """Notes how many tokens each pass fed to each slot; fails at the passes named."""

    def __init__(self, *args: Any, fail_at: Sequence[int] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.passes: list[list[int]] = []
        self.fail_at = fail_at

    def extend(self, slots: Any, tokens: Any) -> Any:
        self.passes.append([int(t.shape[0]) for t in tokens])
        scores = super().extend(slots, tokens)
        if len(self.passes) - 1 in self.fail_at:
            raise RuntimeError("the device went away")
        return scores


def test_one_pass_per_level_for_the_whole_batch_and_a_prompt_in_chunks() -> None:
    lm = Counting(V, order=1, seed=9)
    drafter = ModelDrafter(lm, V, prefill_chunk=4)
    texts = [Text.of(range(10), Sampling(temperature=1.0, top_p=1.0)), Text.of([1, 2], Sampling(temperature=1.0, top_p=1.0))]
    states = [drafter.open(text, None) for text in texts]
    drafter.propose(states, [Budget(3, 3, "", ""), Budget(2, 2, "", "")], SharedNoise())
    assert lm.passes == [[4], [4], [2, 2], [1, 1], [1]]
    lm.passes.clear()
    guess = states[0].guess.tolist()
    texts[0].tokens += [*guess, 0]
    drafter.observe(states[:1], [Commit(10, (*guess, 0), ("accepted",) * 3 + ("bonus",), (0, 1, 2))], [None])
    drafter.propose(states[:1], [Budget(1, 1, "", "")], SharedNoise())
    assert lm.passes == [[2]], "after full acceptance only the last guess and the bonus are missing"


@pytest.mark.parametrize("fail_at", [0, 1, 2, 3])
def test_a_pass_that_fails_leaves_a_good_slot(fail_at: int) -> None:
    lm = Counting(V, order=1, seed=9, fail_at=[fail_at])
    drafter, fresh = ModelDrafter(lm, V, prefill_chunk=4), ModelDrafter(TableTarget(V, order=1, seed=9), V)
    texts = [Text.of([1, 2, 3, 4, 5, 6], Sampling(temperature=1.0, top_p=1.0)), Text.of([1, 2], Sampling(temperature=1.0, top_p=1.0))]
    states, budgets = [drafter.open(text, None) for text in texts], [Budget(3, 3, "", ""), Budget(2, 2, "", "")]
    with pytest.raises(RuntimeError, match="device"):
        drafter.propose(states, budgets, SharedNoise())
    assert all(s.slot.tokens == t.tokens[:s.slot.length] and s.slot.length < len(t.tokens) for s, t in zip(states, texts, strict=True))
    again = drafter.propose(states, budgets, SharedNoise())
    wanted = fresh.propose([fresh.open(text, None) for text in texts], budgets, SharedNoise())
    assert [d.tokens.tolist() for d in again] == [d.tokens.tolist() for d in wanted]


def test_the_context_and_the_vocabulary_of_the_drafter_end_its_guesses() -> None:
    greedy = Sampling(temperature=0.0, top_p=1.0)
    drafter = ModelDrafter(TableTarget(8, context=6), V)
    near, over, foreign = Text.of([1] * 5, greedy), Text.of([1] * 7, greedy), Text.of([1, 10], greedy)
    drafts = drafter.propose([drafter.open(t, None) for t in (near, over, foreign)], [Budget(4, 4, "", "")] * 3, SharedNoise())
    assert [len(d) for d in drafts] == [2, 0, 0]
    assert "context ends at 6" in drafts[0].reason and "context of 6" in drafts[1].reason and "token 10" in drafts[2].reason
    assert len(drafter.lm.open_slots) == 1, "what can never draft again holds no memory"      # type: ignore[attr-defined]


class Narrow(TableTarget):
    """Has room for so many slots."""

    slots_left = 1

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> Any:
        if len(self.open_slots) >= self.slots_left:
            raise CacheFull("no pages")
        return super().open(tokens, tenant, room)

    def fits(self, tokens: int) -> bool:
        return len(self.open_slots) < self.slots_left


def test_without_room_the_drafter_is_silent_until_there_is_some() -> None:
    drafter = ModelDrafter(Narrow(V), V)
    texts = make_texts(OPTIONS["greedy"], count=2)
    first, second = (drafter.open(text, None) for text in texts)
    draft, = drafter.propose([second], [Budget(2, 2, "", "")], SharedNoise())
    assert not len(draft) and "no room" in draft.reason
    drafter.close(first)
    draft, = drafter.propose([second], [Budget(2, 2, "", "")], SharedNoise())
    assert len(draft) == 2 and not draft.reason


def test_a_draft_stops_at_an_end_token() -> None:
    sampling = Sampling(temperature=0.0, top_p=1.0, logit_bias={END: 100.0})
    drafter = ModelDrafter(TableTarget(V), V)
    text = Text.of([1], sampling, end_ids=frozenset({END}))
    draft, = drafter.propose([drafter.open(text, None)], [Budget(4, 4, "", "")], SharedNoise())
    assert draft.tokens.tolist() == [END] and "ends the text" in draft.reason


def test_the_score_is_the_perturbed_margin() -> None:
    lm, text = TableTarget(V, order=1, seed=9), make_texts(OPTIONS["sampled"], count=1)[0]
    drafter = ModelDrafter(lm, V)
    for nodes in (2, 6):
        draft, = drafter.propose([drafter.open(text, None)], [Budget(2, nodes, "", "")], SharedNoise())
        assert draft.score is not None
        for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents, strict=True)):
            above = [draft.tokens.tolist()[i] for i in path(draft.parents, parent)] if parent >= 0 else []
            logq = distribution(lm.law(text.tokens + above)[None], [rows_of(text, [above])])
            height = (logq + SharedNoise()([text], [len(text.tokens) + len(above)], None, V))[0]
            others = height.clone()
            others[token] = -torch.inf
            assert float(draft.score[node]) == pytest.approx(float(height[token] - others.max()), abs=1e-4)


def test_a_tree_keeps_the_chain_and_catches_more() -> None:
    caught = {}
    for shape, nodes in (("chain", 4), ("tree", 12)):
        target, texts = table(), make_texts(OPTIONS["sampled"], count=4, max_tokens=120)
        log = speculate(target, ModelDrafter(TableTarget(V, order=1, seed=9), V), texts, lambda i, round_, n=nodes: (4, n))
        caught[shape] = log.accepted / len(log.verdicts)
    assert caught["tree"] > caught["chain"] + 0.3


# Law: what `ratio` and `block` are told


@pytest.mark.parametrize("nodes", [3, 8])
def test_the_law_is_what_the_draft_was_drawn_from(nodes: int) -> None:
    lm = TableTarget(V, order=1, seed=9)
    texts = make_texts({"temperature": 0.8, "top_k": 9, "repetition_penalty": 1.2}) + make_texts({"temperature": 0.0}, count=1)
    drafter, noise = ModelDrafter(lm, V), SharedNoise(keep_law=True)
    drafts = drafter.propose([drafter.open(text, None) for text in texts], [Budget(3, nodes, "", "")] * 5, noise)
    assert drafts[-1].law is None, "at temperature 0 a draft is a point mass"
    for text, draft in zip(texts[:-1], drafts, strict=False):
        assert draft.law is not None and draft.law.logq.shape == (3, V) and draft.law.ids is None
        for node, row in enumerate(draft.law.row):
            above = [draft.tokens.tolist()[i] for i in path(draft.parents, node)][:-1]
            expected = distribution(lm.law(text.tokens + above)[None], [rows_of(text, [above])])[0]
            assert torch.allclose(draft.law.logq[row].double(), expected.double(), atol=1e-6)
        assert torch.allclose(draft.law.logq.exp().sum(-1), torch.ones(3, dtype=draft.law.logq.dtype), atol=1e-5)
        widths = [draft.parents.count(parent) for parent in dict.fromkeys(draft.parents)]
        assert widths == ([1, 1, 1] if nodes == 3 else [3, 3, 2]), "siblings are fixed before the draw, and even"


def test_drafts_under_a_law_are_drawn_from_it() -> None:
    """First children over 4,000 seeds against q (χ², 12 degrees of freedom, false alarm 1e-6), and again another at the next attempt."""
    lm = TableTarget(V, order=1, seed=9, sharpness=0.7)
    drafter = ModelDrafter(lm, V)
    counts, changed = torch.zeros(V, dtype=torch.float64), 0
    for start in range(0, 4000, 100):
        texts = [Text.of([3, 1], Sampling(temperature=1.0, top_p=1.0), seed=start + i, id=str(i)) for i in range(100)]
        states = [drafter.open(text, None) for text in texts]
        first, again = (drafter.propose(states, [Budget(1, 1, "", "")] * 100, SharedNoise(True, attempt)) for attempt in (0, 1))
        for one, two in zip(first, again, strict=True):
            counts[one.tokens[0]] += 1
            changed += int(one.tokens[0] != two.tokens[0])
    expected = lm.law([3, 1]).exp() * 4000
    assert float(((counts - expected) ** 2 / expected).sum()) < 53.0
    assert changed > 2000


# n-grams


def brute(text: Sequence[int], low: int, high: int, depth: int) -> list[int]:
    """The definition, by search: newest earlier occurrence of the longest suffix, copied on over its own guesses, for twice
    as many tokens as agree."""
    for n in range(high, low - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) > n and list(text[end - n:end]) == list(text[-n:]):
                grown, agree = list(text), n
                while agree < end and text[end - 1 - agree] == text[-1 - agree]:
                    agree += 1
                for i in range(min(depth, 2 * agree)):
                    grown.append(grown[end + i])
                return grown[len(text):]
    return []


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 4), (3, 3), (1, 6)])
def test_ngram_finds_what_a_search_finds(low: int, high: int) -> None:
    generator = torch.Generator().manual_seed(low * 10 + high)
    tokens = torch.randint(0, 4, (300,), generator=generator).tolist()
    text = Text.of(tokens[:1], Sampling(temperature=0.0, top_p=1.0))
    drafter = NgramDrafter(low, high)
    state, at, found = drafter.open(text, None), 1, 0
    while at < 300:
        depth = 1 + at % 6
        draft, = drafter.propose([state], [Budget(depth, depth, "", "")], SharedNoise())
        assert draft.tokens.tolist() == brute(text.tokens, low, high, depth)
        assert (len(draft) < depth) == bool(draft.reason)
        found += bool(len(draft))
        at += 1 + at % 3
        text.tokens += tokens[len(text.tokens):at]
    assert found > 50


def test_ngram_goes_on_over_its_own_guesses() -> None:
    text = Text.of([9, 1, 2, 3, 1, 2, 3, 1, 2], Sampling(temperature=0.0, top_p=1.0))
    drafter = NgramDrafter(2, 4)
    draft, = drafter.propose([drafter.open(text, None)], [Budget(12, 12, "", "")], SharedNoise())
    assert draft.tokens.tolist() == [3, 1, 2] * 3 + [3] and draft.reason == "agreement of 5, so 10 copied"
    assert draft.score is not None and draft.score.tolist() == [5.0] * 10


@pytest.mark.parametrize("seed", range(40))
def test_ngrams_chain_is_the_first_branch_of_its_tree(seed: int) -> None:
    """The short way for a chain against the way of trees."""
    generator = torch.Generator().manual_seed(seed)
    text = Text.of(torch.randint(0, 3, (2 + seed,), generator=generator).tolist(), Sampling(temperature=0.0, top_p=1.0))
    depth, drafter = 1 + seed % 6, NgramDrafter(1 + seed % 2, 4)
    chain, tree = (drafter.guess(drafter.start(text), Budget(depth, nodes, "", "")) for nodes in (depth, depth + 3))
    count = len(chain)
    assert chain.is_chain and chain.parents == tree.parents[:count] and bool(count) == bool(len(tree)) and chain.reason == tree.reason
    assert chain.tokens.tolist() == tree.tokens[:count].tolist() == drafter.chain(drafter.start(text), depth)
    if chain.score is not None and tree.score is not None:
        assert torch.equal(chain.score, tree.score[:count])


def test_ngram_tree_merges_what_continuations_share() -> None:
    text = Text.of([1, 2, 7, 8, 0, 1, 2, 7, 9, 0, 1, 2, 5, 6, 0, 1, 2], Sampling(temperature=0.0, top_p=1.0))
    drafter = NgramDrafter(2, 2)
    draft, = drafter.propose([drafter.open(text, None)], [Budget(2, 6, "", "")], SharedNoise())
    assert draft.tokens.tolist() == [5, 6, 7, 9, 8] and draft.parents == (-1, 0, -1, 2, 2)
    draft, = drafter.propose([drafter.open(text, None)], [Budget(2, 3, "", "")], SharedNoise())
    assert draft.tokens.tolist() == [5, 6, 7]


# pick


def test_pick_orders_by_log_q_and_noise_and_agrees_with_the_targets_choice() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    for options in OPTIONS.values():
        texts = make_texts(options, count=3)
        groups = [replace(rows_of(text, [()]), sampling=Ranking(text).sampling) for text in texts]
        picks = pick(logits, groups, texts, [len(t.tokens) for t in texts], SharedNoise(), 3)
        assert picks.tokens[:, 0].tolist() == [chosen(t, logits[i:i + 1], [()])[0] for i, t in enumerate(texts)]
        assert bool((picks.values[:, :-1] >= picks.values[:, 1:]).all()) and picks.logq is None
