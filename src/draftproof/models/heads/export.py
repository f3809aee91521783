"""A head in the layout and config that another engine reads. Tensors are renamed, never changed: a round trip is bit-equal.

Where engines differ (read in vLLM 0.32, SGLang and TensorRT-LLM as of mid 2026):
    tap ids     vLLM takes `eagle_aux_hidden_state_layer_ids` at the top as *entering layer k* (k = i + 1); SGLang and TensorRT-LLM take
                it in `eagle_config` as *output of layer i*. vLLM would read the latter unshifted, so its config has no eagle_config.
    first layer `midlayer.` is what all three accept; TensorRT-LLM and SGLang skip or refuse `layers.0.` in some versions.
    fc's bias   EAGLE-1's config says with `bias` whether fc has one; vLLM and SGLang read it as one of attention. vLLM's fc has none,
                SGLang's always has one, and what no file fills stays uninitialised in both. So zeros are added, or left out.
    dialects    only vLLM honours norm_before_residual, several layers, fc_norm and norm_output in all of the versions read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import LoadError
from .detect import detect
from .eagle import eagle_name
from .eagle3 import canonical, nested_taps, norms_of, setting
from .files import HeadFiles, read_files, write_files
from .medusa import understood
from .mtp_files import COUNTS, brings, layers_of, stitch
from .peagle import told_token

ENGINES = ("vllm", "sglang", "trtllm", "hf")
MTP = {"vllm": "vLLM: --speculative-config '{\"method\": \"mtp\", \"num_speculative_tokens\": K}'",
       "sglang": "SGLang: --speculative-algorithm NEXTN",
       "trtllm": "TensorRT-LLM: speculative_config with decoding_type: MTP",
       "hf": "transformers: generate(..., use_mtp=True)"}              # each with that checkpoint as its model
TAPPED = ("eagle3", "peagle")
Written = tuple[dict[str, Any], dict[str, Tensor], list[str]]      # config, tensors, notes


def export_head(source: str | Path, engine: str, out: str | Path, target: str | Path | None = None) -> list[str]:
    """Write `source`, a head or a draft model, for `engine` into the folder `out`; returns what its user must know.

    target: the checkpoint that an MTP head was trained beside: engines read such a head inside it, so `out` becomes the whole of it. Of an
    EAGLE-3 head, the model that it was trained for: its number of layers tells how some lists of taps count.

    Raises LoadError if the engine cannot run such a head, naming what it lacks and what to do.
    """
    if engine not in ENGINES:
        raise LoadError(f"unknown engine {engine!r}; expected one of {', '.join(ENGINES)}")
    if Path(out).exists() and any(Path(out).iterdir()):
        raise LoadError(f"{out} is not empty; expected a new folder")
    files = read_files(source)
    kind = detect(files)
    if kind == "mtp":
        return _inside(files, engine, out, target)
    if target is not None and kind not in TAPPED:
        raise LoadError(f"{source} is of kind {kind}, which engines read beside their target; only an mtp head is written into a "
                        "checkpoint: leave the target out")
    if kind in ("model", "pard"):
        shutil.copytree(files.path, out, dirs_exist_ok=True)
        return [f"{kind}: copied as it is, every engine reads the layout of transformers",
                *(["vLLM: method draft_model with parallel_drafting=true"] if kind == "pard" and engine == "vllm" else [])]
    if engine == "hf":
        write_files(out, files.config, files.tensors)
        return [f"{kind}: as published; transformers itself runs no heads"]
    write = WRITERS.get((kind, engine))
    if write is None:
        able = sorted({to for name, to in WRITERS if name == kind} | {"hf"})
        raise LoadError(f"{engine} runs no {kind} head; {kind} can be exported to {', '.join(able)}")
    counted, remarks = _counted(files, target) if kind in TAPPED else (files, [])
    config, tensors, notes = write(counted)
    write_files(out, config, tensors)
    return notes + remarks


def _counted(files: HeadFiles, target: str | Path | None) -> tuple[HeadFiles, list[str]]:
    """The head with the taps of its `eagle_config` as outputs, and what is not certain of them without its target."""
    name, nested = "eagle_aux_hidden_state_layer_ids", nested_taps(files.config, None)
    if target is None:
        return files, [f"taps {nested} were taken for outputs of layers; some heads (NVIDIA's third for gpt-oss) count the layers entered, "
                       "which their target's number of layers tells: name it with --target"] if nested and 1 not in nested else []
    taps = nested_taps(files.config, layers_of(target))
    return (replace(files, config={**files.config, "eagle_config": {**files.config["eagle_config"], name: taps}}) if taps else files), []


def _inside(files: HeadFiles, engine: str, out: str | Path, target: str | Path | None) -> list[str]:
    """An MTP head, in a copy of its target's checkpoint."""
    if target is None and engine == "hf":
        write_files(out, files.config, files.tensors)
        return ["mtp: alone, as its family names it; transformers and other engines read it inside its target's checkpoint: name that "
                "target, and the whole of it is written"]
    if target is None:
        raise LoadError(f"{engine} reads an mtp head inside its target's checkpoint; name that target (--target), and the whole of it is "
                        "written with this head in it")
    if not brings(target):
        raise LoadError(f"{target} brings no multi-token prediction layer of its own: none among its tensors, and neither "
                        f"{' nor '.join(COUNTS)} in its config; {engine} has no place for this head there, `mtp:{files.path}` runs it here")
    try:
        names = stitch(files.path, target, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)           # it was empty, or was not
        raise
    return [f"mtp: {len(names)} tensors of the head in a copy of {target}; serve that copy as the target", MTP[engine]]


