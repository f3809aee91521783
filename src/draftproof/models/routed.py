"""A mixture of experts behind its router, as a fused layer runs it (arXiv 2401.04088).

Experts that all rows go through stand among the others, cut into as many of their size; a gate of theirs is one output more of the router.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import native
from ..mixtures import Mixture, Routing, mix, route
from .experts import Experts, inner_of
from .levels import LevelWeight
from .packed import HeldLinear, Linear, StreamedLinear, joined, packed


class Routed(nn.Module):
    """Stands for a block of transformers'."""

    def __init__(self, block: Any, form: Linear, routing: Routing, layer: Any = None) -> None:
        """routing: how rows choose, but for what all of them share, which may stand beside the block in its layer."""
        super().__init__()
        router, bias = router_of(block), bias_of(block)
        self.experts = Experts(block.experts, form, list(_shared(block, shared_of(block, layer))))
        gate = getattr(block, "shared_expert_gate", None)
        self.routing = routing._replace(shared=self.experts.shared, gated=gate is not None)
        self.each: int = chosen_by(router) + self.experts.shared
        weight, scales = scoring(router).weight.detach(), getattr(router, "per_expert_scale", None)
        weight = weight if gate is None else torch.cat([weight, gate.weight.detach()])
        self.router = _form(weight, getattr(scoring(router), "bias", None), form is HeldLinear, routing.wide, self.experts.compiled)
        self.bias, self.scales = (None if each is None else each.detach().float().reshape(-1).contiguous() for each in (bias, scales))
        self.experts.before = routing.before
        self.act_fn: Any = getattr(block.experts, "act_fn", None)
        self.inner = self.experts.down[0].in_features
        self._mixture: Mixture | None = None
        if self.experts.compiled and isinstance(self.router, StreamedLinear):
            self._mixture = self.experts.mixture(self.each, self.routing, self.router.product, self.bias, self.scales)
        self.compiled = self._mixture is not None

    def address(self) -> int:
        """Of the `Mixture`, for kernels/block.c."""
        assert self._mixture is not None
        return ctypes.addressof(self._mixture)

    def forward(self, x: Tensor, asked: Tensor | None = None) -> Tensor:
        """x [rows, hidden] → [rows, hidden]; asked: what the router reads, if it is not x."""
        asked = x if asked is None else asked
        logits = self.router(asked.float() if self.routing.wide else asked)
        if self._mixture is not None and x.dtype in native.TYPES:
            return mix(self._mixture, x, *route(self._mixture, logits, x.dtype))
        return self.experts(x, *self.choose(logits, x.dtype))               # type: ignore[no-any-return]

    def choose(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The twin of `route`: of logits [rows, experts] the experts and weights [rows, k], for a stream of this type."""
        how, shared = self.routing, self.experts.shared
        own, gate = torch.split(logits.float(), [logits.shape[1] - how.gated, int(how.gated)], 1)
        law = own.sigmoid() if how.by_sigmoid else own.softmax(-1)
        worth = own if how.by_logits else law
        worth = _of_groups(worth if self.bias is None else worth + self.bias, how)
        chosen = worth.sort(stable=True, dim=-1, descending=True).indices[:, : self.each - shared]
        weights = law.gather(1, chosen)
        if how.near:
            chosen, weights = _mixed_sparsely(own.to(logits.dtype), self.each - shared, how.near)
        weights = (weights / (weights.sum(-1, keepdim=True) + how.beside) if how.normed else weights) * how.factor
        weights = weights if self.scales is None else weights * self.scales[chosen]
        always = torch.arange(shared, device=logits.device) + own.shape[1]
        gates = gate.sigmoid() if how.gated else gate.new_full((len(gate), 1), how.always)
        weights = torch.cat([weights, gates.expand(-1, shared)], 1)
        return torch.cat([chosen, always.expand(len(chosen), -1)], 1), weights.to(dtype) if how.kept else weights


def _of_groups(worth: Tensor, how: Routing) -> Tensor:
    """worth [rows, experts], but none of those in groups that a row does not choose."""
    if how.within >= how.groups:
        return worth
    groups = worth.view(len(worth), how.groups, -1)
    best = groups.topk(how.leading).values.sum(-1).sort(stable=True, dim=-1, descending=True).indices[:, : how.within]
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=worth.device).scatter(1, best, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).view_as(worth)


def _mixed_sparsely(logits: Tensor, each: int, near: float) -> tuple[Tensor, Tensor]:
    """So many experts of logits [rows, experts] and their weights [rows, each], float32, as `Routing.near` says."""
    left, found = logits, []
    for _ in range(each):
        best = left.sort(stable=True, dim=-1, descending=True).indices[:, :1]
        top = logits.gather(1, best)
        far = (top - logits) / torch.maximum(logits.abs(), top) > near
        found.append((best, left.masked_fill(far, float("-inf")).float().softmax(-1).gather(1, best)))
        left = left.scatter(1, best, float("-inf"))
    chosen, weights = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return chosen, weights


def router_of(block: Any) -> Any:
    return block.gate if hasattr(block, "gate") else block.router


def scoring(router: Any) -> Any:
    """The part of a router that has its weight (Gemma 4's, Hunyuan's, Trinity's), or the router itself."""
    return next((part for name in ("proj", "wg", "gate") if (part := getattr(router, name, None)) is not None), router)


def chosen_by(router: Any) -> int:
    """How many experts a row chooses."""
    found: int | None = getattr(router, "top_k", None)
    return int(router.config.top_k_experts) if found is None else found


def bias_of(block: Any) -> Tensor | None:
    """What is added to weights where experts are chosen (Wang et al., arXiv 2408.15664); families have it in three places, by two names."""
    router = router_of(block)
    places = (router, block, getattr(router, "moe_statics", None))
    found = (getattr(place, name, None) for place in places for name in ("e_score_correction_bias", "expert_bias"))
    return next((bias for bias in found if bias is not None), None)


def shared_of(block: Any, layer: Any = None) -> Any:
    """The MLP that all rows go through, or None; Granite 4's stands beside the block."""
    found = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    return found or getattr(block, "shared_mlp", None) or getattr(layer, "shared_mlp", None)


def _products(mlp: Any) -> tuple[list[Any], Any]:
    """Those of gate and up, joined or not, or up alone, and that of down."""
    if hasattr(mlp, "input_linear"):
        return [mlp.input_linear], mlp.output_linear
    return [part for name in ("gate_proj", "up_proj") if (part := getattr(mlp, name, None)) is not None], mlp.down_proj


def comes_apart(block: Any, layer: Any) -> bool:
    """Whether what all rows go through is so many experts of the others' size."""
    mlp = shared_of(block, layer)
    if mlp is None:
        return True
    first, down = _products(mlp)
    inner, whole = inner_of(block.experts), down.in_features
    act = next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "activation") if hasattr(mlp, name))
    parts = (*first, down)
    if any(type(part) is not nn.Linear or part.bias is not None for part in parts) or type(act) is not type(block.experts.act_fn):
        return False
    return whole == inner or whole % inner == 0 and not any(isinstance(part.weight, LevelWeight) for part in parts)


