"""EAGLE-3 and 3.1 heads (Li et al., arXiv 2503.01840 and 2605.09992), in every layout that people publish.

    entry t:  h = fc(cat of the taps' hidden states at t)                  the target's features; own recurrences skip fc
              x = [input_layernorm(embed(token t+1)), hidden_norm(h)]      2H wide, into the first layer's attention
              y = r + attention(x), y = y + mlp(norm(y))                   r = h, or hidden_norm(h) if norm_before_residual
              further layers, if there are any, are ordinary               logits for token t+2 = lm_head(norm(y))

y is fed back for h; with `norm_output` (3.1) norm(y) is. 3.1 also norms every tap (`fc_norm.{i}`), an older variant all of them
together (`input_norm`, config norm_before_fc). Layer names: `midlayer.` (official, SpecForge, AngelSlim), `layers.{i}.`
(speculators, NVIDIA ModelOpt, DeepSpec), `midlayer.{i}.`, and SGLang's `additional_layers.{i}.`, whose `hidden_norm` is the
input norm of layer i + 1; NeMo Automodel writes `model.` before all but the output. The output has a reduced vocabulary of its own, see
vocabulary.py; a head without `draft_vocab_size` may leave it out and use the target's. Without `fc` (NVIDIA's use_aux_hidden_state: false)
h is what the target feeds to its output matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import LoadError
from ..target import TargetParts
from .blocks import RMSNorm, Rope
from .eagle import ROTARY, count_layers, embedding, give_biases, kept, require_vocabulary, rope_fields, settle, text_config
from .files import HeadFiles, converted, fill, needed, write_files
from .layers import Attend, FirstLayer, HeadLayer, HeadLayers, Runs, Shape
from .medusa import target_logits
from .vocabulary import draft_ids, mask, offsets

TABLES = frozenset({"d2t", "t2d"})      # read here, not by the module


class Eagle3Head(nn.Module):
    """See the head of this file. taps: 0-based decoder layers whose outputs are read, in fc's order. ids [Vd]: the target's
    id of each draft token, None for the whole vocabulary. `depth`: layers. context: longest text, or None."""

    ids: Tensor | None

    def __init__(self, parts: TargetParts, shape: Shape, taps: Sequence[int], ids: Tensor | None, size: int, config: Mapping[str, Any],
                 layers: int = 1, own_embed: bool = False, norms: str = "", norm_before_residual: bool = False,
                 norm_output: bool = False, fused: bool = True) -> None:
        """size: rows of the output, 0 for the target's. config: rotary fields and max_position_embeddings. norms: "", "fc_norm" or
        "input_norm". fused: whether there is an fc."""
        super().__init__()
        target = text_config(parts)
        self.shape, self.taps, self.depth, self.norms, self.config = shape, tuple(taps), layers, norms, kept(config)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.context: int | None = self.config.get("max_position_embeddings")
        self.target_hidden, self.vocab_size = int(target.hidden_size), int(target.vocab_size)
        self._parts = (parts,)              # in a tuple, so that the target's weights are not this module's
        width = self.target_hidden * len(self.taps)
        self.fc = nn.Linear(width, shape.hidden, bias=False) if fused else None
        self.fc_norm = nn.ModuleList(RMSNorm(self.target_hidden, shape.eps) for _ in self.taps) if norms == "fc_norm" else None
        self.input_norm = RMSNorm(width, shape.eps) if norms == "input_norm" else None
        self.layers = HeadLayers([FirstLayer(shape, norm_before_residual), *(HeadLayer(shape) for _ in range(layers - 1))])
        self.layers.windows = windows_of(config, layers)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, size, bias=False) if size else None
        self.embed_tokens = nn.Embedding(self.vocab_size, shape.hidden) if own_embed else None
        self.rope = Rope(config, shape.head_dim)
        self.register_buffer("ids", ids, persistent=False)

    @classmethod
    def read(cls, files: HeadFiles, parts: TargetParts, vocab_size: int) -> Self:
        """A published head. Raises LoadError for tensors that are missing, unread or of other sizes, for taps that the target
        does not have or fc does not fit, for a foreign vocabulary and for an index-style d2t."""
        source, tensors = files.path, {canonical(name): tensor for name, tensor in files.tensors.items()}
        if len(tensors) != len(files.tensors):
            raise LoadError(f"{source}: two tensors have the same place (midlayer. and layers.0.?); expected one layout")
        config = files.config.get("transformer_layer_config") or files.config
        tied = _lends_output(tensors, config, files.config)
        fc, size = _fc(tensors, files.config, source), 0 if tied else needed(tensors, "lm_head.weight", source).shape[0]
        require_vocabulary(tensors, config, vocab_size, source)
        ids = draft_ids(tensors, size or vocab_size, vocab_size, source)
        shape, own_embed = Shape.of(tensors, config, source), "embed_tokens.weight" in tensors
        _require_borrowed(parts, shape, own_embed, tied or fc is None, source)
        taps = (int(text_config(parts).num_hidden_layers) - 1,) if fc is None else tap_layers(files.config, fc, parts, source)
        flags = {name: bool(setting(files.config, name)) for name in ("norm_before_residual", "norm_output")}
        own = tensors["embed_tokens.weight"] if tied and own_embed and config.get("tie_word_embeddings") else None
        head = cls(parts, shape, taps, ids, size if own is None else own.shape[0], config, count_layers(tensors), own_embed,
                   norms_of(files, tensors), **flags, fused=fc is not None)
        give_biases(head, tensors)
        found = files.tensors if own is None else {**files.tensors, "lm_head.weight": own}
        fill(head, found, source, canonical, unused=TABLES | ROTARY)
        return settle(head, parts)

    @classmethod
    def fresh(cls, parts: TargetParts, ids: Tensor | None = None, taps: Sequence[int] | None = None, layers: int = 1,
              context: int | None = None, norms: str = "", norm_before_residual: bool = False, norm_output: bool = False,
              **sizes: Any) -> Self:
        """Random weights. ids: sorted target ids of the draft vocabulary, None for all. sizes: hidden, inner, heads, kv_heads,
        head_dim; the target's own where not given. A head of another width than the target's has an embedding of its own."""
        target, shape = text_config(parts), Shape.like(parts, **sizes)
        head = cls(parts, shape, distinct_taps(int(target.num_hidden_layers)) if taps is None else taps, ids,
                   int(target.vocab_size) if ids is None else ids.shape[0], rope_fields(parts, context), layers,
                   shape.hidden != target.hidden_size, norms, norm_before_residual, norm_output)
        return settle(head, parts)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """The official layout (`layers.{i}.` where there are several); taps are written 0-based in `eagle_config`, as SpecForge
        does. dtype: of the weights in the file; None keeps it."""
        tensors = converted(self.state_dict(), dtype)
        if self.depth == 1:
            tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
        if self.ids is not None:
            tensors |= {"d2t": offsets(self.ids), "t2d": mask(self.ids, self.vocab_size)}
        write_files(folder, self.published(), tensors)

    def published(self) -> dict[str, Any]:
        size = None if self.lm_head is None else self.lm_head.out_features
        return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **self.config, **self.shape.config(),
                "num_hidden_layers": self.depth, "vocab_size": self.vocab_size, "draft_vocab_size": size,
                "target_hidden_size": self.target_hidden, "norm_before_residual": self.norm_before_residual,
                "norm_output": self.norm_output, "fc_norm": self.norms == "fc_norm", "norm_before_fc": self.norms == "input_norm",
                "tie_word_embeddings": False,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [] if self.fc is None else list(self.taps),
                                 "use_aux_hidden_state": self.fc is not None}}

    @property
    def kv_heads(self) -> int:
        return self.shape.kv_heads

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim

    def fuse(self, features: Tensor) -> Tensor:
        """The taps' hidden states side by side [R, taps · H_target], one row per token of the text, as `step` reads them: [R, H]."""
        if self.fc_norm is not None:
            parts = features.chunk(len(self.taps), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        elif self.input_norm is not None:
            features = self.input_norm(features)
        read = self._parts[0].norm if self.fc is None else self.fc
        assert read is not None, "refused at construction"
        fused: Tensor = read(features)
        return fused

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend | Runs) -> Tensor:
        """tokens [R] and the hidden states before them [R, H] → hidden states [R, H]: for `logits`, and for the next step."""
        x: Tensor = self.layers(hidden, self.rope, positions, attend, self.embedding()(tokens))
        return self.norm(x) if self.norm_output else x

    def embedding(self) -> nn.Module:
        """Tokens → [..., H]: its own, or the target's."""
        return embedding(self._parts[0], self.embed_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, Vd] over the draft vocabulary, for the token after the one that `step` read."""
        hidden = hidden if self.norm_output else self.norm(hidden)
        if self.lm_head is None:
            return target_logits(self._parts[0], hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits


def canonical(name: str) -> str:
    """Our name of a published tensor: every layer is `layers.{i}.`."""
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name.removeprefix("model."))
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    further = re.match(r"additional_layers\.(\d+)\.(.*)", name)
    if further is None:
        return name
    rest = re.sub(r"^hidden_norm\.", "input_layernorm.", further[2])
    return f"layers.{int(further[1]) + 1}.{rest}"


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A field of the head's own: at the top, or in `eagle_config`."""
    found = config.get(name)
    return (config.get("eagle_config") or {}).get(name) if found is None else found


