"""Soak: many streaming clients for minutes against `draftproof serve`'s own server, over the demo model.

    python benchmarks/soak.py                      64 clients, 600 seconds
    python benchmarks/soak.py --seconds 60 --clients 16

The clients are a process of their own. They ask for texts of mixed lengths and options, whole conversations, structures and several
samples, and every tenth hangs up early. It passes when

* no request failed that was not meant to, and those that were meant to did;
* every text that was read to its end equals the same request alone, without server and guesses (same seed);
* memory is flat after the first quarter: the floor of resident memory does not rise per request (see `floor`);
* nothing is left: no ticket, no slot, no page of a cache, no file handle, no thread.

The last line of standard output is one JSON document; exit code 3 says that it failed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

MODEL = "soak"
PROMPTS = ("def add(left, right):", "class Queue:", "<|user|>Sort a list.<|assistant|>", "import json\n", "# numbers: 1, 2, 3,")
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["left", "right"]}, "size": {"type": "integer"}}, "required": ["name", "size"]}
EXTRAS: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"stop": ["\n\n"]}, {"logprobs": 1},
    {"n": 2}, {"speculation": {"depth": 6}}, {"speculation": {"drafter": "none"}}, {"logit_bias": {"12": 2.0}}, {"bad_words": ["self"]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {"ignore_eos": True},
)
REFUSED: tuple[dict[str, Any], ...] = ({"frobnicate": 1}, {"temperature": -1}, {"model": "another"}, {"speculation": {"drafter": "medusa"}})
CACHE_TOKENS = 4608         # small, so that the cache of prefixes is full soon and old pages are given up all the time
FLAT_MB = 8.0               # the floor may not be shown to have risen by more
BLOCKS = 12                 # of the time after the warm-up; each gives one floor
# One arena, and a fixed limit from which memory is mapped: otherwise the allocator's habits grow for many minutes and hide a leak.
# For the same reason few compiled products (one per layer and number of rows): oneDNN's own limit of 1,024 takes as long to reach.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576",
             "LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


def request(number: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of the request of this number, always the same."""
    dice = random.Random(f"request {number}")
    extra = EXTRAS[number % len(EXTRAS)]
    body: dict[str, Any] = {"seed": dice.randrange(10_000), "max_tokens": dice.randint(1, 96), "temperature": dice.choice((0.0, 0.7, 1.0)),
                            "top_p": dice.choice((1.0, 0.9)), **extra}
    if dice.random() < 0.3:
        body.update({"logprobs": True} if "logprobs" in body else {}, messages=[{"role": "user", "content": dice.choice(PROMPTS)}])
        return "/v1/chat/completions", body
    return "/v1/completions", {**body, "prompt": dice.choice(PROMPTS)}


# The clients' process


class Client(threading.Thread):
    """Asks, reads and sometimes hangs up, until told to stop. texts: of each request by number, what was read and how often."""

    def __init__(self, address: tuple[str, int], number: int, requests: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.address, self.dice, self.requests, self.stop = address, random.Random(number), requests, stop
        self.counts: Counter[str] = Counter()
        self.texts: Counter[tuple[int, str]] = Counter()
        self.errors: deque[str] = deque(maxlen=3)

    def run(self) -> None:
        while not self.stop.is_set():
            number, luck = self.dice.randrange(self.requests), self.dice.random()
            path, body = request(number)
            try:
                if luck < 0.02:
                    self.refused(path, {**body, **self.dice.choice(REFUSED)})
                    continue
                text = self.ask(path, body, self.dice.randint(0, 20) if luck < 0.12 else None)
            except (OSError, ValueError) as error:
                self.counts["failed"] += 1
                self.errors.append(f"{path} {number}: {type(error).__name__}: {error}"[:300])
                continue
            self.counts["hung_up" if text is None else "completed"] += 1
            if text is not None:
                self.texts[number, text] += 1

    def refused(self, path: str, body: dict[str, Any]) -> None:
        connection = HTTPConnection(*self.address, timeout=300)
        connection.request("POST", path, json.dumps({"model": MODEL, "stream": True, **body}))
        status = connection.getresponse().status
        connection.close()
        if status not in (400, 404):
            raise ValueError(f"status {status} where a refusal was meant")
        self.counts["refused"] += 1

    def ask(self, path: str, body: dict[str, Any], leave_after: int | None) -> str | None:
        """All samples' texts; None if it hung up."""
        connection = HTTPConnection(*self.address, timeout=300)
        try:
            connection.request("POST", path, json.dumps({"model": MODEL, "stream": True, **body}))
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"status {reply.status}: {reply.read()[:200]!r}")
            texts, events = [""] * body.get("n", 1), 0
            for line in reply:
                if leave_after is not None and events >= leave_after:
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    return None
                if line.startswith(b"data: {"):
                    events += 1
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(str(chunk["error"]))
                    for choice in chunk["choices"]:
                        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                elif line.startswith(b"data: [DONE]"):
                    return json.dumps(texts)
            raise ValueError("the stream ended without [DONE]")
        finally:
            connection.close()


