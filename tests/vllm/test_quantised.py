"""vLLM and we read the same quantised checkpoints: on vLLM's own text our target's choices are vLLM's, but for near ties."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.config import LoadConfig
from draftproof.models.load import builtin, load_target

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "models")]
import packings  # noqa: E402 (from there)
from test_agreement import prompts, run_vllm  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
TOKENS, PROMPTS = 64, 12
FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], packings.Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, packings.awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
             lambda weight: packings.gptq(weight, symmetric=True)),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_same_choices(tmp_path: Path, name: str) -> None:
    config, form = FORMS[name]
    packings.publish(builtin("target"), tmp_path / "packed", config, form)
    asked = prompts()[:PROMPTS]
    theirs = run_vllm({"target": str(tmp_path / "packed"), "speculative": None, "prompts": asked, "tokens": TOKENS})
    target = load_target(tmp_path / "packed", LoadConfig(self_test=False))
    assert "70 layers are multiplied as they were published" in target.facts.reasons["checkpoint"]
    same = choices = 0
    for prompt, text in zip(asked, theirs["outputs"], strict=True):
        slot = target.open([])
        found = [int(target.extend([slot], [torch.tensor(prompt)]).logits[-1].argmax())]
        found += [int(target.extend([slot], [torch.tensor([token])]).logits[-1].argmax()) for token in text[:-1]]
        target.close(slot)
        same += sum(a == b for a, b in zip(found, text, strict=True))
        choices += len(text)
    print(f"{name}: vLLM {theirs['version']}, {same} of {choices} choices are ours")
    assert same >= 0.97 * choices
