"""How answers end that do not end well: what their readers and the counters are told."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.serving import letters, serving
from serve.test_faults import Around
from serve.test_http import leave, until
from serve.test_worker import seconds_of

from draftproof.config import ServeConfig
from draftproof.serve.ticket import Ticket

FOREVER: dict[str, Any] = {"ignore_eos": True}
LATE = ServeConfig(port=0, deadline_s=0.4)


def slow(engine: Any) -> Any:
    return Around(engine, lambda: time.sleep(0.02))


def test_an_error_in_a_stream_of_responses_is_an_event_like_the_others() -> None:
    with serving(letters(), config=LATE, wrap=slow) as running:
        events = running.stream("/v1/responses", input="ab", max_output_tokens=4000, **FOREVER)
        assert [event["sequence_number"] for event in events] == list(range(len(events))) and len(events) > 4
        assert {**events[-1], "message": ""} == {"type": "error", "sequence_number": len(events) - 1, "code": "deadline", "param": None,
                                                 "message": ""}
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
            stream = client.responses.create(model="letters", input="ab", max_output_tokens=4000, stream=True, extra_body=FOREVER)
            *_, last = stream
            assert last.type == "error" and "not finished within" in last.message


@pytest.mark.parametrize("chunks", ["round", "tokens:8", "ms:300"])
def test_what_was_written_before_an_error_is_sent(chunks: str) -> None:
    config = ServeConfig(port=0, deadline_s=0.4, chunks=chunks)
    tickets: list[Ticket] = []
    with serving(letters(), config=config, wrap=slow) as running:
        submit = running.server.worker.submit
        running.server.worker.submit = lambda ticket: (tickets.append(ticket), submit(ticket))[1]  # type: ignore[method-assign]
        events = running.stream(prompt="ab", max_tokens=4000, logprobs=0, **FOREVER)
    sent = sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events[:-1])
    assert events[-1]["error"]["code"] == "deadline" and sent == len(tickets[0].told[0]) > 3


def test_a_crash_cancels_nobody() -> None:
    steps, three = [0], threading.Event()

    def before() -> None:
        three.wait(20)
        steps[0] += 1
        if steps[0] == 9:
            raise RuntimeError("the device is lost")

    with serving(letters(), wrap=lambda engine: Around(engine, before)) as running, running.client() as client:
        with ThreadPoolExecutor(3) as pool:
            texts = [pool.submit(running.complete, prompt="ab", seed=seed, max_tokens=20, **FOREVER) for seed in range(3)]
            while sum(running.server.worker.load) < 3:
                time.sleep(0.01)
            three.set()
            assert all(text.result(20)["choices"] for text in texts)
        found = client.get("/metrics").text
        assert running.server.worker.restarts == 1 and seconds_of(found, "e2e_request_latency_seconds")[1] == 3
        assert seconds_of(found, "time_per_output_token_seconds")[1] == 3, "not of those that the lost engine gave up, too"
        ends = [line for line in found.splitlines() if line.startswith("draftproof:request_success_total")]
        assert len(ends) == 1 and 'finished_reason="length"' in ends[0] and ends[0].endswith(" 3.0")


def ends_of(text: str) -> dict[str, float]:
    """What `request_success_total` says, by reason."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {one.labels["finished_reason"]: one.value for one in samples if one.name == "draftproof:request_success_total"}


def test_why_texts_end_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    step_s = [0.02]
    config = ServeConfig(port=0, deadline_s=2.0, drain_s=0.05)
    long: dict[str, Any] = {"prompt": "ab", "max_tokens": 4000, **FOREVER}
    with serving(letters(), config=config, wrap=lambda engine: Around(engine, lambda: time.sleep(step_s[0])), max_batch=2) as running, \
            ThreadPoolExecutor(3) as pool:
        worker = running.server.worker
        running.complete(prompt="ab", max_tokens=3, n=2, **FOREVER)
        leave(running, long, stream=False, wait=lambda: until(lambda: worker.load == (1, 0)))
        until(lambda: running.idle)
        assert running.post("/v1/completions", {"prompt": "a" * 5000}).status_code == 400, "refused, and no text"
        late = [pool.submit(running.stream, **long)]
        until(lambda: any(sum(ticket.written) for ticket in worker._running))
        late += [pool.submit(running.post, "/v1/completions", long) for _ in range(2)]
        until(lambda: worker.load == (2, 1))
        step_s[0] = 2.1                                      # over all deadlines at a time
        assert late[0].result(20)[-1]["error"]["code"] == "deadline"
        assert [one.result(20).status_code for one in late[1:]] == [504, 504], "one of them never ran"
        step_s[0] = 0.02
        with running.client() as client:
            assert ends_of(client.get("/metrics").text) == {"length": 2, "cancelled": 1, "deadline": 3}
        last = pool.submit(running.post, "/v1/completions", long)
        until(lambda: worker.load == (1, 0))
        running.listener.handle_exit(15, None)
        assert last.result(20).status_code == 503
        assert ends_of(running.server.metrics.text().decode()) == {"length": 2, "cancelled": 1, "deadline": 3, "stopped": 1}
    said = [record.getMessage() for record in caplog.records if "not finished within 2 s" in record.getMessage()]
    assert len(said) == 3 and sum(bool(re.match(r"request r\d+: ", line)) for line in said) == 2 and "a request that waits: " in str(said)
