"""Requests that nobody thought of: crossed options whose texts are known, and bodies that are half nonsense.

DRAFTPROOF_FUZZ=5000 tries so many (`make fuzz`); otherwise a sample. DRAFTPROOF_FUZZ_SEED chooses another.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from serve.serving import Running, alone, letters, serving

from draftproof import Sampling
from draftproof.config import LoadConfig
from draftproof.models.load import builtin, load_target

CASES = int(os.environ.get("DRAFTPROOF_FUZZ", "0"))
SEED = int(os.environ.get("DRAFTPROOF_FUZZ_SEED", "1"))

DRAFTERS = ("none", "ngram:min=1,max=3", "suffix", "model", "grammar+ngram", "prediction+model")
RULES = ("match", "ratio", "block")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.2, "top_k": 12}, {"min_p": 0.1},
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": 0.3}, {"logit_bias": {"12": 3.0, "300": -1e9}},
    {"min_tokens": 10}, {"stop": ["(", "\n\n"]}, {"stop_token_ids": [10, 11]}, {"bad_words": ["self"]}, {"logprobs": 3}, {"n": 2},
    {"ignore_eos": True},
)
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["left", "right"]}, "size": {"type": "integer"}}, "required": ["name", "size"],
          "additionalProperties": False}
FORMS: tuple[dict[str, Any] | None, ...] = (None, None, {"type": "json_object"},
                                            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with serving(load_target(builtin("target"), LoadConfig(self_test=False)), "none", name="letters") as server:
        yield server


def expected(running: Running, prompt: str, body: dict[str, Any], seed: int) -> list[str]:
    form = body.get("response_format")
    grammar = None if form is None else {"json_object": True} if form["type"] == "json_object" else {"json_schema": SCHEMA}
    options = {**body, "seed": seed, "grammar": grammar}
    for name in ("response_format", "prompt", "speculation", "stream"):
        options.pop(name, None)
    for name in ("stop", "stop_token_ids", "bad_words"):
        options[name] = tuple(options.get(name, ()))
    options["logit_bias"] = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    done = alone(running.target, prompt, Sampling.of(**options))
    return [sample.text for sample in done.samples or (done,)]


@pytest.mark.timeout(7200 if CASES else 180)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_options_crossed(running: Running, drafter: str) -> None:
    """Every text under `match` is the plain one, whole or streamed; under the joint rules it is one that the options allow."""
    dice = random.Random(f"{SEED} {drafter}")
    with running.client() as client:
        assert client.put("/draftproof/speculation", json={"drafter": drafter}).status_code == 200
    for _ in range(max(5, CASES // 50)):
        rule, stream, form = dice.choice(RULES), dice.random() < 0.5, dice.choice(FORMS)
        body: dict[str, Any] = {"max_tokens": dice.randint(10, 24), "top_p": 1.0}
        for option in dice.sample(OPTIONS, dice.randint(1, 3)):
            body.update(option)
        if form is not None:
            body.update(response_format=form, max_tokens=60, ignore_eos=False)
            body.pop("stop_token_ids", None)
        body["speculation"] = {"rule": rule} if drafter == "none" else {"rule": rule, "depth": dice.choice(("auto", 0, 1, 3, 6))}
        body["prompt"], body["seed"] = dice.choice(("def total(values):", "<|user|>Write a record.<|assistant|>")), dice.randrange(99)
        if stream:
            texts = [""] * body.get("n", 1)
            for chunk in running.stream(**body):
                assert "error" not in chunk, (chunk, body)
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            texts = [choice["text"] for choice in running.complete(**body)["choices"]]
        if rule == "match" or body.get("temperature") == 0:
            assert texts == expected(running, body["prompt"], body, body["seed"]), body
        if form is not None and form["type"] == "json_schema" and not {"stop", "logit_bias", "bad_words", "min_tokens"} & set(body):
            assert all(json.loads(text)["name"] in ("left", "right") for text in texts if text.endswith("}")), (texts, body)


@pytest.fixture(scope="module")
def table() -> Iterator[Running]:
    with serving(letters(), "ngram:min=1,max=2") as server:
        yield server


STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.5, -0.5, 1e308, 10**30, "", "a", "ab" * 50, "\x00", "é", "🦊", "none", "auto", "off", [], ["a"], [0],
    [[0, 1]], [-1], [11], [10**9], [None], {}, {"a": 1}, {"drafter": "none"},
    {"depth": 3}, {"depth": 3, "drafter": "none"}, {"rule": "block"},
    {"include_usage": True}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"0": 1.0}, {"11": 1}, {"0": -1e9},
    [{"role": "user", "content": "ab"}], [{"role": "tool", "content": "ab"}], [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {"type": "content", "content": "ab"},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    {"format": {"type": "text"}}, {"prompt_class": "x"},
    "required", "ngram", "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
)
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4},
    "/v1/responses": {"input": "ab", "max_output_tokens": 4}, "/tokenize": {"prompt": "ab"}, "/detokenize": {"tokens": [1]},
}


def fields_of(path: str) -> list[str]:
    from draftproof.serve import schema

    model = {"/v1/completions": schema.CompletionRequest, "/v1/chat/completions": schema.ChatRequest,
             "/v1/responses": schema.ResponsesRequest, "/tokenize": schema.TokenizeRequest, "/detokenize": schema.DetokenizeRequest}[path]
    return [*model.model_fields, "surprise"]


@pytest.mark.timeout(7200 if CASES else 180)
@pytest.mark.parametrize("path", BASES)
def test_no_body_is_an_internal_error(table: Running, path: str) -> None:
    dice = random.Random(f"{SEED} {path}")
    names, seen = fields_of(path), {200: 0, 400: 0}
    with table.client() as client:
        for _ in range(max(120, CASES // 5)):
            body: dict[str, Any] = {"model": "letters", **BASES[path]}
            for name in dice.sample(names, min(len(names), dice.choice((1, 1, 1, 2, 3, 5)))):
                body[name] = dice.choice(STRANGE) if dice.random() < 0.6 or name in BASES[path] else None
            reply = client.post(path, json=body)
            assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, body)
            seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
            if reply.status_code != 200:
                assert reply.json()["error"]["message"], body
        assert client.get("/ready").status_code == 200 and table.server.worker.restarts == 0
    assert min(seen[200], seen[400]) > 5, "both sides of the border are tried"
