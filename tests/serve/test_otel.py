"""Spans of OpenTelemetry: whose trace they continue, what they say, what they never say, and that nobody waits for them."""

from __future__ import annotations

import ast
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from serve.serving import Running, alone, letters, serving, words
from serve.test_http import until

from draftproof import Sampling
from draftproof.config import ServeConfig
from draftproof.errors import OptionError

otel = pytest.importorskip("draftproof.serve.otel")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

OBSERVED = ServeConfig(port=0, otel=True)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "deadbeef"                                     # a prompt that letters can write, and nothing else says


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    found = InMemorySpanExporter()

    def provider() -> TracerProvider:
        made = TracerProvider()
        made.add_span_processor(SimpleSpanProcessor(found))
        return made

    monkeypatch.setattr(otel, "provider", provider)
    return found


@pytest.fixture
def running(spans: InMemorySpanExporter) -> Iterator[Running]:
    with serving(letters(), "ngram:min=1,max=2", config=OBSERVED, depth=3) as server:
        yield server


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    """The one span since the last look; it ends a moment after the answer does."""
    until(lambda: spans.get_finished_spans())
    span, = spans.get_finished_spans()
    spans.clear()
    return span


def test_a_text_and_its_numbers(running: Running, spans: InMemorySpanExporter) -> None:
    body = {"prompt": "abababab", "seed": 1, "max_tokens": 30, "temperature": 0.9, "top_k": 5, "metadata": {"prompt_class": "letters"}}
    reply = running.complete(**body)
    span, numbers = only(spans), reply["metrics"]["speculative_decoding"]
    said = dict(span.attributes or {})
    assert span.name == "text_completion letters" and span.kind.name == "SERVER" and span.parent is None and span.status.is_unset
    assert numbers["num_draft_tokens"] == said["draftproof.drafted"] > 0
    assert said["draftproof.accepted"] == numbers["num_accepted_draft_tokens"] > 0
    assert said["draftproof.rejected"] + said["draftproof.discarded"] + said["draftproof.accepted"] == said["draftproof.drafted"]
    assert said["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert said["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert 0 < said.pop("draftproof.ttft_s") < 20 and 0 <= said.pop("draftproof.queue_s") < 20
    assert 0 < (span.end_time - span.start_time) / 1e9 < 20
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "draftproof", "gen_ai.request.model": "letters",
        "gen_ai.response.model": "letters", "gen_ai.response.id": reply["id"], "gen_ai.request.temperature": 0.9,
        "gen_ai.request.top_k": 5, "gen_ai.request.max_tokens": 30, "gen_ai.request.seed": 1, "gen_ai.request.stream": False,
        "gen_ai.output.type": "text", "gen_ai.response.finish_reasons": (reply["choices"][0]["finish_reason"],),
        "gen_ai.usage.cache_read.input_tokens": 0, "http.request.method": "POST", "http.route": "/v1/completions",
        "http.response.status_code": 200, "draftproof.prompt_class": "letters", "draftproof.drafter": "ngram", "draftproof.depth": "3",
        "draftproof.rule": "match", "draftproof.state": "on", "draftproof.reason": reply["speculation"]["reason"],
    }
    assert {name: said[name] for name in expected} == expected
    assert not set(said) - set(expected) - {f"draftproof.{name}" for name in ("rounds", "drafted", "accepted", "rejected", "discarded")} - {
        "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}


@pytest.mark.parametrize(("path", "body", "operation"), [
    ("/v1/completions", {"prompt": ["ab", "ba"], "n": 2, "max_tokens": 12}, "text_completion"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 12}, "chat"),
    ("/v1/responses", {"input": "ab", "max_output_tokens": 12}, "chat"),
])
def test_every_route_streamed(running: Running, spans: InMemorySpanExporter, path: str, body: dict[str, Any], operation: str) -> None:
    running.stream(path, ignore_eos=True, **body)
    span = only(spans)
    said = dict(span.attributes or {})
    many = 4 if path == "/v1/completions" else 1
    assert span.name == f"{operation} letters" and said["http.route"] == path and said["gen_ai.request.stream"]
    assert said["gen_ai.usage.output_tokens"] == 12 * many and said["gen_ai.response.finish_reasons"] == ("length",) * many
    assert said.get("gen_ai.request.choice.count", 1) == many
    assert 0 < said["gen_ai.response.time_to_first_chunk"] <= (span.end_time - span.start_time) / 1e9


def test_the_callers_trace_goes_on(running: Running, spans: InMemorySpanExporter) -> None:
    def ask(flags: str) -> int:
        return running.post("/v1/completions", {"prompt": "ab", "max_tokens": 2}, headers={
            "traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=x"}).status_code

    assert ask("01") == 200
    span = only(spans)
    assert f"{span.context.trace_id:032x}" == TRACE and span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "x"
    assert ask("00") == 200, "the caller does not sample this trace"
    for broken in ("zz", "01-extra"):
        assert ask(broken) == 200
    time.sleep(0.1)
    assert all(f"{other.context.trace_id:032x}" != TRACE for other in spans.get_finished_spans()), "a broken header starts a new trace"


