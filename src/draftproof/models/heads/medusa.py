"""Medusa heads (Cai et al., arXiv 2401.10774): head i guesses the token i + 2 places after the last one that the target read.

    x = h;  x ← x + silu(linear(x)) for each block;  logits = output(x)        h: what the target feeds to its output matrix

No head looks at what the others guess, so one hidden state gives all depths at once. Layouts that are read:

    FasterDecoding   `{i}.{l}.linear.weight` and `.bias`, `{i}.{L}.weight`; in a Medusa-2 checkpoint behind `medusa_head.`
    vLLM             `blocks.{i}.layers.{l}.weight`, `lm_heads.{i}.weight` (or one `lm_head.weight` for all), `token_map`
    ours             the first without `{i}.{L}.weight` and with `"medusa_target_output": true`: the target's own output matrix

FasterDecoding repeats one block L times, so a file may hold it once; blocks that differ are read as they are.
"""

from __future__ import annotations

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

HEADS = 4                             # of a fresh head
WHOLE = ("model.", "lm_head.")        # what a Medusa-2 checkpoint holds beside its heads: the target itself
PLACES = (                            # published name → ours
    (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"(\d+)\.\d+\.weight", r"outputs.\1.weight"),
    (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"lm_heads\.(\d+)\.weight", r"outputs.\1.weight"),
    (r"lm_head\.weight", r"outputs.0.weight"),
)


