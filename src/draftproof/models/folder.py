"""What a model's folder (or hub id) says: its configuration, the type of its weights, tokenizer, defaults of a request, ends of a text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from ..config import LoadConfig
from ..errors import LoadError, first_line
from .stored import TYPES
from .tokenizer import Tokenizer

LEAST_CONTEXT = 2  # a prompt and what follows it
MISSING = 2  # times as many numbers in a model as in its files: beyond what any form of saving leaves out
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4")      # ways to quantise that quantised.py reads
INSTEAD = "load the model that it was made of, or serve --engine vllm"
SEEING = ("internvl", "llava", "mistral3")  # models that see, around a language model that reads texts as it does alone
TEXT_ALONE = ("gemma3n",)    # others, of which transformers reads the language model alone, and would ask for packages to build the rest
SAVED = (torch.bfloat16, torch.float16, torch.float32)  # types of weights that a whole model may be loaded in


def configuration(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Raises LoadError."""
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except StrictDataclassError as error:
        raise LoadError(f"{path}: config.json describes no model ({first_line(error.__cause__ or error)}); correct it") from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        if kind := _strange_kind(path):
            raise LoadError(f"{path}: config.json has model_type={kind!r}, which transformers {transformers.__version__} does not know; "
                            "install a newer one, or correct it") from error
        raise LoadError(
            f"{path}: no readable model configuration ({first_line(error)}); expected a local folder or a reachable hub id"
        ) from error


def _strange_kind(path: str | Path) -> str | None:
    """A configuration's model_type, if transformers has no such model and no code beside the weights brings it; else None."""
    try:
        told, _ = PreTrainedConfig.get_config_dict(str(path))
    except (OSError, ValueError):
        return None
    kind = told.get("model_type")
    return None if kind is None or kind in CONFIG_MAPPING or "auto_map" in told else str(kind)


def auto_class(model_config: Any) -> Any:
    """transformers' of the model that a configuration describes."""
    make_known(model_config)
    return AutoModelForImageTextToText if model_config.model_type in SEEING else AutoModelForCausalLM


def make_known(model_config: Any) -> None:
    """To `AutoModelForCausalLM`, which lacks some causal models of transformers' own (Mistral 4's)."""
    home = str(type(model_config).__module__).replace(".configuration_", ".modeling_")
    if type(model_config) in AutoModelForCausalLM._model_mapping or not home.startswith("transformers.models.") or find_spec(home) is None:
        return
    name = type(model_config).__name__.removesuffix("Config") + "ForCausalLM"
    if (found := getattr(import_module(home), name, None)) is not None:
        AutoModelForCausalLM.register(type(model_config), found, exist_ok=True)


