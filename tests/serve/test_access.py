"""What an operator can read of every answer: the request's name, whoever gave it, and its line in the log."""

from __future__ import annotations

import re

import pytest
from serve.serving import letters, serving

from draftproof.config import ServeConfig
from draftproof.serve.gate import Key

PAGE = "https://app.example"


def test_every_answer_names_its_request() -> None:
    with serving(letters(), keys=(Key.of("alice alice-secret", 1),), config=ServeConfig(port=0, origins=(PAGE,))) as running, \
            running.client() as client:
        mine = {"Authorization": "Bearer alice-secret", "X-Request-Id": "abc-123"}
        text = running.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers=mine)
        stream = running.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}, headers=mine)
        wrong = running.post("/v1/completions", {"prompt": "a", "n": 0}, headers={**mine, "Origin": PAGE})
        unknown, keyless = client.get("/nothing", headers=mine), client.get("/ready", headers={"X-Request-Id": "abc-123"})
        foreign = client.get("/health", headers={"X-Request-Id": "abc-123", "Host": "evil.example"})
        answers = [text, stream, wrong, unknown, keyless, foreign]
        assert [one.status_code for one in answers] == [200, 200, 400, 404, 401, 403]
        assert [one.headers.get_list("x-request-id") for one in answers] == [["abc-123"]] * 6
        assert "X-Request-Id" in wrong.headers["access-control-expose-headers"]
        made = [client.get("/health", headers=headers).headers["x-request-id"] for headers in (
            {}, {}, {"X-Request-Id": "two words"}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": ""})]
        assert len(set(made)) == 5 and all(re.fullmatch("req_[0-9a-f]{32}", name) for name in made)


@pytest.mark.parametrize("logged", [True, False])
def test_a_line_for_every_answer(logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftproof.access")
    config = ServeConfig(port=0, access_log=logged)
    with serving(letters(), keys=(Key.of("alice alice-secret", 1),), config=config) as running, running.client() as client:
        mine = {"Authorization": "Bearer alice-secret", "X-Request-Id": "abc-123"}
        running.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers=mine)
        client.get("/not%0ahere?secret", headers={"X-Request-Id": "abc-124"})
    said = [record.getMessage() for record in caplog.records if record.name == "draftproof.access"]
    assert [re.sub(r"\d\.\d{3} s", "T s", line) for line in said] == ([
        '127.0.0.1 alice "POST /v1/completions" 200 T s abc-123 r0', '127.0.0.1 - "GET /not%0ahere" 401 T s abc-124 -'] if logged else [])
