"""Drafters by name. A spec is `name`, `name:key=value,…` or `name:PATH`; `A+B` is a chain.

Adding one: a file with a class like the others, a line here, and a parameter in tests/contract/test_drafters.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import LoadConfig
from ..errors import SpecError
from ..models.target import Target
from ..types import Rule
from .base import Drafter, Named, Site
from .fixed import NoDrafter
from .model import ModelDrafter
from .ngram import NgramDrafter

DRAFTERS: Mapping[str, type[Named]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "model": ModelDrafter,
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed drafter spec. path is None where none was given; options are checked against the drafter's own keys."""

    name: str
    path: str | None = None
    options: Mapping[str, int] = field(default_factory=dict)


def parse_spec(spec: str) -> Spec:
    """Read a drafter spec. Raises SpecError naming what was found, what is known, and what to write instead."""
    chain = re.split(r"\+(?=(?:" + "|".join(DRAFTERS) + r")(?:[:+]|$))", spec)     # a path may hold a plus
    if len(chain) > 1:
        raise SpecError(f"drafter spec {spec!r}: chains of drafters are not available in this version; name one of: {', '.join(chain)}")
    name, colon, argument = spec.strip().partition(":")
    if name not in DRAFTERS:
        raise SpecError(f"unknown drafter {name!r} in spec {spec!r}; known: {', '.join(DRAFTERS)}")
    kind = DRAFTERS[name]
    if colon and not argument:
        raise SpecError(f"drafter spec {spec!r}: nothing after the colon; expected {_form(name, kind)}")
    if not argument:
        return Spec(name)
    if kind.takes_path:
        return Spec(name, path=argument)
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
    parsed = parse_spec(spec)
    return DRAFTERS[parsed.name].from_spec(parsed.path, parsed.options, Site(target, rule, load_config))
