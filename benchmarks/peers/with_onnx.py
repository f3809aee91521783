"""onnxruntime-genai in peers.py: its builder's float32 model, the only one without quantization for the CPU. Plain decoding alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from worker import Accepted, Generate, Job, Told, main


def convert(source: Path, out: Path, bits: int) -> None:
    sys.argv = ["builder", "-i", str(source), "-o", str(out), "-p", "fp32", "-e", "cpu", "-c", str(out / "cache")]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")        # here, so that its own words are the last if it fails


def load(job: Job) -> Generate:
    import onnxruntime_genai as genai

    config = genai.Config(job["target"])
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": job["threads"]}}}}))
    model = genai.Model(config)

    def generate(request: Job, told: Told) -> tuple[list[list[int]], Accepted]:
        prompt, = request["prompts"]                                 # several would have to be of one length
        end = len(prompt) + request["max_tokens"]
        options = {"max_length": end, "min_length": end, "do_sample": bool(request["temperature"])}     # its builder's default is to sample
        if request["temperature"]:
            options.update(temperature=request["temperature"], top_k=0, top_p=1.0, random_seed=request["seeds"][0])
        params = genai.GeneratorParams(model)
        params.set_search_options(**options)
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
            told(0, 1)
        return [[int(i) for i in generator.get_sequence(0)[len(prompt):]]], None

    return generate


if __name__ == "__main__":
    main(load, ("onnxruntime-genai", "onnxruntime"), convert)
