"""The options of `serve` that compare two ways to speculate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import click

from ..config import AbConfig, SpeculationConfig
from ..errors import OptionError
from . import options as o

MINE = {"arms": "--ab", "share": "--ab-share", "stages": "--ab-stages", "replay": "--ab-replay", "minimum": "--ab-min",
        "wait_s": "--ab-wait", "ratio": "--ab-ratio", "errors": "--ab-errors", "experiment": "--ab-name"}


class Share(click.ParamType[float]):
    """0.5 or 50%."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", str(value).strip())
        if found is None:
            self.fail(f"{value!r}: expected a share, as in 0.5 or 50%", param, ctx)
        return float(found[1]) / (100 if found[2] else 1)


class ShareOrShadow(click.ParamType["float | Literal['shadow']"]):
    name = "SHARE|shadow"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | Literal["shadow"]:
        return "shadow" if value == "shadow" else Share().convert(value, param, ctx)


class Shares(click.ParamType[tuple[float, ...]]):
    name = "SHARE,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        return value if isinstance(value, tuple) else tuple(Share().convert(part, param, ctx) for part in str(value).split(","))


ab_options = o.stacked(
    click.option("--ab", "arms", metavar="'A vs B'",
                 help="Compare two drafters on the traffic: a spec or off each, with depth=N|auto and rule=R behind it."),
    o.setting(AbConfig, "share", "--ab-share", type=ShareOrShadow(), metavar=ShareOrShadow.name,
              help="Of requests that A writes; shadow: none, it writes them again."),
    o.setting(AbConfig, "stages", "--ab-stages", type=Shares(), metavar="1%,10%,…",
              help="Shares of a roll-out of A, which goes back to B by itself."),
    o.setting(AbConfig, "replay", "--ab-replay", type=Share(),
              help="Of answers that both write again while nothing else runs.  [default: a tenth; all with shadow]"),
    o.setting(AbConfig, "minimum", "--ab-min", type=int, metavar="N", help="Requests of each in a stage."),
    o.setting(AbConfig, "wait_s", "--ab-wait", type=float, metavar="S", help="Seconds that a stage lasts at least."),
    o.setting(AbConfig, "ratio", "--ab-ratio", type=float, metavar="X", help="A's latencies over B's that turn A back."),
    o.setting(AbConfig, "errors", "--ab-errors", type=Share(), help="Failed requests beyond B's that turn A back."),
    o.setting(AbConfig, "experiment", "--ab-name", type=str, metavar="NAME", help="Part of the hash.  [default: what --ab says]"),
)


def ab_config(given: Mapping[str, Any]) -> AbConfig | None:
    """What was asked for, if anything was. Raises OptionError."""
    wanted = o.pick(AbConfig, {name: given.get(name) for name in MINE})
    if wanted and "arms" not in wanted:
        raise OptionError(f"{MINE[next(iter(wanted))]} without --ab: say what is compared, as in --ab 'ngram vs off'")
    if "stages" in wanted and "share" in wanted:
        raise OptionError("--ab-share with --ab-stages: the stages are the shares; leave one of them out")
    return AbConfig.of(wanted) if wanted else None


def with_drafter(given: dict[str, Any], ab: AbConfig | None) -> dict[str, Any]:
    """Where no --drafter was given, the first that is compared is the server's own."""
    return given if ab is None or given.get("drafter") is not None or not ab.drafters else {**given, "drafter": ab.drafters[0]}


def others_of(ab: AbConfig | None, drafter: str) -> list[str]:
    """What is to be loaded beside the server's own drafter. Raises OptionError or SpecError. Loads torch."""
    if ab is None:
        return []
    from ..serve.ab import arms_of

    arms_of(ab)
    for spec in ab.drafters:
        o.check_drafter(spec)
    return [spec for spec in ab.drafters if spec != drafter]


def for_remote(ab: AbConfig, wanted: SpeculationConfig, name: str, plain: bool) -> AbConfig:
    """The same for vLLM, which has one drafter, known to its engine by `name`, or none at a plain replica. Raises OptionError."""
    for side in ab.sides:
        if side.options:
            raise OptionError("--ab with --engine vllm: vLLM has no depth and no rule per request; name drafters only")
        if side.drafter not in ("none", wanted.drafter):
            raise OptionError(f"--ab names {side.drafter!r}: the vLLM servers run {wanted.drafter!r}; expected that, or off")
        if side.drafter == "none" and not plain:
            raise OptionError("--ab with off: off is a plain replica, and there is none; give --plain-replicas 1 (or --plain-url)")
    arms = " vs ".join("off" if side.drafter == "none" else name for side in ab.sides)
    return replace(ab, arms=arms, experiment=ab.experiment or ab.arms)
