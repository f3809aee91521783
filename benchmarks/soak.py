"""Soak: many streaming clients for minutes against `draftproof serve`'s own server, over the demo model.

    python benchmarks/soak.py                      64 clients, 600 seconds
    python benchmarks/soak.py --seconds 60 --clients 16

It passes when no request failed that was not meant to, every sampled text equals the same request alone, memory is flat after
the first fifth, and no slot is left. The last line of standard output is one JSON document; exit code 3 says that it failed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from draftproof import Engine, EngineConfig, Sampling
from draftproof.config import LoadConfig, ServeConfig
from draftproof.models.load import builtin, load_target
from draftproof.serve.run import Listener, serve_engine

MODEL = "soak"
PROMPTS = ("def add(left, right):", "class Queue:", "<|user|>Sort a list.<|assistant|>", "import json\n", "# numbers: 1, 2, 3,")
GROWTH_MB = 48.0
CACHE_TOKENS = 4608         # small, so that the cache of prefixes is full soon and memory can be flat after it


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def options_of(dice: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {"prompt": dice.choice(PROMPTS), "seed": dice.randrange(10_000), "max_tokens": dice.randint(1, 96),
                              "temperature": dice.choice((0.0, 0.7, 1.0)), "top_p": dice.choice((1.0, 0.9))}
    extra = dice.choice(({}, {}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"stop": ["\n\n"]},
                         {"logprobs": 1}))
    return {**chosen, **extra}


class Client(threading.Thread):
    """Asks, reads and sometimes hangs up, until told to stop."""

    def __init__(self, address: tuple[str, int], number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.address, self.dice, self.stop = address, random.Random(number), stop
        self.counts: Counter[str] = Counter()
        self.kept: list[tuple[dict[str, Any], str]] = []
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            options, leaving = options_of(self.dice), self.dice.random() < 0.1
            try:
                text = self.ask(options, self.dice.randint(0, 20) if leaving else None)
            except (OSError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            self.counts["left" if text is None else "completed"] += 1
            if text is not None and self.dice.random() < 0.05:
                self.kept.append((options, text))

    def ask(self, options: dict[str, Any], leave_after: int | None) -> str | None:
        connection = HTTPConnection(*self.address, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, "stream": True, **options}))
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"status {reply.status}: {reply.read()[:200]!r}")
            text, lines = "", 0
            for line in reply:
                if leave_after is not None and lines >= leave_after:
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    return None
                if line.startswith(b"data: {"):
                    lines += 1
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(str(chunk["error"]))
                    text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                elif line.startswith(b"data: [DONE]"):
                    return text
            raise ValueError("the stream ended without [DONE]")
        finally:
            connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--drafter", default="model")
    asked = parser.parse_args()
    load, most = LoadConfig(self_test=False, cache_tokens=CACHE_TOKENS), 2 * asked.clients
    target = load_target(builtin("target"), load)

    def opened() -> Engine:
        return Engine(target, asked.drafter, load=load, config=EngineConfig())

    server = serve_engine(opened, MODEL, target, asked.drafter, ServeConfig(port=0, max_queue=most, max_per_tenant=most))
    told: list[str] = []
    heard = threading.Event()
    listener = Listener(server, (), lambda address: (told.append(address), heard.set())[0])
    serving = threading.Thread(target=listener.run, daemon=True)
    serving.start()
    heard.wait(30)
    host, _, port = told[0].removeprefix("http://").partition(":")
    stop = threading.Event()
    clients = [Client((host, int(port)), number, stop) for number in range(asked.clients)]
    memory: list[float] = []
    for client in clients:
        client.start()
    for _ in range(20):
        time.sleep(asked.seconds / 20)
        memory.append(resident_mb())
        print(f"{sum(c.counts['completed'] for c in clients)} completed, {sum(c.counts['left'] for c in clients)} left, "
              f"{memory[-1]:.0f} MB, {server.worker.load} running and waiting", file=sys.stderr)
    stop.set()
    for client in clients:
        client.join(300)
    deadline = time.monotonic() + 10
    while server.worker.load != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    result = judged(clients, memory, server.worker.load, target)
    listener.should_exit = True
    serving.join(30)
    print(json.dumps(result))
    return 0 if result["passed"] else 3


def judged(clients: list[Client], memory: list[float], load: tuple[int, int], target: Any) -> dict[str, Any]:
    kept = [pair for client in clients for pair in client.kept]
    wrong = []
    with Engine(target) as engine:
        for options, text in kept:
            sampling = {name: tuple(value) if name == "stop" else value for name, value in options.items() if name != "prompt"}
            if engine.generate(options["prompt"], Sampling.of(**sampling)).text != text:
                wrong.append(options)
    errors = [error for client in clients for error in client.errors]
    warm = memory[len(memory) // 5]
    grown = max(memory[-4:]) - warm
    return {"passed": not errors and not wrong and grown < GROWTH_MB and load == (0, 0) and bool(kept), "clients": len(clients),
            "completed": sum(c.counts["completed"] for c in clients), "left": sum(c.counts["left"] for c in clients),
            "compared": len(kept), "different": wrong[:5], "errors": errors[:5],
            "memory_mb": {"warm": warm, "last": memory[-1], "grown": grown}, "load_at_end": load}


if __name__ == "__main__":
    sys.exit(main())
