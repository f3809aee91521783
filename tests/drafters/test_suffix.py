"""The suffix drafter: what it finds, whom it belongs to, what it forgets, and what it costs in memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.table_rounds import SharedNoise, Text
from safetensors.numpy import save_file

from draftproof import Engine, Sampling
from draftproof.drafters.occurrences import SEPARATOR, Store, TextIndex, tenant_key
from draftproof.drafters.suffix import DOUBT, SuffixDrafter
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.types import Budget, Draft

GREEDY = Sampling(temperature=0.0, top_p=1.0)


def guess(drafter: SuffixDrafter, text: Sequence[int], depth: int, nodes: int = 0, tenant: str = "") -> Draft:
    state = drafter.open(Text.of(text, GREEDY, tenant=tenant), None)
    draft, = drafter.propose([state], [Budget(depth, max(depth, nodes), "", "")], SharedNoise())
    return draft


def noise(seed: int, count: int, vocabulary: int) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# What is found


@pytest.mark.parametrize("vocabulary", [2, 6])
def test_the_index_finds_what_a_search_finds_in_steps_and_at_once(vocabulary: int) -> None:
    text = noise(1, 400, vocabulary)
    steps = TextIndex(5)
    for stop in range(1, 401, 3):
        steps.extend(text[:stop])
        if stop % 30 != 1:
            continue
        whole = TextIndex(5)
        whole.extend(text[:stop])
        for level, gram in enumerate(steps.grams):
            length = 1 << level
            expected = [end for end in range(stop - 1, length - 1, -1) if text[end - length:end] == text[stop - length:stop]]
            assert steps.places(level, gram, 1000) == whole.places(level, gram, 1000) == expected
            assert steps.places(level, gram, 2) == expected[:2]
            assert (level < steps.known(steps.grams)) == bool(expected)


def test_the_store_finds_what_a_search_finds_in_the_texts_of_one_tenant() -> None:
    store, texts = Store(1 << 16, 4), [(seed % 3, noise(seed, 40, 5)) for seed in range(30)]
    for owner, text in texts:
        store.add(text, owner)
    asked = 0
    for seed in range(60):
        tail, owner, index = noise(1000 + seed, 9, 5), seed % 3, TextIndex(4)
        index.extend(tail)
        for level, gram in enumerate(index.grams):
            length = 1 << level
            expected = [tuple(text[end:]) for mine, text in reversed(texts) if mine == owner
                        for end in range(len(text) - 1, length - 1, -1) if text[end - length:end] == tail[-length:]]
            found = store.places(level, gram, owner, array("i", tail), 10_000)
            assert [tuple(store.after(end, 100)) for end in found] == expected
            asked += len(found)
    assert asked > 500


def test_the_longest_agreement_outvotes_shorter_ones() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3, 4, 50, 0, 4, 60, 0, 4, 61, 0, 1, 2, 3, 4]
    draft = guess(drafter, text, 1)
    assert draft.tokens.tolist() == [50] and draft.drafter == "suffix"
    assert draft.score is not None and float(draft.score[0]) == pytest.approx(4 / (4 + DOUBT))


def test_the_most_frequent_continuation_is_guessed_and_the_score_is_its_share() -> None:
    drafter = SuffixDrafter()
    for follower in (70, 71, 71, 72):
        drafter.learn([8, 9, follower, 5])
    draft = guess(drafter, [0, 8, 9], 2)
    assert draft.tokens.tolist() == [71, 5]
    assert draft.score is not None
    first = 4 / (8 + DOUBT)                                    # four places agree with two tokens each; two of them say 71
    assert draft.score.tolist() == pytest.approx([first, first * 6 / (6 + DOUBT)])


def test_a_guess_is_the_longer_the_longer_the_agreement() -> None:
    past = list(range(100, 160))
    lengths = []
    for agree in (1, 2, 4, 8, 16):
        drafter = SuffixDrafter()
        drafter.learn(past)
        draft = guess(drafter, [*range(agree), *past[20 - agree:20]], 30)
        assert draft.tokens.tolist() == past[20:20 + len(draft)]
        assert draft.reason == f"agreement of {agree}, so {len(draft)} copied"
        lengths.append(len(draft))
    assert lengths == [1, 2, 5, 9, 19]


def test_a_repetition_goes_on_over_its_own_guesses() -> None:
    assert guess(SuffixDrafter(), [7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], 9).tokens.tolist() == [3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_a_tree_holds_the_likeliest_nodes_of_any_size() -> None:
    drafter = SuffixDrafter()
    for tail in ([1, 1, 1], [1, 1, 2], [1, 3, 3], [4, 5, 6], [4, 5, 7]):
        drafter.learn([8, 9, *tail])
    whole = guess(drafter, [0, 8, 9], 3, 12)
    assert whole.score is not None
    scores = whole.score.tolist()
    assert scores == sorted(scores, reverse=True)
    assert [t for t, p in zip(whole.tokens.tolist(), whole.parents, strict=True) if p == -1] == [1, 4], "branches by frequency"
    edges = list(zip(whole.parents, whole.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges) and len(whole) >= 8
    for nodes in range(4, len(whole)):
        part = guess(drafter, [0, 8, 9], 3, nodes)
        assert part.tokens.tolist() == whole.tokens.tolist()[:nodes] and part.parents == whole.parents[:nodes]


def test_a_tree_has_no_node_that_is_not_worth_its_row() -> None:
    drafter, text = SuffixDrafter(), [*noise(3, 120, 3), 1, 2, 0]
    whole = guess(drafter, text, 4, 20)
    assert whole.score is not None and len(whole) == 20
    for each in (0.0, 0.1, 0.3, 1.0):
        state = drafter.open(Text.of(text, GREEDY), None)
        draft, = drafter.propose([state], [Budget(4, 20, "", "", tuple(each * n for n in range(1, 21)))], SharedNoise())
        count = sum(score > each for score in whole.score.tolist())
        assert draft.tokens.tolist() == whole.tokens[:count].tolist() and draft.parents == whole.parents[:count]
        assert (draft.reason == "no guess is worth its row") == (count == 0)


def test_without_agreement_there_is_a_reason() -> None:
    draft = guess(SuffixDrafter(), [1, 2, 3], 4)
    assert not len(draft) and "agrees with the end" in draft.reason


# What is remembered, and for whom


def test_a_closed_text_is_learnt_once_and_its_prompt_is_not() -> None:
    drafter = SuffixDrafter(max=4)
    text = Text.of(range(100, 150), GREEDY)
    state = drafter.open(text, None)
    text.tokens += range(200, 220)
    drafter.close(state)
    drafter.close(state)
    assert drafter.store.texts() == [(tenant_key(""), [*range(146, 150), *range(200, 220)])]
    assert guess(drafter, [210, 211], 2).tokens.tolist() == [212, 213]
    assert not len(guess(drafter, [110, 111], 3))


def test_no_tenant_ever_sees_a_token_of_another() -> None:
    """Every tenant's texts have the same contexts, and followers of its own."""
    drafter, tenants = SuffixDrafter(tokens=4000), ["", "a", "b", "ab"]
    seen = dict.fromkeys(tenants, 0)
    for turn in range(400):
        who = turn % 4
        own = range(100 * (who + 1), 100 * (who + 1) + 100)
        body = noise(turn, 30, 6)
        drafter.learn([token if at % 3 else own[token] for at, token in enumerate(body)], 0, tenants[who])
        for asker, tenant in enumerate(tenants):
            for nodes in (6, 20):
                tokens = guess(drafter, noise(9000 + turn, 12, 6)[:9], 6, nodes, tenant).tokens.tolist()
                assert all(token < 6 or 100 * (asker + 1) <= token < 100 * (asker + 2) for token in tokens)
                seen[tenant] += sum(token >= 100 for token in tokens)
    assert min(seen.values()) > 100


