"""What /metrics says beyond the counts of speculation: about the machine, the cache and the build; each number labelled like the others."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from serve.serving import letters, serving

from draftproof import __version__
from draftproof.serve.metrics import Metrics
from draftproof.trace.events import RequestStarted


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
