"""The stat logger, given what vLLM gives it; vLLM itself is not installed here, so its base class is stood in for."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.StatLoggerBase = object  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, loggers.__name__, loggers)
    monkeypatch.delitem(sys.modules, "draftproof.remote.vllm_plugin", raising=False)
    return import_module("draftproof.remote.vllm_plugin")


def test_it_counts_what_vllm_leaves_out(plugin: Any) -> None:
    registry = CollectorRegistry()
    ledgers = [plugin.Ledger(None, index, registry) for index in (0, 1)]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"draftproof:vllm_{name}_total", {"engine": "0", **labels})

    drafts = SimpleNamespace(num_drafts=2, num_draft_tokens=5, num_accepted_tokens=3, num_accepted_tokens_per_pos=[2, 1, 0],
                             num_draft_tokens_per_pos=[2, 2, 1])
    step = SimpleNamespace(num_generation_tokens=7, time_to_first_tokens_iter=[0.1], inter_token_latencies_iter=[0.1, 0.1, 0.1],
                           num_preempted_reqs=0)
    ledgers[0].record(SimpleNamespace(spec_decoding_stats=drafts), step)
    ledgers[0].record(SimpleNamespace(spec_decoding_stats=None), step)
    ledgers[1].record(None, None)
    ledgers[0].record(SimpleNamespace(), SimpleNamespace())          # another version, without any of it
    assert (value("sequence_steps"), value("sequence_steps_drafted"), value("generation_tokens"), value("prefills")) == (6, 2, 14, 2)
    assert value("draft_tokens_per_pos", position="1") == 2 and value("accepted_tokens_per_pos", position="2") is None
    ledgers[0].log_engine_initialized()


def test_vllm_finds_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.stat_logger_plugins"] == {"draftproof": "draftproof.remote.vllm_plugin:Ledger"}
