"""Runs inside vLLM's own environment: an exported command line is read by vLLM's own parser, started, and asked for a text.

Standard input: {"command": argv, "prompt": [ids], "tokens": n}. Last line of standard output: {"ids", "drafted", "accepted"}.
One command a process: the CPU build does not start twice in one.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1",
                  HF_HUB_OFFLINE="1")
SMALL = ("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching")


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    argv = job["command"]
    assert argv[:2] == ["vllm", "serve"]
    args = EngineArgs.from_cli_args(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", *argv[2:], *SMALL]))
    args.disable_log_stats = False
    llm = LLM.from_engine_args(args)
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], min_tokens=job["tokens"], ignore_eos=True)
    (done,) = llm.generate([{"prompt_token_ids": job["prompt"]}], sampling, use_tqdm=False)
    steps = done.outputs[0].spec_decode_metrics
    print(json.dumps({"ids": list(done.outputs[0].token_ids), "drafted": steps.num_draft_tokens, "accepted": sum(steps.per_step_accepted)}))


if __name__ == "__main__":
    main()
