"""OUT, where a drafter is published, and OUT.training beside it, where it is made. Nothing is deleted that a run did not put there.

    OUT.training/candidate    the drafter as it is now       OUT.training/replaced    what stood in OUT, until the new one is there
    OUT.training/lock         held while a run is at work
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from ..errors import Failure, OptionError, first_line
from . import card

try:
    import fcntl
except ImportError:                   # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
         "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja", "model.safetensors.index.json", card.FILE}
MODELS = ("model", "pard")            # whole language models
PARTS = 32                            # of a file of weights, that are read to tell it from another


def lock(file: IO[bytes]) -> bool:
    """Whether this process alone has the open file now; it has until the file is closed."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait(file: IO[bytes]) -> None:
    """Until the file is this process's."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def written(file: Path, then: str = "The same command goes on where it was") -> Iterator[None]:
    """What goes wrong while `file` is written is told with its name, and what to do `then`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Failure(f"{file} could not be written ({first_line(error)}); expected room on the disk and the right to write there. "
                      f"{then}") from None


def identity(model: str | Path) -> str:
    """A name for a model's weights: of a folder its name and a hash of parts of its files, so that another place is still the same."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return str(model)
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            for part in range(PARTS):
                stream.seek(size * part // PARTS)
                found.update(stream.read(64 << 10))
        found.update(str(size).encode())
    return f"{folder.resolve().name} {found.hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Place:
    """Both folders, as absolute paths without links."""

    out: Path

    @classmethod
    def of(cls, out: Path, target: str | None) -> Place:
        """Raises OptionError where OUT is the target's folder or the current one."""
        real = out.expanduser().resolve()
        if real == Path.cwd().resolve():
            raise OptionError(f"--out {out} is the folder that the command runs in, and publishing replaces it; name another one")
        if target is not None and real == Path(target).expanduser().resolve():
            raise OptionError(f"--out {out} is the target's own folder; name another one")
        return cls(real)

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".training")

    @property
    def candidate(self) -> Path:
        return self.work / "candidate"

    @property
    def replaced(self) -> Path:
        return self.work / "replaced"

    @property
    def taken(self) -> bool:
        return self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))

    def check(self, kind: str) -> None:
        """Raises OptionError unless OUT is absent, empty, or holds a drafter and nothing else."""
        if not self.taken:
            return
        found = [self.out.name] if not self.out.is_dir() else [f.name for f in self.out.iterdir() if not _of_a_drafter(f)]
        if found or not (self.out / "config.json").is_file():
            raise OptionError(f"--out {self.out} holds {', '.join(sorted(found)[:3]) or 'no config.json'}{' …' if len(found) > 3 else ''}, "
                              "and publishing replaces the folder; expected a new or an empty one, or a drafter and nothing else")
        if self.standing() == "model" and kind not in MODELS:
            raise OptionError(f"--out {self.out} holds a language model, which publishing would replace by a {kind} head; name another one")

    def standing(self) -> str | None:
        """The kind of drafter that stands in OUT; None if there is none. Raises LoadError if it is none that is known."""
        from ..models.heads.detect import detect
        from ..models.heads.files import read_files

        return detect(read_files(self.out)) if self.taken else None

    @contextmanager
    def held(self, kind: str) -> Iterator[None]:
        """The working folder is this run's alone, and OUT is as it was before a publication that was cut short. Raises as `check` does."""
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("ab") as file:
            if not lock(file):
                raise Failure(f"another run works in {self.work}; wait for its end, or name another --out")
            if self.replaced.is_dir():
                if self.taken:
                    shutil.rmtree(self.replaced)
                else:
                    os.replace(self.replaced, self.out)
            self.check(kind)
            yield

    def save(self, write: Callable[[Path], None]) -> None:
        """A new candidate, in the old one's place when it is whole: nobody ever loads half of it."""
        part = self.work / "candidate.part"
        shutil.rmtree(part, ignore_errors=True)
        with written(part):
            write(part)
        swap(part, self.candidate, self.work / "candidate.old")

    def same(self) -> bool:
        """Whether the candidate's weights stand in OUT already."""
        new, old = ({f.name: f.read_bytes() for f in folder.glob("*.safetensors")} for folder in (self.candidate, self.out))
        return new == old

    def publish(self, kind: str) -> None:
        """Move the candidate to OUT; what stood there is gone only when the new one is in its place."""
        self.check(kind)                             # hours have passed
        with written(self.out):
            swap(self.candidate, self.out, self.replaced)


def swap(new: Path, folder: Path, old: Path) -> None:
    """Move `new` to `folder`; what stood there waits in `old` until it has come."""
    if folder.exists() and any(folder.iterdir()):
        shutil.rmtree(old, ignore_errors=True)       # what a run that was killed right here had left of it
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _of_a_drafter(file: Path) -> bool:
    ours = file.name == card.PAGE and file.with_name(card.FILE).is_file()           # else a page that somebody wrote
    return file.is_file() and (file.name in FILES or file.suffix == ".safetensors" or ours)