def test_counts_are_absent_when_nothing_was_guessed(running: Running, spans: InMemorySpanExporter) -> None:
    running.complete(prompt="abababab", seed=1, max_tokens=30, speculation={"drafter": "none"})
    said = dict(only(spans).attributes or {})
    assert said["draftproof.state"] == "off" and "draftproof.drafted" not in said and "draftproof.accepted" not in said


@pytest.mark.parametrize(("body", "status", "kind"), [
    ({"prompt": SECRET, "frobnicate": SECRET}, 400, "400"), ({"prompt": SECRET, "model": SECRET}, 404, "404"),
    ({"prompt": SECRET * 600}, 400, "context_length_exceeded"), ({"prompt": SECRET, "speculation": {"drafter": SECRET}}, 400, "400"),
])
def test_what_was_refused(running: Running, spans: InMemorySpanExporter, body: dict[str, Any], status: int, kind: str) -> None:
    assert running.post("/v1/completions", body).status_code == status
    span = only(spans)
    said = dict(span.attributes or {})
    assert (said["http.response.status_code"], said["error.type"]) == (status, kind) and span.status.is_unset
    assert SECRET not in span.to_json()


def test_a_stream_that_fails_and_a_client_that_leaves(spans: InMemorySpanExporter) -> None:
    from serve.test_faults import Around

    with serving(letters(), wrap=lambda engine: Around(engine, lambda: time.sleep(0.02)),
                 config=ServeConfig(port=0, deadline_s=0.4, otel=True)) as running:
        body = {"prompt": SECRET, "max_tokens": 4000, "ignore_eos": True}
        assert running.stream(**body)[-1]["error"]["code"] == "deadline"
        span = only(spans)
        said = dict(span.attributes or {})
        assert (said["http.response.status_code"], said["error.type"]) == (200, "deadline") and not span.status.is_ok
        assert span.status.status_code.name == "ERROR" and span.status.description is None and said["gen_ai.usage.output_tokens"] > 3
        for stream in (True, False):
            with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
                data = json.dumps({"model": "letters", "stream": stream, **body}).encode()
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
                until(lambda: running.server.worker.load[0] == 1)
                time.sleep(0.1)
            span = only(spans)
            assert dict(span.attributes or {})["error.type"] == "cancelled" and span.status.is_unset
            until(lambda: running.idle)


def test_no_word_of_anybody_is_exported(spans: InMemorySpanExporter) -> None:
    """Prompts, turns, predictions, stops, bad words, tools, schemas, metadata, users and answers: not one of them is in a span."""
    said = ["deadbeef", "cabcab", "beadbead", "dabdab", "frobnicator", "quuxify", "grault", "plugh", "waldo", "corge"]
    tools = [{"type": "function", "function": {"name": said[7], "description": said[4], "parameters": {
        "type": "object", "properties": {said[8]: {"enum": [said[9]]}}, "required": [said[8]], "additionalProperties": False}}}]
    schema = {"type": "object", "properties": {said[5]: {"enum": [said[6]]}}, "required": [said[5]], "additionalProperties": False}
    chat: dict[str, Any] = {"messages": [{"role": "system", "content": said[2]}, {"role": "user", "content": said[3], "name": said[6]}],
                            "max_tokens": 80, "user": said[5], "seed": 1}
    asked = [
        ("/v1/completions", {"prompt": said[0], "stop": [said[1]], "bad_words": [said[2]], "user": said[4], "metadata": {"note": said[5]}}),
        ("/v1/chat/completions", {**chat, "prediction": {"type": "content", "content": said[8]}}),
        ("/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "required"}),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": said[9], "schema": schema}}}),
        ("/v1/responses", {"input": said[0], "instructions": said[2], "max_output_tokens": 4}),
    ]
    answers: list[str] = []
    with serving(words(), "prediction", name="letters", config=OBSERVED) as running:
        for path, body in asked:
            reply = running.post(path, body)
            assert reply.status_code == 200, reply.text
            for choice in reply.json().get("choices", ()):
                answers.append(choice.get("text") or choice["message"]["content"] or "")
        refused = running.post("/v1/chat/completions", {**chat, "tools": tools, "tool_choice": {"type": "function", "function": {
            "name": said[6]}}})
        assert refused.status_code == 400 and said[6] in refused.text, "the client is told, nobody else"
        until(lambda: len(spans.get_finished_spans()) == 6)
    exported = "".join(span.to_json() for span in spans.get_finished_spans())
    pieces = [answer[at:at + 6] for answer in answers for at in range(0, len(answer) - 6, 6) if answer[at:at + 6].isascii()]
    assert not [word for word in (*said, *filter(str.isalpha, pieces)) if word in exported] and len(answers) == 4