class MedusaHead(nn.Module):
    """`depth` heads. ids [Vd]: the target's id of each column of the logits, None where the head has the whole vocabulary."""

    ids: Tensor | None

    def __init__(self, parts: TargetParts, depth: int, layers: int, outputs: int, size: int, bias: bool = True,
                 ids: Tensor | None = None, scale: float = 1.0) -> None:
        """outputs: output matrices of `size` rows, one per head, one for all, or 0 for the target's. scale: of their logits."""
        super().__init__()
        hidden = int(text_config(parts).hidden_size)
        assert parts.output is not None and outputs in (0, 1, depth), "one output matrix for all heads, one each, or the target's"
        self.depth, self.layers, self.size, self.scale = depth, layers, size, scale
        self.taps = (int(text_config(parts).num_hidden_layers) - 1,)
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers)) for _ in range(depth))
        self.outputs = nn.ModuleList(nn.Linear(hidden, size, bias=False) for _ in range(outputs))
        self.register_buffer("ids", ids, persistent=False)

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published head; its sizes come from the tensors. Raises LoadError where tensors are missing, unread, of other
        sizes, or of another vocabulary."""
        source, config = files.path, files.config
        named, ids, depth, layers = understood(files)
        claimed = int(config.get("medusa_num_heads") or config.get("num_heads") or 0)
        if claimed > depth:
            raise LoadError(f"{source}: config.json speaks of {claimed} heads, the tensors hold {depth}; "
                            "expected all of them, fetch it again")
        outputs = _outputs(named, depth, config, source)
        if ids is not None:
            ids = _checked_ids(ids, vocab_size, source)
            for name in [n for n in named if n.startswith("outputs.") and named[n].shape[0] == vocab_size]:
                named[name] = named[name][ids]
        size = vocab_size if ids is None else ids.shape[0]
        _require_sizes(named, int(text_config(parts).hidden_size), size, ids is not None, source)
        _repeat_blocks(named, depth, layers)
        head = cls(parts, depth, layers, outputs, size, "blocks.0.0.bias" in named, ids, float(config.get("logit_scale") or 1.0))
        fill(head, named, source)
        return settle(head, parts)

    @classmethod
    def fresh(cls, parts: TargetParts, depth: int = HEADS, layers: int = 1, output: str = "target", ids: Tensor | None = None) -> Self:
        """New heads that begin as the target's own next-token guess. output: "target" (no weights of their own), "own" (a copy
        of the target's matrix each) or "one" (a copy for all); ids: target ids that a copy is cut down to."""
        assert parts.output is not None and output in ("target", "own", "one") and (ids is None or output != "target")
        rows = plain(parts.output.weight) if output != "target" else None
        rows = rows if rows is None or ids is None else rows[ids.to(rows.device)]
        size = rows_of(parts.output) if rows is None else rows.shape[0]
        head = cls(parts, depth, layers, {"target": 0, "own": depth, "one": 1}[output], size, ids=ids)
        for name, parameter in head.named_parameters():
            if name.startswith("blocks."):
                nn.init.zeros_(parameter)
        for linear in head.outputs:
            assert rows is not None and isinstance(linear, nn.Linear)
            linear.weight.data.copy_(rows)
        return settle(head, parts)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """FasterDecoding's layout; vLLM's where that one cannot say it (a cut vocabulary, one matrix for all, no bias).
        dtype: of the file, the parameters' own unless given."""
        state, target = self.state_dict(), text_config(self._parts[0])
        bias = any(name.endswith("bias") for name in state)
        config: dict[str, Any] = {"model_type": "medusa", "hidden_size": int(target.hidden_size), "vocab_size": int(target.vocab_size)}
        if self.scale != 1:
            config["logit_scale"] = self.scale
        if not self.outputs:
            config["medusa_target_output"] = True
        if bias and self.ids is None and len(self.outputs) in (0, self.depth):
            config |= {"medusa_num_heads": self.depth, "medusa_num_layers": self.layers, "version": "2"}
            block, output = r"\1.\2.linear.", rf"\1.{self.layers}."
        else:
            config |= {"architectures": ["MedusaModel"], "num_heads": self.depth, "num_hidden_layers": self.layers, "medusa_fc_bias": bias,
                       "truncated_vocab_size": self.size, "original_lm_head": len(self.outputs) == 1 < self.depth}
            block, output = r"blocks.\1.layers.\2.", r"lm_heads.\1."
        names = {name: re.sub(r"^outputs\.(\d+)\.", output, re.sub(r"^blocks\.(\d+)\.(\d+)\.", block, name)) for name in state}
        found = {names[name]: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}
        write_files(folder, config, found if self.ids is None else {**found, "token_map": self.ids})

    def forward(self, hidden: Tensor, depth: int | None = None) -> Tensor:
        """What the target feeds to its output matrix [B, H] → logits [B, depth, Vd] of the first `depth` heads (all, unless given)."""
        found = []
        for i in range(self.depth if depth is None else depth):
            x = hidden
            for linear in self.blocks[i].children():      # built as nn.Linear, packed to serve
                x = x + functional.silu(linear(x))
            found.append(x)
        if len(self.outputs) == self.depth > 1:
            logits = torch.stack([output(x) for output, x in zip(self.outputs, found, strict=False)], 1)
        else:
            flat = torch.stack(found, 1).flatten(0, 1)
            logits = self.outputs[0](flat) if self.outputs else target_logits(self._parts[0], flat)
            logits = logits.unflatten(0, (hidden.shape[0], len(found)))
        return logits if self.scale == 1 else logits * self.scale


def target_logits(parts: TargetParts, x: Tensor) -> Tensor:
    """The target's logits of x [R, H], what it feeds to its output matrix. With gradients that is used as a constant, in the precision
    of x."""
    output = parts.output
    assert output is not None, "checked at construction"
    if torch.is_grad_enabled():
        bias = getattr(output, "bias", None)
        return parts.finished(functional.linear(x, plain(output.weight).to(x.dtype), None if bias is None else bias.detach().to(x.dtype)))
    weight = output.weight
    assert isinstance(weight, Tensor)
    return parts.finished(output(x.to(weight.dtype)))


def rows_of(output: nn.Module) -> int:
    """How many tokens an output matrix knows."""
    weight = output.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def plain(weight: Any) -> Tensor:
    """A matrix that can be read as one. Packed ones keep no plain copy."""
    if not isinstance(weight, Tensor) or weight.is_meta:
        raise LoadError("the target's output matrix is packed; expected a plain one for training: load the target with packed=False")
    return weight.detach()


