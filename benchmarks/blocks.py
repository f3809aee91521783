"""Sizes of the blocks of our products on one GPU, looked for where they run: in recorded blocks of a shape, one product at a time.

    python benchmarks/blocks.py --shape 8B --seconds 150                    # bfloat16; --eight: floats of eight bits
    TRITON_INTERPRET=1 python benchmarks/blocks.py --device cpu --shape tiny --layers 1 --tries 2 --turns 1  # no measurement

A product's neighbours decide what its blocks are worth: each kernel begins while the one before ends. So a few layers with random weights,
more than the second cache holds, are recorded with the small kernels between, and every try is a recording in which one product has other
sizes, timed in turn with the best so far. The largest product comes first; a try has to win by `--gain`. What is found belongs into
`blocks` of src/draftproof/gpu/calls.py, or `heading` where a product turns heads. Weights of sixteen bits are added up 16 inputs at a time,
ascending, whatever a block holds.
The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from operator import ne
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu import MODELS
from inflate import Shape
from lent import copy_bandwidth, finished, tell
from provenance import provenance
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.config import LoadConfig
from draftproof.models import rows as ours
from draftproof.models.attention import TILE
from draftproof.models.cache import PagePool
from draftproof.models.passes import Pass
from draftproof.models.passes import Path as Along

PAGE, CONTEXT = LoadConfig().page_tokens, 300
REPLAYS, TURNS = 10, 5
ROWS, OUTPUTS, INPUTS = (64, 128), (16, 32, 64, 128, 256), (64, 128, 256, 512, 1024)
STAGES, WARPS = (2, 3, 4, 5, 6, 8), (2, 4, 8)
MOST, SUMS = 220_000, 128           # bytes of a program, and sums of a thread


class Key(NamedTuple):
    """A product. heads: how wide they are where it turns them, too (`calls.heads`); 0 elsewhere."""

    outputs: int
    inputs: int
    gated: bool
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Stand:
    """Layers and what they are given."""

    layers: list[Any]
    x: torch.Tensor
    angles: torch.Tensor
    place: Pass
    pool: PagePool

    def run(self) -> torch.Tensor:
        x = self.x.clone()
        for layer in self.layers:
            x = layer.run(x, self.angles, self.place, self.pool)
        return x

    def matrices(self) -> dict[str, torch.Tensor]:
        """Of a layer's products, those that read most first."""
        found = {name: getattr(self.layers[0], name).matrix() for name in ("gate_up", "down", "qkv", "o")}
        return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))

    def products(self) -> dict[str, Key]:
        """As sizes are asked about them, by name."""
        from draftproof.gpu.calls import turns

        found = {name: Key(*matrix.shape, False) for name, matrix in self.matrices().items()}
        found["gate_up"] = Key(found["gate_up"].outputs // 2, found["gate_up"].inputs, True)
        layer = self.layers[0]
        if layer.head_norm is None and layer.qkv.takes(self.x) and turns(len(self.x), layer.head_dim):
            found["qkv"] = found["qkv"]._replace(heads=layer.head_dim)
        return found

    def weight_bytes(self) -> int:
        """Of a layer."""
        return sum(matrix.nbytes for matrix in self.matrices().values())


def stand(shape: Shape, layers: int, rows: int, eight: bool, device: torch.device) -> Stand:
    """So many layers of random weights, and `rows` rows behind a text of CONTEXT tokens."""
    config = LlamaConfig(hidden_size=shape.hidden, num_hidden_layers=layers, num_attention_heads=shape.heads, head_dim=shape.head_dim,
                         num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate, vocab_size=64)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    form = (ours.linear_of_eight if eight else ours.linear)(True)
    made = [ours.RowsLayer(layer, form) for layer in model.model.layers]
    position = list(range(CONTEXT, CONTEXT + rows))
    pages = -(-(CONTEXT + rows) // PAGE)
    pool = PagePool(PAGE, (pages + 1) * PAGE, device)
    table, at = [pool.take() for _ in range(pages)], torch.tensor(position, device=device)
    write = torch.tensor([table[i // PAGE] * PAGE + i % PAGE for i in position], device=device)
    place = Pass(torch.zeros(1, rows, dtype=torch.int64, device=device), at[None], position, write, None,
                 [Along(table, list(range(rows)))], PAGE, TILE)
    made[0].placed(place)
    x, angles = torch.randn(rows, shape.hidden, device=device), torch.randn(rows, 2, made[0].head_dim, device=device)
    return Stand(made, x.bfloat16(), angles.bfloat16(), place, pool)


@contextmanager
def sizes(chosen: dict[Key, Any]) -> Iterator[None]:
    """Products have these blocks, others what they always have."""
    from draftproof.gpu import calls

    blocks, heading = calls.blocks, calls.heading
    turned = {key.heads: found for key, found in chosen.items() if key.heads}
    calls.blocks = lambda rows, outputs, inputs, size, gated, *of_device: \
        chosen.get(Key(outputs, inputs, gated)) or blocks(rows, outputs, inputs, size, gated, *of_device)
    calls.heading = lambda dim, size: turned.get(dim) or heading(dim, size)
    try:
        yield
    finally:
        calls.blocks, calls.heading = blocks, heading


def usual(key: Key, rows: int, size: int) -> Any:
    """What a product of so many rows has; size: bytes of a weight."""
    from draftproof.gpu import calls

    return calls.heading(key.heads, size) if key.heads else calls.blocks(rows, key.outputs, key.inputs, size, key.gated)


def timer(there: Stand, chosen: dict[Key, Any]) -> Callable[[], float]:
    """What tells the seconds of a layer with these blocks: recorded once on a GPU, run as it is elsewhere."""
    device = there.x.device
    with torch.inference_mode(), sizes(chosen):
        there.run()                                                 # kernels are compiled
        finished(device)
        run, times = there.run, 1
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                there.run()
            run, times = graph.replay, REPLAYS

    def timed() -> float:
        with torch.inference_mode(), sizes(chosen):
            start = finished(device)
            for _ in range(times):
                run()
            return (finished(device) - start) / times / len(there.layers)

    return timed


def compared(one: Callable[[], float], other: Callable[[], float], turns: int) -> tuple[float, float, float]:
    """Medians of both, in turn, and of other ÷ one."""
    one(), other()
    pairs = [(one(), other()) for _ in range(turns)]
    return median(a for a, _ in pairs), median(b for _, b in pairs), median(b / a for a, b in pairs)


def tries(key: Key, size: int, count: int | None, rng: random.Random, rows: int = 1) -> list[Any]:
    """Blocks that fit, first those that differ least from what the product has, in random order."""
    from draftproof.gpu.calls import FEW, Blocks

    first = usual(key, rows, size)
    tiles = (first.rows,) if rows <= FEW else ROWS
    found = [b for b in map(Blocks._make, product(tiles, OUTPUTS, INPUTS, STAGES, WARPS)) if fits(b, key, size) and b != first]
    rng.shuffle(found)
    nearest(found, first)
    return found[:count]


def nearest(tries: list[Any], to: Any) -> None:
    """Sort them by how many of their sizes are others."""
    tries.sort(key=lambda blocks: sum(map(ne, blocks, to)))


def fits(blocks: Any, key: Key, size: int) -> bool:
    """A program's stages have room in shared memory, its sums in registers, and blocks end where the inputs do."""
    from draftproof.gpu.calls import stage

    two = key.gated or key.heads > 0                                # two blocks of outputs meet in a program
    sums = blocks.rows * blocks.outputs * (2 if two else 1) // (32 * blocks.warps)
    whole = key.inputs % blocks.inputs == 0 or blocks.inputs == min(INPUTS)
    return whole and key.heads // 2 % blocks.outputs == 0 and sums <= SUMS and blocks.stages * stage(blocks, size, two) <= MOST


def search(there: Stand, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Per product what was found, and a layer's time before and after."""
    end, rng = time.perf_counter() + args.seconds, random.Random(args.seed)
    size, chosen, said, rows = there.matrices()["o"].element_size(), {}, [], len(there.x)
    products = there.products()
    for i, (name, key) in enumerate(products.items()):
        until = time.perf_counter() + (end - time.perf_counter()) / (len(products) - i)     # a fair share of what is left
        had = usual(key, rows, size)
        best, clock, tried, first = had, timer(there, chosen), 0, None
        waiting = tries(key, size, args.tries, rng, rows)
        while waiting and time.perf_counter() < until:
            other = waiting.pop(0)
            try:
                another = timer(there, {**chosen, key: other})
            except Exception as error:                              # more registers or shared memory than there is
                tell(f"{name} {tuple(other)}: {type(error).__name__}")
                continue
            tried += 1
            now, then, ratio = compared(clock, another, args.turns)
            first = first or now
            if ratio < 1 - args.gain:
                best, clock, chosen = other, another, {**chosen, key: other}
                nearest(waiting, other)
                tell(f"{name} {tuple(other)}: a layer takes {then * 1e6:.1f} us, {ratio:.3f} of before")
        said.append({"product": name, **key._asdict(), "usual": list(had), "best": list(best), "tried": tried,
                     "before_us": (first or 0.0) * 1e6})
    before, after, ratio = compared(timer(there, {}), timer(there, chosen), 2 * args.turns)
    return [*said, {"product": "all", "before_us": before * 1e6, "after_us": after * 1e6, "ratio": ratio,
                    "gb_per_s": there.weight_bytes() / after / 1e9}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8B", choices=list(MODELS))
    parser.add_argument("--eight", action="store_true", help="weights are floats of eight bits")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=150, help="after which no try begins")
    parser.add_argument("--tries", type=int, help="of a product; all that fit where nothing is said")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--gain", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    there = stand(MODELS[args.shape].shape, args.layers, args.rows, args.eight, device)
    found = {"shape": args.shape, "eight": args.eight, "rows": args.rows, "copy_gb_per_s": copy_bandwidth(device),
             "products": search(there, args), "provenance": provenance()}
    for line in found["products"]:
        print(", ".join(f"{name} {value}" for name, value in line.items()), file=sys.stderr)
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
