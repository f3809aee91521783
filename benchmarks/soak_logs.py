"""Soak: a log of any size, good and bad lines mixed, through `draftproof audition`, which must count both and hold little.

    python benchmarks/soak_logs.py                                    5 GB; minutes on 2 cores
    python benchmarks/soak_logs.py --megabytes 200
    python benchmarks/soak_logs.py --bulk 0 --bad 0 --tokens 3000000 --drafter suffix      for speed: nothing but prompts and answers

The log is made from a seed: requests in every form (ids, OpenAI pairs that carry tool schemas, chats, ShareGPT, documents, our traces), and
among them lines cut short, other encodings, missing and wrong fields, deep nesting, and one line in a gigabyte that is longer than any
reader should hold. It passes when every good request was replayed, every bad line was counted, the first complaints name the right lines,
and the command's processes together held at most `--growth` MB more than on the first 16 MB alone. The last line of standard
output is one JSON document; exit code 3 says that it failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import provenance

VOCAB, WORDS = 4000, 2000
FIRST_MB = 16
LONG = 65 << 20                           # bytes of the line that is too long
EVERY = 1 << 30                           # one of them in so many bytes
POLL_S = 0.2


@dataclass(slots=True)
class Written:
    """What a log holds: bytes, requests that can be replayed, tokens of answers given as ids, bad lines and where the first of them are."""

    bytes: int = 0
    lines: int = 0
    good: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: list[int] = field(default_factory=list)


class Maker:
    """Lines of a log, from a seed. Answers repeat passages, so that drafters have something to copy."""

    def __init__(self, seed: int, bulk_kb: int) -> None:
        self.dice, self.bulk = random.Random(seed), bulk_kb << 10
        self.words = ["".join(self.dice.choices("abcdefghijklmnopqrstuvwxyz", k=self.dice.randint(2, 9))) for _ in range(WORDS)]
        self.weights = [1 / (1 + i) for i in range(WORDS)]
        self.ranks = [1 / (3 + i) for i in range(VOCAB)]
        self.passages = [self.fresh(self.dice.randint(8, 60)) for _ in range(400)]
        self.schema = json.dumps([{"name": word, "description": self.text(40), "parameters": {}} for word in self.words[:300]])

    def fresh(self, count: int) -> list[int]:
        return self.dice.choices(range(VOCAB), self.ranks, k=count)

    def ids(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found += self.dice.choice(self.passages) if self.dice.random() < 0.5 else self.fresh(self.dice.randint(4, 40))
        return found[:count]

    def text(self, count: int) -> str:
        return " ".join(self.dice.choices(self.words, self.weights, k=count))

    def tools(self) -> str:
        """Metadata that a reader has to wade through."""
        return (self.schema * (1 + self.bulk // len(self.schema)))[:self.dice.randint(0, self.bulk)] if self.bulk else ""

    def request(self) -> tuple[list[dict[str, Any]], int]:
        """(the records of one good request, tokens of its answer if they are ids)."""
        dice = self.dice
        prompt, answer = self.ids(dice.randint(20, 400)), self.ids(dice.randint(20, 300))
        kind = dice.random() if self.bulk else 0.0
        if kind < 0.5:
            return [{"prompt_token_ids": prompt, "token_ids": answer, "max_tokens": 400, "finish_reason": "stop",
                     "class": dice.choice("abc")}], len(answer)
        if kind < 0.9:
            content = [{"token": f"token_id:{t}", "logprob": -0.5} for t in answer]
            return [{"request": {"prompt": prompt, "tools": self.tools(), "max_tokens": 400},
                     "response": {"choices": [{"logprobs": {"content": content}}]}}], len(answer)
        if kind < 0.93:
            return [{"messages": [{"role": "user", "content": self.text(20)}, {"role": "assistant", "content": self.text(30)}]}], 0
        if kind < 0.95:
            return [{"conversations": [{"from": "human", "value": self.text(20)}, {"from": "gpt", "value": self.text(30)}]}], 0
        if kind < 0.97:
            return [{"text": self.text(60)}], 0
        name = f"r{dice.randrange(1 << 40)}"
        started = {"event": "request_started", "request": name, "prompt_ids": prompt, "sampling": {"max_tokens": 400}}
        events: list[dict[str, Any]] = [started, {"event": "prefill_done", "request": name, "token": {"token": answer[0]}}]
        events += [{"event": "round_done", "request": name, "position": len(prompt) + i, "depth": 2, "tokens": [{"token": t}]}
                   for i, t in enumerate(answer[1:], 1)]
        return [*events, {"event": "request_done", "request": name, "finish": "stop"}], len(answer)

    def bad(self) -> bytes:
        """A line that no reader can use."""
        dice = self.dice
        whole = json.dumps({"prompt_token_ids": self.ids(50), "token_ids": self.ids(50), "class": "ünïcödé"}, ensure_ascii=False)
        wrong = dice.choice([
            lambda: {"prompt_token_ids": self.ids(9)}, lambda: {"request": {"model": "m"}}, lambda: {"prompt": "\ud800"}, lambda: None,
            lambda: {"prompt_token_ids": ["a", 1], "token_ids": [3]}, lambda: {"messages": [{"role": "wizard", "content": "x"}]},
            lambda: {"prompt_token_ids": [1, 2], "token_ids": []}, lambda: 17, lambda: {"event": "request_started", "prompt_ids": {}}])
        return dice.choice([
            lambda: whole.encode()[:dice.randint(1, len(whole) - 1)], lambda: whole.encode("latin-1"),
            lambda: b"\xff\xfe" + whole.encode("utf-16-le").replace(b"\n", b""), lambda: b"[" * dice.randint(2_000, 200_000),
            lambda: dice.randbytes(60).replace(b"\n", b" ") + b"\x80", lambda: json.dumps(wrong()).encode()])()


def records(seed: int, most_bytes: int, most_tokens: int, bad: float, bulk_kb: int, written: Written) -> Iterator[bytes]:
    """Lines until so many bytes or tokens are reached; `written` follows."""
    maker, next_long = Maker(seed, bulk_kb), EVERY if bad else 1 << 62

    def line(raw: bytes) -> bytes:
        written.lines += 1
        written.bytes += len(raw) + 1
        return raw + b"\n"

    def wrong(raw: bytes) -> bytes:
        written.bad += 1
        if len(written.first_bad) < 5:
            written.first_bad.append(written.lines + 1)
        return line(raw)

    while written.bytes < most_bytes and written.tokens < most_tokens:
        found, tokens = maker.request()
        for record in found:
            yield line(json.dumps(record).encode())
        written.good += 1
        written.tokens += tokens
        if maker.dice.random() < bad:
            yield wrong(maker.bad())
        if maker.dice.random() < bad:
            yield line(b"")                                     # no record at all
        if written.bytes > next_long:
            next_long += EVERY
            yield wrong(b'{"text": "' + b"x" * LONG + b'"}')


def write(file: Path, asked: argparse.Namespace, megabytes: float) -> Written:
    written = Written()
    with file.open("wb", buffering=1 << 20) as out:
        for raw in records(asked.seed, int(megabytes * 1e6), asked.tokens, asked.bad, asked.bulk, written):
            out.write(raw)
    return written


def resident_mb(session: int) -> float:
    """MB that all processes of a session hold together; what they share is counted once for each."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    total += int((entry / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
            except (OSError, IndexError):
                continue
    return total


