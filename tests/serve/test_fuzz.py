"""Requests that nobody thought of: options crossed whose texts are known, what the API's own description allows and forbids, and
bodies that are half nonsense.

DRAFTPROOF_FUZZ=5000 tries so many, and crosses everything (`make fuzz`); otherwise a sample. DRAFTPROOF_FUZZ_SEED chooses another.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import islice
from typing import Any

import pytest
import schemathesis
from bits.lineup import LINEUP
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from serve.crossing import DRAFTERS, OPTIONS, Case, Refusal, cases, expected, told
from serve.serving import Running, serving, words
from serve.test_http import until

from draftproof import Engine, Sampling
from draftproof.config import LoadConfig, ServeConfig
from draftproof.models.load import builtin, load_target
from draftproof.serve.openapi import BODIES, PLAIN
from draftproof.serve.run import serve_engine
from draftproof.serve.stream import compact
from draftproof.types import RULES

CASES = int(os.environ.get("DRAFTPROOF_FUZZ", "0"))
SEED = int(os.environ.get("DRAFTPROOF_FUZZ_SEED", "1"))
LONG = pytest.mark.timeout(14400 if CASES else 180)


# Options, crossed


def crossed(running: Running, chosen: list[Case]) -> Counter[str]:
    """Requests in fours. Every text under `match` is the plain one, whole or streamed; under the others it obeys the options."""
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(4) as pool:
        for at in range(0, len(chosen), 4):
            group = chosen[at:at + 4]
            # All four end before one is checked: the plain text comes from the server's own target.
            answers = list(pool.map(lambda case: told(running, case), group))
            until(lambda: running.idle)
            for case, texts in zip(group, answers, strict=True):
                check(running, case, texts)
                seen.update((case.rule, case.form, case.route, "equal" if case.equal else "allowed"))
    assert running.server.worker.restarts == 0
    return seen


def check(running: Running, case: Case, texts: list[str]) -> None:
    if case.equal:
        assert texts == expected(running, case), case
    stops = () if case.options.get("min_tokens") else case.options.get("stop", ())      # before min_tokens no stop counts
    for text in (text for text in texts if not isinstance(text, Refusal)):
        # A tool's call is JSON of strings; stop texts and bad words act on what the model wrote.
        written = "".join(map(str, json.loads(text)[0])) if case.form.endswith("call") and text.startswith('[["f"') else text
        assert not [stop for stop in stops if stop in written], (text, case)
        if case.form == "json schema" and text.endswith("}"):
            assert json.loads(text)["name"] in ("left", "right"), (text, case)


@LONG
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_options_crossed(drafter: str) -> None:
    """Over a table, every drafter. In the long run every option meets every rule, structure and way of reading."""
    dice, target = random.Random(f"{SEED} {drafter}"), words()
    made = DRAFTERS[drafter](target)
    tree = dice.choice((None, 8)) if not isinstance(made, str) and made.needs.tree else None
    with serving(target, lambda: DRAFTERS[drafter](target), tree=tree) as running:
        chosen = [case for case in cases(dice, drafter) if tree is None or case.rule != "block"]
        few = [next(case for case in chosen if case.rule == rule) for rule in ("match", dice.choice(("ratio", "lossy-typical")))]
        print(drafter, tree, crossed(running, chosen[:CASES // 8] if CASES else few))
        if tree is not None:
            refused = running.post("/v1/completions", {"prompt": "a", "speculation": {"rule": "block"}})
            assert refused.status_code == 400 and "block" in refused.json()["error"]["message"]
    assert not target.open_slots  # type: ignore[attr-defined]


@LONG
@pytest.mark.parametrize("drafter", LINEUP if CASES else random.Random(SEED).sample(list(LINEUP), 1))
def test_options_crossed_on_the_demo_model(drafter: str) -> None:
    target = load_target(builtin("target"), LoadConfig(self_test=False))
    with serving(target, lambda: LINEUP[drafter](target), name="letters") as running:
        print(drafter, crossed(running, list(islice(cases(random.Random(f"{SEED} {drafter}"), drafter), 24 if CASES else 2))))


def test_every_option_is_crossed() -> None:
    """A new option of a request must be put into OPTIONS, a new rule is there by itself."""
    drawn = list(cases(random.Random(SEED), "prediction"))
    named = {name for case in drawn for name in case.options}
    assert {field.name for field in fields(Sampling)} == named | {"bad_word_ids", "grammar"}, "ids are not part of the API"
    pairs = {(i, case.rule, case.form, case.stream) for case in drawn for i, option in enumerate(OPTIONS)
             if all(case.options.get(name) == value for name, value in option.items())}
    assert {(rule, stream) for _, rule, _, stream in pairs} == {(rule, stream) for rule in RULES for stream in (False, True)}
    assert len({(i, rule, stream) for i, rule, form, stream in pairs if form == "text"}) == len(OPTIONS) * len(RULES) * 2


def test_an_event_is_one_line_to_every_client() -> None:
    """Found by the test above: a model may write any character, and many clients take U+0085, U+2028 and U+2029 for line ends."""
    every = "".join(map(chr, range(0x3000)))
    data = compact({"text": every})
    assert len(data.decode().splitlines()) == 1 and json.loads(data) == {"text": every}


# The API's own description


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    """The application as it is, without a socket: `schemathesis` reads its /openapi.json, and calls it."""
    pytest.importorskip("llguidance")
    target = words(context=128)
    server = serve_engine(lambda: Engine(target, "ngram:min=1,max=2"), "letters", target, "ngram:min=1,max=2",
                          ServeConfig(hosts=("testserver",)))
    inner = server.app(())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http", "this module starts and stops the engine itself"
        await inner(scope, receive, send)

    yield schemathesis.openapi.from_asgi("/openapi.json", app), server
    server.worker.close()
    assert not target.open_slots  # type: ignore[attr-defined]


WEIGHTS = {path: 8 if path.startswith("/v1/") else 3 for path, _ in BODIES}
CALLS = [*((path, method.upper(), WEIGHTS[path]) for path, method in BODIES), *((path, "GET", 1) for path in PLAIN)]
WHOLE = sum(2 * weight for _, _, weight in CALLS)


@LONG
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "method", "weight"), CALLS, ids=lambda value: str(value))
def test_what_is_described_is_no_internal_error(described: Any, path: str, method: str, weight: int, mode: str) -> None:
    """positive: as the description allows it; negative: as it does not. Anything but an error of the server's is an answer."""
    api, server = described
    operation, seen = api[path][method], Counter[int]()
    many = -(-CASES * weight // WHOLE) if CASES else max(1, weight // 3)

    @seed(SEED)
    @settings(max_examples=many, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)), headers=st.booleans(), mend=st.booleans())
    def ask(case: Any, headers: bool, mend: bool) -> None:
        case.body = whole(case.body)
        if mend and isinstance(case.body, dict):
            mended(case.body)
        if not headers and case.headers is not None:
            case.headers.clear()                             # most of them are wrong, and nothing behind them is reached
        reply = case.call(timeout=600)
        seen[reply.status_code] += 1
        assert reply.status_code < 500, (reply.text, case.body, case.headers)
        assert reply.status_code < 400 or reply.json()["error"]["message"]

    ask()
    print(method, path, mode, dict(seen))
    assert server.worker.restarts == 0 and server.worker.load == (0, 0)
    if CASES and mode == "positive" and path.startswith("/v1/") and method == "POST":
        assert seen[200] > many / 10, "much of what is allowed must be reached"


