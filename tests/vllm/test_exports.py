"""Exported configurations run in the real vLLM: n-gram, a draft model, and an EAGLE-3 head that `export head` converted.

Needs DRAFTPROOF_VLLM_PYTHON (`make test-vllm`). vLLM's own parser reads each command line.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from draftproof.config import LoadConfig, SpeculationConfig
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.export import export_head
from draftproof.models.load import builtin, load_target
from draftproof.remote.dialects import export_config
from draftproof.remote.plan import Plan

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
TOKENS, DEPTH = 48, 3


@pytest.mark.parametrize(("name", "fewest"), [("ngram", 1), ("model", 10), ("eagle3", 0)])      # the head's weights are random
def test_an_exported_configuration_runs(name: str, fewest: int, tmp_path: Path) -> None:
    python = os.environ.get("DRAFTPROOF_VLLM_PYTHON")
    if not python:
        pytest.skip("DRAFTPROOF_VLLM_PYTHON is not set; run make test-vllm")
    target = load_target(builtin("target"), LoadConfig(self_test=False, packed=False))
    assert target.tokenizer is not None
    spec = {"ngram": "ngram:min=2,max=3", "model": "model", "eagle3": f"eagle3:{tmp_path / 'theirs'}"}[name]
    if name == "eagle3":
        torch.manual_seed(0)
        Eagle3Head.fresh(target.parts).save(tmp_path / "head")
        export_head(tmp_path / "head", "vllm", tmp_path / "theirs")
    command = export_config(Plan.of(str(builtin("target")), SpeculationConfig(drafter=spec, depth=DEPTH)), "vllm").command
    prompt = target.tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return a +")
    job = json.dumps({"command": command, "prompt": prompt, "tokens": TOKENS})
    done = subprocess.run([python, str(Path(__file__).with_name("run_exports.py"))], input=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{name}: {found['accepted']} of {found['drafted']} guesses stood")
    assert len(found["ids"]) == TOKENS and found["drafted"] > 0 and found["accepted"] >= fewest
