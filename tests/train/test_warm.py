"""Fresh heads that begin as the target's own end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof.config import LoadConfig
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.load import load_target
from draftproof.models.target import Target
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
