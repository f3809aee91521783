"""Rotary positions of a model that a fused layer stands in: the angles of its own module, as the passes take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .between import signed

MOVING_ROPE = {"dynamic", "longrope"}  # their angles depend on the longest row of the pass, so there is no table of them


class Rope(NamedTuple):
    """Rotary positions of some layers: how many numbers of a head are turned; which of the model's they are; what its module is told, if
    there are several; whether angles depend on the text; whether they stand in pairs; whether heads are turned the other way; and whether
    the module gives sines first."""

    numbers: int
    number: int = 0
    kind: tuple[str, ...] = ()
    moves: bool = False
    paired: bool = False
    backward: bool = False
    sines_first: bool = False

    def angles(self, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, 2, numbers] of a module's cos and sin [1, rows, n]: sin with its first half negated. gpt-oss's are of one half."""
        cos, sin = (sin, cos) if self.sines_first else (cos, sin)
        if self.paired:
            cos, sin = cos[..., ::2].float(), sin[..., ::2].float()
        cos, sin = (part[0] if part.shape[-1] == self.numbers else torch.cat([part[0]] * 2, -1) for part in (cos, sin))
        return torch.stack([cos, signed(-sin if self.backward else sin)], 1)


def halves_apart(count: int) -> Tensor:
    """So many numbers in the order in which adjoining ones, which turn together, stand half of them apart: scores are sums over a head,
    of whatever order."""
    return torch.arange(count).view(-1, 2).T.flatten()


def cos_and_sin(found: Any) -> tuple[Tensor, Tensor]:
    """Of what a model's rotary module gives: DeepSeek-V2's are one complex number."""
    return (found.real, found.imag) if isinstance(found, Tensor) else found


def spots_of(rotary: Any, positions: Tensor) -> Tensor:
    """Positions [1, n] as a rotary module takes them: where it knows pictures, too, in time, height and width [3, 1, n], all one here;
    where it has a table (GPT-J's), none behind that."""
    if hasattr(rotary, "embed_positions"):
        return positions.clamp_max(len(rotary.embed_positions) - 1)
    return positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions


def rotary_of(body: Any) -> Any:
    """A model's rotary module, or one for each base of its layers' (Granite's with windows); None: it has none."""
    return getattr(body, "rotary_embs", None) or getattr(body, "rotary_emb", None) or getattr(body, "pos_emb", None)


def rotaries_of(body: Any) -> list[Any]:
    """All of a model's rotary modules."""
    found = rotary_of(body)
    return [] if found is None else list(found) if isinstance(found, nn.ModuleList) else [found]


def rope_of(body: Any, layer: int, paired: bool = False, backward: bool = False) -> Rope:
    """Of a layer of a model."""
    rotary, number = rotary_of(body), 0
    if isinstance(rotary, nn.ModuleList):
        number = sum(0 < base < body.config.layer_rope_theta[layer] for base in set(body.config.layer_rope_theta))   # of rising ones
        rotary = rotary[number]
    if rotary is None:
        return Rope(0)
    if hasattr(rotary, "embed_positions"):
        return Rope(rotary.pos_embd_dim, sines_first=True)
    if not isinstance(rotary.rope_type, dict):
        return Rope(2 * len(rotary.inv_freq), number, moves=rotary.rope_type in MOVING_ROPE, paired=paired, backward=backward)
    kinds, kind = rotary.rope_type, body.config.layer_types[layer]
    kind = kind if kind in kinds else next(iter(kinds))     # of a layer that turns nothing
    return Rope(2 * len(getattr(rotary, f"{kind}_inv_freq")), list(kinds).index(kind), (kind,), kinds[kind] in MOVING_ROPE)


def measured(rotary: Any, rope: Rope, like: Tensor, positions: Tensor) -> Tensor:
    """Its angles at positions [1, n], by the model's own module or modules, as `Rope.angles` gives them."""
    part = rotary[rope.number] if isinstance(rotary, nn.ModuleList) else rotary
    return rope.angles(*cos_and_sin(part(like, spots_of(part, positions), *rope.kind)))


def stretch_of(attention: Any) -> Callable[[Tensor], Tensor] | None:
    """By what queries are taken times where they grow with their position; None: they do not, as in layers of Llama 4 that are turned."""
    config = attention.config
    if not hasattr(config, "attn_temperature_tuning"):
        told = config.rope_parameters
        return partial(stretch, told["llama_4_scaling_beta"], told["original_max_position_embeddings"], 0)
    return partial(stretch, config.attn_scale, config.floor_scale, 1) if config.attn_temperature_tuning and not attention.use_rope else None


def stretch(share: float, length: float, ahead: int, positions: Tensor) -> Tensor:
    """What queries at these positions are taken times, float32: 1 + share · log(1 + ⌊(position + ahead) / length⌋), of the length of texts
    that the model first learnt, so that attention stays as sharp among more keys (Llama 4's)."""
    return 1 + share * torch.log(1 + torch.floor((positions + ahead) / length))


def behind(angles: Tensor, factors: Tensor) -> Tensor:
    """angles [rows, 2 ropes, n], and behind them of each row a line of its factor, of those [rows]."""
    return torch.cat([angles, factors.to(angles.dtype)[:, None, None].expand(-1, 1, angles.shape[-1])], 1)
