"""Where texts end: stop strings and ids, also inside a draft, at exactly the place where plain decoding ends them."""

from __future__ import annotations

import pytest
from engine.engine_support import EOS, alone, check_counts, foresight, full, table
from engine.letters import Letters

from draftproof import Engine, OptionError, Sampling
from draftproof.drafters.fixed import Oracle
from draftproof.engine.text import Text

STOPS = [("ab",), ("ba", "abc"), ("é",), ("d e", "bb"), ("aba",), (" a", "b "), ("cé",), ("eee", "dd", "cc")]


def lettered() -> object:
    return table(seed=3, tokenizer=Letters())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stop", STOPS, ids=[" ".join(s) for s in STOPS])
def test_a_stop_string_cuts_where_plain_decoding_is_cut(stop: tuple[str, ...], seed: int) -> None:
    target = lettered()
    free = alone(target, [0, 1], Sampling(seed=seed, max_tokens=60))  # type: ignore[arg-type]
    sampling = Sampling(seed=seed, max_tokens=60, stop=stop)
    want = alone(target, [0, 1], sampling)  # type: ignore[arg-type]
    cuts = [free.text.find(s) for s in stop if s in free.text]
    assert want.text == (free.text[: min(cuts)] if cuts else free.text)
    assert want.finish_reason == ("stop" if cuts else free.finish_reason)
    assert want.token_ids == free.token_ids[: len(want.token_ids)]
    ahead = foresight([[0, 1, *free.token_ids]])  # guesses on, beyond the stop
    for depth, tree in ((1, None), (4, None), (7, None), (4, 12)):
        with Engine(target=target, drafter=Oracle(ahead, decoys=2), depth=depth, tree=tree, config=full()) as engine:  # type: ignore[arg-type]
            pieces = list(engine.stream([0, 1], sampling))
            got = engine.generate([0, 1], sampling)
        assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
        assert "".join(event.text for event in pieces) == want.text
        assert tuple(event.token_id for event in pieces) == want.token_ids
        check_counts(got)
        last = got.trace[-2]
        if want.finish_reason == "stop" and last.event == "round_done" and last.tokens[-1].role == "accepted":
            kept = sum(node.fate == "accepted" for node in last.nodes)
            assert kept == len(last.tokens) and not any(node.fate == "rejected" for node in last.nodes)


@pytest.mark.parametrize("stop_id", range(8))
def test_a_stop_id_inside_a_draft(stop_id: int) -> None:
    target = table(seed=3)
    sampling = Sampling(seed=4, max_tokens=50, stop_token_ids=(stop_id,), min_tokens=4)
    free = alone(target, [0, 1], Sampling(seed=4, max_tokens=50))
    want = alone(target, [0, 1], sampling)
    ahead = foresight([[0, 1, *want.token_ids, 1, 1, 1, 1], [0, 1, *free.token_ids]])
    with Engine(target=target, drafter=Oracle(ahead), depth=6) as engine:
        got = engine.generate([0, 1], sampling)
    assert got.token_ids == want.token_ids and got.finish_reason == want.finish_reason
    if got.finish_reason == "stop":
        assert got.token_ids[-1] in (stop_id, EOS) and len(got.token_ids) > 4
        assert not {stop_id, EOS} & set(got.token_ids[:-1])
    check_counts(got)


def test_max_tokens_and_context_end_a_text_and_bound_the_draft() -> None:
    target = table(seed=3, context=20)
    free = [0, 1, *alone(table(seed=3), [0, 1], Sampling(seed=4, max_tokens=50, ignore_eos=True)).token_ids]
    for most, length in ((1, 1), (2, 2), (5, 5), (50, 18)):
        with Engine(target=target, drafter=Oracle(foresight([free])), depth=6, config=full()) as engine:
            out = engine.generate([0, 1], Sampling(seed=4, max_tokens=most, ignore_eos=True))
        assert len(out.token_ids) == length and out.finish_reason == "length"
        assert list(out.token_ids) == free[2 : 2 + length]
        emitted = 1
        for event in out.trace:
            if event.event == "round_done":
                assert len(event.nodes) <= event.depth <= length - emitted - 1
                emitted += len(event.tokens)


