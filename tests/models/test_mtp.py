"""Multi-token prediction heads as published: every layout against a reference, refusals, and the way back into a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import packings
import pytest
import torch
from models.mtp_layouts import CASES, CONFIGS, DEEPSEEK, Case, H, L, V, make, reference, target
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.config import LoadConfig
from draftproof.drafters.base import Site
from draftproof.drafters.mtp import MtpDrafter
from draftproof.errors import LoadError
from draftproof.models.heads.cache import HeadCache, HeadPass
from draftproof.models.heads.export import ENGINES, export_head
from draftproof.models.heads.files import HeadFiles, read_files, write_files
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.heads.mtp_files import INDEX, alone, inside, read_head, stitch
from draftproof.models.load import load_target
from draftproof.models.target import Target

TOKENS, FURTHER = torch.tensor([3, 7, 60, 1, 22, 9]), torch.tensor([5, 41, 5])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Target, Any]]:
    """Per family: the folder of a tiny target without any head, the target loaded, and the model."""
    made: dict[str, tuple[Path, Target, Any]] = {}

    def get(case: Case) -> tuple[Path, Target, Any]:
        if case.family not in made:
            folder, model = tmp_path_factory.mktemp(case.family), target(case)
            model.save_pretrained(folder)
            made[case.family] = (folder, load_target(folder, LoadConfig(device="cpu", self_test=False)), model)
        return made[case.family]

    return get


def checkpoint(folder: Path, case: Case, tensors: Mapping[str, Tensor], out: Path) -> Path:
    """The target's checkpoint as published, with the head beside the layers, in two shards and an index."""
    body = load_file(folder / "model.safetensors")
    out.mkdir()
    shards = {"model-00001-of-00002.safetensors": body, "model-00002-of-00002.safetensors": dict(tensors)}
    for name, those in shards.items():
        save_file({key: tensor.contiguous() for key, tensor in those.items()}, out / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {key: name for name, those in shards.items() for key in those}}
    (out / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **case.settings}))
    return out


def head_of(case: Case, tensors: Mapping[str, Tensor], targets: Any, tmp_path: Path) -> MtpHead:
    folder, loaded, _ = targets(case)
    if case.prefix.startswith("mtp_layers"):
        settings = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"],
                    "transformer_layer_config": {"model_type": case.family, **CONFIGS[case.family]}}
        files = HeadFiles(tmp_path, settings, tensors)
    else:
        files = inside(str(checkpoint(folder, case, tensors, tmp_path / "checkpoint")), L)
    return MtpHead.read(files, loaded.parts, V)


def serve(head: MtpHead, hidden: Tensor) -> Tensor:
    """The rows as a drafter feeds them: the prompt's, then what a round kept, then one by one on the head's own output."""
    cache, found = HeadCache(head.depth, head.kv_heads, head.head_dim, torch.float32, "cpu"), []

    def step(tokens: Tensor, before: Tensor) -> Tensor:
        attend = HeadPass([cache], [len(tokens)])
        out = head.step(tokens, before, torch.arange(cache.length, cache.length + len(tokens)), attend)
        attend.done()
        found.append(head.logits(out))
        return out

    step(TOKENS[:4], head.fuse(hidden[:4]))
    last = step(TOKENS[4:], head.fuse(hidden[4:]))[-1:]
    for token in FURTHER:
        last = step(token[None], last)
    return torch.cat(found)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_reference_does(name: str, targets: Any, tmp_path: Path) -> None:
    case, hidden = CASES[name], torch.randn(len(TOKENS), H, generator=torch.Generator().manual_seed(3))
    tensors = make(case)
    head = head_of(case, tensors, targets, tmp_path)
    expected = reference(case, tensors, targets(case)[2], TOKENS, hidden, FURTHER)
    torch.testing.assert_close(serve(head, hidden), expected, atol=1e-5, rtol=1e-4)
    assert head.taps == (L - 1,) and head.context == 256


