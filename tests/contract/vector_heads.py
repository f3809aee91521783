"""Heads that start from one hidden state, with random weights and over any target: what the contract is asked of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftproof.drafters.hydra import HydraDrafter
from draftproof.drafters.medusa import MedusaDrafter
from draftproof.drafters.mlp import MlpDrafter
from draftproof.models.fake import TableTarget
from draftproof.models.heads.hydra import HydraHead
from draftproof.models.heads.medusa import MedusaHead
from draftproof.models.heads.mlp import MlpHead

NETWORKS: dict[str, Callable[[TableTarget], Any]] = {
    "medusa": lambda target: MedusaHead.fresh(target.parts, 4, 2),
    "medusa-cut": lambda target: MedusaHead.fresh(target.parts, 4, 1, "own", torch.tensor([0, 2, 3, 5, 7, 8, 12])),
    "hydra": lambda target: HydraHead.fresh(target.parts, 4),
    "hydra-prefix": lambda target: HydraHead.fresh(target.parts, 4, prefix=True, heads=2, head_dim=4, inner=6),
    "mlp": lambda target: MlpHead.fresh(target.parts, 4, 12, tied=False),
    "mlp-tables": lambda target: MlpHead.fresh(target.parts, 4, 12, tables=True),
}
DRAFTERS: dict[str, Any] = {"medusa": MedusaDrafter, "hydra": HydraDrafter, "mlp": MlpDrafter}


def network(name: str, target: TableTarget) -> Any:
    """The head itself, whose parameters are all noise, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = NETWORKS[name](target)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return head


def _drafter(name: str) -> Callable[[TableTarget, Any], Any]:
    return lambda target, truth: DRAFTERS[name.partition("-")[0]](network(name, target), target.parts, target.vocab_size)


VECTOR_HEADS = {name: _drafter(name) for name in NETWORKS}
CONTRACT = {name: make for name, make in VECTOR_HEADS.items() if name != "mlp-tables"}      # to the drafter it is `mlp`
