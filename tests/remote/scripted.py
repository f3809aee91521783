"""A server whose every line is written by a test, and an engine over such servers: what arrives need not be what vLLM sends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from remote.fake_vllm import Answering, Listening

from draftproof import Sampling
from draftproof.remote.fleet import Fleet, Replica
from draftproof.remote.vllm import Setting, VllmEngine
from draftproof.remote.writing import Writing

Lines = Callable[[dict[str, Any]], Iterable[bytes]]
DONE = b"data: [DONE]\n\n"


def data(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(tokens: list[Any], finish: str | None = None, **more: Any) -> bytes:
    return data({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish, **more}]})


def plain(body: dict[str, Any]) -> Iterable[bytes]:
    """Sevens, as many as were asked for."""
    yield from (chunk([7], "length" if i + 1 == body["max_tokens"] else None) for i in range(body["max_tokens"]))
    yield DONE


class Scripted(Listening):
    """Answers every completion request with `lines(body)`. bodies: what was asked under its name."""

    def __init__(self, lines: Lines, name: str = "m") -> None:
        self.lines, self.name, self.bodies = lines, name, list[dict[str, Any]]()
        super().__init__(handler_of(self))


def handler_of(server: Scripted) -> type[Answering]:
    class Handler(Answering):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": server.name, "max_model_len": 512}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] != server.name:
                return self.answer(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
            server.bodies.append(body)
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for line in server.lines(body):
                    self.wfile.write(line)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                pass

    return Handler


def engine_over(target: Any, servers: Iterable[Scripted], plain: Iterable[int] = ()) -> VllmEngine:
    """plain: which of the servers have no drafter."""
    fleet = Fleet([Replica(f"r{i}", i in plain, server.url) for i, server in enumerate(servers)], 0.05)
    fleet.start()
    fleet.wait(timeout_s=10)
    return VllmEngine(fleet, target, Setting("ngram", 5))


def write(engine: VllmEngine, max_tokens: int = 12, **more: Any) -> Writing:
    """One text, to its end."""
    handle, = engine.submit([5, 11], Sampling(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more}))
    end = monotonic() + 10
    while not handle.done:
        assert monotonic() < end, "it hangs"
        engine.step()
    return handle
