"""Structured output: what the grammar allows is written, and no drafter changes which of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from draftproof.config import LoadConfig
from draftproof.drafters.base import Needs
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.engine.engine import Engine
from draftproof.errors import OptionError
from draftproof.models.fake import TableTarget
from draftproof.models.grammar import MOST_SPACE, grammar_of
from draftproof.models.load import builtin, load_target
from draftproof.models.target import Target
from draftproof.serve import tools
from draftproof.serve.schema import MAX_TOOLS, Tool
from draftproof.types import Budget, Draft, Sampling, SequenceView

pytest.importorskip("llguidance")
SCHEMA = {"type": "object", "properties": {"identifier": {"type": "integer"}, "category": {"enum": ["alpha", "beta"]}},
          "required": ["identifier", "category"], "additionalProperties": False}
PROMPT = "<|user|>Write a record.<|assistant|>"
SPECS = ("grammar", "ngram", "model", "grammar+ngram")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(builtin("target"), LoadConfig(self_test=False))


@pytest.fixture(scope="module")
def plain(target: Target) -> Iterator[Engine]:
    with Engine(target) as engine:
        yield engine


def wish(temperature: float, **grammar: object) -> Sampling:
    return Sampling(temperature=temperature, top_p=1.0, seed=3, max_tokens=60, grammar=grammar)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", SPECS)
def test_the_same_document_with_every_drafter(target: Target, plain: Engine, spec: str, temperature: float) -> None:
    expected = plain.generate(PROMPT, wish(temperature, json_schema=SCHEMA))
    with Engine(target, spec, 4) as engine:
        found = engine.generate(PROMPT, wish(temperature, json_schema=SCHEMA))
    assert found.token_ids == expected.token_ids and found.finish_reason == "stop"
    record = json.loads(found.text)
    assert set(record) == {"identifier", "category"} and record["category"] in ("alpha", "beta")


def test_forced_tokens_are_guessed_and_stand(target: Target) -> None:
    with Engine(target, "grammar", 8) as engine:
        done = engine.generate(PROMPT, wish(0.0, lark='start: "the one and only answer"'))
    assert done.text == "the one and only answer" and done.metrics["accepted"] > 0
    assert done.metrics["rounds"] < len(done.token_ids) - 1


def test_trees_and_joint_rules_follow_the_grammar(target: Target) -> None:
    for shape in ({"tree": 12}, {"rule": "ratio"}, {"rule": "block"}):
        with Engine(target, "model", 4, **shape) as engine:  # type: ignore[arg-type]
            for seed in range(3):
                options = Sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=40, grammar={"regex": "(ab|ba){3,5}"})
                text = engine.generate(PROMPT, options).text
                assert re.fullmatch("(ab|ba){3,5}", text)


def test_a_drafter_that_is_always_wrong_changes_nothing(target: Target, plain: Engine) -> None:
    expected = plain.generate(PROMPT, wish(1.0, json_object=True))
    with Engine(target, AlwaysWrong(target.vocab_size), 5) as engine:
        assert engine.generate(PROMPT, wish(1.0, json_object=True)).token_ids == expected.token_ids


def test_every_sample_has_its_own_state(target: Target) -> None:
    with Engine(target, "grammar", 4) as engine:
        handles = engine.submit(PROMPT, Sampling(temperature=1.0, seed=1, n=3, max_tokens=60, grammar={"json_schema": SCHEMA}))
        while not all(handle.done for handle in handles):
            engine.step()
        assert all(json.loads(handle.completion().text)["category"] in ("alpha", "beta") for handle in handles)


@pytest.mark.parametrize("grammar", [{"regex": "("}, {"shape": 1}, {"json_schema": {"type": "nonsense"}}, {}])
def test_a_grammar_that_cannot_be_is_refused(plain: Engine, grammar: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="grammar"):
        plain.generate(PROMPT, wish(0.0, **grammar))


def test_what_a_grammar_needs_is_said(plain: Engine) -> None:
    with pytest.raises(OptionError, match="ignore_eos"):
        plain.generate(PROMPT, Sampling(grammar={"json_object": True}, ignore_eos=True))
    with Engine(TableTarget(9)) as engine, pytest.raises(OptionError, match="tokenizer"):
        engine.generate([1], Sampling(grammar={"json_object": True}))


def test_without_a_grammar_the_drafter_is_silent(target: Target) -> None:
    with Engine(target, "grammar", 4) as engine:
        assert engine.generate(PROMPT, Sampling(temperature=0, max_tokens=6)).metrics["drafted"] == 0


class Finishing:
    """Guesses the letter that completes the grammar, behind which only an end token may follow."""

    name, needs = "finishing", Needs()

    def __init__(self, token: int) -> None:
        self.token = token

    def open(self, seq: SequenceView, signals: object) -> SequenceView:
        return seq

    def propose(self, states: list[SequenceView], budgets: list[Budget], noise: object) -> list[Draft]:
        return [Draft.chain([self.token] * min(budget.depth, 2)) for budget in budgets]

    def observe(self, *about: object) -> None: ...

    def close(self, state: SequenceView) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", ["finishing", "ngram", "model", "grammar+ngram"])
def test_a_guess_that_completes_the_grammar_before_min_tokens_changes_nothing(target: Target, plain: Engine, spec: str,
                                                                              temperature: float) -> None:
    assert target.tokenizer is not None
    last, = target.tokenizer.encode_plain("x")
    options = replace(wish(temperature, regex="(ab|cd)+x"), max_tokens=20, min_tokens=15, logit_bias={last: -50.0})
    expected = plain.generate(PROMPT, options)
    with Engine(target, Finishing(last) if spec == "finishing" else spec, 2) as engine:
        found = engine.generate(PROMPT, options)
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    assert found.token_ids == expected.token_ids and found.finish_reason == expected.finish_reason != "error"


def test_a_mask_waits_for_no_compiler(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks in torch's own form bring torch's compiler with them: seconds, in the first round that needs a mask."""
    monkeypatch.setitem(sys.modules, "llguidance.torch", None)
    assert grammar_of(target, {"regex": "[ab]+"}).masks([[]]).any()


