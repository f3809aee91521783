"""From an engine to a listening server: the parts put together, the address told, and a way out that finishes what runs."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from math import ceil
from time import monotonic
from typing import Any

import uvicorn

from .. import __version__
from ..config import ServeConfig
from ..drafters.vocabulary import Spelling, Words
from ..engine.engine import Engine
from ..errors import Failure
from ..models.grammar import grammar_of
from ..models.target import Target
from .app import Server
from .gate import Key
from .translate import Served
from .versions import engine_version, target_version, template_version
from .worker import Worker

log = logging.getLogger("draftproof.serve")

STOP_S = 5              # for answers that are over to reach who reads them

def serve_engine(open_engine: Callable[[], Engine], name: str, target: Target, drafter: str, config: ServeConfig,
                 max_batch: int = 16) -> Server:
    """A server over local engines of `target`; the first is open when this returns. Raises what opening raises."""
    worker = Worker(open_engine, config, max_batch)

    def compile(grammar: Mapping[str, Any]) -> object:
        return grammar_of(target, grammar)

    server = Server(worker, describe(name, target, drafter), config, compile)
    worker.start()
    return server


def describe(name: str, target: Target, drafter: str) -> Served:
    facts = target.facts
    mark = hashlib.sha256(f"{__version__} {facts.name} {facts.dtype} {facts.device} {facts.tier}".encode()).hexdigest()[:10]
    versions = {"target": target_version(facts.name), "template": template_version(target.tokenizer), "engine": engine_version()}
    return Served(name, target.tokenizer, target.context, target.vocab_size, speller(target), f"dp_{mark}", drafter, versions,
                  facts.invisible)


def speller(target: Target) -> Callable[[int], bytes | None]:
    """Bytes of a token, whole characters or not; None where the tokenizer does not say."""
    spelling = Spelling.of(Words.of(target)) if hasattr(target.tokenizer, "backend") else None

    def spell(token: int) -> bytes | None:
        if spelling is not None:
            content = spelling.contents.get(token)
            return content.encode() if isinstance(content, str) else content
        return None if target.tokenizer is None else target.tokenizer.piece(token).encode()

    return spell


class Listener(uvicorn.Server):
    """Tells its address when it listens. After the first signal it goes on listening and takes no new texts, until those that run are
    done or `drain_s` is over; the second ends the process.

    `run` raises Failure if the address is taken.
    """

    def __init__(self, server: Server, keys: tuple[Key, ...], told: Callable[[str], None]) -> None:
        config = server.config
        super().__init__(uvicorn.Config(
            server.app(keys), host=config.host, port=config.port, log_config=None, log_level="warning", access_log=False, lifespan="on",
            server_header=False, timeout_keep_alive=30, h11_max_incomplete_event_size=64 << 10, proxy_headers=False))
        self._server, self._told = server, told
        self._until: float | None = None                     # when the drain is over

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:                                   # its own way to say so, after a line with the reason
            config = self._server.config
            raise Failure(f"host={config.host}, port={config.port}: cannot listen there; the line before says why") from None
        if self.started and self.servers and self.servers[0].sockets:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._told(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to listen no longer."""
        return await super().on_tick(counter) and self._drained()

    def _drained(self) -> bool:
        """Whether nothing runs any more. What still does when the time is over is ended."""
        worker, most, now = self._server.worker, self._server.config.drain_s, monotonic()
        running, waiting = worker.load
        if self._until is None:
            worker.drain()
            self._until = now + most
            log.info("stopping: %d requests run, %d wait; they have %g s to end", running, waiting, most)
        left = max(0.0, self._until - now)
        if running + waiting and left:
            return False
        if running + waiting:
            worker.close(0)
            log.warning("stopped %d requests after %g s", running + waiting, most)
        self.config.timeout_graceful_shutdown = ceil(left) + STOP_S
        return True

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self._server.worker.drain()
