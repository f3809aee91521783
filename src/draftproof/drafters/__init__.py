"""Drafters by name. A spec is `name`, `name:key=value,…` or `name:PATH`; `A+B` is a chain.

Adding one: a file with a class like the others, a line here, and a parameter in tests/contract/test_drafters.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import LoadConfig
from ..errors import SpecError
from ..models.target import Target
from ..types import Rule
from .assistant import AssistantDrafter
from .base import Drafter, Named, Site
from .chain import chained
from .custom import CustomDrafter, check_place
from .dflash import DFlashDrafter
from .dflash2 import DFlash2Drafter
from .domino import DominoDrafter
from .dspark import DSparkDrafter
from .eagle import Eagle2Drafter, EagleDrafter
from .eagle3 import Eagle3Drafter
from .fixed import NoDrafter
from .grammar import GrammarDrafter
from .hydra import HydraDrafter
from .layer_skip import LayerSkipDrafter
from .medusa import MedusaDrafter
from .mlp import MlpDrafter
from .model import ModelDrafter
from .mtp import MtpDrafter
from .ngram import NgramDrafter
from .pard import PardDrafter
from .peagle import PEagleDrafter
from .prediction import PredictionDrafter
from .recycle import RecycleDrafter
from .suffix import SuffixDrafter
from .xpress import XPressDrafter

DRAFTERS: Mapping[str, type[Named]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
    "prediction": PredictionDrafter,
    "grammar": GrammarDrafter,
    "model": ModelDrafter,
    "eagle": EagleDrafter,
    "eagle2": Eagle2Drafter,
    "eagle3": Eagle3Drafter,
    "peagle": PEagleDrafter,
    "assistant": AssistantDrafter,
    "layer-skip": LayerSkipDrafter,
    "medusa": MedusaDrafter,
    "hydra": HydraDrafter,
    "mlp": MlpDrafter,
    "mtp": MtpDrafter,
    "pard": PardDrafter,
    "dflash": DFlashDrafter,
    "dflash2": DFlash2Drafter,
    "dspark": DSparkDrafter,
    "xpress": XPressDrafter,
    "domino": DominoDrafter,
    "custom": CustomDrafter,
}

REMEMBER = frozenset({"suffix", "recycle"})       # what these say depends on earlier texts
BETWEEN = re.compile(r"\+(?=(?:" + "|".join(DRAFTERS) + r")(?:[:+]|$))")     # other pluses are of a path


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed drafter spec. path is None where none was given; options are checked against the drafter's own keys. A chain
    has the names of its parts, joined by +, and the specs of its parts."""

    name: str
    path: str | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Spec, ...] = ()


def parse_spec(spec: str) -> Spec:
    """Read a drafter spec. Raises SpecError naming what was found, what is known, and what to write instead."""
    parts = tuple(_parse_one(part) for part in _chain(spec.strip()))
    if len(parts) == 1:
        return parts[0]
    if any(part.name == "none" for part in parts):
        raise SpecError(f"drafter spec {spec!r}: none in a chain; expected drafters that guess: leave it out")
    return Spec("+".join(part.name for part in parts), parts=parts)


def _chain(spec: str) -> list[str]:
    """The parts of a chain: a plus before the name of a drafter is between two, unless it is of a folder's name (the longest there is)."""
    ends = [*(plus.start() for plus in BETWEEN.finditer(spec)), len(spec)]
    end = next((end for end in reversed(ends) if _is_folder(spec[:end])), ends[0])
    return [spec[:end], *(_chain(spec[end + 1:]) if end < len(spec) else ())]


def _is_folder(part: str) -> bool:
    """Whether a part's path is there; False also for what cannot be a path."""
    name, _, path = part.partition(":")
    return name in DRAFTERS and DRAFTERS[name].takes_path and os.path.isdir(os.path.expanduser(path))


def _parse_one(spec: str) -> Spec:
    name, colon, argument = spec.strip().partition(":")
    if name not in DRAFTERS:
        raise SpecError(f"unknown drafter {name!r} in spec {spec!r}; known: {', '.join(DRAFTERS)}")
    kind = DRAFTERS[name]
    if colon and not argument:
        raise SpecError(f"drafter spec {spec!r}: nothing after the colon; expected {_form(name, kind)}")
    if kind is CustomDrafter:
        check_place(argument or None)
    if not argument:
        return Spec(name)
    if kind.takes_path:
        return Spec(name, path=os.path.expanduser(argument))
    options: dict[str, int] = {}
    for part in argument.split(","):
        key, value = _option(name, kind, part)
        if key in options:
            raise SpecError(f"drafter spec {spec!r}: option {key} stands there twice; expected it once")
        options[key] = value
    kind.check(options)
    return Spec(name, options=options)


def _option(name: str, kind: type[Named], part: str) -> tuple[str, int]:
    key, _, value = (piece.strip() for piece in part.partition("="))
    if key not in kind.keys:
        known = ", ".join(kind.keys) or "it takes none"
        raise SpecError(f"unknown option {key!r} of drafter {name}; known: {known}")
    low, high = kind.keys[key]
    if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
        raise SpecError(f"option {key}={value!r} of drafter {name}: expected an integer from {low} to {high}")
    return key, int(value)


def _form(name: str, kind: type[Named]) -> str:
    if kind.takes_path:
        return f"{name}:PATH"
    return f"{name}:" + ",".join(f"{key}=N" for key in kind.keys) if kind.keys else name


def build(spec: str, target: Target, rule: Rule, load_config: LoadConfig) -> Drafter:
    """The drafter that a spec names, ready for `target`. Raises SpecError, LoadError, or VocabularyMismatch."""
    parsed, site = parse_spec(spec), Site(target, rule, load_config)
    return chained([DRAFTERS[part.name].from_spec(part.path, part.options, site) for part in parsed.parts or (parsed,)])