def test_memory_is_bounded_and_the_oldest_texts_leave() -> None:
    drafter = SuffixDrafter(tokens=2000)
    sizes = set()
    for turn in range(200):
        drafter.learn(list(range(100 * turn, 100 * turn + 60)))
        sizes.add(drafter.store.memory_bytes)
        for old in (0, 5, 20, 40):
            known = turn >= old and len(guess(drafter, [100 * (turn - old) + 50, 100 * (turn - old) + 51], 2)) == 2
            assert known == (old <= 20 and turn >= old), (turn, old)
    assert len(sizes) == 1 and drafter.store.size == 2000
    assert sum(len(text) for _, text in drafter.store.texts()) < 2000


def test_the_store_grows_in_doublings_and_keeps_what_it_has() -> None:
    store = Store(100_000, 3)
    texts = [noise(seed, 700, 50) for seed in range(60)]
    for text in texts:
        store.add(text, 7)
    assert [text for _, text in store.texts()] == texts and 42_000 < store.size < 100_000
    assert 40 * store.size < store.memory_bytes < 80 * store.size


def test_the_ring_never_finds_what_was_overwritten() -> None:
    store, kept = Store(500, 4), []
    for seed in range(300):
        text = noise(seed, 2 + seed % 90, 9)
        store.add(text, seed % 2)
        kept.append((seed % 2, text))
        there = store.texts()
        assert there[-1] == kept[-1]
        for owner, part in there[1:]:
            assert any(owner == o and part == whole[len(whole) - len(part):] for o, whole in kept[-40:])
        index = TextIndex(4)
        tail = noise(7000 + seed, 8, 9)
        index.extend(tail)
        for level, gram in enumerate(index.grams[:2]):
            for end in store.places(level, gram, 0, array("i", tail), 50):
                length = 1 << level
                assert any(o == 0 and part[at - length:at] == tail[-length:] and store.after(end, 99) == part[at:]
                           for o, part in there for at in range(length, len(part) + 1))


