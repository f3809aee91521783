"""Tensor parallelism: what each of n processes holds of a model, and how their partial products become whole.

    q, k, v, gate, up    a share of the outputs
    o, down              a share of the inputs: the product is the sum over the processes, in the order of their ranks

(Shoeybi et al., arXiv 1909.08053.) Which layers come apart, and how, is said by the family's own `base_model_tp_plan`. Embedding,
norms and output matrix stay whole: drafters borrow them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..errors import LoadError
from .folder import assembled, fetched, weight_files
from .packed import Linear

DIVIDED = {"num_attention_heads": "att", "num_key_value_heads": "att", "intermediate_size": "mlp"}     # sizes, and whose layers they are
DIMENSION = {"colwise": 0, "rowwise": 1}    # of a weight [out, in] that is divided
WHOLE = {"replicated_with_grad_allreduce"}  # held by every process
EMBEDDING = "embedding_rowwise"             # of tokens; in plans of some versions, and held by every process as well
PATIENCE = timedelta(minutes=5)             # within one pass, and while the others load


class Ranks:
    """The processes of one target on this machine, as one of them sees them."""

    def __init__(self, rank: int, count: int, store: str, device: torch.device) -> None:
        """store: a file that all of them can write; returns when all have come. Raises LoadError without a way between the devices."""
        self.rank, self.count = rank, count
        files = distributed.FileStore(store, count)  # type: ignore[attr-defined]
        kind: Any
        wish: Any
        if device.type == "cuda":
            if not distributed.is_nccl_available():
                raise LoadError("tensor_parallel: this torch was built without NCCL, which GPUs exchange through; use one device")
            torch.cuda.set_device(device)
            kind = distributed.ProcessGroupNCCL
            wish = kind.Options()
        else:
            kind = distributed.ProcessGroupGloo
            wish = kind._Options()
            wish._devices = [kind.create_device(hostname="127.0.0.1")]
        wish._timeout = PATIENCE
        self._group: Any = kind(files, rank, count, wish)

    def sum(self, part: Tensor) -> Tensor:
        """Σ of every process's `part`, in float32 and in the order of the ranks: the same bits in each of them, whatever stands beside a
        row. (A ring's order depends on where in the tensor an element stands.)"""
        parts = part.new_empty(self.count, *part.shape)
        bytes_of = [tensor.view(-1).view(torch.uint8) for tensor in (parts, part.contiguous())]
        self._group._allgather_base(*bytes_of).wait()
        total = parts[0].float()
        for other in parts[1:]:
            total = total.add_(other)
        return total.to(part.dtype)


class Summed(nn.Module):
    """y = Σ over processes of part(x), + b."""

    def __init__(self, part: nn.Module, bias: Tensor | None, ranks: Ranks) -> None:
        """part: a linear layer without a bias over this process's share of the inputs."""
        super().__init__()
        self.part, self.bias, self.ranks = part, bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        total = self.ranks.sum(self.part(x))
        return total if self.bias is None else total.add_(self.bias)


def bare(layer: nn.Module) -> nn.Module:
    """The product behind a sum over processes, or the layer itself."""
    return layer.part if isinstance(layer, Summed) else layer


def kept(layer: nn.Module, linear: Linear) -> nn.Module:
    """A linear layer in the form that `linear` makes; what is summed over processes stays so."""
    if isinstance(layer, Summed):
        return Summed(linear(layer.part.weight, None), layer.bias, layer.ranks)  # type: ignore[arg-type]
    return linear(layer.weight, layer.bias)  # type: ignore[arg-type]


def divided(config: Any, count: int) -> Any:
    """The configuration of one of `count` shares. Raises LoadError for a model that does not come apart."""
    name = f"tensor_parallel={count}: {config.model_type}"
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or set(plan.values()) == {EMBEDDING} or config.get_text_config() is not config:
        raise LoadError(f"{name} has no plan for it in this version of transformers; use one device")
    strange = sorted({style for layer, style in plan.items() if style != EMBEDDING or "*" in layer} - set(DIMENSION) - WHOLE)
    if strange or getattr(config, "quantization_config", None):
        raise LoadError(f"{name} comes apart in ways that are not supported ({', '.join(strange) or 'its weights are quantised'}); "
                        "use one device, or serve --engine vllm")
    share = deepcopy(config)
    share.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for field, part in DIVIDED.items():
        whole = getattr(config, field, None)
        if whole is None or not any(part in layer for layer in plan):
            continue
        if whole % count:
            raise LoadError(f"{name} has {field}={whole}; expected a tensor_parallel that divides it")
        setattr(share, field, whole // count)
    return share


def load_share(path: str, config: Any, dtype: torch.dtype, ranks: Ranks) -> tuple[Any, Any]:
    """(the model of this process's share, what transformers says of the load). Only the share is read."""
    share, plan = divided(config, ranks.count), config.base_model_tp_plan
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    folder, prefix = fetched(path), kind.base_model_prefix + "."
    model, info = assembled(kind, share, _weights(folder, prefix, plan, ranks), dtype, folder)
    for name, layer in list(model.named_modules()):
        if _style(name, prefix, plan) == "rowwise":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Summed(layer, layer.bias, ranks))
            layer.register_parameter("bias", None)  # added once, behind the sum
    return model, info


def _weights(folder: Path, prefix: str, plan: Mapping[str, str], ranks: Ranks) -> dict[str, Tensor]:
    """This share's weights by name, read file by file."""
    weights: dict[str, Tensor] = {}
    for name in weight_files(folder):
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                layer, _, kind = key.rpartition(".")
                style = _style(layer, prefix, plan)
                if style not in DIMENSION or (style, kind) == ("rowwise", "bias"):
                    weights[key] = file.get_tensor(key)
                else:
                    weights[key] = _share(file.get_slice(key), DIMENSION[style], ranks)
    return weights


def _style(layer: str, prefix: str, plan: Mapping[str, str]) -> str:
    return plan.get(re.sub(r"\.\d+\.", ".*.", layer.removeprefix(prefix)), "") if layer.startswith(prefix) else ""


def _share(whole: Any, dimension: int, ranks: Ranks) -> Tensor:
    """This process's part of a safetensors slice along one dimension, which `divided` has found to come out even."""
    size = whole.get_shape()[dimension] // ranks.count
    at = slice(ranks.rank * size, (ranks.rank + 1) * size)
    part: Tensor = whole[at] if dimension == 0 else whole[:, at]
    return part.contiguous()
