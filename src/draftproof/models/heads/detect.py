"""Which drafter a head's folder is for, by several fields: names in configs lie, tensors do not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import LoadError
from .files import HeadFiles

FORMATS = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "peagle", "dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark",
           "xpress": "xpress", "mtp": "mtp", "medusa": "medusa", "mlp_speculator": "mlp"}      # speculators_model_type → drafter


def detect(files: HeadFiles) -> str:
    """The drafter's name: assistant, eagle, eagle3, medusa, hydra, mlp, dflash, dflash2, dspark, xpress, domino, mtp, pard, peagle, or
    model for a
    language model.

    Tensors are asked first, for two families never share theirs; then architectures and fields. A head of EAGLE-1 and 2 is
    `eagle`. Raises LoadError if it is none of these.
    """
    if re.fullmatch(r"gemma4\w*_assistant", str(files.config.get("model_type"))):        # its class's name is a language model's
        return "assistant"
    found = _by_tensors(files.tensors, files.config) or _by_config(files.config)
    if found is None:
        raise LoadError(f"{files.path} holds no draft head that is known (tensors: {', '.join(sorted(files.tensors)[:6])} …); "
                        "expected a head of assistant, eagle, eagle3, peagle, medusa, hydra, mlp, dflash, dflash2, dspark, xpress, domino, "
                        "mtp or pard")
    return found


def require(files: HeadFiles, *wanted: str) -> None:
    """Raises LoadError saying what the folder really is, unless it is one of `wanted`."""
    found = detect(files)
    if found not in wanted:
        raise LoadError(f"{files.path} is a head for drafter {found}; expected one for {' or '.join(wanted)}: write {found}:{files.path}")


def _by_tensors(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    if any(name.startswith(("model.fc.", "model.midlayer.")) for name in tensors):        # NeMo Automodel's heads; not a language model's
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    names = list(tensors)

    def some(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in names)

    if some(r"(^|\.)mask_hidden$"):
        return "peagle"
    if some(r"(^|[._])markov_w[12]\b|^markov_head\.|^confidence_(head|proj)"):
        return "dspark"
    if some(r"(^|\.)candidate_selector\."):
        return "dflash2"
    if some(r"(^|\.)(xpress|refiner)_head\."):
        return "xpress"
    if some(r"(^|\.)prefix_gru\."):
        return "domino"
    if some(r"^mtp\.|mtp_layers\.|\.mtp_block\.|\.eh_proj\."):
        return "mtp"
    if _medusa(names):
        return "hydra" if "hydra_num_heads" in config or some(r"hydra|prefix_embed|prefix_layer") else "medusa"
    if some(r"^(speculator\.)?(emb|proj|ln|head)\.0\.weight$") or some(r"^(speculator\.)?ln0\.weight$"):
        return "mlp"
    fc = next((tensors[name] for name in ("fc.weight", "fusion_fc.weight", "encoder.fc.weight") if name in tensors), None)
    if some(r"^midlayer\.|^layers\.0\.hidden_norm\.|^(d2t|t2d)$") and fc is not None and not _block(names, config):
        return "eagle3"
    if fc is not None and _block(names, config):
        return "dspark" if "dspark" in str(config).lower() else "dflash"
    if fc is not None and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]:
        return "eagle"
    return "eagle3" if fc is not None and "lm_head.weight" in names and some(r"^layers\.0\.self_attn\.") else None


def _medusa(names: Iterable[str]) -> bool:
    """Heads by number: `0.0.linear.weight`, `medusa_head.0.0.linear.weight`, or vLLM's `blocks.0.layers.0.weight`."""
    pattern = r"((medusa|hydra)_heads?\.)?\d+\.\d+\.(linear\.)?weight$|(hydra|medusa)_|blocks\.\d+\.layers\."
    return any(re.match(pattern, name) for name in names)


def _block(names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """DFlash and its descendants: one norm of the fused context, shared by all layers, and a config that speaks of blocks."""
    return "dflash_config" in config or bool({"hidden_norm.weight", "context_norm.weight", "encoder.output_norm_enc.weight"} & {*names})


def _by_config(config: Mapping[str, Any]) -> str | None:
    named = FORMATS.get(str(config.get("speculators_model_type") or (config.get("speculators_config") or {}).get("algorithm")))
    if named:
        return named
    architectures = " ".join(config.get("architectures") or ()).lower()
    for part, drafter in (("peagle", "peagle"), ("eagle3", "eagle3"), ("xpress", "xpress"), ("dspark", "dspark"),
                          ("dflash2", "dflash2"), ("dflash", "dflash"), ("mtpdraft", "mtp"), ("mlpspeculator", "mlp"),
                          ("medusa", "medusa"), ("eagle", "eagle")):
        if part in architectures:
            return drafter
    if "pard_token" in config or config.get("spd_type") == "pard":
        return "pard"
    if config.get("model_type") == "mlp_speculator":
        return "mlp"
    for field, drafter in (("medusa_num_heads", "medusa"), ("hydra_num_heads", "hydra"), ("dflash_config", "dflash")):
        if field in config:
            return drafter
    return "model" if "causallm" in architectures else None
