"""The files that a command writes: none over what it reads or writes besides, and each whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Failure, OptionError

Named = tuple[str, "Path | None"]
"""What the user calls a file, and where it is; None: not given."""


def check_apart(inputs: Iterable[Named], outputs: Iterable[Named]) -> None:
    """Raises OptionError where an output is one of the inputs, or two outputs are one file; links are followed."""
    taken = [(name, file) for name, file in inputs if file is not None]
    for name, file in outputs:
        if file is None or (file.exists() and not file.is_file()):          # a device or a pipe loses nothing
            continue
        for other, known in taken:
            if file.resolve() == known.resolve() or (file.exists() and known.exists() and file.samefile(known)):
                raise OptionError(f"{name} {file}: that is the file of {other}, which would be lost; name another")
        taken.append((name, file))


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A new file beside `file`, which takes its place at the end; if the block raises, `file` stays as it was.

    Raises Failure if it cannot be written.
    """
    place = file.resolve()                                                  # of a link, what it names
    beside = not place.exists() or place.is_file()
    half = place.with_name(f".{place.name}.{os.getpid()}") if beside else place
    try:
        yield half
        if beside:
            if place.exists():
                shutil.copymode(place, half)
            os.replace(half, place)
    except OSError as error:
        raise Failure(f"{file}: {error.strerror or error}; expected a writable file in a writable folder") from error
    finally:
        if beside:
            half.unlink(missing_ok=True)