def read_config(path: str | Path, config: LoadConfig) -> Any:
    """The configuration of a decoder-only model whose weights can be read. Raises LoadError."""
    folder = Path(path)
    if folder.exists():
        if not (folder / "config.json").exists():
            raise LoadError(f"{folder} has no config.json; expected the folder of a transformers model")
        if not list(folder.glob("*.safetensors")):
            other = [p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt", ".gguf"}]
            raise LoadError(
                f"{folder} has no safetensors weights (found: {', '.join(other) or 'none'}); pickled weights can run code and "
                "are never read; convert them with save_pretrained"
            )
        _check_defaults(folder / "generation_config.json")
    elif os.sep in str(path) and str(path).count("/") != 1 or str(path).startswith((".", "~")):
        raise LoadError(f"{path} does not exist; expected a folder with config.json and safetensors weights, or a hub id such as org/name")
    model_config = configuration(path, config.trust_remote_code)
    if getattr(model_config, "is_encoder_decoder", False):
        raise LoadError(
            f"{path} is an encoder–decoder model ({model_config.model_type}); only decoder-only models can be verified token by token"
        )
    if str(model_config.model_type).endswith("_assistant"):
        raise LoadError(f"{path} is a {model_config.model_type}, which drafts from what its target has computed; expected a model that "
                        "stands alone: give this one as --drafter assistant:PATH, or dflash:PATH for Muse Glimmer's")
    text = model_config.get_text_config()
    for name, least in (("num_hidden_layers", 1), ("max_position_embeddings", LEAST_CONTEXT)):
        found = getattr(text, name, None)
        if found is not None and 0 <= found < least:               # below 0: without a limit
            raise LoadError(f"{path}: config.json has {name}={found}; expected at least {least}")
    return with_caps(model_config)


def with_caps(model_config: Any) -> Any:
    """The same, for transformers' own attention if scores are softly capped: torch's knows no caps, and transformers 5.17 leaves them out,
    unsaid."""
    if getattr(model_config.get_text_config(), "attn_logit_softcapping", None):
        model_config._attn_implementation = "eager"
    return model_config


def _check_defaults(file: Path) -> None:
    """Raises LoadError for a file that transformers would pass over as if it were not there: texts would end elsewhere, unseen."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read ({first_line(error)}); correct it, or remove it to do without defaults") from None
    if not isinstance(found, dict):
        raise LoadError(f"{file} holds a {type(found).__name__}; expected an object")


def saved_dtype(path: str | Path, model_config: Any) -> torch.dtype:
    """What the checkpoint was saved in: as its configuration says, or else as its first weight is."""
    found: torch.dtype | None = getattr(model_config, "dtype", None) or getattr(model_config.get_text_config(), "dtype", None)
    return found or _first_dtype(path) or torch.float32


def _first_dtype(path: str | Path) -> torch.dtype | None:
    """None where no file of weights can be looked at: who loads it will say so."""
    try:
        try:
            file = cached_file(str(path), "model.safetensors")
        except OSError:
            index = json.loads(Path(cached_file(str(path), "model.safetensors.index.json")).read_text())
            file = cached_file(str(path), min(index["weight_map"].values()))
        with safe_open(file, framework="pt") as weights:
            types = (TYPES.get(weights.get_slice(name).get_dtype()) for name in weights.keys())  # noqa: SIM118 (not a mapping)
            return next((kind for kind in types if kind in SAVED), None)
    except (OSError, ValueError, KeyError, SafetensorError):
        return None


def why_not(error: BaseException, model_config: Any) -> str:
    """What made transformers refuse the weights, in words of the checkpoint."""
    if isinstance(error, KeyError):  # of a table of what it knows
        named = next((f"{key}={error.args[0]!r}" for key, value in _settings(model_config.to_dict()) if value == error.args[0]), None)
        return f"config.json has {named}, which this version of transformers does not know" if named else f"it lacks {error}"
    return first_line(error) + unread(model_config)


def quantised_by(found: Any) -> tuple[str, dict[str, Any]]:
    """Of a `quantization_config`: the method's name, empty where nothing is quantised, and the whole of it."""
    told: dict[str, Any] = (found if isinstance(found, dict) or found is None else found.to_dict()) or {}
    return str(getattr(method := told.get("quant_method", "a method without a name"), "value", method)).lower() if told else "", told


def unread(model_config: Any) -> str:
    """What to do about a checkpoint that others than those read here have quantised; nothing about any other."""
    kind, _ = quantised_by(getattr(model_config, "quantization_config", None))
    return f"; it is quantised by {kind}: {INSTEAD}" if kind and kind not in METHODS else ""


def _settings(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    nested = [pair for value in config.values() if isinstance(value, dict) for pair in _settings(value)]
    return [*config.items(), *nested]


def check_size(path: str | Path, model_config: Any, trust_remote_code: bool) -> None:
    """Raises LoadError for a configuration of far more weights than a folder's files hold, before there is memory for any of them."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files or getattr(model_config, "quantization_config", None):            # several weights in one number
        return
    try:
        held = 0
        for file in files:
            with safe_open(file, "pt") as opened:
                held += sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())
        with torch.device("meta"), no_init_weights():
            model = auto_class(model_config).from_config(deepcopy(model_config), trust_remote_code=trust_remote_code)
    except Exception:  # the load itself says what is wrong
        return
    described = sum(weight.numel() for weight in model.parameters())
    if described > MISSING * held:
        raise LoadError(f"{path}: config.json describes {type(model).__name__} of {described:,} weights, and the files hold {held:,}; "
                        "expected the config.json of these weights, and all of their files")


def check_weights(path: str | Path, model: Any, info: Mapping[str, Any], shares: int, more: str, reasons: dict[str, str]) -> None:
    """From what transformers says of a load. Raises LoadError, with `more` at its end, for weights that are missing or of another shape;
    others are told."""
    kind = type(model).__name__
    misshapen, missing, strange = (sorted(info[f"{what}_keys"]) for what in ("mismatched", "missing", "unexpected"))
    if misshapen:
        name, found, expected = misshapen[0]
        why = f"as a share with tensor_parallel={shares}: {kind} does not come apart in this version of transformers, use one device" \
            if shares > 1 else f"as config.json describes {kind}"
        raise LoadError(f"{path}: {len(misshapen)} weights have another shape, first {name}: found {list(found)}, expected "
                        f"{list(expected)} {why}{more}")
    if missing:
        raise LoadError(f"{path}: {len(missing)} weights are missing, first {missing[0]}; expected a complete checkpoint of {kind}{more}")
    if strange:
        named = ", ".join((*strange[:2], *["…"] * (len(strange) > 2)))
        reasons["unused weights"] = f"{len(strange)}, for which {kind} has no place as config.json describes it: {named}"


def fetched(path: str) -> Path:
    """The folder, or what the hub has under this id, with all that a model is built of."""
    return Path(path) if Path(path).exists() else Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))


def weight_files(folder: Path) -> list[Path]:
    """Those that its index names; without one, model.safetensors, or else all there are."""
    index, one = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [one] if one.exists() else sorted(folder.glob("*.safetensors"))


def assembled(kind: Any, config: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> tuple[Any, Any]:
    """(a model of this class, of weights by name and the folder's defaults; what transformers says of the load)."""
    model, info = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True,
                                       ignore_mismatched_sizes=True)  # told by `check_weights`
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model, info


def read_tokenizer(path: str | Path, config: LoadConfig, reasons: dict[str, str]) -> Tokenizer | None:
    """None, with the reason, for a folder without one. Raises LoadError."""
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    if folder.exists() and not any((folder / name).exists() for name in names):
        reasons["tokenizer"] = "none: the folder has no tokenizer files; prompts must be token ids"
        return None
    try:
        return Tokenizer.load(path, config.trust_remote_code)
    except LoadError:
        raise
    except Exception as error:  # the library raises that itself for a file that it cannot parse
        raise LoadError(f"{path}: the tokenizer could not be loaded ({first_line(error)})") from error


def defaults_of(generation: Any, path: str | Path) -> dict[str, float]:
    """What a request that leaves them open gets, as generation_config.json has them. Raises LoadError."""
    found = {name: getattr(generation, name, None) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    if getattr(generation, "do_sample", None) is False and found["temperature"] is None:
        found["temperature"] = 0.0
    try:
        return {name: float(value) for name, value in found.items() if value is not None}
    except (TypeError, ValueError) as error:
        raise LoadError(f"{path}: generation_config.json has an option that is no number ({first_line(error)}); correct it") from error


def context_of(text_config: Any) -> int:
    """The longest text of a language model, in tokens; a million where its configuration sets no limit."""
    found = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None) or -1
    return int(found) if found > 0 else 1 << 20


def end_ids(generation: Any, text_config: Any, tokenizer: Tokenizer | None, path: str | Path) -> tuple[int, ...]:
    """Of a text: as generation_config.json says, or else config.json, or else the tokenizer. Raises LoadError."""
    ids = generation.eos_token_id
    if ids is None:
        ids = getattr(text_config, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.hf.eos_token_id
    try:
        return () if ids is None else tuple(map(int, ids if isinstance(ids, list | tuple) else [ids]))
    except (TypeError, ValueError) as error:
        raise LoadError(f"{path}: eos_token_id={ids!r} in its configuration files; expected an id or a list of ids") from error
