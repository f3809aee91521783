"""What a model's folder says: what cannot be used is refused by name, and what is left out is found where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftproof import Engine, LoadConfig, LoadError, OptionError
from draftproof.models.load import load_target
from draftproof.models.outline import outline

SMALL = LoadConfig(page_tokens=64, cache_tokens=1024, self_test=False)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.save("llama", tmp_path)
    return tmp_path


def say(file: Path, **settings: Any) -> None:
    """Change what a file of settings says; None takes an entry away."""
    said = {**(json.loads(file.read_text()) if file.exists() else {}), **settings}
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("settings", "said"), [
    ({"num_attention_heads": 3, "head_dim": None}, "hidden size .64. is not a multiple"),
    ({"hidden_size": "64"}, "'hidden_size' expected int"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0; expected at least 1"),
    ({"max_position_embeddings": 1}, "max_position_embeddings=1; expected at least 2"),
    ({"model_type": "nope"}, r"model_type='nope', which transformers \d.* does not know; install a newer one, or correct it"),
    ({"hidden_act": "nope"}, "hidden_act='nope', which this version of transformers does not know"),
    ({"rope_parameters": {"rope_type": "nope", "factor": 2.0}}, "rope_type='nope'"),
    ({"num_key_value_heads": 4}, r"6 weights.*layers.0.self_attn.k_proj.weight: found \[32, 64\], expected \[64, 64\]"),
])
def test_what_is_no_model_is_refused_by_name(settings: dict[str, Any], said: str, folder: Path) -> None:
    say(folder / "config.json", **settings)
    with pytest.raises(LoadError, match=said):
        load_target(folder, SMALL)


def test_a_checkpoint_that_another_library_must_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*about: object, **more: object) -> None:
        raise ImportError("Using 4-bit quantization requires bitsandbytes")

    say(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", absent)
    with pytest.raises(LoadError, match="requires bitsandbytes; it is quantised by bitsandbytes.*--engine vllm"):
        load_target(folder, SMALL)


def test_a_tokenizer_that_does_not_parse_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "Nope"}}')
    with pytest.raises(LoadError, match="tokenizer could not be loaded"):
        load_target(folder, SMALL)


@pytest.mark.parametrize("ends", [[2, None], ["two"], {"id": 2}])
def test_ends_that_are_no_ids_are_refused(ends: object, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(LoadError, match="eos_token_id=.*expected an id or a list of ids"):
        load_target(folder, SMALL)


@pytest.mark.parametrize(("settings", "said"), [
    ({"top_p": 0.0}, r"top_p=0.0: expected a number in \(0, 1\]"), ({"temperature": -1.0}, "temperature=-1.0: expected a number ≥ 0")])
def test_a_default_that_is_none_is_told_as_the_models(settings: dict[str, float], said: str, folder: Path) -> None:
    say(folder / "generation_config.json", do_sample=True, **settings)
    with Engine(load_target(folder, SMALL)) as engine:
        with pytest.raises(OptionError, match=f"{said}.*generation_config.json"):
            engine.generate([5, 6], max_tokens=2)
        assert len(engine.generate([5, 6], max_tokens=2, temperature=0, top_p=0.9).token_ids) == 2


def test_a_default_that_is_no_number_is_refused(folder: Path) -> None:
    say(folder / "generation_config.json", temperature="hot")
    with pytest.raises(LoadError, match="generation_config.json has an option that is no number.*hot"):
        load_target(folder, SMALL)


@pytest.mark.parametrize(("text", "said"), [("{", "generation_config.json cannot be read"), ("[]", "generation_config.json holds a list")])
def test_damaged_defaults_are_not_passed_over_as_if_there_were_none(text: str, said: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(LoadError, match=said):
        load_target(folder, SMALL)


@pytest.mark.parametrize("described", [{"model_type": "llama"}, {"num_hidden_layers": 60}])
def test_a_configuration_of_a_far_larger_model_is_refused_before_there_is_memory_for_it(
        described: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("memory was taken"))
    if "model_type" in described:                               # and nothing else: what its family has by default
        (folder / "config.json").write_text(json.dumps(described))
    else:
        say(folder / "config.json", **described)
    with pytest.raises(LoadError, match=r"config.json describes LlamaForCausalLM of [\d,]+ weights, and the files hold [\d,]+; expected"):
        load_target(folder, SMALL)


@pytest.mark.parametrize("sharded", [False, True])
def test_without_a_dtype_the_weights_own_is_taken(sharded: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(folder / "config.json", dtype=None, torch_dtype=None)
    rewrite(folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    monkeypatch.setattr("draftproof.models.load.multiplies_bfloat16", lambda: True)
    if sharded:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        names = load_file(folder / "model-00001-of-00001.safetensors")
        say(folder / "model.safetensors.index.json", metadata={}, weight_map=dict.fromkeys(names, "model-00001-of-00001.safetensors"))
    target = load_target(folder, LoadConfig(self_test=False, packed=False))
    assert (target.facts.dtype, target.parts.saved_as) == ("bfloat16", torch.bfloat16) and "own" in target.facts.reasons["dtype"]


def test_weights_without_a_place_are_told(folder: Path) -> None:
    assert "unused weights" not in load_target(folder, SMALL).facts.reasons
    rewrite(folder, lambda tensors: tensors.update({f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(64) for i in range(3)}))
    reason = load_target(folder, SMALL).facts.reasons["unused weights"]
    assert reason.startswith("3, ") and "model.layers.0.self_attn.q_proj.bias" in reason and "LlamaForCausalLM" in reason


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_take_no_float16_on_a_cpu(quantization: str, folder: Path) -> None:
    with pytest.raises(LoadError, match=f"quantization={quantization} with float16.*expected float32 or bfloat16"):
        load_target(folder, LoadConfig(self_test=False, device="cpu", dtype="float16", quantization=quantization))


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_devices_that_compute_nothing_are_refused(device: str, folder: Path) -> None:
    if device != "meta" and getattr(torch, device).is_available():
        pytest.skip("there is one")
    with pytest.raises(LoadError, match=f"device='{device}'.*expected cpu, cuda or cuda:N"):
        load_target(folder, LoadConfig(self_test=False, device=device))


def test_angles_that_depend_on_the_longest_row_are_seen_in_each_kind_of_layer(tmp_path: Path) -> None:
    families.save("gemma3_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    plain, dynamic = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert set(config["rope_parameters"]) == {"full_attention", "sliding_attention"}
    say(tmp_path / "config.json", rope_parameters={"full_attention": dynamic, "sliding_attention": plain})
    facts = load_target(tmp_path, LoadConfig(page_tokens=64)).facts
    assert not facts.invisible and "dynamic rotary angles" in facts.invisible_reason


def test_an_outline_has_the_defaults_context_and_ends_that_a_load_has(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    for file in tiny_pair[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": None, "max_position_embeddings": -1}))
    local, edge = load_target(tmp_path, SMALL), outline(tmp_path)
    assert edge.defaults == local.defaults == {"temperature": 0.0} and edge.eos_ids == local.eos_ids == (0,)
    assert edge.context == local.context == 1 << 20, "a configuration may set no limit"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(LoadError, match="no tokenizer files"):
        outline(tmp_path)