def understood(files: HeadFiles) -> tuple[dict[str, Tensor], Tensor | None, int, int]:
    """A published head's tensors under our names, blocks.{i}.{l}.* and outputs.{i}.weight, every block there; its token_map, heads, and
    blocks of a head. Raises LoadError for what is none."""
    source = files.path
    tensors = _unprefixed(files.tensors, source)
    ids = tensors.pop("token_map", None)
    named = {_place(name, source): tensor for name, tensor in tensors.items()}
    numbered = [int(match[1]) for name in tensors if (match := re.fullmatch(r"\d+\.(\d+)\.weight", name))]
    depth, layers = _count(named, "blocks", 0), max([_count(named, "blocks", 1), *numbered])
    if not depth or not layers:
        raise LoadError(f"{source} has no blocks (found: {', '.join(sorted(tensors)[:6])} …); expected `0.0.linear.weight` "
                        "or `blocks.0.layers.0.weight`")
    _repeat_blocks(named, depth, layers)
    return named, ids, depth, layers


def _unprefixed(tensors: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Tensors by their names within the heads. A Medusa-2 checkpoint is a whole model: there only the heads are ours."""
    inside = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items() if name.startswith("medusa_head.")}
    if not inside:
        return {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    foreign = sorted(name for name in tensors if not name.startswith(("medusa_head.", *WHOLE)))
    if foreign:
        raise LoadError(f"{source} does not fit MedusaHead: tensors that nothing reads: {', '.join(foreign[:8])}")
    return inside


def _place(name: str, source: Path) -> str:
    for pattern, ours in PLACES:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    raise LoadError(f"{source} does not fit MedusaHead: nothing reads tensor {name}; expected `{{i}}.{{l}}.linear.weight` and "
                    "`{i}.{L}.weight`, or `blocks.{i}.layers.{l}.weight`, `lm_heads.{i}.weight` and `token_map`")


def _count(named: Mapping[str, Tensor], group: str, level: int) -> int:
    return 1 + max((int(name.split(".")[1 + level]) for name in named if name.startswith(group)), default=-1)


def _outputs(named: Mapping[str, Tensor], depth: int, config: Mapping[str, Any], source: Path) -> int:
    """How many output matrices there are: one each, one for all, or none."""
    outputs = _count(named, "outputs", 0)
    if config.get("medusa_target_output"):
        if outputs:
            raise LoadError(f"{source}: medusa_target_output is true and the file has {outputs} output matrices; "
                            "expected none, or the field gone")
        return 0
    if not outputs:
        raise LoadError(f"{source}: the heads' output matrices are missing; expected `0.{_count(named, 'blocks', 1)}.weight` or "
                        "`lm_heads.0.weight`, or medusa_target_output in config.json")
    return 1 if outputs == 1 and config.get("original_lm_head") else depth


def _checked_ids(ids: Tensor, vocab_size: int, source: Path) -> Tensor:
    once = ids.ndim == 1 and not ids.is_floating_point() and len(set(ids.tolist())) == ids.shape[0]
    if not once or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise VocabularyMismatch(f"{source}: token_map is {list(ids.shape)} of {ids.dtype}, from {ids.min().item()} to {ids.max().item()}; "
                                 f"expected different ids of the target, in [0, {vocab_size})")
    return ids.to(torch.int64)


def _require_sizes(named: Mapping[str, Tensor], hidden: int, size: int, cut: bool, source: Path) -> None:
    for name, tensor in named.items():
        if name.startswith("outputs.") and tensor.shape[0] != size:
            raise VocabularyMismatch(f"{source}: output matrix {name.split('.')[1]} has {tensor.shape[0]} rows; expected {size}, "
                                     f"{'the ids of token_map' if cut else 'the vocabulary of the target (a cut one needs a token_map)'}")
        if tensor.shape[-1] != hidden:
            raise LoadError(f"{source}: {name} is {list(tensor.shape)}, made for hidden states of {tensor.shape[-1]}; "
                            f"expected {hidden}, the target's: use a head that was trained for it")


def _repeat_blocks(named: dict[str, Tensor], depth: int, layers: int) -> None:
    """Blocks that are one repeated block may stand in the file once, as the first."""
    for head in range(depth):
        for kind in ("weight", "bias"):
            first = named.get(f"blocks.{head}.0.{kind}")
            repeats = [f"blocks.{head}.{layer}.{kind}" for layer in range(1, layers)]
            if first is not None and not any(name in named for name in repeats):
                named.update(dict.fromkeys(repeats, first))
