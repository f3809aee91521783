"""What heads borrow of a target's embedding: the matrix, not what some families' modules do to its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from draftproof import native
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.models.heads.dflash import DFlash
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.hydra import HydraHead
from draftproof.models.heads.mlp import MlpHead
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.target import TargetParts
from draftproof.train.mtp import Unrolled

V, H = 24, 16
TOKENS, PLACES = torch.tensor([3, 0, 23]), torch.arange(3)


class Scaled(nn.Embedding):
    """As Gemma's: scores of a vocabulary lie in one matrix, and what the first layer reads is √H as large."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * H**0.5


def parts() -> TargetParts:
    torch.manual_seed(1)
    config = SimpleNamespace(hidden_size=H, num_hidden_layers=4, vocab_size=V, model_type="gemma", num_attention_heads=2, head_dim=8,
                             intermediate_size=24, rms_norm_eps=1e-6)
    config.get_text_config = lambda: config
    return TargetParts(nn.Embedding(V, H), nn.Linear(H, V, bias=False), (), config, nn.RMSNorm(H))


def stepped(head: EagleHead | Eagle3Head | MtpHead) -> Tensor:
    return head.step(TOKENS, torch.ones(3, H), PLACES, Unrolled())


def eagle(parts: TargetParts) -> Tensor:
    return stepped(EagleHead.fresh(parts))


def eagle3(parts: TargetParts) -> Tensor:
    head = Eagle3Head.fresh(parts)
    head.layers[0].input_layernorm.eps = 1.0        # a norm hides most of what differs
    return stepped(head)


def mtp(parts: TargetParts) -> Tensor:
    head = MtpHead.fresh(parts)
    head.fusions[0].token_norm.variance_epsilon = 1.0
    return stepped(head)


def hydra(parts: TargetParts) -> Tensor:
    head = HydraHead.fresh(parts)
    nn.init.ones_(head.hydra_mlp[0][0].linear.weight)
    return head.step(0, head.start(torch.ones(3, H)), TOKENS)[0]


def mlp(parts: TargetParts) -> Tensor:
    head = MlpHead.fresh(parts, tables=True)
    return head.step(0, head.start(torch.ones(3, H)), TOKENS)[0]


def dflash(parts: TargetParts) -> Tensor:
    return DFlash.fresh(parts, mask_token=1).embed(TOKENS)


@pytest.mark.parametrize("read", [eagle, eagle3, mtp, hydra, mlp, dflash], ids=lambda read: read.__name__)
def test_rows_are_read_as_they_stand(read: Callable[[TargetParts], Tensor]) -> None:
    plain = parts()
    assert plain.embed is not None
    scaled = Scaled(V, H)
    scaled.weight = plain.embed.weight              # type: ignore[assignment]
    found = []
    for given in (plain, replace(plain, embed=scaled)):
        torch.manual_seed(2)
        with torch.no_grad():
            found.append(read(given))
    assert torch.equal(*found)


@pytest.mark.skipif(not native.available()[0], reason="no compiler")
def test_a_head_of_such_a_target_is_compiled_too() -> None:
    """The class of the embedding alone had kept it from the kernels."""
    head = Eagle3Head.fresh(replace(parts(), embed=Scaled(V, H)), heads=2, kv_heads=1, head_dim=16, inner=48)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert Eagle3Drafter(head, V).compiled is not None