CALL = tools.grammar([Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": SCHEMA}})], True, False, None)


@pytest.mark.parametrize("grammar", [{"json_schema": SCHEMA}, {"json_schema": {**SCHEMA, "x-guidance": {"coerce_one_of": True}}},
                                     {"lark": CALL}], ids=["schema", "guided", "call"])
def test_a_model_that_likes_spaces_comes_to_an_end(target: Target, plain: Engine, grammar: dict[str, object]) -> None:
    """JSON lets any number of them stand between its parts, and small models go on with them until max_tokens."""
    assert target.tokenizer is not None
    space, = target.tokenizer.encode_plain(" ")
    options = replace(wish(1.0, **grammar), max_tokens=800, logit_bias={space: 100.0})
    done = plain.generate(PROMPT, options)
    assert done.finish_reason == "stop" and re.search("alpha|beta", done.text)
    assert max(map(len, re.findall(" +", done.text))) == MOST_SPACE


def test_a_schema_may_say_how_much_space_it_takes(target: Target, plain: Engine) -> None:
    assert target.tokenizer is not None
    space, = target.tokenizer.encode_plain(" ")
    options = replace(wish(1.0, json_schema={**SCHEMA, "x-guidance": {"whitespace_flexible": False}}), logit_bias={space: 100.0})
    assert not re.search(" {2}", plain.generate(PROMPT, options).text)


def test_calls_are_no_more_than_may_be_sent_back(target: Target) -> None:
    assert target.tokenizer is not None
    listed = [Tool.model_validate({"type": "function", "function": {"name": "f"}})]
    state = grammar_of(target, {"lark": tools.grammar(listed, True, True, None)})
    one = tools.OPEN + '{"name": "f", "arguments": {}}' + tools.CLOSE
    text = target.tokenizer.encode_plain(one * (MAX_TOOLS - 1))
    state.follow(text)
    assert len(state.masks([[]])[0].nonzero()) > len(target.eos_ids), "another one may follow"
    state.follow([*text, *target.tokenizer.encode_plain(one)])
    assert {int(token) for token in state.masks([[]])[0].nonzero()} <= set(target.eos_ids)
