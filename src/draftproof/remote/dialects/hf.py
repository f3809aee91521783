"""transformers: assisted generation, as a script that runs. `num_assistant_tokens` counts only on the assistant's own config."""

from __future__ import annotations

from typing import Any

from ...errors import OptionError
from ..plan import Exported, Plan, compact, one_drafter, refuse, vocabularies_differ

VERSION = "transformers 5.24"
ABLE = "none, ngram, model, assistant, mtp, dflash, layer-skip"
SCRIPT = '''"""Generate with {drafter}, written for {version}: python run.py PROMPT [TOKENS]"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

target = {target}
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
options = {options}
{assistant}inputs = tokenizer(sys.argv[1], return_tensors="pt", return_token_type_ids=False).to(model.device)
with torch.inference_mode():
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=int(sys.argv[2]) if sys.argv[2:] else 128, **options)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
'''
FIXED = '''assistant.generation_config.num_assistant_tokens = {k}
assistant.generation_config.num_assistant_tokens_schedule = "constant"
assistant.generation_config.assistant_confidence_threshold = 0
'''
ASSISTANT = '''assistant = AutoModelForCausalLM.from_pretrained({path}, dtype="auto").eval()
options["assistant_model"] = assistant
''' + FIXED
TOKENIZERS = '''options |= {{"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained({path})}}
'''


def export(plan: Plan) -> Exported:
    """run.py. Raises OptionError for a drafter that transformers does not have."""
    one_drafter(plan, "transformers")
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: transformers' assistant_ensemble_weight is another; export match or ratio")
    options, assistant = _method(plan) if plan.name != "none" and plan.k else ({}, "")
    script = SCRIPT.format(drafter=plan.name, version=VERSION, target=compact(plan.target), options=repr(options), assistant=assistant)
    notes = [*plan.general_notes(depth=plan.name != "mtp"), "one sequence at a time; `transformers serve` has no flag for speculation"]
    if plan.tree:
        notes.append(f"tree {plan.tree}: chains only; the depth is kept")
    if plan.schedule is not None:
        notes.append("a depth by batch size cannot be expressed: assisted generation takes one sequence")
    if plan.rule == "block":
        notes.append("rule block has no counterpart: sampling verifies by `ratio`")
    if plan.extra:
        notes.append(f"arguments not written: {' '.join(plan.extra)}")
    return Exported("transformers", VERSION, files={"run.py": script}, notes=tuple(notes))


def _method(plan: Plan) -> tuple[dict[str, Any], str]:
    """Keyword arguments of `generate`, and the lines that make the assistant."""
    if plan.name == "ngram":
        return {"prompt_lookup_num_tokens": plan.k, "max_matching_ngram_size": plan.drafter.options.get("max", 4)}, ""
    if plan.name == "mtp":
        return {"use_mtp": True}, ""
    if plan.name == "layer-skip":
        return {"assistant_early_exit": plan.drafter.options["exit"]}, "assistant = model\n" + FIXED.format(k=plan.k)
    if plan.name == "dflash":
        return {"speculation_type": "dflash"}, ASSISTANT.format(path=compact(plan.path()), k=plan.k)
    if plan.name == "assistant":
        return {}, ASSISTANT.format(path=compact(plan.path()), k=plan.k)
    if plan.name == "model":
        path = compact(plan.path())
        more = TOKENIZERS.format(path=path) if vocabularies_differ(plan.target, plan.path()) else ""
        return {}, ASSISTANT.format(path=path, k=plan.k) + more
    raise refuse(plan, "transformers", ABLE)
