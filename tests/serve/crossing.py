"""What `test_fuzz` crosses: drafters over a table, the options of a request, structures, and how a request says them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from contract.block_heads import BLOCK_HEADS
from contract.eagle_heads import EAGLE_HEADS
from contract.mtp_heads import MTP_HEADS
from contract.vector_heads import VECTOR_HEADS
from serve.serving import Running, alone

from draftproof import Sampling
from draftproof.drafters.chain import chained
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.grammar import GrammarDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.pard import PardDrafter
from draftproof.drafters.prediction import PredictionDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.port import Completion
from draftproof.errors import DraftproofError
from draftproof.models.fake import TableTarget
from draftproof.serve import tools
from draftproof.serve.schema import ChatRequest
from draftproof.serve.translate import Headers, chat
from draftproof.types import RULES

Make = Callable[[Any], Any]


def small(target: Any) -> ModelDrafter:
    return ModelDrafter(TableTarget(target.vocab_size, order=1, seed=9), target.vocab_size)


def head(made: Mapping[str, Callable[[Any, Any], Any]], name: str) -> Make:
    return lambda target: made[name](target, None)


DRAFTERS: dict[str, Make] = {
    "none": lambda target: "none", "ngram": lambda target: NgramDrafter(1, 3), "suffix": lambda target: SuffixDrafter(),
    "prediction": lambda target: PredictionDrafter(), "grammar": lambda target: GrammarDrafter(),
    "always wrong": lambda target: AlwaysWrong(target.vocab_size), "model": small,
    "the target itself": lambda target: ModelDrafter(target, target.vocab_size),
    "pard": lambda target: PardDrafter(TableTarget(target.vocab_size, order=1, seed=9), 0),
    **{name: head(EAGLE_HEADS, name) for name in ("eagle", "eagle2", "eagle3")},
    **{name: head(VECTOR_HEADS, name) for name in ("medusa", "hydra", "mlp")},
    **{name: head(BLOCK_HEADS, name) for name in ("dflash", "dflash2", "dspark", "xpress", "domino")}, "mtp": head(MTP_HEADS, "mtp"),
    "suffix+model": lambda target: chained([SuffixDrafter(), small(target)]),
    "prediction+grammar+ngram": lambda target: chained([PredictionDrafter(), GrammarDrafter(), NgramDrafter(1, 3)]),
    "wrong+eagle3": lambda target: chained([AlwaysWrong(target.vocab_size), EAGLE_HEADS["eagle3"](target, None)]),
}

# By the names of `Sampling`.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.2, "top_k": 12}, {"min_p": 0.1},
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.3}, {"logit_bias": {12: 3.0, 290: -1e9}},
    {"min_tokens": 10}, {"stop": ["(", "\n\n", "e"]}, {"stop_token_ids": [10, 11]}, {"bad_words": ["self", "a"]}, {"logprobs": 3}, {"n": 3},
    {"ignore_eos": True}, {"prompt_logprobs": 2}, {"prediction": "def total(values):\n    return sum(values)"},
)
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["left", "right"]}, "size": {"type": "integer"}}, "required": ["name", "size"],
          "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMS: dict[str, dict[str, Any]] = {
    "text": {}, "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "a call": {"tools": [TOOL], "tool_choice": "required"}, "maybe a call": {"tools": [TOOL]},
}
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
PROMPTS = ("def total(values):", "Write a record.", "é {\"name\": \"left\"} 🦊")
UNSURE = ("ignore_eos", "min_tokens", "bad_words", "logit_bias")       # beside a structure they may leave no token


class Refusal(str):
    """Why there is no text."""


@dataclass(frozen=True)
class Case:
    """One request. `options` as Sampling has them, prediction aside."""

    route: str
    rule: str
    depth: int | str
    form: str
    stream: bool
    prompt: str
    options: Mapping[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        said: dict[str, Any] = {**self.options, **FORMS[self.form], "speculation": {"rule": self.rule, "depth": self.depth}}
        if "logit_bias" in said:
            said["logit_bias"] = {str(token): bias for token, bias in said["logit_bias"].items()}
        if self.route == "completions":
            if "prompt_logprobs" in said:                       # one number says both there
                said |= {"logprobs": said.pop("prompt_logprobs"), "echo": True}
            return {**said, "prompt": self.prompt}
        if self.route == "responses":
            form = said.pop("response_format", None)
            if form is not None:
                said["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
            return {"max_output_tokens": said.pop("max_tokens"), **said, "input": self.prompt}
        if "logprobs" in said:
            said |= {"logprobs": True, "top_logprobs": said["logprobs"]}
        if "prediction" in said:
            said["prediction"] = {"type": "content", "content": said["prediction"]}
        return {**said, "messages": [{"role": "user", "content": self.prompt}]}

    @property
    def equal(self) -> bool:
        """Whether the text must be the plain one."""
        return self.rule == "match" or self.rule != "lossy-typical" and self.options.get("temperature") == 0

    @property
    def unsure(self) -> bool:
        """Whether it may be refused: its structure and its options may leave no token."""
        return self.form != "text" and bool({*UNSURE} & set(self.options))

    def plain(self, running: Running) -> list[Completion]:
        """The same request without a server and without guesses: all its samples. Raises what generating raises."""
        grammar, prompt = None, self.prompt
        if self.route == "chat":                                # the template and the grammar of calls are tested elsewhere
            order = chat(ChatRequest.model_validate({"model": "letters", **self.body}), Headers(), running.server.served)
            grammar, prompt = order.sampling.grammar, order.prompts[0]       # type: ignore[assignment]
        elif self.form != "text":
            grammar = {"json_object": True} if self.form == "json object" else {"json_schema": SCHEMA}
        if self.route == "responses":
            prompt = running.target.tokenizer.chat([{"role": "user", "content": self.prompt}])      # type: ignore
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items() if name != "prediction"}
        done = alone(running.target, prompt, Sampling(**options, grammar=grammar))
        return list(done.samples) or [done]


def cases(dice: random.Random, drafter: str) -> Iterator[Case]:
    """Every option with every rule, structure and way of reading, in a random order, each beside up to two other options."""
    crossed = list(product(OPTIONS, RULES, FORMS, (False, True)))
    dice.shuffle(crossed)
    for option, rule, form, stream in crossed:
        structured = form != "text"
        options: dict[str, Any] = {"max_tokens": 60 if structured else dice.randint(10, 24), "top_p": 1.0, "seed": dice.randrange(99)}
        for more in (*dice.sample(OPTIONS, dice.randrange(3)), option):
            options.update(more)
        if structured and dice.random() < 0.7:
            options = {name: value for name, value in options.items() if name not in UNSURE}
        routes = ["chat"] if form.endswith("call") or option == OPTIONS[-1] else ["completions", "chat", "responses"]
        if "prompt_logprobs" in option and len(routes) > 1:
            routes = ["completions"]
        if {"n", "logprobs"} & set(options) and "responses" in routes:
            routes.remove("responses")
        route = dice.choice(routes)
        if route != "chat" or "prediction" not in drafter:
            options.pop("prediction", None)
        if route != "completions":
            options.pop("prompt_logprobs", None)
        depth = "auto" if drafter == "none" else dice.choice(("auto", 0, 1, 3, 6))
        yield Case(route, rule, depth, form, stream, dice.choice(PROMPTS), options)


def told(running: Running, case: Case) -> list[str]:
    """What the server answers, a text for every sample, the calls of tools as JSON; or, of a case that is unsure, the refusal."""
    texts = answered(running, case)
    if case.body.get("echo") and not isinstance(texts[0], Refusal):
        assert all(text.startswith(case.prompt) for text in texts), (texts, case)
        return [text.removeprefix(case.prompt) for text in texts]
    return texts


def answered(running: Running, case: Case) -> list[str]:
    path, texts = ROUTES[case.route], [""] * case.options.get("n", 1)
    calls: dict[int, list[Any]] = {}
    reply = running.post(path, {**case.body, "stream": case.stream})
    if reply.status_code == 400 and case.unsure:
        return [Refusal(reply.json()["error"]["message"])]
    assert reply.status_code == 200, (reply.text, case)
    if not case.stream:
        if case.route == "responses":
            return [reply.json()["output"][0]["content"][0]["text"]]
        messages = [choice.get("message", choice) for choice in reply.json()["choices"]]
        return [spelled(one.get("tool_calls") or ()) or (one["text"] if "text" in one else one["content"]) for one in messages]
    for chunk in (json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")):
        if chunk.get("type", "error") == "error" and "choices" not in chunk:
            assert case.unsure, (chunk, case)
            return [Refusal(chunk.get("error", chunk)["message"])]
        if chunk.get("type") == "response.output_text.delta":
            texts[0] += chunk["delta"]
        for choice in chunk.get("choices", ()):
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            calls.setdefault(choice["index"], []).extend(choice.get("delta", {}).get("tool_calls") or ())
    return [spelled(calls.get(i, ())) or text for i, text in enumerate(texts)]


def spelled(calls: Any) -> str:
    return json.dumps([(call["function"]["name"], call["function"]["arguments"]) for call in calls]) if calls else ""


def expected(running: Running, case: Case) -> list[str]:
    try:
        texts = [done.text for done in case.plain(running)]
    except DraftproofError as error:
        return [str(error)]
    found = [tools.parse(text)[0] if case.form.endswith("call") else None for text in texts]
    return [json.dumps([(call.name, call.arguments) for call in calls]) if calls else text
            for text, calls in zip(texts, found, strict=True)]
