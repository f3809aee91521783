"""What Triton's compiler makes of our kernels for a GPU that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
MULTIPLIES = {"sixteen": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
              "eight": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"}


def test_kernels_compile_and_products_keep_weights_on_their_way() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, Path(__file__).with_name("compiled.py")], env=clean, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    by_tiles = found.pop("tiles")
    assert all(one["linked"] == 2 for one in found.values()), "each says when its successor may begin, and waits for what stood before it"
    buffers = {"product": 2 * 256 * (32 * 2 + 16 * 2), "gated": 2 * 256 * (2 * 32 * 2 + 16 * 2), "eight": 2 * 256 * (32 + 16 * 2)}
    for name, needed in buffers.items():
        assert found[name]["copies"] and found[name]["shared"] >= needed, "stages are copied while others are multiplied"
        assert found[name]["loops"] == 1, "blocks of one program are one loop: the next one's weights come while one is finished"
    for kind, each in by_tiles.items():
        one, *more = each
        for several in more:
            for alone, product in zip(one, several, strict=True):
                assert product["multiplies"] == alone["multiplies"] == [MULTIPLIES[kind]], "one instruction, else other bits"
                assert product["orders"] == alone["orders"] and len(alone["orders"]) == 1, "inputs in one order, else other bits"
                assert product["copies"] and product["linked"] == 2 and not product["spilled"]
