"""What is said of the machine beside every number."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from draftproof.bench import machine

ARM = ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp bf16\n"
       "CPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n")
AMD = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n"


@pytest.mark.parametrize(("kind", "text", "name", "has", "lacks"), [
    ("aarch64", ARM, "aarch64, implementer 0x41, part 0xd40", {"asimd", "asimddp", "bf16"}, {"i8mm", "sve"}),
    ("x86_64", AMD, "AMD EPYC", {"avx2"}, {"avx512f", "amx_tile"})])
def test_a_processor_is_named_with_the_flags_that_its_kind_can_have(
        kind: str, text: str, name: str, has: set[str], lacks: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: kind)
    found = machine.machine()
    assert found["cpu"] == name
    assert {flag for flag, there in found["cpu_flags"].items() if there} == has
    assert lacks <= {flag for flag, there in found["cpu_flags"].items() if not there}
    assert ("avx2" in found["cpu_flags"]) == (kind == "x86_64")