def be_clients(address: str, clients: int, requests: int, seconds: float) -> None:
    """Prints the requests done so far, a number a line, and at the end one JSON document."""
    host, _, port = address.removeprefix("http://").partition(":")
    stop = threading.Event()
    crowd = [Client((host, int(port)), number, requests, stop) for number in range(clients)]
    for client in crowd:
        client.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.5)
        print(sum(sum(client.counts.values()) for client in crowd), flush=True)
    stop.set()
    for client in crowd:
        client.join(300)
    texts: Counter[tuple[int, str]] = sum((client.texts for client in crowd), Counter())
    counts: Counter[str] = sum((client.counts for client in crowd), Counter())
    print(json.dumps({"counts": counts, "errors": [error for client in crowd for error in client.errors][:5], "alive": sum(
        client.is_alive() for client in crowd), "texts": [[number, text, times] for (number, text), times in texts.items()]}))


# The server's process


class Served:
    """The server, in a thread, and what it holds."""

    def __init__(self, drafter: str, clients: int) -> None:
        from draftproof import Engine, EngineConfig
        from draftproof.config import LoadConfig, ServeConfig
        from draftproof.drafters import build
        from draftproof.models.load import builtin, load_target
        from draftproof.serve.run import Listener, serve_engine

        load = LoadConfig(self_test=False, cache_tokens=CACHE_TOKENS)
        self.target: Any = load_target(builtin("target"), load)
        guess: Any = build(drafter, self.target, "match", load)
        self.models = [self.target, *(part.lm for part in (guess, *getattr(guess, "parts", ())) if hasattr(part, "lm"))]
        config = ServeConfig(port=0, max_queue=2 * clients, max_per_tenant=2 * clients)
        self.server = serve_engine(lambda: Engine(self.target, guess, load=load, config=EngineConfig()), MODEL, self.target, drafter,
                                   config)
        told: list[str] = []
        heard = threading.Event()
        self._listener = Listener(self.server, (), lambda address: (told.append(address), heard.set())[0])
        self._thread = threading.Thread(target=self._listener.run, daemon=True)
        self._thread.start()
        if not heard.wait(60):
            raise SystemExit("the server does not listen")
        self.address = told[0]

    def touch(self) -> None:
        """Generate once, so that every cache has its storage, and write all of it: pages are the machine's only once written."""
        host, _, port = self.address.removeprefix("http://").partition(":")
        Client((host, int(port)), 0, 1, threading.Event()).ask("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 8}, None)

        import torch

        def fill(_: Any) -> None:
            for model in self.models:
                pool = model.pool
                for page in [pool.take() for _ in range(pool.available())]:
                    pool.release(page)
                with torch.inference_mode():                 # which these tensors come from
                    for rows in (*pool.keys.values(), *pool.values.values()):
                        rows[:] = rows.clone()

        self.server.worker.call(fill).result(60)

    @property
    def left(self) -> dict[str, int]:
        """What idleness must not hold: tickets, slots, pages, files and threads."""
        pools = [model.pool for model in self.models]
        return {"tickets": sum(self.server.worker.load), "slots": sum(len(model.slots) for model in self.models),
                "pages": sum(pool.capacity - 1 - pool.available() for pool in pools), "restarts": self.server.worker.restarts,
                "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}

    def idle(self) -> dict[str, int]:
        """`left`, once nothing is on its way any more; at most ten seconds later."""
        deadline = time.monotonic() + 10
        while sum(self.server.worker.load) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)                                      # connections that are being closed
        return self.left

    def stop(self) -> None:
        self._listener.should_exit = True
        self._thread.join(30)


def resident_mb() -> float:
    """Of this process, without what Python and the allocator keep although nobody uses it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def floor(samples: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """How the floor of memory moves. samples: (requests done, MB) after the warm-up.

    Each of BLOCKS equal parts gives its lowest sample, for what is in flight comes and goes while a leak only adds; the slope
    through these is Theil and Sen's, with its 95 % interval. `risen_mb`: over the whole time, slope and interval. Flat means that
    the interval does not lie above FLAT_MB.
    """
    from scipy.stats import theilslopes

    size, done = len(samples) / BLOCKS, samples[-1][0] - samples[0][0]
    parts = [samples[round(i * size):round((i + 1) * size)] for i in range(BLOCKS)]
    lowest = [min(part, key=lambda sample: sample[1]) for part in parts if part]
    if len({count for count, _ in lowest}) < BLOCKS:
        return {"requests": done, "flat": False, "reason": "too few requests to tell: more seconds"}
    found = theilslopes([mb for _, mb in lowest], [count for count, _ in lowest])
    risen = {name: float(slope) * done for name, slope in zip(("low", "mid", "high"), (found.low_slope, found.slope, found.high_slope),
                                                              strict=True)}
    return {"requests": done, "bytes_per_request": float(found.slope) * 1e6, "risen_mb": risen, "first": lowest[0][1],
            "last": lowest[-1][1], "flat": risen["low"] <= FLAT_MB}


def alone(served: Served, numbers: Sequence[int]) -> dict[int, str]:
    """The same requests plainly, one after the other."""
    from draftproof import Engine
    from draftproof.serve import schema, translate

    found = {}
    with Engine(served.target) as engine:
        for number in numbers:
            path, body = request(number)
            body = {"model": MODEL, **body}
            if path == "/v1/completions":
                order = translate.completion(schema.CompletionRequest.model_validate(body), translate.Headers())
            else:
                order = translate.chat(schema.ChatRequest.model_validate(body), translate.Headers(), served.server.served)
            done = engine.generate(order.prompts[0], order.sampling)
            found[number] = json.dumps([sample.text for sample in done.samples or (done,)])
    return found


def watched(clients: subprocess.Popen[str], seconds: float) -> tuple[list[tuple[float, int, float]], dict[str, Any]]:
    """Samples (seconds, requests done, MB) while the clients run, and what they say at the end."""
    lines: deque[str] = deque(["0"], maxlen=1)
    assert clients.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(clients.stdout or ()), daemon=True)
    reader.start()
    began, samples = time.monotonic(), []
    while time.monotonic() - began < seconds:
        time.sleep(max(0.5, seconds / 240))
        samples.append((time.monotonic() - began, int(lines[0]), resident_mb()))
        if len(samples) % 20 == 0:
            print(f"{samples[-1][0]:.0f} s, {samples[-1][1]} requests, {samples[-1][2]:.1f} MB", file=sys.stderr)
    reader.join(600)
    return samples, json.loads(lines[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--requests", type=int, default=112, help="How many different ones there are; all are generated again alone.")
    parser.add_argument("--drafter", default="model")
    parser.add_argument("--address", help=argparse.SUPPRESS)     # of a server: be the clients
    asked = parser.parse_args()
    if asked.address:
        be_clients(asked.address, asked.clients, asked.requests, asked.seconds)
        return 0
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    served = Served(asked.drafter, asked.clients)
    served.touch()
    before = served.idle()
    command = [sys.executable, __file__, "--address", served.address, *(
        str(word) for name in ("clients", "requests", "seconds") for word in (f"--{name}", getattr(asked, name)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        samples, said = watched(clients, asked.seconds)
    result = judged(served, before, [(done, mb) for at, done, mb in samples if at > asked.seconds / 4], said)
    served.stop()
    print(json.dumps({"clients": asked.clients, "seconds": asked.seconds, "drafter": asked.drafter, **result}))
    return 0 if result["passed"] else 3


def judged(served: Served, before: dict[str, int], samples: Sequence[tuple[int, float]], said: dict[str, Any]) -> dict[str, Any]:
    after, memory = served.idle(), floor(samples)
    right = alone(served, sorted({number for number, _, _ in said["texts"]}))
    wrong = [[number, text, times] for number, text, times in said["texts"] if text != right[number]]
    # Threads and files of a pool may be fewer or a few more; what is leaked per request would be thousands.
    left = {name: count - (before[name] if name in ("files", "threads") else 0) for name, count in after.items()}
    clean = not any(count > (8 if name in ("files", "threads") else 0) for name, count in left.items())
    compared = sum(times for _, _, times in said["texts"])
    whole = compared == said["counts"].get("completed", 0) > 0
    return {"passed": whole and clean and memory["flat"] and not (said["errors"] or said["alive"] or wrong), **said["counts"],
            "compared": compared, "distinct": len(right), "different": wrong[:3], "errors": said["errors"], "hanging": said["alive"],
            "memory_mb": memory, "left": left}


if __name__ == "__main__":
    sys.exit(main())
