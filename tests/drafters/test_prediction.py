"""Predicted outputs: following them, finding the place again, and the way of a prediction through the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from contract.table_rounds import SharedNoise, Text
from engine.letters import Letters

from draftproof import Engine, OptionError, Sampling
from draftproof.cli import run
from draftproof.drafters.prediction import PredictionDrafter
from draftproof.models.fake import TableTarget
from draftproof.types import Budget

OPTIONS = Sampling(temperature=0.8, top_p=1.0, seed=4, max_tokens=60)


def follow(output: Sequence[int], prediction: Sequence[int], depth: int = 6) -> tuple[int, list[list[int]]]:
    """Rounds that `output` takes, and each round's guess."""
    text = Text.of([0, 1], replace(OPTIONS, prediction=tuple(prediction)))
    drafter = PredictionDrafter()
    state, guesses = drafter.open(text, None), []
    while len(text.tokens) - 2 < len(output):
        at = len(text.tokens) - 2
        draft, = drafter.propose([state], [Budget(depth, depth, "", "")], SharedNoise())
        guess = draft.tokens.tolist()
        assert draft.is_chain and len(guess) <= depth and (len(guess) == depth or draft.reason)
        stood = next((i for i, token in enumerate(guess) if at + i >= len(output) or output[at + i] != token), len(guess))
        text.tokens += output[at:at + stood + 1]
        guesses.append(guess)
    return len(guesses), guesses


WORDS = list(range(100, 160))


