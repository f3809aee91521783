"""The recipe of the built-in heads goes through, from `train`'s folders to the page about them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

RECIPES = Path(__file__).parent.parent.parent / "recipes" / "heads"


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("left", ["finished", "checkpoint"])
def test_a_trained_head_is_exported_with_a_row_on_the_page(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlp").mkdir()
    (tmp_path / "mlp" / "config.json").write_text("{}")
    (tmp_path / "mlp.training").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "mlp" / "model.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "mlp.training" / f"{left}.safetensors",
              metadata={"step": "12", "notes": json.dumps({"texts": 34})})
    (tmp_path / "mlp.json").write_text(json.dumps({"parameters": 1_500_000, "acceptance_length": 1.25, "rounds": 7}))
    monkeypatch.setattr(sys, "argv", ["export.py", str(tmp_path), "mlp", "--out", str(tmp_path / "out")])
    recipe("export").main()
    page = (tmp_path / "out" / "HEADS.md").read_text()
    assert "| mlp | 1.50 M | 0.0 MB | 12 | 34 | 1.25 (7) |" in page and (tmp_path / "out" / "mlp" / "config.json").exists()


def test_the_recipe_s_command_is_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def ran(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout="{}\n")

    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path), "mlp"])
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", ran)
        recipe("train").main()
    (command,) = commands
    done = subprocess.run([*command[:command.index("train")], "train", "--help"], capture_output=True, text=True, check=True)
    assert "--data" in done.stdout
