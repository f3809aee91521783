"""Runs inside vLLM's own environment: one job (JSON on standard input) in, one result (last line of standard output) out.

job     {"target": folder, "speculative": {…} | null, "prompts": [[ids]], "tokens": n}
result  {"version", "outputs": [[ids]], "steps": [[accepted per step]] | null, "drafts", "accepted", "drafted", "warnings": [lines]}
"""

from __future__ import annotations

import json
import logging
import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1",
                  HF_HUB_OFFLINE="1")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    job = json.load(sys.stdin)
    import vllm
    from vllm import LLM, SamplingParams

    kept = Kept()
    logging.getLogger("vllm").addHandler(kept)
    llm = LLM(model=job["target"], dtype="bfloat16", max_model_len=1024, max_num_seqs=8, enable_prefix_caching=False,
              disable_log_stats=False, enforce_eager=True, speculative_config=job["speculative"],
              **({"per_request_spec_decode_metrics": "detailed"} if job["speculative"] else {}))
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], min_tokens=job["tokens"], ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    counters = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    steps = [getattr(getattr(o.outputs[0], "spec_decode_metrics", None), "per_step_accepted", None) for o in done]
    print(json.dumps({
        "version": vllm.__version__, "outputs": [list(o.outputs[0].token_ids) for o in done],
        "steps": None if any(s is None for s in steps) else steps,
        "drafts": counters.get("vllm:spec_decode_num_drafts"), "drafted": counters.get("vllm:spec_decode_num_draft_tokens"),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens"), "warnings": kept.lines}))


if __name__ == "__main__":
    main()
