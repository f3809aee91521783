"""A head handed to another engine: bit-equal tensors, the tap numbering that engine counts in, refusals where it lacks something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftproof.cli import run
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.export import ENGINES, export_head
from draftproof.models.heads.files import read_files, write_files
from draftproof.models.heads.medusa import MedusaHead
from draftproof.models.heads.peagle import PEagleHead

SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 16, "inner": 48, "hidden": 32}
TARGET = TableTarget(13, order=1)


def eagle3(folder: Path, **more: object) -> Path:
    torch.manual_seed(0)
    Eagle3Head.fresh(TARGET.parts, torch.tensor([0, 1, 2, 4, 5, 7]), **SIZES, **more).save(folder)  # type: ignore[arg-type]
    return folder


def eagle(folder: Path, **more: torch.Tensor) -> Path:
    torch.manual_seed(0)
    EagleHead.fresh(TARGET.parts, **(SIZES | {"hidden": TARGET.parts.config.hidden_size})).save(folder)
    files = read_files(folder)
    write_files(folder, {**files.config, "bias": "fc.bias" in more}, {**files.tensors, **more})
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_trip_is_bit_equal(tmp_path: Path, engine: str) -> None:
    source = eagle3(tmp_path / "head")
    assert export_head(source, engine, tmp_path / "out")
    before, after = (Eagle3Head.read(read_files(f), TARGET.parts, 13) for f in (source, tmp_path / "out"))
    assert after.taps == before.taps and torch.equal(after.ids, before.ids)
    state = before.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in after.state_dict().items())
    assert export_head(tmp_path / "out", "hf", tmp_path / "again")
    assert all(torch.equal(t, read_files(tmp_path / "out").tensors[n]) for n, t in read_files(tmp_path / "again").tensors.items())


def test_a_parallel_head_names_its_mask_as_vllm_looks_for_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = PEagleHead.fresh(TARGET.parts, layers=2, **SIZES)
    head.mask_token = 3
    head.save(tmp_path / "head")
    files = read_files(tmp_path / "head")
    write_files(tmp_path / "head", {name: value for name, value in files.config.items() if name != "pard_token"}, files.tensors)
    assert export_head(tmp_path / "head", "vllm", tmp_path / "out") == ["vLLM: method eagle3 with parallel_drafting=true"]
    assert config_of(tmp_path / "out")["pard_token"] == 3
    after = PEagleHead.read(read_files(tmp_path / "out"), TARGET.parts, 13)
    assert after.taps == head.taps and torch.equal(after.mask_hidden, head.mask_hidden)


def test_a_head_that_borrows_its_output_is_not_exported(tmp_path: Path) -> None:
    files = read_files(eagle3(tmp_path / "head"))
    write_files(tmp_path / "head", files.config, {name: t for name, t in files.tensors.items() if name != "lm_head.weight"})
    with pytest.raises(LoadError, match="no lm_head.weight of its own"):
        export_head(tmp_path / "head", "vllm", tmp_path / "out")


def test_each_engine_gets_the_taps_in_its_own_numbering(tmp_path: Path) -> None:
    source = eagle3(tmp_path / "head")
    taps = [1, 3, 4]                                # outputs of 0-based layers: 1, L // 2 − 1, L − 4 of 8
    for engine in ENGINES[:3]:
        export_head(source, engine, tmp_path / engine)
    assert config_of(tmp_path / "vllm")["eagle_aux_hidden_state_layer_ids"] == [tap + 1 for tap in taps]
    assert "eagle_config" not in config_of(tmp_path / "vllm")          # vLLM would read its ids unshifted
    for engine in ("sglang", "trtllm"):
        assert config_of(tmp_path / engine)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == taps
        assert "eagle_aux_hidden_state_layer_ids" not in config_of(tmp_path / engine)
    for engine in ENGINES[:3]:
        names = set(read_files(tmp_path / engine).tensors)
        assert "midlayer.self_attn.q_proj.weight" in names and {"d2t", "t2d"} <= names


def test_taps_that_count_layers_entered_are_not_moved_twice(tmp_path: Path) -> None:
    """NVIDIA's third head for gpt-oss: its list, in `eagle_config`, names the layer behind the last, as vLLM reads it unshifted."""
    files = read_files(eagle3(tmp_path / "head"))
    nested = {"eagle_aux_hidden_state_layer_ids": [3, 5, 8], "use_aux_hidden_state": True}
    write_files(tmp_path / "head", {**files.config, "eagle_config": nested}, files.tensors)
    assert Eagle3Head.read(read_files(tmp_path / "head"), TARGET.parts, 13).taps == (2, 4, 7)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"num_hidden_layers": 8}', encoding="utf-8")
    export_head(tmp_path / "head", "vllm", tmp_path / "vllm", tmp_path / "target")
    assert config_of(tmp_path / "vllm")["eagle_aux_hidden_state_layer_ids"] == [3, 5, 8]
    export_head(tmp_path / "head", "sglang", tmp_path / "sglang", tmp_path / "target")
    assert config_of(tmp_path / "sglang")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]
    *_, remark = export_head(tmp_path / "head", "vllm", tmp_path / "unsure")
    assert "taps [3, 5, 8] were taken for outputs of layers" in remark and "--target" in remark
    (tmp_path / "target" / "model.safetensors").touch()
    options = ["--target", str(tmp_path / "target"), "--drafter", f"eagle3:{tmp_path / 'head'}", "--depth", "3"]
    assert run(["export", "config", "--to", "vllm", *options, "--out", str(tmp_path / "config")]) == 0
    assert config_of(tmp_path / "config" / "head")["eagle_aux_hidden_state_layer_ids"] == [3, 5, 8]


