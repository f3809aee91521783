"""What the workers of peers.py share: a job as JSON on the command line, then one JSON line in, one JSON line out.

    python with_NAME.py '{"do": "convert", "source": FOLDER, "out": FOLDER, "bits": 16}'
    python with_NAME.py '{"do": "serve", "target": FOLDER, "draft": FOLDER, "head": FOLDER, "arm": "plain", "depth": 0, "threads": 2,
                         "drafter": "model", "rule": "match", "tree": 0, "bits": 16}'

A server first says {"ready": true, "versions": {…}, "load": seconds}. Every line that comes then,
{"prompt_ids", "max_tokens", "arm": "plain" or "draft", "depth", "temperature", "seed", "drafter", "rule", "tree"}, is answered with
{"ids": the new tokens, "seconds": of that run, "first_s": of a run of the same prompt for one token, "accepted": draft tokens that stood,
or null}; a depth of −1 is the engine's to choose. What the engine itself prints goes to standard error; a line with "timed": false gets
only {"ids", "accepted"}, from one run. Runs in any engine's environment, so it needs nothing but Python.
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
Generate = Callable[[Job, int], tuple[list[int], Accepted]]        # (request, tokens) → new ids, accepted
Load = Callable[[Job], Generate]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {"python": sys.version.split()[0], **{name: metadata.version(name) for name in packages}}


def timed(generate: Generate, request: Job, tokens: int) -> tuple[float, list[int], int | None]:
    start = time.perf_counter()
    ids, accepted = generate(request, tokens)
    seconds = time.perf_counter() - start
    return seconds, ids, accepted() if callable(accepted) else accepted


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
        request = json.loads(line)
        if not request.get("timed", True):
            _, ids, accepted = timed(generate, request, request["max_tokens"])
            say({"ids": ids, "accepted": accepted})
            continue
        first_s, _, _ = timed(generate, request, 1)
        seconds, ids, accepted = timed(generate, request, request["max_tokens"])
        say({"ids": ids, "seconds": seconds, "first_s": first_s, "accepted": accepted})
