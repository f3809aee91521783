"""Fresh heads that begin as the target's own end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from models.mtp_layouts import CASES, make
from models.mtp_layouts import target as bare
from safetensors.torch import load_file, save_file

from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.families import Wish, begin
from draftproof.train.warm import warm_eagle3, warm_mtp


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> Target:
    return load_target(tiny_pair[0], LoadConfig(packed=False, self_test=False))


def test_an_eagle3_head_reads_its_last_tap_through_the_targets_last_layer(target: Target) -> None:
    ids = torch.arange(0, target.vocab_size, 3)
    head = Eagle3Head.fresh(target.parts, ids)
    warm_eagle3(head, target.parts)
    last, first, size = target.parts.layers[-1], head.layers[0], head.target_hidden
    assert torch.equal(head.lm_head.weight, target.parts.output.weight[ids])
    assert torch.equal(head.norm.weight, target.parts.norm.weight)
    assert torch.equal(first.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(first.self_attn.q_proj.weight[:, size:], last.self_attn.q_proj.weight)
    states = torch.randn(4, 3 * size)
    assert (head.fc(states) - states[:, -size:]).norm() < 0.5 * states[:, -size:].norm()


def test_an_mtp_layer_is_the_targets_last_one(target: Target) -> None:
    head = MtpHead.fresh(target.parts)
    warm_mtp(head, target.parts)
    theirs = dict(target.parts.layers[-1].named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in head.blocks[0].named_parameters())
    assert torch.equal(head.norms[0].weight, target.parts.norm.weight)


def test_packed_layers_and_other_widths_leave_the_head_random(tiny_pair: tuple[Path, Path], target: Target) -> None:
    packed = load_target(tiny_pair[0], LoadConfig(self_test=False))
    for parts, sizes in ((packed.parts, {}), (target.parts, {"hidden": 32, "inner": 48, "heads": 2, "kv_heads": 1, "head_dim": 16})):
        torch.manual_seed(0)
        head = Eagle3Head.fresh(parts, None, **sizes)
        before = head.layers[0].self_attn.o_proj.weight.clone()
        warm_eagle3(head, parts)
        assert torch.equal(head.layers[0].self_attn.o_proj.weight, before)
        assert all(p.isfinite().all() for p in head.parameters())


def test_an_mtp_head_goes_on_from_the_one_in_the_targets_checkpoint(tmp_path: Path) -> None:
    """With the names that its family has there; where a size is asked for, or none is there, it is a new one with the same names."""
    case = CASES["glm"]
    model = bare(case)
    model.save_pretrained(tmp_path / "bare")
    shutil.copytree(tmp_path / "bare", tmp_path / "target")
    both = {**load_file(tmp_path / "bare" / "model.safetensors"), **make(case)}
    save_file(both, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    heads = {}
    for name, wish in (("bare", Wish()), ("target", Wish()), ("new", Wish(layers=1))):
        place = tmp_path / name if name != "new" else tmp_path / "target"
        found = load_target(place, LoadConfig(packed=False, self_test=False))
        settled = wish.settled("mtp", found)
        assert (settled.init == place) == (name == "target") and wish.settled("eagle3", found) == wish
        task = begin("mtp", found, [], settled)
        task.save(tmp_path / f"{name} head")
        heads[name] = load_file(tmp_path / f"{name} head" / "model.safetensors")
    assert heads["target"].keys() >= {key for key in case.keys() if "shared_head.head" not in key and "embed_tokens" not in key}
    assert all(torch.equal(tensor, heads["target"][key]) for key, tensor in make(case).items() if key in heads["target"])
    for name in ("bare", "new"):
        assert all(key.startswith("model.layers.2.") for key in heads[name]) and "model.layers.2.eh_proj.weight" in heads[name]
    begin("mtp", found, [], Wish(init=tmp_path / "target")).save(tmp_path / "named")
    assert load_file(tmp_path / "named" / "model.safetensors").keys() == heads["target"].keys()
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="empty"):
        Wish(init=tmp_path / "empty").check("mtp")
