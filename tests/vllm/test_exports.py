"""Exported configurations run in the real vLLM: n-gram, a draft model, an EAGLE-3 head that `export head` converted, and an MTP head
that it wrote into its target's checkpoint.

Needs DRAFTPROOF_VLLM_PYTHON (`make test-vllm`). vLLM's own parser reads each command line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof import Engine, Sampling
from draftproof.config import LoadConfig, SpeculationConfig
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.export import export_head
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.load import builtin, load_target
from draftproof.models.target import Target
from draftproof.remote.dialects import export_config
from draftproof.remote.plan import Plan
from draftproof.train.base import Features
from draftproof.train.mtp import MtpTask

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
    found = run(python, command, prompt, TOKENS)
    print(f"{name}: {found['accepted']} of {found['drafted']} guesses stood")
    assert len(found["ids"]) == TOKENS and found["drafted"] > 0 and found["accepted"] >= fewest


def run(python: str, command: Sequence[str], prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    job = json.dumps({"command": command, "prompt": prompt, "tokens": tokens})
    done = subprocess.run([python, str(Path(__file__).with_name("run_exports.py"))], input=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_an_mtp_head_in_its_targets_checkpoint_guesses_there_what_it_guesses_here(tmp_path: Path) -> None:
    """A text learnt by heart: as long as vLLM writes it, all of the head's guesses stand."""
    python = os.environ.get("DRAFTPROOF_VLLM_PYTHON")
    if not python:
        pytest.skip("DRAFTPROOF_VLLM_PYTHON is not set; run make test-vllm")
    tokens, prompt = 20, list(range(5, 25))
    target = glm(tmp_path / "target")
    with Engine(target) as engine:
        text = engine.generate(prompt, Sampling(temperature=0, max_tokens=tokens + DEPTH, ignore_eos=True)).token_ids
    ids, last = torch.tensor([*prompt, *text]), (len(target.parts.layers) - 1,)
    target.set_taps(last)
    slot = target.open(ids.tolist(), tenant="reading")
    rows = target.extend([slot], [ids]).taps[last[0]].clone()
    target.close(slot)
    task = MtpTask(MtpHead.fresh(target.parts), steps=DEPTH)
    optimizer = torch.optim.AdamW([p for p in task.module.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(100):
        loss, _ = task.loss([Features(ids, torch.arange(len(ids)) >= len(prompt), {last[0]: rows})])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    task.save(tmp_path / "head")
    export_head(tmp_path / "head", "vllm", tmp_path / "theirs", tmp_path / "target")
    command = export_config(Plan.of(str(tmp_path / "theirs"), SpeculationConfig(drafter="mtp", depth=DEPTH)), "vllm").command
    found = run(python, command, prompt, tokens)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(found["ids"], text, strict=False))))
    print(f"mtp: {found['accepted']} of {found['drafted']} guesses stood, {same} of {tokens} tokens as here")
    assert same >= DEPTH + 2, "the two engines write another text from the start: nothing is learnt of what the head guesses"
    assert found["accepted"] >= (same - 1) * DEPTH // (DEPTH + 1) - 1 and found["accepted"] > 1


def glm(folder: Path) -> Target:
    """A small mixture of experts of random weights that brings no head but says it has one, with the built-in tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=4096, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, partial_rotary_factor=0.5, max_position_embeddings=512,
        num_nextn_predict_layers=1, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8 if "embed" in name or "lm_head" in name else 5)      # so that one token is the likeliest by far
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in builtin("target").glob("token*"):
        shutil.copy(file, folder / file.name)
    return load_target(folder, LoadConfig(device="cpu", self_test=False, packed=False))