def audition(file: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The command over a log: its document, wall clock, CPU seconds of its processes, and the most they held."""
    command = [sys.executable, "-m", "draftproof.cli", "audition", str(file), "--json", "--processes", str(asked.processes)]
    for drafter in asked.drafter or ["ngram"]:
        command += ["--drafter", drafter]
    for depth in asked.depth or [4]:
        command += ["--depth", str(depth)]
    began, peak, cpu = time.perf_counter(), 0.0, 0.0
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, stdout=out, start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, resident_mb(process.pid))
            cpu = max(cpu, cpu_seconds(process.pid))
            try:
                process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
        out.seek(0)
        said = out.read().splitlines()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {**json.loads(said[-1]), "seconds": time.perf_counter() - began, "cpu_seconds": cpu, "peak_mb": peak}


def cpu_seconds(session: int) -> float:
    """CPU time of a session's processes, and of those of their children that they have waited for."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def judged(written: Written, small: dict[str, Any], whole: dict[str, Any], growth: float) -> dict[str, Any]:
    log = whole["log"]
    lines = [int(complaint.removeprefix("line ").partition(":")[0]) for complaint in log["complaints"]]
    checks = {"every good request was replayed": log["requests"] == written.good,
              "every bad line was counted": log["skipped"] == written.bad,
              "complaints name the first bad lines": lines == written.first_bad,
              "memory does not grow with the log": whole["peak_mb"] <= small["peak_mb"] + growth}
    return {"passed": all(checks.values()), "checks": checks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=5000)
    parser.add_argument("--tokens", type=int, default=1 << 62, help="of answers, at most")
    parser.add_argument("--bad", type=float, default=0.1, help="bad lines per good request")
    parser.add_argument("--bulk", type=int, default=120, help="KB of tool schemas in a request, at most; 0 leaves ids and nothing else")
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--depth", action="append", type=int)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    parser.add_argument("--growth", type=float, default=150, help="MB that the whole log may take more than its beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep the log here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        first, log = folder / "first.jsonl", folder / "log.jsonl"
        write(first, asked, min(FIRST_MB, asked.megabytes))
        print(f"writing {asked.megabytes:g} MB at most …", file=sys.stderr)
        written = write(log, asked, asked.megabytes)
        small, whole = audition(first, asked), audition(log, asked)
    replayed = sum(cell["tokens"] for cell in whole["cells"] if cell["class"] == "all")
    verdict = judged(written, small, whole, asked.growth)
    figures = {"megabytes": written.bytes / 1e6, "lines": written.lines, "requests": written.good, "bad_lines": written.bad,
               "tokens_replayed": replayed, "seconds": whole["seconds"], "cpu_seconds": whole["cpu_seconds"],
               "tokens_per_s": replayed / whole["seconds"], "tokens_per_cpu_s": replayed / whole["cpu_seconds"],
               "peak_mb": {"first": small["peak_mb"], "whole": whole["peak_mb"]}}
    for name, passed in verdict["checks"].items():
        print(f"{'ok  ' if passed else 'FAIL'}  {name}", file=sys.stderr)
    print(f"{figures['megabytes']:.0f} MB, {written.good} requests, {written.bad} bad lines; {replayed} tokens replayed in "
          f"{whole['seconds']:.0f} s ({figures['tokens_per_s']:.0f} a second; {figures['tokens_per_cpu_s']:.0f} per second of CPU); "
          f"{whole['peak_mb']:.0f} MB held, {small['peak_mb']:.0f} on the first {FIRST_MB} MB", file=sys.stderr)
    print(json.dumps({**provenance(), **verdict, **figures}))
    return 0 if verdict["passed"] else 3


if __name__ == "__main__":
    sys.exit(main())
