"""The routes. Each reads a body, asks `translate` what is meant, queues it with the worker and lets a `Reply` write the answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, time
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from .. import __version__
from ..config import ServeConfig
from ..errors import CacheFull, UsageError
from . import schema, translate
from .abmetrics import AbMetrics
from .abpage import AbPage
from .access import Access
from .experiment import Experiment
from .feed import Feed
from .gate import App, Gate, Key, Receive, Scope, Send
from .metrics import Metrics, as_gauges
from .openapi import described
from .page import FILES, Page
from .refusal import Refusal, of_error, of_validation
from .reply import ChatReply, CompletionReply, Head, Reply, ResponsesReply
from .shadow import Unreplayed
from .stream import EventStream, Pacer, Reading, compact, unless_gone
from .switching import state_of, switched
from .ticket import Ticket
from .translate import Headers, Order, Served
from .worker import Worker, stopping

log = logging.getLogger("draftproof.serve")
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

ANSWER_S = 1.0          # how long a probe of the engine may take
LONG_BYTES = 1 << 16    # of a body that waits for others of its kind
WATCH_S = 0.25          # between two looks of the watchdog
Compile = Callable[[Mapping[str, Any]], object]


class Server:
    """What the routes share. `compile` checks a grammar; it runs in a thread, against the clock."""

    def __init__(self, worker: Worker, served: Served, config: ServeConfig, compile: Compile) -> None:
        self.worker, self.served, self.config, self._compile = worker, served, config, compile
        self.metrics = Metrics(served.name, config.classes, self._gauges)
        self.feed = Feed(config.events, config.event_bytes)
        self.page = Page(self.feed, served, lambda: worker.draining and worker.load == (0, 0))
        self.experiment = Experiment(config.ab, served, config.classes, config.deadline_s)
        self.ab = AbPage(self.experiment)
        self.metrics.registry.register(AbMetrics(served.name, self.experiment))
        worker.spare = self.experiment.spare
        self.started = int(time())
        self.state: dict[str, Any] = {"state": "none"}       # of speculation, as last seen
        self.filled: float | None = None                     # share of the cache, if the engine is here
        self.depth_cap: int | None = None                    # the operator's
        self._compilers = ThreadPoolExecutor(2, "draftproof-grammar")
        self._readers = ThreadPoolExecutor(2, "draftproof-reader")   # of long bodies
        self.reading: Counter[str] = Counter()               # requests that are being read, by tenant
        self._detach: Callable[[], None] = lambda: None
        worker.opened.append(lambda engine: self._attach(engine))
        worker.lost.append(lambda: self._detach())           # what it cancels when it is closed is written again, or failed

    def _attach(self, engine: Any) -> None:
        self._detach = engine.events(Unreplayed(self.metrics))
        engine.events(Unreplayed(self.feed))
        self.state = engine.set_speculation()

    def _gauges(self) -> dict[str, float]:
        running, waiting = self.worker.load
        found = {"num_requests_running": running, "num_requests_waiting": waiting, "worker_restarts_total": self.worker.restarts,
                 "ready": float(self.worker.alive and not self.worker.draining), **as_gauges(self.state)}
        return found if self.filled is None else {**found, "kv_cache_usage_perc": self.filled}

    # Texts

    async def completions(self, request: Request) -> Response:
        body = await read(request, schema.CompletionRequest)
        return await self._run(request, body.model, lambda headers: translate.completion(body, headers), CompletionReply, "cmpl-")

    async def chat(self, request: Request) -> Response:
        body = await read(request, schema.ChatRequest)
        return await self._run(request, body.model, lambda headers: translate.chat(body, headers, self.served), ChatReply, "chatcmpl-")

    async def responses(self, request: Request) -> Response:
        body = await read(request, schema.ResponsesRequest)
        return await self._run(request, body.model, lambda headers: translate.responses(body, headers, self.served),
                               ResponsesReply, "resp_")

    async def _run(self, request: Request, model: str | None, order_of: Callable[[Headers], Order], kind: Callable[[Head], Reply],
                   prefix: str) -> Response:
        self._known(model)
        headers, tenant = Headers.of(request.headers), request.state.tenant
        self.worker.check_room(tenant, self.reading[tenant])
        self.reading[tenant] += 1
        try:
            order, arm = await self._aside(request, lambda: self.experiment.enter(order_of(headers), tenant))
            if order.choices > schema.MAX_N * 4:
                raise Refusal(400, f"{order.choices} texts in one request; expected at most {schema.MAX_N * 4}", param="n")
            if len(order.prompts) > self.config.max_per_tenant:      # to wait would not help
                raise Refusal(400, f"{len(order.prompts)} prompts in one request, each counted as one; expected at most "
                              f"{self.config.max_per_tenant}", param="prompt")
            await self._compiled(order)
            head = Head(prefix + secrets.token_hex(12), int(time()), order, self.served)
            reading = Reading(self.worker, [self._ticket(order, prompt, request) for prompt in order.prompts])
            request.state.asked = head, reading.tickets      # for a layer around the routes
            await self._aside(request, lambda: translate.read(reading.tickets, self.served))
        finally:
            self.reading -= Counter({tenant: 1})             # and no entry is left of who has none
        for ticket in reading.tickets:
            self.metrics.follow(ticket)
        reading.begin()
        if arm is not None:                                  # what found no place is of no arm
            self.experiment.follow(reading.tickets, arm)
        answer: Response | None = None
        try:
            if order.stream:
                if await unless_gone(reading.first(), request.receive):
                    answer = EventStream(reading, kind(head), Pacer(self.config.chunks), order.echo)
            else:
                groups = await unless_gone(reading.groups(), request.receive)
                if groups is not None:                       # prompts may be told token by token, which takes long
                    whole = kind(head).whole
                    told = await asyncio.to_thread(whole, groups) if order.echo or order.prompt_told else whole(groups)
                    answer = document(told, reading.headers)
        finally:
            if answer is None:
                reading.leave()
        return answer or Response(status_code=499)           # nobody is there to read it

    async def _aside(self, request: Request, work: Callable[[], T]) -> T:
        """`work` in a thread: a template and a text take their time. Long bodies wait for each other, so that short ones need not."""
        pool = self._readers if len(await request.body()) > LONG_BYTES else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _ticket(self, order: Order, prompt: str | tuple[int, ...], request: Request) -> Ticket:
        return Ticket(prompt, order.sampling, order.speculation, order.prompt_class, request.state.tenant,
                      monotonic() + self.config.deadline_s)

    async def _compiled(self, order: Order) -> None:
        """Compile the order's grammar outside the engine's thread. Raises Refusal if it takes too long, or its turn does not come."""
        if order.sampling.grammar is None:
            return
        work = self._compilers.submit(self._compile, order.sampling.grammar)
        told = asyncio.wrap_future(work)
        told.add_done_callback(lambda one: one.cancelled() or one.exception())   # read, so that a late failure is not reported as lost
        try:
            await asyncio.wait_for(asyncio.shield(told), self.config.grammar_s)
        except TimeoutError:
            if work.cancel():                                # it has not begun: others take long
                raise Refusal(503, "too many grammars are being compiled", "server_error", retry_after=1) from None
            raise Refusal(400, f"the schema does not compile within {self.config.grammar_s:g} s; make it simpler",
                          param=order.structure) from None
        except UsageError as error:
            raise Refusal(400, str(error), param=order.structure) from None

    def _known(self, model: str | None) -> None:
        if model not in (None, self.served.name):
            raise Refusal(404, f"model {model!r} is not served here; expected {self.served.name!r}", param="model", code="model_not_found")

    # Looking

    async def models(self, request: Request) -> Response:
        return document({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if not request.path_params["name"]:                  # a client that ends its paths with a slash
            return await self.models(request)
        self._known(request.path_params["name"])
        return document(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.served.name, "object": "model", "created": self.started, "owned_by": "draftproof", "root": self.served.name,
                "parent": None, "max_model_len": self.served.context}

    async def tokenize(self, request: Request) -> Response:
        body = await read(request, schema.TokenizeRequest)
        self._known(body.model)
        tokenizer = self._tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "expected either prompt or messages", param="prompt")
        if body.messages is not None:
            messages = body.messages
            ids = list(await self._aside(request, lambda: translate.conversation(messages, self.served, ())))
        else:
            encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_plain
            ids = await self._aside(request, lambda: encode(body.prompt or ""))
        pieces = await self._aside(request, lambda: [tokenizer.piece(i) for i in ids]) if body.return_token_strs else None
        return document({"count": len(ids), "max_model_len": self.served.context, "tokens": ids, "token_strs": pieces})

    async def detokenize(self, request: Request) -> Response:
        body = await read(request, schema.DetokenizeRequest)
        self._known(body.model)
        wrong = next((token for token in body.tokens if token >= self.served.vocab_size), None)
        if wrong is not None:
            raise Refusal(400, f"tokens: id {wrong}; expected ids in [0, {self.served.vocab_size})", param="tokens")
        tokenizer = self._tokenizer()
        return document({"prompt": await self._aside(request, lambda: tokenizer.decode(body.tokens, skip_special=False))})

    def _tokenizer(self) -> Any:
        if self.served.tokenizer is None:
            raise Refusal(400, f"model {self.served.name} has no tokenizer")
        return self.served.tokenizer

    async def health(self, request: Request) -> Response:
        return document({"status": "alive", "version": __version__})

    async def version(self, request: Request) -> Response:
        return document({"version": __version__})

    async def ready(self, request: Request) -> Response:
        """200 only if the engine answers now, or is in a step that is not too long yet."""
        reason = await self._unready()
        if reason is None:
            return document({"status": "ready"})
        raise Refusal(503, f"not ready: {reason}", "server_error", code="not_ready", retry_after=2)

    async def _unready(self) -> str | None:
        worker = self.worker
        if worker.draining:
            return "the server is stopping"
        if not worker.alive:
            return "the engine's thread is dead; it is being replaced"
        try:
            await asyncio.wait_for(asyncio.wrap_future(worker.probe()), ANSWER_S)
        except TimeoutError:
            stalled = worker.stalled_s
            busy = worker.alive and 0 < stalled < self.config.stall_s
            return None if busy else f"the engine has not answered for {max(stalled, ANSWER_S):.1f} s"
        except Exception as error:
            return str(of_error(error))
        return None

    async def openapi(self, request: Request) -> Response:
        return document(described(self.served))

    async def prometheus(self, request: Request) -> Response:
        await self._look()
        return Response(await asyncio.to_thread(self.metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _look(self) -> None:
        with contextlib.suppress(Exception):
            found = await asyncio.wait_for(asyncio.wrap_future(self.worker.call(lambda engine: engine.stats())), ANSWER_S)
            self.state, self.filled = found["speculation"], found.get("cache_filled")

    # Steering

    async def speculation(self, request: Request) -> Response:
        await self._look()
        return document({**state_of(self.state, self.served), "depth_cap": self.depth_cap})

    async def switch(self, request: Request) -> Response:
        if not request.state.admin:
            raise Refusal(403, "this key may not steer speculation; use one that is marked admin", "permission_error")
        body = await read(request, schema.SwitchRequest)
        if body.drafter is not None and self.experiment.fixed:
            raise Refusal(409, "an experiment sends requests to the server's drafters; end it first (PUT /draftproof/ab)", param="drafter")
        self.state = await switched(self.worker, self.served, body)
        self.experiment.disturbed("speculation was switched", body.drafter)
        if "depth_cap" in body.model_fields_set:
            self.depth_cap = body.depth_cap
        self.metrics.switches += 1
        log.warning("tenant %s switched speculation: %s → %s", request.state.tenant or "(no key)", body.model_dump(exclude_unset=True),
                    self.state)
        return document({**state_of(self.state, self.served), "depth_cap": self.depth_cap})

    # The whole

    def app(self, keys: tuple[Key, ...]) -> App:
        """The ASGI application behind its gate. Raises OptionError if the address needs a key and there is none."""
        async def failed(request: Request, error: Exception) -> Response:
            return self._refuse(error)

        async def unknown(request: Request, error: Exception) -> Response:
            status, asked = error.status_code if isinstance(error, HTTPException) else 500, f"{request.method} {request.url.path}"
            if status != 405:
                return self._refuse(Refusal(status, f"{asked}: no such route", code="not_found"))
            allowed = sorted({method for one in routes if one.matches(request.scope)[0] != Match.NONE for method in one.methods or ()})
            expected = " or ".join(method for method in allowed if method != "HEAD")
            answer = self._refuse(Refusal(status, f"{asked}: expected {expected}", code="method_not_allowed"))
            answer.headers["Allow"] = ", ".join(allowed)
            return answer

        routes = self._routes()
        inner = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={
            Refusal: failed, ValidationError: failed, HTTPException: unknown})

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            """Handlers raise what they like; a client that left needs no answer, nor does one that a stopping server leaves."""
            try:
                await inner(scope, receive, send)
            except ClientDisconnect:
                pass
            except asyncio.CancelledError:
                if not self.worker.draining:
                    raise

        return Access(Gate(self._observed(guarded), self.config, keys, self._count, FILES), self.config.access_log)

    def _observed(self, app: App) -> App:
        if not self.config.otel:
            return app
        from .otel import Spans, provider

        return Spans(app, self.served.name, provider())

    def _routes(self) -> list[Route]:
        def route(path: str, handler: Callable[[Request], Any], method: str = "GET") -> Route:
            async def handled(request: Request) -> Response:
                try:
                    answer: Response = await handler(request)
                    return answer
                except ClientDisconnect:
                    raise
                except asyncio.CancelledError:
                    if not self.worker.draining:
                        raise
                    return self._refuse(stopping())          # the listener waits no longer for an engine that hangs
                except Exception as error:
                    if not isinstance(error, Refusal | UsageError | CacheFull | ValidationError):
                        log.warning("%s %s (%s): %s", request.method, path, request.state.request_id, error, exc_info=error)
                    return self._refuse(error)

            return Route(path, handled, methods=[method])

        return [
            route("/v1/completions", self.completions, "POST"), route("/v1/chat/completions", self.chat, "POST"),
            route("/v1/responses", self.responses, "POST"), route("/v1/models", self.models), route("/v1/models/{name:path}", self.model),
            route("/tokenize", self.tokenize, "POST"), route("/detokenize", self.detokenize, "POST"), route("/health", self.health),
            route("/ready", self.ready), route("/metrics", self.prometheus), route("/draftproof/speculation", self.speculation),
            route("/draftproof/speculation", self.switch, "PUT"), route("/openapi.json", self.openapi),
            route("/draftproof/ab", self.ab.look), route("/draftproof/ab", self.ab.steer, "PUT"),
            route("/draftproof/ab.json", self.ab.document), route("/draftproof/ab.css", self.ab.style),
            route("/v1/health", self.health), route("/ping", self.health), route("/ping", self.health, "POST"),
            route("/version", self.version), route("/draftproof/events", self.page.events),
            *(route(path, self.page.file) for path in FILES),
        ]

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.to_thread(self.worker.close)
            for pool in (self._compilers, self._readers):
                pool.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await asyncio.to_thread(self.worker.watch)
            except Exception:
                log.exception("the watchdog could not restart the engine; it tries again")

    def _refuse(self, error: BaseException) -> Response:
        refusal = of_validation(error) if isinstance(error, ValidationError) else of_error(error)
        self._count(refusal.status)
        return Response(compact(refusal.body), refusal.status, refusal.headers, "application/json")

    def _count(self, status: int) -> None:
        self.metrics.refusals[status] += 1


async def read(request: Request, model: type[M]) -> M:
    """The body as `model`. Raises ValidationError or Refusal."""
    return model.model_validate_json(await request.body())


def document(value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(compact(value), headers=headers, media_type="application/json")