def _shared(block: Any, mlp: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights of the experts that all rows go through, as `Experts` takes them."""
    if mlp is None:
        return
    first, last = _products(mlp)
    inner, whole = inner_of(block.experts), last.in_features
    if whole == inner:                                  # levels of a checkpoint are joined, but cannot be cut
        yield joined(first)[0], last.weight
        return
    gate_up, down = joined(first)[0].view(-1, whole, last.out_features), last.weight.detach()
    for start in range(0, whole, inner):
        part = slice(start, start + inner)
        yield torch.cat([side[part] for side in gate_up]), down[:, part].contiguous()


class SumLinear(StreamedLinear):
    """Of a float32 weight [out, in], the sum of three bfloat16 ones, which stand side by side and read a row each."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        parts, left = [], weight
        for _ in range(3):
            parts.append(left.bfloat16().float())
            left = left - parts[-1]
        super().__init__(torch.cat(parts, 1), bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x] * 3, -1))


def _form(weight: Tensor, bias: Tensor | None, held: bool, wide: bool, compiled: bool) -> nn.Module:
    """The router, which is never rounded to fewer bits. wide: it reads float32, whatever its weight is; compiled: experts run by kernels
    of ours."""
    made = None if held else packed(weight, bias)
    if wide and compiled and made is not None and not isinstance(made, StreamedLinear):
        return SumLinear(weight.float(), bias)
    if isinstance(made, StreamedLinear) or made is not None and not wide:
        return made
    return HeldLinear(weight.float() if wide else weight, bias)