def mended(body: dict[str, Any]) -> None:
    """What the description cannot say: fields that go together, and texts that are none. What is no such thing stays as it is."""
    if body.get("prompt") == "":
        body["prompt"] = "ab"
    messages = body.get("messages", body.get("input"))
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("content", None) in (None, [], ""):
            message["content"] = "ab"
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if body.get("stream_options") is not None:
        body["stream"] = True
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    for name in ("min_tokens", "prediction"):
        body.pop(name, None)
    if isinstance(body.get("speculation"), dict):
        body["speculation"].pop("drafter", None)
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(token) % 300) if token.isdecimal() else token: bias for token, bias in body["logit_bias"].items()}


def whole(value: Any) -> Any:
    """To JSON Schema 1.0 is an integer. To the server it is not, so that little would be tried behind the first such number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, list) else value


def test_a_drafter_that_cannot_be_had_is_refused() -> None:
    """Found by the test above: known by name, and not built in for this model. No path is told."""
    with serving(words(), "ngram") as running, running.client() as client:
        for drafter in ("hydra", "eagle2"):
            reply = client.put("/draftproof/speculation", json={"drafter": drafter})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "drafter") and "/" not in error["message"], error
        assert client.get("/draftproof/speculation").json()["drafter"] == "ngram"


# Bodies that are half nonsense


@pytest.fixture(scope="module")
def table() -> Iterator[Running]:
    with serving(words(), "ngram:min=1,max=2") as server:
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
