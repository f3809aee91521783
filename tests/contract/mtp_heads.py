"""Multi-token prediction heads with random weights over `TableTarget`, for the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftproof.drafters.mtp import MtpDrafter
from draftproof.models.fake import TableTarget
from draftproof.models.heads.mtp import MtpHead

NextToken = Callable[[Sequence[int]], int]


def mtp(target: TableTarget, **more: Any) -> MtpDrafter:
    width = target.parts.config.hidden_size
    settings = {"model_type": "llama", "hidden_size": width, "intermediate_size": 32, "head_dim": 8, "num_attention_heads": 4,
                "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = MtpHead.fresh(target.parts, settings=settings, **more)
    for norm in head.norms:
        norm.weight.data.mul_(0.1)          # the table's output matrix makes random states far too sure
    return MtpDrafter(head, target.vocab_size)


MTP_HEADS: dict[str, Callable[[TableTarget, NextToken], Any]] = {
    "mtp": lambda target, truth: mtp(target),
    "mtp-two-layers": lambda target, truth: mtp(target, layers=2, layout="deepseek"),
}
