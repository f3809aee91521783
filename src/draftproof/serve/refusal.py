"""Every refusal in one form: OpenAI's error object. No exception's text leaves the server unless it is one of ours."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from ..errors import CacheFull, DraftproofError, PromptError, UsageError

MOST_MISTAKES = 1000
TYPES = {"str", "int", "dict", "list", "bool", "float"}


class Refusal(Exception):
    """An answer with an error: status, OpenAI's fields, and seconds after which to try again."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
                 code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**headers, **{401: {"WWW-Authenticate": "Bearer"}, 415: {"Accept-Encoding": "identity"}}.get(self.status, {})}


def of_error(error: BaseException) -> Refusal:
    """The refusal for whatever ended a request. What is not an error of ours is said without its text."""
    if isinstance(error, Refusal):
        return error
    message = str(error)
    if isinstance(error, PromptError):
        return Refusal(400, message, param="prompt", code="context_length_exceeded" if "context" in message else None)
    if isinstance(error, UsageError):
        return Refusal(400, message, param=_named(message))
    if isinstance(error, CacheFull):
        return Refusal(400, message, param="max_tokens", code="context_length_exceeded")
    if isinstance(error, DraftproofError):
        return Refusal(503, message, "server_error", retry_after=1)
    return Refusal(500, "the engine failed on this request; the server's log says why", "server_error", code="engine_error")


def of_validation(error: ValidationError) -> Refusal:
    """The first thing that is wrong with a body, by the name of its field."""
    if error.error_count() > MOST_MISTAKES:                  # a list of them all would take seconds, and much memory
        return Refusal(400, f"the body has {error.error_count()} mistakes; GET /openapi.json says what is expected", code="invalid_value")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    # A value that may be of several types has an error for each; the one about its content is the one that was meant.
    first = (unknown or [one for one in found if not one["type"].endswith("_type")] or found)[0]
    # Steps of a union ("str", "list[…]") stand in the place too; only names and indices mean something to a client.
    parts = [str(step) for step in first["loc"] if isinstance(step, int) or re.fullmatch(r"[a-z][a-z_]*", step) and step not in TYPES]
    place = ".".join(parts) or "body"
    if unknown:
        place = ".".join([*parts, str(first["loc"][-1])[:64]]) if not parts or parts[-1] != first["loc"][-1] else place
        return Refusal(400, f"{place}: this server does not support this field; leave it out", param=place, code="unknown_parameter")
    if first["type"] == "none_required":
        return Refusal(400, f"{place}: this server takes no value of this field but null; leave it out", param=place, code="invalid_value")
    return Refusal(400, f"{place}: {first['msg']}", param=place, code="invalid_value" if first["type"] != "missing" else "missing")


def _named(message: str) -> str | None:
    """The option that an error's message begins with, as all of ours do."""
    found = re.match(r"(?:speculation )?([a-z_]+)(?:=| names| holds|: | is | with )", message)
    return found.group(1) if found else None
