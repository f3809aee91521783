"""From a folder (or hub id) to a `Target`: choose device, dtype, tier and kernels, say why, and measure Law 2."""

from __future__ import annotations

import ctypes
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from ..config import LoadConfig
from ..errors import LoadError, first_line
from . import quantised, rows
from .between import compare, compiled_between
from .cropped import CroppedTarget
from .experts import experts_of, packed_bytes, routers, take_experts
from .families import FAMILIES, LAST_NORM, has_latent, has_state, layers_of, looking_back
from .folder import (
    SEEING,
    TEXT_ALONE,
    auto_class,
    check_size,
    check_weights,
    context_of,
    defaults_of,
    end_ids,
    make_known,
    read_config,
    read_tokenizer,
    saved_dtype,
    unread,
    why_not,
)
from .forms import beside_levels, form_of, keeps
from .fused import FusedLayer, fuse
from .fused_pass import FusedPass
from .graphs import passes
from .graphs import recorder as _recorder
from .key_levels import require_levels
from .known import can_fuse
from .latent import LatentLayer
from .leading import lead
from .levels import StandIns, level_weights
from .packed import Linear, multiplies_bfloat16, pack, read_by_hand, sizes, widened_bytes
from .paged import PagedTarget
from .recurrent import RecurrentTarget
from .ropes import MOVING_ROPE
from .selftest import invisible
from .shares import Ranks, divided, load_share
from .state_layers import state_layer
from .streams import StreamsLayer
from .target import LoadFacts, Target, TargetParts
from .tier import silent_experts, tier_of
from .tokenizer import Tokenizer

WEIGHTS = Path(__file__).parent.parent / "weights"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3          # glibc's malloc.h
HALVES = (torch.bfloat16, torch.float16)


def builtin(name: str) -> Path:
    """The folder of a built-in demo model: "target" or "draft"."""
    folder = WEIGHTS / name
    if not (folder / "config.json").exists():
        known = sorted(place.parent.name for place in WEIGHTS.glob("*/config.json"))
        raise LoadError(f"there is no built-in model {name!r} (there are {', '.join(known)}); give the path of one, as in {name}:PATH")
    return folder


def load_target(path: str | Path, config: LoadConfig | None = None, fused: bool = True) -> Target:
    """Load a decoder-only model for scoring. `fused=False` keeps the transformers forward where the slim one would replace it.

    Only safetensors weights are read. Raises LoadError with what was found, what was expected and what to do.
    """
    config, path = config or LoadConfig(), os.path.expanduser(path)         # a shell leaves the ~ of `model:~/draft`
    if config.tensor_parallel == 1:
        return _tested(load_part(path, config, fused, None), config)
    whole = read_config(path, config)
    divided(whole, config.tensor_parallel)  # refuses before processes are started
    target = lead(str(path), config, fused, _device(config, {}), load_part)
    target.parts = replace(target.parts, config=whole)
    return _tested(target, config)


def load_part(path: str | Path, config: LoadConfig, fused: bool, ranks: Ranks | None) -> Target:
    """A target that is not tested yet. ranks: the processes that share it, of which this one loads its part; None: all of it."""
    reasons: dict[str, str] = {}
    model_config = read_config(path, config)
    saved = saved_dtype(path, model_config)
    device = _device(config, reasons)
    if device.type == "cpu":
        _keep_memory(reasons)
    dtype = _dtype(config, saved, device, reasons)
    _set_threads(config, reasons)
    model = text_part(_load_model(path, config, model_config, dtype, device, ranks, reasons), reasons).to(device).eval()
    return _made(model, str(path), config, read_tokenizer(path, config, reasons), saved, fused, reasons)


def as_target(model: Any, config: LoadConfig | None = None, name: str = "a model in memory") -> Target:
    """The same of a transformers model where it lies, in its own type. Its layers are replaced: from then on it is the target's."""
    config, reasons = config or LoadConfig(), {"device": "where the model is", "dtype": "the model's own"}
    return _tested(_made(text_part(model, reasons).eval(), name, config, None, model.dtype, True, reasons), config)


def text_part(model: Any, reasons: dict[str, str]) -> Any:
    """The language model inside of one that reads images or sounds, too, where its block is known or that one is SEEING; else all of it."""
    inner, text = getattr(getattr(model, "model", None), "language_model", None), model.config.get_text_config()
    if inner is None or text.model_type not in FAMILIES and model.config.model_type not in SEEING:
        return model
    make_known(text)
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(text)
    if type(found.model) is not type(inner):
        return model
    reasons["language model"] = f"the one inside of {type(model).__name__}: images and sounds are not read"
    found.set_output_embeddings(model.get_output_embeddings())
    found.model, found.config, found.generation_config = inner, inner.config, model.generation_config
    return found


