"""What an error becomes on the wire: its status, whose mistake it names, and whether to come again."""

from __future__ import annotations

import pytest

from draftproof.errors import CacheFull, Failure, OptionError, PromptError, SpecError
from draftproof.serve.refusal import Refusal, of_error


@pytest.mark.parametrize(("error", "status", "kind", "param", "code", "again"), [
    (PromptError("a prompt of 9 tokens; this model's maximum context length is 8"), 400, "invalid_request_error", "prompt",
     "context_length_exceeded", None),
    (PromptError("the prompt is empty"), 400, "invalid_request_error", "prompt", None, None),
    (OptionError("depth=-1: expected an integer"), 400, "invalid_request_error", "depth", None, None),
    (OptionError("logit_bias names token id 12; expected ids below 11"), 400, "invalid_request_error", "logit_bias", None, None),
    (OptionError("logit_bias holds inf for token 1"), 400, "invalid_request_error", "logit_bias", None, None),
    (OptionError("speculation depth=-1; expected more"), 400, "invalid_request_error", "depth", None, None),
    (OptionError("rule is lossy"), 400, "invalid_request_error", "rule", None, None),
    (OptionError("depth=3 with drafter none"), 400, "invalid_request_error", "depth", None, None),
    (SpecError("Nobody knows 'magic'"), 400, "invalid_request_error", None, None, None),
    (CacheFull("no pages left"), 400, "invalid_request_error", "max_tokens", "context_length_exceeded", None),
    (Failure("the drafter died"), 503, "server_error", None, None, 1),
    (ValueError("a secret"), 500, "server_error", None, "engine_error", None),
    (Refusal(429, "later", "rate_limit_error", "n", "rate", 7), 429, "rate_limit_error", "n", "rate", 7),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_what_an_error_becomes(error: Exception, status: int, kind: str, param: str | None, code: str | None, again: int | None) -> None:
    found = of_error(error)
    assert (found.status, found.kind, found.param, found.code, found.retry_after) == (status, kind, param, code, again)
    said = found.body["error"]
    assert (said["type"], said["param"], said["code"]) == (kind, param, code)
    assert said["message"] == str(error) or status == 500 and "secret" not in said["message"]
    assert found.headers == ({} if again is None else {"Retry-After": str(again)})


@pytest.mark.parametrize(("status", "headers"), [(401, {"WWW-Authenticate": "Bearer"}), (415, {"Accept-Encoding": "identity"}), (400, {})])
def test_some_statuses_say_what_to_do_in_a_header(status: int, headers: dict[str, str]) -> None:
    assert Refusal(status, "no").headers == headers
    assert Refusal(status, "no", retry_after=0).headers == {**headers, "Retry-After": "0"}
