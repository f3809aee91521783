"""The API described for machines (OpenAPI 3.1), from the very models that check the requests, with the served model's own bounds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import __version__
from . import schema
from .translate import CLASS, Served

BODIES: dict[tuple[str, str], tuple[type[BaseModel], str]] = {
    ("/v1/completions", "post"): (schema.CompletionRequest, "Text from a prompt."),
    ("/v1/chat/completions", "post"): (schema.ChatRequest, "The next turn of a conversation."),
    ("/v1/responses", "post"): (schema.ResponsesRequest, "The Responses API, text and function calls."),
    ("/tokenize", "post"): (schema.TokenizeRequest, "Text to ids."),
    ("/detokenize", "post"): (schema.DetokenizeRequest, "Ids to text."),
    ("/draftproof/speculation", "put"): (schema.SwitchRequest, "Steer speculation from the next round on."),
    ("/draftproof/ab", "put"): (schema.AbRequest, "End the experiment, or begin it anew."),
}
PLAIN = {"/v1/models": "The model.", "/v1/models/{name}": "One model.", "/health": "The process is alive.", "/ready": "The engine answers.",
         "/metrics": "Prometheus.", "/draftproof/speculation": "The state of speculation.",
         "/draftproof/ab": "What an experiment has found.", "/draftproof/ab.json": "The same, as JSON whatever is accepted.",
         "/openapi.json": "This document."}
REFUSALS = {
    "400": "not supported, or out of bounds: `error.param` names it", "401": "no valid key", "403": "not allowed", "404": "no such model",
    "409": "not in this state: the message says what is in the way",
    "413": "too large", "415": "a compressed body",
    "429": "too many of this key", "503": "no place, or stopping", "504": "not finished in time",
}


def described(served: Served) -> dict[str, Any]:
    """The document that GET /openapi.json answers."""
    _, models = models_json_schema([(model, "validation") for model, _ in BODIES.values()], ref_template="#/components/schemas/{model}")
    schemas = models.get("$defs", {})
    _bound(schemas, served)
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (model, what) in BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        body = {"requestBody": {"required": True, "content": content}}
        headers = {"parameters": _headers()} if issubclass(model, schema.Common) else {}
        paths.setdefault(path, {})[method] = {**_operation(what), **headers, **body}
    for path, what in PLAIN.items():
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}, "example": served.name}
        paths.setdefault(path, {})["get"] = {**_operation(what), **({"parameters": [name]} if "{name}" in path else {})}
    error = {"type": "object", "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
             "required": ["error"]}
    return {"openapi": "3.1.0", "info": {"title": "Draftproof", "version": __version__}, "paths": paths,
            "components": {"schemas": {**schemas, "Error": error}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{"key": []}]}


def _bound(schemas: dict[str, Any], served: Served) -> None:
    """What the models cannot know or say: the one model's name, how many tokens it has, and that a pattern of keys allows no others."""
    for one in schemas.values():
        if "model" in one.get("properties", {}):
            one["properties"]["model"] = {"const": served.name, "title": "Model"}
    heap: list[Any] = [schemas]
    while heap:
        item = heap.pop()
        if isinstance(item, dict) and item.get("title") == schema.TOKEN_ID:
            item["exclusiveMaximum"] = served.vocab_size
        if isinstance(item, dict) and "patternProperties" in item:
            item["additionalProperties"] = False
        heap += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


def _headers() -> list[dict[str, Any]]:
    """What may be said beside the body."""
    wish = {"anyOf": [{"enum": ["on", "off", "none"]},
                      {"type": "string", "pattern": r"^\{.*\}$", "description": "JSON, as `speculation` in a body"}]}
    return [{"name": "X-Draftproof-Speculation", "in": "header", "schema": wish},
            {"name": "X-Draftproof-Class", "in": "header", "schema": {"type": "string", "pattern": f"^{CLASS.pattern}$"}}]


def _operation(what: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": why, "content": content} for status, why in REFUSALS.items()}
    return {"summary": what, "responses": {"200": {"description": "done"}, **refusals}}
