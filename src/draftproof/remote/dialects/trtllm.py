"""TensorRT-LLM: `speculative_config` in a YAML file for the PyTorch backend. Its K counts drafted tokens, as ours does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import OptionError
from ..plan import Exported, Plan, compact, config_of, one_drafter, refuse

VERSION = "TensorRT-LLM 1.4"
ABLE = "none, ngram, suffix, model, pard, eagle3, mtp, dflash, dspark"
TYPES = {"model": "Draft_Target", "pard": "PARD", "eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}
BRANCHES = 4


def export(plan: Plan) -> Exported:
    """spec.yaml and the command. Raises OptionError for a drafter that TensorRT-LLM does not have."""
    one_drafter(plan, "TensorRT-LLM")
    start = ("trtllm-serve", plan.target)
    if plan.name == "none" or plan.k == 0:
        return Exported("trtllm", VERSION, (*start, *plan.extra))
    config = _method(plan) | {"max_draft_len": plan.k}
    notes = [*plan.general_notes(), "requests for logprobs are refused while speculating; no pipeline parallelism"]
    if plan.schedule is not None:
        ranges = plan.schedule.ranges(plan.schedule.steps[-1][0])
        config["draft_len_schedule"] = {end: depth for _, end, depth in (ranges[:-1] if ranges[-1][2] == 0 else ranges)}
        if ranges[-1][2]:
            notes.append(f"beyond the schedule's last batch size ({ranges[-1][1]}) TensorRT-LLM does not speculate")
    if plan.tree and plan.name in ("eagle3", "mtp"):
        config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": BRANCHES, "max_total_draft_tokens": plan.tree}
        notes.append(f"a tree of {plan.tree} nodes: the children per node are fixed as well, {BRANCHES} is written")
    elif plan.tree:
        notes.append(f"tree {plan.tree}: chains only with this drafter; the depth is kept")
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: TensorRT-LLM's relaxed acceptance is another; export match, ratio or block")
    if plan.rule == "block":
        notes.append("rule block has no counterpart: `ratio` (use_rejection_sampling) is written")
    if plan.name not in ("ngram", "suffix"):
        config["use_rejection_sampling"] = True
    content = "speculative_config:\n" + _yaml(config, 2)
    return Exported("trtllm", VERSION, (*start, "--config", "spec.yaml", *plan.extra), {"spec.yaml": content}, tuple(notes))


def _method(plan: Plan) -> dict[str, Any]:
    name, options = plan.name, plan.drafter.options
    if name == "ngram":
        return {"decoding_type": "NGram", "max_matching_ngram_size": options.get("max", 4), "is_keep_all": True,
                "is_use_oldest": False, "is_public_pool": False}
    if name == "suffix":
        return {"decoding_type": "SA", "max_matching_ngram_size": -1, "enable_global_pool": True}
    if name == "mtp":
        return {"decoding_type": "MTP"} | ({"speculative_model": plan.drafter.path} if plan.drafter.path else {})
    if name not in TYPES:
        raise refuse(plan, "TensorRT-LLM", ABLE, "Medusa runs only in its old TensorRT backend" if name == "medusa" else "")
    found: dict[str, Any] = {"decoding_type": TYPES[name], "speculative_model": plan.path()}
    if name == "eagle3":
        taps = _taps(plan.path())
        if taps:
            found["eagle3_layers_to_capture"] = taps
    return found


def _taps(path: str) -> list[int]:
    """0-based ids of layers whose output is read, as TensorRT-LLM counts; vLLM's count layers entered."""
    config = config_of(path)
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    entered = config.get("eagle_aux_hidden_state_layer_ids")
    return list(nested) if nested else [layer - 1 for layer in entered or ()]


def _yaml(values: Mapping[Any, Any], indent: int) -> str:
    """Block style; scalars and lists as JSON, which YAML contains."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(" " * indent + f"{key}:\n" + _yaml(value, indent + 2))
        else:
            lines.append(" " * indent + f"{key}: {compact(value)}\n")
    return "".join(lines)
