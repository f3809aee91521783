"""MLP speculators (Wertheimer et al., arXiv 2404.19124; IBM): a recurrence over a state vector that reads every drafted token.

    s ← h, or l2(h) / √2 with `scale_input`                      h: what the target feeds to its output matrix
    s ← gelu(ln_i(proj_i s + (e / w) · emb_i(token)));  logits = head_i s        w = 0.5^(0.5 / n), e = √((1 − w²) · inner / 2)

l2(x) = x / rms(x); ln is l2 with a scale and a shift. Published keys: `speculator.{emb,proj,head,ln}.{i}.weight` and
`speculator.ln.{i}.bias`. With `tie_weights` all steps share one emb, head and ln, and all but the first one proj; the file may
hold them once or n times. The config is flat, or nested under any key. Our own key `"target_tables": true` takes embedding
and output matrix from the target, through `emb_proj.0 [inner, H]` and `head_proj.0 [H, inner]`, shared or one per step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import LoadError, VocabularyMismatch
from ..target import TargetParts
from .eagle import settle, text_config
from .files import HeadFiles, fill, write_files
from .medusa import rows_of, target_logits

DEPTH = 4              # of a fresh head
EPS = 1e-6
PREFIX = "speculator."
TABLES = ("emb", "head")


class L2Norm(nn.Module):
    """x / rms(x), then · weight + bias where it has them; in float32 inside."""

    def __init__(self, size: int, learned: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)) if learned else None
        self.bias = nn.Parameter(torch.zeros(size)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return normed if self.weight is None or self.bias is None else normed * self.weight + self.bias


class MlpHead(nn.Module):
    """`depth` steps. One step reads a token and a state, and gives logits for the next token and the next state."""

    def __init__(self, parts: TargetParts, depth: int, inner: int, vocab_size: int, tied: bool, scale_input: bool,
                 tables: bool = False) -> None:
        """tables: embedding and output matrix are the target's."""
        super().__init__()
        hidden = int(text_config(parts).hidden_size)
        assert parts.embed is not None and parts.output is not None
        self.depth, self.inner, self.tied, self.scale_input, self.tables = depth, inner, tied, scale_input, tables
        self.ids: Tensor | None = None      # the target's whole vocabulary
        self.taps = (int(text_config(parts).num_hidden_layers) - 1,)
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        own = 1 if tied else depth
        if tables:
            self.emb_proj = nn.ModuleList(nn.Linear(hidden, inner, bias=False) for _ in range(own))
            self.head_proj = nn.ModuleList(nn.Linear(inner, hidden, bias=False) for _ in range(own))
        else:
            self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(own))
            self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(inner if i else hidden, inner, bias=False) for i in range(min(2, depth) if tied else depth))
        self.ln = nn.ModuleList(L2Norm(inner) for _ in range(own))
        self.ln0 = L2Norm(hidden, learned=False)
        weight = 0.5 ** (0.5 / depth)       # of the state, so that half of it still stems from h at the last step
        self.token_weight = math.sqrt((1 - weight**2) * inner / 2) / weight

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published speculator; its sizes come from the tensors. Raises LoadError where tensors are missing, unread, of
        other sizes, or of another vocabulary."""
        source, config = files.path, _settings(files.config)
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items()}
        tied, tables = bool(config.get("tie_weights")), bool(config.get("target_tables"))
        groups = {name: found for name, tensor in tensors.items() if (found := re.fullmatch(r"([a-z_]+)\.(\d+)\.(weight|bias)", name))}
        depth = 1 + max((int(found[2]) for found in groups.values()), default=-1)
        claimed = int(config.get("n_predict") or depth)
        if claimed > depth and not tied:
            raise LoadError(f"{source}: config.json speaks of {claimed} steps (n_predict), the tensors hold {depth}; "
                            "expected all of them, fetch it again")
        depth = claimed if tied else depth
        proj = tensors.get("proj.0.weight")
        if proj is None or proj.ndim != 2:
            raise LoadError(f"{source}: tensor speculator.proj.0.weight is missing (found: {', '.join(sorted(files.tensors)[:6])} …); "
                            "expected a complete speculator, fetch it again")
        _require_sizes(tensors, proj.shape[1], int(text_config(parts).hidden_size), vocab_size, source)
        if tied:
            tensors = _untie(tensors, source)
        head = cls(parts, depth, proj.shape[0], vocab_size, tied, bool(config.get("scale_input")), tables)
        fill(head, tensors, source)
        return settle(head, parts)

    @classmethod
    def fresh(cls, parts: TargetParts, depth: int = DEPTH, inner: int | None = None, tied: bool = True, scale_input: bool = True,
              tables: bool = False) -> Self:
        """Random weights, N(0, 1/√inner) as IBM begins; inner: width of the state, the target's unless given."""
        inner = inner or int(text_config(parts).hidden_size)
        assert parts.output is not None
        head = cls(parts, depth, inner, rows_of(parts.output), tied, scale_input, tables)
        for name, parameter in head.named_parameters():
            if not name.startswith("ln."):
                nn.init.normal_(parameter, 0.0, 1 / math.sqrt(inner))
        return settle(head, parts)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """IBM's layout, flat config; what is tied is written once for each step, as their loaders expect.
        dtype: of the file, the parameters' own unless given."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            group, index, kind = name.split(".")
            last = (self.depth if self.tied and (group != "proj" or index == "1") else int(index) + 1)
            tensors.update({f"{PREFIX}{group}.{i}.{kind}": tensor.to(dtype or tensor.dtype, copy=True) for i in range(int(index), last)})
        target = text_config(self._parts[0])
        config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": int(target.hidden_size),
                  "inner_dim": self.inner, "n_predict": self.depth, "vocab_size": int(target.vocab_size), "tie_weights": self.tied,
                  "scale_input": self.scale_input, "top_k_tokens_per_head": [5, 4, 3, *[2] * self.depth][:self.depth], "n_candidates": 5}
        write_files(folder, config | {"target_tables": True} if self.tables else config, tensors)

    def start(self, hidden: Tensor) -> Tensor:
        """What the target feeds to its output matrix [B, H] → the state before the first step [B, H]."""
        state: Tensor = self.ln0(hidden) / math.sqrt(2) if self.scale_input else hidden
        return state

    def step(self, level: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """State [B, *] and the token after it [B] → logits [B, V] for the one after that, and the state [B, inner]."""
        own = 0 if self.tied else level
        mixed = self.proj[min(level, 1) if self.tied else level](state) + self._embed(own, tokens, state.dtype) * self.token_weight
        state = functional.gelu(self.ln[own](mixed))
        if self.tables:
            return target_logits(self._parts[0], self.head_proj[own](state)), state
        return self.head[own](state), state

    def _embed(self, own: int, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.tables:
            embedded: Tensor = self.emb[own](tokens)
            return embedded
        table = self._parts[0].table
        assert table is not None, "checked at construction"
        with torch.no_grad():
            rows = table(tokens)
        projected: Tensor = self.emb_proj[own](rows.to(dtype))
        return projected


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the speculator, which some publish inside another config."""
    if "n_predict" in config or "inner_dim" in config:
        return config
    return next((inner for inner in config.values() if isinstance(inner, dict) and "n_predict" in inner), config)


