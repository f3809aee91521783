"""Give a Llama-like model a larger shape that computes the same function, so that speed can be measured at any size.

    python benchmarks/inflate.py SRC DST --hidden 1536 --layers 16 --heads 24 --kv-heads 12 --intermediate 6144

Timing is then that of the large model; text and acceptance are those of the small, trained one. How it works:

  stream   h becomes H = s·R·h: R [D, d] has random orthonormal columns and s = √(D/d), so mean(H²) = mean(h²) and every
           RMSNorm, eps included, does what it did. Its weight is folded into the matrices that read it; a random one,
           undone in the same place, takes its seat, so that no tool can drop it.
  family   each neuron and each query head becomes a family that computes one value. Members read through different rows:
           they differ where the stream has nothing (the null space of Rᵀ). Their write vectors are random, but sum to
           the original's.
  layers   an extra layer adds nothing: its neurons come in pairs with exactly opposite write vectors, and its values
           read the null space, so that what any output projection makes of them is zero.
  heads    head_dim may grow by a whole factor m: rotary pair i moves to pair i·m, which turns at the same speed; new
           query and key dims read the null space, so they hold zero.
  experts  each MLP may become a mixture of experts, of which any choice computes what the MLP did (see mixture.py).

No matrix is zero, repeated or of low rank, so nothing can be merged, skipped or compressed; `degenerate` checks it. Rank
is full where the shape leaves room: kv_heads·head_dim ≤ hidden − d and intermediate ≥ 2·hidden (with as many kv heads as
heads, key and value projections miss up to d of hidden). The one exception is the embedding table, which is looked up and
never multiplied: its rows are states of the small model and span d dimensions by necessity. Tied embeddings become
untied: the folded final norm belongs to the output layer alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from mixture import fill_mixture, misfit, mixture_config, usual_inputs
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NULL_SHARE = 0.5        # size of a read row's null-space part, relative to the row
WRITE_SHARE = 0.5       # size of a write vector's cancelling part, relative to the original over √members
NORM_RANGE = (0.75, 1.25)


@dataclass(frozen=True, slots=True)
class Shape:
    """The larger shape. head_dim None keeps the small model's. experts: of each MLP, of which a token takes `chosen`; 0 keeps it dense."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int | None = None
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Which small head each large one computes: kv_unit [kv], query_unit [kv, group]."""

    kv_unit: Tensor
    query_unit: Tensor


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def check_shape(config: Any, shape: Shape) -> None:
    """Raises ValueError with what was found and what was expected if the small model does not fit into the shape."""
    require(config.model_type in FAMILIES, f"model type {config.model_type!r}: expected one of {', '.join(FAMILIES)}")
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config)
    for name, new, old in (("hidden", shape.hidden, config.hidden_size), ("layers", shape.layers, config.num_hidden_layers),
                           ("heads", shape.heads, heads), ("intermediate", shape.intermediate, config.intermediate_size)):
        require(new >= old, f"{name}={new}: expected at least the small model's {old}")
    require(shape.heads % shape.kv_heads == 0, f"heads={shape.heads}: expected a multiple of kv heads ({shape.kv_heads})")
    copies = -(-(heads // kv) // (shape.heads // shape.kv_heads))
    require(shape.kv_heads >= kv * copies,
            f"kv heads={shape.kv_heads}: expected at least {kv * copies} to hold {kv} groups of {heads // kv} query heads")
    require((shape.head_dim or width) % width == 0, f"head_dim={shape.head_dim}: expected a multiple of the small model's {width}")
    if shape.layers > config.num_hidden_layers or (shape.head_dim or width) > width:
        require(shape.hidden > config.hidden_size,
                f"hidden={shape.hidden}: extra layers and head dims need more than the small model's {config.hidden_size}")
    require(bool(shape.experts) or not shape.chosen, f"chosen={shape.chosen}: expected no chosen experts where there are none")
    if shape.experts:
        require(not (why := misfit(config, shape)), str(why))


def real_layers(small: int, large: int) -> list[int | None]:
    """For each large layer the small layer it computes, or None; the extra ones are spread evenly."""
    places: list[int | None] = [None] * large
    for i in range(small):
        places[i * large // small] = i
    return places


def plan_heads(config: Any, shape: Shape, device: torch.device) -> HeadPlan:
    """Groups take the small kv heads in turn; the query heads of one kv head are dealt out over all of its groups."""
    kv, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    large_group = shape.heads // shape.kv_heads
    slot = torch.arange(shape.kv_heads, device=device)[:, None]
    seat = torch.arange(large_group, device=device)[None, :]
    return HeadPlan(slot[:, 0] % kv, slot % kv * group + (slot // kv * large_group + seat) % group)


def opposed(vectors: Tensor) -> Tensor:
    """[n, D] with the second half the exact negative of the first; an odd one out is shared with the first pair."""
    out, half = vectors.clone(), vectors.shape[0] // 2
    out[half:2 * half] = -out[:half]
    if vectors.shape[0] % 2:
        out[half] -= out[-1]
    return out


def rotation_of(large: int, small: int, generator: torch.Generator) -> Tensor:
    """R [large, small]: what a seed's generator draws first."""
    return torch.linalg.qr(torch.randn(large, small, generator=generator, device=generator.device))[0]


