"""What the tests of the server share: a server in a thread, over a table or the demo model, and a client for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from engine.engine_support import table
from engine.letters import PIECES, Letters

from draftproof import Engine, EngineConfig, Sampling
from draftproof.config import ServeConfig, TraceLevel
from draftproof.engine.port import Completion
from draftproof.models.fake import TableTarget
from draftproof.models.target import Target
from draftproof.models.tokenizer import Tokenizer
from draftproof.serve.app import Server
from draftproof.serve.gate import Key
from draftproof.serve.run import Listener, serve_engine


class ChatLetters(Letters):
    """Letters that know how to chat: every turn is its letters, framed by the letters of nobody."""

    has_chat_template, takes_tools, knows = True, False, frozenset({"system", "tool"})

    def encode(self, text: str) -> list[int]:
        return [i for byte in text.encode() for i in self._of.get(byte, [])]

    encode_plain = encode
    _of = {piece[0]: [i] for i, piece in reversed(list(enumerate(PIECES))) if len(piece) == 1}     # others write nothing

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[int]:
        return [9, *[i for turn in messages for i in [*self.encode(turn["content"]), 3]], 9]


@dataclass
class Running:
    server: Server
    url: str
    target: Target
    listener: Listener
    thread: threading.Thread

    def client(self, **more: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, **more)

    def post(self, path: str, body: Mapping[str, Any], **more: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json={"model": self.server.served.name, **body}, **more)

    def complete(self, **body: Any) -> dict[str, Any]:
        reply = self.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """Every event of a stream; that it ends as it should is checked."""
        with self.client() as client, client.stream("POST", path, json={"model": self.server.served.name, "stream": True, **body}) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
        if path != "/v1/responses":
            assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    @property
    def idle(self) -> bool:
        return self.server.worker.load == (0, 0)


@contextmanager
def listening(server: Server, keys: tuple[Key, ...] = ()) -> Iterator[tuple[str, Listener, threading.Thread]]:
    """The server behind a free port, in a thread: its address, and what runs it."""
    told: list[str] = []
    heard = threading.Event()
    listener = Listener(server, keys, lambda address: (told.append(address), heard.set())[0])
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    try:
        assert heard.wait(20), "the server does not listen"
        yield told[0], listener, thread
    finally:
        listener.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


@contextmanager
def serving(target: Target, drafter: Any = "none", *, config: ServeConfig | None = None, keys: tuple[Key, ...] = (), name: str = "letters",
            wrap: Callable[[Engine], Any] = lambda engine: engine, max_batch: int = 16, trace: TraceLevel = "summary",
            **more: Any) -> Iterator[Running]:
    """A server that listens on a free port. wrap: what may stand between the worker and each engine that is opened."""
    def opened() -> Any:
        settings = EngineConfig(max_batch=max_batch, trace=trace)
        return wrap(Engine(target, drafter() if callable(drafter) else drafter, config=settings, **more))

    spec = drafter if isinstance(drafter, str) else "custom"
    server = serve_engine(opened, name, target, spec, config or ServeConfig(port=0), max_batch)
    with listening(server, keys) as (url, listener, thread):
        yield Running(server, url, target, listener, thread)


def letters(**more: Any) -> Target:
    return table(seed=3, tokenizer=ChatLetters(), **more)  # type: ignore[return-value]


def words(**more: Any) -> Target:
    """A table over a byte-level tokenizer: any text can be a prompt or a turn, and grammars hold."""
    from conftest import make_tokenizer

    tokenizer = Tokenizer(make_tokenizer(vocab_size=303))    # and one more place: a width that heads divide
    return TableTarget(tokenizer.vocab_size, order=1, seed=3, eos_ids=(0,), tokenizer=tokenizer, **more)  # type: ignore[return-value]


def alone(target: Target, prompt: str | Sequence[int], sampling: Sampling, **more: Any) -> Completion:
    """The same request, plainly and by itself."""
    with Engine(target, **more) as engine:
        return engine.generate(prompt, sampling)
