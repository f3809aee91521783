"""Sequences beside each other: joining, leaving, walking away and errors of one never touch the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine.engine_support import OPTIONS, PROMPTS, alone, check_counts, drafters, foresight, table, to_the_end

from draftproof import Engine, EngineConfig, LoadConfig, OptionError, Sampling
from draftproof.drafters.fixed import Oracle
from draftproof.engine.batch import Batch, shares
from draftproof.engine.engine import Request
from draftproof.errors import CacheFull, Failure
from draftproof.models.fake import TableTarget
from draftproof.types import Draft


@pytest.mark.parametrize("name", ["none", "ngram", "model", "oracle"])
def test_joining_and_leaving_at_any_round(name: str) -> None:
    target = table()
    want = [alone(target, p, s) for p, s in zip(PROMPTS, OPTIONS.values(), strict=True)]
    texts = [p + list(w.token_ids) for p, w in zip(PROMPTS, want, strict=True)]
    drafter = "none" if name == "none" else drafters(texts)[name]()
    dice = random.Random(5)
    with Engine(
        target=target,
        drafter=drafter,
        depth="auto" if name == "none" else 3,
        config=EngineConfig(max_batch=4),
        load=LoadConfig(prefill_chunk=3),
    ) as engine:
        todo = list(range(len(PROMPTS))) * 2
        dice.shuffle(todo)
        running, finished = [], 0
        while todo or running:
            if todo and dice.random() < 0.4:
                i = todo.pop()
                running.append((i, engine.submit(PROMPTS[i], list(OPTIONS.values())[i])[0], dice.random() < 0.25))
            engine.step()
            for i, handle, leaves in list(running):
                if leaves and len(handle.completion().token_ids) > 5:
                    engine.cancel(handle.id)
                if handle.done:
                    got = handle.completion()
                    assert got.token_ids == want[i].token_ids[: len(got.token_ids)]
                    if not leaves:
                        assert got.token_ids == want[i].token_ids
                    check_counts(got)
                    running.remove((i, handle, leaves))
                    finished += 1
        assert finished == 2 * len(PROMPTS)
    assert not target.open_slots


def test_speculation_off_and_on_in_the_middle_of_texts() -> None:
    target = table()
    want = [alone(target, p, s) for p, s in zip(PROMPTS, OPTIONS.values(), strict=True)]
    ahead = foresight([p + list(w.token_ids) for p, w in zip(PROMPTS, want, strict=True)])
    with Engine(target=target, drafter=Oracle(ahead, wrong_at=lambda p: p % 4 == 0), depth=4) as engine:
        handles = [engine.submit(p, s)[0] for p, s in zip(PROMPTS, OPTIONS.values(), strict=True)]
        actions = [
            dict(enabled=False),
            dict(enabled=True),
            dict(depth_cap=1),
            dict(drafter="ngram:min=1,max=2"),
            dict(depth_cap=9),
            dict(drafter="none"),
            dict(drafter=drafters([])["model"]()),
        ]
        for step in range(400):
            if all(handle.done for handle in handles):
                break
            if step % 3 == 2 and actions:
                engine.set_speculation(**actions.pop(0))
            engine.step()
        assert not actions
        for handle, w in zip(handles, want, strict=True):
            assert handle.completion().token_ids == w.token_ids
            check_counts(handle.completion())
        seen = {(e.drafter, bool(e.nodes), e.reason) for h in handles for e in h.completion().trace if e.event == "round_done"}
    assert {"oracle", "ngram", "none", "model"} <= {drafter for drafter, _, _ in seen}
    assert ("oracle", False, "speculation is switched off") in seen
    assert any("cap" in reason for _, _, reason in seen)
    assert not target.open_slots


def test_a_consumer_that_walks_away() -> None:
    target = table()
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=3) as engine:
        other = engine.submit([4, 5, 6], OPTIONS["warm"])[0]
        for event in engine.stream([1, 2, 3], OPTIONS["ignore_eos"]):
            if event.round > 3:
                break
        while not other.done:
            engine.step()
        assert other.completion().token_ids == alone(target, [4, 5, 6], OPTIONS["warm"]).token_ids
        assert engine.stats()["requests"] == {"waiting": 0, "running": 0, "done": 2}
        assert not target.open_slots
        two = [engine.stream([1, 2, i], OPTIONS["warm"]) for i in (3, 4)]
        mixed = [[next(two[0]).token_id, next(two[1]).token_id] for _ in range(20)]
        for i, stream in enumerate(two):
            assert [pair[i] for pair in mixed] == list(alone(target, [1, 2, 3 + i], OPTIONS["warm"]).token_ids[:20])
            stream.close()
    assert not target.open_slots


def test_what_is_looked_at_grows_with_the_samples_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {"done": 0, "batch": 0}

    def done(self: Request) -> bool:
        looks["done"] += 1
        return self._seq.done

    def listed(self: Batch) -> Iterator[Any]:
        looks["batch"] += 1
        return iter((*self.live, *self.waiting))

    monkeypatch.setattr(Request, "done", property(done))
    monkeypatch.setattr(Batch, "__iter__", listed)
    samples = Sampling(n=400, max_tokens=1, seed=1)
    with Engine(target=table(), config=EngineConfig(max_batch=4)) as engine:
        assert len(engine.generate(PROMPTS[0], samples).samples) == 400
        events = engine.stream(PROMPTS[0], samples)
        next(events)
        events.close()
        assert engine.stats()["requests"] == {"waiting": 0, "running": 0, "done": 800}
    assert looks["done"] < 10 * 400 and looks["batch"] < 10, looks


def test_a_stream_misses_nothing_that_others_rounds_brought() -> None:
    """Rounds that are run for a text which is read as a whole run for the stream beside it, too."""
    target = table()
    want = list(alone(target, [1, 2, 3], OPTIONS["ignore_eos"]).token_ids)
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=3) as engine:
        stream = engine.stream([1, 2, 3], OPTIONS["ignore_eos"])
        found = [next(stream).token_id]
        assert engine.generate([4, 5, 6], OPTIONS["warm"]).token_ids == alone(target, [4, 5, 6], OPTIONS["warm"]).token_ids
        found += [event.token_id for event in stream]
    assert found == want


class Fragile(TableTarget):
    """Raises what it is told to, at the given call of `score`, before or after the nodes are in."""

    def __init__(self) -> None:
        super().__init__(vocab_size=11, order=2, seed=0)
        self.at, self.late, self.error, self.calls = 0, False, Exception(), 0

    def score(self, slots, roots, drafts):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.calls == self.at and not self.late:
            raise self.error
        scores = super().score(slots, roots, drafts)
        if self.calls == self.at:
            raise self.error
        return scores


@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_in_the_middle_of_a_round_leaves_caches_and_texts_valid(late: bool) -> None:
    target = Fragile()
    want = [alone(target, [1, 2, i], OPTIONS["ignore_eos"]).token_ids for i in range(3)]
    target.calls, target.at, target.late, target.error = 0, 5, late, KeyboardInterrupt()
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=3) as engine:
        handles = [engine.submit([1, 2, i], OPTIONS["ignore_eos"])[0] for i in range(3)]
        interrupted = to_the_end(engine, handles)
        assert interrupted == 1
        assert [h.completion().token_ids for h in handles] == want
    target.calls = 0
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=3) as engine, pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2, 3], OPTIONS["ignore_eos"])
    assert not target.open_slots


def test_no_room_for_a_tree_is_a_round_with_its_first_line() -> None:
    target = Fragile()
    want = alone(target, [1, 2, 1, 2], OPTIONS["warm"])
    target.calls, target.at, target.error = 0, 12, CacheFull("no page left")
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=2, tree=6) as engine:
        got = engine.generate([1, 2, 1, 2], OPTIONS["warm"])
    assert got.token_ids == want.token_ids
    told = [e for e in got.trace if e.event == "round_done" and "no page left" in e.draft_reason]
    assert len(told) == 1 and [node.parent for node in told[0].nodes] == [-1, 0]


def test_one_request_that_excludes_every_token_does_not_end_the_others() -> None:
    target = TableTarget(vocab_size=3, order=1, seed=1)
    good = Sampling(seed=1, max_tokens=30)
    with Engine(target=target, drafter="ngram:min=1,max=1", depth=2) as engine:
        bad = Sampling(seed=1, max_tokens=30, bad_word_ids=((1, 0), (1, 1), (1, 2)))
        handles = [engine.submit([0, 2], s)[0] for s in (good, bad, good)]
        while not all(h.done for h in handles):
            engine.step()
        assert isinstance(handles[1].error, OptionError) and handles[1].completion().finish_reason == "error"
        assert handles[0].completion().token_ids == handles[2].completion().token_ids == alone(target, [0, 2], good).token_ids
        with pytest.raises(OptionError, match="exclude every token"):
            engine.generate([0, 1], bad)
    assert not target.open_slots


@pytest.mark.parametrize(("left", "most", "given"), [
    ([5], 8, [5]), ([50], 8, [8]), ([50, 50], 8, [4, 4]), ([3, 50, 50], 8, [3, 5, 0]), ([50, 9, 2], 8, [4, 2, 2]),
    ([50, 1, 1], 8, [6, 1, 1]), ([2, 2, 2], 8, [2, 2, 2]), ([9, 9], 1, [1, 0]), ([9, 9, 1], 3, [1, 1, 1])])
def test_what_each_prompt_has_read_of_a_pass(left: list[int], most: int, given: list[int]) -> None:
    assert shares(left, most) == given


def test_a_pass_over_prompts_reads_a_chunk_of_all_of_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that texts that run wait for no more than that, and a short prompt does not wait for a long one."""
    target, read, sampling = TableTarget(vocab_size=11, order=2, seed=0), list[list[int]](), Sampling(seed=1, max_tokens=4)
    extend = target.extend
    prompts = [[i % 11 for i in range(n)] for n in (40, 30, 4, 9, 2)]
    want = [alone(target, prompt, sampling).token_ids for prompt in prompts]
    monkeypatch.setattr(target, "extend", lambda slots, chunks: (read.append([len(chunk) for chunk in chunks]), extend(slots, chunks))[1])
    with Engine(target=target, drafter="none", load=LoadConfig(prefill_chunk=8)) as engine:
        handles, order = [engine.submit(prompt, sampling)[0] for prompt in prompts], []
        while not all(h.done for h in handles):
            engine.step()
            order += [i for i, h in enumerate(handles) if h.done and i not in order]
    assert [h.completion().token_ids for h in handles] == want
    assert all(sum(chunks) <= 8 for chunks in read) and sum(map(sum, read)) == sum(map(len, prompts)) and len(read) == 11
    assert order == [4, 2, 3, 0, 1] and all(chunks[0] >= 4 for chunks in read[:-1])


