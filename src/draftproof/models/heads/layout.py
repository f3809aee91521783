"""What the configs of the DFlash family say, in one vocabulary, and the variants that are other networks, refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...errors import LoadError
from .files import HeadFiles

RENAMED = (("logit_head.", ""), ("midlayer.", "layers.0."), ("encoder.output_norm_enc.", "hidden_norm."), ("encoder.fc.", "fc."),
           ("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm."), ("markov_w1.", "markov_head.markov_w1."),
           ("markov_w2.", "markov_head.markov_w2."), ("gate_proj.", "markov_head.gate_proj."), ("joint_proj.", "markov_head.joint_proj."),
           ("confidence_proj.", "confidence_head.proj."),
           ("candidate_selector.predecessor_codebook.weight", "candidate_selector.predecessor_codebook"),
           ("candidate_selector.successor_codebook.weight", "candidate_selector.successor_codebook"),
           ("refiner_head.", "xpress_head."), ("xpress_head.token_embed.", "xpress_head.w1."), ("xpress_head.readout.", "xpress_head.w2."),
           ("xpress_head.mix_l", "xpress_head.mix.L"), ("xpress_head.mlp_gate.", "xpress_head.mlp.gate_proj."),
           ("xpress_head.mlp_up.", "xpress_head.mlp.up_proj."), ("xpress_head.mlp_down.", "xpress_head.mlp.down_proj."))
FAMILIES = {"dspark": ("DSpark", "neither a Markov head nor a confidence head"), "dflash2": ("DFlash2", "no candidate selector"),
            "xpress": ("XPress", "no refiner"), "domino": ("Domino", "no GRU")}
SIGNS = {"markov_head.": "dspark", "confidence_head.": "dspark", "candidate_selector.": "dflash2", "_conv.base_kernel": "dflash2",
         "xpress_head.": "xpress", "prefix_gru.": "domino", "embed_proj.": "domino"}
OTHERS = {"sink": "attention sinks", "qkv_proj": "Laguna's fused projections", "g_proj": "Laguna's gates",
          "aux_hidden_norms": "Laguna's norms", "lilicorr": "LiLiCorr's correlator", "kv_a_proj": "latent attention"}
KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "use_swa", "swa_window_size", "causal", "attention_sink_bias", "projector_type",
         "shift_label", "sample_from_anchor", "markov_rank", "markov_head_type", "use_confidence_head", "enable_confidence_head",
         "confidence_head_with_markov", "attention_mode", "attention_modes", "input_embedding_scale", "output_multiplier",
         "final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
         "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim",
         "num_anchors", "loss_decay_gamma", "use_aux_hidden_state"}


@dataclass(frozen=True, slots=True)
class View:
    """What a row of a block sees of the rows before and after it: a window on either side, or nothing behind itself."""

    window: int | None = None
    causal: bool = False

    def sees(self, distance: Tensor) -> Tensor:
        """distance = position of the query minus that of the key → bool of the same shape."""
        found = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            found &= distance >= 0
        if self.window is not None:
            found &= distance.abs() < self.window
        return found

    def mask(self, before: int, block: int, device: torch.device) -> Tensor | None:
        """bool [block, before + block] for a block right behind `before` context rows; None where everything is seen."""
        if not self.causal and (self.window is None or self.window >= before + block):
            return None
        return self.sees(torch.arange(before, before + block, device=device)[:, None] - torch.arange(before + block, device=device))


@dataclass(frozen=True, slots=True)
class Local:
    """What DFlash 2 adds. taps: rows that a convolution reads, its own among them · group: channels with a kernel in common ·
    choices: candidates of a slot."""

    taps: int
    group: int
    choices: int

    @classmethod
    def of(cls, source: Path, settings: Mapping[str, Any], hidden: int, vocab_size: int) -> Self:
        """Raises LoadError for numbers that do not fit a head of this width."""
        names = ("conv_kernel_size", "conv_group_size", "selector_top_k")
        found = [settings.get(name) for name in names]
        if not all(isinstance(value, int) and value > 0 for value in found) or int(found[2] or 0) > vocab_size:
            raise LoadError(f"{source}: {', '.join(names)} are {', '.join(map(repr, found))}; expected three positive integers, in "
                            f"dflash_config or at the top of config.json, the last one at most the target's {vocab_size} tokens")
        if hidden % int(found[1] or 0):
            raise LoadError(f"{source}: conv_group_size is {found[1]}, and the head {hidden} wide; expected a divisor of it")
        return cls(*map(int, found))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Layout:
    """One DFlash config. block counts the anchor; taps are layers (0 is the first, its output); mask_token None: a vector of its own;
    local: None unless it is a DFlash 2."""

    block: int
    taps: tuple[int, ...]
    mask_token: int | None
    from_anchor: bool
    views: tuple[View, ...]
    embed_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0
    local: Local | None = None

    @classmethod
    def of(cls, files: HeadFiles, tensors: Mapping[str, Tensor], layers: int, target: Any, family: str) -> Self:
        """Raises LoadError for what is missing, contradicts the tensors or the target, or is another network."""
        source, config = files.path, files.config
        inner: Mapping[str, Any] = config.get("dflash_config") or {}
        settings = {**config, **{name: value for name, value in inner.items() if value is not None}}
        _refuse(source, config, inner, settings, tensors, family)
        taps = _taps(source, config, settings, tensors, target)
        block = settings.get("block_size")
        if not isinstance(block, int) or block < 2:
            raise LoadError(f"{source}: block_size is {block!r}; expected an integer ≥ 2, at the top of config.json or in dflash_config")
        token, own = settings.get("mask_token_id"), "mask_embedding" in tensors
        if not own and (not isinstance(token, int) or not 0 <= token < int(target.vocab_size)):
            raise LoadError(f"{source}: mask_token_id is {token!r}; expected one of the target's {target.vocab_size} tokens, or a tensor "
                            "mask_embedding")
        anchored = settings.get("sample_from_anchor", settings.get("shift_label"))
        return cls(block, taps, token, family == "dspark" if anchored is None else bool(anchored),
                   _views(source, config, settings, layers), float(settings.get("input_embedding_scale") or 1.0),
                   float(settings.get("output_multiplier") or 1.0), float(settings.get("final_logit_softcapping") or 0.0),
                   Local.of(source, settings, tensors["fc.weight"].shape[0], int(target.vocab_size)) if family == "dflash2" else None)

    def published(self) -> dict[str, Any]:
        """The config fields of z-lab's layout."""
        inner: dict[str, Any] = {"mask_token_id": self.mask_token, "target_layer_ids": list(self.taps)}
        for name, value, usual in (("sample_from_anchor", self.from_anchor, False), ("input_embedding_scale", self.embed_scale, 1.0),
                                   ("output_multiplier", self.output_scale, 1.0), ("final_logit_softcapping", self.softcap, 0.0)):
            if value != usual:
                inner[name] = value
        kinds = ["full_attention" if view.window is None else "sliding_attention" for view in self.views]
        found: dict[str, Any] = {"block_size": self.block, "layer_types": kinds, "dflash_config": inner}
        windows = {view.window for view in self.views} - {None}
        if windows:
            found["sliding_window"] = windows.pop()
        if any(view.causal != (view.window is not None) for view in self.views):
            found["is_causal"] = self.views[0].causal
        return found