def _eagle3_vllm(files: HeadFiles) -> Written:
    tensors, config = _midlayer(files)
    taps = _taps(files)
    config.pop("eagle_config", None)
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    if taps is not None:
        config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in taps]
    return config, tensors, ["vLLM: --speculative-config '{\"method\": \"eagle3\", \"model\": DIR, \"num_speculative_tokens\": K}'"]


def _peagle_vllm(files: HeadFiles) -> Written:
    config, tensors, _ = _eagle3_vllm(files)
    return {**config, "pard_token": told_token(config)}, tensors, ["vLLM: method eagle3 with parallel_drafting=true"]


def _eagle3_sglang(files: HeadFiles) -> Written:
    _portable(files, "SGLang")
    tensors, config = _midlayer(files)
    return _zero_based(config, files), tensors, ["SGLang: --speculative-algorithm EAGLE3 --speculative-draft-model-path DIR"]


def _eagle3_trtllm(files: HeadFiles) -> Written:
    _portable(files, "TensorRT-LLM")
    tensors, config = _midlayer(files)
    taps = _taps(files)
    notes = ["TensorRT-LLM: speculative_config: {decoding_type: Eagle3, speculative_model: DIR, max_draft_len: K}"]
    if taps is not None:
        notes.append(f"TensorRT-LLM: eagle3_layers_to_capture: {list(taps)}")
    return _zero_based(config, files), tensors, notes


def _medusa_vllm(files: HeadFiles) -> Written:
    """`{i}.{l}.linear.*` and `{i}.{L}.weight` become `blocks.{i}.layers.{l}.*` and `lm_heads.{i}.weight`."""
    if files.config.get("medusa_target_output"):
        raise LoadError(f"{files.path} uses the target's own output matrix, which vLLM's Medusa does not; train one with matrices of its "
                        "own (--draft-vocab N)")
    named, ids, heads, layers = understood(files)
    tensors = {re.sub(r"^outputs\.", "lm_heads.", re.sub(r"^(blocks\.\d+)\.", r"\1.layers.", name)): tensor.clone()
               for name, tensor in named.items()}  # a block that stood in the file once is several here
    rows, hidden = tensors["lm_heads.0.weight"].shape
    one = heads > 1 and "lm_heads.1.weight" not in tensors
    config = {"vocab_size": rows, "hidden_size": hidden, **files.config, "model_type": "medusa", "architectures": ["MedusaModel"],
              "num_heads": heads, "num_hidden_layers": layers, "truncated_vocab_size": rows, "original_lm_head": one,
              "medusa_fc_bias": any(name.endswith(".bias") for name in tensors)}
    if ids is not None:
        tensors["token_map"] = ids
    for name in ("medusa_num_heads", "medusa_num_layers", "version"):
        config.pop(name, None)
    return config, tensors, ["vLLM up to 0.32: method medusa (removed in 0.33)"]


def _eagle_vllm(files: HeadFiles) -> Written:
    tensors, config = _attention_biases(files)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise LoadError(f"{files.path}: fc.bias is not zero, and vLLM's EAGLE head has no such bias; train a head without one (new ones "
                        "have none), or serve this one with SGLang")
    return config, tensors, ["vLLM: method eagle"]


def _eagle_sglang(files: HeadFiles) -> Written:
    tensors, config = _attention_biases(files)
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    return ({**config, "architectures": ["LlamaForCausalLMEagle"]}, tensors,
            ["SGLang: --speculative-algorithm EAGLE, a tree with --speculative-eagle-topk"])


