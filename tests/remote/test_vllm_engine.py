"""The engine over fake vLLM servers: what it asks, what it makes of the answers, and what happens when a server dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import pytest
from remote.fake_vllm import PLAN, FakeVllm, text_of

from draftproof import Memory, Sampling
from draftproof.errors import Failure, OptionError
from draftproof.remote.fleet import Fleet, Replica
from draftproof.remote.vllm import Setting, VllmEngine
from draftproof.remote.writing import Writing
from draftproof.trace.events import RequestDone, RequestStarted, RoundDone
from draftproof.trace.report import requests

PROMPT = [5, 11]
SPEC = Setting("ngram", 3, "ratio")
Make = Callable[..., VllmEngine]


@pytest.fixture
def make(target: Any) -> Iterator[Make]:
    """An engine over the fakes given, plain ones being those of depth 0."""
    closing: list[Callable[[], None]] = []

    def build(*fakes: FakeVllm, setting: Setting = SPEC) -> VllmEngine:
        fleet = Fleet([Replica(f"{'spec' if fake.depth else 'plain'}{i}", not fake.depth, fake.url) for i, fake in enumerate(fakes)], 0.05)
        engine = VllmEngine(fleet, target, setting)
        closing.extend([engine.close, fleet.close, *(fake.close for fake in fakes)])
        fleet.start()
        fleet.wait(timeout_s=10)
        until(lambda: all(replica.state != "starting" for replica in fleet.replicas))
        return engine

    yield build
    for close in closing:
        close()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = monotonic() + seconds
    while not true():
        assert monotonic() < end, "it did not happen in time"
        sleep(0.01)


def run(engine: VllmEngine, *handles: Writing) -> list[Any]:
    events = []
    end = monotonic() + 20
    while not all(handle.done for handle in handles):
        assert monotonic() < end, "not finished in time"
        events += engine.step()
    return events


def options(**more: Any) -> Sampling:
    return Sampling(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **more})


def test_the_text_and_its_rounds(make: Make) -> None:
    engine, memory = make(FakeVllm(3, plain_every=4)), Memory()
    engine.events(memory)
    (handle,) = engine.submit(PROMPT, options(), prompt_class="code")
    events = run(engine, handle)
    done = handle.completion()
    assert done.token_ids == tuple(text_of(PROMPT, 20)) == tuple(event.token_id for event in events)
    assert done.text == "".join(event.text for event in events) and events[-1].finish == "length" and events[0].role == "prefill"
    rounds = [event for event in memory.events if isinstance(event, RoundDone)]
    drafted = [r for r in rounds if r.nodes]
    accepted = [sum(node.fate == "accepted" for node in r.nodes) for r in drafted]
    assert accepted[:4] == list(PLAN[:4]) and any(not r.nodes for r in rounds)
    assert 1 + sum(len(r.tokens) for r in rounds) == 20 and {r.drafter for r in rounds} == {"ngram"}
    assert [token.token for r in rounds for token in r.tokens] == list(done.token_ids[1:])
    report = requests(memory.events)[handle.id]
    assert report.prompt_class == "code" and report.tally.as_metrics() == {k: done.metrics[k] for k in report.tally.as_metrics()}
    assert done.speculation["state"] == "on" and "restarted" not in done.speculation and "identical" not in done.speculation
    assert isinstance(memory.events[1], RequestStarted) and isinstance(memory.events[-1], RequestDone)


def test_nothing_is_left_to_the_servers_defaults(make: Make) -> None:
    fake = FakeVllm(3)
    engine = make(fake)
    run(engine, *engine.submit(PROMPT, options(temperature=0.5, top_k=7, seed=3, stop_token_ids=(9,), repetition_penalty=1.1)))
    (body,) = fake.bodies
    assert {k: body[k] for k in ("temperature", "top_k", "top_p", "seed", "stop_token_ids", "repetition_penalty", "min_p", "model")} == {
        "temperature": 0.5, "top_k": 7, "top_p": 1.0, "seed": 3, "stop_token_ids": [9], "repetition_penalty": 1.1, "min_p": 0.0,
        "model": "fake"}
    assert body["return_token_ids"] and body["prompt"] == PROMPT


def test_off_is_another_replica(make: Make) -> None:
    spec, plain = FakeVllm(3), FakeVllm(0)
    engine = make(spec, plain)
    (asked,) = engine.submit(PROMPT, options(), speculation={"drafter": "none"})
    (bias,) = engine.submit(PROMPT, options(logit_bias={4: 1.0}))
    run(engine, asked, bias)
    assert len(plain.bodies) == 2 and not spec.bodies
    assert asked.completion().speculation["state"] == "off" and asked.completion().metrics["drafted"] == 0
    assert "vLLM refuses logit_bias" in bias.completion().speculation["reason"]
    assert engine.set_speculation(enabled=False)["state"] == "off"
    (handle,) = engine.submit(PROMPT, options())
    run(engine, handle)
    assert len(plain.bodies) == 3 and handle.completion().token_ids == tuple(text_of(PROMPT, 20))
    assert engine.set_speculation(enabled=True)["state"] == "on"
    run(engine, *engine.submit(PROMPT, options()))
    assert len(spec.bodies) == 1


def test_what_cannot_be_done_is_said(make: Make) -> None:
    engine = make(FakeVllm(3))
    for name, call in {
        "no plain replica": lambda: engine.set_speculation(enabled=False),
        "depth_cap": lambda: engine.set_speculation(depth_cap=2),
        "the replicas run 'ngram'": lambda: engine.set_speculation(drafter="suffix"),
        "depth=5": lambda: engine.submit(PROMPT, options(), speculation={"depth": 5}),
        "rule='match'": lambda: engine.submit(PROMPT, options(), speculation={"rule": "match"}),
        "drafter='suffix'": lambda: engine.submit(PROMPT, options(), speculation={"drafter": "suffix"}),
        "min_p": lambda: engine.submit(PROMPT, options(min_p=0.1)),
        "bad_word_ids": lambda: engine.submit(PROMPT, options(bad_word_ids=((4,),))),
        "prediction": lambda: engine.submit(PROMPT, options(prediction=(4, 5))),
    }.items():
        with pytest.raises(OptionError, match=name.replace("(", r"\(")):
            call()


def test_the_least_busy_replica_is_asked(make: Make) -> None:
    fakes = [FakeVllm(3, delay_s=0.01) for _ in range(3)]
    engine = make(*fakes)
    run(engine, *[handle for _ in range(9) for handle in engine.submit(PROMPT, options())])
    assert [len(fake.bodies) for fake in fakes] == [3, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_outlives_its_replica(make: Make, temperature: float) -> None:
    dying, other = FakeVllm(3, die_after=7), FakeVllm(3)
    engine, memory = make(dying, other), Memory()
    engine.events(memory)
    (handle,) = engine.submit(PROMPT, options(temperature=temperature, seed=5))
    events = run(engine, handle)
    done = handle.completion()
    assert dying.bodies and [event.token_id for event in events] == list(done.token_ids) == text_of(PROMPT, 20)
    assert done.speculation["restarted"] == 1 and "identical" not in done.speculation
    (body,) = other.bodies
    written = len(body["prompt"]) - len(PROMPT)
    assert written >= 7 and body["prompt"] == [*PROMPT, *done.token_ids[:written]] and body["max_tokens"] == 20 - written
    assert body["seed"] != 5, "the same noise twice would be no sample"
    rounds = [event for event in memory.events if isinstance(event, RoundDone)]
    assert [token.token for r in rounds for token in r.tokens] == list(done.token_ids[1:])
    assert any("lost before" in r.draft_reason for r in rounds) and any("continued" in r.reason for r in rounds)
    until(lambda: engine.fleet.replicas[0].state == "down")


def test_what_cannot_be_continued_ends_in_an_error(make: Make) -> None:
    engine = make(FakeVllm(3, die_after=7), FakeVllm(3))
    (handle,) = engine.submit(PROMPT, options(presence_penalty=0.5))
    run(engine, handle)
    assert isinstance(handle.error, Failure) and "cannot be continued" in str(handle.error)


def test_without_a_replica_texts_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.remote.vllm.PATIENCE_S", 0.3)
    fake = FakeVllm(3)
    engine = make(fake)
    fake.sick = True
    until(lambda: engine.fleet.replicas[0].state == "down")
    assert engine.set_speculation()["state"] == "out of service"
    (lost,) = engine.submit(PROMPT, options())
    run(engine, lost)
    assert isinstance(lost.error, Failure) and "no vLLM replica was up" in str(lost.error)
    monkeypatch.setattr("draftproof.remote.vllm.PATIENCE_S", 10.0)
    (handle,) = engine.submit(PROMPT, options())
    fake.sick = False
    run(engine, handle)
    assert handle.completion().token_ids == tuple(text_of(PROMPT, 20))


def test_a_plain_replica_stands_in(make: Make) -> None:
    spec, plain = FakeVllm(3, die_after=4), FakeVllm(0)
    engine = make(spec, plain)
    (handle,) = engine.submit(PROMPT, options())
    run(engine, handle)
    done = handle.completion()
    assert done.token_ids == tuple(text_of(PROMPT, 20)) and done.speculation["reason"] == "no speculative replica is up"


def test_samples_logprobs_and_cancelling(make: Make) -> None:
    fake = FakeVllm(3, delay_s=0.02)
    engine = make(fake)
    handles = engine.submit(PROMPT, options(n=2, temperature=1.0, seed=8, logprobs=1))
    events = run(engine, *handles)
    assert sorted(body["seed"] for body in fake.bodies) == [8, 9], "sent side by side, in any order"
    assert {event.sample for event in events} == {0, 1}
    done = handles[1].completion()
    assert done.logprobs is not None and len(done.logprobs) == 20 and done.logprobs[0].logprob == -0.5 and len(done.logprobs[0].top) == 1
    (handle,) = engine.submit(PROMPT, options(max_tokens=400))
    while not handle.output:
        engine.step()
    engine.cancel(handle.id)
    assert handle.done and handle.completion().finish_reason == "cancelled" and engine.fleet.replicas[0].live == 0
    until(lambda: fake.aborted == 1)


def test_ends(make: Make, target: Any) -> None:
    engine = make(FakeVllm(3))
    ids = text_of(PROMPT, 20)
    (by_id,) = engine.submit(PROMPT, options(stop_token_ids=(ids[6],)))
    pieces = target.tokenizer.decode(ids)
    (by_text,) = engine.submit(PROMPT, options(stop=(pieces[8:11],)))
    run(engine, by_id, by_text)
    assert by_id.completion().token_ids == tuple(ids[:7]) and by_id.completion().finish_reason == "stop"
    assert by_text.completion().text == pieces[:pieces.index(pieces[8:11])] and by_text.completion().finish_reason == "stop"


def test_a_refusal_is_told(make: Make) -> None:
    fake = FakeVllm(3, refusal="the prompt is too strange")
    engine = make(fake, FakeVllm(3))
    (handle,) = engine.submit(PROMPT, options())
    run(engine, handle)
    assert isinstance(handle.error, OptionError) and "the prompt is too strange" in str(handle.error) and len(fake.bodies) == 1
    assert handle.completion().speculation.get("restarted") is None, "it would be refused everywhere"


def test_two_arms(make: Make) -> None:
    spec, plain = FakeVllm(3), FakeVllm(0)
    engine = make(spec, plain, setting=Setting("ngram", 3, "ratio"))
    wishes = [{"drafter": "none"} if i % 4 == 0 else None for i in range(40)]
    run(engine, *[handle for wish in wishes for handle in engine.submit(PROMPT, options(max_tokens=6), speculation=wish)])
    assert len(plain.bodies) == 10
    arms = engine.set_speculation()["arms"]
    assert arms["off"]["requests"] == 10 and arms["speculative"]["tokens"] == 6 * len(spec.bodies)
    assert arms["off"]["tpot_s"] > 0
