"""llama.cpp's server: flags. It reads GGUF files, and several drafters at once, the first that guesses winning."""

from __future__ import annotations

from ...drafters import Spec
from ...errors import OptionError
from ..plan import Exported, Plan, refuse

VERSION = "llama.cpp of September 2026"
ABLE = "none, ngram, model, eagle3, mtp, dflash, dspark, and chains of them"
TYPES = {"ngram": "ngram-simple", "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "dflash": "draft-dflash",
         "dspark": "draft-dspark"}


def export(plan: Plan) -> Exported:
    """The command line. Raises OptionError for a drafter that llama.cpp does not have."""
    start = ("llama-server", "-m", gguf(plan.target))
    if plan.name == "none" or plan.k == 0:
        return Exported("llamacpp", VERSION, (*start, "--spec-type", "none", *plan.extra))
    for part in plan.parts:
        if part.name not in TYPES:
            raise refuse(plan, "llama.cpp", ABLE, "its nearest is ngram (ngram-mod keeps past texts)" if part.name == "suffix" else "")
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: llama.cpp has no lossy rule; export match")
    flags = ["--spec-type", ",".join(TYPES[part.name] for part in plan.parts)]
    notes = list(plan.general_notes())
    for part in plan.parts:
        flags += _part(plan, part)
    if plan.tree:
        notes.append(f"tree {plan.tree}: chains only; the depth is kept")
    if plan.schedule is not None:
        notes.append("a depth by batch size cannot be expressed: the largest depth is written")
    if plan.rule in ("ratio", "block"):
        notes.append(f"rule {plan.rule}: llama.cpp keeps a guess that equals the target's own sample, which is exact")
    if any(part.name != "ngram" for part in plan.parts):
        notes.append("models and heads must be converted: convert_hf_to_gguf.py FOLDER (a head with --target-model-dir TARGET); "
                     "their .gguf files are named after the folders here")
    if any(part.name == "ngram" for part in plan.parts):
        notes.append("n-grams: one length N is looked up (our max) and M = K tokens are copied; min has no counterpart")
    return Exported("llamacpp", VERSION, (*start, *flags, *plan.extra), notes=tuple(notes))


def _part(plan: Plan, part: Spec) -> list[str]:
    if part.name == "ngram":
        return ["--spec-ngram-simple-size-n", str(part.options.get("max", 4)), "--spec-ngram-simple-size-m", str(plan.k)]
    weights = [] if part.name == "mtp" and part.path is None else ["--spec-draft-model", gguf(plan.path(part))]
    return [*weights, "--spec-draft-n-max", str(plan.k)]


def gguf(place: str) -> str:
    """The converted file of a folder or hub id."""
    return place if place.endswith(".gguf") else place.rstrip("/").rsplit("/", 1)[-1] + ".gguf"