def test_texts_that_run_wait_no_longer_for_a_pass_over_prompts_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """At two milliseconds a token: whole chunks where nobody waits, 0.3 s of them, or the fewest, where somebody does."""
    target, read, clock, token_s = TableTarget(vocab_size=11, order=2, seed=0), list[int](), [0.0], [0.002]
    extend = target.extend

    def slow(slots: Any, chunks: Any) -> Any:
        read.append(sum(map(len, chunks)))
        clock[0] += token_s[0] * read[-1]
        return extend(slots, chunks)

    monkeypatch.setattr(target, "extend", slow)
    monkeypatch.setattr("draftproof.engine.batch.perf_counter", lambda: clock[0])
    first, second = [3] * 700, [i % 11 for i in range(700)]
    sampling = Sampling(seed=1, max_tokens=30)
    with Engine(target=target, drafter="none") as engine:
        running = engine.submit(first, sampling)[0]
        while not running.completion().token_ids:
            engine.step()
        assert read == [512, 188]
        late = engine.submit(second, sampling)[0]
        to_the_end(engine, [running, late])
        assert read[2:] == [150] * 4 + [100]
        read.clear()
        token_s[0] = 1.0
        assert engine.generate(second[1:600], sampling).token_ids and read == [512, 87], "alone, as fast as it goes"
        running = engine.submit(first[1:100], Sampling(seed=1, max_tokens=100))[0]
        engine.step()
        late = engine.submit(second[2:200], sampling)[0]
        to_the_end(engine, [running, late])
    assert read[2:] == [99, 64, 64, 64, 6], "fewer would each read all weights again"


