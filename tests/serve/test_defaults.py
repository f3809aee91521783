"""Fields that clients written for other servers send: values that change nothing are taken, and any other is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.serving import Running, alone, letters, serving

from draftproof import Sampling

COMPLETIONS, CHAT, RESPONSES, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "ab", "max_tokens": 9, "seed": 1}, RESPONSES: {"input": "ab", "max_output_tokens": 9, "seed": 1},
    CHAT: {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 9, "seed": 1},
    TOKENIZE: {"messages": [{"role": "user", "content": "ab"}]}}
TEXTS = (COMPLETIONS, CHAT, RESPONSES)
# A field, what it may say, what it may not, and where it stands.
IDLE: list[tuple[str, Any, Any, tuple[str, ...]]] = [
    ("skip_special_tokens", True, False, TEXTS), ("spaces_between_special_tokens", True, False, TEXTS),
    ("include_stop_str_in_output", False, True, TEXTS), ("use_beam_search", False, True, TEXTS), ("length_penalty", 1, 2, TEXTS),
    ("reasoning_effort", None, "high", (CHAT,)), ("echo", False, True, (CHAT,)), ("add_special_tokens", False, True, (CHAT,)),
    ("add_generation_prompt", True, False, (CHAT, TOKENIZE)), ("continue_final_message", False, True, (CHAT, TOKENIZE)),
    ("store", False, True, (CHAT, RESPONSES)), ("stop", "", [""], TEXTS), ("stop", [], 7, TEXTS),
    ("top_logprobs", 0, 1, (CHAT,)), ("include", [], ["message.output_text.logprobs"], (RESPONSES,)),
    ("include", ["reasoning.encrypted_content", "web_search_call.action.sources"], [7], (RESPONSES,)),
    ("tools", [], [{}], (CHAT, RESPONSES)),
    ("reasoning", None, {"effort": "low"}, (RESPONSES,)),
    ("truncation", "disabled", "auto", (RESPONSES,)),
    ("background", False, True, (RESPONSES,)), ("previous_response_id", None, "resp_1", (RESPONSES,)),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(letters(), "ngram:min=1,max=2", depth=3) as server:
        yield server


def said(running: Running, path: str, **more: Any) -> Any:
    """What an answer holds beside names and times."""
    reply = running.post(path, {**BODIES[path], **more})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found.get("choices") or found.get("tokens") or found["output"][0]["content"]


@pytest.mark.parametrize(("field", "idle", "other", "paths"), IDLE, ids=lambda value: value if isinstance(value, str) else "")
def test_what_changes_nothing_is_taken(running: Running, field: str, idle: Any, other: Any, paths: tuple[str, ...]) -> None:
    for path in paths:
        assert said(running, path, **{field: idle}) == said(running, path)
        refused = running.post(path, {**BODIES[path], field: other})
        assert refused.status_code == 400 and refused.json()["error"]["param"].split(".")[0] == field, refused.text


def test_streams_without_counts_on_the_way(running: Running) -> None:
    chunks = running.stream(**BODIES[COMPLETIONS], stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    wrong = {**BODIES[COMPLETIONS], "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert running.post(COMPLETIONS, wrong).json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_what_a_stream_told_of_a_turn_goes_back(running: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "assistant", "content": "ab", "tool_calls": [{**call, **more}], **beside}
             for more, beside in (({}, {}), ({"index": 0}, {"reasoning_content": None, "reasoning": None}))]
    one, other = ([*BODIES[CHAT]["messages"], turn, {"role": "user", "content": "b"}] for turn in turns)
    assert said(running, CHAT, messages=one) == said(running, CHAT, messages=other)
    thought = [{**turns[0], "reasoning_content": "hm"}]
    assert running.post(CHAT, {"messages": thought}).json()["error"]["param"] == "messages.0.reasoning_content"


def test_best_of_as_many_as_are_asked_for(running: Running) -> None:
    for n in (1, 3):
        assert said(running, COMPLETIONS, n=n, best_of=n) == said(running, COMPLETIONS, n=n)
    for n, best in ((1, 3), (3, 1), (3, 4)):
        reply = running.post(COMPLETIONS, {"prompt": "a", "n": n, "best_of": best})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "best_of"


def test_top_p_0_keeps_the_likeliest_token(running: Running) -> None:
    assert said(running, COMPLETIONS, top_p=0) == said(running, COMPLETIONS, temperature=0)


def test_seeds_below_zero(running: Running) -> None:
    """-1 is none, as vLLM has it, and the others are seeds: each has a text, and the answer says by which seed it is written again."""
    seeds = {running.complete(prompt="ab", max_tokens=2, seed=-1)["seed"] for _ in range(3)}
    assert len(seeds) == 3 and all(seed >= 0 for seed in seeds)
    found = running.complete(prompt="ab", max_tokens=9, seed=-7)
    assert found["seed"] == 2**63 - 7
    assert found["choices"][0]["text"] == alone(running.target, "ab", Sampling(seed=2**63 - 7, max_tokens=9)).text


@pytest.mark.parametrize("path", TEXTS)
def test_the_model_may_be_left_out(running: Running, path: str) -> None:
    with running.client() as client:
        reply = client.post(path, json=BODIES[path])
    assert reply.status_code == 200 and reply.json()["model"] == running.server.served.name
    assert running.post(path, {**BODIES[path], "model": "another"}).status_code == 404