@pytest.mark.parametrize("which", ["_owner", "_tokens"])
def test_an_interruption_while_a_text_is_kept_shows_it_to_nobody_else(which: str) -> None:
    """Ctrl-C, or no memory, at any assignment: places of the text that stood there lead to no token of the one that comes."""

    class Stopping(array):
        left = 0

        def __setitem__(self, place: Any, value: Any) -> None:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            super().__setitem__(place, value)

    for left in range(4):
        store, index = Store(64, 2), TextIndex(2)
        store.add([1, 2, *range(10, 50)], 1)
        kept = getattr(store, which)
        setattr(store, which, Stopping(kept.typecode, kept))
        getattr(store, which).left = left
        with suppress(KeyboardInterrupt):
            store.add([1, 2, *range(60, 100)], 2)
        setattr(store, which, array(kept.typecode, getattr(store, which)))
        index.extend([1, 2])
        for tenant, low, high in ((1, 10, 50), (2, 60, 100)):
            for end in store.places(1, index.grams[1], tenant, array("i", [1, 2]), 9):
                assert all(low <= token < high for token in store.after(end, 9)), (tenant, left)


def test_a_text_longer_than_the_store_leaves_its_end_there() -> None:
    store = Store(50, 3)
    store.add(range(1000), 1)
    assert store.texts() == [(1, list(range(951, 1000)))]
    Store(0, 3).add([1, 2, 3], 1)


# Files


def test_a_saved_store_guesses_the_same(tmp_path: Path) -> None:
    drafter, file = SuffixDrafter(), tmp_path / "store.safetensors"
    for seed in range(20):
        drafter.learn(noise(seed, 80, 7), 0, "ab"[seed % 2])
    drafter.save(file)
    other = SuffixDrafter()
    other.load(file)
    assert other.store.texts() == drafter.store.texts() and [p.name for p in tmp_path.iterdir()] == ["store.safetensors"]
    for seed in range(50):
        asked = noise(100 + seed, 10, 7)
        assert guess(other, asked, 5, 9, "a").tokens.tolist() == guess(drafter, asked, 5, 9, "a").tokens.tolist()
    assert SEPARATOR == -1 and b"ab" not in file.read_bytes()[:200]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, file = SuffixDrafter(), tmp_path / "store"
    drafter.learn([1, 2, 3])
    drafter.save(file)
    before = file.read_bytes()
    drafter.learn([4, 5, 6])

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        drafter.save(file)
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    drafter, file = SuffixDrafter(), tmp_path / "store"
    with pytest.raises(LoadError, match="expected a file written by save"):
        drafter.load(file)
    file.write_bytes(b"\x80\x04pickle")
    with pytest.raises(LoadError, match="expected a file written by save"):
        drafter.load(file)
    save_file({"tokens": np.zeros(3, np.int32)}, file)
    with pytest.raises(LoadError, match="found format None"):
        drafter.load(file)
    parts = {"tokens": np.zeros(3, np.int32), "lengths": np.asarray([5], np.int32), "owners": np.zeros(1, np.int64)}
    save_file(parts, file, metadata={"format": "draftproof-suffix-1"})
    with pytest.raises(LoadError, match="lengths that sum to 5"):
        drafter.load(file)
    assert drafter.store.empty


# In the engine


def test_past_outputs_of_the_tenant_are_guessed_and_cancelled_ones_too() -> None:
    target = TableTarget(64, order=2, seed=3)
    options = Sampling(temperature=1.0, top_p=1.0, seed=5, max_tokens=60)
    with Engine(target) as engine:
        plain = engine.generate([1, 2, 3], options)
    with Engine(target, "suffix", depth=6) as engine:
        runs = [engine.generate([1, 2, 3], options, tenant=tenant) for tenant in ("a", "b", "a")]
        assert all(run.token_ids == plain.token_ids for run in runs)
        passes = [run.metrics["rounds"] for run in runs]
        assert passes[0] == passes[1] > 3 * passes[2]
        handle, = engine.submit([1, 2, 3], options, tenant="c")
        for _ in range(30):
            engine.step()
        engine.cancel(handle.id)
        again = engine.generate([1, 2, 3], options, tenant="c")
        assert again.token_ids == plain.token_ids and again.metrics["rounds"] < passes[0] / 1.5