class Small(TableTarget):
    """Has room for 40 tokens at a time."""

    def fits(self, tokens: int) -> bool:
        return sum(slot.room for slot in self.open_slots) + tokens <= 40  # type: ignore[attr-defined]

    def open(self, tokens, tenant="", room=0):  # type: ignore[no-untyped-def]
        if not self.fits(len(tokens) + room):
            raise CacheFull("full")
        slot = Room(len(tokens) + room)
        self.open_slots.append(slot)
        return slot


class Room:
    """A table slot that knows what it reserved."""

    def __init__(self, room: int) -> None:
        self.tokens: list[int] = []
        self.nodes: list[tuple[int, int]] = []
        self.room = room

    @property
    def length(self) -> int:
        return len(self.tokens)


def test_admission_waits_for_room_in_order_and_refuses_what_can_never_fit() -> None:
    target = Small(vocab_size=11, order=2, seed=0)
    sampling = Sampling(seed=1, max_tokens=12)
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=2, config=EngineConfig(max_waiting=6)) as engine:
        handles = [engine.submit([1, 2, i], sampling)[0] for i in range(5)]
        engine.step()
        assert engine.stats()["requests"] == {"waiting": 3, "running": 2, "done": 0}
        order = []
        while not all(h.done for h in handles):
            order += [h.id for h in handles if h.done and h.id not in order]
            engine.step()
        assert order == sorted(order)
        for i, h in enumerate(handles):
            assert h.completion().token_ids == alone(target, [1, 2, i], sampling).token_ids
        with pytest.raises(CacheFull, match="max_tokens=60"):
            engine.generate([1, 2], Sampling(max_tokens=60))
        first = engine.submit([1, 2], sampling)[0]
        engine.step()
        never = engine.submit([1, 2], Sampling(max_tokens=60))[0]
        while not never.done:
            engine.step()
        assert first.done and isinstance(never.error, CacheFull)
        with pytest.raises(Failure, match="waiting"):
            engine.generate([1], Sampling(n=7))
    assert not target.open_slots


