"""Arms over one loaded target, or over servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ..config import EngineConfig, LoadConfig
from ..engine.engine import Engine
from ..models.target import Target
from ..types import Rule
from .cells import OFF
from .endpoint import Endpoint
from .load import Local
from .sweep import Arm

NONE = "none"


def local_arms(stack: ExitStack, target: Target, drafters: Sequence[str], depths: Sequence[int | None], load: LoadConfig, *,
               tree: int | None = None, rule: Rule = "match", batch: int = 16, options: Mapping[str, Any] | None = None,
               greedy: bool = True) -> list[Arm]:
    """"off", then every drafter at every depth (None is auto), each in an engine of its own. off never has a drafter configured.

    Under `ratio` and `block` sampled texts are not comparable with off's, only their distribution is.
    """
    arms = [_local(stack, target, OFF, NONE, None, load, None, "match", batch, options, True)]
    for drafter in drafters:
        for depth in depths if drafter != NONE else ():
            name = drafter if len(depths) == 1 else f"{drafter}@{'auto' if depth is None else depth}"
            arms.append(_local(stack, target, name, drafter, depth, load, tree, rule, batch, options, greedy or rule == "match"))
    return arms


def _local(stack: ExitStack, target: Target, name: str, drafter: str, depth: int | None, load: LoadConfig, tree: int | None, rule: Rule,
           batch: int, options: Mapping[str, Any] | None, comparable: bool) -> Arm:
    engine = stack.enter_context(Engine(target, drafter, "auto" if depth is None else depth, tree=tree, rule=rule, load=load,
                                        config=EngineConfig(max_batch=batch, trace="summary")))
    shown = "0" if drafter == NONE else "auto" if depth is None else str(depth)
    client = Local(engine, target.tokenizer, target.context, dict(options or {}))
    return Arm(name, drafter, shown, client, comparable)


def url_arms(stack: ExitStack, urls: Sequence[str], model: str | None, api_key: str | None, drafters: Sequence[str],
             depths: Sequence[int | None], extra: Mapping[str, Any], greedy: bool) -> list[Arm]:
    """One arm per URL, written NAME=URL or URL. With drafters, and one URL: one arm each, asked for in the request's `speculation`,
    which Draftproof's server understands, with "off" in front. Texts are compared at temperature 0 only, or between such arms."""

    def endpoint(url: str, more: Mapping[str, Any]) -> Endpoint:
        found = Endpoint(url, model, api_key, {**extra, **more})
        stack.callback(found.close)
        return found

    if drafters:
        url = urls[0].partition("=")[2] if _named(urls[0]) else urls[0]
        arms = [Arm(OFF, NONE, "0", endpoint(url, {"speculation": {"drafter": NONE}}))]
        for drafter in (d for d in drafters if d != NONE):
            for depth in depths:
                shown = "auto" if depth is None else str(depth)
                name = drafter if len(depths) == 1 else f"{drafter}@{shown}"
                wish = {"speculation": {"drafter": drafter, **({} if depth is None else {"depth": depth})}}
                arms.append(Arm(name, drafter, shown, endpoint(url, wish)))
        return arms
    arms = []
    for i, text in enumerate(urls):
        name, _, url = text.partition("=") if _named(text) else (f"endpoint{i + 1 if len(urls) > 1 else ''}", "", text)
        arms.append(Arm(name, NONE if name == OFF else name, "0" if name == OFF else "server's", endpoint(url, {}), greedy))
    return sorted(arms, key=lambda arm: arm.name != OFF)


def _named(text: str) -> bool:
    return "=" in text.partition("://")[0]
