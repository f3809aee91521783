"""The page pool: who owns what, sharing within a tenant, eviction, growth, and that nothing is ever lost or owned twice."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch

from draftproof import Engine, LoadConfig, Sampling, gpu, native
from draftproof.drafters.model import ModelDrafter
from draftproof.errors import CacheFull
from draftproof.models.cache import PagedSlot, PagePool
from draftproof.models.load import as_target, load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.states import Mark, States
from draftproof.trace.events import RequestStarted

P = 4


def pool(pages: int = 6) -> PagePool:
    return PagePool(P, pages * P, torch.device("cpu"))


def filled(p: PagePool, tokens: list[int], tenant: str = "") -> PagedSlot:
    pages = p.find(tokens, tenant)
    slot = PagedSlot(tenant, tokens[: len(pages) * P], pages, shared=len(pages))
    while len(slot.pages) * P < len(tokens):
        slot.pages.append(p.take())
    slot.held = list(tokens)
    p.publish(slot)
    return slot


def drop(p: PagePool, slot: PagedSlot) -> None:
    for page in slot.pages:
        p.release(page)


def test_full_pages_are_shared_within_a_tenant_and_never_across() -> None:
    p = pool(16)
    a = filled(p, list(range(10)))
    b = filled(p, list(range(9)) + [77])
    c = filled(p, list(range(10)), tenant="other")
    assert b.pages[:2] == a.pages[:2] and b.pages[2] != a.pages[2]
    assert not set(c.pages) & set(a.pages)
    p.check([a, b, c])


def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache() -> None:
    p = pool(16)
    a = filled(p, list(range(8)))
    assert len(p.find(list(range(8)), "")) == 1, "a whole page must remain to be run, so that there are logits"
    drop(p, a)


def test_pages_filled_twice_become_one() -> None:
    p = pool(16)
    a, b = PagedSlot("", [1, 2, 3, 4], [p.take()]), PagedSlot("", [1, 2, 3, 4], [p.take()])
    p.publish(a)
    p.publish(b)
    assert a.pages == b.pages
    p.check([a, b])


def test_idle_pages_are_evicted_oldest_first_and_their_successors_with_them() -> None:
    p = pool(4)
    a = filled(p, list(range(12)))
    drop(p, a)
    p.check([])
    assert len(p.find(list(range(13)), "")) == 3
    drop(p, a)
    page = p.take()
    assert p.take()
    assert p.find(list(range(13)), "") == [], "what stood behind an evicted page is unreachable and must not be found"
    assert page


def test_a_text_of_thousands_of_pages_is_evicted_as_a_whole() -> None:
    p = pool(3000)
    slot = filled(p, [i % 97 for i in range(3000 * P)])
    drop(p, slot)
    assert p.take() == slot.pages[0] and not p.index and not p.idle
    assert sorted(p.free) == sorted(slot.pages[1:])


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    p = pool(3)
    taken = [p.take() for _ in range(3)]
    before = (list(p.free), list(p.references))
    with pytest.raises(CacheFull, match="cache_tokens"):
        p.take()
    assert (list(p.free), list(p.references)) == before
    p.release(taken[0])
    assert p.take() == taken[0]


@pytest.mark.parametrize("taken", range(5))
def test_what_fits_is_what_can_be_taken(taken: int) -> None:
    """Free pages, and idle ones that hold a text of earlier."""
    for tokens in range(6 * P):
        p = pool(5)
        drop(p, filled(p, list(range(2 * P))))
        for _ in range(taken):
            p.take()
        fits, pages = PagedTarget.fits(SimpleNamespace(pool=p), tokens), 0  # type: ignore[arg-type]
        try:
            while pages * P < tokens:
                p.take()
                pages += 1
        except CacheFull:
            pass
        assert fits == (pages * P >= tokens)


def test_a_text_gets_consecutive_pages_after_others_have_come_and_gone() -> None:
    p = pool(40)
    slots = [PagedSlot("", [], [p.take() for _ in range(n)]) for n in (5, 3, 8)]
    drop(p, slots[2])
    drop(p, slots[0])
    assert [p.take() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert [p.take() for _ in range(8)] == list(range(9, 17))


def test_pages_of_a_forgotten_text_are_handed_out_in_their_order() -> None:
    p = pool(6)
    a = filled(p, list(range(6 * P)))
    drop(p, a)
    assert len(p.idle) == 6 and [p.take() for _ in range(6)] == a.pages == list(range(1, 7))


def test_a_page_is_evicted_without_a_look_at_all_others() -> None:
    """That took 6 ms of every page of a text where 8,000 were in the cache."""
    class Unread(dict[int, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all pages are gone through")

        keys = values = items = __iter__

    p = pool(6)
    for text in range(2):
        drop(p, filled(p, [text] * 3 * P))
    assert len(p.idle) == 6
    p.prefix_of = Unread(p.prefix_of)
    taken = [p.take() for _ in range(6)]
    assert sorted(taken) == list(range(1, 7)) and not p.prefix_of and not p.index


def test_consecutive_pages_are_read_where_they_lie_and_others_as_one_copy() -> None:
    p = pool()
    keys, values = p.storage(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 4))
    for store in (keys, values):
        store += torch.arange(len(store))[:, None, None]
    for store, lying in zip((keys, values), p.read(0, slice(2, 4)), strict=True):
        assert lying.data_ptr() == store[2 * P].data_ptr() and lying.shape == (2, P, 2, store.shape[2])
    places = [copy.data_ptr() for copy in p.read(0, torch.tensor([1, 2, 4]))]
    for store, copy in zip((keys, values), p.read(0, torch.tensor([5, 3])), strict=True):
        assert copy.equal(store.view(-1, P, *store.shape[1:])[[5, 3]]) and copy.data_ptr() in places, "no new memory for each copy"


def test_growth_keeps_the_keys() -> None:
    p = pool(64)
    keys, _ = p.storage(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    page = p.take()
    keys[page * P] = 3.0
    while p.allocated < 33:
        p.take()
    assert float(p.keys[0][page * P].sum()) == 3.0 * 16
    assert p.keys[0].shape[0] == p.allocated * P


def test_marks_take_as_many_bytes_as_keys_and_those_used_last_stay() -> None:
    states = States((1, 1, 1, 16, 32), 8, 3, torch.float32)
    p = PagePool(P, 100, torch.device("cpu"), states, token_bytes=67)  # a mark takes 16 * 32 * 4 + 3 * 8 * 4 bytes
    assert states.page == P and p.most_marks == 3 and PagePool(P, 4, torch.device("cpu"), states, token_bytes=67).most_marks == 1

    def read(first: int) -> PagedSlot:
        pages = p.find([first] * (P + 1), "")
        slot = PagedSlot("", [first] * len(pages) * P, pages, len(pages), state=p.state(pages))
        assert slot.state is not None
        if not pages:
            slot.pages.append(p.take())
            slot.held = [first] * P
            slot.state.marks = {P: Mark(P, torch.full(states.memory, float(first)), torch.full((1, 3, 8), float(first)))}
            p.publish(slot)
            assert not slot.state.marks
        else:
            assert slot.state.taken == slot.state.length == P and bool((slot.state.memory == first).all())
            assert bool((slot.state.history[:, :3] == first).all()) and not slot.state.history[:, 3:].any()
            slot.state.memory.zero_()  # its own
        return slot

    slots = [read(first) for first in (1, 2, 3)]
    read(1)  # found, and so used last
    assert slots[1].state is not None
    slots[1].state.marks = {P: next(iter(p.marks.values()))}  # as it is read again
    p.publish(slots[1])
    read(4)
    assert len(p.marks) == 3 and [len(p.find([first] * (P + 1), "")) for first in (1, 2, 3, 4)] == [1, 1, 0, 1]


@pytest.mark.parametrize("waiting", [(), (1,), (3,), (2, 1), (1, 2, 3)])
def test_tokens_that_nobody_has_read_are_cut_as_others(waiting: tuple[int, ...]) -> None:
    text = list(range(9))
    for length in range(3 + sum(waiting)):
        slot, end = PagedSlot("", text[:2]), 2
        for many in waiting:
            slot.unread.append(torch.tensor(text[end : end + many]))
            slot.waiting, end = slot.waiting + many, end + many
        slot.cut(length)
        assert slot.length == length and slot.tokens == text[:length] and slot.length == length


def test_random_life_keeps_every_page_accounted_for() -> None:
    p, rng, slots = pool(40), random.Random(5), []
    for _ in range(600):
        if slots and (rng.random() < 0.45 or p.available() < 6):
            drop(p, slots.pop(rng.randrange(len(slots))))
        else:
            slots.append(filled(p, [rng.randrange(2) for _ in range(rng.randint(1, 20))], tenant=rng.choice("ab")))
        p.check(slots)


@pytest.mark.parametrize(("way", "wide"), [("host", 3), ("layers", 3), ("launch", 4), ("launch", 3)])
def test_keys_are_copied_between_pages_in_every_layer(way: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's kernel, layer by layer, and in one launch of a GPU's, whose addresses are new where storage has grown, and which values
    narrower than keys, as a latent's are, do not take."""
    if way == "launch":
        pytest.importorskip("triton")
    monkeypatch.setattr(native, "available", lambda right=native.available: right() if way == "host" else (False, ""))
    monkeypatch.setattr(gpu, "available", lambda *_: (way == "launch", ""))
    p = pool(20)
    for layer in range(3):
        p.storage(layer, torch.zeros(0, 2, 4), torch.zeros(0, 2, wide))
    for round_ in range(2):
        stores = [*p.keys.values(), *p.values.values()]
        for i, store in enumerate(stores):
            store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(i + 10 * round_)))
        before = [store.clone() for store in stores]
        p.copy([(1, 2, 0, 3), (1, 3, 0, 3), (4, 6, 1, 2), (4, 5, 2, 2)])
        for store, old in zip(stores, before, strict=True):
            wanted = old.clone()
            wanted[8:11], wanted[12:15], wanted[25] = old[4:7], old[4:7], old[17]
            assert torch.equal(store, wanted)
        p.grow()


