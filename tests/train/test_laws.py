"""What heads are taught is the target's own law, also of families that do something to what their output matrix gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import families

from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.medusa import MedusaHead, target_logits
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.base import logits_after, require_laws
from draftproof.train.families import Wish, begin
from draftproof.train.mtp import MtpTask
from draftproof.types import Scores

TEXT = [5, 17, 99, 3, 42, 8, 120]
FINISHED: dict[str, dict[str, Any]] = {"gemma2": {"final_logit_softcapping": 0.5}, "cohere": {}, "granite": {"logits_scaling": 8.0}}


def opened(family: str, folder: Path, **more: Any) -> Target:
    model = families.build(family)
    with torch.no_grad():
        for parameter in model.parameters():            # norms and biases, Phi's of its output matrix among them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    for name, value in more.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    return load_target(folder, LoadConfig(self_test=False, packed=False))


def read(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the text, and the last layer's outputs [n, H]."""
    last = len(target.parts.layers) - 1
    target.set_taps((last,))
    slot = target.open(TEXT, "laws")
    scores = target.extend([slot], [torch.tensor(TEXT)])
    target.close(slot)
    return scores.logits[0].float(), scores.taps[last].clone()


@pytest.mark.parametrize("family", [*FINISHED, "llama", "phi", "deepseek_v3"])
def test_laws_that_heads_learn_and_those_they_borrow_are_the_targets(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "phi", {})
    target = opened(family, tmp_path, **FINISHED.get(family, {}))
    parts = target.parts
    logits, states = read(target)
    require_laws(target)
    assert torch.allclose(logits_after(parts, states)[-1].float(), logits, atol=1e-4)
    normed = parts.norm(states)
    with torch.no_grad():
        given = [EagleHead.fresh(parts).logits(normed), MedusaHead.fresh(parts, 1).forward(normed)[:, 0]]
        given += [MtpHead.fresh(parts).logits(normed)]
    given += [target_logits(parts, normed), MtpTask(MtpHead.fresh(parts))._logits(normed, 0)]      # with gradients
    for found in given:
        assert torch.allclose(found[-1].float(), logits, atol=1e-4)


@pytest.mark.parametrize("family", FINISHED)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_head_says_in_its_config_what_is_done_to_its_logits(kind: str, family: str, tmp_path: Path) -> None:
    target = opened(family, tmp_path / "target", **FINISHED[family])
    task: Any = begin(kind, target, [], Wish(mask_token=1))
    task.save(tmp_path / "head")
    head = type(task.head).read(Wish(init=tmp_path / "head").files, target.parts, target.vocab_size)
    logits, states = read(target)
    with torch.no_grad():
        for found in (task.head, head):
            assert torch.allclose(found.logits(target.parts.norm(states))[-1].float(), logits, atol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp"])
def test_a_target_that_does_something_else_to_its_logits_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = opened("llama", tmp_path)
    extend = target.extend

    def tripled(slots: Any, tokens: Any) -> Scores:
        scores = extend(slots, tokens)
        return replace(scores, logits=scores.logits * 3)

    monkeypatch.setattr(target, "extend", tripled)
    with pytest.raises(LoadError, match="are not what its final norm and output matrix give"):
        begin(kind, target, [], Wish())
