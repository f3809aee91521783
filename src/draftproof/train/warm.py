"""Fresh heads that begin as the target's own end: its output rows, its final norm and its last layer, where they have the same form.

A head with a decoder layer has to learn how states become tokens; the target knows it. From random weights the demo's heads spent
most of their first steps on learning the output matrix again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.mtp import MtpHead
from ..models.target import TargetParts

FAMILIES = {"llama", "mistral", "ministral", "qwen2", "qwen3"}      # whose norms and layers mean what ours do


@torch.no_grad()
def warm_eagle3(head: Eagle3Head, parts: TargetParts) -> None:
    """Output rows of the draft vocabulary; the fused state begins as the last tap's, its layer as the target's last one."""
    assert head.lm_head is not None and head.fc is not None, "a fresh head has both"
    _copy(head.lm_head.weight, _weight(parts.output), head.ids)
    if not _alike(parts) or head.shape.hidden != head.target_hidden:
        return
    _copy(head.norm.weight, _weight(parts.norm))
    head.fc.weight.mul_(0.1)[:, -head.target_hidden:] += torch.eye(head.target_hidden, device=head.fc.weight.device)
    first, last = head.layers[0], parts.layers[-1]
    for ours, theirs in (("self_attn.o_proj", "self_attn.o_proj"), ("mlp.gate_proj", "mlp.gate_proj"), ("mlp.up_proj", "mlp.up_proj"),
                         ("mlp.down_proj", "mlp.down_proj"), ("hidden_norm", "input_layernorm"),
                         ("post_attention_layernorm", "post_attention_layernorm")):
        _copy(_weight(first.get_submodule(ours)), _weight(_part(last, theirs)))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        wide = _weight(first.get_submodule(name))
        assert wide is not None
        _copy(wide[:, head.target_hidden:], _weight(_part(last, name)))       # the half that reads the hidden state


@torch.no_grad()
def warm_mtp(head: MtpHead, parts: TargetParts) -> None:
    """Each layer begins as the target's last one and reads the hidden state alone; what the token adds is learnt."""
    if not _alike(parts):
        return
    own = dict(parts.layers[-1].named_parameters())
    for block in head.blocks:
        for name, parameter in block.named_parameters():
            _copy(parameter, own.get(name))
    for norm in head.norms:
        _copy(_weight(norm), _weight(parts.norm))
    for fusion in head.fusions:
        weight = _weight(fusion.get_submodule("proj"))
        assert weight is not None
        half = weight[:, :head.size] if fusion.hidden_first else weight[:, head.size:]
        half += torch.eye(head.size, device=weight.device, dtype=weight.dtype)


def _alike(parts: TargetParts) -> bool:
    return bool(parts.layers) and getattr(parts.config.get_text_config(), "model_type", None) in FAMILIES


def _part(layer: nn.Module, name: str) -> nn.Module | None:
    return dict(layer.named_modules()).get(name)


def _weight(module: nn.Module | None) -> Tensor | None:
    found: Tensor | None = getattr(module, "weight", None)
    return found


def _copy(into: Tensor | None, source: Tensor | None, rows: Tensor | None = None) -> None:
    """If there is such a tensor (a packed layer shows none), of this shape."""
    if into is None or source is None or source.is_meta:
        return
    source = source if rows is None else source[rows]
    if into.shape == source.shape:
        into.copy_(source)
