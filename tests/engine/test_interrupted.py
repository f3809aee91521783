"""Steps that are interrupted anywhere: texts, counts, records and memory are those of steps that were not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.engine_support import PROMPTS, alone, check_counts, foresight, table

from draftproof import Completion, Engine, EngineConfig, LoadConfig, Sampling
from draftproof.drafters.base import Needs
from draftproof.drafters.fixed import Oracle
from draftproof.drafters.ngram import NgramDrafter, NgramState
from draftproof.engine import ahead, batch, round
from draftproof.engine.engine import Request
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.target import Target
from draftproof.trace.sinks import Memory
from draftproof.types import SequenceView


class Once:
    """Stands for a method, and raises the first time that `due` says so."""

    def __init__(self, right: Callable[..., Any], error: BaseException, due: Callable[[], bool], late: bool = False) -> None:
        self.right, self.error, self.due, self.late, self.fired = right, error, due, late, False

    def __call__(self, *about: Any) -> Any:
        fires = not self.fired and self.due()
        self.fired = self.fired or fires
        found = self.right(*about) if self.late or not fires else None
        if fires:
            raise self.error
        return found


def run_out(engine: Engine, handles: list[Request], errors: type[BaseException] | tuple[type[BaseException], ...]) -> int:
    """Run all texts to their ends; how many steps were interrupted."""
    interrupted = 0
    for _ in range(400):
        if all(handle.done for handle in handles):
            break
        try:
            engine.step()
        except errors:
            interrupted += 1
    assert all(handle.done for handle in handles)
    return interrupted


def check(engine: Engine, handles: list[Request], plain: list[Completion]) -> None:
    """Everything is as in plain decoding, and nothing is left behind."""
    for handle, want in zip(handles, plain, strict=True):
        found = handle.completion()
        assert (found.token_ids, found.finish_reason) == (want.token_ids, want.finish_reason)
        assert (found.logprobs is None) == (want.logprobs is None)
        if found.logprobs is not None and want.logprobs is not None:
            assert [one.token_id for one in found.logprobs] == list(found.token_ids)
            assert [one.logprob for one in found.logprobs] == pytest.approx([one.logprob for one in want.logprobs])
        check_counts(found)
    stats = engine.stats()
    assert stats["requests"] == {"waiting": 0, "running": 0, "done": len(handles)}
    assert stats["completion_tokens"] == sum(len(one.token_ids) for one in plain)


PARTS: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "observe": lambda engine: (engine.lanes, "observe"),
    "learn": lambda engine: (engine.lanes, "learn"),
    "tell": lambda engine: (engine._recorder, "rounds"),
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=["interrupt", "error"])
@pytest.mark.parametrize("part", PARTS)
def test_behind_a_commit(part: str, error: BaseException, last: bool, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text, and in the round that ends it."""
    monkeypatch.setattr(ahead, "overlaps", lambda target: early)
    target = table()
    samplings = [Sampling(temperature=0.9, seed=i, max_tokens=n, logprobs=k) for i, (n, k) in enumerate([(7, None), (30, None), (25, 1)])]
    for chosen in (samplings[:2], samplings):                # books of texts with log-probabilities are kept first
        plain = [alone(target, PROMPTS[i], sampling) for i, sampling in enumerate(chosen)]
        with Engine(target, "ngram:min=1,max=2", 3, config=EngineConfig(profile_s=0)) as engine:
            handles = [engine.submit(PROMPTS[i], sampling)[0] for i, sampling in enumerate(chosen)]
            place, name = PARTS[part](engine)
            first = handles[0]._seq
            once = Once(getattr(place, name), error, lambda first=first: first.finish is not None if last else len(first.output) > 2,
                        late=part == "tell")
            monkeypatch.setattr(place, name, once)
            assert run_out(engine, handles, type(error)) == 1 and once.fired
            check(engine, handles, plain)
        assert not target.open_slots


def test_in_the_middle_of_a_guess() -> None:
    """What a drafter had half done is let go, and not gone on with: an index that has a place twice would never end."""
    target, sampling = table(), Sampling(temperature=0.9, seed=1, max_tokens=20)

    class Half(NgramDrafter):
        opened, interrupted = 0, False

        def start(self, seq: SequenceView) -> NgramState:
            self.opened += 1
            return super().start(seq)

        def _index(self, state: NgramState, text: Sequence[int]) -> None:
            before = state.indexed
            super()._index(state, text)
            if not self.interrupted and len(text) > 12:
                self.interrupted, state.indexed = True, before
                raise KeyboardInterrupt

    drafter = Half(1, 2)
    with Engine(target, drafter, 3) as engine:
        handle = engine.submit(PROMPTS[0], sampling)[0]
        with pytest.raises(KeyboardInterrupt):
            while not handle.done:
                engine.step()
        assert handle._seq.state is None
        assert run_out(engine, [handle], KeyboardInterrupt) == 0 and drafter.opened == 2
        check(engine, [handle], [alone(target, PROMPTS[0], sampling)])
    assert not target.open_slots


