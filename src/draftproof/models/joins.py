"""Which products of a block are one, and in which order their outputs stand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .families import DOWN, OPENING, OUT, UP, head_dim_of, part_of
from .packed import Linear, joined, times
from .shares import bare, kept


def qkv_of(attention: Any) -> tuple[Tensor, Tensor | None]:
    if (whole := part_of(attention, ("qkv_proj", "query_key_value", "c_attn"))) is not None:
        weight, bias, order = whole.weight.detach(), whole.bias, _queries_first(attention, whole.out_features)
        return (weight, bias) if order is None else (weight[order], None if bias is None else bias.detach()[order])
    if not hasattr(attention, "k_proj"):    # keys are another layer's
        return joined([attention.q_proj])
    gate = part_of(attention, OPENING)
    values = attention.k_proj if attention.v_proj is None else attention.v_proj
    return joined([attention.q_proj, attention.k_proj, values, *([] if gate is None else [gate])])


def _queries_first(attention: Any, outputs: int) -> Tensor | None:
    """The order of a product's rows that puts queries before keys before values; None: they stand so."""
    rows, dim = torch.arange(outputs), head_dim_of(attention)
    if hasattr(attention, "mp_num"):            # CodeGen's stand in so many parts, each of queries, values and keys
        return rows.view(attention.mp_num, 3, -1)[:, [0, 2, 1]].transpose(0, 1).flatten()
    if hasattr(attention, "query_key_value") or hasattr(attention, "multi_query"):  # each head of keys behind the queries that read it
        heads: int = bare(part_of(attention, OUT)).in_features // dim  # type: ignore[operator,assignment]
        groups = rows.view((outputs // dim - heads) // 2, -1, dim)
        return torch.cat([part.flatten() for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])
    return None


def gates_last(heads: int, dim: int, rows: int) -> Tensor:
    """The order of a product's rows whose queries have a gate beside each, so that gates stand behind values."""
    both = torch.arange(2 * heads * dim).view(heads, 2, dim)
    return torch.cat([both[:, 0].flatten(), torch.arange(2 * heads * dim, rows), both[:, 1].flatten()])


def mlp_of(mlp: Any, linear: Linear) -> tuple[nn.Module, nn.Module]:
    """The product of gate and up, and that of down; by what Falcon-H1 takes gates and what comes down."""
    gate_up, down = linear(*gate_up_of(mlp)), kept(part_of(mlp, DOWN), linear)
    gates, last = (float(getattr(mlp, name, 1)) for name in ("gate_multiplier", "down_multiplier"))
    if gates != 1:
        gate_up = times(gate_up, torch.tensor([gates, 1.0]).repeat_interleave(len(mlp.gate_proj.weight)))
    return gate_up, down if last == 1 else times(down, torch.full((len(mlp.down_proj.weight),), last))


def gate_up_of(mlp: Any) -> tuple[Tensor, Tensor | None]:
    both = part_of(mlp, ("gate_up_proj", "input_linear"))
    if both is not None:
        return both.weight.detach(), both.bias
    gate = part_of(mlp, ("gate_proj", "w1"))
    return joined([*([] if gate is None else [gate]), part_of(mlp, UP)])