def _require_sizes(tensors: Mapping[str, Tensor], width: int, hidden: int, vocab_size: int, source: Path) -> None:
    if width != hidden:
        raise LoadError(f"{source}: speculator.proj.0.weight reads hidden states of {width}; expected {hidden}, the target's: "
                        "use a speculator that was trained for it")
    for name, tensor in tensors.items():
        if name.split(".")[0] in TABLES and tensor.shape[0] != vocab_size:
            raise VocabularyMismatch(f"{source}: speculator.{name} has {tensor.shape[0]} rows, the target {vocab_size} tokens; "
                                     "expected a speculator that was trained for this target's vocabulary")


def _untie(tensors: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Of what all steps share, the first copy. Raises LoadError if copies differ."""
    kept: dict[str, Tensor] = {}
    for name in sorted(tensors, key=lambda n: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", n)]):
        group, _, rest = name.partition(".")
        index, _, kind = rest.partition(".")
        if not index.isdigit():
            kept[name] = tensors[name]
            continue
        shared = f"{group}.{min(int(index), 1) if group == 'proj' else 0}.{kind}"
        if shared not in kept:
            kept[shared] = tensors[name]
        elif not torch.equal(kept[shared], tensors[name]):
            raise LoadError(f"{source}: tie_weights is true, and speculator.{name} differs from speculator.{shared}; "
                            "expected equal tensors, or tie_weights false")
    return kept
