"""Several drafters in one engine: requests of one batch that are guessed by different ones, and what one of them breaks."""

from __future__ import annotations

from statistics import median
from time import sleep
from typing import Any

import pytest
from contract.eagle_heads import EAGLE_HEADS
from contract.vector_heads import VECTOR_HEADS
from engine.engine_support import VOCABULARY, alone, check_counts, table
from engine.test_faulty_drafters import Faulty

from draftproof import Budget, Engine, EngineConfig, Sampling
from draftproof.drafters.fixed import AlwaysWrong, NoDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.control import AutoDepth
from draftproof.engine.port import Completion
from draftproof.engine.speculation import Speculation
from draftproof.errors import OptionError, SpecError
from draftproof.models.fake import TableTarget

WISHES = [None, {"drafter": "none"}, {"drafter": "model"}, {"drafter": "always-wrong", "depth": 2}, {"drafter": "model", "depth": 5}]


def wrong(target: TableTarget) -> AlwaysWrong:
    """Never right: it looks at the target's own greedy choice, and the requests here are greedy."""
    return AlwaysWrong(VOCABULARY, lambda text: int(target.law(text).argmax()))


def test_requests_of_one_batch_have_their_own_drafters_and_the_same_texts() -> None:
    target = table(seed=4)
    options = [Sampling(temperature=0, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(WISHES) * 2)]
    with Engine(target, "ngram:min=1,max=2", 3, others=[ModelDrafter(table(seed=4)), wrong(target)]) as engine:
        handles = [engine.submit([1, 2, i % 5], one, speculation=WISHES[i % len(WISHES)])[0] for i, one in enumerate(options)]
        while not all(handle.done for handle in handles):
            engine.step()
        state = engine.set_speculation()
    outs = [handle.completion() for handle in handles]
    for i, (out, one) in enumerate(zip(outs, options, strict=True)):
        assert out.token_ids == alone(target, [1, 2, i % 5], one).token_ids
        check_counts(out)
        drafted = {event.drafter for event in out.trace if event.event == "round_done" and event.nodes}
        assert drafted <= {["ngram", "", "model", "always-wrong", "model"][i % len(WISHES)]}
        assert out.speculation["drafter"] == ["ngram", "ngram", "model", "always-wrong", "model"][i % len(WISHES)]
        assert out.speculation["state"] == ("off" if i % len(WISHES) == 1 else "on")
    kinds: list[list[Completion]] = [outs[i::len(WISHES)] for i in range(len(WISHES))]
    assert all(out.metrics["drafted"] == 0 for out in kinds[1])
    assert all(out.metrics["drafted"] and out.metrics["accepted"] == 0 for out in kinds[3]), "the one that is always wrong"
    assert all(out.metrics["draft_utilisation"] == 1 for out in (*kinds[2], *kinds[4])), "the one that is the target"
    depths = {event.depth for out in kinds[4] for event in out.trace if event.event == "round_done"}
    assert max(depths) == 5 and {name: lane["state"] for name, lane in state["others"].items()} == {"model": "on", "always-wrong": "on"}


def test_drafters_hold_nothing_while_they_are_switched_off() -> None:
    """Of no text, and they join those that go on when they are on again."""
    target, models = table(seed=4), [table(seed=5), table(seed=6)]
    sampling = Sampling(temperature=0, max_tokens=30, ignore_eos=True)
    with Engine(target, ModelDrafter(models[0], name="one"), 2, others=[ModelDrafter(models[1], name="two")]) as engine:
        handles = [engine.submit([1, 2, i], sampling, speculation={"drafter": name})[0] for i, name in enumerate(("one", "two"))]
        for enabled in (True, True, False, True):
            before = [[*model.open_slots] for model in models]
            engine.set_speculation(enabled=enabled)
            assert [model.open_slots for model in models] == (before if enabled else [[], []]), "what is on already stays as it is"
            for _ in range(3):
                engine.step()
            assert [bool(model.open_slots) for model in models] == [enabled] * 2
        while not all(handle.done for handle in handles):
            engine.step()
    for i, handle in enumerate(handles):
        assert handle.completion().token_ids == alone(target, [1, 2, i], sampling).token_ids and handle.completion().metrics["drafted"]


def test_controllers_learn_apart() -> None:
    """In the same rounds, with depth auto: one of a drafter that is always right, one of a drafter that never is."""
    target = table(seed=4)
    engine = Engine(target, ModelDrafter(table(seed=4)), others=[wrong(target)])
    with engine:
        handles = [engine.submit([1, 2], Sampling(temperature=0, max_tokens=300, ignore_eos=True), speculation={"drafter": name})[0]
                   for name in ("model", "always-wrong")]
        while not all(handle.done for handle in handles):
            engine.step()
        right, junk = (list(lane.control.hazards.means()) for lane in engine.lanes.lanes)  # type: ignore[attr-defined]
    assert right[0] > 0.8 and junk[0] < 0.3
    assert handles[0].completion().token_ids == handles[1].completion().token_ids


