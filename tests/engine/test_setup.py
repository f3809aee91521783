"""What an engine is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof import Engine
from draftproof.config import LoadConfig
from draftproof.errors import OptionError


def test_a_target_is_named_by_a_path_or_its_text(tiny_pair: tuple[Path, Path]) -> None:
    folder = tiny_pair[0]
    names = []
    for target in (folder, str(folder)):
        with Engine(target, load=LoadConfig(device="cpu", self_test=False)) as engine:
            names.append(engine.target.facts.name)
    assert names[0] == names[1]


@pytest.mark.parametrize("drafter", [None, 3])
def test_what_is_no_drafter_is_refused_by_name(drafter: object) -> None:
    """It failed with an AttributeError."""
    with pytest.raises(OptionError, match=f"drafter={drafter}: expected a spec"):
        Engine(drafter=drafter)  # type: ignore[arg-type]
