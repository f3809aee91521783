"""Rounds that are asked for before the books of the one before are kept: the same texts, and the same rounds, whoever comes or ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import PROMPTS, VOCABULARY, alone, drafters, table

from draftproof import Completion, Engine, Sampling
from draftproof.config import EngineConfig, LoadConfig
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.engine import ahead
from draftproof.engine.ahead import PendingRound
from draftproof.engine.control import AutoDepth
from draftproof.engine.lanes import Lanes
from draftproof.engine.marks import Marks
from draftproof.engine.plans import FixedDepth
from draftproof.engine.records import Recorder
from draftproof.engine.round import Rounds
from draftproof.errors import CacheFull
from draftproof.models.fake import TableTarget
from draftproof.models.load import WEIGHTS, load_target
from draftproof.models.paged import PagedTarget
from draftproof.trace.events import Times

SAMPLINGS = [Sampling(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True)
             for i, (temperature, n) in enumerate([(0.0, 12), (0.9, 25), (0.9, 4), (0.0, 17), (1.0, 9)])]
FIVE = PROMPTS[:5]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Rounds are asked for early on a CPU, too; whether each was the one that followed."""
    taken: list[bool] = []
    right = PendingRound.take

    def take(self: PendingRound, *about: Any) -> Any:
        found = right(self, *about)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(PendingRound, "take", take)
    monkeypatch.setattr(ahead, "overlaps", lambda target: True)
    yield taken


@pytest.fixture(scope="module")
def target() -> TableTarget:
    return table()


@pytest.fixture(scope="module")
def plain(target: TableTarget) -> list[Completion]:
    return [alone(target, prompt, sampling) for prompt, sampling in zip(FIVE, SAMPLINGS, strict=True)]


def guess_of(kind: str, plain: Sequence[Completion]) -> Any:
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(FIVE, plain, strict=True)]
    return drafters(texts)[kind]()


def five_asked(engine: Engine, samplings: Sequence[Sampling]) -> list[Any]:
    return [handle for prompt, sampling in zip(FIVE, samplings, strict=True) for handle in engine.submit(prompt, sampling)]


@pytest.mark.parametrize("most", [5, 2])
@pytest.mark.parametrize("depth", [3, "auto"])
@pytest.mark.parametrize("kind", ["ngram", "model", "wrong", "oracle"])
def test_texts_are_those_of_plain_decoding(target: TableTarget, plain: list[Completion], early: list[bool], kind: str, depth: Any,
                                           most: int) -> None:
    with Engine(target, guess_of(kind, plain), depth, config=EngineConfig(max_batch=most, profile_s=0, trace="none")) as engine:
        out = engine.generate_batch(FIVE, SAMPLINGS)
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    assert [one.token_ids for one in out] == [one.token_ids for one in plain]
    assert len(early) > 4 and all(early), "whoever came or ended, what was asked for was the next round"


