"""Traces for the tests of the page: real ones of exact little engines, and one whose every text is hostile."""

from __future__ import annotations

from pathlib import Path

import torch

from draftproof import Completion, Engine, EngineConfig, Jsonl, Sampling
from draftproof.drafters.model import ModelDrafter
from draftproof.models.fake import TableTarget
from draftproof.trace.events import (
    Alternative,
    NodeRecord,
    PrefillDone,
    RequestDone,
    RequestStarted,
    RoundDone,
    Times,
    TokenRecord,
    TraceStarted,
)
from draftproof.trace.report import RequestReport, requests
from draftproof.trace.sinks import read_trace, to_json

HOSTILE = ["plain", "<script>document.title='owned'</script>", "<img src=x onerror=\"document.title='owned'\">", "\u202egnp.exe\u202c",
           "x" * 10_240, "\ufffd", "\ufffd", "</script><!--", "\u0000\u001b[31m", "\u05e9\u05dc\u05d5\u05dd", "__proto__", "\u2028", ""]
ROCKET = "🚀"


def report(path: Path, request: str) -> RequestReport:
    return requests(read_trace(path))[request]


def engines(path: Path) -> dict[str, Completion]:
    """Off, chains, trees and the joint rule on one exact target, in one trace of level full; all but the last write the same text."""
    sampling = Sampling(temperature=0.9, seed=7, max_tokens=48)
    sink, done = Jsonl(path), {}
    arms = {"off": {}, "chain": {"depth": 4}, "tree": {"depth": 3, "tree": 9}, "ratio": {"depth": 4, "rule": "ratio"}}
    for name, options in arms.items():
        target = TableTarget(vocab_size=6, order=1, seed=1)
        drafter = ModelDrafter(TableTarget(vocab_size=6, order=1, seed=1, sharpness=1.1)) if options else "none"
        with Engine(target, drafter, config=EngineConfig(trace="full"), sinks=[sink], **options) as engine:  # type: ignore[arg-type]
            for _ in range(3 - len(done)):        # so that no two requests of interest share an id in a trace of several engines
                engine.submit([0], Sampling(max_tokens=1, seed=1))
            handle = engine.submit([0, 1, 2], sampling, prompt_class="table")[0]
            while not handle.done:
                engine.step()
            done[name] = handle.completion()
    sink.close()
    return done


def copies(path: Path) -> tuple[Completion, int]:
    """A target that says one paragraph over and over, drafted by looking back: (what it wrote in three copies, length of one)."""
    length = 40
    target = TableTarget(vocab_size=length, order=1, seed=1)
    target.table.fill_(-30.0)
    target.table[torch.arange(length), (torch.arange(length) + 1) % length] = 0.0
    sink = Jsonl(path)
    with Engine(target, "ngram", 4, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        done = engine.generate([0], Sampling(temperature=0.0, max_tokens=3 * length))
    sink.close()
    return done, length


def hostile(path: Path) -> Path:
    """Texts that would run, reorder, hide or break, in every place that holds text."""
    bad = HOSTILE[1]
    alternatives = tuple(Alternative(i, 0.1) for i in range(6))
    events: list[object] = [
        TraceStarted(1, bad, bad, "match", bad, {"device": bad, "invisible": HOSTILE[2]}, tuple(HOSTILE)),
        RequestStarted(bad, 0.0, 3, 0, {"temperature": 1.0}, 2**63 - 1, 0, HOSTILE[2], bad),
        PrefillDone(bad, 0.1, 0.1, 1, TokenRecord(1, "prefill", 0.5, 0.2, alternatives), bad),
    ]
    texts = [HOSTILE[2], HOSTILE[3], HOSTILE[4], ROCKET, HOSTILE[7], HOSTILE[8], HOSTILE[9], HOSTILE[10], HOSTILE[11]]
    tokens = [[2], [3], [4], [5, 6], [7], [8], [9], [10], [11]]
    for number, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
        nodes = tuple(NodeRecord(i, n - 1, "accepted" if n < len(ids) - 1 else "rejected" if n == len(ids) - 1 else "discarded",
                                 0.25, 0.5, 0.1, None, -1.0) for n, i in enumerate([*ids[:-1], 1, 2]))
        roles = ["accepted"] * (len(ids) - 1) + ["correction"]
        words = tuple(TokenRecord(i, role, 0.3, 0.1, alternatives, alternatives) for i, role in zip(ids, roles, strict=True))  # type: ignore[arg-type]
        events.append(RoundDone(bad, number, 0.2 + 0.1 * number, 1, 4 + number, 2, bad, bad, HOSTILE[2], nodes, words, text,
                                Times(0.01, 0.05, 0.01, 0.001)))
    events.append(RequestDone(bad, 2.0, "length", 11, {"draft_bytes": 0, "kv_tokens_lost": 0}, bad))
    path.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")  # type: ignore[arg-type]
    return path


def many(path: Path, rounds: int) -> Path:
    """A trace of level full with one request of so many rounds, about 1.3 kB each."""
    fates, roles = ("accepted", "accepted", "rejected", "discarded", "discarded"), ("accepted", "accepted", "correction")
    nodes = tuple(NodeRecord(i + 1, i - 1, fate, 0.123456789, 0.234567891, 1.23456789, None, -0.5)  # type: ignore[arg-type]
                  for i, fate in enumerate(fates))
    likeliest = tuple(Alternative(k, 0.12345678) for k in range(3))
    tokens = tuple(TokenRecord(i, role, 0.123456789, 1.23456789, likeliest, likeliest) for i, role in enumerate(roles))  # type: ignore[arg-type]
    times = Times(0.001, 0.004, 0.0005, 0.0001)
    line = to_json(RoundDone("r0", 0, 0.0, 1, 0, 5, "model:demo", "best for the batch", "", nodes, tokens, " some text", times))
    before, after = line.split('"round":0,"at_s":0.0,"batch":1,"position":0,')
    with path.open("w", encoding="utf-8") as file:
        file.write(to_json(TraceStarted(1, "demo", "model", "match", "5", {}, tuple(f" word{i}" for i in range(64)))) + "\n")
        file.write(to_json(RequestStarted("r0", 0.0, 3, 0, {"temperature": 1.0}, 1, 0)) + "\n")
        file.write(to_json(PrefillDone("r0", 0.01, 0.01, 1, TokenRecord(1, "prefill"), " word1")) + "\n")
        for i in range(rounds):
            file.write(f'{before}"round":{i},"at_s":{0.01 + 0.006 * (i + 1)!r},"batch":1,"position":{4 + 3 * i},{after}\n')
        metrics = {"draft_bytes": 0, "kv_tokens_lost": 0}
        file.write(to_json(RequestDone("r0", 0.02 + 0.006 * rounds, "length", 1 + 3 * rounds, metrics)) + "\n")
    return path