@pytest.mark.parametrize("others", [0, 1])
def test_planning_is_not_charged_to_the_drafter(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a controller takes to think would make every draft look dear, and be one more reason to draft nothing."""
    target, told, plan, learn = table(seed=4), list[float](), Speculation.plan, AutoDepth.learn

    def slow(lane: Speculation, *rest: Any) -> list[Budget]:
        sleep(0.02)
        return plan(lane, *rest)

    def heard(control: AutoDepth, *rest: Any) -> None:
        told.append(rest[-1].draft_s)
        learn(control, *rest)

    monkeypatch.setattr(Speculation, "plan", slow)
    monkeypatch.setattr(AutoDepth, "learn", heard)
    with Engine(target, ModelDrafter(table(seed=4)), others=[wrong(target)] * others) as engine:
        handles = [engine.submit([1, 2], Sampling(temperature=0, max_tokens=40, ignore_eos=True), speculation={"drafter": name})[0]
                   for name in ("model", "always-wrong")[:1 + others]]
        while not all(handle.done for handle in handles):
            engine.step()
    assert len(told) > 10 and median(told) < 0.01


def test_a_drafter_that_fails_takes_no_other_with_it() -> None:
    target = table()
    with Engine(target, NgramDrafter(1, 2), 3, others=[Faulty("raise")]) as engine:
        wishes = [{"drafter": "ngram"}, {"drafter": "faulty"}]
        options = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
        handles = [engine.submit([1, 2, 1, 2], options, speculation=wish)[0] for wish in wishes]
        while not all(handle.done for handle in handles):
            engine.step()
        state = engine.set_speculation()
    good, bad = (handle.completion() for handle in handles)
    assert good.token_ids == bad.token_ids == alone(target, [1, 2, 1, 2], options).token_ids
    assert good.speculation["state"] == "on" and bad.speculation["state"] == "out of service"
    assert state["state"] == "on" and state["others"]["faulty"]["state"] == "out of service"
    assert [e for e in good.trace if e.event == "round_done"][-1].depth > 0 or good.metrics["drafted"] > 10


def test_heads_that_read_different_layers_share_the_passes() -> None:
    target = TableTarget(13, order=2, seed=1)
    wish = Sampling(temperature=0.7, top_p=1.0, seed=3, max_tokens=24)
    makers = [EAGLE_HEADS["eagle3"], VECTOR_HEADS["medusa"]]
    apart = [Engine(target, make(target, None), 3).generate([1, 2, 3], wish) for make in makers]
    one, other = (make(target, None) for make in makers)
    with Engine(target, one, 3, others=[other]) as engine:
        handles = [engine.submit([1, 2, 3], wish, speculation={"drafter": drafter.name})[0] for drafter in (one, other)]
        while not all(handle.done for handle in handles):
            engine.step()
    for handle, expected in zip(handles, apart, strict=True):
        done = handle.completion()
        assert done.token_ids == expected.token_ids and done.speculation["state"] == "on"
        assert (done.metrics["drafted"], done.metrics["accepted"]) == (expected.metrics["drafted"], expected.metrics["accepted"])


def test_the_switch_reaches_all_and_unknown_names_are_refused() -> None:
    with Engine(table(), "none", others=["ngram:min=1,max=2", "ngram:min=3,max=4"]) as engine:
        engine.set_speculation(enabled=False, depth_cap=2)
        assert all(not lane.enabled and lane.depth_cap == 2 for lane in engine.lanes.lanes)
        off = engine.generate([1, 2, 1, 2], temperature=0, max_tokens=20, speculation={"drafter": "ngram:min=1,max=2"})
        assert off.metrics["drafted"] == 0 and off.speculation["state"] == "off"
        engine.set_speculation(enabled=True)
        on = engine.generate([1, 2, 1, 2], temperature=0, max_tokens=20, speculation={"drafter": "ngram:min=1,max=2", "depth": 4})
        assert on.metrics["drafted"] and on.token_ids == off.token_ids
        assert max(event.depth for event in on.trace if event.event == "round_done") <= 2
        with pytest.raises(OptionError, match="'none', 'ngram:min=1,max=2', 'ngram:min=3,max=4'"):
            engine.submit([1], speculation={"drafter": "suffix"})
        with pytest.raises(OptionError, match="with drafter none"):
            engine.submit([1], speculation={"depth": 3})
    with pytest.raises(OptionError, match="expected drafters that guess"):
        Engine(table(), others=["none"])


@pytest.mark.parametrize("nothing", ["none", NoDrafter()], ids=["spec", "drafter"])
def test_a_drafter_that_comes_back_has_the_depth_that_was_asked(nothing: Any) -> None:
    spec, options = "ngram:min=1,max=2", Sampling(temperature=0, max_tokens=30, ignore_eos=True)
    with Engine(table(), spec, 4, others=["ngram:min=2,max=4"]) as engine:
        assert engine.set_speculation(drafter=nothing)["depth"] == 0
        beside = engine.generate([1, 2, 1, 2], options, speculation={"drafter": "ngram:min=2,max=4"})
        assert beside.speculation["depth"] == 4
        with pytest.raises(SpecError):
            engine.set_speculation(drafter="magic")
        assert engine.set_speculation()["drafter"] == "none"
        assert engine.set_speculation(drafter=spec)["depth"] == 4
        out = engine.generate([1, 2, 1, 2], options)
        depths = {event.depth for event in out.trace if event.event == "round_done"}
        assert out.speculation["depth"] == max(depths) == 4
    with Engine(table(), spec, config=EngineConfig(profile_s=0)) as engine:
        engine.set_speculation(drafter=nothing)
        assert engine.set_speculation(drafter=spec)["depth"] == "auto"


def test_a_drafter_that_fails_to_open_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*about: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr("draftproof.drafters.suffix.SuffixDrafter.from_spec", gone)
    with Engine(table(), "ngram", 4) as engine:
        with pytest.raises(OSError, match="disk is gone"):
            engine.set_speculation(drafter="suffix")
        assert engine.settings.drafter == "ngram" and engine.set_speculation()["drafter"] == "ngram"
