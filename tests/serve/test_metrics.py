"""What /metrics says beyond the counts of speculation: about the machine, the cache and the build; each number labelled like the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from serve.serving import letters, serving

from draftproof import __version__
from draftproof.serve.metrics import Metrics
from draftproof.trace.events import NodeRecord, PrefillDone, RequestDone, RequestStarted, RoundDone, Times, TokenRecord


def test_every_series_of_ours_names_the_model() -> None:
    with serving(letters(), "ngram:min=1,max=2") as running, running.client() as client:
        running.complete(prompt="abababab", max_tokens=20, seed=1)
        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    ours = [family for name, family in families.items() if name.startswith("draftproof:")]
    assert len(ours) > 25 and not [one for family in ours for one in family.samples if one.labels.get("model_name") != "letters"]
    (build,) = families["draftproof:build_info"].samples
    assert build.labels == {"model_name": "letters", "version": __version__} and build.value == 1
    assert families["draftproof:worker_restarts"].type == families["draftproof:speculation_changes"].type == "counter"
    assert "process_resident_memory_bytes" in families or not Path("/proc").exists()


def test_hits_of_the_prefix_cache_are_counted_once_there_are_any() -> None:
    metrics = Metrics("letters", 2, lambda: {})

    def told() -> dict[str, float]:
        families = text_string_to_metric_families(metrics.text().decode())
        return {one.name.removeprefix("draftproof:"): one.value for family in families for one in family.samples if "prefix" in one.name}

    metrics.write(RequestStarted("r0", 0.0, 8, 0, {}, 1, 0))
    assert told() == {}, "absent, not zero: an engine elsewhere may not say"
    metrics.write(RequestStarted("r1", 0.0, 8, 6, {}, 1, 0))
    assert told() == {"prefix_cache_queries_total": 16, "prefix_cache_hits_total": 6}


def of_rounds(*fates: Any) -> tuple[tuple[NodeRecord, ...], tuple[TokenRecord, ...], str, Times]:
    """A chain with these fates, what it emitted, and times of which a batch of two has half each."""
    nodes = tuple(NodeRecord(i, i - 1, fate) for i, fate in enumerate(fates))
    return nodes, (TokenRecord(0, "correction"),) * (1 + fates.count("accepted")), "", Times(2.0, 4.0, 1.0, 0.5)


def test_rounds_are_counted_by_class_and_their_seconds_once() -> None:
    """Two texts side by side, one of which was guessed ahead; there is room for one class."""
    metrics = Metrics("letters", 1, lambda: {"ready": 1.0, "worker_restarts_total": 2})
    metrics.write(RequestStarted("r0", 0.5, 8, 0, {}, 1, 0, "code"))
    metrics.write(RequestStarted("r1", 0.5, 5, 0, {}, 1, 0, "chat"))
    metrics.write(PrefillDone("r0", 1.5, 0.5, 2, TokenRecord(0, "prefill"), ""))
    metrics.write(PrefillDone("r1", 1.75, 0.5, 1, TokenRecord(0, "prefill"), ""))
    guessed = of_rounds("accepted", "accepted", "rejected", "discarded")
    metrics.write(RoundDone("r0", 0, 2.0, 2, 8, 5, "ngram", "a round takes 12.5 ms", "", *guessed))
    metrics.write(RoundDone("r1", 0, 2.0, 2, 5, 0, "ngram", "depth 0 gains 7 %", "", *of_rounds()))
    metrics.write(RequestDone("r0", 2.0, "length", 4, {"draft_bytes": 70, "kv_tokens_lost": 3, "tpot_s": 0.25}))
    metrics.refusals[429], metrics.switches = 2, 3
    found = {(one.name.removeprefix("draftproof:"), *sorted(value for name, value in one.labels.items() if name != "model_name")): one.value
             for family in text_string_to_metric_families(metrics.text().decode()) for one in family.samples
             if one.name.startswith("draftproof:") and not one.name.endswith(("_bucket", "_created"))}
    speculation = {"drafts": 1, "draft_tokens": 4, "accepted_tokens": 2, "rejected_tokens": 1, "discarded_tokens": 1}
    expected = {
        ("prompt_tokens_total", "code"): 8, ("prompt_tokens_total", "other"): 5, ("generation_tokens_total", "code"): 4,
        ("generation_tokens_total", "other"): 2, ("target_passes_total", "code"): 3, ("target_passes_total", "other"): 2,
        **{(f"spec_decode_num_{name}_total", "code"): count for name, count in speculation.items()},
        **{("spec_decode_num_accepted_tokens_per_pos_total", str(place), "code"): count for place, count in enumerate((1, 1, 0))},
        ("spec_decode_passes_saved",): 1, ("spec_decode_drafter_bytes",): 70, ("spec_decode_kv_tokens_lost",): 3,
        ("rounds_total", "5", "code"): 1, ("rounds_total", "0", "other"): 1, ("spec_decode_depth",): 0,
        ("spec_decode_reason", "depth N gains N %"): 1, ("ready",): 1, ("worker_restarts_total",): 2,
        ("refusals_total", "429"): 2, ("speculation_changes_total",): 3,
        **{("round_seconds_total", part): spent for part, spent in (("draft", 2.0), ("score", 4.0), ("verify", 1.0), ("other", 0.5))},
        ("inter_chunk_seconds_sum", "code"): 0.5, ("inter_chunk_seconds_sum", "other"): 0.25, ("inter_chunk_seconds_count", "code"): 1,
        ("time_per_output_token_seconds_sum", "code"): 0.25, ("time_per_output_token_seconds_count", "code"): 1}
    assert {name: found.get(name) for name in expected} == expected
    assert not {name for name in found if name[0].startswith("spec_decode_num") and name not in expected}