def default_taps(layers: int) -> tuple[int, int, int]:
    """What a head without a word about taps was trained on: the outputs of 0-based layers 1, L//2 − 1 and L − 4
    (the same hidden states that enter layers 2, L//2 and L − 3)."""
    return max(0, min(1, layers - 1)), max(0, layers // 2 - 1), max(0, layers - 4)


def distinct_taps(layers: int) -> tuple[int, ...]:
    """`default_taps`; of 4 to 6 layers, where these repeat, the first, the middle and the last one that another layer reads."""
    usual, last = default_taps(layers), layers - 2
    return usual if len(set(usual)) == 3 or layers < 4 else (0, last // 2, last)


def tap_layers(config: Mapping[str, Any], fc: Tensor, parts: TargetParts, source: str | Path) -> tuple[int, ...]:
    """The taps as 0-based layers whose *outputs* are read. Which numbering a list has is decided by the field that gives it:
    a top-level `eagle_aux_hidden_state_layer_ids` counts the layers that a hidden state *enters* (speculators, vLLM), the one
    in `eagle_config` (SpecForge, NVIDIA; see `nested_taps`) and `target_layer_ids` (DeepSpec) count outputs."""
    target, name = text_config(parts), "eagle_aux_hidden_state_layer_ids"
    layers, width = int(target.num_hidden_layers), int(target.hidden_size)
    given = {name: [int(i) - 1 for i in config.get(name) or ()], "target_layer_ids": [int(i) for i in config.get("target_layer_ids") or ()],
             f"eagle_config.{name}": nested_taps(config, layers)}
    given = {field: found for field, found in given.items() if found}
    if len({tuple(found) for found in given.values()}) > 1:
        raise LoadError(f"{source}: config.json names different taps ({'; '.join(f'{f}: outputs {ids}' for f, ids in given.items())}); "
                        f"expected one choice: {name} at the top counts the layers entered, the others count outputs from 0")
    taps = tuple(next(iter(given.values()), default_taps(layers)))
    origin = next(iter(given), "no field, so the default")
    if not all(0 <= tap < layers for tap in taps):
        raise LoadError(f"{source}: taps are the outputs of layers {list(taps)} ({origin}); expected layers from 0 to {layers - 1}, "
                        "which this target has: the head was trained for another target")
    if fc.ndim != 2 or fc.shape[1] != len(taps) * width:
        raise LoadError(f"{source}: fc.weight is {list(fc.shape)}; expected [H, {len(taps) * width}], {len(taps)} taps ({origin}) of the "
                        f"target's hidden size {width}: the taps are wrong, or the head was trained for another target")
    return taps


def nested_taps(config: Mapping[str, Any], layers: int | None) -> list[int]:
    """The list in `eagle_config` as outputs of 0-based layers. One that names the layer behind the last of the target's `layers`, and not
    1, with which lists of outputs begin, counts those entered (NVIDIA's third gpt-oss head): no layer has it."""
    nested = [int(i) for i in (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()]
    return [i - 1 for i in nested] if layers in nested and 1 not in nested else nested


def windows_of(config: Mapping[str, Any], layers: int) -> Sequence[int | None]:
    """How far each layer sees, () if none slides. Only a list of the head's own layers says so (speculators); longer ones, and a
    sliding_window without one, are the target's, and heads with such a config are trained without a window."""
    kinds = config.get("layer_types") or ()
    if len(kinds) != layers or "sliding_attention" not in kinds or config.get("use_sliding_window") is False:
        return ()
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1:
        raise LoadError(f"layers of the head slide (layer_types) and sliding_window is {window!r}; expected how many entries they see")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def norms_of(files: HeadFiles, tensors: Iterable[str]) -> str:
    """Which norms stand before fc; the tensors say, or else the config, so that a missing one is missed."""
    names = list(tensors)
    has = {"fc_norm": any(name.startswith("fc_norm.") for name in names), "input_norm": "input_norm.weight" in names}
    said = {"fc_norm": setting(files.config, "fc_norm"), "input_norm": setting(files.config, "norm_before_fc")}
    chosen = [name for name in has if has[name] or said[name]]
    if len(chosen) > 1:
        raise LoadError(f"{files.path}: both fc_norm and norm_before_fc; expected one of them, they exclude each other")
    return chosen[0] if chosen and (said[chosen[0]] is not False or not has[chosen[0]]) else ""


def _lends_output(tensors: Mapping[str, Tensor], config: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    """Whether a head without an output is meant to be so: it has the whole vocabulary, and the embedding's matrix or the target's."""
    told = outer.get("draft_vocab_size") in (None, config.get("vocab_size")) and not TABLES & tensors.keys()
    return "lm_head.weight" not in tensors and told and ("draft_vocab_size" in outer or bool(config.get("tie_word_embeddings")))


def _fc(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str | Path) -> Tensor | None:
    """None for a head that says it reads no layers but the last."""
    alone = (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False and "fc.weight" not in tensors
    return None if alone else needed(tensors, "fc.weight", source)


def _require_borrowed(parts: TargetParts, shape: Shape, own: bool, more: bool, source: str | Path) -> None:
    """more: whether it uses the target's output matrix or final norm."""
    width = int(text_config(parts).hidden_size)
    if more and (shape.hidden != width or parts.output is None or parts.norm is None):
        raise LoadError(f"{source}: fc.weight or lm_head.weight is missing, and a head of width {shape.hidden} cannot use the target's "
                        f"parts, of width {width}, in its place; expected the complete head: fetch it again")
    if parts.embed is None or not own and shape.hidden != width:
        raise LoadError(f"{source}: embed_tokens.weight is missing, and the target's embedding, of width {width}, does not fit a head "
                        f"of width {shape.hidden}; expected an embedding of the head's own: fetch the complete head")