def body_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a config describes the decoder layers."""
    body = config.get("transformer_layer_config")
    return body if isinstance(body, Mapping) else config


def renamed(files: HeadFiles) -> dict[str, Tensor]:
    """The file's tensors under the names that z-lab and DeepSpec use."""
    found: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        known = name.removeprefix("model.")
        for old, new in RENAMED:
            if known.startswith(old):
                known = new + known.removeprefix(old)
        if known in found:
            raise LoadError(f"{files.path}: two tensors for {known}, one of them {name}; expected it once")
        found[known] = tensor
    return found


def _refuse(source: Path, config: Mapping[str, Any], inner: Mapping[str, Any], settings: Mapping[str, Any], tensors: Mapping[str, Tensor],
            family: str) -> None:
    def no(what: str, expected: str = "a DFlash head of plain Qwen3 layers") -> LoadError:
        return LoadError(f"{source}: {what}; expected {expected}")

    for part, name in OTHERS.items():
        found = next((tensor for tensor in tensors if part in tensor), None)
        if found is not None:
            raise no(f"tensor {found} belongs to a variant with {name}, which is another network")
    if settings.get("attention_sink_bias") or settings.get("add_swa_attention_sink_bias"):
        raise no("the config asks for attention sinks, which is another network")
    modes = {*(settings.get("attention_modes") or ()), settings.get("attention_mode") or "gqa"} - {"gqa", "mha"}
    if modes:
        raise no(f"attention mode {', '.join(sorted(map(str, modes)))} is another network", "gqa or mha")
    if settings.get("is_neox_style") is False:
        raise no("the config asks for interleaved rotary pairs (is_neox_style false)", "half-split pairs")
    if config.get("quantization_config"):
        raise no("the weights are quantised", "the head in 16 or 32 bits")
    unknown = sorted(name for name, value in inner.items() if name not in KNOWN and value not in (None, False))
    if unknown:
        raise no(f"dflash_config holds {', '.join(unknown)}, which nothing here reads", f"only {', '.join(sorted(KNOWN))}")
    shown, own = next(((name, own) for name in tensors for sign, own in SIGNS.items() if sign in name), ("", "dflash"))
    if own != family and shown:
        raise no(f"tensor {shown} belongs to a {FAMILIES[own][0]} head", f"drafter {own} for it")
    if own != family:
        raise no(f"there is {FAMILIES[family][1]}", f"a {FAMILIES[family][0]} head; for this one name drafter dflash")
    if settings.get("projector_type") not in (None, "dflash", family):
        raise no(f"projector_type is {settings['projector_type']!r}, another network", f"dflash, or that of drafter {family}")


