"""Our kernels through Triton's compiler and the assembler that it brings, for a GPU that is not here: what they became, as JSON.
Run by test_compile.py in a process of its own, for the tests' own interprets kernels."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from draftproof.gpu import calls, kernels

ROOM = {80: 166_912, 90: 232_448, 120: 101_376}      # compute capability → bytes of shared memory that a program may have there
HALF, WIDE, NUMBER, PLACES = "*bf16", "*fp32", "i32", "*i64"
PRODUCT = {"x": HALF, "weight": HALF, "steps": HALF, "bias": HALF, "out": HALF, "rows": NUMBER}
EIGHT = {**PRODUCT, "x": "*fp16", "weight": "*fp8e4nv", "steps": WIDE, "bias": "*fp16", "out": "*fp16"}
SIZES = {"OUTPUTS": 1024, "INPUTS": 512, "BM": 16, "BN": 32, "BK": 256, "BIASED": True, "ADDED": True}
NORM = {"x": HALF, "weight": HALF, "out": HALF, "eps": "fp32"}
TURN = {"heads": HALF, "angles": HALF, "factors": HALF, "eps": "fp32", "write_to": PLACES, "write_from": PLACES, "keys": HALF,
        "values": HALF, "rows": NUMBER, "writes": NUMBER}
PLACED = {"angles": HALF, "write_to": PLACES, "keys": HALF, "values": HALF}
ATTEND = {"heads": HALF, "keys": HALF, "values": HALF, "position": PLACES, "take": PLACES, "table": PLACES, "sight": PLACES,
          "out": WIDE, "logs": WIDE, "scale": "fp32", "window": NUMBER, "rows": NUMBER, "wide": NUMBER, "most": NUMBER, "tiles": NUMBER}
MOVE = {"stores": PLACES, "source": PLACES, "target": PLACES, "moves": NUMBER, "kind": HALF}
MERGE = {"parts_out": WIDE, "logs": WIDE, "out": HALF, "rows": NUMBER, "wide": NUMBER, "parts": NUMBER}


def made(name: str, types: dict[str, str], stages: int = 3, warps: int = 4, target: int = 90, **sizes: Any) -> dict[str, Any]:
    """Bytes of shared memory, how often it waits for or calls another kernel, copies into shared memory, lines asked for before it waits,
    loops; which instructions multiply, and in which order of inputs."""
    linked = (target // 10, 0) >= calls.LINKS
    kernel, sizes = getattr(kernels, name), {**sizes, "LINKED": linked}
    place = kernel.arg_names.index
    signature = {argument: "constexpr" if argument in sizes else types[argument] for argument in kernel.arg_names}
    aligned = {(place(argument),): [["tt.divisibility", 16]] for argument, kind in types.items() if kind[0] == "*"}
    source = ASTSource(kernel, signature, {(place(argument),): size for argument, size in sizes.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, **({"launch_pdl": True} if linked else {})}
    found = build(source, target=GPUTarget("cuda", target, 32), options=options)
    text = found.asm["ptx"]
    assert len(found.asm["cubin"]) and found.metadata.shared <= ROOM[target], (name, target, found.metadata.shared)
    graph = found.asm["ttgir"]
    return {"shared": found.metadata.shared, "linked": text.count("griddepcontrol"), "copies": text.count("cp.async.cg"),
            "early": text.partition("griddepcontrol.wait")[0].count("prefetch.global.L2"),
            "loops": graph.count("scf.for"), "multiplies": sorted(set(re.findall(r"(?:wg)?mma\.\S+", text))),
            "orders": sorted(set(re.findall(r"kWidth = \d+", graph))), "spilled": spilled(text) if target == 90 else 0}


def spilled(text: str) -> int:
    """Bytes of registers that the assembler finds no room for."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "kernel.ptx"
        source.write_text(text)
        said = subprocess.run([get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))],
                              capture_output=True, text=True, check=True).stderr
    return int(re.findall(r"(\d+) bytes spill stores", said)[0])


def products(rows: int, eight: bool, target: int = 90) -> list[dict[str, Any]]:
    """The 8B shape's products of so many rows, with the blocks that they have: gated, down and o, q k v, and the last one turned."""
    found, size, room = [], 1 if eight else 2, ROOM[target]
    for outputs, inputs, gated in ((14336, 4096, True), (4096, 14336, False), (6144, 4096, False)):
        shape = calls.fitted(calls.blocks(rows, outputs, inputs, size, gated, large=target < 100), room, size, gated)
        found.append(made("product", EIGHT if eight else PRODUCT, shape.stages, shape.warps, target, OUTPUTS=outputs, INPUTS=inputs,
                          BM=shape.rows, BN=shape.outputs, BK=shape.inputs, EIGHT=eight, BIASED=False, ADDED=not gated, GATED=gated))
    if rows <= calls.FEW:
        shape = calls.fitted(calls.heading(128, size), room, size, True)
        types = {**(EIGHT if eight else PRODUCT), "out": HALF, "bias": HALF}
        found.append(made("heads", {**types, **PLACED}, shape.stages, shape.warps, target, HEADS=32, KV=8, DIM=128, INPUTS=4096,
                          BM=shape.rows, BN=shape.outputs, BK=shape.inputs, EIGHT=eight, BIASED=False))
    return found


def small(target: int = 90) -> dict[str, dict[str, Any]]:
    """The other kernels."""
    return {
        "gate": made("gate", {"both": HALF, "out": HALF}, target=target, WIDTH=1500, BLOCK=1024, HALVES=True),
        "norm": made("norm", NORM, target=target, WIDTH=512, BLOCK=512, HALVES=False),
        "turn": made("turn", TURN, target=target, HEADS=8, KV=2, DIM=64, HALF=32, SOME=8, NORMED=True),
        "attend": made("attend", ATTEND, target=target, STRIDE=768, KV=2, GROUP=4, DIM=64, DEEP=64, PAGE=128, BLOCK=128, SPLIT=1,
                       QUERIES=32, WINDOWED=True, SIGHTED=True),
        "merge": made("merge", MERGE, target=target, STRIDE=512, DIM=64, DEEP=64, SOME=16),
        "move": made("move", MOVE, target=target, WIDTH=1024, BLOCK=1024, SOME=4),
    }


if __name__ == "__main__":
    print(json.dumps({
        "product": made("product", PRODUCT, **SIZES, EIGHT=False, GATED=False),
        "gated": made("product", PRODUCT, **SIZES, EIGHT=False, GATED=True),
        "eight": made("product", EIGHT, **SIZES, EIGHT=True, GATED=False),
        **small(),
        "tiles": {kind: {rows: products(rows, kind == "eight") for rows in (16, 64, 128, 320, 576)} for kind in ("sixteen", "eight")},
        "elsewhere": {target: [*small(target).values(), *products(16, False, target), *products(320, False, target),
                               *(products(16, True, target) if target >= 89 else ())] for target in ROOM if target != 90},
    }))
