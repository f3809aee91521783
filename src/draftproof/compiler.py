"""The kernels (kernels/), made into a library by the machine's own compiler and kept in the user's cache folder, by what it was made of."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).with_name("kernels")
FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC"]
PATIENCE = 600  # seconds for the compiler: a dozen when it has a core for itself, minutes where many share it
ELSEWHERE = "name one that can be in the variable XDG_CACHE_HOME"
OPENMP = ("libgomp", "libiomp5", "libomp")
MAPS, CPUINFO = Path("/proc/self/maps"), Path("/proc/cpuinfo")
TELLING = ("flags", "model name", "Features", "CPU implementer", "CPU variant", "CPU part")  # lines of the latter; the last four are ARM's


class Unavailable(Exception):
    """Why there is no compiled library."""


def built() -> Path:
    """The library; made, in a dozen seconds, unless it is there. Raises Unavailable, OSError or subprocess.SubprocessError."""
    openmp, compiler = _openmp(), _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE).stdout
    if b"clang" in version.lower():  # as `cc` is in some distributions
        raise Unavailable(f"{shlex.join(compiler)} is clang; expected GCC, which the variable CC can name")
    return _build(compiler, version, openmp)


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CC", ""))
    found = asked or [name for name in ("gcc", "cc") if shutil.which(name)][:1]
    if not found:
        raise Unavailable("no C compiler found (gcc, or cc if it is GCC; the variable CC names another)")
    return found


def _openmp() -> str:
    """The OpenMP library that torch runs in this process: a second one would bring threads of its own."""
    if not MAPS.exists():
        raise Unavailable(f"they are made on Linux, this is {platform.system()}; a container or virtual machine with Linux has them")
    mapped = {line.split(None, 5)[-1].strip() for line in MAPS.read_text().splitlines()}
    found = sorted(path for path in mapped if Path(path).name.startswith(OPENMP))
    if not found:
        raise Unavailable("torch runs without an OpenMP library that this process could find")
    return found[0]


def _build(compiler: list[str], version: bytes, openmp: str) -> Path:
    sources = sorted(KERNELS.iterdir())
    made_of = [*(source.read_bytes() for source in sources), version, openmp.encode(), " ".join([*compiler[1:], *FLAGS]).encode(),
               _processor().encode()]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:32] + ".so"
    kept = _folder() / name
    if kept.exists():
        return kept
    if not os.access(kept.parent, os.W_OK):
        raise Unavailable(f"{kept.parent} cannot be written; {ELSEWHERE}")
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # another process may be building the same
        def step(*words: str) -> None:
            made = subprocess.run([*compiler, *words], capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
            if made.returncode:
                said = (made.stderr.splitlines() or ["no message"])[0]
                raise Unavailable(f"{shlex.join(compiler)} stopped with {made.returncode}: {said}")

        parts = [source for source in sources if source.suffix == ".c"]
        with ThreadPoolExecutor(os.cpu_count()) as each:
            list(each.map(lambda part: step(*FLAGS, "-c", str(part)), parts))
        # -Bsymbolic: what the files call of each other is theirs, whatever else in the process has the name
        step("-shared", "-Wl,-Bsymbolic", *(f"{part.stem}.o" for part in parts), openmp, "-lm", "-o", name)
        os.replace(f"{folder}/{name}", kept)
    return kept


def _folder() -> Path:
    """The one that keeps the library. Raises Unavailable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftproof"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:            # a user without a home, as in many containers
        raise Unavailable(f"no folder to keep them in: {error}; {ELSEWHERE}") from error
    return folder


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(TELLING)})])
