"""How a drafter begins that is to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import families

from draftproof.config import LoadConfig
from draftproof.drafters import build
from draftproof.models.load import load_target
from draftproof.train.families import Wish, begin


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "domino", "xpress"])
def test_a_block_head_of_one_guess_can_be_served(kind: str, tmp_path: Path) -> None:
    families.save("qwen3", tmp_path / "target")
    target = load_target(tmp_path / "target", LoadConfig(self_test=False, packed=False))
    task: Any = begin(kind, target, [], Wish(depth=1))
    task.save(tmp_path / "head")
    assert build(f"{kind}:{tmp_path / 'head'}", target, "match", LoadConfig()).name == kind and task.head.block == 2
