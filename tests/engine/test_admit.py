"""Bad input is refused before anything is queued, and says what was found, what was expected and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from engine.engine_support import alone, table
from engine.letters import Letters

import draftproof
from draftproof import Engine, OptionError, PromptError, Sampling, SpecError
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
    ],
)
def test_prompts(prompt: Any, says: str) -> None:
    with Engine(target=table()) as engine:
        with pytest.raises(PromptError, match=says):
            engine.generate(prompt)
        assert engine.stats()["requests"] == {"waiting": 0, "running": 0, "done": 0}


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
        ({"logit_bias": {99: 1.0}}, "token id 99"),
        ({"stop_token_ids": (11,)}, "token id 11"),
        ({"bad_word_ids": ((1, 50),)}, "token id 50"),
        ({"stop": ("x",)}, "no tokenizer"),
        ({"n": 0}, "n=0"),
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
