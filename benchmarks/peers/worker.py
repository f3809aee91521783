"""What the workers of peers.py share: a job as JSON on the command line, then one JSON line in, one JSON line out.

    python with_NAME.py '{"do": "convert", "source": FOLDER, "out": FOLDER, "bits": 16}'
    python with_NAME.py '{"do": "serve", "target": FOLDER, "draft": FOLDER, "head": FOLDER, "arm": "plain", "depth": 0, "threads": 2,
                         "drafter": "model", "rule": "match", "tree": 0, "bits": 16}'

A server first says {"ready": true, "versions": {…}, "load": seconds}. Every line that comes then,
{"prompt_ids", "max_tokens", "arm": "plain" or "draft", "depth", "temperature", "seed", "drafter", "rule", "tree"}, is answered with
{"ids": the new tokens, "seconds": of the run, "first_s": until its first tokens came, "first": how many came then, "accepted": draft tokens
that stood, or null}; a depth of −1 is the engine's to choose. What the engine itself prints goes to standard error. Runs in any engine's
environment, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Accepted = int | None | Callable[[], int]                   # draft tokens that stood; a function is asked after the clock is stopped
Arrived = Callable[[int], object]                           # told, whenever tokens come, how many; the first time counts
Generate = Callable[[Job, Arrived], tuple[list[int], Accepted]]    # (request, told) → new ids, accepted
Load = Callable[[Job], Generate]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {"python": sys.version.split()[0], **{name: metadata.version(name) for name in packages}}


def timed(generate: Generate, request: Job) -> Job:
    """The answer to a request."""
    came: list[tuple[float, int]] = []

    def arrived(count: int) -> None:
        if count and not came:
            came.append((time.perf_counter() - start, count))

    start = time.perf_counter()
    ids, accepted = generate(request, arrived)
    seconds = time.perf_counter() - start
    first_s, first = came[0] if came else (seconds, len(ids))
    return {"ids": ids, "seconds": seconds, "first_s": first_s, "first": first, "accepted": accepted() if callable(accepted) else accepted}


def main(load: Load, packages: tuple[str, ...], convert: Callable[[Path, Path, int], None] | None = None) -> None:
    """`load` prepares the engine for a job; `convert` writes a checkpoint's folder in the engine's own format, weights of so many bits."""
    job = json.loads(sys.argv[1])
    if job["do"] == "convert":
        assert convert is not None, "this engine reads the checkpoint as it is"
        convert(Path(job["source"]), Path(job["out"]), job["bits"])
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
