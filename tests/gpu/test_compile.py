"""What Triton's compiler makes of our kernels for a GPU that is not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FEW = {"sixteen": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
       "eight": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32"}
MANY = {**FEW, "sixteen": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"}      # which gave the same bits (docs/log.md)


def test_kernels_compile_and_products_keep_weights_on_their_way() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, Path(__file__).with_name("compiled.py")], env=clean, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    by_tiles, elsewhere = found.pop("tiles"), found.pop("elsewhere")
    assert all(one["linked"] == 2 for one in found.values()), "each says when its successor may begin, and waits for what stood before it"
    buffers = {"product": 2 * 256 * (32 * 2 + 16 * 2), "gated": 2 * 256 * (2 * 32 * 2 + 16 * 2), "eight": 2 * 256 * (32 + 16 * 2)}
    for name, needed in buffers.items():
        assert found[name]["copies"] and found[name]["shared"] >= needed, "stages are copied while others are multiplied"
        assert found[name]["loops"] == 1
    assert [name for name, one in found.items() if one["early"]] == ["attend"], "keys and values are on their way before it waits"
    for kind, each in by_tiles.items():
        for rows, products in each.items():
            for product in products:
                multiplies = [name for name in product["multiplies"] if "mma" in name and name.endswith(("f32", "bf16", "f16"))]
                assert product["orders"] in ([], ["kWidth = 2" if kind == "sixteen" else "kWidth = 4"]), "else other bits"
                assert len(multiplies) == 1 and re.fullmatch((FEW if int(rows) <= 16 else MANY)[kind], multiplies[0])
                assert product["copies"] and product["loops"] == 1 and product["linked"] == 2 and not product["spilled"]
    for target, each in elsewhere.items():
        assert len(each) >= 12 and {one["linked"] for one in each} == {2 if int(target) >= 90 else 0}