def test_a_fixed_depth_is_cut_to_the_room_that_a_text_has_left() -> None:
    """Alone as among others, and where nobody guesses: 39 of 40 tokens are the prompt's."""
    target, prompt, sampling = Small(vocab_size=11, order=2, seed=0), [1, 2, 3] * 13, Sampling(seed=1, max_tokens=1)
    want = alone(target, prompt, sampling).token_ids
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=2) as engine:
        for asked in ({}, {"drafter": "none"}, {"depth": 0}, {"depth": 2}):
            assert engine.generate(prompt, sampling, speculation=asked).token_ids == want
        engine.submit([1, 2], sampling)
        assert engine.generate(prompt, sampling).token_ids == want
        for switched in (False, True):
            engine.set_speculation(enabled=switched)
            assert engine.generate(prompt, sampling).token_ids == want
        longer = Sampling(seed=1, max_tokens=3)
        found = engine.generate(prompt[:37], longer)
        assert found.token_ids == alone(target, prompt[:37], longer).token_ids and len(found.token_ids) == 3


class Tapped(TableTarget):
    """Shows as hidden state the token that each row was fed, so that a drafter's signals can be checked."""

    def set_taps(self, layers: tuple[int, ...]) -> None:
        self.layers = tuple(layers)

    def extend(self, slots, tokens):  # type: ignore[no-untyped-def]
        scores = super().extend(slots, tokens)
        return type(scores)(scores.logits, scores.starts, {0: torch.cat(list(tokens)).view(-1, 1).float()})

    def score(self, slots, roots, drafts):  # type: ignore[no-untyped-def]
        scores = super().score(slots, roots, drafts)
        fed = [torch.cat((root.view(1), draft.tokens)) for root, draft in zip(roots, drafts, strict=True)]
        return type(scores)(scores.logits, scores.starts, {0: torch.cat(fed).view(-1, 1).float()})


class Reader(Oracle):
    """Checks that the hidden states it gets are exactly those of the text's positions, without a gap."""

    from draftproof.drafters.base import Needs

    needs = Needs(taps=(0,), tree=True)

    def open(self, seq, signals):  # type: ignore[no-untyped-def]
        state = super().open(seq, signals)
        self.seen = getattr(self, "seen", {})
        self.seen[seq.id] = [] if signals is None else signals.taps[0][:, 0].tolist()
        assert signals is not None and signals.start == 0 and len(self.seen[seq.id]) == seq.prompt_tokens
        return state

    def observe(self, states, commits, signals):  # type: ignore[no-untyped-def]
        for state, commit, signal in zip(states, commits, signals, strict=True):
            assert signal.start == commit.start - 1 == len(self.seen[state.seq.id])
            self.seen[state.seq.id] += signal.taps[0][:, 0].tolist()
            fed = len(self.seen[state.seq.id])
            assert self.seen[state.seq.id] == list(state.seq.tokens[:fed]) and fed >= len(state.seq.tokens) - 1


def test_hidden_states_cover_the_text_without_a_gap() -> None:
    target = Tapped(vocab_size=11, order=2, seed=0)
    want = [alone(target, [1, 2, i] * 4, OPTIONS["ignore_eos"]) for i in range(3)]
    ahead = foresight([[1, 2, i] * 4 + list(w.token_ids) for i, w in enumerate(want)])
    drafter = Reader(ahead, decoys=1, wrong_at=lambda p: p % 5 == 0)
    with Engine(target=target, drafter=drafter, depth=3, tree=7, load=LoadConfig(prefill_chunk=5)) as engine:
        got = engine.generate_batch([[1, 2, i] * 4 for i in range(3)], OPTIONS["ignore_eos"])
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    assert [g.token_ids for g in got] == [w.token_ids for w in want] and sum(g.metrics["accepted"] for g in got) > 20
    assert all(g.metrics["target_passes"] >= g.metrics["rounds"] + 3 for g in got), "every prompt came in three chunks or more"


def test_an_empty_draft_is_an_ordinary_answer() -> None:
    class Shy(Oracle):
        def guess(self, state, budget):  # type: ignore[no-untyped-def]
            return Draft.empty("oracle", "shy")

    target = table()
    with Engine(target=target, drafter=Shy(foresight([])), depth=3, rule="block") as engine:
        out = engine.generate([1, 2], OPTIONS["warm"])
    assert out.metrics["drafted"] == 0 and out.token_ids == alone(target, [1, 2], OPTIONS["warm"]).token_ids
    assert {e.draft_reason for e in out.trace if e.event == "round_done"} == {"shy", ""}