def test_between_commit_and_rewind() -> None:
    target, sampling = table(), Sampling(temperature=0.9, seed=1, max_tokens=20, logprobs=1)
    plain = [alone(target, PROMPTS[0], sampling)]
    for last in (False, True):
        with Engine(target, "ngram:min=1,max=2", 3, config=EngineConfig(trace="none")) as engine, pytest.MonkeyPatch.context() as now:
            handle = engine.submit(PROMPTS[0], sampling)[0]
            seq = handle._seq
            due = (lambda seq=seq: seq.finish is not None) if last else (lambda seq=seq: len(seq.output) > 3)
            now.setattr(target, "rewind", Once(target.rewind, KeyboardInterrupt(), due))
            assert run_out(engine, [handle], KeyboardInterrupt) == 1
            found = handle.completion()
            assert found.token_ids == plain[0].token_ids and found.logprobs is not None
            assert [one.token_id for one in found.logprobs] == list(found.token_ids)
            assert engine.stats()["completion_tokens"] == len(found.token_ids)
        assert not target.open_slots


@pytest.mark.parametrize("tokens", [2, 6, 10])
def test_guesses_that_stood_in_a_round_that_was_interrupted_are_read_again(tokens: int) -> None:
    """Between commit and rewind: the text has them, and the slot forgets their keys."""
    target, sampling = table(), Sampling(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    plain = alone(target, PROMPTS[0], sampling)
    drafter = Oracle(foresight([[*PROMPTS[0], *plain.token_ids]]))
    with Engine(target, drafter, 3, config=EngineConfig(trace="none")) as engine, pytest.MonkeyPatch.context() as now:
        handle, = engine.submit(PROMPTS[0], sampling)
        seq = handle._seq
        now.setattr(target, "rewind", Once(target.rewind, KeyboardInterrupt(), lambda: len(seq.output) >= tokens))
        with pytest.raises(KeyboardInterrupt):
            while not handle.done:
                engine.step()
        assert seq.slot is not None and seq.slot.length == len(seq.tokens) - 4, "three that stood, and the one that is never fed"
        assert run_out(engine, [handle], ()) == 0 and handle.completion().token_ids == plain.token_ids
    assert not target.open_slots


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")], ids=["interrupt", "error"])
def test_a_text_of_one_token_whose_step_is_interrupted(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is read in the step in which the round of another one is interrupted behind its commit."""
    target, samplings = table(), [Sampling(temperature=0.9, seed=1, max_tokens=n) for n in (30, 1)]
    plain = [alone(target, PROMPTS[i], sampling) for i, sampling in enumerate(samplings)]
    with Engine(target, "ngram:min=1,max=2", 3) as engine:
        handles = engine.submit(PROMPTS[0], samplings[0])
        for _ in range(3):
            engine.step()
        handles += engine.submit(PROMPTS[1], samplings[1])
        monkeypatch.setattr(engine.lanes, "observe", Once(engine.lanes.observe, error, lambda: True))
        assert run_out(engine, handles, type(error)) == 1
        check(engine, handles, plain)
    assert not target.open_slots


@pytest.mark.parametrize("trace", ["summary", "full"])
@pytest.mark.parametrize("at", [3, 9])
def test_a_sink_that_fails_once(at: int, trace: Any) -> None:
    """Also in the round that ends a text; what other texts keep of the round is whole."""
    class Sink(Memory):
        tokens, failed = 0, 0

        def write(self, event: Any) -> None:
            self.tokens += len(event.tokens) if event.event == "round_done" and event.request == handles[0].id else 0
            if self.tokens >= at and not self.failed:
                self.failed = 1
                raise OSError("the collector is gone")
            super().write(event)

    target, samplings = table(), [Sampling(temperature=0.9, seed=1, max_tokens=n, ignore_eos=True) for n in (10, 30)]
    plain = [alone(target, PROMPTS[i], sampling) for i, sampling in enumerate(samplings)]
    handles: list[Request] = []
    sink = Sink()
    with Engine(target, "ngram:min=1,max=2", 3, sinks=[sink], config=EngineConfig(trace=trace)) as engine:
        handles += [engine.submit(PROMPTS[i], sampling)[0] for i, sampling in enumerate(samplings)]
        assert run_out(engine, handles, OSError) == sink.failed == 1
        check(engine, handles, plain)
    assert not target.open_slots


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_sink_that_fails_where_texts_end(at: int) -> None:
    """Several at once: the books of each are closed, and once."""
    class Sink(Memory):
        ends = 0

        def write(self, event: Any) -> None:
            self.ends += event.event == "request_done"
            if event.event == "request_done" and self.ends == at:
                raise OSError("the collector is gone")
            super().write(event)

    target, sampling = table(), Sampling(temperature=0, max_tokens=6, ignore_eos=True)
    plain = [alone(target, prompt, sampling) for prompt in PROMPTS[:3]]
    with Engine(target, sinks=[Sink()]) as engine:
        handles = [engine.submit(prompt, sampling)[0] for prompt in PROMPTS[:3]]
        with pytest.raises(OSError, match="the collector is gone"):
            while not all(handle.done for handle in handles):
                engine.step()
        assert not engine.step()
        check(engine, handles, plain)


@pytest.mark.parametrize("name", ["leave", "forget"])
def test_while_a_text_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a drafter does there may take its time: `suffix` remembers the text. The next step ends it."""
    target, sampling = table(), Sampling(temperature=0.9, seed=1, max_tokens=9)
    plain = [alone(target, PROMPTS[i], sampling) for i in range(2)]
    with Engine(target, "suffix", 3) as engine:
        handles = [engine.submit(PROMPTS[i], sampling)[0] for i in range(2)]
        once = Once(getattr(engine.lanes, name), KeyboardInterrupt(), lambda: handles[0]._seq.finish is not None)
        monkeypatch.setattr(engine.lanes, name, once)
        assert run_out(engine, handles, KeyboardInterrupt) == 1
        check(engine, handles, plain)
    assert not target.open_slots


@pytest.fixture(scope="module", params=["table", "paged"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "table":
        return table()
    pair: tuple[Path, Path] = request.getfixturevalue("tiny_pair")
    return load_target(pair[0], LoadConfig(device="cpu", self_test=False, page_tokens=16))


@pytest.mark.parametrize("kind", ["none", "ngram:min=1,max=2"])
@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("part", ["laws", "choose", "note_logprobs"])
def test_between_a_prompt_and_its_first_token(target: Target, part: str, when: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three prompts that one pass has read, the one whose token is chosen, and those whose turn had not come."""
    samplings = [Sampling(temperature=0.9, seed=i, max_tokens=20) for i in range(3)]
    plain = [alone(target, [5, 6, 7], sampling) for sampling in samplings]
    with Engine(target, kind, "auto" if kind == "none" else 3, config=EngineConfig(profile_s=0)) as engine:
        handles = [engine.submit([5, 6, 7], sampling)[0] for sampling in samplings]
        calls: list[int] = []
        once = Once(getattr(round, part), KeyboardInterrupt(), lambda: calls.append(1) or len(calls) == when, late=part == "note_logprobs")
        monkeypatch.setattr(round, part, once)
        assert run_out(engine, handles, KeyboardInterrupt) == 1
        for handle, want in zip(handles, plain, strict=True):
            found = handle.completion()
            assert (found.token_ids, found.finish_reason) == (want.token_ids, want.finish_reason), found.error
        assert engine.stats()["completion_tokens"] == sum(len(one.token_ids) for one in plain)
    if isinstance(target, PagedTarget):
        target.check()
        assert not target.slots


@pytest.mark.parametrize("when", [1, 2, 4, 5])
def test_between_the_passes_of_a_prompt(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter reads no hidden states but those of the positions that they are said to be of."""
    class Reader(Oracle):
        needs = Needs(taps=(0,))
        starts: list[int] = []

        def open(self, seq: Any, signals: Any) -> Any:
            if signals is not None:
                fed = [target.hidden(seq.tokens[:at + 1]) for at in range(signals.start, seq.prompt_tokens)]
                assert torch.equal(signals.taps[0], torch.stack(fed))
                self.starts.append(signals.start)
            return super().open(seq, signals)

    target, samplings = table(), [Sampling(temperature=0.9, seed=i, max_tokens=12) for i in range(2)]
    prompts = [[1, 2, 3] * 4, [3, 2, 1] * 4]
    plain = [alone(target, prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    ahead_of = foresight([[*prompt, *one.token_ids] for prompt, one in zip(prompts, plain, strict=True)])
    with Engine(target, Reader(ahead_of), 3, load=LoadConfig(prefill_chunk=5)) as engine:
        handles = [engine.submit(prompt, sampling)[0] for prompt, sampling in zip(prompts, samplings, strict=True)]
        calls: list[int] = []
        monkeypatch.setattr(batch, "rows_at", Once(batch.rows_at, KeyboardInterrupt(), lambda: calls.append(1) or len(calls) == when))
        assert run_out(engine, handles, KeyboardInterrupt) == 1
        assert engine.speculation.state[0] == "on", engine.speculation.failure
        assert [handle.completion().token_ids for handle in handles] == [one.token_ids for one in plain]
    assert len(Reader.starts) == 2 and any(Reader.starts)
