"""What an engine is made of, and whether the parts fit each other."""

from __future__ import annotations

from os import PathLike, fspath

from ..config import LoadConfig, SpeculationConfig
from ..core.verify import allowed
from ..drafters.base import Drafter
from ..errors import OptionError
from ..models.target import Target
from .control import AutoDepth
from .costs import PassCosts
from .plans import Control, FixedDepth


def open_target(target: str | PathLike[str] | Target | None, load: LoadConfig) -> Target:
    """A target from a folder or hub id; None is the built-in demo model. Raises LoadError."""
    if target is not None and not isinstance(target, str | PathLike):
        return target
    from ..models.load import builtin, load_target

    return load_target(builtin("target") if target is None else fspath(target), load)


def spec_of(drafter: object) -> str:
    """The spec, or a drafter's name. Raises OptionError for anything else."""
    spec = drafter if isinstance(drafter, str) else getattr(drafter, "name", None)
    if not isinstance(spec, str):
        raise OptionError(f"drafter={drafter!r}: expected a spec such as 'ngram', a Drafter, or 'none'")
    return spec


def open_drafter(drafter: str | Drafter, target: Target, settings: SpeculationConfig, load: LoadConfig) -> Drafter | None:
    """The drafter of a spec, checked against the target, the rule and the shape of drafts; None is no drafter.

    Raises SpecError, LoadError, or OptionError naming the options that exclude each other.
    """
    if isinstance(drafter, str):
        from ..drafters import build

        drafter = build(drafter, target, settings.rule, load)
    if drafter.name == "none":
        return None
    allowed(settings.rule, "tree" if settings.tree else "chain", drafter.name)
    if settings.tree and not drafter.needs.tree:
        raise OptionError(f"tree={settings.tree}: drafter {drafter.name} proposes chains only; leave the tree out, or use another drafter")
    if settings.tree and not target.trees:
        why = target.facts.reasons.get("tier", "its cache cannot branch")
        raise OptionError(f"tree={settings.tree}: target {target.facts.name} scores chains only ({why}); leave the tree out")
    return drafter


def control_of(settings: SpeculationConfig, drafter: Drafter | None, passes: PassCosts, least_acceptance: float) -> Control:
    if settings.depth is not None:
        return FixedDepth(settings.depth)
    prices = drafter is not None and drafter.needs.prices
    return AutoDepth(settings.max_depth, settings.tree, parts=_parts(drafter), prices=prices, passes=passes, least=least_acceptance)


def _parts(drafter: Drafter | None) -> list[str]:
    """Names of a chain's parts that can be asked alone: those that only one of them has."""
    below = getattr(drafter, "parts", ())
    names = [name for part in below for name in (_parts(part) or [part.name])]
    return [name for name in names if names.count(name) == 1]


def check_depth(target: Target, settings: SpeculationConfig) -> None:
    """Raises OptionError if a draft of the fixed depth could never be scored."""
    nodes = max(settings.depth or 0, settings.tree or 0)
    if (settings.depth or 0) > target.context - 2:
        raise OptionError(f"depth={settings.depth}: the target's context of {target.context} leaves room for at most {target.context - 2}")
    if nodes and not target.fits(nodes + 2):
        name = "tree" if settings.tree else "depth"
        raise OptionError(f"{name}={nodes}: so many drafted tokens do not fit the cache; lower it, or raise cache_tokens (--cache-tokens)")


def draft_bytes(drafter: Drafter | None) -> int:
    """Bytes of a drafter's weights."""
    return _size(drafter, "weight_bytes")


def draft_cache_bytes(drafter: Drafter | None) -> int:
    """Bytes that each token of a text takes in the drafter's own cache."""
    return _size(drafter, "cache_bytes_per_token")


def _size(drafter: object, name: str) -> int:
    """A size that a drafter, or else the facts of its model, tells; of a chain the sum of its parts."""
    facts = getattr(getattr(drafter, "lm", None), "facts", None)
    return int(getattr(drafter, name, getattr(facts, name, 0))) + sum(_size(part, name) for part in getattr(drafter, "parts", ()))
