"""What the machine is: facts that stand beside every number. Reads the system; changes nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__

# What decides the speed of a language model on a CPU: matrix units, bf16 dot products, and the width of vectors.
CPU_FLAGS = ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512f", "avx512_vnni", "avx2")
ARM_FLAGS = ("bf16", "i8mm", "sve", "asimddp", "asimd")
CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Package → version, of what changes results or speed; "absent" if it is not installed."""
    found = {"draftproof": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def machine() -> dict[str, Any]:
    """System, CPU model and flags, cores, memory in bytes, threads of torch, and the GPUs."""
    model, flags = _cpu()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": model,
        "cpu_flags": {flag: flag in flags for flag in (ARM_FLAGS if platform.machine().lower() in ("aarch64", "arm64") else CPU_FLAGS)},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def usable_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> tuple[str, frozenset[str]]:
    """Its name, on ARM the numbers that stand for it, and its flags."""
    if not CPUINFO.exists():
        return platform.processor() or platform.machine(), frozenset()
    lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, colon, value in lines if colon}
    numbers = "".join(f", {part} {fields[f'CPU {part}']}" for part in ("implementer", "part") if f"CPU {part}" in fields)
    return (fields.get("model name", platform.machine() + numbers),
            frozenset((fields.get("flags") or fields.get("Features") or "").split()))


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
