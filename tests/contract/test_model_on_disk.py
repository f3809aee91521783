"""The `model` drafter on transformers models: loaded from a folder, checked, and right about everything if it is the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract.table_rounds import Text, plain, speculate
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.config import LoadConfig
from draftproof.core.tree import depths
from draftproof.drafters import build
from draftproof.drafters.model import ModelDrafter
from draftproof.errors import VocabularyMismatch
from draftproof.models.load import load_target
from draftproof.types import Sampling

LOAD = LoadConfig(device="cpu", dtype="float32", page_tokens=16, prefill_chunk=8, cache_tokens=4096, self_test=False)


def save(folder: Path, vocab_size: int = 96, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nodes", [4, 10])
def test_the_targets_own_weights_are_always_right(target_folder: Path, temperature: float, nodes: int) -> None:
    target = load_target(target_folder, LOAD)
    drafter = build(f"model:{target_folder}", target, "match", LOAD)
    assert isinstance(drafter, ModelDrafter) and "neither side has a tokenizer" in drafter.checks[0].detail
    sampling = Sampling(temperature=temperature, top_p=0.95, max_tokens=24)
    texts = [Text.of([5 + i] * 3 + list(range(2, 14 + i)), sampling, seed=i, id=str(i)) for i in range(3)]
    expected = [plain(target, text) for text in texts]
    log = speculate(target, drafter, texts, lambda i, round_: (4 - i, nodes))
    assert [text.tokens for text in texts] == expected
    assert all(len(v.accepted) == max(depths(d.parents)) for d, v in zip(log.drafts, log.verdicts, strict=True) if len(d))


def test_another_models_guesses_change_nothing(target_folder: Path, tmp_path: Path) -> None:
    target = load_target(target_folder, LOAD)
    drafter = build(f"model:{save(tmp_path, seed=7)}", target, "match", LOAD)
    texts = [Text.of(range(2, 22 + i), Sampling(temperature=0.8, top_p=1.0, max_tokens=20), seed=i, id=str(i)) for i in range(2)]
    expected = [plain(target, text) for text in texts]
    speculate(target, drafter, texts, lambda i, round_: (3, 3))
    assert [text.tokens for text in texts] == expected


def test_another_size_is_refused_at_load(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VocabularyMismatch, match="96 in the target and 80 in the drafter"):
        build(f"model:{save(tmp_path, vocab_size=80)}", load_target(target_folder, LOAD), "match", LOAD)