def test_prompts_that_come_together_read_what_they_have_in_common_once_or_twice(tiny_pair: tuple[Path, Path],
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them finds it where it is admitted. Another tenant reads it again."""
    target = load_target(tiny_pair[0], LoadConfig(device="cpu", self_test=False, page_tokens=16))
    assert isinstance(target, PagedTarget)
    common, read = [7 * i % 200 for i in range(100)], list[int]()
    prompts = [common + [100 + i] * (5 + i) for i in range(6)]
    asked = [Sampling(seed=i, temperature=0.8, max_tokens=6, ignore_eos=True) for i in range(6)]
    load, extend = LoadConfig(prefill_chunk=32), target.extend
    with Engine(target, "none") as engine:
        want = [engine.generate(prompt, sampling, tenant=f"alone {i}").token_ids
                for i, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True))]
    monkeypatch.setattr(target, "extend", lambda slots, chunks: (read.extend(map(len, chunks)), extend(slots, chunks))[1])
    with Engine(target, "ngram", 2, load=load) as engine:
        handles = [engine.submit(prompt, sampling, tenant="a")[0] for prompt, sampling in zip(prompts, asked, strict=True)]
        handles += engine.submit(prompts[0], asked[0], tenant="b")
        while not all(handle.done for handle in handles):
            engine.step()
            target.pool.check(target.slots)
        found = [handle.completion() for handle in handles]
    assert [one.token_ids for one in found] == [*want, want[0]]
    cached = [event.cached_tokens for one in found for event in one.trace if isinstance(event, RequestStarted)]
    assert len(cached) == 7 and cached[0] == cached[6] == 0 and sum(cached) >= 4 * 96
    assert sum(read) + sum(cached) == sum(map(len, prompts)) + len(prompts[0])


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_draft_model_whose_cache_is_full_stays_in_service(prompts: int) -> None:
    """It cuts back into pages that its own guesses filled; texts that are alike read each other's."""
    target = as_target(families.build("llama"), LoadConfig(self_test=False))
    lm = as_target(families.build("qwen3"), LoadConfig(self_test=False, page_tokens=16, cache_tokens=64 * prompts))
    assert isinstance(lm, PagedTarget)
    texts = [list(range(1, 15))] * prompts
    options = [Sampling(temperature=1.5, seed=seed // 2, max_tokens=50, ignore_eos=True) for seed in range(prompts)]
    with Engine(target=target, drafter=ModelDrafter(lm), depth=6) as engine, Engine(target=target) as plain:
        outs = engine.generate_batch(texts, options)
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain.generate_batch(texts, options)]
    assert all(out.speculation["state"] == "on" and out.metrics["drafted"] for out in outs), outs[0].speculation
    lm.check()
    assert not lm.slots
