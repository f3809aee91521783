"""Rotary positions of a model that a fused layer stands in: the angles of its own module, as the passes take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .between import signed

MOVING_ROPE = {"dynamic", "longrope"}  # their angles depend on the longest row of the pass, so there is no table of them


class Rope(NamedTuple):
    """Rotary positions of some layers: how many numbers of a head are turned; which of the model's they are; what its module is told, if
    there are several; whether angles depend on the text; whether they stand in pairs; and whether the module gives sines first."""

    numbers: int
    number: int = 0
    kind: tuple[str, ...] = ()
    moves: bool = False
    paired: bool = False
    sines_first: bool = False

    def angles(self, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, 2, numbers] of a module's cos and sin [1, rows, n]: sin with its first half negated. gpt-oss's are of one half."""
        cos, sin = (sin, cos) if self.sines_first else (cos, sin)
        if self.paired:
            cos, sin = cos[..., ::2].float(), sin[..., ::2].float()
        cos, sin = (part[0] if part.shape[-1] == self.numbers else torch.cat([part[0]] * 2, -1) for part in (cos, sin))
        return torch.stack([cos, signed(sin)], 1)


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
    """A model's rotary module; None: it has none."""
    return getattr(body, "rotary_emb", None) or getattr(body, "pos_emb", None)


def rope_of(body: Any, layer: int, paired: bool = False) -> Rope:
    """Of a layer of a model."""
    rotary = rotary_of(body)
    if rotary is None:
        return Rope(0)
    if hasattr(rotary, "embed_positions"):
        return Rope(rotary.pos_embd_dim, sines_first=True)
    if not isinstance(rotary.rope_type, dict):
        return Rope(2 * len(rotary.inv_freq), moves=rotary.rope_type in MOVING_ROPE, paired=paired)
    kinds, kind = rotary.rope_type, body.config.layer_types[layer]
    kind = kind if kind in kinds else next(iter(kinds))     # of a layer that turns nothing
    return Rope(2 * len(getattr(rotary, f"{kind}_inv_freq")), list(kinds).index(kind), (kind,), kinds[kind] in MOVING_ROPE)


def stretch(config: Any, positions: Tensor) -> Tensor:
    """What queries at these positions are taken times, float32: 1 + β log(1 + ⌊position / length⌋), of the length of texts that the model
    first learnt, so that attention stays as sharp among more keys (Llama 4's)."""
    told = config.rope_parameters
    found: Tensor = 1 + told["llama_4_scaling_beta"] * torch.log(1 + torch.floor(positions / told["original_max_position_embeddings"]))
    return found


def behind(angles: Tensor, factors: Tensor) -> Tensor:
    """angles [rows, 2 ropes, n], and behind them of each row a line of its factor, of those [rows]."""
    return torch.cat([angles, factors.to(angles.dtype)[:, None, None].expand(-1, 1, angles.shape[-1])], 1)