def test_a_right_prediction_is_followed_from_its_first_token_to_its_last() -> None:
    rounds, guesses = follow(WORDS, WORDS)
    assert guesses[0] == WORDS[:6] and rounds == -(-60 // 7)


@pytest.mark.parametrize(("output", "most"), [
    ([*WORDS[:20], 7, *WORDS[21:]], 13),                       # one token replaced
    ([*WORDS[:20], *WORDS[28:]], 13),                          # some left out
    ([*WORDS[:20], 7, 8, 9, *WORDS[20:]], 15),                 # some put in
    ([*WORDS[:20], 7, 8, *WORDS[23:40], 9, *WORDS[41:]], 19),  # two differences
    ([*WORDS[30:], *WORDS[:30]], 16),                          # two halves exchanged
], ids=["replaced", "deleted", "inserted", "twice", "moved"])
def test_after_a_difference_the_place_is_found_again(output: list[int], most: int) -> None:
    assert follow(output, WORDS)[0] <= most


def test_the_longest_agreement_decides_where_a_phrase_stands_twice() -> None:
    prediction = [1, 2, 3, 50, 51, 52, 9, 2, 3, 60, 61, 62]
    text = Text.of([0], replace(OPTIONS, prediction=tuple(prediction)))
    drafter = PredictionDrafter()
    state = drafter.open(text, None)
    text.tokens += [8, 9, 2, 3]
    draft, = drafter.propose([state], [Budget(3, 3, "", "")], SharedNoise())
    assert draft.tokens.tolist() == [60, 61, 62]


def test_a_wrong_prediction_costs_little() -> None:
    _, guesses = follow(list(range(200, 240)), WORDS)
    assert sum(map(len, guesses)) <= 6 + 40
    assert follow(list(range(200, 300)), WORDS)[1][-1] == [], "behind the end of the prediction nothing is guessed"


def test_reasons() -> None:
    drafter, noise = PredictionDrafter(), SharedNoise()
    none, over = Text.of([0], OPTIONS), Text.of([0], replace(OPTIONS, prediction=(5, 6)))
    states = [drafter.open(text, None) for text in (none, over)]
    over.tokens += [5, 6]
    drafts = drafter.propose(states, [Budget(2, 2, "", "")] * 2, noise)
    assert [d.reason for d in drafts] == ["the request brought no prediction", "the prediction ends here"]


# Through the engine


def test_the_text_is_the_same_and_comes_in_fewer_rounds() -> None:
    target = TableTarget(64, order=2, seed=3)
    with Engine(target) as engine:
        plain = engine.generate([1, 2, 3], OPTIONS)
    ids = list(plain.token_ids)
    edited = tuple([*ids[:20], (ids[20] + 1) % 64, *ids[22:]])
    with Engine(target, "prediction", depth=8) as engine:
        for prediction, most in ((tuple(ids), 8), (edited, 12), ((), 60), (tuple(reversed(ids)), 60)):
            run = engine.generate([1, 2, 3], OPTIONS, prediction=prediction)
            assert run.token_ids == plain.token_ids and run.metrics["rounds"] <= most
        both = engine.generate_batch([[1, 2, 3], [1, 2, 3]], [replace(OPTIONS, prediction=tuple(ids)), OPTIONS])
        assert both[0].token_ids == both[1].token_ids and both[0].metrics["rounds"] < both[1].metrics["rounds"] == 59
        assert engine.generate([1, 2, 3], OPTIONS, prediction=tuple(ids), n=2).samples[1].token_ids != plain.token_ids


def test_text_is_encoded_like_a_continuation() -> None:
    target = TableTarget(11, order=1, seed=2, tokenizer=Letters())  # type: ignore[arg-type]
    with Engine(target, "prediction", depth=4) as engine:
        engine.submit("ab", replace(OPTIONS, prediction="ab c"))
        assert engine._batch.waiting[0].sampling.prediction == (0, 1, 3, 6)


def test_the_trace_holds_its_length_and_not_its_words() -> None:
    from draftproof import EngineConfig

    with Engine(TableTarget(64), "prediction", depth=4, config=EngineConfig(trace="full")) as engine:
        run = engine.generate([1], OPTIONS, prediction=(41, 42, 43))
    started = next(event for event in run.trace if event.event == "request_started")
    assert started.sampling["prediction"] == 3


@pytest.mark.parametrize(("drafter", "prediction", "words"), [
    ("ngram", (1, 2), "'ngram', which does not read it"),
    ("none", (1, 2), "expected drafter prediction"),
    ("prediction", (1, 64), "token id 64; expected ids in"),
    ("prediction", "words", "no tokenizer"),
])
def test_what_cannot_be_honoured_is_refused(drafter: str, prediction: tuple[int, ...] | str, words: str) -> None:
    with Engine(TableTarget(64), drafter) as engine, pytest.raises(OptionError, match=words):
        engine.generate([1], replace(OPTIONS, prediction=prediction))


def test_a_chain_and_a_request_without_speculation_take_it() -> None:
    target = TableTarget(64, order=2, seed=3)
    with Engine(target, "prediction+ngram", depth=4) as engine:
        run = engine.generate([1, 2, 3], OPTIONS)
        first = engine.generate([1, 2, 3], OPTIONS, prediction=run.token_ids)
        off = engine.generate([1, 2, 3], OPTIONS, prediction=run.token_ids, speculation={"drafter": "none"})
    assert run.token_ids == first.token_ids == off.token_ids and first.metrics["rounds"] < 16
    assert off.metrics["drafted"] == 0


# From the command line


def test_the_command_line_reads_it_from_a_file(capsys: pytest.CaptureFixture[str], tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = ["generate", "def add(left", "--target", str(tiny_pair[0]), "--max-tokens", "24", "--seed", "7", "--temperature", "0.8",
                 "--json"]
    assert run(arguments) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    file = tmp_path / "prediction.txt"
    file.write_text(plain["text"])
    assert run([*arguments, "--drafter", "prediction", "--depth", "6", "--prediction", str(file)]) == 0
    guided = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert guided["token_ids"] == plain["token_ids"] and guided["metrics"]["drafted"] > 0


@pytest.mark.parametrize(("drafter", "words"), [
    ([], "add --drafter prediction"), (["--drafter", "ngram"], "prediction+ngram"), (["--drafter", "prediction"], "no/file")])
def test_the_command_line_refuses_what_it_cannot_use(capsys: pytest.CaptureFixture[str], tmp_path: Path, drafter: list[str],
                                                     words: str) -> None:
    file = tmp_path / "prediction.txt"
    file.write_text("words")
    place = "no/file" if words == "no/file" else str(file)
    assert run(["generate", "x", "--prediction", place, *drafter]) == 2
    assert words in capsys.readouterr().err
