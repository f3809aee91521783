"""Structures as vLLM's clients ask for them: the grammars that the engine has, by vLLM's names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serve.serving import Running

pytest.importorskip("llguidance")

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
SCHEMA = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"], "additionalProperties": False}
CHOICES = ['a "b"\\n', "c|d", "é\n"]
LARK = 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'
WAYS: list[tuple[str, Any, Any]] = [
    ("choice", CHOICES, lambda text: text in CHOICES), ("regex", "[a-c]{3}-[0-9]", lambda text: re.fullmatch("[a-c]{3}-[0-9]", text)),
    ("json", SCHEMA, lambda text: json.loads(text)["side"] in ("left", "right")),
    ("json", json.dumps(SCHEMA), lambda text: json.loads(text)["side"] in ("left", "right")),
    ("grammar", LARK, lambda text: re.fullmatch("x[0-9]{2}", text))]


def asked(running: Running, path: str, **more: Any) -> Any:
    beside = {PATHS[0]: {"prompt": "ab", "max_tokens": 500}, PATHS[1]: {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 500},
              PATHS[2]: {"input": "ab", "max_output_tokens": 500}}[path]
    return running.post(path, {"seed": 1, "temperature": 1.0, **beside, **more})


def text_of(path: str, found: dict[str, Any]) -> str:
    if path == PATHS[2]:
        return str(found["output"][0]["content"][0]["text"])
    choice = found["choices"][0]
    return str(choice["text"] if path == PATHS[0] else choice["message"]["content"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("way", "value", "fits"), WAYS, ids=lambda value: value if isinstance(value, str) and value.isalpha() else "")
def test_a_text_is_what_its_structure_allows(running: Running, path: str, way: str, value: Any, fits: Any) -> None:
    texts = {}
    for said in ({"structured_outputs": {way: value}}, {f"guided_{way}": value}):
        reply = asked(running, path, **said)
        assert reply.status_code == 200, reply.text
        texts[text_of(path, reply.json())] = said
    assert len(texts) == 1 and fits(next(iter(texts))), texts


def test_an_object_of_any_kind(running: Running) -> None:
    reply = asked(running, PATHS[0], structured_outputs={"json_object": True}, max_tokens=9)
    assert text_of(PATHS[0], reply.json()).startswith("{")


@pytest.mark.parametrize(("body", "param"), [
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"), ({"guided_json": "[]"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_regex": "("}, "guided_regex"), ({"guided_grammar": "nonsense"}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]}, "tools"),
    ({"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
])
def test_what_cannot_be_kept_is_refused(running: Running, body: dict[str, Any], param: str | None) -> None:
    reply = asked(running, PATHS[1], **body)
    assert reply.status_code == 400 and param in (None, reply.json()["error"]["param"]), reply.text