@pytest.mark.parametrize("more, word", [({"norm_before_residual": True}, "norm_before_residual"), ({"layers": 2}, "several layers"),
                                        ({"norms": "fc_norm"}, "fc_norm")])
def test_what_an_engine_does_not_honour_is_refused(tmp_path: Path, more: dict, word: str) -> None:
    source = eagle3(tmp_path / "head", **more)
    for engine in ("sglang", "trtllm"):
        with pytest.raises(LoadError, match=word):
            export_head(source, engine, tmp_path / engine)
    export_head(source, "vllm", tmp_path / "vllm")
    assert Eagle3Head.read(read_files(tmp_path / "vllm"), TARGET.parts, 13).depth == more.get("layers", 1)


def test_an_engine_that_runs_no_such_head_says_who_does(tmp_path: Path) -> None:
    MedusaHead.fresh(TARGET.parts, 3, output="own").save(tmp_path / "head")
    with pytest.raises(LoadError, match="sglang runs no medusa head.*hf, vllm"):
        export_head(tmp_path / "head", "sglang", tmp_path / "out")


def test_vllm_gets_medusa_in_its_own_names(tmp_path: Path) -> None:
    MedusaHead.fresh(TARGET.parts, 3, output="own").save(tmp_path / "head")
    export_head(tmp_path / "head", "vllm", tmp_path / "out")
    assert {"blocks.2.layers.0.weight", "lm_heads.2.weight"} <= set(read_files(tmp_path / "out").tensors)
    config = config_of(tmp_path / "out")
    assert config["num_heads"] == 3 and config["architectures"] == ["MedusaModel"] and config["truncated_vocab_size"] == 13
    before, after = (MedusaHead.read(read_files(tmp_path / f), TARGET.parts, 13) for f in ("head", "out"))
    hidden = torch.randn(2, 14)
    assert torch.equal(before(hidden), after(hidden))
    MedusaHead.fresh(TARGET.parts, 3).save(tmp_path / "shared")
    with pytest.raises(LoadError, match="target's own output matrix"):
        export_head(tmp_path / "shared", "vllm", tmp_path / "no")


def medusa(layers: int, prefix: str = "", stored: int | None = None) -> dict[str, torch.Tensor]:
    """Two heads of so many blocks, of which the first `stored` stand in the file."""
    torch.manual_seed(1)
    tensors = {}
    for i in range(2):
        for block in range(stored or layers):
            tensors |= {f"{prefix}{i}.{block}.linear.weight": torch.randn(14, 14), f"{prefix}{i}.{block}.linear.bias": torch.randn(14)}
        tensors[f"{prefix}{i}.{layers}.weight"] = torch.randn(13, 14)
    return tensors


