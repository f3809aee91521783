"""Mixtures of experts by products of our own (Shazeer et al., arXiv 1701.06538): what stands for transformers' experts.

    y = Σ over the experts e that a row chose, in the order of its choices:  weight · down_e(act(gate_up_e(x)))

transformers multiplies with slices of one large tensor by functions whose bits depend on how many rows chose an expert, or copies the
chosen slices first; rows of a pass then feel each other, and a router that sits on the edge turns that into another text. Here each expert
is two layers of the form that all linear layers have, and a row's sum has an order of its own.

Where a gate is one of an MLP's or gpt-oss's, or there is none, all of that is one call (kernels/experts.c); what other families do stays
their own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, GELUActivation, NewGELUActivation, ReLUSquaredActivation, SiLUActivation

from .. import native
from ..mixtures import Mixture, Products, mix, multiply_each
from .between import gated
from .levels import LevelExperts
from .packed import Linear, StreamedLinear, packed, sizes, widened_bytes
from .placeholder import Placeholder
from .target import ExpertFacts

SILU = (nn.SiLU, SiLUActivation)
ACTS = {**dict.fromkeys(SILU, native.SILU), type(ACT2FN["gelu_pytorch_tanh"]): native.GELU_BY_TANH,    # those of kernels of ours
        NewGELUActivation: native.GELU_BY_TANH, GELUActivation: native.GELU, ReLUSquaredActivation: native.RELU_SQUARED,
        nn.ReLU: native.RELU}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")            # as configurations name them
ROUTER = re.compile("Router|Gat(?:e|ing)$")      # in transformers' names of classes
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


def act_of(experts: Any) -> int | None:
    """By which kernel of ours they take gates, if these stand in front of ups and are what `act_fn` makes of them, or ups alone."""
    own = getattr(type(experts), "_apply_gate", None)
    if experts.has_gate and own is not None and own.__module__ != "transformers.integrations.moe":
        return None
    return native.SILU if experts.act_fn is nn.functional.silu else ACTS.get(type(experts.act_fn))


def marked(experts: Any) -> Any:
    """Experts with what transformers marks all others with but Llama 4's, which stand transposed, gates in front of ups."""
    if not hasattr(experts, "has_gate"):
        experts.has_gate = experts.is_transposed = True
        experts._apply_gate = partial(gated, experts.act_fn)
    return experts


def inner_of(experts: Any) -> int:
    """How many numbers stand between an expert's first product and its last."""
    found: int = experts.down_proj.shape[1 if marked(experts).is_transposed else 2]
    return found


def are_experts(module: nn.Module) -> bool:
    """Whether a module is one of transformers' collections of experts, all of whose weights lie in two tensors [experts, …]."""
    return (getattr(module, "has_gate", None) is not None and hasattr(module, "is_transposed")
            and all(isinstance(getattr(module, name, None), Tensor) and getattr(module, name).dim() == 3 for name in _names(module)))


def _names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


