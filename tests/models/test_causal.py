"""A small language model in training reads what it will read when it is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import families
from models.test_recurrent import NAMED
from transformers import Gemma2PreTrainedModel

from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models.causal import CausalLM
from draftproof.models.load import load_target
from draftproof.train.pard import PardTask, rows_of

LONG = 40           # tokens; windows here are of 24


def served(folder: Path, ids: list[int]) -> torch.Tensor:
    """The served model's logits behind a text."""
    target = load_target(folder, LoadConfig(self_test=False))
    slot = target.open(ids, "causal")
    logits = target.extend([slot], [torch.tensor(ids)]).logits[0]
    target.close(slot)
    return logits.float()


@pytest.mark.parametrize("family", ["mistral", "starcoder2", "gemma2", "gemma3_text", "gpt_oss", "bloom", "qwen3"])
def test_a_text_longer_than_a_window_is_read_as_when_served(family: str, tmp_path: Path) -> None:
    families.save(family, tmp_path)
    lm, ids = CausalLM.read(tmp_path), torch.randint(200, (LONG,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        learnt = lm.logits(ids)
    for end in (5, 30, LONG):
        assert torch.allclose(learnt[end - 1], served(tmp_path, ids[:end].tolist()), atol=2e-3)


@pytest.mark.parametrize("made", ["read", "fresh"])
def test_capped_scores_are_capped_while_a_model_learns(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)          # as transformers 5.17 has it
    capped = {**families.FAMILIES["gemma2"], "attn_logit_softcapping": 0.1}
    monkeypatch.setitem(families.FAMILIES, "gemma2", capped)
    model = families.save("gemma2", tmp_path)
    lm = CausalLM.read(tmp_path)
    if made == "fresh":
        lm = CausalLM.fresh(model_type="gemma2", **{**families.COMMON, **capped})
        lm.module.load_state_dict(model.state_dict())
    ids = torch.arange(20) * 37 % 199 + 1
    with torch.no_grad():
        assert torch.allclose(lm.logits(ids)[-1], served(tmp_path, ids.tolist()), atol=2e-3)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3"])
def test_rows_behind_masks_see_no_further_than_when_served(family: str, tmp_path: Path) -> None:
    families.save(family, tmp_path)
    lm, ids = CausalLM.read(tmp_path), torch.randint(1, 200, (LONG,), generator=torch.Generator().manual_seed(2))
    rows = rows_of(LONG, torch.arange(LONG - 1), 4, 1.0, 1.0)
    with torch.no_grad():
        learnt = lm.logits_of_rows(rows.ids(ids, 0), rows.positions, rows.visible())
    for last, masks in ((3, 2), (26, 3), (35, 0), (35, 3)):
        row = ((rows.last == last) & (rows.masks == masks)).nonzero()[0, 0]
        assert torch.allclose(learnt[row], served(tmp_path, [*ids[:last + 1].tolist(), *[0] * masks]), atol=2e-3), (last, masks)


@pytest.mark.parametrize("family", ["bloom", "qwen3_5_text", "mamba2"])
def test_a_model_that_masks_cannot_be_told_is_refused_before_it_learns(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, family, families.FAMILIES.get(family) or NAMED[family])
    lm = CausalLM(families.build(family))
    with pytest.raises(LoadError, match="expected a language model of attention alone"):
        PardTask(lm, None, 0)  # type: ignore[arg-type]
