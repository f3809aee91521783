"""The part of inflate.py that makes a mixture of experts of a small model's MLPs: a Mixtral, which is a Llama but for them.

  experts  each is an inflated copy of the small MLP with random parts of its own. A neuron without a family would write what it writes
           in every other expert, so that all have one: intermediate ≥ twice the small one's.
  router   the shares of the chosen experts add up to 1, so it does not matter to the function whom it chooses. Its rows are random, but
           orthogonal to the mean of what they read on random tokens: trained routers are balanced, and this one uses every expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import MixtralConfig

if TYPE_CHECKING:
    from inflate import Inflater, Shape

FAMILIES = ("llama", "mistral")        # whose attention is Mixtral's
SPREAD = 2.0                           # of the router's logits
SAMPLE = 256                           # random tokens on which the mean is taken
KEPT = ("vocab_size", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters", "pad_token_id",
        "bos_token_id", "eos_token_id", "sliding_window")


def misfit(config: Any, shape: Shape) -> str | None:
    """Why this small model cannot become such a mixture, if so."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} with experts: expected one of {', '.join(FAMILIES)}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "a small model with biases: a mixture of experts has none here"
    if not 1 <= shape.chosen <= shape.experts:
        return f"chosen={shape.chosen}: expected 1 to {shape.experts}, the number of experts"
    if shape.intermediate < 2 * config.intermediate_size:
        return f"intermediate={shape.intermediate}: expected at least twice the small model's {config.intermediate_size}"
    if shape.hidden <= config.hidden_size:
        return f"hidden={shape.hidden}: experts that differ need more than the small model's {config.hidden_size}"
    return None


def mixture_config(config: Any, shape: Shape) -> MixtralConfig:
    """What stays as it is of a small model's configuration; sizes but for the experts' number are the caller's to set."""
    kept = {name: getattr(config, name) for name in KEPT if hasattr(config, name)}
    return MixtralConfig(**kept, num_local_experts=shape.experts, num_experts_per_tok=shape.chosen)


@torch.no_grad()
def usual_inputs(small: Any, generator: torch.Generator) -> list[Tensor]:
    """For each layer of the small model the mean [d] of what its MLP reads, before the norm's weight, on random tokens."""
    ids = torch.randint(small.config.vocab_size, (1, SAMPLE), generator=generator, device=generator.device)
    means: list[Tensor] = []
    norms = [layer.post_attention_layernorm for layer in small.model.layers]
    hooks = [norm.register_forward_hook(lambda norm, _, out: means.append((out / norm.weight).float().mean((0, 1)))) for norm in norms]
    small.model(ids.to(small.device))
    for hook in hooks:
        hook.remove()
    return [mean.to(generator.device) for mean in means]


def fill_mixture(to: Inflater, old: Any, new: Any, extra: bool, norms: tuple[Tensor, Tensor], usual: Tensor) -> None:
    """Router and experts of one layer; `usual` [d] is the layer's of `usual_inputs`."""
    rows = to.random(to.shape.experts, len(usual)) * SPREAD / len(usual) ** 0.5
    rows -= torch.outer(rows @ usual, usual) / usual.dot(usual)
    to.put(new.gate.weight, to.reads(rows, torch.ones_like(usual), norms[1]))
    inward, outward = new.experts.gate_up_proj, new.experts.down_proj
    experts = [to.family(old, extra, norms)[1:] for _ in range(to.shape.experts)]
    to.put(inward, torch.stack([torch.cat((gate, up)).to(inward.dtype) for gate, up, _ in experts]))
    to.put(outward, torch.stack([out.T.to(outward.dtype) for *_, out in experts]))
