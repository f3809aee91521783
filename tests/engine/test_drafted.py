"""Drafts that are asked for before a round's books are kept: the same texts, and where nobody comes or goes the same rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engine_support import PROMPTS, VOCABULARY, alone, drafters, table

from draftproof import Completion, Engine, Sampling
from draftproof.config import EngineConfig, LoadConfig
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.engine import ahead
from draftproof.engine.ahead import LATE, Drafted
from draftproof.engine.control import AutoDepth
from draftproof.engine.lanes import Lanes
from draftproof.engine.plans import FixedDepth
from draftproof.models.fake import TableTarget
from draftproof.models.load import WEIGHTS, load_target

SAMPLINGS = [Sampling(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True)
             for i, (temperature, n) in enumerate([(0.0, 12), (0.9, 25), (0.9, 4), (0.0, 17), (1.0, 9)])]
FIVE = PROMPTS[:5]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Drafts are asked for early on a CPU, too; whether those of each round were its."""
    taken: list[bool] = []
    right = Drafted.take

    def take(self: Drafted, *about: Any) -> Any:
        found = right(self, *about)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Drafted, "take", take)
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


@pytest.mark.parametrize("most", [5, 2])
@pytest.mark.parametrize("depth", [3, "auto"])
@pytest.mark.parametrize("kind", ["ngram", "model", "wrong", "oracle"])
def test_texts_are_those_of_plain_decoding(target: TableTarget, plain: list[Completion], early: list[bool], kind: str, depth: Any,
                                           most: int) -> None:
    with Engine(target, guess_of(kind, plain), depth, config=EngineConfig(max_batch=most, profile_s=0, trace="full")) as engine:
        out = engine.generate_batch(FIVE, SAMPLINGS)
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    assert [one.token_ids for one in out] == [one.token_ids for one in plain]
    assert len(early) > 4 and all(early), "whoever came or left, the others kept their drafts"
    late = [event for one in out for event in one.trace if event.event == "round_done" and event.reason == LATE]
    assert bool(late) is (most < len(FIVE)) and all(not event.nodes for event in late)


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("kind", ["ngram", "model", "wrong", "oracle"])
def test_rounds_are_those_of_drafts_that_were_asked_for_in_time(target: TableTarget, plain: list[Completion], kind: str, rule: Any,
                                                                early: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for before in (True, False):
        monkeypatch.setattr(ahead, "overlaps", lambda target, before=before: before)
        with Engine(target, guess_of(kind, plain), 3, rule=rule, config=EngineConfig(profile_s=0, trace="full")) as engine:
            out = engine.generate_batch(FIVE, SAMPLINGS)
        found.append([[(event.nodes, event.tokens, event.reason) for event in one.trace if event.event == "round_done"] for one in out])
    assert early and found[0] == found[1]


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
        handles = [handle for prompt, sampling in zip(FIVE, SAMPLINGS, strict=True) for handle in engine.submit(prompt, sampling)]
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
        handles = [handle for prompt, sampling in zip(FIVE, SAMPLINGS, strict=True) for handle in engine.submit(prompt, sampling)]
        for gone in (1, 0, 3):
            engine.step()
            engine.cancel(handles[gone].id)
        while not all(handle.done for handle in handles):
            engine.step()
        assert engine.speculation.state[0] == "on" and all(early)
    for i in (2, 4):
        assert handles[i].completion().token_ids == plain[i].token_ids


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
    """Drafts took 100 s of which 30 were left when their round began."""
    seen: list[float] = []
    monkeypatch.setattr(Drafted, "seconds", lambda self, start: (100.0, 30.0))
    monkeypatch.setattr(AutoDepth, "learn", lambda self, batch, budgets, drafts, verdicts, times: seen.append(times.draft_s))
    monkeypatch.setattr(AutoDepth, "depths", lambda self, batch, rooms, whole: FixedDepth(2).depths(batch, rooms, whole))
    with Engine(target, guess_of("ngram", plain), config=EngineConfig(profile_s=0)) as engine:
        out = engine.generate(FIVE[0], SAMPLINGS[0])
    assert seen[0] < 50 and len(seen) > 2 and all(99 < spent < 101 for spent in seen[1:])
    assert out.metrics["draft_s"] > 100 and out.metrics["verify_s"] < 50


def test_on_a_processor_nothing_is_asked_early(target: TableTarget, plain: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafted, "__init__", lambda *_: pytest.fail("asked for"))
    with Engine(target, AlwaysWrong(VOCABULARY), 3) as engine:
        assert engine.generate(FIVE[0], SAMPLINGS[0]).token_ids == plain[0].token_ids


def test_where_nobody_guesses_nothing_is_asked_early(target: TableTarget, plain: list[Completion], early: list[bool]) -> None:
    """A text that joins others is told why it is not guessed for, not that guesses of others were under way."""
    for drafter, switched in (("none", None), (guess_of("wrong", plain), False)):
        with Engine(target, drafter, config=EngineConfig(max_batch=2, profile_s=0, trace="summary")) as engine:
            engine.set_speculation(enabled=switched)
            out = engine.generate_batch(FIVE, SAMPLINGS)
        reasons = {event.reason for one in out for event in one.trace if event.event == "round_done"}
        assert len(reasons) == 1 and LATE not in reasons and [one.token_ids for one in out] == [one.token_ids for one in plain]
    assert not early