@pytest.mark.parametrize("published", ["one block stored once", "a whole model", "another prefix", "one matrix for all"])
def test_whatever_medusa_is_read_is_exported_the_same(published: str, tmp_path: Path) -> None:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2 if "once" in published else 1}
    if published == "one matrix for all":
        MedusaHead.fresh(TARGET.parts, 3, 1, "one").save(tmp_path / "head")
    elif published == "a whole model":
        own = {"model.embed_tokens.weight": torch.randn(13, 14), "lm_head.weight": torch.randn(13, 14)}
        write_files(tmp_path / "head", config, {**own, **medusa(1, "medusa_head.")})
    else:
        tensors = medusa(1, "medusa_heads.") if "prefix" in published else medusa(2, stored=1)
        write_files(tmp_path / "head", config, tensors)
    export_head(tmp_path / "head", "vllm", tmp_path / "out")
    before, after = (MedusaHead.read(read_files(tmp_path / f), TARGET.parts, 13) for f in ("head", "out"))
    hidden = torch.randn(2, 14)
    assert torch.equal(before(hidden), after(hidden)) and before.layers == after.layers == config_of(tmp_path / "out")["num_hidden_layers"]
    assert config_of(tmp_path / "out")["original_lm_head"] == (published == "one matrix for all")


@pytest.mark.parametrize(("norms", "field"), [("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc")])
def test_norms_that_only_the_tensors_show_are_exported_or_refused(norms: str, field: str, tmp_path: Path) -> None:
    source = eagle3(tmp_path / "head", norms=norms)
    config = config_of(source)
    del config[field]
    (source / "config.json").write_text(json.dumps(config))
    export_head(source, "vllm", tmp_path / "out")
    assert config_of(tmp_path / "out")[field] is True
    assert Eagle3Head.read(read_files(tmp_path / "out"), TARGET.parts, 13).norms == norms
    for engine in ("sglang", "trtllm"):
        with pytest.raises(LoadError, match=f"{field} cannot be relied on"):
            export_head(source, engine, tmp_path / engine)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    source = eagle3(tmp_path / "head")
    with pytest.raises(LoadError, match="not empty"):
        export_head(source, "vllm", source)
    with pytest.raises(LoadError, match="unknown engine"):
        export_head(source, "abacus", tmp_path / "x")


def test_an_eagle_1_head_has_in_each_engine_the_biases_that_it_reads(tmp_path: Path) -> None:
    """vLLM and SGLang take `bias` for one of attention; vLLM's fc has none, SGLang's always one. What no file fills is undefined."""
    width = TARGET.parts.config.hidden_size
    plain, zero = eagle(tmp_path / "plain"), eagle(tmp_path / "zero", **{"fc.bias": torch.zeros(width)})
    assert "fc.bias" not in read_files(plain).tensors
    for source in (plain, zero):
        vllm, sglang = tmp_path / f"{source.name} vllm", tmp_path / f"{source.name} sglang"
        export_head(source, "vllm", vllm)
        export_head(source, "sglang", sglang)
        assert not [name for name in read_files(vllm).tensors if name.endswith("bias")]
        assert [name for name in read_files(sglang).tensors if name.endswith("bias")] == ["fc.bias"]
        assert not read_files(sglang).tensors["fc.bias"].any() and config_of(sglang)["architectures"] == ["LlamaForCausalLMEagle"]
        assert not any(config_of(folder)[name] for folder in (vllm, sglang) for name in ("bias", "attention_bias"))
    learnt = eagle(tmp_path / "learnt", **{"fc.bias": torch.ones(width)})
    with pytest.raises(LoadError, match=r"fc\.bias is not zero.*SGLang"):
        export_head(learnt, "vllm", tmp_path / "no")
    export_head(learnt, "sglang", tmp_path / "learnt sglang")
    assert read_files(tmp_path / "learnt sglang").tensors["fc.bias"].all()
    attends = eagle(tmp_path / "attends", **{"layers.0.self_attn.q_proj.bias": torch.ones(32)})
    export_head(attends, "vllm", tmp_path / "attends vllm")
    files = read_files(tmp_path / "attends vllm")
    biases = {name.split(".")[-2]: bool(tensor.any()) for name, tensor in files.tensors.items() if name.endswith("bias")}
    assert biases == {"q_proj": True, "k_proj": False, "v_proj": False, "o_proj": False} and files.config["attention_bias"]