class Experts(nn.Module):
    """Stands for transformers' experts, whose weights it takes one by one. The last `shared` of them are all rows'."""

    def __init__(self, like: Any, form: Linear, shared: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """shared: of each such expert gate and up, one below the other, and down."""
        super().__init__()
        self.first, self.down = (self._layers(like, name, form) for name in _names(marked(like)))
        for side, layers in enumerate((self.first, self.down)):
            layers.extend(form(weights[side], None) for weights in shared)
        self.shared = len(shared)
        self.like = like
        self._act = act_of(like)
        self._limits = limits_of(like) if self._act is None else None
        self.before = False     # rows are taken times their weights as they enter
        self._products: tuple[Products, Products] | None = None
        self._mixtures: dict[int, Mixture] = {}
        if all(isinstance(layer, StreamedLinear) for layer in (*self.first, *self.down)):
            self._products = _products_of(self.first), _products_of(self.down)
        self._normed: bool = getattr(like, "has_post_expert_norm", False)                       # unknown to transformers 5.17
        self.compiled = (self._act is not None or self._limits is not None) and self._products is not None and not self._normed

    @staticmethod
    def _layers(like: Any, name: str, form: Linear) -> nn.ModuleList:
        weights, biases = getattr(like, name), getattr(like, f"{name}_bias", None)
        delattr(like, name)
        if isinstance(weights, LevelExperts):
            each: Iterable[Tensor] = weights.each
        else:
            each = weights.detach().transpose(1, 2) if like.is_transposed else weights.detach()
        return nn.ModuleList(form(weight, None if biases is None else biases[number].detach()) for number, weight in enumerate(each))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [rows, hidden], the experts of each row [rows, k] and their weights → [rows, hidden]. A number that no expert has
        stands for none."""
        if self.compiled and hidden_states.dtype in native.TYPES:
            each = top_k_index.shape[1]
            if each not in self._mixtures:
                self._mixtures[each] = self.mixture(each)
            return mix(self._mixtures[each], hidden_states, top_k_index, top_k_weights)
        return self.steps(hidden_states, top_k_index, top_k_weights)

    def mixture(self, each: int, *route: Any) -> Mixture:
        """For `mix`, where rows choose so many; route: what `Mixture.of` takes for `route`."""
        assert self._products is not None
        return Mixture.of(*self._products, each, self._limits, self._act or native.SILU, *route)

    def routed(self) -> tuple[nn.ModuleList, nn.ModuleList]:
        """The layers of those that rows choose."""
        end = len(self.down) - self.shared
        return self.first[:end], self.down[:end]

    def steps(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same, step by step: the twin of `mix`, and the way of families with a gate of their own."""
        count, each = len(self.down), chosen.shape[1]
        order = chosen.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(order.values, torch.arange(count + 1, device=x.device)).tolist()
        rows = order.indices[ends[0]:ends[-1]]
        starts = [end - ends[0] for end in ends]
        entering = x[rows // each]
        if self.before:
            entering, weights = (entering * weights.reshape(-1)[rows, None]).to(x.dtype), torch.ones_like(weights)
        inner = self._multiplied(0, entering, starts)
        inner = self.like._apply_gate(inner) if self.like.has_gate else self.like.act_fn(inner)
        out = self._multiplied(1, inner, starts)
        if self._normed:
            out = self.like.post_expert_norm(out)
        apart = out.new_zeros(chosen.numel(), out.shape[1], dtype=torch.float32)
        apart[rows] = out.float() * weights.reshape(-1)[rows, None].float()
        found = apart.view(*chosen.shape, out.shape[1])
        total = found[:, 0]
        for choice in range(1, each):
            total = total + found[:, choice]
        return total.to(x.dtype)

    def _multiplied(self, side: int, x: Tensor, starts: Sequence[int]) -> Tensor:
        """Rows in the order of their experts, each by its own expert's first layer, or second."""
        layers: Any = self.down if side else self.first
        parts = [(number, start, end) for number, (start, end) in enumerate(pairwise(starts)) if start < end]
        if self._products is not None and x.dtype in native.TYPES:
            return multiply_each(self._products[side], x, parts)
        out: Tensor = x.new_empty(len(x), layers[0].out_features)
        for number, start, end in parts:
            rows = x[start:end]
            out[start:end] = layers[number](rows if len(rows) > 1 else rows.repeat(2, 1))[: end - start]    # other kernels take one row
        return out


def limits_of(like: Any) -> tuple[float, float] | None:
    """alpha and limit of experts whose gate is gpt-oss's, found by what it does to some numbers; None of all others:

        min(gate, limit) · sigmoid(alpha · gate) · (clamp(up, −limit, limit) + 1)        gates and ups in turn
    """
    alpha, limit = getattr(like, "alpha", None), getattr(like, "limit", None)
    if not like.has_gate or not isinstance(alpha, float) or not isinstance(limit, float):
        return None
    x = torch.linspace(-2 * limit, 2 * limit, 64).view(2, 32).flip(0)[:, torch.arange(32) * 7 % 32]
    gate, up = x[:, ::2].clamp(max=limit), x[:, 1::2].clamp(-limit, limit)
    same = torch.allclose(like._apply_gate(x), (up + 1) * gate * torch.sigmoid(gate * alpha), atol=1e-5)
    return (alpha, limit) if same else None


def _products_of(layers: Iterable[Any]) -> Products:
    found = [layer.product for layer in layers]
    return (native.Product * len(found))(*found)


class RouterWeight(Placeholder):
    """A router's weight [experts, hidden], which its module multiplies by itself, often in float32: here by a product of ours, whose rows
    do not feel each other."""

    layer: StreamedLinear
    stored: Tensor

    def __new__(cls, layer: StreamedLinear, stored: Tensor, dtype: torch.dtype) -> Self:
        made = super().__new__(cls, stored.shape, dtype, stored.device)
        made.layer, made.stored = layer, stored
        return made

    def values(self) -> Tensor:
        return self.stored.to(self.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function is nn.functional.linear and len(args) > 1 and isinstance(args[1], RouterWeight) and args[0].dtype in native.TYPES:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            found = native.multiply(args[0], args[1].layer.product)
            return found if bias is None else found + bias
        if args and isinstance(args[0], RouterWeight) and (name in ("float", "detach") or name in ("to", "type") and not kwargs):
            wanted = {"float": torch.float32, "detach": args[0].dtype}.get(name) or args[1]
            if wanted in (torch.float32, args[0].stored.dtype):         # which hold every value
                return RouterWeight(args[0].layer, args[0].stored, wanted)
        return super().__torch_function__(function, types, args, kwargs)


def take_experts(model: nn.Module, form: Linear, spared: Set[nn.Module] = frozenset()) -> None:
    """Replace every collection of experts below `model`, in place and one after the other, and on a CPU their `routers`, but for those
    `spared`."""
    scoring = routers(model) - spared
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if are_experts(child):
                setattr(parent, name, Experts(child, form))
            elif child in scoring:
                _take_router(parent, name, child)


def routers(model: nn.Module) -> set[nn.Module]:
    """What scores experts, beside their collections, with all parts: as other linear layers some would be rounded."""
    found: set[nn.Module] = set()
    for parent in model.modules():
        beside: list[Any] = list(parent.children())
        counts = {child.down_proj.shape[0] for child in beside if are_experts(child)}
        for child in beside if counts else ():
            weight = getattr(child, "weight", None)
            scores = isinstance(weight, nn.Parameter) and weight.dim() == 2 and len(weight) in counts
            if scores or ROUTER.search(type(child).__name__):
                found.update(child.modules())
    return found


def _take_router(parent: nn.Module, name: str, router: Any) -> None:
    """A part of a router: one that is a linear layer, or has a weight that it multiplies by itself."""
    weight = getattr(router, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or weight.device.type != "cpu":
        return
    if type(router) is nn.Linear:
        setattr(parent, name, packed(weight.detach(), router.bias))
    elif isinstance(layer := packed(weight.detach(), None), StreamedLinear):
        del router.weight
        router.weight = RouterWeight(layer, weight.detach(), weight.dtype)


def experts_of(model: Any) -> ExpertFacts | None:
    """What is known of a model's experts, before its layers are packed; None where it has none, or layers differ in how many they have.

    Experts that every row goes through count as any other layer.
    """
    config = model.config.get_text_config()
    kept = [config, getattr(config, "ffn_config", None)]
    count, chosen = (next((value for part in kept for name in names if (value := getattr(part, name, None))), None)
                     for names in (COUNTS, CHOSEN))
    found = [sizes(module) for module in _collections(model)]
    if not found or not isinstance(count, int) or not isinstance(chosen, int) or not 0 < chosen <= count:
        return None
    return ExpertFacts(count, chosen, *map(sum, zip(*found, strict=True)))


def _collections(module: nn.Module, name: str = "") -> Iterator[nn.Module]:
    """The outermost modules that hold a layer's routed experts: transformers calls them, or their class, so."""
    if name == "experts" or type(module).__name__.endswith("Experts"):
        yield module
        return
    for below, child in module.named_children():
        yield from _collections(child, below)


def packed_bytes(model: nn.Module) -> int:
    """What experts hold, in the form that they are in, beyond the size of their weights' own type."""
    return sum(widened_bytes(layers) for module in model.modules() if isinstance(module, Experts) for layers in module.routed())
