"""What is extracted is what the target says, shard by shard, and the index tells where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftproof.errors import Failure
from draftproof.models.fake import TableTarget
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
