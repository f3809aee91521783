"""benchmarks/families.py: random models of families beside each other through fake engines; what a pass reads of them; its verdict."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from benchmark_module import FAKE_CLOCK, FOLDER, benchmark

families = benchmark("families")
crew, pair = importlib.import_module("crew"), benchmark("pair")

FAKE = FAKE_CLOCK + """
from worker import main

def load(job):
    def generate(request, told):
        told.begun(0)
        if pace == 9 and "mix" in job["target"]:
            sys.exit("no experts here")
        for _ in range(request["max_tokens"]):
            clock[0] += pace
            told(0, 1)
        return [[7] * request["max_tokens"]], None

    return generate

main(load, ())
"""
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TINY = {"gemma4_text": {**SIZES, "intermediate_size": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 32_000,
                        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
        "qwen3_moe": {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True}}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in TINY.items():
        monkeypatch.setitem(families.FAMILIES, name, sizes)
    monkeypatch.setattr(families, "VOCABULARY", 4_100)


def test_what_a_pass_reads(tiny: None, tmp_path: Path) -> None:
    """Of a mixture the experts that a token chooses; of Gemma 4 no embeddings of each layer's own; of both the tied table, as a head."""
    mixture = families.random_model("qwen3_moe", tmp_path / "mixture", 0)
    table, attention, norms = 4_100 * 64, 64 * 64 * 2 + 64 * 32 * 2, 2 * 64 + 2 * 32
    experts, router = 2 * 3 * 64 * 32, 8 * 64
    assert pair.pass_bytes(mixture) == 2 * (table + 2 * (attention + experts + router + norms) + 64)
    made = (mixture / "model.safetensors").stat().st_mtime_ns
    assert families.random_model("qwen3_moe", mixture, 0) == mixture and (mixture / "model.safetensors").stat().st_mtime_ns == made
    gemma = families.random_model("gemma4_text", tmp_path / "gemma", 0)
    whole = (gemma / "model.safetensors").stat().st_size
    assert 0 < whole - pair.pass_bytes(gemma) - 2 * 32_000 * 2 * 16 < 20_000, "the rest is the file's head"


def test_families_side_by_side(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, pace in (("ours", 2.0), ("llamacpp", 4.0), ("vllm", 9.0)):
        script = tmp_path / f"{name}.py"
        script.write_text(FAKE.format(folder=str(FOLDER / "peers"), pace=pace))
        monkeypatch.setitem(families.PEERS, name, crew.Peer(script, Path(sys.executable)))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- families: begin -->\nold\n<!-- families: end -->\nBehind.\n")
    monkeypatch.setattr(families, "random_model", lambda family, folder, seed, make=families.random_model: make(
        family, folder.parent / ("mix" if "moe" in family else "dense"), seed))
    monkeypatch.setattr(sys, "argv", ["families.py", "--families", "gemma4_text,qwen3_moe", "--peers", "ours,llamacpp,vllm",
                                      "--prompts", "2", "--tokens", "6", "--work", str(tmp_path / "work"), "--write", str(page)])
    code = families.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = {(each["family"], row["peer"]): row for each in result["families"] for row in each["cells"]}
    assert set(cells) == {("gemma4_text", "ours"), ("gemma4_text", "llamacpp"), ("gemma4_text", "vllm"),
                          ("qwen3_moe", "ours"), ("qwen3_moe", "llamacpp")}
    assert result["not_run"] == {"qwen3_moe, vllm": "ended with 1: no experts here"}
    assert cells["gemma4_text", "vllm"]["over_off"]["median"] == pytest.approx(2 / 9)
    assert cells["qwen3_moe", "llamacpp"]["tokens_per_s"]["median"] == pytest.approx(1 / 4)
    assert cells["qwen3_moe", "llamacpp"]["first_over_off"]["median"] == pytest.approx(2)
    over = {goal["goal"]: goal["found"]["median"] for goal in result["goals"] if "best peer" in goal["goal"]}
    assert over == {f"{family}: off ÷ the best peer's plain decoding": pytest.approx(2) for family in TINY}
    assert code == 3, "half a token a second is not what the memory allows"
    told = page.read_text()
    assert "old" not in told and told.startswith("Before.") and "qwen3_moe, vllm: not run" in told and "| qwen3_moe | llamacpp |" in told
    assert families.worst({"families": [each | {"goals": []} for each in result["families"]]}) == 0
    assert families.worst({"families": [*result["families"], {"cells": [], "goals": []}]}) == 1


@pytest.mark.parametrize("words, said", [(["--peers", "ours,ours+eagle3"], "ours+eagle3: these guess"),
                                         (["--families", "lama"], "'lama'")])
def test_what_is_not_asked(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["families.py", *words])
    with pytest.raises(SystemExit):
        families.main()
    assert said in capsys.readouterr().err
