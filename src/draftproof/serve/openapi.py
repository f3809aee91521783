"""The API described for machines (OpenAPI 3.1), from the very models that check the requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import __version__
from . import schema

BODIES: dict[tuple[str, str], tuple[type[BaseModel], str]] = {
    ("/v1/completions", "post"): (schema.CompletionRequest, "Text from a prompt."),
    ("/v1/chat/completions", "post"): (schema.ChatRequest, "The next turn of a conversation."),
    ("/v1/responses", "post"): (schema.ResponsesRequest, "The Responses API, text only."),
    ("/tokenize", "post"): (schema.TokenizeRequest, "Text to ids."),
    ("/detokenize", "post"): (schema.DetokenizeRequest, "Ids to text."),
    ("/draftproof/speculation", "put"): (schema.SwitchRequest, "Steer speculation from the next round on."),
}
PLAIN = {"/v1/models": "The model.", "/health": "The process is alive.", "/ready": "The engine answers.", "/metrics": "Prometheus.",
         "/draftproof/speculation": "The state of speculation."}
REFUSALS = {
    "400": "not supported, or out of bounds: `error.param` names it", "401": "no valid key", "403": "not allowed", "404": "no such model",
    "413": "too large", "429": "too many of this key", "503": "no place, or stopping", "504": "not finished in time",
}


def described() -> dict[str, Any]:
    """The document that GET /openapi.json answers."""
    _, models = models_json_schema([(model, "validation") for model, _ in BODIES.values()], ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (model, what) in BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        paths.setdefault(path, {})[method] = {**_operation(what), "requestBody": {"required": True, "content": content}}
    for path, what in PLAIN.items():
        paths.setdefault(path, {})["get"] = _operation(what)
    error = {"type": "object", "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
             "required": ["error"]}
    return {"openapi": "3.1.0", "info": {"title": "Draftproof", "version": __version__}, "paths": paths,
            "components": {"schemas": {**models.get("$defs", {}), "Error": error},
                           "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{"key": []}]}


def _operation(what: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": why, "content": content} for status, why in REFUSALS.items()}
    return {"summary": what, "responses": {"200": {"description": "done"}, **refusals}}
