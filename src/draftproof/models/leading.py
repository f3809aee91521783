"""A target over several processes: this one decides, and tells the others to do the same with their shares.

    engine, drafters ── open, extend, score, … ──▶ LeadingTarget ──▶ its own share
                                                        └── the same call, as numbers ──▶ a follower per share (following.py)

Followers live as long as their line to this process, or until a call fails in the middle (`Followers.together`). Their caches go
through the same calls as ours, so pages, prefixes and errors are the same; taps, noise, verdicts and drafters are here alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..config import LoadConfig
from ..errors import DraftproofError, Failure, LoadError, first_line
from ..types import Draft, Scores
from .paged import PagedTarget
from .shares import Ranks
from .target import Target

GRACE = 10  # seconds that a follower has to end by itself
PASSES = {"open", "extend", "score"}  # calls that need the others; the rest tidies up, here alone if they are gone


class Followers:
    """The other processes of a target, ranks 1 … n−1, and their lines."""

    def __init__(self, path: str, config: LoadConfig, fused: bool, device: torch.device) -> None:
        """Starts them; each loads its share at once. device: of rank 0; on CUDA the others take the ones behind it. Raises LoadError."""
        self._ranks = range(config.tensor_parallel)
        places, threads = [str(device)] * len(self._ranks), config.threads
        if device.type == "cuda":
            first = device.index or 0
            if first + len(places) > torch.cuda.device_count():
                raise self.refused(f"the first on {device}, but this torch sees {torch.cuda.device_count()} CUDA devices; "
                                   "expected one per process")
            places = [f"cuda:{first + rank}" for rank in self._ranks]
        elif device.type == "cpu":
            threads = max(1, (threads or torch.get_num_threads()) // len(places))
        self._configs = [replace(config, device=place, threads=threads, graphs=False, self_test=False) for place in places]
        self._folder = tempfile.mkdtemp(prefix="draftproof-")
        self._store = str(Path(self._folder, "store"))
        self._over = ""  # why they are not there any more
        self.lines: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.end = weakref.finalize(self, _end, self.lines, self.processes, self._folder)
        for rank in self._ranks[1:]:
            self._start((path, self._configs[rank], fused, rank, self._store))

    def _start(self, task: tuple[Any, ...]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "draftproof.models.following", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is ours; they end with the line
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
        self.lines.append(Connection(ours.detach()))
        self.lines[-1].send(task)

    def first(self) -> tuple[LoadConfig, Ranks]:
        """What rank 0 loads its own share with; returns when all processes have come. Raises LoadError if one does not."""
        config = self._configs[0]
        self.await_each()
        return config, Ranks(0, len(self._ranks), self._store, torch.device(config.device or "cpu"))

    def await_each(self) -> None:
        """Returns when every follower has sent its next message. Raises LoadError if one cannot go on."""
        complaint = self.complaint(None)
        if complaint:
            raise self.refused(complaint)

    def refused(self, why: object) -> LoadError:
        return LoadError(f"tensor_parallel={len(self._ranks)}: {why}")

    def complaint(self, wait: float | None) -> str:
        """What the first follower that cannot go on says, "" if there is none: one message of each, who sends one when it has started
        and one when it has loaded. wait: seconds for each; None: as long as it takes."""
        for rank, line in enumerate(self.lines, 1):
            try:
                said = str(line.recv()) if line.poll(wait) else ""
            except (EOFError, OSError):
                said = "it ended"
            if said:
                return f"process {rank}: {said}"
        return ""

    @contextmanager
    def together(self, *call: Any) -> Iterator[None]:
        """The same call to each, and in the block the one of this process. Raises Failure if one is gone.

        Ctrl-C waits for the end of the block, and what fails in it ends the others: a pass that one process left would pair its sums
        with those of the next.
        """
        if self._over and call[0] in PASSES:
            raise Failure(self._over)
        with _uninterrupted():
            if not self._over:
                self._tell(call)
            try:
                yield
            except DraftproofError:
                raise  # as it does in the others: a full cache is full there, too
            except BaseException as error:
                self._stop(f"a pass was broken off ({first_line(error)})")
                raise

    def _tell(self, call: tuple[Any, ...]) -> None:
        for rank, line in enumerate(self.lines, 1):
            try:
                line.send(call)
            except OSError as error:
                self._stop(f"process {rank} of the target has ended")
                raise Failure(self._over) from error

    def _stop(self, why: str) -> None:
        """End them at once, wherever they are."""
        self._over = self._over or f"tensor_parallel: {why}; load the target again"
        for process in self.processes:
            process.kill()
        self.end()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is heard behind the block; a second one at once."""
    before, heard = signal.getsignal(signal.SIGINT), []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    if before is None or threading.current_thread() is not threading.main_thread():  # nobody of ours hears it here
        yield
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _end(lines: list[Connection], processes: list[subprocess.Popen[bytes]], folder: str) -> None:
    for line in lines:
        line.close()
    for process in processes:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def lead(path: str, config: LoadConfig, fused: bool, device: torch.device,
         load: Callable[[str, LoadConfig, bool, Ranks], Target]) -> LeadingTarget:
    """Load a target over `config.tensor_parallel` processes. load: one share. Raises LoadError."""
    followers = Followers(path, config, fused, device)
    try:
        try:
            mine, ranks = followers.first()
            target = load(path, mine, fused, ranks)
        except RuntimeError as error:  # of the exchange between processes, mostly because one is gone
            raise followers.refused(followers.complaint(1) or error) from error
        followers.await_each()
        if not isinstance(target, PagedTarget):
            raise followers.refused(f"{path} is of tier {target.facts.tier} ({target.facts.reasons['tier']}), expected tier 1; "
                                    "use one device")
    except BaseException:
        followers.end()
        raise
    return LeadingTarget(target, followers)


