"""Replicas of a vLLM server: started and watched here, or running elsewhere. Who is up, who has least to do, who must start again."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import Failure
from .wire import Denied, ask

log = logging.getLogger("draftproof.remote")

_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None

LOOK_S = 1.0             # between two looks at every replica
STRIKES = 3              # looks without an answer before a replica counts as down
STARTS = 4               # starts in a row of a server that did not stay up for STEADY_S, after which a replica is given up
STEADY_S = 60.0
HANG_S = 60.0            # without an answer, after which a process of ours that had been up is ended, and started again
STOP_S = 15.0            # for a process to end by itself
START_S = 1800.0         # large models load long


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server: argv without its address, and what its environment has more."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """One vLLM server of ours, on a port of the loopback that only its key opens, with all its children in one session."""

    def __init__(self, launch: Launch, log_file: Path) -> None:
        self.launch, self.log_file, self.key = launch, log_file, secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.port = free_port()
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        with open(self.log_file, "ab") as out:
            self._process = subprocess.Popen([*self.launch.command, *address], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                             env={**os.environ, **self.launch.environment, "VLLM_API_KEY": self.key},
                                             start_new_session=True, preexec_fn=_end_with_us)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> int | None:
        """The exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """End it and its children: a request first, then by force."""
        process = self._process
        if process is None:
            return
        for sign, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def last_words(self) -> str:
        """The last line of its log that says something."""
        try:
            with open(self.log_file, "rb") as file:
                file.seek(max(0, self.log_file.stat().st_size - 4096))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


class Replica:
    """A server as seen from here. state: starting, up, down (it may come back) or failed (it will not)."""

    def __init__(self, name: str, plain: bool, url: str = "", key: str | None = None, process: Process | None = None) -> None:
        self.name, self.plain, self.process = name, plain, process
        self._url, self._key = url, key
        self.state, self.why = "starting", ""
        self.model, self.context = "", 0                     # as its /v1/models says
        self.live = self.served = self.restarts = 0
        self.suspect = False                                 # lost a request since it was last seen well
        self._complaints: set[str] = set()
        self._strikes = self._starts = 0
        self._next_start = self._seen = self._since = 0.0    # moments: not to be started before, last answer, first of those in a row

    @property
    def url(self) -> str:
        return self.process.url if self.process is not None else self._url

    @property
    def key(self) -> str | None:
        return self.process.key if self.process is not None else self._key

    def look(self) -> None:
        """See how it is; start it again if it ended."""
        if self.state == "failed":
            return
        if self.process is not None and (self.process.port == 0 or self.process.ended is not None):
            return self._revive(self.process)
        try:
            ask(self.url, "/health", self.key)
            if not self.model or self.state != "up" or self.suspect:         # it may have been started anew, with another model
                found = json.loads(ask(self.url, "/v1/models", self.key))["data"][0]
                if self.model not in ("", found["id"]):
                    log.warning("replica %s serves %s now, it was %s", self.name, found["id"], self.model)
                self.model, self.context = str(found["id"]), int(found.get("max_model_len") or 0)
        except Denied as error:
            if self.process is None:
                return self._down(f"it does not take our key: {error}")
            self.process.stop()
            return self._give_up(f"it does not take our key ({error}); leave every key out of what vLLM is given")
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            self._strikes += 1
            if self.process is not None and self.state == "down" and monotonic() - self._seen > HANG_S:
                log.warning("replica %s hangs: it is ended, to start again", self.name)
                self.process.stop()
            if self.state == "up" and self._strikes >= STRIKES or self.state != "up" and self.process is None:
                self._down(f"it does not answer: {error}")
            return
        if self.state != "up":
            log.warning("replica %s is up at %s", self.name, self.url)
            self._since = monotonic()
        self.state, self.why, self._strikes, self._seen = "up", "", 0, monotonic()
        if self._seen - self._since > STEADY_S:
            self._starts = 0
        self.suspect = False

    def failed_once(self, reason: str) -> None:
        """A request was lost there: look again at once, and believe nothing until then."""
        self._strikes, self.suspect = STRIKES, True
        log.warning("replica %s lost a request: %s", self.name, reason)

    def complain(self, what: str) -> None:
        """Log what its answers lack, once."""
        if what not in self._complaints:
            self._complaints.add(what)
            log.warning("replica %s: %s", self.name, what)

    def _down(self, why: str) -> None:
        if self.state == "up":
            log.warning("replica %s is down: %s", self.name, why)
        self.state, self.why = "down", why

    def _give_up(self, why: str) -> None:
        self.state, self.why = "failed", why
        log.error("replica %s is given up: %s", self.name, why)

    def _revive(self, process: Process) -> None:
        now = monotonic()
        if process.port:
            if self.state in ("up", "starting"):
                self._down(f"its process ended with status {process.ended}: {process.last_words()}")
                self._next_start = now + 2.0 ** self._starts - 1
            if self._starts >= STARTS:
                return self._give_up(f"{self.why} (started {STARTS} times, never up for a minute; log: {process.log_file})")
            if now < self._next_start:
                return
            self.restarts += 1
        self._starts += 1
        process.stop()                                       # children that outlived it
        try:
            process.start()
        except OSError as error:
            return self._give_up(f"it cannot be started: {error}")
        self.state, self.model = "starting", ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "plain": self.plain, "url": self.url, "state": self.state, "why": self.why, "live": self.live,
                "served": self.served, "restarts": self.restarts, "pid": None if self.process is None else self.process.pid}


