"""Bad input is refused before anything is queued, and says what was found, what was expected and what to do."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.engine_support import alone, table
from engine.letters import Letters

import draftproof
from draftproof import Engine, Jsonl, OptionError, PromptError, Sampling, SpecError
from draftproof.config import AbConfig, ServeConfig, SpeculationConfig
from draftproof.drafters.base import Needs
from draftproof.drafters.ngram import NgramDrafter


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        ([1, 11], "token id 11"),
        ([-1], "token id -1"),
        ([1] * 4096, "4096 tokens"),
        ("text", "no tokenizer"),
        ([1, 2.5], "no token id.*float"),
        (["a"], "no token id.*str"),
    ],
)
def test_prompts(prompt: Any, says: str) -> None:
    with Engine(target=table()) as engine:
        with pytest.raises(PromptError, match=says):
            engine.generate(prompt)
        assert engine.stats()["requests"] == {"waiting": 0, "running": 0, "done": 0}


def test_a_prompt_leaves_room_for_one_token() -> None:
    for tokenizer, prompt in ((None, [1] * 19), (Letters(), "a" * 19)):
        with Engine(target=table(context=20, tokenizer=tokenizer)) as engine:
            out = engine.generate(prompt, Sampling(seed=1, ignore_eos=True))
            assert (out.prompt_tokens, out.completion_tokens, out.finish_reason) == (19, 1, "length")
            with pytest.raises(PromptError, match="20 tokens; .* shorten it to 19"):
                engine.generate(prompt + prompt[:1])


def test_text_prompts() -> None:
    with Engine(target=table(tokenizer=Letters())) as engine:
        with pytest.raises(PromptError, match="empty"):
            engine.generate("")
        with pytest.raises(PromptError, match="Unicode"):
            engine.generate("a\ud800")
        assert engine.generate("ab é", seed=1).prompt_tokens == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"best_of": 3}, "best_of is not supported"),
        ({"num_beams": 2}, "num_beams"),
        ({"echo": True}, "echo"),
        ({"heat": 1}, "unknown sampling option 'heat'"),
        ({"temperature": -1}, "temperature=-1"),
        *(({name: form(token)}, f"{name} (names|holds) token id {token}; expected ids in .0, 11.")
          for name, form in (("logit_bias", lambda token: {token: 1.0}), ("stop_token_ids", lambda token: (1, token)),
                             ("bad_word_ids", lambda token: ((1, token),)), ("prediction", lambda token: (1, token)))
          for token in (-1, 11)),
        ({"stop": ("x",)}, "no tokenizer"),
        ({"n": 0}, "n=0"),
        *(({name: value}, f"{name}={value!r}: expected (None or )?an integer")
          for name in ("top_k", "min_tokens", "max_tokens", "n", "seed", "logprobs") for value in (2.5, 1.0, True, "3")),
        *(({name: (1.0,)}, rf"{name}=\(1\.0,\): expected token ids") for name in ("stop_token_ids", "prediction")),
        ({"stop_token_ids": 1}, "stop_token_ids=1: expected token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12': expected token ids"),
        ({"bad_word_ids": (1, 2)}, r"bad_word_ids=\(1, 2\): expected sequences of token ids"),
        ({"bad_word_ids": ((1.5,),)}, r"bad_word_ids=.*: expected sequences of token ids"),
        ({"bad_word_ids": ((),)}, r"bad_word_ids=.*none empty"),
        *(({name: value}, f"{name}=.*: expected a text or several, none empty") for name in ("stop", "bad_words")
          for value in (7, (7,), "", ("a", ""))),
        ({"temperature": True}, "temperature=True: expected a number"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias=.*: expected numbers by token id"),
        ({"logit_bias": {1: "high"}}, "logit_bias=.*: expected numbers by token id"),
        ({"logit_bias": [1]}, "logit_bias=.*: expected numbers by token id"),
        ({"logit_bias": {1: math.nan}}, "logit_bias=.*no NaN"),
        ({"logit_bias": {2: 1.0, 1: math.inf}}, "logit_bias holds inf for token 1; expected numbers up to 3.4e38, or -inf"),
        ({"logit_bias": {1: 1e39}}, r"logit_bias holds 1e\+39 for token 1; expected"),
        *(({"repetition_penalty": value}, "repetition_penalty=.*: expected a number in") for value in (0, -1.0, 1e-40, 1e300)),
        *(({name: value}, f"{name}=.*: expected a number in") for name in ("presence_penalty", "frequency_penalty")
          for value in (-1e39, 1e39, -3e38, math.nan)),
        ({"speculation": {"drafter": "model"}}, "drafter='model'"),
        ({"speculation": {"deep": 1}}, "'deep'"),
        ({"speculation": {"depth": -1}}, "depth=-1"),
        ({"speculation": {"depth": 3, "drafter": "none"}}, "depth=3 with drafter none"),
        ({"speculation": {"rule": "maybe"}}, "rule='maybe'"),
    ],
)
def test_options(options: dict[str, Any], says: str) -> None:
    with Engine(target=table(), drafter="ngram", depth=2) as engine:
        with pytest.raises(OptionError, match=says):
            engine.generate([1, 2], **options)
        assert engine.stats()["requests"]["waiting"] == 0


@pytest.mark.parametrize(("name", "fits", "beyond"), [
    ("temperature", (None, 0, 1e9), (-1e-9, math.inf)), ("top_p", (None, 1e-9, 1), (0, 1 + 1e-9)), ("min_p", (0, 1), (-1e-9, 1 + 1e-9)),
    ("repetition_penalty", (1e-30, 1e30), (9e-31, 1.1e30)), ("presence_penalty", (-1e30, 1e30), (-1.1e30, 1.1e30)),
    ("frequency_penalty", (-1e30, 1e30), (-1.1e30, 1.1e30)), ("top_k", (0,), (-1,)), ("n", (1,), (0,)), ("max_tokens", (1,), (0,)),
    ("min_tokens", (0, 256), (-1, 257)), ("logprobs", (None, 0), (-1,)), ("prompt_logprobs", (None, 0), (-1,)),
    ("seed", (None, 0, 2**63 - 1), (-1, 2**63))])
def test_an_option_may_be_as_large_as_it_says(name: str, fits: tuple[Any, ...], beyond: tuple[Any, ...]) -> None:
    for value in fits:
        assert getattr(Sampling(**{name: value}), name) == value
    for value in beyond:
        with pytest.raises(OptionError, match=f"^{name}="):
            Sampling(**{name: value})


def test_one_text_is_a_list_of_one() -> None:
    for name in ("stop", "bad_words"):
        assert getattr(Sampling.of(**{name: "lf"}), name) == getattr(Sampling.of(**{name: ("lf",)}), name) == ("lf",)
    target = table(tokenizer=Letters())
    for name, text in (("stop", "cd"), ("bad_words", "cd")):
        with Engine(target=target) as engine:
            found = [engine.generate([1, 2], seed=3, max_tokens=40, **{name: asked}).text for asked in (text, (text,), tuple(text))]
        assert found[0] == found[1] != found[2], "as one text, not as its letters"


def test_integers_of_other_kinds_are_integers_and_a_bias_may_ban(tmp_path: Path) -> None:
    own: dict[str, Any] = {"seed": 3, "top_k": 4, "max_tokens": 30, "logprobs": 0, "stop_token_ids": (9,), "bad_word_ids": ((1, 2), (7,))}
    foreign = {**{name: np.int64(value) for name, value in own.items() if isinstance(value, int)},
               "stop_token_ids": np.array([9]), "bad_word_ids": [np.array([1, 2]), [np.int32(7)]]}
    assert Sampling(**foreign) == Sampling(**own)
    trace = Jsonl(tmp_path / "trace.jsonl")
    with Engine(target=table(), sinks=[trace]) as engine:
        found = [engine.generate([1, 2], ignore_eos=True, logit_bias={three: -math.inf, 9: -math.inf}, **options).token_ids
                 for options, three in ((own, 3), (foreign, np.int64(3)))]
    trace.close()
    assert found[0] == found[1] and len(found[0]) == 30 and not {3, 7, 9} & set(found[0])


class Chains(NgramDrafter):
    needs = Needs()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"drafter": "magic"}, SpecError, "magic"),
        ({"depth": 3}, OptionError, "drafter none"),
        ({"depth": "deep"}, OptionError, "depth='deep'"),
        ({"drafter": "ngram", "depth": -2}, OptionError, "depth=-2"),
        ({"drafter": "ngram", "depth": 4095}, OptionError, "at most 4094"),
        ({"drafter": "ngram", "rule": "block", "tree": 8}, OptionError, "block"),
        ({"drafter": "ngram", "rule": "exact"}, OptionError, "rule='exact'"),
        ({"drafter": Chains(), "tree": 8}, OptionError, "chains only"),
        ({"drafter": "ngram", "depth": 9, "tree": 8}, OptionError, "tree=8"),
    ],
)
def test_engines(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Engine(target=table(), **options)


def test_a_tree_for_a_target_that_scores_chains_only() -> None:
    target = table()
    target.trees = False
    with pytest.raises(OptionError, match="scores chains only"):
        Engine(target=target, drafter="ngram", depth=2, tree=4)
    with Engine(target=table(), drafter="ngram", depth=2, tree=4) as engine, pytest.raises(OptionError, match="block"):
        engine.submit([1], speculation={"rule": "block"})


def test_a_seed_is_drawn_and_reported_and_defaults_are_the_models() -> None:
    target = table()
    target.defaults = {"temperature": 0.5, "top_p": 0.7}
    with Engine(target=target) as engine:
        one, two = engine.generate([1, 2], max_tokens=20), engine.generate([1, 2], max_tokens=20)
        assert one.seed != two.seed
        assert engine.generate([1, 2], max_tokens=20, seed=one.seed).token_ids == one.token_ids
        assert engine.generate([1, 2], Sampling(temperature=0.5, top_p=0.7, max_tokens=20), seed=two.seed).token_ids == two.token_ids
        assert engine.generate([1, 2], max_tokens=20, seed=two.seed, temperature=1.0, top_p=1.0).token_ids != two.token_ids
    assert alone(table(), [1, 2], Sampling(seed=5)).trace[0].sampling["temperature"] == 1.0


def test_what_a_request_says_counts_and_not_what_the_model_says() -> None:
    target, silent = table(), table()
    target.defaults = {"temperature": 0.5, "top_p": 0.7}
    for options in ({"temperature": 1.5, "top_p": 1.0}, {"temperature": 1.5, "top_p": 0.4}, {"temperature": 0.8, "top_p": 0.9}):
        said = Sampling(seed=3, max_tokens=40, ignore_eos=True, **options)  # type: ignore[arg-type]
        found, expected = alone(target, [1, 2], said), alone(silent, [1, 2], said)
        assert found.token_ids == expected.token_ids
        assert {name: found.trace[0].sampling[name] for name in options} == options


def test_logprobs_are_raw() -> None:
    target = table()
    hot = Sampling(temperature=2.0, logit_bias={2: 5.0}, repetition_penalty=1.5, logprobs=3, seed=2, max_tokens=12, ignore_eos=True)
    out = alone(target, [1, 2], hot)
    assert out.logprobs is not None and len(out.logprobs) == 12
    text = [1, 2]
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        law = target.law(text)
        assert entry.token_id == token and entry.logprob == pytest.approx(float(law[token]), abs=1e-12)
        assert [a.token for a in entry.top] == law.topk(3).indices.tolist()
        text.append(token)
    assert alone(target, [1, 2], Sampling(seed=2, logprobs=0)).logprobs[0].top == ()  # type: ignore[index]
    assert alone(target, [1, 2], Sampling(seed=2)).logprobs is None


def test_public_names_and_a_command_line_without_torch() -> None:
    import subprocess
    import sys

    assert all(getattr(draftproof, name) is not None for name in draftproof.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = draftproof.nothing
    code = "import sys, draftproof; draftproof.DraftproofError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("value", [2.5, 3.0, True, "3", np.float32(2)])
def test_what_counts_is_an_integer(value: Any) -> None:
    """Depths, sizes and limits were cut to integers, or failed long after they were given."""
    says = re.escape(f"={value!r}: expected")
    with pytest.raises(OptionError, match="depth" + says):
        Engine(target=table(), drafter="ngram", depth=value)
    for config, name in [(draftproof.EngineConfig, "max_batch"), (draftproof.LoadConfig, "threads"), (ServeConfig, "port"),
                         (SpeculationConfig, "depth"), (SpeculationConfig, "tree"), (AbConfig, "minimum")]:
        with pytest.raises(OptionError, match=name + says):
            config.of({name: value} | ({"arms": "ngram vs off"} if config is AbConfig else {"drafter": "ngram"} if name == "depth" else {}))
    with Engine(target=table(), drafter="ngram", depth=np.int64(2)) as engine:
        assert engine.generate([1, 2, 3], max_tokens=4).metrics["rounds"] > 0
        with pytest.raises(OptionError, match="depth_cap" + says):
            engine.set_speculation(depth_cap=value)
