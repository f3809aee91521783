"""llama.cpp's server: flags. It reads GGUF files, and several drafters at once, the first that guesses winning."""

from __future__ import annotations

from collections.abc import Mapping

from ...drafters import Spec
from ...errors import OptionError
from ..plan import Exported, Plan, refuse, short_names

VERSION = "llama.cpp of September 2026"
ABLE = "none, ngram, model, eagle3, mtp, dflash, dspark, and chains of them"
TYPES = {"ngram": "ngram-simple", "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "dflash": "draft-dflash",
         "dspark": "draft-dspark"}


def export(plan: Plan) -> Exported:
    """The command line. Raises OptionError for a drafter that llama.cpp does not have."""
    files = short_names([plan.target, *(plan.path(part) for part in plan.parts if plan.k and _weighs(part))])
    start = ("llama-server", "-m", gguf(plan.target, files))
    if plan.name == "none" or plan.k == 0:
        return Exported("llamacpp", VERSION, (*start, "--spec-type", "none", *plan.extra))
    for part in plan.parts:
        if part.name not in TYPES:
            raise refuse(plan, "llama.cpp", ABLE, "its nearest is ngram (ngram-mod keeps past texts)" if part.name == "suffix" else "")
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: llama.cpp has no lossy rule; export match")
    flags = {"--spec-type": ",".join(dict.fromkeys(TYPES[part.name] for part in plan.parts))}
    notes = list(plan.general_notes())
    for part in plan.parts:
        for flag, value in _part(plan, part, files).items():
            if flags.setdefault(flag, value) != value:
                raise OptionError(f"llama.cpp reads {flag} once, and {plan.name} needs both {flags[flag]} and {value}; leave one of its "
                                  "parts out")
    if plan.tree:
        notes.append(f"tree {plan.tree}: chains only; the depth is kept")
    if plan.schedule is not None:
        notes.append("a depth by batch size cannot be expressed: the largest depth is written")
    if plan.rule in ("ratio", "block"):
        notes.append(f"rule {plan.rule}: llama.cpp keeps a guess that equals the target's own sample, which is exact")
    if any(part.name != "ngram" for part in plan.parts):
        notes.append("models and heads must be converted: convert_hf_to_gguf.py FOLDER (a head with --target-model-dir TARGET); "
                     "their .gguf files are named after the folders here" + _told(files))
    if any(part.name == "ngram" for part in plan.parts):
        notes.append("n-grams: one length N is looked up (our max) and M = K tokens are copied")
    return Exported("llamacpp", VERSION, (*start, *(word for pair in flags.items() for word in pair), *plan.extra), notes=tuple(notes))


def _weighs(part: Spec) -> bool:
    return part.name in TYPES and part.name != "ngram" and not (part.name == "mtp" and part.path is None)


def _part(plan: Plan, part: Spec, files: Mapping[str, str]) -> dict[str, str]:
    if part.name == "ngram":
        return {"--spec-ngram-simple-size-n": str(part.options.get("max", 4)), "--spec-ngram-simple-size-m": str(plan.k)}
    weights = {"--spec-draft-model": gguf(plan.path(part), files)} if _weighs(part) else {}
    return {**weights, "--spec-draft-n-max": str(plan.k)}


def gguf(place: str, files: Mapping[str, str]) -> str:
    """The converted file of a folder or hub id."""
    return place if place.endswith(".gguf") else files[place] + ".gguf"


def _told(files: Mapping[str, str]) -> str:
    """Which is which, where a folder's own name does not say it."""
    longer = [f"{place} is {name}.gguf" for place, name in files.items() if name != place.rstrip("/").rsplit("/", 1)[-1]]
    return ": " + ", ".join(longer) if longer else ""