def test_names_are_those_of_the_conventions(running: Running, spans: InMemorySpanExporter) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    from opentelemetry.semconv.attributes import error_attributes, http_attributes

    known = {value for module in (gen_ai_attributes, error_attributes, http_attributes) for name, value in vars(module).items()
             if name.isupper() and isinstance(value, str)}
    running.stream(prompt="ab", n=2, temperature=0.5, top_p=0.9, top_k=3, presence_penalty=0.1, frequency_penalty=0.1, max_tokens=4)
    found = set(only(spans).attributes or {})
    running.post("/v1/completions", {"prompt": ""})
    found |= set(only(spans).attributes or {})
    assert len(found) > 20 and not {name for name in found if not name.startswith("draftproof.")} - known


def test_a_failure_of_a_drafter_is_not_quoted(spans: InMemorySpanExporter) -> None:
    from engine.test_faulty_drafters import Faulty

    with serving(letters(), lambda: Faulty("raise"), config=OBSERVED, depth=3) as running:
        reply = running.complete(prompt="abab", seed=1, max_tokens=30, ignore_eos=True)
        assert "weights are gone" in reply["speculation"]["reason"]
        assert dict(only(spans).attributes or {})["draftproof.reason"] == "out of service"


def test_probes_make_no_spans_and_strangers_neither(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.serve.gate import read_keys

    monkeypatch.setenv("DRAFTPROOF_API_KEYS", "the-secret-key")
    with serving(letters(), config=OBSERVED, keys=read_keys(None)) as running, running.client() as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        keyed = {"Authorization": "Bearer the-secret-key"}
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/completions"):
            client.get(path, headers=keyed)
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=keyed).status_code == 200
        assert only(spans).name == "text_completion letters"


# The environment


def test_the_environment_says_who_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    made = otel.provider()
    assert made.resource.attributes["service.name"] == "draftproof" and made.resource.attributes["service.version"]
    made.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    made = otel.provider()
    assert made.resource.attributes["service.name"] == "ours" and made.resource.attributes["deployment.environment.name"] == "test"
    assert otel.exporters() == []
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "")
    assert [exporter.__name__ for exporter in otel.exporters()] == ["OTLPSpanExporter"], "empty is unset"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console, otlp")
    assert [exporter.__name__ for exporter in otel.exporters()] == ["ConsoleSpanExporter", "OTLPSpanExporter"]
    for name, value in (("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv(name, value)
        with pytest.raises(OptionError, match=value):
            otel.exporters()


class Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, bytes]] = []

    def do_POST(self) -> None:
        self.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_spans_arrive_at_a_collector_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")          # not before it stops
        with serving(letters(), "ngram", config=OBSERVED) as running:
            for seed in range(5):
                running.complete(prompt="ab", seed=seed, max_tokens=4)
            assert not Collector.got
        collector.shutdown()
    (path, data), = Collector.got
    request = ExportTraceServiceRequest.FromString(data)
    names = [span.name for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
    assert path == "/v1/traces" and names == ["text_completion letters"] * 5


class Stuck(SpanExporter):
    """A collector that never answers."""

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.asked.set()
        self.free.wait(60)
        return SpanExportResult.SUCCESS


def test_a_collector_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts come as ever, spans beyond the queue are dropped, and the server stops."""
    stuck, target = Stuck(), letters()
    monkeypatch.setattr(otel, "exporters", lambda: [lambda: stuck])
    monkeypatch.setattr(otel, "FLUSH_S", 0.1)
    for name, value in (("SCHEDULE_DELAY", "10"), ("MAX_QUEUE_SIZE", "4"), ("MAX_EXPORT_BATCH_SIZE", "2")):
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    with serving(target, "ngram:min=1,max=2", config=OBSERVED) as running:
        for seed in range(12):
            text = running.complete(prompt="abba", seed=seed, max_tokens=20)["choices"][0]["text"]
            assert text == alone(target, "abba", Sampling(seed=seed, max_tokens=20)).text
        until(stuck.asked.is_set)
    assert not stuck.free.is_set(), "it was never let go"
    stuck.free.set()


def test_nothing_is_imported_without_the_switch() -> None:
    """One file imports OpenTelemetry, and that file is imported inside functions only."""
    source = Path(otel.__file__).parent.parent
    users, early = set(), set()
    for file in source.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if any(name.startswith("opentelemetry") for name in (*names, module)):
                users.add(file.name)
            if node in tree.body and ("otel" in names or module.split(".")[-1] == "otel"):
                early.add(file.name)
    assert users == {"otel.py"} and not early


@pytest.mark.parametrize(("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "256"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-3")])
def test_numbers_that_are_none_are_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    from draftproof.commands.serve import serve

    monkeypatch.setenv(name, value)
    wrong = CliRunner().invoke(serve, ["--otel", "--port", "0"])
    assert isinstance(wrong.exception, OptionError) and "OTEL_" in str(wrong.exception)


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.commands.serve import serve

    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    wrong = CliRunner().invoke(serve, ["--otel", "--port", "0"])
    assert isinstance(wrong.exception, OptionError) and "zipkin" in str(wrong.exception)
    monkeypatch.delitem(sys.modules, "draftproof.serve.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", None)
    missing = CliRunner().invoke(serve, ["--otel", "--port", "0"])
    assert isinstance(missing.exception, OptionError) and "pip install 'draftproof[otel]'" in str(missing.exception)
