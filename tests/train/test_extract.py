"""What is extracted is what the target says, shard by shard, and the index tells where."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftproof.errors import Failure
from draftproof.models.causal import CausalLM
from draftproof.models.fake import TableTarget
from draftproof.models.heads.files import write_files
from draftproof.models.load import builtin
from draftproof.train import checkpoint
from draftproof.train.corpus import Text
from draftproof.train.extract import extract


def test_shards_hold_the_states_of_every_text(tmp_path: Path) -> None:
    target = TableTarget(9, order=2)
    texts = [Text(tuple((i + j) % 9 for j in range(5 + i)), 2, "code") for i in range(6)]
    extract(target, texts, (2, 7), tmp_path / "states", shard_bytes=9000)
    index = json.loads((tmp_path / "states" / "index.json").read_text())
    assert index["shards"] > 1 and index["layers"] == [2, 7] and len(index["texts"]) == 6
    shards = [load_file(tmp_path / "states" / f"shard-{i:05d}.safetensors") for i in range(index["shards"])]
    for text, row in zip(texts, index["texts"], strict=True):
        shard, n = shards[row["shard"]], row["text"]
        assert shard[f"{n}.ids"].tolist() == list(text.ids) and shard[f"{n}.mask"].sum() == len(text.ids) - 2
        expected = torch.stack([target.hidden(text.ids[:i + 1]) for i in range(len(text.ids))])
        assert torch.equal(shard[f"{n}.layer_2"], expected) and torch.equal(shard[f"{n}.layer_7"], expected)


@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o027, 0o640)])
def test_weights_and_shards_have_the_rights_of_any_new_file(mask: int, rights: int, tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    before = os.umask(mask)
    try:
        extract(TableTarget(9), [Text((1, 2), 0)], (0,), tmp_path / "states", 100)
        write_files(tmp_path / "head", {}, {"a": torch.zeros(1)})
        checkpoint.save(tmp_path / "checkpoint.safetensors", 1, module, [], {})
        CausalLM.read(builtin("draft")).save(tmp_path / "model")
    finally:
        os.umask(before)
    found = {str(file.relative_to(tmp_path)): file.stat().st_mode & 0o777 for file in tmp_path.rglob("*.safetensors")}
    assert len(found) == 4 and set(found.values()) == {rights}, found


def test_wrong_layers_and_used_folders_are_refused(tmp_path: Path) -> None:
    target, texts = TableTarget(9), [Text((1, 2), 0)]
    with pytest.raises(Failure, match="from 0 to 7"):
        extract(target, texts, (8,), tmp_path / "a", 100)
    extract(target, texts, (0,), tmp_path / "a", 100)
    with pytest.raises(Failure, match="already holds"):
        extract(target, texts, (0,), tmp_path / "a", 100)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "shard-00000.safetensors").write_bytes(b"another's")
    with pytest.raises(Failure, match=r"already holds shard-00000\.safetensors; expected a new folder"):
        extract(target, texts, (0,), tmp_path / "b", 100)
    assert (tmp_path / "b" / "shard-00000.safetensors").read_bytes() == b"another's"
    with pytest.raises(Failure, match="no text"):
        extract(target, [], (0,), tmp_path / "c", 100)
