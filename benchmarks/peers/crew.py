"""Workers of peers.py: started in their own environments, stopped unless they are asked, ended if they fail.

Only Python is needed here; the engines are in with_*.py, what both sides say to each other is in worker.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
AUTO = -1           # a depth that the engine chooses, round by round


@dataclass(frozen=True, slots=True)
class Peer:
    """split: what is fixed when a worker starts, "arm" (guessing or not) or "depth"; "" if one worker serves all arms of an engine, NAME
    and NAME+…. drafter: what guesses, where the worker has a choice; "model" in it stands for the draft model, "eagle3" for the head;
    rule: which of our own judges it; tree: most nodes of a round of ours, 0 for chains; depth: its own, whatever the others',
    or AUTO. bits: of weights that it can be given; cache_bits: of keys and values of ours. The arms of one engine read the same converted
    models."""

    script: Path
    program: Path
    split: str = ""
    converts: bool = False
    plain: bool = True
    guesses: bool = True
    drafter: str = "model"
    rule: str = "match"
    tree: int = 0
    depth: int = 0
    bits: tuple[int, ...] = (16,)
    cache_bits: int = 16

    @property
    def way(self) -> dict[str, Any]:
        """Of guessing, as a worker is told at its start and with each request."""
        return {"drafter": self.drafter, "rule": self.rule, "tree": self.tree}


def engine_of(name: str) -> str:
    """Whose arm it is: NAME and NAME+… are one engine's."""
    return name.split("+")[0]