def _taps(source: Path, config: Mapping[str, Any], settings: Mapping[str, Any], tensors: Mapping[str, Tensor],
          target: Any) -> tuple[int, ...]:
    outputs, entries = settings.get("target_layer_ids"), settings.get("aux_hidden_state_layer_ids")
    if not outputs and not entries:
        raise LoadError(f"{source}: the config names no layers of the target; expected target_layer_ids (0: output of the first layer) "
                        "or aux_hidden_state_layer_ids (1: the same)")
    taps = tuple(int(i) for i in outputs) if outputs else tuple(int(i) - 1 for i in entries or ())
    if outputs and entries and taps != tuple(int(i) - 1 for i in entries):
        raise LoadError(f"{source}: target_layer_ids {list(outputs)} and aux_hidden_state_layer_ids {list(entries)} name other layers; "
                        "expected the second to be the first plus one")
    layers, width = int(target.num_hidden_layers), int(target.hidden_size)
    stated = config.get("num_target_layers")
    if stated is not None and int(stated) != layers:
        raise LoadError(f"{source}: it was trained for a target of {stated} layers; this one has {layers}; expected a head for this target")
    if min(taps) < 0 or max(taps) >= layers:
        raise LoadError(f"{source}: it reads the outputs of layers {list(taps)}; expected layers 0 to {layers - 1} of this target")
    fc = tensors.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] != len(taps) * width:
        found = "missing" if fc is None else f"{list(fc.shape)}"
        raise LoadError(f"{source}: fc.weight is {found}, and the config names layers {list(taps)}; expected {len(taps)} × {width} "
                        "columns: the outputs of those layers of this target")
    return taps


def _views(source: Path, config: Mapping[str, Any], settings: Mapping[str, Any], layers: int) -> tuple[View, ...]:
    """Per layer: `use_swa` makes every layer slide unless layer_types says which do; a layer that slides is causal inside the block
    unless is_causal, causal or sliding_window_non_causal say otherwise, or it is Muse Glimmer's; other layers see the whole block."""
    body = body_of(config)
    kinds = body.get("layer_types") or ["full_attention"] * layers
    foreign = set(kinds) - {"full_attention", "sliding_attention"}
    if foreign or len(kinds) < layers:
        raise LoadError(f"{source}: layer_types is {kinds} for {layers} layers; expected full_attention or sliding_attention for each")
    slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    if settings.get("use_swa") and not any(slides):
        slides, kinds = [True] * layers, ["full_attention"] * layers
    window = settings.get("swa_window_size") or body.get("sliding_window")
    if any(slides) and not window:
        raise LoadError(f"{source}: layers slide, and neither swa_window_size nor sliding_window says how far; expected one of them")
    override = next((bool(settings[name]) for name in ("is_causal", "causal") if settings.get(name) is not None), None)
    if override is None and (settings.get("sliding_window_non_causal") or config.get("model_type") == "muse_glimmer_assistant"):
        override = False
    return tuple(View(int(window) if slide and window else None, (kind == "sliding_attention") if override is None else override)
                 for slide, kind in zip(slides, kinds, strict=False))