def _made(model: Any, name: str, config: LoadConfig, tokenizer: Tokenizer | None, saved: torch.dtype, fused: bool,
          reasons: dict[str, str]) -> Target:
    device, dtype, threads = model.device, model.dtype, torch.get_num_threads()
    (weight_bytes, parameters), experts = sizes(model), experts_of(model)
    text = model.config.get_text_config()
    context = context_of(text)
    levels = level_weights(model)
    with StandIns(levels) if levels else nullcontext(), silent_experts(model):     # which every function passes through
        spared = read_by_hand(model)
        tier, cache_bytes = tier_of(model, context, reasons, fused and config.packed)
    ours = fused and tier == 1 and not levels and rows.usable(model, config, reasons)
    form = form_of(config, device, dtype, reasons, ours)
    if levels:
        form = beside_levels(form, device)
    slim, in_levels = fused and config.packed and _fuse(model, tier, form, config, ours, reasons), config.cache_bits == 8
    if in_levels:
        require_levels(layers_of(model) if slim else None, device, dtype)
        reasons["keys and values"] = "in eight bits, a step for each head of each token"
    if slim:
        cache_bytes = sum(layer.cache_bytes(in_levels) for layer in layers_of(model))
    if form:
        if device.type == "cpu":                        # a GPU would wait to be told which experts are chosen
            take_experts(model, form, spared)
        elif experts and config.quantization:
            own = str(dtype).removeprefix("torch.")
            reasons["experts"] = f"in {own}, as transformers runs them, and what scores them: {config.quantization} is for linear layers"
            spared |= routers(model)
        pack(model, form, spared)
        _give_back()
    facts = LoadFacts(
        name=name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        tier=tier,
        threads=threads,
        weight_bytes=weight_bytes + widened_bytes(model),
        cache_bytes_per_token=cache_bytes,
        invisible=False,
        invisible_reason="not measured: the self-test is off",
        reasons=reasons,
        parameters=parameters,
        experts=experts and replace(experts, bytes=experts.bytes + packed_bytes(model)),
    )
    shared: dict[str, Any] = dict(
        vocab_size=model.get_output_embeddings().out_features
        if hasattr(model.get_output_embeddings(), "out_features")
        else text.vocab_size,
        context=context,
        cache_tokens=config.cache_tokens,
        whole_tiles=config.reproducible,
        facts=facts,
        parts=_parts(model, saved),
        tokenizer=tokenizer,
        defaults=defaults_of(model.generation_config, name),
        eos_ids=end_ids(model.generation_config, text, tokenizer, name),
    )
    return _target(model, tier, config, passes(model, _recorder(device), config.graphs, reasons) if slim else None, shared)


def _tested(target: Target, config: LoadConfig) -> Target:
    """The target with its facts about law 2, measured if the configuration asks for it."""
    if config.self_test:
        measure = target.measure if isinstance(target, RecurrentTarget | CroppedTarget) else partial(invisible, target)
        passed, reason = measure(config.page_tokens, config.prefill_chunk)
        ropes = getattr(target.parts.config.get_text_config(), "rope_parameters", None) or {}
        kinds = {kind.get("rope_type") for kind in (ropes, *ropes.values()) if isinstance(kind, dict)}  # one, or one of each kind of layer
        rope = next(iter(kinds & MOVING_ROPE), None)
        if rope and passed:
            passed, reason = False, f"no: {rope} rotary angles depend on the longest text of the pass"
        target.facts = replace(target.facts, invisible=passed, invisible_reason=reason)
    return target


def _fuse(model: Any, tier: int, linear: Linear | None, config: LoadConfig, ours: bool, reasons: dict[str, str]) -> bool:
    """Join the products of each block, where the blocks are known and attend through our pages."""
    able, why = can_fuse(model) if tier == 1 else (False, "the model keeps its own cache")
    reasons["forward pass"] = f"{'fused' if able else 'as transformers runs it'}: {why}"
    between = compiled_between(able, why, model.device, config.reproducible, reasons) if config.compile else None
    if able:
        fuse(model, linear, between, (lambda _: rows.RowsLayer) if ours else _kind_of)
        if ours:
            rows.check(layers_of(model)[0], config.page_tokens)
        if between is not None:
            compare(between, layers_of(model)[0], config.page_tokens)
    return able


def _kind_of(layer: Any) -> type[FusedLayer]:
    """What stands for a layer of a model that `can_fuse`."""
    if hasattr(layer, "altup"):
        return StreamsLayer
    return state_layer(layer) if has_state(layer) else LatentLayer if has_latent(looking_back(layer)) else FusedLayer