class Broken(Exception):
    """A worker cannot be used; the text says why."""


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """An engine, plain (depth 0) or guessing `depth` tokens, or as many as it chooses (AUTO)."""

    peer: str
    depth: int

    def __str__(self) -> str:
        return f"{self.peer} {'auto' if self.depth == AUTO else f'K={self.depth}' if self.depth else 'plain'}"

    @property
    def mode(self) -> str:
        return "draft" if self.depth else "plain"


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer. first_s: seconds until its first tokens, `first` of them; accepted: draft tokens that stood, where the engine says it."""

    ids: tuple[int, ...]
    seconds: float
    first_s: float
    first: int
    accepted: int | None

    @property
    def rate(self) -> float:
        """Decoded tokens per second: those after the first delivery over the time since."""
        return (len(self.ids) - self.first) / (self.seconds - self.first_s)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Timed:
        """Of the only text. Raises Broken."""
        with understood():
            text, = answer["texts"]
            first_s, first = text["came"][0]
            run = cls(tuple(text["ids"]), float(answer["seconds"]), float(first_s), int(first), answer.get("accepted"))
        if len(run.ids) <= run.first or run.seconds <= run.first_s:
            raise Broken(f"{len(run.ids)} tokens in {run.seconds:.3f} s, the first {run.first} of them in {run.first_s:.3f} s: no rate")
        return run


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Raises Broken if an answer is read that lacks something."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Broken(f"an answer without what was asked for: {error!r}") from error


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing in its log"


class Worker:
    """A process in a session of its own that answers JSON lines; stopped, with its children, unless it is asked."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                            env=dict(environment), text=True, encoding="utf-8", errors="replace", start_new_session=True)
        self.warmed: set[Arm] = set()
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put(None)

    def hear(self, patience: float) -> dict[str, Any]:
        """The next line. Raises Broken if it does not come in so many seconds, or is none of ours."""
        try:
            line = self.lines.get(timeout=patience)
        except queue.Empty:
            raise Broken(f"no answer in {patience:.0f} s") from None
        if line is None:
            raise Broken(f"ended with {self.process.wait(10)}: {last_line(self.log)}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Broken(f"not an answer: {line.strip()[:80]!r}")
        return answer

    def ask(self, request: Mapping[str, Any], patience: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass                                       # it has ended: its last words are heard below
        answer = self.hear(patience)
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, grace: float = 5) -> None:
        """Ends it and what it started: the input is closed, after `grace` seconds they are told to, after as many again made to."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
            self.signal(number)
        self.process.wait()
        self.reader.join()


class Crew:
    """The workers of all arms, at most `together` (0: all) alive at once: the one unused for longest makes room.

    models: the folders "target", "draft" and perhaps "head" of each engine. warm: the prompt on which a worker meets each arm before it
    is measured. users: most texts that a request has written at once."""

    def __init__(self, arms: Sequence[Arm], peers: Mapping[str, Peer], models: Mapping[str, Mapping[str, Path]], warm: Sequence[int],
                 logs: Path, threads: int = 2, together: int = 0, patience: float = 300, bits: int = 16,
                 users: int = 1) -> None:
        self.arms, self.peers, self.models, self.warm, self.logs = arms, peers, models, warm, logs
        self.threads, self.together, self.patience, self.bits, self.users = threads, together, patience, bits, users
        self.live: dict[tuple[Any, ...], Worker] = {}
        self.broken: dict[Arm, str] = {}
        self.versions: dict[str, Any] = {}
        self.load_s: dict[str, float] = {}

    def key(self, arm: Arm) -> tuple[Any, ...]:
        split = self.peers[arm.peer].split
        return (arm.peer, arm.mode if split == "arm" else arm.depth) if split else (engine_of(arm.peer),)

    def start(self, arm: Arm) -> Worker:
        key, peer = self.key(arm), self.peers[arm.peer]
        while self.together and len(self.live) >= self.together:
            self.end(next(iter(self.live)))
        name = "-".join(map(str, key))
        job = {"do": "serve", **{role: str(path) for role, path in self.models[arm.peer].items()}, "arm": arm.mode, "depth": arm.depth,
               "threads": self.threads, "bits": self.bits, "cache_bits": peer.cache_bits, "users": self.users, **peer.way}
        command = (peer.program, peer.script, json.dumps(job))
        worker = self.live[key] = Worker(command, self.logs / f"{name}.log", surroundings(self.threads))
        hello = worker.hear(3 * self.patience)
        if not hello.get("ready"):
            raise Broken(f"not ready: {hello}")
        self.versions[str(key[0])], self.load_s[name] = hello.get("versions"), hello.get("load")
        return worker

    def answer(self, arm: Arm, what: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        """What `read` finds in the answer. Raises Broken, notes it in `broken` and ends the worker if there is none."""
        return self._with(arm, lambda worker: read(worker.ask({**what, **self.peers[arm.peer].way}, self.patience)))

    def meet(self, arm: Arm) -> None:
        """Starts its worker and warms it up, as an answer would. Raises as `answer` does."""
        self._with(arm, lambda worker: None)

    def _with(self, arm: Arm, use: Callable[[Worker], T]) -> T:
        """One that does not start is broken for all of its arms; after a failed answer the other arms get a new one."""
        key = self.key(arm)
        lost = [other for other in self.arms if self.key(other) == key]
        try:
            worker = self.live.get(key) or self.start(arm)
            self.live[key] = self.live.pop(key)                    # the last one used
            lost = [arm]
            if arm not in worker.warmed:                           # perhaps without a rate: few tokens may come at once
                worker.ask(request(arm, self.warm, 8, 0.0, 1) | self.peers[arm.peer].way, self.patience)
                worker.warmed.add(arm)
            return use(worker)
        except (Broken, OSError) as error:
            self.end(key, 0.5)
            self.broken |= dict.fromkeys(lost, str(error))
            raise Broken(str(error)) from error

    def end(self, key: tuple[Any, ...], grace: float = 5) -> None:
        if key in self.live:
            self.live.pop(key).end(grace)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self.live):
            self.end(key)


def surroundings(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false"}


def request(arm: Arm, prompt: Sequence[int], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    return requests(arm, [prompt], tokens, temperature, [seed])


def requests(arm: Arm, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seeds: Sequence[int],
             users: int = 1) -> dict[str, Any]:
    """Of so many texts, `users` at once."""
    return {"prompts": [list(prompt) for prompt in prompts], "seeds": list(seeds), "users": users, "max_tokens": tokens, "arm": arm.mode,
            "depth": arm.depth, "temperature": temperature}


def converted(name: str, peer: Peer, sources: Mapping[str, Path], digest: Callable[[Path], str], work: Path,
              bits: int = 16) -> dict[str, Path]:
    """The models' folders as this engine reads them, made unless they are there, from the same weights by the same script. bits: of the
    target's weights; the draft model keeps its own.

    Raises Broken if the engine is not there, cannot have such weights or its converter fails."""
    if bits not in peer.bits:
        raise Broken(f"it is not given weights of {bits} bits here")
    if not peer.program.exists():
        raise Broken(f"no {peer.program.name} in {peer.program.parent.parent.name}; this module's text says how to make it")
    folders = dict(sources)
    for role, source in sources.items() if peer.converts else ():
        if role == "head" or (role == "draft" and not peer.guesses):
            continue
        own = bits if role == "target" else 16
        folders[role] = out = work / engine_of(name) / (role if own == 16 else f"{role}-{own}")
        key = f"{digest(source)} {hashlib.sha256(peer.script.read_bytes()).hexdigest()}"
        note, log = out / "converted.txt", work / f"{engine_of(name)}-{role}.log"
        if note.exists() and note.read_text() == key:
            continue
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        job = json.dumps({"do": "convert", "source": str(source), "out": str(out), "bits": own})
        with log.open("wb") as told:
            done = subprocess.run([peer.program, peer.script, job], stdin=subprocess.DEVNULL, stdout=told, stderr=told, env=surroundings(2))
        if done.returncode:
            raise Broken(f"converting the {role} ended with {done.returncode}: {last_line(log)}")
        note.write_text(key)
    return folders
