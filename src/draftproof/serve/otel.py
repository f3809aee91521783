"""One OpenTelemetry span per request for text: what was asked in numbers, how it ended, and what speculation did for it.

A layer around the routes, behind the gate; nothing imports this file unless the server was told to. Names are those of the GenAI
and HTTP conventions where they have one, the rest begins with `draftproof.`. No text of a client or of the model is exported, and
no error message, which may quote one. Exporting is left to the SDK's batch processor in a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from threading import Thread
from time import monotonic

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from .. import __version__
from ..engine.port import Completion
from ..errors import OptionError
from ..trace.events import RoundDone
from .gate import App, Message, Receive, Scope, Send
from .numbers import cached_tokens, speculative
from .refusal import of_error
from .reply import Head, finish_of
from .ticket import Ticket
from .translate import Order

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
EXPORTERS = "opentelemetry_traces_exporter"              # the group of entry points in which exporters announce themselves
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
FLUSH_S = 5.0                                            # how long a stopping server waits for a collector
FATES = ("accepted", "rejected", "discarded")
Attributes = dict[str, AttributeValue | None]
Asked = tuple[Head, Sequence[Ticket]]                     # what the routes leave in scope["state"]["asked"]


def exporters() -> list[Callable[[], SpanExporter]]:
    """Those that OTEL_TRACES_EXPORTER names; OTLP over HTTP if it is unset or empty. Raises OptionError for one that is not installed."""
    announced, found = entry_points(group=EXPORTERS), []
    for name in filter(None, map(str.strip, (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","))):
        if name == "otlp":
            protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            name = PROTOCOLS.get(protocol or "http/protobuf", protocol or "")
        if name not in (*announced.names, "none"):
            raise OptionError(f"--otel: no exporter {name!r} is installed; expected OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL to "
                              f"name one of {', '.join(sorted(announced.names))}, or none")
        if name != "none":
            found.append(announced[name].load())
    return found


def provider() -> TracerProvider:
    """What the standard OTEL_* variables describe: resource, sampler and limits, and a batch processor for every exporter."""
    found = Resource.create()
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: "draftproof", SERVICE_VERSION: __version__}))
    made = TracerProvider(resource=found)
    for exporter in exporters():
        made.add_span_processor(BatchSpanProcessor(exporter()))
    return made


def check() -> None:
    """Raises OptionError if the variables describe nothing that can be made."""
    try:
        provider().shutdown()
    except ValueError as error:
        raise OptionError(f"--otel: {error}; expected OTEL_* variables as OpenTelemetry describes them: correct it, or unset it") from None


class Spans:
    """An ASGI layer: a span begins where the caller's trace (W3C traceparent) left off, and ends with the answer's last byte."""

    def __init__(self, app: App, model: str, made: TracerProvider) -> None:
        self._app, self._model, self._provider = app, model, made
        self._tracer = made.get_tracer("draftproof", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            return await self._app(scope, receive, self._flushing(send) if scope["type"] == "lifespan" else send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        known: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "draftproof",
                             "http.request.method": "POST", "http.route": scope["path"]}
        span = self._tracer.start_span(f"{operation} {self._model}", extract(headers), SpanKind.SERVER, _given(known))
        watched = _Watched(send)
        try:
            await self._app(scope, receive, watched)
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            if span.is_recording():
                watched.tell(span, scope.get("state", {}).get("asked"))
            span.end()

    def _flushing(self, send: Send) -> Send:
        """`send` that sends off what is left before it says that the server has stopped."""
        async def flushing(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                last = Thread(target=self._provider.shutdown, daemon=True)
                last.start()
                await asyncio.to_thread(last.join, FLUSH_S)
            await send(message)

        return flushing


class _Watched:
    """`send`, and what went through it."""

    def __init__(self, send: Send) -> None:
        self._send, self._began = send, monotonic()
        self._status: int | None = None
        self._first_s: float | None = None
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._first_s is None and message.get("body"):
            self._first_s = monotonic() - self._began
        await self._send(message)
        self._ended = self._ended or message["type"] == "http.response.body" and not message.get("more_body")

    def tell(self, span: Span, asked: Asked | None) -> None:
        failed: BaseException | None = None
        if asked is not None:
            head, tickets = asked
            failed = next((ticket.error for ticket in tickets if ticket.error is not None), None)
            span.set_attributes(_given({**_of_order(head), **_of_tickets(head.order, tickets)}))
            if head.order.stream and self._first_s is not None:
                span.set_attribute("gen_ai.response.time_to_first_chunk", self._first_s)
        refusal = None if failed is None else of_error(failed)
        status = refusal.status if refusal is not None else self._status or 0
        if self._status is not None:
            span.set_attribute("http.response.status_code", self._status)
        if not self._ended or status == 499:
            span.set_attribute("error.type", "cancelled")    # the client went away
        elif status >= 400:
            span.set_attribute("error.type", refusal.code or str(status) if refusal is not None else str(status))
        if status >= 500:
            span.set_status(StatusCode.ERROR)


def _of_order(head: Head) -> Attributes:
    """What was asked. Left out: everything a client wrote in words, stop sequences and tools too."""
    order, model = head.order, head.served.name
    sampling, form = order.sampling, order.sampling.grammar or {}
    return {
        "gen_ai.request.model": model, "gen_ai.response.model": model, "gen_ai.response.id": head.id,
        "gen_ai.request.temperature": sampling.temperature, "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None, "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.choice.count": order.choices if order.choices > 1 else None, "gen_ai.request.stream": order.stream,
        "gen_ai.output.type": "json" if "json_schema" in form or "json_object" in form else "text",
        "draftproof.prompt_class": order.prompt_class,
    }


def _of_tickets(order: Order, tickets: Sequence[Ticket]) -> Attributes:
    """What came of it. Counts of a text that did not end are absent, and those of speculation are where there was none."""
    done = [[ticket.completions[sample] for sample in sorted(ticket.completions)] for ticket in tickets]
    flat = [completion for group in done for completion in group]
    admitted = [ticket.admitted for ticket in tickets if ticket.admitted is not None]
    found: Attributes = {
        "gen_ai.usage.output_tokens": sum(len(told) for ticket in tickets for told in ticket.told),
        "draftproof.queue_s": max(admitted) - min(ticket.queued for ticket in tickets) if len(admitted) == len(tickets) else None,
        "draftproof.replays": sum(ticket.replays for ticket in tickets) or None,
    }
    if not flat or len(flat) < order.choices:
        return found
    first = flat[0]
    return {
        **found, **_of_speculation(flat), "gen_ai.request.seed": first.seed,
        "gen_ai.usage.input_tokens": sum(group[0].prompt_tokens for group in done),
        "gen_ai.usage.cache_read.input_tokens": sum(cached_tokens(group[0]) for group in done),
        "gen_ai.response.finish_reasons": [finish_of(completion.finish_reason) or "" for completion in flat],
        "draftproof.ttft_s": tickets[0].first[0] - tickets[0].queued if 0 in tickets[0].first else None,
    }


def _of_speculation(flat: Sequence[Completion]) -> Attributes:
    first = flat[0].speculation
    found: Attributes = {f"draftproof.{name}": str(first[name]) for name in ("state", "drafter", "depth", "rule", "reason")}
    if first["state"] == "out of service":
        found["draftproof.reason"] = first["state"]          # the reason quotes an exception; the server's log has it
    if any(speculative(completion) is not None for completion in flat):
        rounds = [event for completion in flat for event in completion.trace if isinstance(event, RoundDone)]
        fates: Counter[str] = Counter(node.fate for event in rounds for node in event.nodes)
        found.update({"draftproof.rounds": len(rounds), "draftproof.drafted": fates.total(),
                      **{f"draftproof.{fate}": fates[fate] for fate in FATES}})
    return found


def _given(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}