def _load_model(path: str | Path, config: LoadConfig, model_config: Any, dtype: torch.dtype, device: torch.device, ranks: Ranks | None,
                reasons: dict[str, str]) -> Any:
    told = quantised.method(getattr(model_config, "quantization_config", None))
    if not told and model_config.model_type in TEXT_ALONE:
        reasons["language model"] = f"the one inside of a {model_config.model_type}: images and sounds are not read"
        model_config = model_config.get_text_config()
    check_size(path, model_config, config.trust_remote_code)
    if told and told["quant_method"] == "mxfp4" and device.type != "cpu":
        told = None                                     # transformers has kernels for it
    try:
        if ranks:
            model, info = load_share(str(path), model_config, dtype, ranks)
        elif told:
            model, info, reasons["checkpoint"] = quantised.load(str(path), model_config, told, dtype, device, keeps(config, dtype, device),
                                                                config.trust_remote_code)
        else:
            model, info = auto_class(model_config).from_pretrained(
                str(path),
                config=model_config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise LoadError(f"{path}: the weights could not be loaded ({why_not(error, model_config)})") from error
    check_weights(path, model, info, ranks.count if ranks else 1, unread(model_config), reasons)
    return model


def _target(model: Any, tier: int, config: LoadConfig, slim: FusedPass | None, shared: dict[str, Any]) -> Target:
    if tier == 1:
        paged = PagedTarget(model, page_tokens=config.page_tokens, fused=slim, in_levels=config.cache_bits == 8, **shared)
        if paged.states:
            paged.facts.reasons["recurrent state"] = (
                f"{paged.states.bytes:,} bytes a sequence; what guesses add to it is kept apart; at the ends of pages up to "
                f"{paged.pool.most_marks} are kept for texts that begin alike")
        return paged
    if tier == 2:
        cropped = CroppedTarget(model, **shared)
        cropped.check()
        return cropped
    recurrent = RecurrentTarget(model, **shared)
    recurrent.facts.reasons["recurrent state"] = recurrent.check()
    return recurrent


def _device(config: LoadConfig, reasons: dict[str, str]) -> torch.device:
    if config.device is not None:
        try:
            device = torch.device(config.device)
        except RuntimeError as error:
            raise LoadError(f"device={config.device!r}: {first_line(error)}; expected cpu, cuda or cuda:N") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise LoadError(f"device={config.device!r}: this torch sees no CUDA device; use cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise LoadError(f"device={config.device!r}: this torch sees {torch.cuda.device_count()} CUDA devices; expected a lower number")
        try:
            torch.zeros(1, device=device).item()  # what a device without memory or a driver cannot do
        except (RuntimeError, AssertionError) as error:
            raise LoadError(f"device={config.device!r}: {first_line(error)}; expected cpu, cuda or cuda:N") from error
        reasons["device"] = f"{device}: as asked"
        return device
    found = torch.cuda.is_available()
    reasons["device"] = "cuda: a GPU is present" if found else "cpu: torch sees no GPU"
    return torch.device("cuda" if found else "cpu")


def _dtype(config: LoadConfig, saved: torch.dtype, device: torch.device, reasons: dict[str, str]) -> torch.dtype:
    if config.dtype is not None:
        reasons["dtype"] = f"{config.dtype}: as asked"
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[config.dtype]
    chosen, why = saved, "the checkpoint's own"
    if device.type == "cpu" and saved in HALVES:
        name = str(saved).removeprefix("torch.")
        # Without them products are rounded to bfloat16 for nothing, and attention stays emulated.
        if not multiplies_bfloat16():
            chosen, why = torch.float32, f"the checkpoint is {name}, for which this processor has no instructions"
        elif saved == torch.float16:
            chosen, why = torch.bfloat16, "the checkpoint is float16, which a CPU computes slowly"
    reasons["dtype"] = f"{str(chosen).removeprefix('torch.')}: {why}"
    return chosen


def _set_threads(config: LoadConfig, reasons: dict[str, str]) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
        reasons["threads"] = f"{config.threads}: as asked"
    else:
        reasons["threads"] = f"{torch.get_num_threads()}: torch's own choice (the cores, or OMP_NUM_THREADS)"


def _keep_memory(reasons: dict[str, str]) -> None:
    """Let glibc keep what is freed: at large vocabularies half of a round's sampling went into faulting the same pages in again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and libc.mallopt(M_MMAP_THRESHOLD, 32 << 20) and libc.mallopt(M_TRIM_THRESHOLD, 1 << 30):
        reasons["memory"] = "freed blocks stay with the process, so that large temporaries are not faulted in every round"


def _give_back() -> None:
    """What packing has freed, in pieces that glibc would keep: 1.5 GB beside 3 GB of experts of four bits."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _parts(model: Any, saved: torch.dtype) -> TargetParts:
    embed, output, text = model.get_input_embeddings(), model.get_output_embeddings(), model.config.get_text_config()
    counts = {text.num_hidden_layers, getattr(text, "num_layers", None)}    # LongCat's layers attend twice: its configuration has both
    for body in model.modules():
        for child in body.children():
            if isinstance(child, nn.ModuleList) and len(child) in counts:
                norm = next((getattr(body, name) for name in LAST_NORM if isinstance(getattr(body, name, None), nn.Module)), None)
                return TargetParts(embed, output, list(child), model.config, norm, saved)
    return TargetParts(embed, output, (), model.config, saved_as=saved)
