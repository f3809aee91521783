"""What a drafter was made for and how it did, beside its weights: draftproof.json for programs, README.md for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE, PAGE = "draftproof.json", "README.md"
NAMES = {"kind": "drafter", "target": "target", "dtype": "the target's precision", "data": "log", "steps": "steps",
         "texts": "texts learnt from", "held_out": "texts held out", "acceptance_length": "tokens per round when served on these",
         "rounds": "rounds", "depth": "guesses a round"}


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """facts: see NAMES. The target is named as `place.identity` does."""
    rows = "".join(f"- {words}: {facts[name]}\n" for name, words in NAMES.items() if name in facts)
    (folder / PAGE).write_text(f"# A drafter\n\nMade by `draftproof train`; of use with its target only.\n\n{rows}", encoding="utf-8")
    (folder / FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read(folder: str | Path) -> dict[str, Any] | None:
    """The facts, None of a drafter that has none that can be read."""
    try:
        facts = json.loads((Path(folder).expanduser() / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("target"), str) else None