def test_text_needs_a_tokenizer() -> None:
    with Engine(target=table()) as engine:
        for options in ({"stop": ("x",)}, {"bad_words": ("x",)}):
            with pytest.raises(OptionError, match="no tokenizer"):
                engine.generate([1], Sampling(**options))  # type: ignore[arg-type]
        assert engine.generate([1], seed=1).text == ""


def test_bad_words_are_banned_with_and_without_a_space_before_them() -> None:
    target = table(seed=3, tokenizer=Letters())
    sampling = Sampling(seed=1, temperature=1.5, max_tokens=200, bad_words=("c",), ignore_eos=True)
    out = alone(target, [0, 1], sampling)
    assert "c" not in out.text and "c" in alone(target, [0, 1], Sampling(seed=1, temperature=1.5, max_tokens=200, ignore_eos=True)).text
    with Engine(target=target) as engine:
        handle = engine.submit([0], Sampling(bad_words=("d",)))[0]
        engine.step()
    assert [[8], [3, 8]] == [e for e in handle.completion().trace if e.event == "request_started"][0].sampling["bad_word_ids"]


def test_characters_arrive_whole() -> None:
    text = Text(Letters(), [0], ())  # type: ignore[arg-type]
    assert [text.push(token, True)[0] for token in (1, 4, 5, 4)] == ["b", "", "é", ""]
    assert text.end() == "�" and text.released == "bé�"
    split = Text(Letters(), [0, 4], ())  # type: ignore[arg-type]
    assert split.push(5, True) == ("é", False), "a character that begins in the prompt ends in the text"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = Text(Letters(), [0], ("abac", "d"))  # type: ignore[arg-type]
    steps = [text.push(token, True) for token in (1, 2, 0, 1, 0, 6)]  # b, ab, a, b, a, c
    assert steps == [("b", False), ("", False), ("", False), ("ab", False), ("", False), ("", True)]
    assert text.released == "bab"
    open_end = Text(Letters(), [0], ("abac",))  # type: ignore[arg-type]
    assert [open_end.push(token, True)[0] for token in (1, 2)] == ["b", ""]
    assert open_end.end() == "ab" and open_end.released == "bab"
    early = Text(Letters(), [0], ("ab",))  # type: ignore[arg-type]
    assert early.push(2, False) == ("ab", False), "before min_tokens nothing stops"
    assert early.push(2, True) == ("", True)


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_round_that_is_interrupted_behind_its_commit_loses_no_text(stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What its tokens say is spelled later: with the next round's, or when the request ends."""
    target, sampling = lettered(), Sampling(seed=2, max_tokens=30, stop=stop)
    want = alone(target, [0, 1], sampling)  # type: ignore[arg-type]
    ahead = foresight([[0, 1, *want.token_ids]])
    for ends in (False, True):
        with Engine(target=target, drafter=Oracle(ahead), depth=3) as engine:  # type: ignore[arg-type]
            (request,), observe = engine.submit([0, 1], sampling), engine.lanes.observe

            def interrupted(*about: object, observe: object = observe) -> None:
                monkeypatch.setattr(engine.lanes, "observe", observe)
                raise KeyboardInterrupt

            for _ in range(3):
                engine.step()
            monkeypatch.setattr(engine.lanes, "observe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            if ends:
                engine.cancel(request.id)
            while not request.done:
                engine.step()
            got = request.completion()
        assert got.token_ids == want.token_ids[:len(got.token_ids)] and (len(got.token_ids) < len(want.token_ids)) == ends
        text = Text(target.tokenizer, [0, 1], stop)  # type: ignore[attr-defined]
        for token in got.token_ids:
            text.push(token, armed=True)
        assert got.text == (text.released if ends else want.text) != ""
