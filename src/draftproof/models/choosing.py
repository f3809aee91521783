"""How rows choose their experts, of blocks of transformers': what families.py names for those that have them."""

from __future__ import annotations

from typing import Any

import torch

from ..mixtures import Routing


def by_softmax(block: Any) -> Routing:
    return Routing(normed=block.gate.norm_topk_prob, kept=True)


def by_sigmoid(block: Any) -> Routing:
    router = block.gate
    return Routing(by_sigmoid=True, wide=True, normed=router.norm_topk_prob, factor=router.routed_scaling_factor,
                   groups=router.num_group, within=router.topk_group, leading=2)


def by_sigmoid_in_lfm2(block: Any) -> Routing:
    router = block.gate
    return Routing(by_sigmoid=True, normed=router.norm_topk_prob, beside=1e-6, kept=True, factor=router.routed_scaling_factor)


def by_wide_softmax(block: Any) -> Routing:
    router = block.gate
    grouped = router.topk_method == "group_limited_greedy"
    return Routing(wide=True, normed=False, factor=router.routed_scaling_factor, groups=router.num_group if grouped else 1,
                   within=router.topk_group if grouped else 1)


def by_softmax_in_mistral(block: Any) -> Routing:
    return by_sigmoid(block)._replace(by_sigmoid=False, wide=False, kept=True)


def by_logits_in_cohere(block: Any) -> Routing:
    router, average = block.gate, block.shared_expert_combination_strategy == "average"
    share = 0.5 if average and block.num_shared_experts else 1.0
    by_sigmoid = router.expert_selection_fn == "sigmoid"
    return Routing(by_sigmoid, by_logits=True, normed=router.norm_topk_prob or not by_sigmoid, kept=True, factor=share, always=share)


def by_sparse_mixing(block: Any) -> Routing:
    return Routing(normed=False, kept=True, near=max(2 * block.router.router_jitter_noise, 1e-30))


def as_wide_as_its_gate(block: Any) -> Routing:
    wide = block.gate.wg.weight.dtype == torch.float32
    return Routing(wide=wide, kept=not wide)