class Fleet:
    """All replicas, looked at every second by a thread of their own."""

    def __init__(self, replicas: Sequence[Replica], look_s: float = LOOK_S) -> None:
        self.replicas, self._look_s = list(replicas), look_s
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(replica,), name=f"draftproof-{replica.name}", daemon=True)
                         for replica in self.replicas]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self, told: Callable[[str], None] = lambda line: None, timeout_s: float = START_S) -> None:
        """Until every replica is up or given up. Raises Failure if none is up, or in time."""
        until, seen = monotonic() + timeout_s, set[str]()
        while True:
            for replica in self.replicas:
                settled = replica.state in ("up", "failed") or replica.state == "down" and replica.process is None
                if settled and replica.name not in seen:
                    seen.add(replica.name)
                    told(f"replica {replica.name}: {replica.state} at {replica.url} {replica.why}".rstrip())
            if len(seen) == len(self.replicas):
                break
            if self._closing.wait(0.1) or monotonic() > until:
                break
        if not any(replica.state == "up" for replica in self.replicas):
            words = "; ".join(f"{replica.name}: {replica.why or replica.state}" for replica in self.replicas)
            raise Failure(f"no vLLM server came up ({words}); see the logs, or start one and name it with --url")

    def pick(self, plain: bool, avoid: Replica | None = None) -> Replica | None:
        """Of those that are up and of this kind, the one with the fewest requests; `avoid` only if there is no other."""
        able = [replica for replica in self.replicas if replica.state == "up" and replica.plain == plain and not replica.suspect]
        others = [replica for replica in able if replica is not avoid] or able
        return min(others, key=lambda replica: (replica.live, replica.served), default=None)

    def has(self, plain: bool) -> bool:
        """Whether there is such a replica that is not given up."""
        return any(replica.plain == plain and replica.state != "failed" for replica in self.replicas)

    def close(self) -> None:
        """Stop watching, and end the servers that were started here."""
        self._closing.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * self._look_s + 1)
        stoppers = [threading.Thread(target=replica.process.stop) for replica in self.replicas if replica.process is not None]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()

    def _watch(self, replica: Replica) -> None:
        while not self._closing.is_set():
            try:
                replica.look()
            except Exception:
                log.exception("looking at replica %s failed", replica.name)
            self._closing.wait(self._look_s)


def _end_with_us() -> None:
    """In the child: Linux ends it when its parent dies, however that came about."""
    if _prctl is not None:
        _prctl(1, signal.SIGTERM)                            # PR_SET_PDEATHSIG


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