class Inflater:
    """Fills one large model, matrix by matrix, on its own device, in float32 and then in the model's dtype."""

    def __init__(self, small: PreTrainedModel, large: PreTrainedModel, shape: Shape, device: torch.device, seed: int) -> None:
        self.small, self.large, self.shape, self.device = small, large, shape, device
        self.config: Any = small.config
        self.head_dim = head_dim_of(self.config)
        self.large_head_dim = shape.head_dim or self.head_dim
        self.generator = torch.Generator(device=device).manual_seed(seed)
        d = self.config.hidden_size
        self.rotation = rotation_of(shape.hidden, d, self.generator)
        self.scale = math.sqrt(shape.hidden / d)
        self.filled: set[int] = set()
        m, half = self.large_head_dim // self.head_dim, self.head_dim // 2
        first = torch.arange(half, device=device) * m
        self.dims = torch.cat((first, first + self.large_head_dim // 2))               # where a small head's dims go

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device)

    def old(self, parameter: Tensor) -> Tensor:
        return parameter.detach().to(self.device, torch.float32)

    def put(self, parameter: Tensor, value: Tensor) -> None:
        assert parameter.shape == value.shape, f"{tuple(value.shape)} does not fit {tuple(parameter.shape)}"
        assert id(parameter) not in self.filled, "each parameter is filled once"
        parameter.data.copy_(value)
        self.filled.add(id(parameter))

    def new_norm(self, norm: Any) -> Tensor:
        """A random RMSNorm weight [D], to be undone in what reads it."""
        low, high = NORM_RANGE
        weight = torch.rand(self.shape.hidden, generator=self.generator, device=self.device) * (high - low) + low
        self.put(norm.weight, weight)
        rounded: Tensor = norm.weight.detach().float()          # what is undone is the weight as stored
        return rounded

    def reads(self, weight: Tensor, old_norm: Tensor, new_norm: Tensor, silent: bool = False) -> Tensor:
        """Rows [n, D] that read from the large, normalised stream what `weight` [n, d] read from the small one, or, if
        `silent`, nothing. Each row gets a part of its own in the null space; a zero row consists of that alone."""
        rows = (weight * old_norm) @ self.rotation.T / self.scale
        power = rows.pow(2).mean(1)
        null = self.random(*rows.shape) * (NULL_SHARE * power[power > 0].mean().sqrt())
        null -= (null @ self.rotation) @ self.rotation.T
        read: Tensor = (null if silent else rows + null) / new_norm
        return read

    def writes(self, target: Tensor, unit: Tensor) -> Tensor:
        """Write vectors [n, …, D]: random, but those of one unit [n] sum to what target[unit] [units, …, d] wrote."""
        goal = target @ self.rotation.T * self.scale
        noise = self.random(len(unit), *goal.shape[1:])
        members = torch.bincount(unit, minlength=goal.shape[0]).view(-1, *[1] * (goal.ndim - 1))
        mean = torch.zeros_like(goal).index_add_(0, unit, noise) / members
        size = WRITE_SHARE * goal.pow(2).mean().sqrt() / members.sqrt()
        vectors: Tensor = (noise - mean[unit]) * size[unit] + (goal / members)[unit]
        return vectors

    def free_writes(self, target: Tensor, count: int) -> Tensor:
        """Random write vectors [count, D] of an extra layer, of the size that the family members of `target` have."""
        goal = target.pow(2).mean().sqrt() * self.scale * math.sqrt(target.shape[-1] / self.shape.hidden)
        size = WRITE_SHARE * goal * math.sqrt(target.shape[0] / count)
        vectors: Tensor = self.random(count, self.shape.hidden) * size
        return vectors

    def grow(self, heads: Tensor) -> Tensor:
        """[units, head_dim, …] → [units, large head_dim, …], zero in the new dims."""
        out = torch.zeros(heads.shape[0], self.large_head_dim, *heads.shape[2:], device=self.device)
        out[:, self.dims] = heads
        return out

    def project(self, old: Any, new: Any, unit: Tensor, norms: tuple[Tensor, Tensor], factor: float) -> None:
        """Query or key projection: unit [slots]."""
        heads = self.grow(self.old(old.weight).view(-1, self.head_dim, self.config.hidden_size)) * factor
        self.put(new.weight, self.reads(heads[unit].flatten(0, 1), *norms))
        if new.bias is not None:
            self.put(new.bias, (self.grow(self.old(old.bias).view(-1, self.head_dim)) * factor)[unit].flatten())

    def project_values(self, old: Any, new: Any, unit: Tensor, extra: bool, norms: tuple[Tensor, Tensor]) -> None:
        """Value projection: new dims hold something at random, equal for equal units; what is made of it cancels."""
        heads = self.grow(self.old(old.weight).view(-1, self.head_dim, self.config.hidden_size))
        spare = torch.ones(self.large_head_dim, dtype=torch.bool, device=self.device)
        spare[self.dims] = False
        heads[:, spare] = self.random(*heads[:, spare].shape) * heads[:, ~spare].pow(2).mean().sqrt()
        self.put(new.weight, self.reads(heads[unit].flatten(0, 1), *norms, silent=extra))
        if new.bias is not None:
            self.put(new.bias, self.grow(self.old(old.bias).view(-1, self.head_dim))[unit].flatten() * (not extra))

    def attention(self, old: Any, new: Any, extra: bool, norms: tuple[Tensor, Tensor]) -> None:
        plan = plan_heads(self.config, self.shape, self.device)
        query = plan.query_unit.flatten()
        growth = self.large_head_dim / self.head_dim
        normed = getattr(old, "q_norm", None) is not None
        factor = math.sqrt(growth) if normed else growth ** 0.25      # undoes the mean, or 1/√head_dim of the scores
        self.project(old.q_proj, new.q_proj, query, norms, factor)
        self.project(old.k_proj, new.k_proj, plan.kv_unit, norms, factor)
        self.project_values(old.v_proj, new.v_proj, plan.kv_unit, extra, norms)
        if normed:
            for name in ("q_norm", "k_norm"):
                weight = torch.ones(self.large_head_dim, device=self.device)
                weight[self.dims] = self.old(getattr(old, name).weight) * growth ** -0.25
                self.put(getattr(new, name).weight, weight)
        target = self.old(old.o_proj.weight).T
        heads = self.grow(target.reshape(-1, self.head_dim, self.config.hidden_size))
        out = self.free_writes(target, len(query) * self.large_head_dim) if extra else self.writes(heads, query).flatten(0, 1)
        self.put(new.o_proj.weight, out.T)
        self.write_bias(old.o_proj, new.o_proj, extra)

    def family(self, old: Any, extra: bool, norms: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the neurons of an MLP: which small one each computes [I], gate and up rows [I, D], write vectors [I, D]."""
        unit = torch.arange(self.shape.intermediate, device=self.device)
        unit = (unit % (len(unit) // 2) if extra else unit) % self.config.intermediate_size
        gate, up = (self.reads(self.old(getattr(old, name).weight)[unit], *norms) for name in ("gate_proj", "up_proj"))
        target = self.old(old.down_proj.weight).T
        return unit, gate, up, opposed(self.free_writes(target, len(unit))) if extra else self.writes(target, unit)

    def neurons(self, old: Any, new: Any, extra: bool, norms: tuple[Tensor, Tensor]) -> None:
        unit, gate, up, out = self.family(old, extra, norms)
        for a, b, rows in ((old.gate_proj, new.gate_proj, gate), (old.up_proj, new.up_proj, up)):
            self.put(b.weight, rows)
            if b.bias is not None:
                self.put(b.bias, self.old(a.bias)[unit])
        self.put(new.down_proj.weight, out.T)
        self.write_bias(old.down_proj, new.down_proj, extra)

    def write_bias(self, old: Any, new: Any, extra: bool) -> None:
        if new.bias is not None:
            self.put(new.bias, self.rotation @ self.old(old.bias) * (0.0 if extra else self.scale))

    def run(self) -> None:
        small: Any = self.small
        large: Any = self.large
        self.put(large.model.embed_tokens.weight, self.old(small.model.embed_tokens.weight) @ self.rotation.T * self.scale)
        usual = usual_inputs(small, self.generator) if self.shape.experts else []
        source = 0
        for layer, place in zip(large.model.layers, real_layers(self.config.num_hidden_layers, self.shape.layers), strict=True):
            source = source if place is None else place         # an extra layer takes its statistics from the one before
            old = small.model.layers[source]
            norms = (self.old(old.input_layernorm.weight), self.new_norm(layer.input_layernorm))
            self.attention(old.self_attn, layer.self_attn, place is None, norms)
            norms = (self.old(old.post_attention_layernorm.weight), self.new_norm(layer.post_attention_layernorm))
            if usual:
                fill_mixture(self, old.mlp, layer.mlp, place is None, norms, usual[source])
            else:
                self.neurons(old.mlp, layer.mlp, place is None, norms)
        norms = (self.old(small.model.norm.weight), self.new_norm(large.model.norm))
        self.put(large.lm_head.weight, self.reads(self.old(small.lm_head.weight), *norms))
        missing = [name for name, p in large.named_parameters() if id(p) not in self.filled]
        require(not missing, f"parameters that inflate does not know: {', '.join(missing)}")


def large_config(config: Any, shape: Shape) -> Any:
    large = mixture_config(config, shape) if shape.experts else copy.deepcopy(config)
    types = getattr(config, "layer_types", None)
    if types:
        kinds, last = [], types[0]
        for place in real_layers(config.num_hidden_layers, shape.layers):
            last = last if place is None else types[place]
            kinds.append(last)
        large.layer_types = kinds
    large.hidden_size, large.num_hidden_layers, large.intermediate_size = shape.hidden, shape.layers, shape.intermediate
    large.num_attention_heads, large.num_key_value_heads = shape.heads, shape.kv_heads
    large.head_dim = shape.head_dim or head_dim_of(config)
    large.tie_word_embeddings = False
    return large


@torch.no_grad()
def build_inflated(small: PreTrainedModel, shape: Shape, device: str | torch.device = "cpu",
                   dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PreTrainedModel:
    """The large model, filled in the device's memory from the seed: the small model's function in `shape`.

    Peak memory is the model plus a few float32 copies of its largest matrix. The same seed, device and versions give the
    same weights. Raises ValueError if the small model does not fit or a layer holds parameters of an unknown kind."""
    check_shape(small.config, shape)
    place = torch.device(device)
    config = large_config(small.config, shape)
    with torch.device("meta"):
        large: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    large = large.to_empty(device=place)
    large.model.rotary_emb = type(large.model.rotary_emb)(config=config).to(place)      # its buffers are no parameters
    steps = large.model.rotary_emb.inv_freq.view(small.model.rotary_emb.inv_freq.shape[0], -1)[:, 0]
    require(torch.allclose(steps.cpu(), small.model.rotary_emb.inv_freq.cpu(), rtol=1e-6),
            f"rotary type {config.rope_parameters.get('rope_type')!r} turns at other speeds at head_dim={config.head_dim}: "
            f"keep the small model's {head_dim_of(small.config)}")
    Inflater(small, large, shape, place, seed).run()
    large.generation_config = copy.deepcopy(small.generation_config)
    built: PreTrainedModel = large.eval()
    return built


@torch.no_grad()
def compare(small: PreTrainedModel, large: PreTrainedModel, prompt: Tensor, new_tokens: int = 64) -> dict[str, float | bool]:
    """Both models on a prompt [1, n] and on the small one's greedy continuation of it.

    logits: largest difference relative to the largest logit · same_text: the greedy continuations are equal
    argmax: share of positions with the same likeliest token."""
    def continuation(model: Any) -> Tensor:
        ids = prompt.to(model.device)
        out: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                                     do_sample=False, pad_token_id=0)
        return out.cpu()

    text = continuation(small)
    a, b = (m(text.to(m.device)).logits[0].float().cpu() for m in (small, large))
    return {"logits": ((a - b).abs().max() / a.abs().max()).item(), "same_text": bool(torch.equal(text, continuation(large))),
            "argmax": (a.argmax(-1) == b.argmax(-1)).float().mean().item()}


def row_hashes(matrix: Tensor) -> Tensor:
    """One exact 64-bit hash per row [n]: equal rows, equal hashes."""
    bits = matrix.contiguous().view(torch.int16 if matrix.element_size() == 2 else torch.int32)
    salt = torch.randint(-2**62, 2**62, (matrix.shape[1],), generator=torch.Generator().manual_seed(1)).to(matrix.device) | 1
    return torch.cat([(part.long() * salt).sum(1) for part in torch.split(bits, 1024)])


def degenerate(model: PreTrainedModel, ranks: bool = True) -> list[str]:
    """What a tool could merge, skip or compress: zero or repeated rows and columns (in and across matrices), missing rank.

    Empty is good. Numerical rank is `torch.linalg.matrix_rank`'s; the embedding table is exempt (see the module's text)."""
    found: list[str] = []
    rows: dict[int, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        for matrix in () if parameter.ndim < 2 else parameter.detach().view(-1, *parameter.shape[-2:]):        # one, or each expert's
            for kind, vectors in (("row", matrix), ("column", matrix.T)):
                zeros = int((vectors == 0).all(1).sum())
                if zeros:
                    found.append(f"{name}: {zeros} zero {kind}s")
                rows.setdefault(vectors.shape[1], []).append(row_hashes(vectors))
            if ranks and "embed_tokens" not in name:
                rank = int(torch.linalg.matrix_rank(matrix.float()))
                if rank < min(matrix.shape):
                    found.append(f"{name}: rank {rank} of {min(matrix.shape)}")
    for width, hashes in rows.items():
        every = torch.cat(hashes)
        repeated = len(every) - len(torch.unique(every))
        if repeated:
            found.append(f"{repeated} repeated vectors of width {width}")
    return found


def report(small: PreTrainedModel, shape: Shape, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """The checks of the command: float32 against float32, then bfloat16 against bfloat16."""
    vocabulary = int(small.config.vocab_size)
    prompt = torch.randint(4, vocabulary, (1, 40), generator=torch.Generator().manual_seed(seed))
    for dtype in (torch.float32, torch.bfloat16):
        clone: Any = copy.deepcopy(small)
        model = clone.to(device=device, dtype=dtype)
        large = build_inflated(small, shape, device, dtype, seed)
        yield {"check": str(dtype).removeprefix("torch."), **compare(model, large, prompt)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", help="folder or hub id of a llama, mistral, qwen2 or qwen3 model")
    parser.add_argument("dst", type=Path, help="folder to write, bfloat16")
    for name in ("hidden", "layers", "heads", "kv-heads", "intermediate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--head-dim", type=int, help="a multiple of the small model's; default: the same")
    parser.add_argument("--experts", type=int, default=0, help="of each MLP, of a llama or mistral model without biases; 0: dense")
    parser.add_argument("--chosen", type=int, default=0, help="experts that a token takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-check", action="store_true", help="build and save only; the checks hold a float32 copy")
    args = parser.parse_args()
    shape = Shape(args.hidden, args.layers, args.heads, args.kv_heads, args.intermediate, args.head_dim, args.experts, args.chosen)
    try:
        small = AutoModelForCausalLM.from_pretrained(args.src, dtype=torch.float32).eval()
        check_shape(small.config, shape)
    except (OSError, ValueError) as error:
        print(f"inflate: {error}", file=sys.stderr)
        return 2
    checks = [] if args.no_check else list(report(small, shape, args.seed, args.device))
    large = build_inflated(small, shape, args.device, torch.bfloat16, args.seed)
    large.save_pretrained(args.dst)
    try:
        AutoTokenizer.from_pretrained(args.src).save_pretrained(args.dst)
    except (OSError, ValueError) as error:
        print(f"no tokenizer copied: {error}", file=sys.stderr)
    found = [] if args.no_check else degenerate(large, ranks=False)
    print(json.dumps({"parameters": sum(p.numel() for p in large.parameters()), "shape": asdict(shape), "untied": True,
                      "checks": checks, "degenerate": found}))
    return 1 if found or any(c["check"] == "float32" and (c["logits"] > 1e-4 or not c["same_text"]) for c in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
