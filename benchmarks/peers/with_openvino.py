"""OpenVINO GenAI in peers.py: weights exported as fp16, computed in what OpenVINO chooses for this CPU. A process for each arm. Its other
drafter is prompt lookup.

Both arms get the same scheduler: without one, plain generation keeps prefixes, and the first repeat of a prompt would pay for the others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from worker import Accepted, Arrived, Generate, Job, main


def convert(source: Path, out: Path, bits: int) -> None:
    tools = Path(sys.executable).parent
    subprocess.run([tools / "optimum-cli", "export", "openvino", "--model", source, "--task", "text-generation-with-past",
                    "--weight-format", *(["fp16"] if bits == 16 else [f"int{bits}", "--group-size", "64"]), out], check=True)
    subprocess.run([tools / "convert_tokenizer", source, "--with-detokenizer", "-o", out], check=True)


def load(job: Job) -> Generate:
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, 1, False         # GB, requests
    scheduler.max_num_batched_tokens = 1 << 20          # as without one: a prompt is read at once
    threads = {"INFERENCE_NUM_THREADS": job["threads"]}
    lookup = job["drafter"] == "lookup"
    more = {"prompt_lookup": True} if lookup else {"draft_model": genai.draft_model(job["draft"], "CPU", **threads)} if job["depth"] else {}
    pipe = genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **threads, **more)

    class Told(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, arrived: Arrived) -> None:
            super().__init__()
            self.arrived = arrived

        def write(self, tokens: int | list[int]) -> genai.StreamingStatus:
            self.arrived(1 if isinstance(tokens, int) else len(tokens))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """There is nothing to put away."""

    def generate(request: Job, arrived: Arrived) -> tuple[list[int], Accepted]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request["max_tokens"], True
        if request["depth"]:
            config.num_assistant_tokens = request["depth"]
            if lookup:
                config.max_ngram_size = 3
        if request["temperature"]:
            config.do_sample, config.temperature, config.rng_seed = True, request["temperature"], request["seed"]
        ids = np.array([request["prompt_ids"]], dtype=np.int64)
        out = pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), config, Told(arrived))
        metrics = out.extended_perf_metrics if request["depth"] else None
        return list(out.tokens[0]), metrics.get_num_accepted_tokens() if metrics else None

    return generate


if __name__ == "__main__":
    main(load, ("openvino-genai", "openvino", "optimum-intel"), convert)
