"""OpenVINO GenAI: a script. K and a confidence threshold exclude each other there; K is written."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import OptionError
from ..plan import Exported, Plan, compact, one_drafter, refuse, short_names

VERSION = "OpenVINO GenAI 2026.4"
ABLE = "none, ngram, model, eagle3"
SCRIPT = '''"""Generate with {drafter}, written for {version}: python run.py PROMPT [TOKENS]"""

import sys

import openvino_genai

pipeline = openvino_genai.LLMPipeline({target}, "CPU"{arguments})
config = openvino_genai.GenerationConfig()
config.max_new_tokens = int(sys.argv[2]) if sys.argv[2:] else 128
config.do_sample = False
{settings}print(pipeline.generate(sys.argv[1], config))
'''


def export(plan: Plan) -> Exported:
    """run.py. Raises OptionError for a drafter that OpenVINO does not have."""
    one_drafter(plan, "OpenVINO GenAI")
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: OpenVINO GenAI has no lossy rule; export match")
    arguments, settings, models = "", "", [plan.target]
    if plan.name in ("model", "eagle3") and plan.k:
        models.append(plan.path())
    folders = {place: f"{name}-openvino" for place, name in short_names(models).items()}
    if plan.name != "none" and plan.k:
        arguments, settings = _method(plan, folders)
    script = SCRIPT.format(drafter=plan.name, version=VERSION, target=compact(folders[plan.target]), arguments=arguments, settings=settings)
    notes = [*plan.general_notes(), "convert first: " + "; ".join(f"optimum-cli export openvino -m {m} {folders[m]}" for m in folders),
             "target and drafter must share the tokenizer"]
    if plan.tree and plan.name != "eagle3":
        notes.append(f"tree {plan.tree}: chains only with this drafter; the depth is kept")
    if plan.schedule is not None:
        notes.append("a depth by batch size cannot be expressed: the largest depth is written")
    if plan.name == "model" and plan.k:
        notes.append("greedy text is plain decoding's; at a temperature a draft model changes the law of the text (measured, 2026.4.1: "
                     "docs/peers.md), prompt lookup does not")
    if plan.extra:
        notes.append(f"arguments not written: {' '.join(plan.extra)}")
    return Exported("openvino", VERSION, files={"run.py": script}, notes=tuple(notes))


def _method(plan: Plan, folders: Mapping[str, str]) -> tuple[str, str]:
    if plan.name == "ngram":
        size = plan.drafter.options.get("max", 4)
        return ", prompt_lookup=True", f"config.num_assistant_tokens = {plan.k}\nconfig.max_ngram_size = {size}\n"
    if plan.name in ("model", "eagle3"):
        draft = f', draft_model=openvino_genai.draft_model({compact(folders[plan.path()])}, "CPU")'
        tree = f"config.branching_factor = 4\nconfig.tree_depth = {plan.k}\n" if plan.tree and plan.name == "eagle3" else ""
        tokens = plan.tree if tree else plan.k
        return draft, f"config.num_assistant_tokens = {tokens}\n{tree}"
    raise refuse(plan, "OpenVINO GenAI", ABLE)
