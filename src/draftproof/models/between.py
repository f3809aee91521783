"""What a pass computes between its products: norm, rotation, gate, and a page's softmax, as torch runs them or joined by torch.compile.

On a GPU each of some twenty small operations of a block is a kernel that reads and writes all rows; `joined` makes one kernel of every
group. A joined kernel and torch's own do not give the same bits, so a target takes one kind for all of its passes, made and compared with
its plain twin before the first one. Law 2 holds as before: sums over a row see tiles of one shape (tiled.py), and a page's softmax, whose
shape is that of the pass, is joined in fast mode alone. The tests compile for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import XIELUActivation

from ..errors import LoadError, first_line
from .attention import TILE, Weigh, weights_of
from .tiled import by_tiles

COMPILES = {"cuda"}  # kinds of devices; a CPU has kernels of its own for all this (native.py)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value: a few roundings

FIRST_ANGLES = 1024  # positions of a table of angles; it doubles when a text outgrows it

Norm = Callable[..., Tensor]    # as `row_norm`
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension, rounded where the transformers modules round (Zhang & Sennrich, arXiv 1910.07467): in
    front of the weight, or, where that is wider than x, behind it."""
    wide = x.to(torch.float32, copy=True)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    wide.mul_(scale.mul_(scale).div_(x.shape[-1]).add_(eps).rsqrt_())
    return wide.to(weight.dtype).mul_(weight).to(x.dtype)


def row_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """`rms_norm`; or, with a bias, layer norm in float32, rounded once (Ba et al., arXiv 1607.06450)."""
    if bias is None:
        return rms_norm(x, weight, eps)
    return functional.layer_norm(x.float(), x.shape[-1:], eps=eps).mul_(weight).add_(bias).to(x.dtype)


def tiled_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """`row_norm` in sums of one shape."""
    return by_tiles(lambda rows: row_norm(rows, weight, eps, bias), x)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, n], whose heads' first numbers are turned by rotary angles (Su et al., arXiv 2104.09864); cos, sin
    [rows, 1, numbers], sin negative in its first half. Of angles wider than x the sum is rounded once."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([turn(x[..., :turned], cos, sin), x[..., turned:]], -1)
    return (x * cos).add_(x.roll(turned // 2, -1) * sin).to(x.dtype)


def signed(sin: Tensor) -> Tensor:
    """rotate_half(x) · sin = roll(x) · signed(sin): the first half of the rotated vector is the negated second half of x."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def angles_held(positions: int) -> int:
    """How many positions a table of angles is made for that must hold these."""
    return max(FIRST_ANGLES, 1 << (positions - 1).bit_length())


def gated(act: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """act(gate) · up of gate_up [rows, 2 n]."""
    gate, up = gate_up.chunk(2, -1)
    return act(gate).mul_(up)


def bends_of(act: Any) -> Tensor | None:
    """What xIELU is made of, float32 [4], as kernels/block.c has it; None of any other function."""
    if type(act) is not XIELUActivation:
        return None
    above, below = (functional.softplus(alpha.detach()) for alpha in (act.alpha_p, act.alpha_n))
    return torch.cat([above, act.beta + below, act.beta[None], act.eps[None]]).float()


@dataclass(frozen=True, slots=True)
class Between:
    """tiled: sums over rows see one shape. weigh: None where attention chooses its own way."""

    norm: Norm
    turn: Turn
    gate: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = gated
    weigh: Weigh | None = None
    tiled: bool = False


def joined(tiled: bool) -> Between:
    """Compiled at their first calls."""
    norm: Norm = torch.compile(rms_norm, fullgraph=True, dynamic=not tiled)

    def in_tiles(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return by_tiles(lambda rows: norm(rows, weight, eps), x)

    return Between(in_tiles if tiled else norm, torch.compile(turn, fullgraph=True, dynamic=True),
                   torch.compile(gated, fullgraph=True, dynamic=True),
                   None if tiled else torch.compile(weights_of, fullgraph=True, dynamic=True), tiled)


def compiled_between(able: bool, why: str, device: torch.device, reproducible: bool, reasons: dict[str, str]) -> Between:
    """`joined` for a load with compile=True. able, why: whether the model's blocks are fused. Raises LoadError where it cannot be."""
    if device.type not in COMPILES:
        raise LoadError(f"compile=True: the model is on {device}, whose kernels need no compiler of torch's; expected a GPU: leave it out")
    if not able:
        raise LoadError(f"compile=True: {why}; expected a model whose blocks are fused: leave it out")
    kinds = "norm, rotation and gate" if reproducible else "norm, rotation, gate and a page's softmax"
    reasons["between products"] = f"joined by torch.compile: {kinds}, compared with their plain twins"
    return joined(reproducible)


@torch.inference_mode()
def compare(found: Between, layer: Any, page_tokens: int) -> None:
    """Compile all of it on the shapes of a `FusedLayer`, and compare it with its twins on random rows. Raises LoadError.

    torch compiles once more for one row or item, and again for sizes that were equal when it compiled first and are not any more. Both
    are had here, so that no later pass waits for a compiler: one and many, and many is like no size of the model's.
    """
    weight, eps, dim = layer.input_norm.weight.detach(), layer.input_norm.variance_epsilon, layer.head_dim
    turned, inner = layer.heads + layer.kv_heads, 2 * layer.inner
    taken = {weight.numel(), layer.kv_heads, turned, dim, inner, page_tokens, TILE}
    many, more = islice((size for size in count(2) if size not in taken), 2)
    dice = torch.Generator(weight.device).manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, device=weight.device, dtype=torch.float32).to(weight.dtype)

    for rows in (many, 1):
        qk, angles = some(rows, turned + layer.kv_heads, dim)[:, :turned], some(rows, 2, dim)  # views, as a pass has them
        if layer.head_norm is not None:
            _same("norm of heads", found.norm, rms_norm, qk, layer.head_norm, layer.head_eps)
            qk = qk.contiguous()
        _same("norm", found.norm, rms_norm, some(rows, weight.numel()), weight, eps)
        _same("rotation", found.turn, turn, qk, angles[:, :1], angles[:, 1:])
        _same("gate", found.gate, gated, layer.act, some(rows, inner))
    if found.weigh is None:
        return
    for items, tiles in product((many, 1), (more, 1)):
        scores, bias = some(items, layer.kv_heads, tiles, TILE, page_tokens), weight.new_zeros(items, 1, tiles, TILE, page_tokens)
        _same("softmax of a page", found.weigh, weights_of, scores, bias, layer.scaling, None)


def _same(name: str, ours: Callable[..., Any], twin: Callable[..., Any], *given: Any) -> None:
    """Raises LoadError where they differ by more than a few roundings, or where ours cannot be had."""
    try:
        pairs = list(zip(_all(ours(*given)), _all(twin(*given)), strict=True))
    except Exception as error:  # a compiler fails in many ways
        raise LoadError(f"compile=True: the {name} did not compile ({first_line(error)}); expected a working Triton: "
                        "leave it out") from error
    most = TOLERANCE[pairs[0][1].dtype]  # the model's
    for a, b in pairs:
        off = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        if not off <= most:
            raise LoadError(f"compile=True: the joined {name} is off by {off:.1e} of its largest value; expected at most "
                            f"{most:.0e}: leave it out, and report this")


def _all(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
