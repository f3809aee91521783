"""OpenVINO GenAI in peers.py: weights exported as fp16, computed in what OpenVINO chooses for this CPU. A process for each arm. Its other
drafter is prompt lookup.

Both arms get the same scheduler: without one, plain generation keeps prefixes, and the first repeat of a prompt would pay for the others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from worker import Accepted, Generate, Job, Told, in_turn, main


def convert(source: Path, out: Path, bits: int) -> None:
    tools = Path(sys.executable).parent
    subprocess.run([tools / "optimum-cli", "export", "openvino", "--model", source, "--task", "text-generation-with-past",
                    "--weight-format", *(["fp16"] if bits == 16 else [f"int{bits}", "--group-size", "64"]), out], check=True)
    subprocess.run([tools / "convert_tokenizer", source, "--with-detokenizer", "-o", out], check=True)


def load(job: Job) -> Generate:
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, job["users"], False         # GB, requests
    scheduler.max_num_batched_tokens = 1 << 20          # as without one: a prompt is read at once
    threads = {"INFERENCE_NUM_THREADS": job["threads"]}
    lookup = job["drafter"] == "lookup"
    more = {"prompt_lookup": True} if lookup else {"draft_model": genai.draft_model(job["draft"], "CPU", **threads)} if job["depth"] else {}

    class Teller(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, told: Told) -> None:
            super().__init__()
            self.told = told

        def write(self, tokens: int | list[int]) -> genai.StreamingStatus:
            self.told(0, 1 if isinstance(tokens, int) else len(tokens))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """There is nothing to put away."""

    def asked(request: Job, text: int) -> tuple[ov.Tensor, genai.GenerationConfig]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request["max_tokens"], True
        if request["depth"]:
            config.num_assistant_tokens = request["depth"]
            if lookup:
                config.max_ngram_size = 3
        if request["temperature"]:
            config.do_sample, config.temperature, config.rng_seed = True, request["temperature"], request["seeds"][text]
        return ov.Tensor(np.array([request["prompts"][text]], dtype=np.int64)), config

    def one(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        ids, config = asked(request, 0)
        out = pipe.generate(genai.TokenizedInputs(ids, ov.Tensor(np.ones_like(ids.data))), config, Teller(told))
        metrics = out.extended_perf_metrics if request["depth"] else None
        return [list(out.tokens[0])], metrics.get_num_accepted_tokens() if metrics else None

    def many(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        texts: list[list[int]] = [[] for _ in request["prompts"]]
        running: dict[int, genai.GenerationHandle] = {}

        def begin(text: int) -> None:
            running[text] = pipe.add_request(text, *asked(request, text))

        def step() -> list[int]:
            pipe.step()
            for text, handle in running.items():
                new = handle.read()[0].generated_ids if handle.can_read() else []
                texts[text] += new
                told(text, len(new))
            ended = [text for text, handle in running.items() if handle.get_status() != genai.GenerationStatus.RUNNING]
            for text in ended:
                del running[text]
            return ended

        in_turn(request, told, begin, step)
        return texts, None

    if job["users"] == 1:
        pipe = genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **threads, **more)
        return one
    pipe = genai.ContinuousBatchingPipeline(job["target"], genai.Tokenizer(job["target"]), scheduler, "CPU", **threads, **more)
    return many


if __name__ == "__main__":
    main(load, ("openvino-genai", "openvino", "optimum-intel"), convert)
