"""Our Muon against torch's, which orthogonalises in bfloat16, and its matrix against what orthogonal means."""

from __future__ import annotations

import pytest
import torch
from models import families

from draftproof.models.heads.dflash2 import DFlash2
from draftproof.models.load import _parts
from draftproof.train.loop import optimizers_of
from draftproof.train.muon import Muon, orthogonal

V = families.COMMON["vocab_size"]


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ orthogonal(matrix) @ v.T
    assert (turned.diagonal() > 0.6).all() and (turned.diagonal() < 1.3).all()
    assert (turned - torch.diag(turned.diagonal())).abs().max() < 1e-3
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_steps_like_torchs_within_bfloat16() -> None:
    torch.manual_seed(1)
    ours = torch.randn(40, 24, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_(True)
    one, other = Muon([ours], 0.01), torch.optim.Muon([theirs], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    start = ours.detach().clone()
    for _ in range(6):
        pull = torch.randn(40, 24)
        for matrix, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            (matrix * pull).sum().backward()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved, "bfloat16 keeps 8 bits, five products deep"
    assert moved > 0


@pytest.mark.parametrize("kind", ["dflash2", "gpt2", "gptj"])
def test_a_matrix_with_a_row_per_token_is_none_between_hidden_states(kind: str) -> None:
    model = families.build("llama" if kind == "dflash2" else kind)
    module = DFlash2.fresh(_parts(model, torch.float32)) if kind == "dflash2" else model
    muon, rest = optimizers_of(module, 1e-3)
    tables, matrices = ([p.shape for group in one.param_groups for p in group["params"] if p.shape[0] == V] for one in (rest, muon))
    assert tables and not matrices
