"""An A/B comparison in front of vLLM servers: off is the plain one, and each request is asked where its arm says."""

from __future__ import annotations

import time

import httpx2
import pytest
from remote.fake_vllm import FakeVllm
from serve.serving import listening

from draftproof.commands.ab import for_remote
from draftproof.commands.remote import front
from draftproof.config import AbConfig, ServeConfig, SpeculationConfig
from draftproof.errors import OptionError
from draftproof.models.load import builtin
from draftproof.models.outline import outline
from draftproof.remote.fleet import Fleet, Replica
from draftproof.remote.vllm import Setting, VllmEngine
from draftproof.serve.ab import place
from draftproof.serve.run import describe


def test_arms_are_replicas() -> None:
    spec, plain = FakeVllm(3), FakeVllm(0)
    edge = outline(builtin("target"))
    fleet = Fleet([Replica("spec", False, spec.url), Replica("plain", True, plain.url)], 0.05)
    fleet.start()
    fleet.wait(timeout_s=10)
    ab = for_remote(AbConfig("eagle3:/somewhere vs off", experiment="x", replay=1.0),
                    SpeculationConfig("eagle3:/somewhere", 3), "eagle3", plain=True)
    server = front(lambda: VllmEngine(fleet, edge, Setting("eagle3", 3, "ratio")), describe("demo", edge, "eagle3"), edge,
                   ServeConfig(port=0, ab=ab), 64)
    try:
        with listening(server) as (url, _, _), httpx2.Client(base_url=url, timeout=30) as client:
            for i in range(20):
                answer = client.post("/v1/completions", json={"model": "demo", "prompt": [5, 11], "max_tokens": 6, "user": f"u{i}",
                                                              "temperature": 1.0, "ignore_eos": True})
                assert answer.status_code == 200, answer.text
                assert answer.json()["speculation"]["replica"] == ("spec" if place("x", "", "user", f"u{i}") < 0.5 else "plain")
            end = time.monotonic() + 60
            while server.experiment.replays.counts["done"] < 3 and time.monotonic() < end:
                time.sleep(0.05)
            report = client.get("/draftproof/ab.json").json()
    finally:
        fleet.close()
        for fake in (spec, plain):
            fake.close()
    served = {(one["arm"], one["class"]): one for one in report["cells"] if one["source"] == "served"}
    mine = sum(place("x", "", "user", f"u{i}") < 0.5 for i in range(20))
    assert served["candidate", "all"]["requests"] == mine and served["control", "all"]["requests"] == 20 - mine
    assert served["candidate", "all"]["acceptance"]["drafted"] > 0 and served["candidate", "all"]["tpot_s"]["p50"]["value"] > 0
    assert report["identity"][0]["compared"] == 0 < report["identity"][0]["incomparable"], "sampled by vLLM: another text every time"


@pytest.mark.parametrize(("arms", "plain", "said"), [
    ("suffix vs off", True, "the vLLM servers run 'ngram'"), ("ngram depth=2 vs off", True, "no depth and no rule per request"),
    ("ngram vs off", False, "there is none"),
])
def test_what_vllm_cannot_compare(arms: str, plain: bool, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        for_remote(AbConfig(arms), SpeculationConfig("ngram", 3), "ngram", plain)
