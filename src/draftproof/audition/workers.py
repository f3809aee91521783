"""Running an audition's shares: here one after the other, or in processes of their own; and going on from a partial result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import IO, Any

from ..errors import DraftproofError, Failure
from .logs import Skipped
from .processes import context
from .run import Part, Result, Share, Work, log_size

FORMAT = "draftproof-audition-3"
POLL_S = 1.0
Progress = Callable[[Part], None]


def run(work: Work, processes: int = 1, partial: Path | None = None, progress: Progress | None = None) -> Result:
    """Count every arm over the whole log. Raises Failure, OptionError or what a drafter raises.

    processes: how many may work at a time, where no arm needs the target. partial: a file that keeps every block as it is
    counted; a run that was killed goes on from it.
    """
    result, done = Result(work.arms), set[tuple[int, int]]()
    with _kept(partial, work) as (known, keep):
        for part in known:
            result.add(part)
            done.add((part.arm, part.block))
        together = processes > 1 and all(arm.copies for arm in work.arms)
        shares = _shares(work, processes if together else 1, done)
        for part in _parallel(work, shares, processes, result) if together else _serial(work, shares, result):
            result.add(part)
            keep(part)
            if progress is not None:
                progress(part)
    return result


def _shares(work: Work, processes: int, done: set[tuple[int, int]]) -> list[Share]:
    """As many of every group of arms as there are processes, so that all work to the end, however unlike the drafters are."""
    return [Share(group, index, processes, frozenset(done)) for group in work.groups() for index in range(processes)]


def _serial(work: Work, shares: list[Share], result: Result) -> Iterator[Part]:
    for share in shares:
        skipped = Skipped()
        yield from work.parts(share, skipped)
        result.skipped = skipped


def _parallel(work: Work, shares: list[Share], processes: int, result: Result) -> Iterator[Part]:
    place = context()
    queue: Any = place.Queue()
    waiting, running, ended = list(reversed(shares)), dict[int, Any](), 0
    try:
        while ended < len(shares):
            while waiting and len(running) < processes:
                number, share = len(shares) - len(waiting), waiting.pop()
                running[number] = place.Process(target=_worker, args=(work, share, number, queue), daemon=True)
                running[number].start()
            try:
                kind, number, found = queue.get(timeout=POLL_S)
            except Empty:
                dead = [process.exitcode for process in running.values() if process.exitcode]
                if dead:
                    raise Failure(f"a worker of the audition ended with code {dead[0]} and without a word; "
                                  "try again with --processes 1") from None
                continue
            if kind == "part":
                yield found
            elif kind == "error":
                raise found
            else:
                result.skipped = found
                running.pop(number).join()
                ended += 1
    finally:
        for process in running.values():
            process.terminate()
            process.join()
        queue.close()


def _worker(work: Work, share: Share, number: int, queue: Any) -> None:
    import torch

    torch.set_num_threads(1)
    skipped = Skipped()
    try:
        for part in work.parts(share, skipped):
            queue.put(("part", number, part))
    except DraftproofError as error:
        queue.put(("error", number, error))
    except Exception as error:
        queue.put(("error", number, Failure(f"a worker of the audition failed: {type(error).__name__}: {error}")))
    else:
        queue.put(("end", number, skipped))


@contextmanager
def _kept(file: Path | None, work: Work) -> Iterator[tuple[list[Part], Callable[[Part], None]]]:
    """(parts of an earlier run, how to keep another)."""
    if file is None:
        yield [], lambda part: None
        return
    header = (json.dumps({"format": FORMAT, "log": Path(work.log).name, "bytes": log_size(work.log), "target": work.version,
                          "arms": [[a.spec, a.shown_depth] for a in work.arms]}) + "\n").encode()
    parts = _known(file, header)
    # Unbuffered: what did not fit is not tried again when the file is closed.
    with file.open("ab", buffering=0) as stream:
        if stream.tell() == 0:
            _line(file, stream, header)
        yield parts, lambda part: _line(file, stream, (json.dumps(part.as_json()) + "\n").encode())


def _line(file: Path, stream: IO[bytes], line: bytes) -> None:
    try:
        while line:
            line = line[stream.write(line):]            # a disk that fills takes a part first
    except OSError as error:
        raise Failure(f"{file}: {error.strerror}; expected room for what is counted; the same command goes on from there") from None


def _known(file: Path, header: bytes) -> list[Part]:
    """What a partial result has; a last line cut short by a kill is dropped from it. Raises Failure, and leaves the file as it is, if it
    is of something else."""
    if not file.exists():
        return []
    parts: list[Part] = []
    with file.open("rb+") as stream:
        first = stream.readline(len(header))
        if not header.startswith(first):            # a part of it was cut short by a kill, too
            raise Failure(f"{file} is no partial result of this audition (found {first.decode(errors='replace').strip()!r}, expected "
                          f"{header.decode().strip()!r}); delete it, or name another file")
        whole = len(first) if first == header else 0
        for number, line in enumerate(stream, 2):
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            try:
                parts.append(Part.from_json(record))
            except (KeyError, TypeError, AttributeError) as error:
                raise Failure(f"{file}, line {number}: no part of an audition ({type(error).__name__}: {error}); "
                              "delete the line, or the file") from None
            whole += len(line)
        stream.truncate(whole)
    return parts
