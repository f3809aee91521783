"""A small language model in training reads what it will read when it is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import families
from models.test_recurrent import NAMED

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
