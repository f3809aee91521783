"""What stands beside every number: the machine, the versions and the command that made it."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftproof.bench.machine import machine, versions
from draftproof.bench.profile import read_bandwidth


def revision() -> str:
    """The commit of this checkout, with a + if files differ from it; "unknown" outside a repository."""
    def git(*words: str) -> str:
        out = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
        return out.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def digest(folder: str | Path) -> str:
    """16 hex digits over the names and contents of a model folder's weights and configuration."""
    total = hashlib.sha256()
    for path in sorted(p for p in Path(folder).iterdir() if p.suffix in (".safetensors", ".json")):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def command(words: Sequence[str]) -> str:
    """What was typed. Of absolute paths only the last part: a published page does not say where somebody keeps things."""
    return shlex.join([Path(sys.executable).name, *(re.sub(r"(^|=)/.*/(?=.)", r"\1.../", word) for word in words)])


def provenance() -> dict[str, Any]:
    """`machine`, `versions` and `command` of a result. `load_average` tells whether others were using the machine."""
    facts = machine()
    facts["load_average"] = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    facts["read_gb_per_s"] = round(read_bandwidth(torch.device("cpu")) / 1e9, 1)
    return {"machine": facts, "versions": {**versions(), "revision": revision()},
            "command": command(sys.argv), "date": time.strftime("%Y-%m-%d")}
