"""What noise, distribution and choice cost per position. Prints a table; the last line is JSON. Times are medians and minima in ms.

    python benchmarks/noise.py [--rows 5] [--threads 2] [--repeat 31] [--device cuda]

On a GPU each time ends when the choices are on the host; *sorted whole* is there what laws with filters cost without a look at the
likeliest tokens alone (`core/probs.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftproof.core import noise, probs
from draftproof.core.choice import choose, perturbed_top
from draftproof.core.edits import Rows
from draftproof.core.probs import laws
from draftproof.types import Sampling

VOCABULARIES = (4_096, 32_000, 151_936)
OPTIONS = {
    "greedy": Sampling(temperature=0.0, top_p=1.0),
    "T=1": Sampling(temperature=1.0, top_p=1.0),
    "top_p=.95": Sampling(temperature=0.8, top_p=0.95),
    "top_k=50": Sampling(temperature=0.8, top_k=50, top_p=1.0),
    "all": Sampling(temperature=0.8, top_k=200, top_p=0.95, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.2,
                    frequency_penalty=0.1, logit_bias={5: 1.0}, bad_word_ids=((7, 8),), min_tokens=256),
}


def timed(work: Callable[[], object], repeat: int) -> dict[str, float]:
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return {"median": round(times[len(times) // 2], 4), "min": round(times[0], 4)}


def like_a_model(rows: int, vocabulary: int, peaked: bool) -> Tensor:
    """bf16 logits: most mass on few tokens, as trained models have it, or a flat normal row, the hard case for top-p."""
    generator = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(rows, vocabulary, generator=generator) * 3
    return (x + 16 * (torch.rand(rows, vocabulary, generator=generator) > 1 - 20 / vocabulary) if peaked else x).bfloat16()


def step(logits: Tensor, groups: list[Rows], keys: Tensor | None) -> list[int]:
    return choose(laws(logits, groups).sure(), keys).tolist()


def sorted_whole(*arguments: Any) -> list[int]:
    wide, probs._WIDE = probs._WIDE, 1 << 62
    try:
        return step(*arguments)
    finally:
        probs._WIDE = wide


def cells(rows: int, repeat: int, device: str) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for vocabulary in VOCABULARIES:
        keys = noise.key_rows([noise.key(1, 0, "text", p) for p in range(rows)], device)
        tokens = torch.arange(vocabulary, dtype=torch.int32, device=device)
        logq = torch.log_softmax(like_a_model(rows, vocabulary, True).to(device).float(), -1)
        work: dict[str, Callable[[], object]] = {
            "bits, 1 row": partial(noise.bits, keys[:1], tokens),
            "gumbel, 1 row": partial(noise.gumbel, keys[:1], tokens),
            "perturbed_top 1, 1 row": partial(perturbed_top, logq[:1], keys[:1], 1),
            f"perturbed_top 8, {rows} rows": partial(perturbed_top, logq, keys, 8),
        } if device == "cpu" else {}
        history = torch.randint(0, vocabulary, (1_200,), generator=torch.Generator().manual_seed(0)).tolist()
        paths = [tuple(history[:i]) for i in range(rows)]
        for name, sampling in OPTIONS.items():
            groups = [Rows(sampling, history, 1_000, paths, frozenset({2}))]
            for shape, peaked in (("", True), (" flat", False)):
                arguments = (like_a_model(rows, vocabulary, peaked).to(device), groups, None if sampling.greedy else keys)
                work[f"laws+choose {name}{shape}, {rows} rows"] = partial(step, *arguments)
                if device != "cpu" and sampling.top_p != 1 and not sampling.greedy:
                    work[f"sorted whole {name}{shape}, {rows} rows"] = partial(sorted_whole, *arguments)
        found[str(vocabulary)] = {name: timed(run, repeat) for name, run in work.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = cells(options.rows, options.repeat, options.device)
    print(f"{'ms: median (min)':50}" + "".join(f"{v:>20,}" for v in VOCABULARIES))
    for name in found[str(VOCABULARIES[0])]:
        row = (found[str(v)][name] for v in VOCABULARIES)
        print(f"{name:50}" + "".join(f"{c['median']:>11.3f} ({c['min']:.3f})" for c in row))
    print(json.dumps({"threads": options.threads, "device": options.device, "rows": options.rows, "torch": torch.__version__, "ms": found}))


if __name__ == "__main__":
    main()
