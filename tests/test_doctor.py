"""doctor: every part of a drafter is checked, and a folder that fails in use is not called whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftproof.commands.doctor import pair_checks, target_checks
from draftproof.config import LoadConfig
from draftproof.drafters.vocabulary import Check
from draftproof.models.load import builtin, load_target
from draftproof.models.target import Target
from draftproof.train import card
from draftproof.train.place import identity

CONFIG = LoadConfig(self_test=False)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(builtin("target"), CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The built-in draft model, each file of which may be replaced."""
    for file in builtin("draft").iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def said(checks: list[Check], name: str) -> str:
    return next(check.detail for check in checks if check.name == name)


def test_every_kind_of_drafter(target: Target) -> None:
    assert "no weights and no vocabulary" in said(pair_checks(target, "ngram", CONFIG), "drafter")
    assert "no weights and no vocabulary" in said(pair_checks(target, "layer-skip:exit=2", CONFIG), "drafter")
    head = said(pair_checks(target, "eagle3", CONFIG), "drafter")
    assert "8.0 MB" in head and "4.01 M parameters" in head and "of the target's 4096 tokens" in head
    names = {check.name for check in pair_checks(target, "pard", CONFIG)}
    assert {"vocabulary", "merges", "special tokens"} <= names and "drafter" not in names
    chain = pair_checks(target, "ngram+model", CONFIG)
    assert "no weights" in said(chain, "ngram: drafter") and said(chain, "model: vocabulary")


def test_a_head_of_another_target_is_told(target: Target, tmp_path: Path) -> None:
    shutil.copytree(builtin("mlp"), tmp_path / "mlp")
    names = [check.name for check in pair_checks(target, f"mlp:{tmp_path / 'mlp'}", CONFIG)]
    assert "made for" not in names, "its folder does not say"
    here = identity(target.facts.name)
    for made_for, ok in ((here, True), (f"moved {here.split()[-1]}", True), ("gemma3 0123456789abcdef", False)):
        card.write(tmp_path / "mlp", {"kind": "mlp", "target": made_for})
        found = next(check for check in pair_checks(target, f"mlp:{tmp_path / 'mlp'}", CONFIG) if check.name == "made for")
        assert found.ok is ok and not found.fatal and ("gemma3" in found.detail) is not ok
    (tmp_path / "mlp" / "draftproof.json").write_text("[")
    assert card.read(tmp_path / "mlp") is None


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).unlink()
    (folder / name).write_text(content)


def verdict(folder: Path, name: str) -> Check:
    return next(check for check in target_checks(load_target(folder, CONFIG), CONFIG) if check.name == name)


def test_a_whole_folder(folder: Path) -> None:
    assert not [check for check in target_checks(load_target(folder, CONFIG), CONFIG) if not check.ok and check.fatal]


def test_a_template_that_cannot_be_rendered(folder: Path) -> None:
    write(folder, "chat_template.jinja", "{% if %}")
    found = verdict(folder, "chat")
    assert found.fatal and not found.ok and "cannot be rendered" in found.detail


def test_a_tokenizer_with_more_ids_than_rows(folder: Path) -> None:
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"].append({**tokens["added_tokens"][-1], "id": 4096, "content": "<|new|>"})
    write(folder, "tokenizer.json", json.dumps(tokens))
    found = verdict(folder, "ids")
    assert found.fatal and not found.ok and found.detail.startswith("4097 of the tokenizer, 4096 rows")


@pytest.mark.parametrize(("ends", "fatal"), [(99999, True), ([3, 99999], False)])
def test_ends_beyond_the_vocabulary(folder: Path, ends: Any, fatal: bool) -> None:
    (folder / "generation_config.json").unlink()
    write(folder, "config.json", json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}))
    found = verdict(folder, "ends")
    assert found.fatal is fatal and not found.ok and "99999 is beyond" in found.detail
