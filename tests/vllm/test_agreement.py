"""vLLM and we run the same drafter: on vLLM's own output our replay predicts how many guesses vLLM accepted.

Needs vLLM's CPU build in an environment of its own (`make test-vllm` makes one); DRAFTPROOF_VLLM_PYTHON names its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftproof.audition.replay import Story, replay
from draftproof.config import LoadConfig
from draftproof.drafters import build
from draftproof.models.heads.export import export_head
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.types import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
DEPTH, TOKENS, PROMPTS = 4, 128, 64


def run_vllm(job: dict[str, Any]) -> dict[str, Any]:
    python = os.environ.get("DRAFTPROOF_VLLM_PYTHON")
    if not python:
        pytest.skip("DRAFTPROOF_VLLM_PYTHON is not set; run make test-vllm")
    done = subprocess.run([python, str(Path(__file__).with_name("run_vllm.py"))], input=json.dumps(job), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def prompts() -> list[list[int]]:
    tokenizer = load_target(builtin("target"), LoadConfig(self_test=False)).tokenizer
    assert tokenizer is not None
    lines = (WEIGHTS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    found = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines if line]
    assert len(found) >= PROMPTS
    return found[:PROMPTS]


def agree(spec: str, speculative: dict[str, Any]) -> None:
    asked = prompts()
    theirs = run_vllm({"target": str(builtin("target")), "speculative": speculative, "prompts": asked, "tokens": TOKENS})
    assert not [line for line in theirs["warnings"] if "missing" in line.lower() or "auxiliary" in line.lower() or "layers" in line.lower()]
    target = load_target(builtin("target"), LoadConfig(self_test=False))
    drafter = build(spec, target, "match", LoadConfig(self_test=False))
    stories = [Story(tuple(p), tuple(ids), Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True))
               for p, ids in zip(asked, theirs["outputs"], strict=True)]
    tallies = replay(drafter, stories, DEPTH, capped=False, states=states_of(target, drafter.needs.taps))
    ours = sum(tally.accepted for tally in tallies)
    accepted = sum(sum(steps) for steps in theirs["steps"])
    print(f"{spec}: vLLM {theirs['version']} accepted {accepted} of {theirs['drafted']}, replay says {ours}")
    assert accepted > 500, "too few to compare"
    assert abs(ours - accepted) <= 0.02 * accepted


def states_of(target: Any, taps: tuple[int, ...]) -> Any:
    from draftproof.train.corpus import Text
    from draftproof.train.features import Tapper

    return (lambda ids: Tapper(target, taps).read([Text(tuple(ids), 0)])[0].taps) if taps else None


def test_the_small_draft_model() -> None:
    folder = str(builtin("draft"))
    agree("model", {"method": "draft_model", "model": folder, "num_speculative_tokens": DEPTH, "draft_sample_method": "greedy"})


def test_the_built_in_head(tmp_path: Path) -> None:
    export_head(builtin("eagle3"), "vllm", tmp_path / "theirs")
    agree("eagle3", {"method": "eagle3", "model": str(tmp_path / "theirs"), "num_speculative_tokens": DEPTH,
                     "draft_sample_method": "greedy"})
