"""What an engine is made of."""

from __future__ import annotations

from pathlib import Path

from draftproof import Engine
from draftproof.config import LoadConfig


def test_a_target_is_named_by_a_path_or_its_text(tiny_pair: tuple[Path, Path]) -> None:
    folder = tiny_pair[0]
    names = []
    for target in (folder, str(folder)):
        with Engine(target, load=LoadConfig(device="cpu", self_test=False)) as engine:
            names.append(engine.target.facts.name)
    assert names[0] == names[1]