@pytest.mark.parametrize("name", CASES)
def test_save_writes_the_published_layout_and_reads_back_equal(name: str, targets: Any, tmp_path: Path) -> None:
    case = CASES[name]
    tensors = make(case)
    head = head_of(case, tensors, targets, tmp_path)
    head.save(tmp_path / "alone")
    written, again = read_files(tmp_path / "alone"), MtpHead.read(read_files(tmp_path / "alone"), targets(case)[1].parts, V)
    if name == "speculators":
        assert {key.split(".")[0] for key in written.tensors} == {"mtp"} and "mtp.fc.weight" in written.tensors
    else:
        assert {key: tensor.shape for key, tensor in written.tensors.items()} == case.keys()
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in written.tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_is_left_out_and_every_key_read(family: str, targets: Any, tmp_path: Path) -> None:
    case, hidden = CASES["deepseek"], torch.randn(len(TOKENS), H, generator=torch.Generator().manual_seed(3))
    tensors = make(case)
    extra = {f"{DEEPSEEK}self_attn.indexer.{name}.weight": torch.zeros(2, 2) for name in ("wq_b", "wk", "weights_proj")}
    config = {**CONFIGS["deepseek_v3"], "model_type": family, "index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
    head = MtpHead.read(HeadFiles(tmp_path, config, {**tensors, **extra}), targets(case)[1].parts, V)
    with torch.no_grad():
        expected = reference(case, tensors, targets(case)[2], TOKENS, hidden, FURTHER)
        torch.testing.assert_close(serve(head, hidden), expected, atol=1e-5, rtol=1e-4)


def test_fp8_blocks_are_read_with_their_scales(targets: Any, tmp_path: Path) -> None:
    case, tensors = CASES["deepseek"], make(CASES["deepseek"])
    name = f"{DEEPSEEK}self_attn.q_b_proj.weight"
    scale = tensors[name].abs().max() / 400
    small = (tensors[name] / scale).to(torch.float8_e4m3fn)
    packed = {**tensors, name: small, f"{name}_scale_inv": scale.reshape(1, 1)}
    config = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}
    head = MtpHead.read(HeadFiles(tmp_path, config, packed), targets(case)[1].parts, V)
    torch.testing.assert_close(head.blocks[0].self_attn.q_b_proj.weight, small.float() * scale, atol=0, rtol=1e-2)   # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("name", ["mimo", "qwen3-next"])
@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors", "modelopt"])
def test_a_head_is_read_as_its_checkpoint_was_quantised(name: str, kind: str, targets: Any, tmp_path: Path) -> None:
    """Experts that stand alone, too. Such layers were taken for tensors that nothing reads."""
    form = {"awq": partial(packings.awq, group=8), "gptq": partial(packings.gptq, group=8), "compressed-tensors": packings.whole,
            "modelopt": lambda weight: packings.floats(weight, tuple(weight.shape), "weight_scale")}[kind]
    case, tensors = CASES[name], make(CASES[name])
    packed, plain = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        if key.endswith("_proj.weight") and "input_proj" not in key:
            parts, stands_for = form(packed.pop(key))
            plain[key] = stands_for.to(torch.bfloat16).to(weight.dtype)
            packed |= {key.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    folder = checkpoint(targets(case)[0], case, packed, tmp_path / "packed")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": {"quant_method": kind}}))
    found = MtpHead.read(read_head(folder), targets(case)[1].parts, V).state_dict()
    expected = head_of(case, plain, targets, tmp_path).state_dict()
    assert all(torch.allclose(found[key].float(), value.float(), rtol=0.01, atol=1e-6) for key, value in expected.items())
    assert not all(torch.equal(plain[key], weight) for key, weight in tensors.items())


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if name not in key}


