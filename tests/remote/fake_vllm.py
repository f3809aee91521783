"""A tiny server that speaks vLLM's API: /health, /v1/models and streamed /v1/completions with token ids and detailed step reports.

Its language: after token t comes (3 t + 1) mod 97. So every text is known from its prompt, whoever writes it, and a text that is
continued elsewhere must come out as if nothing had happened. Run as a program (`python fake_vllm.py serve MODEL --port N …`) it takes
the place of `vllm serve`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PLAN = (2, 0, 3, 1, 3, 0)          # accepted guesses of each step of a server that speculates


def following(token: int) -> int:
    return (3 * token + 1) % 97


def text_of(prompt: list[int], count: int) -> list[int]:
    out = [prompt[-1]]
    for _ in range(count):
        out.append(following(out[-1]))
    return out[1:]


class Listening:
    """An HTTP server on a thread of its own."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class FakeVllm(Listening):
    """depth 0 is a plain server. die_after: tokens after which the connection breaks and the server ends."""

    def __init__(self, depth: int = 3, plain_every: int = 0, die_after: int | None = None, delay_s: float = 0.002, port: int = 0,
                 key: str | None = None, sick: bool = False, refusal: str = "") -> None:
        self.depth, self.plain_every, self.die_after, self.delay_s, self.key = depth, plain_every, die_after, delay_s, key
        self.sick, self.refusal, self.aborted = sick, refusal, 0
        self.bodies: list[dict[str, Any]] = []
        super().__init__(handler_of(self), port)

    def chunks(self, body: Mapping[str, Any], report: dict[str, list[int]]) -> Iterator[tuple[list[int], str | None]]:
        """Steps as vLLM streams them; fills `report`."""
        wanted = int(body["max_tokens"])
        ids = text_of(list(body["prompt"]), wanted)
        yield ids[:1], "length" if wanted == 1 else None
        at, number, drafted = 1, 0, 0
        while at < wanted:
            number += 1
            plain = not self.depth or self.plain_every and number % self.plain_every == 0
            accepted = 0 if plain else PLAN[drafted % len(PLAN)]
            drafted += not plain
            if not plain:
                report["per_step_accepted"].append(accepted)
                report["per_step_drafted"].append(self.depth)
            piece = ids[at:at + accepted + 1]
            at += len(piece)
            yield piece, "length" if at >= wanted else None


def handler_of(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(Answering):
        def do_GET(self) -> None:
            if fake.key is not None and self.path != "/health" and self.headers.get("Authorization") != f"Bearer {fake.key}":
                return self.answer(401, {"error": "Unauthorized"})
            if self.path == "/health":
                return self.answer(500 if fake.sick else 200, {})
            self.answer(200, {"data": [{"id": "fake", "max_model_len": 512}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            if fake.depth and (body.get("min_p") or body.get("logit_bias")):
                return self.answer(400, {"error": {"message": "min_p and logit_bias are not yet supported with speculative decoding."}})
            if fake.refusal:
                return self.answer(400, {"error": {"message": fake.refusal}})
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            sent = 0
            report: dict[str, list[int]] = {"per_step_accepted": [], "per_step_drafted": []}
            try:
                for tokens, finish in fake.chunks(body, report):
                    time.sleep(fake.delay_s)
                    sent += len(tokens)
                    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}
                    if body.get("logprobs") is not None:
                        names = [f"token_id:{token}" for token in tokens]
                        choice["logprobs"] = {"tokens": names, "token_logprobs": [-0.5] * len(names),
                                              "top_logprobs": [{name: -0.5, "token_id:1": -1.5} for name in names]}
                    self.say({"choices": [choice]})
                    if fake.die_after is not None and sent >= fake.die_after:
                        self.close_connection = True
                        threading.Thread(target=fake.close, daemon=True).start()
                        return self.connection.close()
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sent}
                end: dict[str, Any] = {"choices": [], "usage": usage}
                if fake.depth:
                    end["metrics"] = {"speculative_decoding": {"num_spec_tokens": fake.depth, **report}}
                self.say(end)
                self.wfile.write(b"data: [DONE]\n\n")
            except (BrokenPipeError, ConnectionResetError):
                fake.aborted += 1
            self.close_connection = True

        def say(self, document: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
            self.wfile.flush()

    return Handler


if __name__ == "__main__":
    words = sys.argv[1:]
    if "--crash" in words:
        print("ValueError: this flag crashes the fake", flush=True)
        sys.exit(3)
    config = json.loads(words[words.index("--speculative-config") + 1]) if "--speculative-config" in words else {}
    FakeVllm(depth=config.get("num_speculative_tokens", 0), port=int(words[words.index("--port") + 1]), key=os.environ["VLLM_API_KEY"],
             delay_s=0.005)
    print("fake is up", flush=True)
    threading.Event().wait(float(words[words.index("--lasts") + 1]) if "--lasts" in words else None)
    sys.exit("RuntimeError: this flag ends the fake")
