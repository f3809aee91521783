"""A tiny OpenAI-compatible server in this process: it continues the alphabet, and says what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Fake(ThreadingHTTPServer):
    """wrong: (token, margin) written third where the server may guess and the prompt holds `only`. silent: no answer tells of its drafts,
    only the counters do. lines: what every stream sends instead. malformed: a part of prompts whose answers are. gauges: what /metrics
    says besides. key: what a client must send. shy: no log-probabilities of what may be guessed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.engine, self.only, self.fail, self.silent, self.shy = "vllm:", "", False, False, False
        self.lines, self.malformed, self.gauges, self.key = "", "", "", ""
        self.wrong: tuple[str, float] | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def guesses(body: dict[str, Any]) -> bool:
    return body.get("speculation", {}).get("drafter") != "none"


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply("{}", 401)
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "alphabet"}]}))
        else:
            n = sum(guesses(body) for body in self.server.bodies)
            e = self.server.engine
            self.reply(f"# HELP x\n{e}spec_decode_num_drafts_total{{model_name=\"a\"}} {4 * n}\n"
                       f"{e}spec_decode_num_draft_tokens_total {8 * n}\n"
                       f"{e}spec_decode_num_accepted_tokens_total {4.0 * n}\n"
                       f"{e}spec_decode_num_accepted_tokens_per_pos_total{{position=\"0\"}} {3 * n}\n"
                       f"{e}spec_decode_num_accepted_tokens_per_pos_total{{position=\"1\"}} {n}\nother_total 7\n{self.server.gauges}")

    def reply(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
        if self.server.fail:
            return self.reply("no room", 503)
        if self.server.shy and guesses(body) and body.get("logprobs"):
            return self.reply('{"error": {"message": "no logprobs here"}}', 400)
        self.send_response(200)
        self.end_headers()
        if self.server.lines:
            self.wfile.write(self.server.lines.encode())
            return
        if self.server.malformed and self.server.malformed in str(body.get("prompt")):
            return self.event({"choices": 7})
        tokens = list(LETTERS[:body["max_tokens"]])
        if guesses(body) and self.server.wrong and len(tokens) > 2 and self.server.only in str(body.get("prompt")):
            tokens[2] = self.server.wrong[0]
        step = 2 if guesses(body) else 1
        for at in range(0, len(tokens), step):
            self.event({"choices": [self.choice(body, tokens, at, step)]})
        metrics = {"num_spec_steps": 4, "num_accepted_draft_tokens": 4, "num_draft_tokens": 8, "acceptance_histogram": [1, 2, 1]}
        self.event({"choices": [], "usage": {"completion_tokens": len(tokens), "prompt_tokens": 3},
                    **({"metrics": {"speculative_decoding": metrics}} if guesses(body) and not self.server.silent else {})})
        self.wfile.write(b"data: [DONE]\n\n")

    def choice(self, body: dict[str, Any], tokens: list[str], at: int, step: int) -> dict[str, Any]:
        piece = tokens[at:at + step]
        margin = self.server.wrong[1] if self.server.wrong else 1.0
        tops = [{token: -0.1, "c" if token == (self.server.wrong or " ")[0] else (self.server.wrong or " ")[0]: -0.1 - margin}
                for token in piece]
        if "messages" in body:
            logprobs = {"content": [{"token": t, "logprob": -0.1, "top_logprobs": [{"token": k, "logprob": v} for k, v in top.items()]}
                                    for t, top in zip(piece, tops, strict=True)]}
            return {"delta": {"content": "".join(piece)}, "logprobs": logprobs if body.get("logprobs") else None}
        logprobs = {"tokens": piece, "token_logprobs": [-0.1] * len(piece), "top_logprobs": tops}
        return {"text": "".join(piece), "logprobs": logprobs if body.get("logprobs") else None}

    def event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def fake() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