def more(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


REFUSED: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], tuple[str, ...]]] = {
    "a missing tensor": ("qwen3.5", without("q_norm"), ("missing tensors", "mtp.layers.0.self_attn.q_norm.weight")),
    "a missing norm": ("glm", without("shared_head.norm"), ("missing tensors", f"{DEEPSEEK}shared_head.norm.weight")),
    "no projection": ("qwen3.5", without("mtp.fc"), ("no input projection", "quantised")),
    "no layer": ("qwen3.5", without("mtp.layers"), ("no decoder layer",)),
    "an unknown tensor": ("qwen3.5", more("mtp.layers.0.self_attn.sinks", 4), ("nothing reads", "mtp.layers.0.self_attn.sinks")),
    "an embedding of its own": ("qwen3.5", more("mtp.embed_tokens.weight", V, H), ("nothing reads", "mtp.embed_tokens.weight")),
    "another hidden size": ("qwen3.5", more("mtp.fc.weight", 40, 80), ("hidden size 40", "expected [32, 64]")),
    "a foreign vocabulary": ("deepseek", more(f"{DEEPSEEK}shared_head.head.weight", 70, H), ("70 rows", "64 tokens", "vocabulary")),
    "an expert's part": ("qwen3-next", without("experts.2.up_proj"), ("experts.2", "incomplete")),
    "a packed weight": ("qwen3.5", lambda t: {**without("o_proj")(t), "mtp.layers.0.self_attn.o_proj.qweight": torch.zeros(2, 2)},
                        ("nothing reads", "o_proj.qweight")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str, targets: Any, tmp_path: Path) -> None:
    name, change, words = REFUSED[what]
    with pytest.raises(LoadError) as refusal:
        head_of(CASES[name], change(make(CASES[name])), targets, tmp_path)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_checkpoint_without_a_head_says_so(targets: Any) -> None:
    folder = targets(CASES["qwen3.5"])[0]
    with pytest.raises(LoadError, match=r"no multi-token prediction weights .*quantised repacks"):
        inside(str(folder), L)


def test_a_family_that_is_not_known_is_named(targets: Any, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"'mamba2'.*deepseek_v3"):
        MtpHead.read(HeadFiles(tmp_path, {"model_type": "mamba2"}, make(CASES["qwen3.5"])), targets(CASES["qwen3.5"])[1].parts, V)


@pytest.mark.parametrize("family, tensor", [
    ("mimo_v2_flash", "model.mtp.layers.0.eh_proj.weight"),
    ("longcat_flash", "model.mtp.layers.0.enorm.m.weight"),
    ("nemotron_h", "mtp.layers.0.mixer.experts.1.up_proj.weight"),
    ("nemotron_h", "mtp.layers.0.eh_proj.weight"),
    ("deepseek_v4", "mtp.0.e_proj.weight"),
    ("bailing_hybrid", f"model.layers.{L}.final_layernorm.weight"),
    ("hy_v3", f"model.layers.{L}.final_layernorm.weight"),
    ("step3p5", f"model.layers.{L}.transformer.shared_head.output.weight"),
    ("glm_ocr", f"model.language_model.layers.{L}.eh_proj.weight"),
    ("kimi_k3", f"language_model.model.layers.{L}.eh_proj.weight"),
])
def test_a_head_that_is_not_read_is_refused_by_its_familys_name(family: str, tensor: str, targets: Any, tmp_path: Path) -> None:
    """Not as one that a repack has lost or cut, which would send people to fetch the same again."""
    write_files(tmp_path, {"model_type": family, "num_hidden_layers": L}, {"model.layers.0.a.weight": torch.zeros(2),
                                                                           tensor: torch.zeros(2, 2)})
    with pytest.raises(LoadError, match=f"family '{family}'") as refusal:
        MtpHead.read(inside(str(tmp_path), L), targets(CASES["qwen3.5"])[1].parts, V)
    assert "quantised" not in str(refusal.value)


# Stitching


@pytest.mark.parametrize("name", ["deepseek", "qwen3-next", "mimo"])
def test_stitching_replaces_the_head_and_nothing_else(name: str, targets: Any, tmp_path: Path) -> None:
    case = CASES[name]
    folder = checkpoint(targets(case)[0], case, make(case), tmp_path / "checkpoint")
    head = MtpHead.read(inside(str(folder), L), targets(case)[1].parts, V)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.5)
    head.save(tmp_path / "head")
    names = stitch(tmp_path / "head", folder, tmp_path / "out")
    assert set(names) == set(case.keys())
    old, new = ({k: v for shard in sorted(place.glob("*.safetensors")) for k, v in load_file(shard).items()}
                for place in (folder, tmp_path / "out"))
    assert list(old) == list(new)
    assert json.loads((tmp_path / "out" / INDEX).read_text()) == json.loads((folder / INDEX).read_text())
    assert all(torch.equal(old[key], new[key]) != (key in names) for key in old if "e_score" not in key)
    again = MtpHead.read(inside(str(tmp_path / "out"), L), targets(case)[1].parts, V)
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_target_that_lost_its_head_gets_one(targets: Any, tmp_path: Path) -> None:
    case = CASES["speculators"]
    folder, loaded, _ = targets(case)
    head = head_of(case, make(case), targets, tmp_path)
    save_file(make(case), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"transformer_layer_config": {"model_type": "qwen3", **CONFIGS["qwen3"]}}))
    names = stitch(tmp_path, folder, tmp_path / "out")
    assert all(name.startswith("mtp.") for name in names)
    again = MtpHead.read(inside(str(tmp_path / "out"), L), loaded.parts, V)
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))
    load_target(tmp_path / "out", LoadConfig(device="cpu", self_test=False))


