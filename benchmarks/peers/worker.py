"""What the workers of peers.py share: a job as JSON on the command line, then one JSON line in, one JSON line out.

    python with_NAME.py '{"do": "convert", "source": FOLDER, "out": FOLDER, "bits": 16}'
    python with_NAME.py '{"do": "serve", "target": FOLDER, "draft": FOLDER, "head": FOLDER, "arm": "plain", "depth": 0, "threads": 2,
                         "drafter": "model", "rule": "match", "tree": 0, "bits": 16, "cache_bits": 16, "users": 1}'

A server first says {"ready": true, "versions": {…}, "load": seconds}. Every line that comes then,
{"prompts": [ids, …], "seeds": one for each, "users": so many are written at once at most, no more than it was started for, "max_tokens",
"arm": "plain" or "draft", "depth", "temperature", "drafter", "rule", "tree"}, is answered with
{"texts": one for each prompt, "seconds": of the run, "accepted": draft tokens that stood in all of them, or null}, a text being
{"ids": the new tokens, "begun_s": when its prompt was handed over, "came": [[when, how many tokens], …]}, seconds since the line came;
a depth of −1 is the engine's to choose. What the engine itself prints goes to standard error. Runs in any engine's environment, so it needs
nothing but Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Accepted = int | None | Callable[[], int]                   # draft tokens that stood; a function is asked after the clock is stopped


class Told:
    """Is told when a prompt is handed over, and whenever tokens come, of which text and how many."""

    def __init__(self, texts: int) -> None:
        self.begun_s = [0.0] * texts
        self.came: list[list[tuple[float, int]]] = [[] for _ in range(texts)]
        self.start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    def begun(self, text: int) -> None:
        self.begun_s[text] = self.now

    def __call__(self, text: int, count: int) -> None:
        if count:
            self.came[text].append((self.now, count))


Generate = Callable[[Job, Told], tuple[list[list[int]], Accepted]]    # (request, told) → new ids of each prompt, accepted
Load = Callable[[Job], Generate]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {"python": sys.version.split()[0], **{name: metadata.version(name) for name in packages}}


def in_turn(request: Job, told: Told, begin: Callable[[int], object], step: Callable[[], Collection[int]]) -> None:
    """Every prompt of a request, `users` at once: as one text ends, the next begins. step: goes on with all that run; who ended."""
    waiting, running = deque(range(len(request["prompts"]))), 0
    while waiting or running:
        while waiting and running < request["users"]:
            told.begun(waiting[0])
            begin(waiting.popleft())
            running += 1
        running -= len(step())


def timed(generate: Generate, request: Job) -> Job:
    """The answer to a request."""
    told = Told(len(request["prompts"]))
    texts, accepted = generate(request, told)
    seconds = told.now
    return {"texts": [{"ids": ids, "begun_s": begun, "came": came or [(seconds, len(ids))]}
                      for ids, begun, came in zip(texts, told.begun_s, told.came, strict=True)],
            "seconds": seconds, "accepted": accepted() if callable(accepted) else accepted}


def main(load: Load, packages: tuple[str, ...], convert: Callable[[Path, Path, int], None] | None = None) -> None:
    """`load` prepares the engine for a job; `convert` writes a checkpoint's folder in the engine's own format, weights of so many bits."""
    job = json.loads(sys.argv[1])
    if job["do"] == "convert":
        assert convert is not None, "this engine reads the checkpoint as it is"
        try:
            convert(Path(job["source"]), Path(job["out"]), job["bits"])
        except subprocess.CalledProcessError as error:
            sys.exit(error.returncode)                  # the last line said is the tool's own reason
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def say(answer: Job) -> None:
        answers.write(json.dumps(answer) + "\n")

    start = time.perf_counter()
    generate = load(job)
    say({"ready": True, "versions": versions(packages), "load": round(time.perf_counter() - start, 2)})
    for line in sys.stdin:
        say(timed(generate, json.loads(line)))