@pytest.mark.parametrize("most", [5, 2])
@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("kind", ["ngram", "model", "wrong", "oracle"])
def test_rounds_are_those_that_were_asked_for_in_time(target: TableTarget, plain: list[Completion], kind: str, rule: Any, most: int,
                                                      early: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where texts join: those whose prompts are done are in the round that is asked for."""
    found = []
    for trace, before in (("full", True), ("summary", True), ("full", False)):
        monkeypatch.setattr(ahead, "overlaps", lambda target, before=before: before)
        with Engine(target, guess_of(kind, plain), 3, rule=rule,
                    config=EngineConfig(max_batch=most, profile_s=0, trace=trace)) as engine:
            out = engine.generate_batch(FIVE, SAMPLINGS)
        found.append([[event for event in one.trace if event.event == "round_done"] for one in out])
    assert len(early) > 10 and all(early)
    whole, short, late = ([[(e.round, e.batch, e.depth, e.reason, tuple(n[:3] for n in e.nodes), tuple(t[:2] for t in e.tokens))
                            for e in one] for one in each] for each in found)
    assert whole == short == late
    assert [[(e.nodes, e.tokens) for e in one] for one in found[0]] == [[(e.nodes, e.tokens) for e in one] for one in found[2]]


def test_a_head_reads_what_it_reads_otherwise(early: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_target(str(WEIGHTS / "target"), LoadConfig(device="cpu", self_test=False))
    asked = [Sampling(temperature=temperature, seed=3, max_tokens=n, ignore_eos=True) for temperature, n in ((0, 40), (0.8, 30), (0, 50))]
    found = []
    for kind in ("eagle3", "mtp", "medusa"):
        for before in (True, False):
            monkeypatch.setattr(ahead, "overlaps", lambda target, before=before: before)
            with Engine(demo, f"{kind}:{WEIGHTS / kind}", 4, config=EngineConfig(profile_s=0)) as engine:
                out = engine.generate_batch(["Add two numbers.", "What is the capital of France?", "Count to ten."], asked)
            found.append([(one.token_ids, one.metrics["drafted"], one.metrics["accepted"], one.metrics["rounds"]) for one in out])
    assert found[0::2] == found[1::2] and all(early) and len(early) > 60
    assert all(sum(accepted for _, _, accepted, _ in one) > 15 for one in found)


def test_a_round_is_planned_once(target: TableTarget, plain: list[Completion], early: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    right = Lanes.plan

    def plan(self: Lanes, batch: Sequence[Any]) -> Any:
        planned.append(len(batch))
        return right(self, batch)

    monkeypatch.setattr(Lanes, "plan", plan)
    monkeypatch.setattr(AutoDepth, "holds", property(lambda self: False))
    with Engine(target, guess_of("wrong", plain), config=EngineConfig(profile_s=0)) as engine:
        out = engine.generate_batch(FIVE, SAMPLINGS)
    assert len(planned) == max(one.metrics["rounds"] for one in out) and 0 not in planned


@pytest.mark.parametrize("steered", [{"enabled": False}, {"depth_cap": 1}, {"drafter": "ngram:min=1,max=2"}, {"drafter": "none"}])
def test_the_operators_word_is_of_the_next_round(target: TableTarget, plain: list[Completion], early: list[bool],
                                                 steered: dict[str, Any]) -> None:
    with Engine(target, guess_of("oracle", plain), 3, config=EngineConfig(profile_s=0, trace="full")) as engine:
        handles = five_asked(engine, SAMPLINGS)
        for _ in range(3):                        # prompts, and two rounds
            engine.step()
        before = {handle.id: handle.completion().metrics["rounds"] for handle in handles}
        engine.set_speculation(**steered)
        while not all(handle.done for handle in handles):
            engine.step()
        for handle in handles:
            for event in [event for event in handle.completion().trace if event.event == "round_done"][before[handle.id]:]:
                assert len(event.nodes) <= {"enabled": 0, "depth_cap": 1}.get(next(iter(steered)), 3 * (steered != {"drafter": "none"}))
                assert not event.nodes or event.drafter == ("oracle" if "depth_cap" in steered else "ngram")
    assert early[:1] == [True] and early.count(False) == 1
    assert [handle.completion().token_ids for handle in handles] == [one.token_ids for one in plain]


def test_a_text_that_is_cancelled_leaves_its_draft_behind(target: TableTarget, plain: list[Completion], early: list[bool]) -> None:
    with Engine(target, guess_of("model", plain), 3) as engine:
        handles = five_asked(engine, SAMPLINGS)
        for gone in (1, 0, 3):
            engine.step()
            engine.cancel(handles[gone].id)
        while not all(handle.done for handle in handles):
            engine.step()
        assert engine.speculation.state[0] == "on" and all(early)
    for i in (2, 4):
        assert handles[i].completion().token_ids == plain[i].token_ids


@pytest.mark.parametrize("kind", ["ngram", "model", "oracle"])
def test_a_text_that_is_cancelled_in_a_trial_leaves_the_others_theirs(target: TableTarget, early: list[bool], kind: str) -> None:
    """The trial's texts move up in the batch as the first one leaves it."""
    prompts = [[1, 2] * (7 - i) for i in range(5)]
    asked = [Sampling(temperature=0.9, seed=i, max_tokens=60 + 20 * i, ignore_eos=True) for i in range(5)]
    plain = [alone(target, prompt, sampling) for prompt, sampling in zip(prompts, asked, strict=True)]
    guess = drafters([[*prompt, *one.token_ids] for prompt, one in zip(prompts, plain, strict=True)])[kind]()
    with Engine(target, guess, "auto", config=EngineConfig(profile_s=0)) as engine:
        handles = [engine.submit(prompt, sampling)[0] for prompt, sampling in zip(prompts, asked, strict=True)]
        control, gone = engine.speculation.control, 0
        assert isinstance(control, AutoDepth)
        while not all(handle.done for handle in handles):
            engine.step()
            left = [handle for handle in handles if not handle.done]
            if len(left) > 1 and control._trial is not None and left[-1]._seq in control._trial.asked:
                engine.cancel(left[0].id)
                gone += 1
        assert engine.speculation.state[0] == "on" and gone and all(early)
    for handle, one in zip(handles, plain, strict=True):
        found = handle.completion()
        assert found.token_ids == one.token_ids[:len(found.token_ids)] and found.finish_reason in ("length", "cancelled")
    assert handles[-1].completion().token_ids == plain[-1].token_ids


def test_drafts_of_nobody_that_is_left_are_let_go(target: TableTarget, plain: list[Completion], early: list[bool]) -> None:
    with Engine(target, guess_of("model", plain), 3, config=EngineConfig(max_batch=1)) as engine:
        first, second = (engine.submit(FIVE[i], SAMPLINGS[i])[0] for i in (1, 3))
        for _ in range(2):
            engine.step()
        engine.cancel(first.id)
        while not second.done:
            engine.step()
        assert early.count(False) == 1 and second.completion().token_ids == plain[3].token_ids
        assert engine.speculation.state[0] == "on"


def test_what_a_round_took_is_told_apart(target: TableTarget, plain: list[Completion], early: list[bool],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds of drafts and four of pass, asked for at ten: nothing of them is the verdict's, whenever the host took the round up."""
    monkeypatch.setattr(Marks, "spans", lambda self: [3.0, 4.0, 0.0])
    seen: list[tuple[float, ...]] = []
    right = PendingRound.seconds

    def told(draft: float, score: float, verify: float) -> tuple[tuple[float, float, float, float], float]:
        return (draft, score, verify, 0.0), score + verify

    def seconds(self: PendingRound, start: float, end: float) -> tuple[Times, float]:
        at = replace(self, start=10.0)
        assert right(at, 10.0, 18.0) == right(at, 12.0, 18.0) == told(3.0, 4.0, 1.0)
        assert right(at, 20.0, 20.5) == told(3.0, 4.0, 0.5) and right(at, 16.0, 16.5) == told(3.0, 4.0, 0.0)
        for early, verifying in ((0.75, 0.25), (2.0, 0.0)):      # a pass that was begun before is waited for in the verdict
            begun = SimpleNamespace(seconds=lambda early=early: early)
            assert right(replace(at, early=begun), 10.0, 18.0) == ((3.0, 4.0 + early, verifying, 0.0), 5.0)  # type: ignore[arg-type]
        found = right(self, start, end)
        seen.append((start - self.start, *found[0][:3]))
        return found

    monkeypatch.setattr(PendingRound, "seconds", seconds)
    monkeypatch.setattr(AutoDepth, "depths", lambda self, batch, rooms, whole: FixedDepth(2).depths(batch, rooms, whole))
    with Engine(target, guess_of("ngram", plain), config=EngineConfig(profile_s=0)) as engine:
        out = engine.generate(FIVE[0], SAMPLINGS[0])
    assert len(seen) == out.metrics["rounds"] > 2 and seen[0][0] <= 0 and all(ago > 0 for ago, *_ in seen[1:])
    assert out.metrics["draft_s"] == pytest.approx(3 * len(seen)) and out.metrics["verify_s"] == 0


def test_on_a_processor_nothing_is_asked_early(target: TableTarget, plain: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "_begin_early", lambda *_: pytest.fail("asked for"))
    with Engine(target, AlwaysWrong(VOCABULARY), 3) as engine:
        assert engine.generate(FIVE[0], SAMPLINGS[0]).token_ids == plain[0].token_ids


def test_where_nobody_guesses_nothing_is_asked_early(target: TableTarget, plain: list[Completion], early: list[bool]) -> None:
    for drafter, switched in (("none", None), (guess_of("wrong", plain), False)):
        with Engine(target, drafter, config=EngineConfig(max_batch=2, profile_s=0, trace="summary")) as engine:
            engine.set_speculation(enabled=switched)
            out = engine.generate_batch(FIVE, SAMPLINGS)
        reasons = {event.reason for one in out for event in one.trace if event.event == "round_done"}
        assert len(reasons) == 1 and [one.token_ids for one in out] == [one.token_ids for one in plain]
    assert not early


def order_of(target: TableTarget, plain: list[Completion], monkeypatch: pytest.MonkeyPatch, **sampling: Any) -> str:
    """Passes and books of a text, s and b, in order."""
    done: list[str] = []
    score, rounds = TableTarget.score, Recorder.rounds
    monkeypatch.setattr(TableTarget, "score", lambda *about: (done.append("s"), score(*about))[1])
    monkeypatch.setattr(Recorder, "rounds", lambda *about: (done.append("b"), rounds(*about))[1])
    trace = sampling.pop("trace", "summary")
    with Engine(target, guess_of("ngram", plain), 2, config=EngineConfig(trace=trace)) as engine:
        assert engine.generate(FIVE[3], replace(SAMPLINGS[3], **sampling)).token_ids == plain[3].token_ids
    return "".join(done)


def test_books_are_kept_while_the_next_round_is_under_way(target: TableTarget, plain: list[Completion], early: list[bool],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    found = order_of(target, plain, monkeypatch)
    assert len(early) > 3 and found == "s" + "sb" * len(early) + "b"


@pytest.mark.parametrize("asked", [{"trace": "full"}, {"logprobs": 1}])
def test_books_that_look_at_the_device_come_first(target: TableTarget, plain: list[Completion], early: list[bool], asked: dict[str, Any],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for all that was asked for before."""
    found = order_of(target, plain, monkeypatch, **asked)
    assert len(early) > 3 and found == "sb" * (len(early) + 1)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), CacheFull("no page")])
def test_a_round_that_cannot_be_had_early_is_run_in_time(target: TableTarget, plain: list[Completion], early: list[bool], error: Exception,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = Rounds._begin_early, []

    def failing(self: Rounds, batch: Sequence[Any]) -> Any:
        with monkeypatch.context() as now:
            if len(calls) % 2:
                now.setattr(TableTarget, "score", lambda *_: (_ for _ in ()).throw(error))
            calls.append(right(self, batch))
        return calls[-1]

    monkeypatch.setattr(Rounds, "_begin_early", failing)
    with Engine(target, guess_of("oracle", plain), 3, config=EngineConfig(profile_s=0)) as engine:
        out = engine.generate_batch(FIVE, SAMPLINGS)
        assert engine.speculation.state[0] == "on"
    assert [one.token_ids for one in out] == [one.token_ids for one in plain] and not target.open_slots
    assert all(asked is None for asked in calls[1::2]) and any(calls[::2]) and all(early)


def test_a_target_that_fails_for_good_ends_its_text_with_the_error(target: TableTarget, plain: list[Completion], early: list[bool],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(target, guess_of("wrong", plain), 3) as engine:
        handle = engine.submit(FIVE[1], SAMPLINGS[1])[0]
        engine.step(), engine.step()
        monkeypatch.setattr(TableTarget, "score", lambda *_: (_ for _ in ()).throw(RuntimeError("gone")))
        while not handle.done:
            engine.step()
        assert "gone" in str(handle.error)
        count = len(handle.completion().token_ids)
    assert handle.completion().token_ids == plain[1].token_ids[:count] and count > 1


@pytest.fixture(scope="module")
def paged(tiny_pair: tuple[Path, Path]) -> PagedTarget:
    found = load_target(tiny_pair[0], LoadConfig(device="cpu", self_test=False))
    assert isinstance(found, PagedTarget)
    return found


@pytest.mark.parametrize("tree", [None, 7])
@pytest.mark.parametrize("kind", ["wrong", "oracle"])
def test_pages_are_given_back_whatever_happens_to_a_round_under_way(paged: PagedTarget, kind: str, tree: int | None,
                                                                    early: list[bool]) -> None:
    """Somebody leaves, somebody steers, and the engine is closed while rounds are under way, of chains and trees."""
    long = [replace(sampling, max_tokens=24 + 9 * i) for i, sampling in enumerate(SAMPLINGS)]
    plain = [alone(paged, prompt, sampling) for prompt, sampling in zip(FIVE, long, strict=True)]
    free = paged.pool.available()
    with Engine(paged, guess_of(kind, plain), 3, tree=tree, config=EngineConfig(profile_s=0, max_batch=4)) as engine:
        handles = five_asked(engine, long)
        for _ in range(3):
            engine.step()
        engine.cancel(handles[1].id)
        for _ in range(3):
            engine.step()
            paged.check()
        assert all(early)
        engine.set_speculation(depth_cap=2)
        while not all(handles[i].done for i in (0, 2, 4)):
            engine.step()
            paged.check()
        assert early.count(False) == 1
        assert [handles[i].completion().token_ids for i in (0, 2, 4)] == [plain[i].token_ids for i in (0, 2, 4)]
        more = engine.submit(FIVE[1], long[4])[0]
        for _ in range(3):
            engine.step()
    assert more.done and not paged.slots
    paged.check()
    assert paged.pool.available() == free


def test_an_interrupted_request_for_a_round_leaves_texts_and_caches_as_they_agree(paged: PagedTarget, early: list[bool],
                                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [alone(paged, prompt, sampling) for prompt, sampling in zip(FIVE, SAMPLINGS, strict=True)]
    with Engine(paged, guess_of("oracle", plain), 3, config=EngineConfig(profile_s=0)) as engine:
        handle = engine.submit(FIVE[1], SAMPLINGS[1])[0]
        engine.step(), engine.step()
        with monkeypatch.context() as now:
            right, calls = PagedTarget.score, []

            def score(self: PagedTarget, *about: Any) -> Any:
                calls.append(right(self, *about))
                raise KeyboardInterrupt

            now.setattr(PagedTarget, "score", score)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert len(calls) == 1 and handle._seq.slot.length == len(handle._seq.tokens) - 1
        while not handle.done:
            engine.step()
        assert handle.completion().token_ids == plain[1].token_ids
    paged.check()
