"""Mixtures of experts: how many experts a model's layers have, how many of them a row chooses, and what they weigh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .packed import sizes
from .target import Experts

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")            # as configurations name them
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


def experts_of(model: Any) -> Experts | None:
    """What is known of a model's experts, before its layers are packed; None where it has none, or layers differ in how many they have.

    Experts that every row goes through count as any other layer.
    """
    config = model.config.get_text_config()
    kept = [config, getattr(config, "ffn_config", None)]
    count, chosen = (next((value for part in kept for name in names if (value := getattr(part, name, None))), None)
                     for names in (COUNTS, CHOSEN))
    found = [sizes(module) for module in _experts(model)]
    if not found or not isinstance(count, int) or not isinstance(chosen, int) or not 0 < chosen <= count:
        return None
    return Experts(count, chosen, *map(sum, zip(*found, strict=True)))


def _experts(module: nn.Module, name: str = "") -> Iterator[nn.Module]:
    """The outermost modules that hold a layer's routed experts: transformers calls them, or their class, so."""
    if name == "experts" or type(module).__name__.endswith("Experts"):
        yield module
        return
    for below, child in module.named_children():
        yield from _experts(child, below)