def plain_head(layers: int, value: float) -> dict[str, torch.Tensor]:
    return {"mtp.fc.weight": torch.full((2, 4), value), **{f"mtp.layers.{i}.w.weight": torch.full((2,), value) for i in range(layers)}}


def test_a_deeper_head_is_stitched_in_and_a_shorter_one_refused(tmp_path: Path) -> None:
    """Into a checkpoint whose head has a file of its own: all tensors are there, of the new head alone."""
    write_files(tmp_path / "target", {"num_hidden_layers": 1}, {"model.layers.0.a.weight": torch.zeros(2)})
    for layers in (1, 2, 3):
        write_files(tmp_path / f"head{layers}", {}, plain_head(layers, layers))
    stitch(tmp_path / "head1", tmp_path / "target", tmp_path / "once")
    stitch(tmp_path / "head2", tmp_path / "once", tmp_path / "twice")
    stitch(tmp_path / "head3", tmp_path / "twice", tmp_path / "again")
    for folder, layers in (("once", 1), ("twice", 2), ("again", 3)):
        found, wanted = inside(str(tmp_path / folder), 1).tensors, plain_head(layers, layers)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted), folder
    with pytest.raises(LoadError, match="its head has 3 layers, .*head1 has 1; expected as many or more"):
        stitch(tmp_path / "head1", tmp_path / "again", tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_a_config_that_counts_layers_counts_those_of_the_new_head(tmp_path: Path) -> None:
    """An engine builds as many layers as the config says; one that does not say keeps its silence."""
    for layers in (1, 3):
        write_files(tmp_path / f"head{layers}", {}, plain_head(layers, layers))
    one = {"num_hidden_layers": 1}
    for name, config in (("plain", {**one, "num_nextn_predict_layers": 1}), ("silent", one),
                         ("nested", {"text_config": {**one, "mtp_num_hidden_layers": 1}})):
        write_files(tmp_path / name, config, {"model.layers.0.a.weight": torch.zeros(2)})
        for layers in (1, 3):
            stitch(tmp_path / f"head{layers}", tmp_path / name, tmp_path / f"{name}{layers}")
        told = [json.loads((tmp_path / f"{name}{layers}" / "config.json").read_text()) for layers in (1, 3)]
        assert told[0] == config
        assert told[1] == json.loads(json.dumps(config).replace('predict_layers": 1', 'predict_layers": 3')
                                     .replace('mtp_num_hidden_layers": 1', 'mtp_num_hidden_layers": 3')), name


def test_stitching_refuses_what_it_would_spoil(targets: Any, tmp_path: Path) -> None:
    case = CASES["qwen3.5"]
    folder = checkpoint(targets(case)[0], case, make(case), tmp_path / "checkpoint")
    with pytest.raises(LoadError, match="not empty"):
        stitch(folder, folder, folder)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    save_file({"mtp.fc.weight": torch.zeros(2, 4)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(LoadError, match=r"mtp.fc.weight: the head's is \[2, 4\]"):
        stitch(tmp_path / "head", folder, tmp_path / "out")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.lost.weight"] = "model-lost.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(LoadError, match="model-lost.safetensors, which its index names, is missing"):
        stitch(tmp_path / "head", folder, tmp_path / "never")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.prefix.startswith("mtp_layers")])
def test_a_path_may_be_a_whole_checkpoint(name: str, targets: Any, tmp_path: Path) -> None:
    case, loaded = CASES[name], targets(CASES[name])[1]
    folder = checkpoint(targets(case)[0], case, make(case), tmp_path / "checkpoint")
    found, own = (MtpHead.read(files, loaded.parts, V) for files in (read_head(folder), inside(str(folder), L)))
    assert all(torch.equal(a, b) for a, b in zip(found.state_dict().values(), own.state_dict().values(), strict=True))
    MtpDrafter.from_spec(str(folder), {}, Site(loaded, "match", LoadConfig(device="cpu")))
    with pytest.raises(LoadError, match="has no multi-token prediction weights"):
        read_head(targets(CASES["speculators"])[0])
    own.save(tmp_path / "head")
    alike = zip(MtpHead.read(read_head(tmp_path / "head"), loaded.parts, V).state_dict().values(), own.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in alike)


def test_engines_get_the_head_inside_its_targets_checkpoint(targets: Any, tmp_path: Path) -> None:
    case = CASES["mimo"]
    folder = checkpoint(targets(case)[0], case, make(case), tmp_path / "checkpoint")
    head = MtpHead.read(inside(str(folder), L), targets(case)[1].parts, V)
    with torch.no_grad():
        head.norms[0].weight.add_(0.5)
    head.save(tmp_path / "head")
    assert alone(tmp_path / "head") and not alone(folder) and not alone(tmp_path) and not alone("organisation/name")
    for engine in ENGINES:
        lines = export_head(tmp_path / "head", engine, tmp_path / engine, folder)
        assert any("mtp" in line.lower() or "NEXTN" in line for line in lines)
        again = MtpHead.read(inside(str(tmp_path / engine), L), targets(case)[1].parts, V)
        assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))
        assert not alone(tmp_path / engine)
    lone = export_head(tmp_path / "head", "hf", tmp_path / "lone")
    assert "name that target" in lone[0] and alone(tmp_path / "lone")
    with pytest.raises(LoadError, match=r"vllm reads an mtp head inside its target's checkpoint; name that target \(--target\)"):
        export_head(tmp_path / "head", "vllm", tmp_path / "no")
    with pytest.raises(LoadError, match="brings no multi-token prediction layer of its own"):
        export_head(tmp_path / "head", "vllm", tmp_path / "no", targets(CASES["speculators"])[0])
    with pytest.raises(LoadError, match="is of kind model, which engines read beside their target"):
        export_head(targets(CASES["speculators"])[0], "vllm", tmp_path / "no", folder)
    other = checkpoint(targets(CASES["qwen3.5"])[0], CASES["qwen3.5"], make(CASES["qwen3.5"]), tmp_path / "other")
    with pytest.raises(LoadError, match="they belong to different models"):
        export_head(tmp_path / "head", "vllm", tmp_path / "no", other)
    assert not (tmp_path / "no").exists()