def _attention_biases(files: HeadFiles) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and a config that says of biases only whether attention has them; where it has some, those that it lacks are zero."""
    tensors = {eagle_name(name): tensor for name, tensor in files.tensors.items()}
    biased = any(re.search(r"\.self_attn\.\w_proj\.bias$", name) for name in tensors)
    if biased:
        weights = {name: tensor for name, tensor in tensors.items() if re.search(r"\.self_attn\.\w_proj\.weight$", name)}
        for name, weight in weights.items():
            tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros_like(weight[:, 0]))
    config = files.config.get("transformer_layer_config") or files.config
    return tensors, {**config, "architectures": ["LlamaForCausalLM"], "bias": biased, "attention_bias": biased}


def _as_published(note: str) -> Callable[[HeadFiles], Written]:
    return lambda files: (dict(files.config), dict(files.tensors), [note])


def _xpress_vllm(files: HeadFiles) -> Written:
    if files.config.get("sample_from_anchor") or "xpress_head.mix.L" not in files.tensors:
        raise LoadError(f"{files.path}: vLLM 0.33 reads XPress heads with tensors xpress_head.*, whose anchor's slot guesses nothing; this "
                        f"one is another (of speculators' layout, or with sample_from_anchor); `xpress:{files.path}` runs it here")
    return _as_published("vLLM: method dflash, num_speculative_tokens must be block_size - 1")(files)


def _midlayer(files: HeadFiles) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors in the official names and a flat Llama config."""
    tensors = {canonical(name): tensor for name, tensor in files.tensors.items()}
    missing = [name for name in ("fc.weight", "lm_head.weight") if name not in tensors]
    if missing:
        raise LoadError(f"{files.path} has no {' and no '.join(missing)} of its own; expected both, which engines look for: give them "
                        "this head as it was published")
    several = any(name.startswith("layers.1.") for name in tensors)
    if not several:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    outer = {k: v for k, v in files.config.items() if k not in ("transformer_layer_config", "speculators_config", "auto_map")}
    config = {**(files.config.get("transformer_layer_config") or {}), **outer}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    for name in ("speculators_model_type", "speculators_version"):
        config.pop(name, None)
    config |= {name: bool(setting(files.config, name)) for name in ("norm_before_residual", "norm_output")}
    norms = norms_of(files, tensors)
    config |= {"fc_norm": norms == "fc_norm", "norm_before_fc": norms == "input_norm"}
    config.setdefault("vocab_size", tensors["t2d"].shape[0] if "t2d" in tensors else tensors["lm_head.weight"].shape[0])
    config["draft_vocab_size"] = tensors["lm_head.weight"].shape[0]
    return tensors, config


def _taps(files: HeadFiles) -> tuple[int, ...] | None:
    """0-based output ids as the config gives them, None if it gives none."""
    nested: Mapping[str, Any] = files.config.get("eagle_config") or {}
    if nested.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(nested["eagle_aux_hidden_state_layer_ids"])
    if files.config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(k - 1 for k in files.config["eagle_aux_hidden_state_layer_ids"])
    if files.config.get("target_layer_ids"):
        return tuple(files.config["target_layer_ids"])
    return None


def _zero_based(config: dict[str, Any], files: HeadFiles) -> dict[str, Any]:
    taps = _taps(files)
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    config.pop("eagle_config", None)
    if taps is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    return config


def _portable(files: HeadFiles, engine: str) -> None:
    names = [canonical(name) for name in files.tensors]
    found = [name for name in ("norm_before_residual", "norm_output") if setting(files.config, name)]
    found += [said for said, norms in (("fc_norm", "fc_norm"), ("norm_before_fc", "input_norm")) if norms_of(files, names) == norms]
    if any(name.startswith("layers.1.") for name in names):
        found.append("several layers")
    if found:
        raise LoadError(f"{files.path}: {', '.join(found)} cannot be relied on in {engine}; train a head of one layer without it, "
                        "or serve this one with vLLM")


WRITERS: Mapping[tuple[str, str], Callable[[HeadFiles], Written]] = {
    ("eagle3", "vllm"): _eagle3_vllm,
    ("peagle", "vllm"): _peagle_vllm,
    ("eagle3", "sglang"): _eagle3_sglang,
    ("eagle3", "trtllm"): _eagle3_trtllm,
    ("eagle", "vllm"): _eagle_vllm,
    ("eagle", "sglang"): _eagle_sglang,
    ("medusa", "vllm"): _medusa_vllm,
    ("dflash", "vllm"): _as_published("vLLM: method dflash"),
    ("dflash", "sglang"): _as_published("SGLang: --speculative-algorithm DFLASH"),
    ("dflash", "trtllm"): _as_published("TensorRT-LLM: decoding_type: DFlash"),
    ("dflash2", "vllm"): _as_published("vLLM: method dflash"),
    ("dflash2", "sglang"): _as_published("SGLang: --speculative-algorithm DFLASH"),
    ("dspark", "vllm"): _as_published("vLLM: method dspark"),
    ("xpress", "vllm"): _xpress_vllm,
    ("domino", "sglang"): _as_published("SGLang: --speculative-algorithm DFLASH (a GPU, and a target in bfloat16)"),
}
