"""An engine is of one thread at a time, takes nothing once it is closed, and names what is no prompt."""

from __future__ import annotations

from threading import Barrier, Event, Thread
from typing import Any

import pytest

from draftproof import Engine, Sampling
from draftproof.errors import Failure, PromptError
from draftproof.models.fake import TableTarget

PROMPT, SAMPLING = [1, 2, 3], Sampling(temperature=0, max_tokens=12)


class Slow(TableTarget):
    """A target whose first pass after `hold` waits until it is let go."""

    hold = False

    def score(self, *arguments: Any, **named: Any) -> Any:
        if self.hold:
            self.hold = False
            self.entered.set()
            assert self.go.wait(20)
        return super().score(*arguments, **named)


@pytest.fixture
def slow() -> Slow:
    target = Slow(9, order=1, seed=1)
    target.entered, target.go = Event(), Event()
    return target


def test_what_another_thread_asks_in_a_round_is_refused_and_harms_nobody(slow: Slow) -> None:
    with Engine(slow) as engine:
        alone = engine.generate(PROMPT, SAMPLING)
        slow.hold = True
        found: list[Any] = []
        thread = Thread(target=lambda: found.append(engine.generate(PROMPT, SAMPLING)))
        thread.start()
        assert slow.entered.wait(20)
        for call in (lambda: engine.generate(PROMPT, SAMPLING), lambda: engine.submit(PROMPT), engine.step,
                     lambda: next(engine.stream(PROMPT, SAMPLING))):
            with pytest.raises(Failure, match="in a round in another thread; .*generate_batch"):
                call()
        slow.go.set()
        thread.join(20)
        assert found[0].token_ids == alone.token_ids and engine.generate(PROMPT, SAMPLING).token_ids == alone.token_ids


def test_threads_that_do_not_wait_for_each_other_get_their_text_or_an_error_that_says_why() -> None:
    with Engine(TableTarget(9, order=1, seed=1), "ngram", depth=2) as engine:
        alone, start, found = engine.generate(PROMPT, SAMPLING), Barrier(6), []

        def ask() -> None:
            start.wait(20)
            try:
                found.append(engine.generate(PROMPT, SAMPLING).token_ids)
            except Exception as error:
                found.append(error)

        threads = [Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        texts = [each for each in found if not isinstance(each, Exception)]
        assert len(found) == 6 and texts and all(text == alone.token_ids for text in texts)
        assert all(isinstance(each, Failure) for each in found if isinstance(each, Exception))
        assert engine.stats()["requests"]["running"] == 0 and engine.generate(PROMPT, SAMPLING).token_ids == alone.token_ids


def test_a_stream_goes_on_between_other_requests_of_its_thread() -> None:
    with Engine(TableTarget(9, order=1, seed=1)) as engine:
        alone = engine.generate(PROMPT, SAMPLING)
        stream = engine.stream(PROMPT, SAMPLING)
        tokens = [next(stream).token_id]
        assert engine.generate(PROMPT, SAMPLING).token_ids == alone.token_ids
        assert (*tokens, *(event.token_id for event in stream)) == alone.token_ids


def test_a_closed_engine_takes_nothing() -> None:
    engine = Engine(TableTarget(9, order=1, seed=1), "ngram")
    engine.generate(PROMPT, SAMPLING)
    assert repr(engine).endswith("drafter ngram, depth auto, rule match>")
    for _ in range(2):
        engine.close()
    assert repr(engine).endswith("rule match, closed>")
    for call in (lambda: engine.generate(PROMPT, SAMPLING), lambda: engine.submit(PROMPT), lambda: next(engine.stream(PROMPT))):
        with pytest.raises(Failure, match="closed; open another"):
            call()
    assert engine.stats()["requests"]["done"] == 1 and engine.step() == []


@pytest.mark.parametrize(("prompt", "words"), [(None, "of type NoneType; expected a text, or a list"), (5, "of type int"),
                                               (3.5, "of type float"), ([1, "a"], "no token id"), ([], "empty")])
def test_what_is_no_prompt_is_named(prompt: Any, words: str) -> None:
    with Engine(TableTarget(9, order=1, seed=1)) as engine:
        with pytest.raises(PromptError, match=words):
            engine.generate(prompt, SAMPLING)
        with pytest.raises(PromptError, match=words):
            engine.generate_batch([PROMPT, prompt], SAMPLING)
        with pytest.raises(PromptError, match="prompts is one text; expected a list"):
            engine.generate_batch("def a(", SAMPLING)
        assert engine.stats()["requests"] == {"waiting": 0, "running": 0, "done": 1}