class LeadingTarget:
    """Implements `Target` over this process's share, which must be of tier 1, and its followers'."""

    trees = True

    def __init__(self, target: PagedTarget, followers: Followers) -> None:
        self._target, self._followers = target, followers
        self.vocab_size, self.context, self.device = target.vocab_size, target.context, target.device
        self.parts, self.tokenizer, self.defaults, self.eos_ids = target.parts, target.tokenizer, target.defaults, target.eos_ids
        number = len(followers.lines) + 1
        said = f"{number} processes, each with a share of every block; sizes are one's"
        self.facts = replace(target.facts, reasons={**target.facts.reasons, "tensor parallel": said})
        self._numbers: dict[int, int] = {}  # id of a slot → its number on the lines
        self._next = count()

    def set_taps(self, layers: Sequence[int]) -> None:
        self._target.set_taps(layers)

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> Any:
        number = next(self._next)
        with self._followers.together("open", number, list(tokens), tenant, room):
            slot = self._target.open(tokens, tenant, room)
            self._numbers[id(slot)] = number
        return slot

    def extend(self, slots: Sequence[Any], tokens: Sequence[Tensor]) -> Scores:
        with self._followers.together("extend", self._named(slots), [ids.tolist() for ids in tokens]):
            return self._target.extend(slots, tokens)

    def score(self, slots: Sequence[Any], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        named = [(draft.tokens.tolist(), draft.parents) for draft in drafts]
        with self._followers.together("score", self._named(slots), roots.tolist(), named):
            return self._target.score(slots, roots, drafts)

    def rewind(self, slot: Any, kept: Sequence[int]) -> None:
        with self._followers.together("rewind", self._numbers[id(slot)], list(kept)):
            self._target.rewind(slot, kept)

    def truncate(self, slot: Any, length: int) -> None:
        with self._followers.together("truncate", self._numbers[id(slot)], length):
            self._target.truncate(slot, length)

    def close(self, slot: Any) -> None:
        number = self._numbers.get(id(slot))
        if number is not None:
            with self._followers.together("close", number):
                self._target.close(slot)
                del self._numbers[id(slot)]

    def fits(self, tokens: int) -> bool:
        return self._target.fits(tokens)

    def filled(self) -> float:
        return self._target.filled()

    def check(self) -> None:
        """Audit the cache; for tests and idle moments."""
        self._target.check()

    def _named(self, slots: Sequence[Any]) -> list[int]:
        return [self._numbers[id(slot)] for slot in slots]
