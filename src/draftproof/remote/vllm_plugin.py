"""A stat logger for vLLM (entry point group `vllm.stat_logger_plugins`): what its own counters leave out, beside them on /metrics.

vLLM counts drafted steps only, and per position only what was accepted. Here: steps of sequences with and without a draft, tokens
that they emitted, drafted tokens per position (so that P(accepted at i | reached i) can be told), and preemptions seen while
speculating. Runs in vLLM's own environment, in process 0, where draftproof must be installed (--no-deps is enough).
Written for vLLM 0.32 and 0.33, whose `StatLoggerBase` calls itself unstable: a field that is not there is not counted.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from vllm.v1.metrics.loggers import StatLoggerBase

PREFIX = "draftproof:vllm_"
COUNTERS = {
    "sequence_steps": "Target passes, counted once per sequence in them, prefills left out.",
    "sequence_steps_drafted": "Of those, the ones that had a draft.",
    "generation_tokens": "Tokens written, prefills' included.",
    "prefills": "First tokens.",
    "draft_tokens": "Guesses.",
    "accepted_tokens": "Guesses that stood.",
    "preemptions": "Sequences thrown out of the batch.",
}
PER_POSITION = {"draft_tokens_per_pos": "Drafts that reached this position.", "accepted_tokens_per_pos": "Drafts whose guess here stood."}


class Ledger(StatLoggerBase):  # type: ignore[misc]
    """One per engine core; all share the counters, told apart by the label `engine`."""

    _counters: dict[CollectorRegistry, dict[str, Counter]] = {}

    def __init__(self, vllm_config: Any, engine_index: int = 0, registry: CollectorRegistry = REGISTRY) -> None:
        self._engine = str(engine_index)
        if registry not in self._counters:
            self._counters[registry] = {
                **{name: Counter(PREFIX + name, what, ("engine",), registry=registry) for name, what in COUNTERS.items()},
                **{name: Counter(PREFIX + name, what, ("engine", "position"), registry=registry) for name, what in PER_POSITION.items()}}
        self._of = self._counters[registry]

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Called after every engine step; either of the two may be None."""
        if iteration_stats is not None:
            self._add("generation_tokens", getattr(iteration_stats, "num_generation_tokens", 0))
            self._add("prefills", len(getattr(iteration_stats, "time_to_first_tokens_iter", ())))
            self._add("sequence_steps", len(getattr(iteration_stats, "inter_token_latencies_iter", ())))
            self._add("preemptions", getattr(iteration_stats, "num_preempted_reqs", 0))
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
        if drafts is not None:
            self._add("sequence_steps_drafted", drafts.num_drafts)
            self._add("draft_tokens", drafts.num_draft_tokens)
            self._add("accepted_tokens", drafts.num_accepted_tokens)
            for name in PER_POSITION:
                for position, count in enumerate(getattr(drafts, f"num_{name}", ())):
                    if count:
                        self._of[name].labels(self._engine, str(position)).inc(count)

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""

    def _add(self, name: str, count: int) -> None:
        self._of[name].labels(self._engine).inc(count)
